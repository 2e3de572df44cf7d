"""Whether the daemon is alive, ready and started, and why not.

Others report facts here; this module only weighs them by the clock. Liveness looks at nothing outside the
process: a broker that is away must never get us restarted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import anyio
from msgspec import Struct

CONDITIONS: Final = ("storage", "nats", "lanes", "recovery", "drain")
"""What readiness depends on. All but `drain` begin as not met."""

TOLERANCES: Final[Mapping[str, float]] = {"nats": 20.0}
"""Seconds a condition may be broken before readiness goes, once it has been met. Others: at once."""

BEAT_BOUND_SECONDS: Final = 30.0
"""A heartbeat older than this means its task is stuck."""


class Readiness(Struct, frozen=True):
    """`reasons`: why not ready, by condition. `tolerated`: broken, but not for long enough to count."""

    ready: bool
    reasons: dict[str, str]
    tolerated: dict[str, str]


class Liveness(Struct, frozen=True):
    """`stuck`: heartbeat names with their age in seconds."""

    alive: bool
    stuck: dict[str, float]


class _Condition(Struct):
    ok: bool
    reason: str
    since: float
    met_before: bool = False


class Health:
    """Conditions and heartbeats. `clock` is monotonic, in seconds."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        tolerances: Mapping[str, float] = TOLERANCES,
        beat_bound: float = BEAT_BOUND_SECONDS,
    ) -> None:
        self._clock = clock
        self._tolerances = dict(tolerances)
        self._bound = beat_bound
        now = clock()
        self._conditions = {name: _Condition(name == "drain", "not yet", now) for name in CONDITIONS}
        self._beats: dict[str, float] = {}
        self._started = False

    def set(self, name: str, ok: bool, reason: str = "") -> None:
        """Report a condition of `CONDITIONS`; the time it broke is kept while it stays broken. Idempotent.

        Raises `KeyError` for another name. The first `recovery` that is met completes the start-up.
        """
        condition = self._conditions[name]
        if condition.ok != ok:
            condition.since = self._clock()
        condition.met_before |= condition.ok or ok
        condition.ok = ok
        condition.reason = reason
        if name == "recovery" and ok:
            self._started = True

    def beat(self, name: str) -> None:
        """A sign of life of a task; it is watched from its first one on."""
        self._beats[name] = self._clock()

    def unwatch(self, name: str) -> None:
        """The task has ended as it should; its silence means nothing any more."""
        self._beats.pop(name, None)

    def ready(self) -> Readiness:
        """Whether work may be expected of us now."""
        now = self._clock()
        reasons: dict[str, str] = {}
        tolerated: dict[str, str] = {}
        for name, condition in self._conditions.items():
            if condition.ok:
                continue
            patience = self._tolerances.get(name, 0.0) if condition.met_before else 0.0
            if now - condition.since < patience:
                tolerated[name] = condition.reason
            else:
                reasons[name] = condition.reason
        return Readiness(not reasons, reasons, tolerated)

    def alive(self) -> Liveness:
        """Whether every watched task gave a sign of life within the bound."""
        now = self._clock()
        stuck = {name: round(now - at, 1) for name, at in self._beats.items() if now - at > self._bound}
        return Liveness(not stuck, stuck)

    def started(self) -> bool:
        """Whether the first recovery was completed; it stays so."""
        return self._started


class _Observes(Protocol):
    def observe(self, amount: float) -> None: ...


class _LagMetrics(Protocol):
    @property
    def loop_lag_seconds(self) -> _Observes: ...


async def loop_monitor(
    health: Health,
    metrics: _LagMetrics,
    *,
    interval: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Beat as `loop` every `interval` seconds and measure how late the loop wakes us; until cancelled."""
    while True:
        health.beat("loop")
        asked = clock()
        await anyio.sleep(interval)
        metrics.loop_lag_seconds.observe(max(0.0, clock() - asked - interval))
