"""Where a run's history may be cut.

An exchange is never torn, an undeclared gap never covered, the recent part never touched. Everything
follows from the messages given: no clock, no ledger, no learnt factor; equal input gives equal coverage.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Literal

from msgspec import Struct

from protocol.events import BoundaryMarked
from sidecar.core.exchanges import Exchange, TailItem, event_at, exchanges, stable_positions

__all__ = [
    "Cut",
    "Exchange",
    "NoCut",
    "TailItem",
    "choose_cut",
    "event_at",
    "exchanges",
    "recent_from",
    "stable_positions",
]

_RECENT_SLACK = 2
"""How many times the recent part a tail may hold before a smaller one is preferred."""
_MARKED_SHARE = 0.8
"""Share of the longest possible range that a cut at a marked boundary must still cover."""


class Cut(Struct, frozen=True, kw_only=True):
    """Cover up to ``through``. ``tokens``: estimate of the range; ``kept``: of what stays verbatim."""

    through: int
    event_id: str | None
    tokens: int
    kept: int
    reason: Literal["recent", "marked", "last_exchange"]


class NoCut(Struct, frozen=True, kw_only=True):
    """Why there is no place to cut now."""

    reason: Literal["no_boundary", "open_gap", "little_new"]


def choose_cut(
    items: Sequence[TailItem],
    *,
    keep_recent: int,
    critical: bool = False,
    open_calls: Collection[str] | None = None,
    open_gap_from: int | None = None,
) -> Cut | NoCut:
    """The cut that covers most and leaves the recent part verbatim; before the oldest open call.

    ``keep_recent`` tokens stay, at least the last exchange; where one huge exchange would make the rest more
    than twice that, the tail may be shorter. A marked boundary is preferred unless ``critical`` or it costs
    more than a fifth of the range.
    """
    spans = exchanges(items, open_calls)
    if not spans:
        return NoCut(reason="little_new")
    kept_after = _kept_after(spans)
    last_talk = max((index for index, span in enumerate(spans) if span.talk), default=len(spans) - 1)
    candidates = [
        index
        for index, span in enumerate(spans)
        if index < last_talk and not span.open_calls and (open_gap_from is None or span.end < open_gap_from)
    ]
    if not candidates:
        held = open_gap_from is not None and any(
            index < last_talk and not span.open_calls for index, span in enumerate(spans)
        )
        if held:
            return NoCut(reason="open_gap")
        blocked = any(span.open_calls for span in spans) or last_talk > 0
        return NoCut(reason="no_boundary" if blocked or spans[0].end > spans[0].start else "little_new")
    roomy = [index for index in candidates if kept_after[index] >= keep_recent]
    if roomy and kept_after[roomy[-1]] <= _RECENT_SLACK * max(keep_recent, 1):
        chosen, reason = roomy[-1], "recent"
    else:
        fitting = [index for index in candidates if kept_after[index] <= keep_recent]
        if fitting:
            chosen, reason = fitting[0], "last_exchange"
        elif roomy:
            chosen, reason = roomy[-1], "recent"
        else:
            chosen, reason = candidates[-1], "last_exchange"
    total = sum(span.tokens for span in spans)
    if total <= keep_recent and not roomy:
        return NoCut(reason="little_new")
    covered = total - kept_after[chosen]
    if not critical:
        marks = {item.position for item in items if isinstance(item.event, BoundaryMarked)}
        for index in reversed([index for index in candidates if index <= chosen]):
            if total - kept_after[index] < _MARKED_SHARE * covered:
                break
            if spans[index].end in marks:
                chosen, reason = index, "marked"
                break
    through = spans[chosen].end
    return Cut(
        through=through,
        event_id=event_at(items, through),
        tokens=total - kept_after[chosen],
        kept=kept_after[chosen],
        reason="marked" if reason == "marked" else "recent" if reason == "recent" else "last_exchange",
    )


def recent_from(items: Sequence[TailItem], keep_recent: int, *, inside: bool = False) -> int:
    """First position of the recent part: the exchanges that fit into ``keep_recent``, at least the last one.

    ``inside``: only ``keep_recent`` tokens, wherever in an exchange they begin, at least the newest item.
    """
    if inside:
        return _recent_tokens(items, keep_recent)
    spans = exchanges(items)
    if not spans:
        return 0
    kept_after = _kept_after(spans)
    last_talk = max((index for index, span in enumerate(spans) if span.talk), default=len(spans) - 1)
    for index, span in enumerate(spans[: last_talk + 1]):
        if kept_after[index] + span.tokens <= keep_recent:
            return span.start
    return spans[last_talk].start


def _recent_tokens(items: Sequence[TailItem], keep_recent: int) -> int:
    kept = 0
    start = items[-1].position + 1 if items else 0
    for item in reversed(items):
        if kept and kept + item.tokens > keep_recent:
            break
        kept += item.tokens
        start = item.position
    return start


def _kept_after(spans: Sequence[Exchange]) -> list[int]:
    """Tokens behind each exchange."""
    kept = [0] * len(spans)
    for index, following in reversed(list(pairwise(range(len(spans))))):
        kept[index] = kept[following] + spans[following].tokens
    return kept
