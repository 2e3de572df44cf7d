"""What planning has to know of a tail, gathered message by message: no message is kept.

Columns of numbers instead of decoded events, so that a history of any length can be planned over in one pass that
holds one page of it at a time. It gathers only; what follows from it is ``boundary``'s and ``planning``'s.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence

from msgspec import Struct

from protocol.content import ImagePart
from protocol.events import (
    ApprovalRequested,
    BoundaryMarked,
    DecisionMade,
    Event,
    EvidenceRecorded,
    Message,
    OperationReconciled,
    RunResumed,
    RunStarted,
    StepChanged,
    ToolReturned,
)
from protocol.identifiers import parse_ref
from sidecar.core.exchanges import Collector, Spans, TailItem
from sidecar.core.references import Cleared, clear
from sidecar.core.state import Gap


class Clearing(Struct, frozen=True, kw_only=True):
    """Results behind position ``after`` of more than ``over`` tokens: their references are made on the way."""

    after: int
    over: int


class Tail:
    """The messages of ``event`` and ``authority`` after the old boundary, ascending, as figures.

    ``open_calls``: event ids of the calls that are open by the ledger; None: only a new session abandons calls.
    ``gaps``: the undeclared ones. ``clearing``: None makes no references. Memory is some 150 bytes a message,
    whatever its size, and what a reference takes.
    """

    def __init__(
        self,
        open_calls: Collection[str] | None = None,
        gaps: Iterable[Gap] = (),
        clearing: Clearing | None = None,
    ) -> None:
        self._clearing = clearing
        self._cleared: list[Cleared] = []
        self._known = None if open_calls is None else frozenset(open_calls)
        self._strict = Collector(self._known)
        self._plain = self._strict
        """The same with calls abandoned at a new session; a collector of its own from the first one on."""
        self._session: str | None = None
        self._positions = array("q")
        self._totals = array("q", [0])
        """Tokens before each message, and after the last."""
        self._results = array("q")
        """Which messages are results, by number."""
        self._ids = bytearray()
        self._id_ends = array("Q", [0])
        """Ids of the messages, those of the authority channel empty."""
        self._marks: set[int] = set()
        self._artifacts: dict[str, int] = {}
        """Named by a ref → position at which it first was."""
        self._gaps = [(gap.channel, gap.session, gap.through) for gap in gaps]
        self._behind: dict[int, int] = {}

    def extend(self, items: Iterable[TailItem]) -> None:
        """Take these messages in; they come after all taken before."""
        for item in items:
            self._take(item)

    def __len__(self) -> int:
        return len(self._positions)

    @property
    def first(self) -> int:
        """Position of the first message; 1 if there is none."""
        return self._positions[0] if self._positions else 1

    @property
    def last(self) -> int:
        """Position of the last message; 0 if there is none."""
        return self._positions[-1] if self._positions else 0

    @property
    def tokens(self) -> int:
        """All messages together."""
        return self._totals[-1]

    def through(self, position: int) -> int:
        """Tokens of the messages up to a position."""
        return self._totals[bisect_right(self._positions, position)]

    def results(self, after: int, through: int) -> Iterator[tuple[int, int]]:
        """Position and tokens of the results with after < position <= through."""
        positions, totals = self._positions, self._totals
        begin = bisect_left(self._results, bisect_right(positions, after))
        for at in range(begin, len(self._results)):
            number = self._results[at]
            if positions[number] > through:
                return
            yield positions[number], totals[number + 1] - totals[number]

    def cleared(self, through: int) -> tuple[Cleared, ...]:
        """The references of the results up to a position."""
        return tuple(self._cleared[: bisect_right(self._cleared, through, key=_position)])

    def spans(self, *, known: bool) -> Spans:
        """The exchanges; ``known``: by the calls that are open by the ledger, where those were given."""
        collector = self._strict if known else self._plain
        return collector.spans(self._totals, self.last, known=known and self._known is not None)

    def event_at(self, position: int) -> str | None:
        """Id of the last message of the event channel at or before a position; None if there is none."""
        for number in range(bisect_right(self._positions, position) - 1, -1, -1):
            begin, end = self._id_ends[number], self._id_ends[number + 1]
            if end > begin:
                return self._ids[begin:end].decode()
        return None

    def marked(self, position: int) -> bool:
        """Whether an agent or authority marked a boundary there."""
        return position in self._marks

    def recent(self, keep: int) -> int:
        """Position from which on at most ``keep`` tokens are left, at least the newest message."""
        start = self.last + 1 if self._positions else 0
        for number in range(len(self._positions) - 1, -1, -1):
            kept = self.tokens - self._totals[number + 1]
            if kept and self.tokens - self._totals[number] > keep:
                break
            start = self._positions[number]
        return start

    def artifacts(self, through: int) -> set[str]:
        """Ids of the artifacts that refs up to a position name."""
        return {name for name, position in self._artifacts.items() if position <= through}

    @property
    def gap_position(self) -> int | None:
        """Position of the first message behind an undeclared gap; the first one at all if that cannot be told."""
        if not self._gaps or not self._positions:
            return None
        return min(self._behind.get(number, self.first) for number in range(len(self._gaps)))

    def _take(self, item: TailItem) -> None:
        event = item.event
        number = len(self._positions)
        self._enter(event)
        self._strict.take(item, number)
        if self._plain is not self._strict:
            self._plain.take(item, number)
        self._positions.append(item.position)
        self._totals.append(self._totals[-1] + item.tokens)
        if item.channel == "event":
            self._ids += event.id.encode()
        self._id_ends.append(len(self._ids))
        if isinstance(event, ToolReturned):
            self._results.append(number)
            over = self._clearing
            if over is not None and item.position > over.after and item.tokens > over.over:
                self._cleared.append(clear(item, event))
        elif isinstance(event, BoundaryMarked):
            self._marks.add(item.position)
        for name in _artifacts_of(event):
            self._artifacts.setdefault(name, item.position)
        if self._gaps:
            self._look_behind(item)

    def _enter(self, event: Event) -> None:
        """Note the session; a new one abandons what the one before left open."""
        said = event.session
        begins = isinstance(event, (RunStarted, RunResumed))
        if begins and said is not None and self._session not in (None, said):
            if self._plain is self._strict and self._known is not None and self._strict.waits:
                self._plain = self._strict.copy()
            if self._plain is not self._strict or self._known is None:
                self._plain.abandon()
        if said is not None and (begins or self._session is None):
            self._session = said

    def _look_behind(self, item: TailItem) -> None:
        event = item.event
        for number, (channel, session, through) in enumerate(self._gaps):
            if (
                number not in self._behind
                and session is not None
                and item.channel == channel
                and event.session == session
                and event.seq is not None
                and event.seq > through
            ):
                self._behind[number] = item.position


Tailed = Sequence[TailItem] | Tail
"""A tail as messages or as what was gathered of them."""


def tail_of(
    items: Tailed,
    open_calls: Collection[str] | None = None,
    gaps: Iterable[Gap] = (),
    clearing: Clearing | None = None,
) -> Tail:
    """What was gathered, or the same of messages; the other arguments are for these."""
    if isinstance(items, Tail):
        return items
    tail = Tail(open_calls, gaps, clearing)
    tail.extend(items)
    return tail


def _position(item: Cleared) -> int:
    return item.position


def _artifacts_of(event: Event) -> Iterator[str]:
    refs: Sequence[str] = ()
    match event:
        case ToolReturned() | Message():
            if isinstance(event, ToolReturned) and event.artifact_id is not None:
                yield event.artifact_id
            if not isinstance(event.content, str):
                for part in event.content:
                    if isinstance(part, ImagePart) and part.artifact_id is not None:
                        yield part.artifact_id
        case StepChanged():
            refs = [ref for step in event.completed or () for ref in step.refs]
        case DecisionMade():
            refs = event.refs
        case EvidenceRecorded():
            refs = (event.source,)
        case OperationReconciled():
            refs = (event.evidence,)
        case ApprovalRequested():
            refs = (event.payload_ref or "",)
        case _:
            pass
    for ref in refs:
        if ref.startswith("artifact:"):
            try:
                yield parse_ref(ref).value
            except ValueError:
                continue
