"""Whose message it is and whether one is missing: sessions, their numbers, and the gaps in these.

Numbers only detect. A message is never dropped because of its number, and a gap closes part by part: by the
messages that come after all, or by an authority that goes on without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from msgspec.structs import replace

from protocol.events import Event, GapAccepted, GapDeclared, RunResumed, RunStarted
from sidecar.core import calls
from sidecar.core.entry import Entry
from sidecar.core.state import Channel, Gap, Ledger

_SESSIONS_REMEMBERED = 16

Arrival = Literal["unnumbered", "next", "ahead", "late", "twice"]

BEGINS: Final[frozenset[type[Event]]] = frozenset({RunStarted, RunResumed})
"""What begins a session."""


def is_foreign(ledger: Ledger, event: Event, channel: Channel) -> bool:
    """Whether an agent's message is of another session than the current one. Those that begin one are not."""
    session, current = event.session, ledger.head.session
    if session == current:
        return False
    return channel == "event" and session is not None and current is not None and type(event) not in BEGINS


def arrive(ledger: Ledger, event: Event, channel: Channel) -> tuple[Arrival, Gap | None]:
    """Take note of a message's number; the gap it opened comes with ``ahead``."""
    number, session = event.seq, event.session
    if number is None or session is None or channel == "record":
        return "unnumbered", None
    return note_number(ledger, channel, session, number)


def note_number(ledger: Ledger, channel: Channel, session: str, number: int) -> tuple[Arrival, Gap | None]:
    """The number came: what that says about it, and the gap it opened."""
    key = f"{channel}/{session}"
    numbers = ledger.head.next_seq
    expected = numbers.get(key, 1)
    if number >= expected:
        numbers[key] = number + 1
        if number == expected:
            return "next", None
        gap = Gap(
            id=f"{key}/{expected}", channel=channel, session=session, first=expected, through=number - 1
        )
        ledger.put("gap", gap)
        return "ahead", gap
    for collection in ("gap", "accepted"):
        for gap in _overlapping(ledger, collection, channel, session, number, number):
            _cut(ledger, collection, gap, number, number)
            return "late", None
    return "twice", None


def begin(entry: Entry, session: str | None) -> None:
    """The agent's ``run.started`` or ``run.resumed``: with another session the current one ends.

    What the old one left open is abandoned: nobody will tell how it ended.
    """
    head = entry.head
    if session is None or session == head.session:
        return
    if head.session is not None:
        ended = (*(name for name in head.ended_sessions if name not in (session, head.session)), head.session)
        head.ended_sessions = ended[-_SESSIONS_REMEMBERED:]
    head.session = session
    calls.abandon_others(entry, session)


def accept_gap(entry: Entry, event: GapAccepted) -> None:
    """An authority goes on without these numbers, as far as they are missing.

    Without a session the numbers are stream sequences; where no gap of the stream holds them, they are those
    of the one session that misses messages.
    """
    ledger = entry.ledger
    session = event.session
    missing = list(_overlapping(ledger, "gap", None, session, event.from_, event.through))
    if not missing and session is None:
        numbered = {gap.session for gap in ledger.active["gap"].values() if gap.session is not None}
        if len(numbered) == 1:
            session = numbered.pop()
            missing = list(_overlapping(ledger, "gap", None, session, event.from_, event.through))
    if not missing:
        if not any(_overlapping(ledger, "accepted", None, event.session, event.from_, event.through)):
            entry.violate("illegal_transition")
        return
    for gap in missing:
        first, through = max(gap.first, event.from_), min(gap.through, event.through)
        _cut(ledger, "gap", gap, first, through)
        part = replace(gap, id=_gap_id(gap, first), first=first, through=through)
        ledger.put("accepted", part)


def declare_gap(entry: Entry, event: GapDeclared) -> None:
    """The owner says that messages will not come. Said again, or of what came meanwhile: nothing changes."""
    ledger = entry.ledger
    if event.from_ is not None and event.through is not None:
        for gap in list(_overlapping(ledger, "gap", None, event.session, event.from_, event.through)):
            if not gap.declared:
                ledger.put("gap", replace(gap, declared=True))
        return
    if event.stream_from is None or event.stream_through is None:
        return
    for first, through in _unknown_parts(ledger, event.stream_from, event.stream_through):
        gap = Gap(
            id=f"stream/{first}", channel="event", session=None, first=first, through=through, declared=True
        )
        ledger.put("gap", gap)
        entry.outcome.gaps.append(gap)
        entry.violate("history_gap")


def _unknown_parts(ledger: Ledger, first: int, through: int) -> Iterator[tuple[int, int]]:
    """What of a range of the stream no gap holds, open or accepted."""
    known = [
        gap
        for collection in ("gap", "accepted")
        for gap in _overlapping(ledger, collection, None, None, first, through)
    ]
    for gap in sorted(known, key=lambda gap: gap.first):
        if gap.first > first:
            yield first, gap.first - 1
        first = max(first, gap.through + 1)
    if first <= through:
        yield first, through


def _overlapping(
    ledger: Ledger, collection: str, channel: Channel | None, session: str | None, first: int, through: int
) -> Iterator[Gap]:
    """Gaps of the session (``None``: the stream) that hold a number of the range; ``None``: any channel."""
    for gap in list(ledger.items[collection].values()):
        if (
            gap.session == session
            and channel in (None, gap.channel)
            and gap.first <= through
            and gap.through >= first
        ):
            yield gap


def _cut(ledger: Ledger, collection: str, gap: Gap, first: int, through: int) -> None:
    """Take a part out of a gap; what is left of it stays, in up to two pieces."""
    ledger.drop(collection, gap.id)
    if gap.first < first:
        ledger.put(collection, replace(gap, through=first - 1))
    if gap.through > through:
        ledger.put(collection, replace(gap, id=_gap_id(gap, through + 1), first=through + 1))


def _gap_id(gap: Gap, first: int) -> str:
    return f"stream/{first}" if gap.session is None else f"{gap.channel}/{gap.session}/{first}"
