"""The usable part of a model's window and the levels of filling it, with the settings both stand on.

Arithmetic only: nothing here knows a run.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Final, Literal, NamedTuple

from msgspec import Struct

from protocol.identifiers import MAX_INTEGER

Level = Literal["ok", "checkpoint", "compact", "critical", "overflow"]
LEVELS: Final[tuple[Level, ...]] = ("ok", "checkpoint", "compact", "critical", "overflow")
_RANK: Final[dict[Level, int]] = {level: rank for rank, level in enumerate(LEVELS)}

HYSTERESIS: Final = 0.05
DEFAULT_OUTPUT: Final = 8_192


class BudgetSettings(Struct, frozen=True, kw_only=True, cache_hash=True):
    """Thresholds as shares of the usable window, sizes in tokens, ``min_gain`` as a share of what is used.

    ``rebuild_every`` 0 means never; ``fallback``: whether a deterministic summary is made once the configured
    summariser failed ``max_attempts`` times.
    """

    checkpoint_at: float = 0.65
    compact_at: float = 0.75
    critical_at: float = 0.90
    reserve_tokens: int = 8_000
    keep_recent_tokens: int = 20_000
    packet_tokens: int = 8_000
    user_tokens: int = 4_000
    result_tokens: int = 2_000
    min_gain: float = 0.30
    rebuild_every: int = 5
    max_attempts: int = 3
    fallback: bool = True


def usable(window: int, max_output: int | None, settings: BudgetSettings) -> int:
    """Window − min(max output or 8,192, window/4) − min(reserve, window/10); 0 while no window is known."""
    output = max_output if max_output else DEFAULT_OUTPUT
    return max(0, window - min(output, window // 4) - min(settings.reserve_tokens, window // 10))


class Gauge(NamedTuple):
    """What one window comes to under one set of settings."""

    usable: int
    quiet: int
    """A level of "ok" stays "ok" below so many tokens: exactly where ``level_of`` says so."""


@lru_cache(maxsize=256)
def gauge(window: int, max_output: int | None, settings: BudgetSettings) -> Gauge:
    """Worked out once for each model: it is asked for at every event."""
    room = usable(window, max_output, settings)
    if room <= 0:
        return Gauge(room, MAX_INTEGER + 1)
    least = min(settings.checkpoint_at, settings.compact_at, settings.critical_at)
    quiet = ceil(least * room)
    # The product is rounded, and what counts is the quotient.
    while quiet / room < least:
        quiet += 1
    while (quiet - 1) / room >= least:
        quiet -= 1
    return Gauge(room, quiet)


def level_of(used: int, usable: int, previous: Level, settings: BudgetSettings) -> Level:
    """The level for this fill; several steps at once are normal, and one is left 0.05 below its threshold."""
    if usable <= 0:
        return "ok"
    ratio = used / usable
    held = _RANK[previous]
    bounds = (0.0, settings.checkpoint_at, settings.compact_at, settings.critical_at, 1.0)
    entered = max((rank for rank, bound in enumerate(bounds) if ratio >= bound), default=0)
    while held > entered and ratio <= bounds[held] - HYSTERESIS:
        held -= 1
    return LEVELS[max(entered, held)]


def at_least(level: Level, other: Level) -> bool:
    """Whether ``level`` is ``other`` or higher."""
    return _RANK[level] >= _RANK[other]
