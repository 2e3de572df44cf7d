"""The way of an event: delivered → decoded → deduplicated → redacted → folded → one transaction.

One reader per lane, in stream order. It decides what is accepted, rejected or a duplicate, and where a
batch must end because a compaction falls due there. It sends nothing itself: what it has to say goes
into the outbox of the same transaction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Final

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
import structlog

from protocol import subjects
from protocol.codec import decode_event
from protocol.detectors import all_hinted
from protocol.errors import ProtocolError
from protocol.events import Event, SettingsApplied, identity, type_of
from sidecar import tracing
from sidecar.chunk import Chunk, Flight, Incoming, Key, again_key, is_large, names_item, no_more, numbered
from sidecar.core import fold as core
from sidecar.core.state import Lane
from sidecar.desk import Desk
from sidecar.known import Known
from sidecar.observer import Observer
from sidecar.runs import HotRun, Rows
from sidecar.transport.pump import Delivery
from storage.errors import StorageError
from storage.records import Cursor, JournalEntry

_REJECTIONS_A_MINUTE = 60
"""``.rejected`` messages per run and minute (wire protocol, section 8); the counter counts all."""

_TURN: Final = 64
"""Messages folded before the loop gets its turn, about 2 ms."""
_DECODED_AT_ONCE: Final = 256
_MOST_AT_ONCE: Final = 4 * 1024 * 1024
"""Weight of a transaction from which on it takes in no more while the last one is on its way: about three thousand
messages of a kilobyte."""
_WRITTEN_AT_ONCE: Final = 200
"""Runs encoded before the loop gets its turn, about 3 ms."""

log = structlog.get_logger(__name__)

_address = lru_cache(maxsize=8_192)(subjects.parse_inbound)
"""Subjects repeat: taking one apart costs more than decoding a short event."""


def lane_key(tenant: str, lane: str) -> str:
    """Where the lane's own fold state (settings, epoch) is stored."""
    return f"lane/{tenant}/{lane}"


