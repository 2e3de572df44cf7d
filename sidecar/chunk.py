"""What the intake works on: messages on their way, and what one transaction takes in of them.

Nothing is decided here, nothing folded, nothing stored.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final

import anyio
import msgspec

from protocol import subjects
from protocol.content import Number
from protocol.errors import ProtocolError
from protocol.events import Event
from protocol.handoff import PacketReason
from protocol.identifiers import Id
from sidecar.transport.pump import Delivery
from storage.records import JournalEntry, OutboxRow

Key = tuple[str, subjects.Channel, str]
"""(run, channel, identity): what two deliveries of one message have in common."""


_LARGE: Final = 64 * 1024
"""Bytes from which on a message is decoded, redacted and folded on a thread: one of a megabyte takes longer than
the loop may be held."""
_MESSAGE_BYTES: Final = 512
"""What a message takes beside its bytes."""


def is_large(delivery: Delivery) -> bool:
    return len(delivery.payload) >= _LARGE


async def no_more() -> Sequence[Delivery]:
    """For a reader that has handed over all it has."""
    return ()


class Numbered(msgspec.Struct):
    """What of a refused message tells that its number came."""

    session: Id | None = None
    seq: Number | None = None


_NUMBERED: Final = msgspec.json.Decoder(Numbered)


def numbered(payload: bytes) -> Numbered | None:
    """That of this payload; None if it cannot be told."""
    try:
        return _NUMBERED.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


class Incoming:
    """One delivery on its way: either an event or the reason why it is none."""

    __slots__ = (
        "body",
        "channel",
        "delivery",
        "event",
        "hints",
        "key",
        "number",
        "problem",
        "redacted",
        "run",
        "sha256",
    )

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.sha256 = hashlib.sha256(delivery.payload).digest()
        self.body = delivery.payload
        """What is kept: as it came, or without its secrets."""
        self.hints: tuple[int, ...] | None = None
        """What detectors of secrets may find in it; None: not looked yet."""
        self.redacted = False
        self.run: str | None = None
        self.channel: subjects.Channel = "event"
        self.event: Event | None = None
        self.problem: ProtocolError | None = None
        self.key: Key | None = None
        self.number: int | None = None
        """What the store says of ``key``, unless that was changed."""


class Chunk:
    """What one transaction will hold, and what is to be told once it is committed."""

    def __init__(self) -> None:
        self.journal: list[JournalEntry] = []
        self.outbox: list[OutboxRow] = []
        self.touched: set[str] = set()
        self.meta: dict[str, bytes] = {}
        self.said: dict[tuple[str, str], int] = {}
        """(run, violation code) → notices in this transaction."""
        self.states: set[str] = set()
        """Runs whose state goes to the state stream."""
        self.folded: dict[str, int] = {}
        """Type → messages folded: counted here and told once, since a call for each costs as much as folding."""
        self.marks: dict[str, PacketReason] = {}
        """Run → why a packet of it may be due."""
        self.waits: dict[str, dict[str, float | None]] = {}
        """Run → what began to wait, or waits no longer (``deadlines.note_changes``): told once at the end, since most
        of it is over within the transaction."""
        self.after: list[Callable[[], None]] = []
        """Called after COMMIT, under the lock: other counters, waiters, compactions to prepare."""
        self.accepted: dict[Key, bytes] = {}
        """Key → digest of what is in the journal with this transaction."""
        self.traceparent: str | None = None
        """Of a message in it that had one."""
        self.weight = 0
        """About how many bytes it takes to hold it."""
        self.began = 0.0
        self.last: Delivery | None = None
        """The newest message it takes in."""

    def weigh(self, deliveries: Iterable[Delivery]) -> None:
        """These go into it."""
        self.weight += sum(len(delivery.payload) + _MESSAGE_BYTES for delivery in deliveries)

    def mark(self, run: str, reason: PacketReason) -> None:
        """A packet may be due; the first reason that asks for one anyway stands (``Packets.mark``)."""
        if self.marks.get(run, "changed") == "changed":
            self.marks[run] = reason


class Flight:
    """A transaction on its way to the disk while the next one is folded."""

    def __init__(self, commit: Coroutine[Any, Any, None]) -> None:
        # A plain task, not a group: what the storage raises must reach the reader unwrapped.
        self._task = asyncio.create_task(commit)

    @property
    def over(self) -> bool:
        """Whether it has ended, one way or the other."""
        return self._task.done()

    async def landed(self) -> None:
        """Wait for its end, whatever becomes of the caller. Raises what the commit raised."""
        with anyio.CancelScope(shield=True):
            await asyncio.wait([self._task])
        self._task.result()


def names_item(key: Key) -> bool:
    """Whether the message's id is that of the item it speaks of (``protocol.events.identity``)."""
    return "#" in key[2]


def again_key(key: Key, turn: int) -> Key:
    """The key of the ``turn``-th different message of one type about one item; of the first the key itself."""
    if turn == 1:
        return key
    first = "#".join(key[2].split("#")[:2])
    return (key[0], key[1], f"{first}#{turn}")
