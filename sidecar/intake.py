"""The way of an event: delivered → decoded → deduplicated → redacted → folded → one transaction.

One reader per lane, in stream order. It decides what is accepted, rejected or a duplicate, and where a
batch must end because a compaction falls due there. It sends nothing itself: what it has to say goes
into the outbox of the same transaction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import msgspec
import structlog

from protocol import subjects
from protocol.codec import decode_event
from protocol.content import Ordinal
from protocol.errors import ProtocolError
from protocol.events import Event, SettingsApplied, identity, type_of
from protocol.identifiers import Id
from sidecar import tracing
from sidecar.core import fold as core
from sidecar.core.state import Lane
from sidecar.desk import Desk
from sidecar.observer import Observer
from sidecar.runs import HotRun
from sidecar.transport.pump import Delivery
from storage.records import Cursor, JournalEntry, OutboxRow

_REJECTIONS_A_MINUTE = 60
"""``.rejected`` messages per run and minute (wire protocol, section 8); the counter counts all."""

log = structlog.get_logger(__name__)

Key = tuple[str, subjects.Channel, str]
"""(run, channel, identity): what two deliveries of one message have in common."""


class Incoming:
    """One delivery on its way: either an event or the reason why it is none."""

    __slots__ = ("body", "channel", "delivery", "event", "key", "problem", "redacted", "run", "sha256")

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.sha256 = hashlib.sha256(delivery.payload).digest()
        self.body = delivery.payload
        """What is kept: as it came, or without its secrets."""
        self.redacted = False
        self.run: str | None = None
        self.channel: subjects.Channel = "event"
        self.event: Event | None = None
        self.problem: ProtocolError | None = None
        self.key: Key | None = None


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
        self.after: list[Callable[[], None]] = []
        """Called after COMMIT, under the lock: counters, waiters, compactions to prepare."""


def lane_key(tenant: str, lane: str) -> str:
    """Where the lane's own fold state (settings, epoch) is stored."""
    return f"lane/{tenant}/{lane}"


