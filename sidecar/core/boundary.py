"""Where a run's history may be cut.

An exchange is never torn, an undeclared gap never covered, the recent part never touched. Everything
follows from the messages given: no clock, no ledger, no learnt factor; equal input gives equal coverage.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Literal

from msgspec import Struct

from sidecar.core.exchanges import Exchange, Spans, TailItem
from sidecar.core.tail import Tail, Tailed, tail_of

__all__ = [
    "Cut",
    "Exchange",
    "NoCut",
    "TailItem",
    "choose_cut",
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


def exchanges(items: Tailed, open_calls: Collection[str] | None = None) -> list[Exchange]:
    """The exchanges of ascending items, merged where they interleave; together they hold every position.

    ``open_calls``: event ids of the calls that are open by the ledger; any other call without a result was
    abandoned. None: only a new session abandons calls. O(items).
    """
    spans = _spans(tail_of(items, open_calls), open_calls)
    return [spans.exchange(number) for number in range(len(spans))]


def stable_positions(
    items: Tailed, open_gap_from: int | None, open_calls: Collection[str] | None = None
) -> list[int]:
    """Positions up to which history may be covered, ascending.

    ``open_gap_from``: position of the first message behind an undeclared gap; none from there on is stable.
    """
    return [
        exchange.end
        for exchange in exchanges(items, open_calls)
        if not exchange.open_calls and (open_gap_from is None or exchange.end < open_gap_from)
    ]


def choose_cut(
    items: Tailed,
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
    tail = tail_of(items, open_calls)
    spans = _spans(tail, open_calls)
    if not len(spans):
        return NoCut(reason="little_new")
    closed = array("q", (n for n in range(spans.last_talk) if n not in spans.open_calls))
    candidates = array("q", (n for n in closed if open_gap_from is None or spans.ends[n] < open_gap_from))
    if not candidates:
        if open_gap_from is not None and closed:
            return NoCut(reason="open_gap")
        blocked = bool(spans.open_calls) or spans.last_talk > 0
        return NoCut(reason="no_boundary" if blocked or spans.ends[0] > spans.starts[0] else "little_new")
    # What is kept shrinks from candidate to candidate.
    roomy = max((n for n in candidates if spans.kept[n] >= keep_recent), default=None)
    if tail.tokens <= keep_recent and roomy is None:
        return NoCut(reason="little_new")
    reason: Literal["recent", "marked", "last_exchange"] = "recent"
    if roomy is not None and spans.kept[roomy] <= _RECENT_SLACK * max(keep_recent, 1):
        chosen = roomy
    else:
        fitting = next((n for n in candidates if spans.kept[n] <= keep_recent), None)
        if fitting is not None:
            chosen, reason = fitting, "last_exchange"
        elif roomy is not None:
            chosen = roomy
        else:
            chosen, reason = candidates[-1], "last_exchange"
    if not critical:
        covered = tail.tokens - spans.kept[chosen]
        for n in reversed(candidates):
            if n > chosen:
                continue
            if tail.tokens - spans.kept[n] < _MARKED_SHARE * covered:
                break
            if tail.marked(spans.ends[n]):
                chosen, reason = n, "marked"
                break
    through = spans.ends[chosen]
    return Cut(
        through=through,
        event_id=tail.event_at(through),
        tokens=tail.tokens - spans.kept[chosen],
        kept=spans.kept[chosen],
        reason=reason,
    )


def recent_from(items: Tailed, keep_recent: int, *, inside: bool = False) -> int:
    """First position of the recent part: the exchanges that fit into ``keep_recent``, at least the last one.

    ``inside``: only ``keep_recent`` tokens, wherever in an exchange they begin, at least the newest item.
    """
    tail = tail_of(items)
    if inside:
        return tail.recent(keep_recent)
    spans = _spans(tail, None)
    if not len(spans):
        return 0
    last_talk = spans.last_talk
    for n in range(last_talk + 1):
        if spans.kept[n] + spans.tokens[n] <= keep_recent:
            return spans.starts[n]
    return spans.starts[last_talk]


def _spans(tail: Tail, open_calls: Collection[str] | None) -> Spans:
    return tail.spans(known=open_calls is not None)
