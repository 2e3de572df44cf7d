"""One lane from claim to release: who owns it, what was left open, and the tasks that serve it.

Claim the epoch, publish the settings the fold uses, close what a dead process left open, then read,
relay, answer and compact until told to stop or until another owner has taken the lane.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial

import anyio
import structlog

from protocol import subjects
from protocol.codec import decode_event, digest, encode
from protocol.errors import ProtocolError
from protocol.events import Settings, SettingsApplied
from sidecar.compactor import Compactor
from sidecar.config import Config
from sidecar.core.state import Lane
from sidecar.deadlines import Deadlines
from sidecar.desk import Desk, fold_settings_of
from sidecar.failures import explain
from sidecar.generation import Generation
from sidecar.health import Health
from sidecar.intake import Intake, decode_lane, lane_key
from sidecar.metrics import Metrics
from sidecar.notices import Voice, derived_id
from sidecar.observer import Observer
from sidecar.packets import Packets
from sidecar.recovery import adopt_states, drop_unsent
from sidecar.relay import Relay
from sidecar.responder import Responder
from sidecar.retention import Retention
from sidecar.runs import Runs
from sidecar.summarizers import Summarizer
from sidecar.summarizers.choice import build_summarizers
from sidecar.transport.errors import Fenced, StreamFull, TransportError, Unavailable
from sidecar.transport.jetstream import Link
from sidecar.transport.micro import serve_asks
from sidecar.transport.ownership import LaneClaim
from sidecar.transport.publisher import LanePublisher
from sidecar.transport.pump import Pump
from storage.errors import StorageError, StorageFull
from storage.records import Cursor, Unit
from storage.store import Store

_NEXT_SECONDS = 1.0
_RETRY_SECONDS = 0.2
_STORAGE_RETRY_SECONDS = 1.0
_RELEASE_SECONDS = 5.0
_UNFORESEEN_SECONDS = 60.0
_CALM_SECONDS = 120.0
"""A lane that was served for so long is not failing over and over."""

log = structlog.get_logger(__name__)


class LaneService:
    """Serves one lane until ``stop`` is set; claims it again when it was lost and is free."""

    def __init__(
        self,
        *,
        config: Config,
        link: Link,
        store: Store,
        metrics: Metrics,
        health: Health,
        lane: str,
        owner: str,
    ) -> None:
        self._config = config
        self._link = link
        self._store = store
        self._metrics = metrics
        self._health = health
        self._lane = lane
        self._owner = owner
        self.desk: Desk | None = None
        self.config_changed: Callable[[Config], None] = self._set_config

    def _set_config(self, config: Config) -> None:
        self._config = config
        if self.desk is not None:
            self.desk.reconfigure(config)

    async def run(self, stop: anyio.Event) -> None:
        """Until ``stop``; broker trouble and lost leases are waited out, storage trouble too.

        One of the daemon's two supervisors: an error that nobody foresaw stops this lane and no other, is told
        with its traceback, and the lane is tried again more and more seldom.
        """
        failures = 0
        while not stop.is_set():
            wait = _RETRY_SECONDS
            began = anyio.current_time()
            try:
                await self._own(stop)
            except* Fenced as lost:
                log.warning("lane lost to another owner", lane=self._lane, error=str(lost.exceptions[0]))
                self._metrics.lane_flap(self._lane)
            except* (Unavailable, StreamFull) as error:
                log.warning("lane waits for the broker", lane=self._lane, error=str(error.exceptions[0]))
            except* StorageError as error:
                log.error("lane waits for storage", lane=self._lane, error=str(error.exceptions[0]))
                self._metrics.storage_full(isinstance(error.exceptions[0], StorageFull))
                self._health.set(f"storage {self._lane}", False, str(error.exceptions[0]))
                wait = _STORAGE_RETRY_SECONDS
            except* Exception as error:
                if explain(error)[0] is not None:
                    raise
                failures = 1 if anyio.current_time() - began > _CALM_SECONDS else failures + 1
                wait = min(_UNFORESEEN_SECONDS, 2.0**failures)
                log.error("lane stopped by a defect", lane=self._lane, again_in_seconds=wait, exc_info=error)
                self._metrics.unforeseen("lane")
                self._health.set(
                    f"defect {self._lane}", False, "the lane was stopped by a defect, see the log"
                )
            self.desk = None
            self._metrics.lane_owned(self._lane, None)
            if not stop.is_set():
                with anyio.move_on_after(wait):
                    await stop.wait()

    async def _own(self, stop: anyio.Event) -> None:
        tenant, lane, config = self._config.tenant, self._lane, self._config
        remembered = await self._store.meta(f"owner/{tenant}/{lane}")
        claim = LaneClaim(
            self._link,
            tenant,
            lane,
            self._owner,
            config.lease.seconds,
            previous_owner=None if remembered is None else remembered.decode(),
        )
        self._health.set(f"lane {lane}", True, "watching")
        self._health.drop(f"reading {lane}")
        epoch = await self._unless(stop, claim.claim)
        if epoch is None:
            return
        await self._store.commit(
            Unit(tenant=tenant, lane=lane, meta={f"owner/{tenant}/{lane}": self._owner.encode()})
        )
        self._health.drop(f"storage {lane}")
        desk = Desk(
            tenant=tenant,
            lane=lane,
            configured=config,
            store=self._store,
            runs=Runs(self._store, tenant, lane),
            voice=Voice(tenant, lane),
            metrics=self._metrics,
            health=self._health,
        )
        desk.voice.epoch = epoch
        desk.lease_valid = claim.valid
        desk.max_payload = self._link.max_payload
        self._health.set(f"reading {lane}", False, "starting")
        self.desk = desk
        self._metrics.lane_owned(lane, epoch)
        log.info("lane owned", lane=lane, epoch=epoch)
        publisher = LanePublisher(self._link, tenant, lane, claim)
        own = None if remembered is None else remembered.decode()
        desk.taken_over = claim.replaced_owner not in ("", own)
        try:
            await self._serve(desk, publisher, claim, stop)
        finally:
            if stop.is_set():
                await self._release(claim)

    async def _serve(self, desk: Desk, publisher: LanePublisher, claim: LaneClaim, stop: anyio.Event) -> None:
        began = desk.mono()
        # Before anything is committed or, told to stop at once, handed over.
        desk.cursor = await desk.store.cursor(desk.tenant, desk.lane) or desk.cursor
        await _settings(desk, publisher)
        late = partial(desk.metrics.summary_late, desk.config.summarizer.kind)
        summarizers = build_summarizers(desk.config, self._link, desk.lane, late)
        parts = assemble(desk, publisher, summarizers)
        if desk.taken_over:
            log.warning("the lane was another owner's: its history is folded quietly first", lane=desk.lane)
            await drop_unsent(desk)
        await parts.compactor.close_interrupted()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(claim.renew_forever)
            tasks.start_soon(parts.relay.run)
            tasks.start_soon(parts.compactor.run)
            async with anyio.create_task_group() as working:
                working.start_soon(parts.packets.run)
                working.start_soon(parts.deadlines.run)
                working.start_soon(parts.observer.tick)
                working.start_soon(Retention(desk, self._link, parts.packets, parts.compactor).run)
                working.start_soon(serve_asks, self._link, desk.tenant, desk.lane, parts.responder.answer)
                reader = _Reader(desk, self._link, publisher, parts.intake)

                async def caught_up() -> None:
                    if desk.taken_over:
                        await adopt_states(desk, self._link, publisher, parts.packets)
                        desk.metrics.took_over(desk.mono() - began)
                    if desk.runs.lane.settled and desk.runs.lane.settings != fold_settings_of(desk.config):
                        # The newest in the stream need not be those that hold: a former owner's come too late.
                        await _publish_settings(desk, publisher)
                    await parts.observer.caught_up()
                    desk.health.drop(f"defect {desk.lane}")

                working.start_soon(reader.run, parts.observer.stream_gap, caught_up)
                await stop.wait()
                working.cancel_scope.cancel()
            # Draining: nothing is read or asked any more; what is committed still goes out.
            await parts.compactor.abandon()
            await parts.observer.drained()
            await parts.relay.drained(self._config.drain.seconds)
            tasks.cancel_scope.cancel()

    async def _release(self, claim: LaneClaim) -> None:
        """Give the lane up over the connection there is; for another one nobody waits, the lease ends too."""
        generation = self._link.generation
        with anyio.CancelScope(shield=True), anyio.move_on_after(_RELEASE_SECONDS):
            async with anyio.create_task_group() as tasks:

                async def give_up() -> None:
                    await self._link.wait_lost(generation)
                    tasks.cancel_scope.cancel()

                tasks.start_soon(give_up)
                await claim.release()
                tasks.cancel_scope.cancel()

    async def _unless(self, stop: anyio.Event, action: Callable[[], Awaitable[int]]) -> int | None:
        """The action's result, or ``None`` if ``stop`` came first."""
        result: int | None = None
        async with anyio.create_task_group() as tasks:

            async def stopper() -> None:
                await stop.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(stopper)
            result = await action()
            tasks.cancel_scope.cancel()
        return result