class Intake:
    """Takes deliveries of one lane in order; ``take`` is called under no lock and takes it."""

    def __init__(self, desk: Desk, observer: Observer) -> None:
        self._desk = desk
        self._observer = observer
        self._minute: dict[str, tuple[int, int]] = {}
        self.traceparent: str | None = None
        """Of a message of the newest ``take`` that had one."""

    async def take(self, deliveries: Sequence[Delivery]) -> None:
        """Fold and commit; raises ``StorageError`` with nothing of the failed part kept in memory."""
        desk = self._desk
        self.traceparent = None
        incoming = [self._decode(delivery) for delivery in deliveries]
        async with desk.changing():
            names = {item.run for item in incoming if item.run not in (None, subjects.LANE_TOKEN)}
            for item in incoming:
                if item.event is not None:
                    names.update(core.touches(item.event))
            await desk.runs.load(names)
            names = {
                parent
                for name in names
                if (ledger := desk.runs.ledgers.get(name)) is not None and (parent := ledger.head.parent)
            }
            await desk.runs.load(names)
            known = await self._known(incoming)
            start = 0
            while start < len(incoming):
                start = await self._chunk(incoming, start, known)
            desk.lag = deliveries[-1].pending

    def _decode(self, delivery: Delivery) -> Incoming:
        item = Incoming(delivery)
        try:
            address = subjects.parse_inbound(delivery.subject)
        except ValueError as error:
            item.problem = ProtocolError("invalid_field", f"subject: {error}")
            return item
        item.run, item.channel = address.run, address.channel
        try:
            item.event = decode_event(
                delivery.payload,
                run=address.run,
                channel=address.channel,
                max_bytes=self._desk.config.intake.max_event_bytes,
            )
        except ProtocolError as error:
            item.problem = error
            return item
        item.key = (address.run, address.channel, identity(item.event))
        return item

    async def _known(self, incoming: Sequence[Incoming]) -> dict[Key, bytes]:
        """The payload digests of those keys that were accepted before, by key."""
        desk = self._desk
        known: dict[Key, bytes] = {}
        turns = {item.key: range(1, 2) for item in incoming if item.key is not None}
        while turns:
            asked = [_again(key, turn) for key, block in turns.items() for turn in block]
            maybe = [key for key in asked if desk.store.maybe_known(desk.tenant, desk.lane, *key)]
            if not maybe:
                break
            found = await desk.store.find_ids(desk.tenant, desk.lane, maybe)
            known.update((key, stored.sha256) for key, stored in found.items())
            # Twice as many each time: an item that was spoken of often must not cost a read for each.
            turns = {
                key: range(block.stop, 2 * block.stop)
                for key, block in turns.items()
                if _names_item(key) and _again(key, block.stop - 1) in found
            }
        return known

    async def _chunk(self, incoming: Sequence[Incoming], start: int, known: dict[Key, bytes]) -> int:
        """Fold from ``start`` up to the end or to where a compaction falls due; commit; returns the next."""
        chunk = Chunk()
        index = start
        while index < len(incoming):
            item = incoming[index]
            index += 1
            said = len(chunk.outbox)
            due = self._one(item, chunk, known)
            if item.delivery.stream_seq <= self._desk.quiet_through:
                del chunk.outbox[said:]
                chunk.states.clear()
            if due:
                break
        last = incoming[index - 1].delivery
        desk = self._desk
        chunk.touched |= desk.runs.join_families(chunk.touched)
        chunk.outbox.extend(await self._observer.states(chunk.states))
        lane_state = desk.runs.lane_bytes()
        if lane_state != desk.runs.lane_stored:
            chunk.meta[lane_key(desk.tenant, desk.lane)] = lane_state
        await desk.commit(
            touched=chunk.touched,
            journal=chunk.journal,
            outbox=chunk.outbox,
            cursor=Cursor(stream_seq=last.stream_seq, stream_created=desk.cursor.stream_created),
            meta=chunk.meta,
        )
        desk.runs.lane_stored = lane_state
        for tell in chunk.after:
            tell()
        return index

    def _one(self, item: Incoming, chunk: Chunk, known: dict[Key, bytes]) -> bool:
        """Fold one message into the chunk; whether the chunk must end here."""
        desk = self._desk
        if item.problem is not None or item.event is None or item.run is None or item.key is None:
            self._reject(item, item.problem, chunk)
            return False
        turn = 1
        while (before := known.get(item.key)) is not None:
            # A record's id is derived from what it says: said again under the same epoch, it is the same one
            # whatever time it carries.
            if before == item.sha256 or item.channel == "record":
                chunk.after.append(desk.metrics.duplicate)
                return False
            if _names_item(item.key):
                # Two different statements about one item are two messages; what the second may still
                # change is for the ledger to say.
                turn += 1
                item.key = _again(item.key, turn)
                continue
            conflict = ProtocolError(
                "duplicate_conflict",
                f"id {item.event.id} was used before with other bytes; the first stands",
                item.event.id,
            )
            self._reject(item, conflict, chunk)
            self._observer.conflict(item.run, item, chunk)
            return False
        if item.run == subjects.LANE_TOKEN:
            self._lane_record(item.event)
            name = type_of(item.event)
            chunk.after.append(lambda: desk.metrics.folded(name))
            return False
        try:
            self._refuse_forgotten(item.run, item.event)
            event = self._redact(item, chunk)
        except ProtocolError as error:
            self._reject(item, error, chunk)
            return False
        outcome = core.fold(
            desk.runs.lane,
            desk.runs.ledgers,
            item.run,
            event,
            core.Origin(channel=item.channel, stream_seq=item.delivery.stream_seq),
        )
        if outcome.rejection is not None:
            code, detail = outcome.rejection
            self._reject(item, ProtocolError(code, detail, item.event.id), chunk)  # type: ignore[arg-type]
            # Refused, but not lost: its number and its violation count, on disk as well.
            chunk.touched |= outcome.touched
            if item.run in desk.runs.ledgers:
                self._observer.after_rejection(item.run, outcome, item, chunk)
            return False
        known[item.key] = item.sha256
        hot = desk.runs.of(item.run)
        if event.traceparent is not None:
            hot.traceparent = self.traceparent = tracing.valid(event.traceparent)
        hot.chain = hashlib.sha256(hot.chain + item.sha256).digest()
        chunk.journal.append(self._entry(item, hot))
        chunk.touched |= outcome.touched
        chunk.touched.add(item.run)
        return self._observer.folded(item.run, hot, outcome, item, chunk)

    def _refuse_forgotten(self, run: str, event: Event) -> None:
        """A run that was finished and forgotten does not begin anew under its old heads."""
        if not self._desk.runs.forgotten:
            return
        for name in (run, *core.touches(event)):
            if name in self._desk.runs.forgotten:
                raise ProtocolError(
                    "run_mismatch", f"run {name} was finished and is forgotten; use another id", event.id
                )

    def _redact(self, item: Incoming, chunk: Chunk) -> Event:
        """The event without its secrets, which is all that anything behind this line sees.

        Only the digest stays that of the message as it came, so that it is known again and its chain holds.
        """
        assert item.event is not None
        found = self._desk.redactor.message(item.body)
        if found is not None:
            item.event = decode_event(found.payload, run=item.run, channel=item.channel)
            item.body, item.redacted = found.payload, True
            chunk.after.append(lambda: self._desk.metrics.redacted(found.counts))
        return item.event

    def _entry(self, item: Incoming, hot: HotRun) -> JournalEntry:
        assert item.event is not None
        assert item.run is not None
        assert item.key is not None
        return JournalEntry(
            run=item.run,
            channel=item.channel,
            position=hot.ledger.head.position,
            version=hot.ledger.head.version,
            stream_seq=item.delivery.stream_seq,
            event_id=item.key[2],
            type=type_of(item.event),
            sha256=item.sha256,
            chain=hot.chain,
            body=item.body,
            redacted=item.redacted,
        )

    def _lane_record(self, event: Event) -> None:
        """``settings.applied`` of the lane: part of the fold, stored with the lane itself."""
        desk = self._desk
        if isinstance(event, SettingsApplied):
            core.fold_settings(desk.runs.lane, event)

    def _came(self, item: Incoming, code: str, chunk: Chunk) -> None:
        """A refused message of a known run is no lost one: its number counts, and its code if that is a
        violation of the run. The fold does this itself for what it refuses."""
        ledger = self._desk.runs.ledgers.get(item.run) if item.run is not None else None
        if ledger is None or item.run is None or code == "not_authorized":
            return
        try:
            numbered = _NUMBERED.decode(item.delivery.payload)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return
        core.note_rejected(ledger, code, channel=item.channel, session=numbered.session, seq=numbered.seq)
        chunk.touched.add(item.run)

    def _reject(self, item: Incoming, problem: ProtocolError | None, chunk: Chunk) -> None:
        desk = self._desk
        problem = problem if problem is not None else ProtocolError("malformed", "no message")
        minute = int(item.delivery.stamp // 60)
        token = item.run or subjects.NO_RUN_TOKEN
        seen, count = self._minute.get(token, (minute, 0))
        count = count + 1 if seen == minute else 1
        if len(self._minute) > 10_000:
            self._minute.clear()
        self._minute[token] = (minute, count)
        self._came(item, problem.code, chunk)
        published = count <= _REJECTIONS_A_MINUTE
        chunk.after.append(lambda: desk.metrics.rejected(problem.code, published=published))
        if not published:
            return
        log.info("message rejected", run=token, code=problem.code, stream_seq=item.delivery.stream_seq)
        chunk.outbox.append(
            desk.voice.rejected(
                item.run,
                desk.now(),
                item.delivery.stream_seq,
                item.delivery.subject,
                problem.code,
                desk.redactor.text(problem.detail),
                problem.event_id,
            )
        )


class _Numbered(msgspec.Struct):
    """What of a refused message tells that its number came."""

    session: Id | None = None
    seq: Ordinal | None = None


_NUMBERED = msgspec.json.Decoder(_Numbered)


def _names_item(key: Key) -> bool:
    """Whether the message's id is that of the item it speaks of (``protocol.events.identity``)."""
    return "#" in key[2]


def _again(key: Key, turn: int) -> Key:
    """The key of the ``turn``-th different message of one type about one item; of the first the key itself."""
    if turn == 1:
        return key
    first = "#".join(key[2].split("#")[:2])
    return (key[0], key[1], f"{first}#{turn}")


def decode_lane(body: bytes) -> Lane:
    """The lane's stored fold state."""
    return msgspec.msgpack.decode(body, type=Lane)
