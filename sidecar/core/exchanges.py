"""Which messages of a run belong together: an assistant message, its calls and their results.

Everything follows from the messages given, in one pass, with no clock, ledger or learnt factor.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from protocol.events import Event, Message, ToolCalled, ToolReturned, UsageReported


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


class Spans:
    """The exchanges of a tail as columns, ascending, merged where they interleave: together they hold every
    position."""

    def __init__(self) -> None:
        self.starts = array("q")
        self.ends = array("q")
        self.tokens = array("q")
        self.kept = array("q")
        """Tokens of all the exchanges behind."""
        self.talk = bytearray()
        self.open_calls: dict[int, tuple[str, ...]] = {}
        """Number of an exchange → event ids of its open calls; those without any are left out."""

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def last_talk(self) -> int:
        """Number of the last exchange that holds talk; of the last one if none does."""
        found = self.talk.rfind(1)
        return found if found >= 0 else len(self) - 1

    def exchange(self, number: int) -> Exchange:
        """One of them."""
        return Exchange(
            start=self.starts[number],
            end=self.ends[number],
            open_calls=self.open_calls.get(number, ()),
            tokens=self.tokens[number],
            talk=bool(self.talk[number]),
        )


class Collector:
    """Sorts messages into exchanges, in order, and keeps none of them.

    ``known``: event ids of the calls to be told as open, whatever results came.
    """

    def __init__(self, known: Collection[str] | None = None) -> None:
        self._known: Collection[str] = known or ()
        self._starts = array("q")
        self._ends = array("q")
        self._numbers = array("q")
        """Which message each group begins with."""
        self._talk = bytearray()
        self._open: dict[int, set[str]] = {}
        """Group → its calls without a final result."""
        self._held: dict[int, set[str]] = {}
        """Group → its calls among the known."""
        self._by_message: dict[str, int] = {}
        self._newest: int | None = None
        """The newest assistant message, while only calls, results and usage came since."""
        self._loose: int | None = None
        """Calls of no assistant message, until their last result."""
        self._running: dict[str, list[tuple[str, str | None, int]]] = {}
        """Call id → event id, session and group of its open calls, oldest first."""

    def copy(self) -> Collector:
        """One that goes its own way from here."""
        twin = Collector(self._known)
        twin._starts, twin._ends, twin._numbers = self._starts[:], self._ends[:], self._numbers[:]
        twin._talk = self._talk[:]
        twin._open = {group: set(calls) for group, calls in self._open.items()}
        twin._held = {group: set(calls) for group, calls in self._held.items()}
        twin._by_message = dict(self._by_message)
        twin._newest, twin._loose = self._newest, self._loose
        twin._running = {call: list(calls) for call, calls in self._running.items()}
        return twin

    @property
    def waits(self) -> bool:
        """Whether a call is without a final result."""
        return bool(self._running)

    def take(self, item: TailItem, number: int) -> None:
        """The next message; ``number`` counts them from 0."""
        event = item.event
        match event:
            case ToolCalled():
                self._called(item.position, number, event)
            case ToolReturned():
                self._returned(item.position, number, event)
            case UsageReported():
                self._alone(item.position, number, talk=False)
            case Message():
                said = event.role == "assistant"
                same = self._by_message.get(event.message_id or "") if said else None
                if same is not None:
                    # One assistant message told in pieces: a cut between them would part its calls.
                    self._ends[same] = item.position
                group = self._alone(item.position, number, talk=True) if same is None else same
                self._newest = self._loose = None
                if said:
                    self._newest = group
                    self._by_message[event.message_id or event.id] = group
            case _:
                self._alone(item.position, number, talk=False)
                self._newest = self._loose = None

    def abandon(self) -> None:
        """What was open gets no result that would belong to it."""
        self._open.clear()
        self._running.clear()

    def spans(self, totals: Sequence[int], last: int, *, known: bool) -> Spans:
        """What was collected. ``totals``: tokens before each message and after the last; ``last``: the newest
        position; ``known``: the calls given at the beginning are the open ones, else those without a result."""
        opened: Mapping[int, set[str]] = self._held if known else self._open
        found, numbers = Spans(), array("q")
        for group, start in enumerate(self._starts):
            calls = opened.get(group)
            end = last if calls else self._ends[group]
            if len(found) and start <= found.ends[-1]:
                found.ends[-1] = max(found.ends[-1], end)
                found.talk[-1] |= self._talk[group]
            else:
                found.starts.append(start)
                found.ends.append(end)
                found.talk.append(self._talk[group])
                numbers.append(self._numbers[group])
            if calls:
                number = len(found) - 1
                found.open_calls[number] = found.open_calls.get(number, ()) + tuple(sorted(calls))
        numbers.append(len(totals) - 1)
        for number in range(len(found)):
            behind = totals[numbers[number + 1]]
            found.tokens.append(behind - totals[numbers[number]])
            found.kept.append(totals[-1] - behind)
        return found

    def _alone(self, position: int, number: int, *, talk: bool) -> int:
        self._starts.append(position)
        self._ends.append(position)
        self._numbers.append(number)
        self._talk.append(talk)
        return len(self._starts) - 1

    def _called(self, position: int, number: int, event: ToolCalled) -> None:
        owner = self._by_message.get(event.message_id) if event.message_id is not None else None
        if owner is None:
            owner = self._newest
        if owner is None:
            if self._loose is None or not self._open.get(self._loose):
                self._loose = self._alone(position, number, talk=True)
            owner = self._loose
        self._ends[owner] = position
        self._open.setdefault(owner, set()).add(event.id)
        if event.id in self._known:
            self._held.setdefault(owner, set()).add(event.id)
        self._running.setdefault(event.call_id, []).append((event.id, event.session, owner))

    def _returned(self, position: int, number: int, event: ToolReturned) -> None:
        calls = self._running.get(event.call_id, [])
        for index in reversed(range(len(calls))):
            call, session, owner = calls[index]
            if session is not None and event.session is not None and session != event.session:
                continue
            self._ends[owner] = position
            if event.status != "pending":
                del calls[index]
                if not calls:
                    del self._running[event.call_id]
                self._settle(owner, call)
            return
        self._alone(position, number, talk=True)

    def _settle(self, owner: int, call: str) -> None:
        left = self._open.get(owner)
        if left is not None:
            left.discard(call)
            if not left:
                del self._open[owner]
