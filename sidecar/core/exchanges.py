"""Which messages of a run belong together: an assistant message, its calls and their results.

Everything follows from the messages given, in one pass, with no clock, ledger or learnt factor.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import Struct

from protocol.events import (
    Event,
    Message,
    RunResumed,
    RunStarted,
    ToolCalled,
    ToolReturned,
    UsageReported,
)


class TailItem(Struct, frozen=True, kw_only=True):
    """One message of ``event`` or ``authority`` after the old boundary; ``tokens``: its estimate."""

    position: int
    channel: str
    event: Event
    tokens: int


class Exchange(Struct, frozen=True, kw_only=True):
    """Positions ``start`` to ``end`` that no cut may part. ``open_calls``: event ids of its open calls.

    Exchanges that interleave are one. While a call is open the exchange reaches to the newest message.
    """

    start: int
    end: int
    open_calls: tuple[str, ...] = ()
    tokens: int = 0
    talk: bool = False
    """A message, call or result is in it; else it is bookkeeping, usage or a mark."""


def exchanges(items: Sequence[TailItem], open_calls: Collection[str] | None = None) -> list[Exchange]:
    """The exchanges of ascending items, merged where they interleave; together they hold every position.

    ``open_calls``: event ids of the calls that are open by the ledger; any other call without a result was
    abandoned. None: only a new session abandons calls. O(items).
    """
    groups = _collect(items, open_calls)
    if not groups:
        return []
    last = items[-1].position
    spans = sorted(
        (group.start, last if group.open else group.end, tuple(sorted(group.open)), group.talk)
        for group in groups
    )
    merged: list[tuple[int, int, tuple[str, ...], bool]] = []
    for start, end, calls, talk in spans:
        if merged and start <= merged[-1][1]:
            before = merged[-1]
            merged[-1] = (before[0], max(before[1], end), before[2] + calls, before[3] or talk)
        else:
            merged.append((start, end, calls, talk))
    weights = _weights(items, [span[0] for span in merged])
    return [
        Exchange(start=start, end=end, open_calls=calls, tokens=tokens, talk=talk)
        for (start, end, calls, talk), tokens in zip(merged, weights, strict=True)
    ]


def stable_positions(
    items: Sequence[TailItem], open_gap_from: int | None, open_calls: Collection[str] | None = None
) -> list[int]:
    """Positions up to which history may be covered, ascending.

    ``open_gap_from``: position of the first message behind an undeclared gap; none from there on is stable.
    """
    return [
        exchange.end
        for exchange in exchanges(items, open_calls)
        if not exchange.open_calls and (open_gap_from is None or exchange.end < open_gap_from)
    ]


def event_at(items: Sequence[TailItem], position: int) -> str | None:
    """Id of the last message of the event channel at or before a position; None if these items hold none."""
    found: str | None = None
    for item in items:
        if item.position > position:
            break
        if item.channel == "event":
            found = item.event.id
    return found


class _Group:
    """Members of one exchange while it is being collected."""

    __slots__ = ("calls", "end", "open", "start", "talk")

    def __init__(self, position: int, talk: bool) -> None:
        self.start = self.end = position
        self.calls: list[str] = []
        self.open: set[str] = set()
        self.talk = talk


class _Collector:
    """Sorts messages into exchanges, in order."""

    def __init__(self) -> None:
        self.groups: list[_Group] = []
        self._by_message: dict[str, _Group] = {}
        self._newest: _Group | None = None
        """The newest assistant message, while only calls, results and usage came since."""
        self._loose: _Group | None = None
        """Calls of no assistant message, until their last result."""
        self._running: dict[str, list[tuple[str, str | None, _Group]]] = {}
        """Call id → event id, session and exchange of its open calls, oldest first."""

    def take(self, item: TailItem) -> None:
        event = item.event
        match event:
            case ToolCalled():
                self._called(item.position, event)
            case ToolReturned():
                self._returned(item.position, event)
            case UsageReported():
                self._alone(item.position, talk=False)
            case Message():
                same = self._by_message.get(event.message_id or "") if event.role == "assistant" else None
                if same is not None:
                    # One assistant message told in pieces: a cut between them would part its calls.
                    same.end = item.position
                group = same or self._alone(item.position, talk=True)
                self._newest = self._loose = None
                if event.role == "assistant":
                    self._newest = group
                    self._by_message[event.message_id or event.id] = group
            case _:
                self._alone(item.position, talk=False)
                self._newest = self._loose = None

    def abandon(self) -> None:
        """What was open gets no result that would belong to it."""
        for group in self.groups:
            group.open.clear()
        self._running.clear()

    def _alone(self, position: int, *, talk: bool) -> _Group:
        group = _Group(position, talk)
        self.groups.append(group)
        return group

    def _called(self, position: int, event: ToolCalled) -> None:
        owner = self._by_message.get(event.message_id) if event.message_id is not None else None
        owner = owner or self._newest
        if owner is None:
            if self._loose is None or not self._loose.open:
                self._loose = self._alone(position, talk=True)
            owner = self._loose
        owner.end = position
        owner.calls.append(event.id)
        owner.open.add(event.id)
        self._running.setdefault(event.call_id, []).append((event.id, event.session, owner))

    def _returned(self, position: int, event: ToolReturned) -> None:
        calls = self._running.get(event.call_id, [])
        for index in reversed(range(len(calls))):
            call, session, owner = calls[index]
            if session is not None and event.session is not None and session != event.session:
                continue
            owner.end = position
            if event.status != "pending":
                del calls[index]
                owner.open.discard(call)
            return
        self._alone(position, talk=True)


def _collect(items: Sequence[TailItem], open_calls: Collection[str] | None) -> list[_Group]:
    collector = _Collector()
    session: str | None = None
    for item in items:
        said = item.event.session
        begins = isinstance(item.event, (RunStarted, RunResumed))
        if begins and said is not None and session not in (None, said) and open_calls is None:
            collector.abandon()
        if said is not None and (begins or session is None):
            session = said
        collector.take(item)
    if open_calls is not None:
        known = set(open_calls)
        for group in collector.groups:
            group.open = known.intersection(group.calls)
    return collector.groups


def _weights(items: Sequence[TailItem], starts: Sequence[int]) -> list[int]:
    """Tokens from each start to before the next."""
    weights = [0] * len(starts)
    index = 0
    for item in items:
        while index + 1 < len(starts) and item.position >= starts[index + 1]:
            index += 1
        weights[index] += item.tokens
    return weights