@dataclass(frozen=True)
class Parts:
    """The parts that serve one lane."""

    packets: Packets
    compactor: Compactor
    deadlines: Deadlines
    responder: Responder
    relay: Relay
    observer: Observer
    intake: Intake


def assemble(
    desk: Desk, publisher: LanePublisher, summarizers: tuple[Summarizer, Summarizer | None]
) -> Parts:
    """The parts wired to each other; nothing of them runs yet. ``summarizers``: the one asked, its fallback."""
    packets = Packets(desk)
    compactor = Compactor(desk, packets, Generation(desk, *summarizers))
    deadlines = Deadlines(desk, publisher)
    responder = Responder(desk, publisher, packets, compactor)
    observer = Observer(desk, packets, compactor, deadlines, responder)
    return Parts(
        packets=packets,
        compactor=compactor,
        deadlines=deadlines,
        responder=responder,
        relay=Relay(desk, publisher),
        observer=observer,
        intake=Intake(desk, observer),
    )


class _Reader:
    """The lane's one reader: opens the pump at cursor + 1, again and again, and feeds the intake."""

    def __init__(self, desk: Desk, link: Link, publisher: LanePublisher, intake: Intake) -> None:
        self._desk = desk
        self._publisher = publisher
        self._intake = intake
        self._pump = Pump(
            link,
            subjects.STREAM_IN,
            subjects.inbound_filter(desk.tenant, desk.lane),
            batch=desk.config.intake.batch,
        )
        self._backlog = 0
        """Sequence of the lane's newest message when the pump was opened."""

    async def run(
        self, gap: Callable[[int, int], Awaitable[None]], caught_up: Callable[[], Awaitable[None]]
    ) -> None:
        """Until cancelled. ``gap`` is told of lost messages of the stream, ``caught_up`` once, when
        everything there was at the start is folded."""
        self._gap, self._caught_up = gap, caught_up
        desk = self._desk
        while True:
            try:
                await self._open()
                while True:
                    await self._step()
            except Unavailable as error:
                log.info("reader starts again", lane=desk.lane, reason=str(error))
                desk.metrics.consumer_restarted()
                self._health("reading", False, str(error))
            except StorageFull as error:
                self._health("storage", False, str(error))
                desk.metrics.storage_full(True)
                await anyio.sleep(1.0)
            except StorageError as error:
                self._health("storage", False, str(error))
                log.error("storage refused a commit, reading again from the cursor", error=str(error))
                await anyio.sleep(1.0)
            finally:
                with anyio.CancelScope(shield=True), anyio.move_on_after(1):
                    await self._pump.close()
            await anyio.sleep(_RETRY_SECONDS)

    async def _open(self) -> None:
        desk = self._desk
        facts = await self._pump.open(desk.cursor.stream_seq + 1)
        reborn = bool(desk.cursor.stream_created) and facts.created != desk.cursor.stream_created
        if reborn or facts.last_seq < desk.cursor.stream_seq:
            log.error(
                "the stream is another one or shorter than the cursor: reading it from its first message",
                lane=desk.lane,
                cursor=desk.cursor.stream_seq,
                last=facts.last_seq,
            )
            desk.metrics.stream_reborn()
            desk.quiet_through = 0
            await self._move(Cursor(stream_seq=0, stream_created=facts.created))
            await self._pump.close()
            facts = await self._pump.open(1)
        elif not desk.cursor.stream_created:
            await self._move(Cursor(stream_seq=desk.cursor.stream_seq, stream_created=facts.created))
        newest = await self._publisher.get_last(subjects.inbound_filter(desk.tenant, desk.lane))
        self._backlog = 0 if newest is None else newest[0]
        if facts.first_seq > desk.cursor.stream_seq + 1 and desk.cursor.stream_seq:
            await self._gap(desk.cursor.stream_seq + 1, facts.first_seq - 1)
        if desk.taken_over and not desk.caught_up:
            desk.quiet_through = max(desk.quiet_through, self._backlog)
        await self._look_up()

    async def _step(self) -> None:
        desk = self._desk
        deliveries = await self._pump.next(desk.config.intake.batch, _NEXT_SECONDS)
        if deliveries:
            began = desk.mono()
            await self._intake.take(deliveries)
            desk.metrics.committed(desk.mono() - began)
        else:
            # An idle lane follows the stream's end, so that it never looks behind.
            settled = await self._pump.settled_through()
            if settled is not None and settled > desk.cursor.stream_seq:
                await self._move(Cursor(stream_seq=settled, stream_created=desk.cursor.stream_created))
        if not deliveries and desk.cursor.stream_seq >= self._backlog:
            desk.lag = 0
        desk.metrics.lag(desk.lane, desk.lag)
        self._health("storage", True, "")
        desk.metrics.storage_full(False)
        await self._look_up()
        self._health("reading", desk.caught_up, "" if desk.caught_up else f"{desk.lag} events behind")

    async def _look_up(self) -> None:
        if not self._desk.caught_up and self._desk.cursor.stream_seq >= self._backlog:
            await self._caught_up()
            self._desk.caught_up = True

    async def _move(self, cursor: Cursor) -> None:
        async with self._desk.lock:
            await self._desk.commit(cursor=cursor)

    def _health(self, name: str, ok: bool, reason: str) -> None:
        self._desk.health.set(f"{name} {self._desk.lane}", ok, reason)