class Intake:
    """Takes deliveries of one lane in order; ``take`` is called under no lock and takes it."""

    def __init__(self, desk: Desk, observer: Observer) -> None:
        self._desk = desk
        self._observer = observer
        self._minute: dict[str, tuple[int, int]] = {}
        self._known = Known(desk)

    async def take(
        self,
        deliveries: Sequence[Delivery],
        more: Callable[[], Awaitable[Sequence[Delivery]]] = no_more,
    ) -> None:
        """Fold and commit; raises ``StorageError`` with nothing of the failed part kept in memory.

        ``more`` gives what has arrived since, without waiting: it is folded while what came before it is being
        committed. One transaction is on its way at a time, and what was folded behind it is not handed over
        before it is on disk; until then it takes in more, since each run it touches is written once. If one
        fails, all that is not on disk is discarded.
        """
        flight: Flight | None = None
        aboard: Mapping[Key, bytes] = {}
        chunk = Chunk()
        async with self._desk.changing():
            try:
                while deliveries:
                    incoming = await self._decoded(deliveries)
                    await self._load(incoming)
                    known = {**aboard, **chunk.accepted, **await self._known.of(incoming)}
                    chunk.weigh(deliveries)
                    if flight is not None and any(map(is_large, deliveries)):
                        # On a thread nothing may happen to memory beside folding.
                        await flight.landed()
                    arrived: Sequence[Delivery] = ()
                    start = 0
                    while start < len(incoming):
                        start, due = await self._fold(chunk, incoming, start, known)
                        # A compaction that is due begins from the run as it is at the end of this transaction.
                        ends = start < len(incoming) or due
                        if (
                            not ends
                            and chunk.weight < _MOST_AT_ONCE
                            and flight is not None
                            and not flight.over
                        ):
                            arrived = await more()
                            if arrived and not flight.over:
                                break
                        rows = await self._rows(chunk)
                        if flight is not None:
                            await flight.landed()
                            flight = None
                        aboard = chunk.accepted
                        if ends or not (arrived := arrived or await more()):
                            await self._commit(chunk, rows)
                        else:
                            flight = Flight(self._commit(chunk, rows))
                        chunk = Chunk()
                    deliveries = arrived
            except BaseException:
                self._known.forget()
                if flight is not None:
                    with suppress(StorageError):
                        await flight.landed()
                raise
            self._known.bound()

    async def _decoded(self, deliveries: Sequence[Delivery]) -> list[Incoming]:
        incoming, usual = [], []
        for number, delivery in enumerate(deliveries, 1):
            if is_large(delivery):
                item = await anyio.to_thread.run_sync(self._decode, delivery)
            else:
                item = self._decode(delivery)
                usual.append(item)
            incoming.append(item)
            if number % _DECODED_AT_ONCE == 0:
                await anyio.lowlevel.checkpoint()
        for item, hints in zip(usual, all_hinted([item.body for item in usual]), strict=True):
            item.hints = hints
        return incoming

    async def _load(self, incoming: Sequence[Incoming]) -> None:
        """Have every run in memory that these messages may change, with its whole family."""
        runs = self._desk.runs
        names = {item.run for item in incoming if item.run not in (None, subjects.LANE_TOKEN)}
        for item in incoming:
            if item.event is not None:
                names.update(core.touches(item.event))
        await runs.load(names)
        await runs.load(
            {
                parent
                for name in names
                if (ledger := runs.ledgers.get(name)) is not None and (parent := ledger.head.parent)
            }
        )

    def _decode(self, delivery: Delivery) -> Incoming:
        item = Incoming(delivery)
        try:
            address = _address(delivery.subject)
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

    async def _fold(
        self, chunk: Chunk, incoming: Sequence[Incoming], start: int, known: dict[Key, bytes]
    ) -> tuple[int, bool]:
        """Fold from ``start`` up to the end or to where a compaction falls due: where the next transaction
        begins, and whether one is due."""
        desk = self._desk
        chunk.began = chunk.began or desk.mono()
        index, due = start, False
        while index < len(incoming) and not due:
            item = incoming[index]
            index += 1
            said = len(chunk.outbox)
            if is_large(item.delivery):
                due = await anyio.to_thread.run_sync(self._one, item, chunk, known)
            else:
                due = self._one(item, chunk, known)
            if item.delivery.stream_seq <= desk.quiet_through:
                del chunk.outbox[said:]
                chunk.states.clear()
            if index % _TURN == 0:
                await anyio.lowlevel.checkpoint()
        chunk.last = incoming[index - 1].delivery
        return index, due

    async def _rows(self, chunk: Chunk) -> Rows:
        """What is written of the runs, as they are now."""
        runs = self._desk.runs
        chunk.touched |= runs.join_families(chunk.touched)
        chunk.outbox.extend(await self._observer.states(chunk.states))
        lane_state = runs.lane_bytes()
        if lane_state != runs.lane_stored:
            chunk.meta[lane_key(self._desk.tenant, self._desk.lane)] = lane_state
        rows, names = Rows([], [], []), list(chunk.touched)
        for first in range(0, len(names), _WRITTEN_AT_ONCE):
            if first:
                await anyio.lowlevel.checkpoint()
            rows.extend(runs.rows(names[first : first + _WRITTEN_AT_ONCE]))
        return rows

    async def _commit(self, chunk: Chunk, rows: Rows) -> None:
        """One transaction, and what is to be told once it is on disk."""
        desk, last = self._desk, chunk.last
        assert last is not None
        await desk.commit(
            rows=rows,
            journal=chunk.journal,
            outbox=chunk.outbox,
            cursor=Cursor(stream_seq=last.stream_seq, stream_created=desk.cursor.stream_created),
            meta=chunk.meta,
        )
        for lane_state in chunk.meta.values():
            desk.runs.lane_stored = lane_state
        desk.lag = last.pending
        desk.metrics.committed(desk.mono() - chunk.began, chunk.traceparent)
        self._observer.committed(chunk)

    def _one(self, item: Incoming, chunk: Chunk, known: dict[Key, bytes]) -> bool:
        """Fold one message into the chunk; whether the chunk must end here."""
        desk = self._desk
        if item.problem is not None or item.event is None or item.run is None or item.key is None:
            self._reject(item, item.problem, chunk)
            return False
        first, told = item.key, None
        if (before := known.get(first)) is not None:
            # A record's id is derived from what it says: said again under the same epoch, it is the same one
            # whatever time it carries.
            if before == item.sha256 or item.channel == "record":
                chunk.after.append(desk.metrics.duplicate)
                return False
            if not names_item(first):
                conflict = ProtocolError(
                    "duplicate_conflict",
                    f"id {item.event.id} was used before with other bytes; the first stands",
                    item.event.id,
                )
                self._reject(item, conflict, chunk)
                self._observer.conflict(item.run, item, chunk)
                return False
            # Two different statements about one item are two messages; what the second may still change is
            # for the ledger to say.
            told = self._known.told(first, before)
            if item.sha256 in told:
                chunk.after.append(desk.metrics.duplicate)
                return False
            item.key, item.number = again_key(first, len(told) + 1), None
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
        known[item.key] = chunk.accepted[item.key] = item.sha256
        if told is not None:
            told[item.sha256] = None
        hot = desk.runs.of(item.run)
        if event.traceparent is not None:
            hot.traceparent = chunk.traceparent = tracing.valid(event.traceparent)
        hot.chain = hashlib.sha256(hot.chain + item.sha256).digest()
        chunk.journal.append(self._entry(item, hot))
        # Its own run is among them.
        chunk.touched |= outcome.touched
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
        found = self._desk.redactor.message(item.body, item.hints)
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
            key=item.number,
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
        told = numbered(item.delivery.payload)
        if told is None:
            return
        core.note_rejected(ledger, code, channel=item.channel, session=told.session, seq=told.seq)
        chunk.touched.add(item.run)

    def _reject(self, item: Incoming, problem: ProtocolError | None, chunk: Chunk) -> None:
        desk = self._desk
        problem = problem if problem is not None else ProtocolError("malformed", "no message")
        # Its way here would hold the message, and itself, until the collector came by.
        problem.__traceback__ = problem.__cause__ = problem.__context__ = None
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


def decode_lane(body: bytes) -> Lane:
    """The lane's stored fold state."""
    return msgspec.msgpack.decode(body, type=Lane)