async def _settings(desk: Desk, publisher: LanePublisher) -> None:
    """Start the fold with the settings that held, and publish ours if the newest differ."""
    subject = subjects.inbound(desk.tenant, desk.lane, subjects.LANE_TOKEN, "record")
    wanted = fold_settings_of(desk.config)
    stored = await desk.store.meta(lane_key(desk.tenant, desk.lane))
    first = await _applied(await publisher.get_first(subject))
    newest = await _applied(await publisher.get_last(subject))
    # Before the first settings of the stream, the first ones hold.
    desk.runs.begin(decode_lane(stored) if stored is not None else Lane(settings=first or wanted))
    if newest != wanted:
        await _publish_settings(desk, publisher)


async def _publish_settings(desk: Desk, publisher: LanePublisher) -> None:
    """Put the settings we want into the stream; tried until the broker has them."""
    subject = subjects.inbound(desk.tenant, desk.lane, subjects.LANE_TOKEN, "record")
    wanted = fold_settings_of(desk.config)
    at = datetime.fromisoformat(desk.now_text())
    event = SettingsApplied(
        v=1,
        id=derived_id("settings", desk.voice.epoch, digest(wanted)),
        at=at,
        epoch=desk.voice.epoch,
        settings=wanted,
    )
    while True:
        try:
            await publisher.publish_record(subject, encode(event))
            return
        except Fenced:
            raise
        except TransportError as error:
            log.warning("settings not published yet", lane=desk.lane, error=str(error))
            await anyio.sleep(_RETRY_SECONDS)


async def _applied(found: tuple[int, bytes] | None) -> Settings | None:
    if found is None:
        return None
    try:
        event = decode_event(found[1], channel="record")
    except ProtocolError:
        return None
    return event.settings if isinstance(event, SettingsApplied) else None
