"""One lane from claim to release: who owns it, what was left open, and the tasks that serve it.

Claim the epoch, publish the settings the fold uses, close what a dead process left open, then read,
relay, answer and compact until told to stop or until another owner has taken the lane.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import anyio
import structlog

from sidecar.compactor import Compactor
from sidecar.config import Config
from sidecar.deadlines import Deadlines
from sidecar.desk import Desk, fold_settings_of
from sidecar.failures import explain
from sidecar.generation import Generation
from sidecar.health import Health
from sidecar.heritage import Heritage, takeover_begun, takeover_done, takeover_open
from sidecar.intake import Intake
from sidecar.lane_settings import begin_settings, publish_settings
from sidecar.large_contents import LargeContents, Shelf
from sidecar.metrics import Metrics
from sidecar.notices import Voice
from sidecar.observer import Observer
from sidecar.packets import Packets
from sidecar.reader import Reader
from sidecar.recovery import adopt_states, disk_is_behind, drop_unsent
from sidecar.relay import Relay
from sidecar.responder import Responder
from sidecar.retention import Retention
from sidecar.runs import Runs
from sidecar.state_renewal import StateRenewal
from sidecar.summarizers import Summarizer
from sidecar.summarizers.choice import build_summarizers
from sidecar.tracing import Tracer
from sidecar.transport.blobs import Blobs
from sidecar.transport.contents import Contents
from sidecar.transport.errors import Fenced, StreamFull, Unavailable
from sidecar.transport.jetstream import Link
from sidecar.transport.micro import serve_asks
from sidecar.transport.ownership import LaneClaim
from sidecar.transport.publisher import LanePublisher
from storage.errors import StorageError, StorageFull
from storage.records import Unit
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
        tracer: Tracer,
        shelf: Shelf,
    ) -> None:
        self._config = config
        self._link = link
        self._store = store
        self._metrics = metrics
        self._health = health
        self._lane = lane
        self._owner = owner
        self._tracer = tracer
        self._shelf = shelf
        self.desk: Desk | None = None

    def config_changed(self, config: Config) -> None:
        """Take over a configuration that was read again."""
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
        own = None if remembered is None else remembered.decode()
        claim = LaneClaim(
            self._link,
            tenant,
            lane,
            self._owner,
            config.lease.seconds,
            previous_owner=own,
            # Only beside an owner that lives is to watch all there is to do: else an agent would start too early.
            on_wait=lambda _: self._health.set(f"lane {lane}", True, "watching"),
        )
        self._health.drop(f"reading {lane}")
        # Whoever spoils the records in the broker must not bring back an epoch that the fold takes for an old one.
        highest = int(await self._store.meta(f"epoch/{tenant}/{lane}") or b"0")
        epoch = await self._unless(stop, partial(claim.claim, floor=highest))
        if epoch is None:
            return
        await self._store.commit(
            Unit(
                tenant=tenant,
                lane=lane,
                meta={
                    f"owner/{tenant}/{lane}": self._owner.encode(),
                    f"epoch/{tenant}/{lane}": str(epoch).encode(),
                },
            )
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
            tracer=self._tracer,
        )
        desk.voice.epoch = epoch
        desk.lease_valid = claim.valid
        desk.max_payload = self._link.max_payload
        self._health.set(f"reading {lane}", False, "starting")
        self._health.set(f"lane {lane}", True, "owned")
        self.desk = desk
        self._metrics.lane_owned(lane, epoch)
        log.info("lane owned", lane=lane, epoch=epoch)
        publisher = LanePublisher(self._link, tenant, lane, claim)
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
        await begin_settings(desk, publisher)
        late = partial(desk.metrics.summary_late, desk.config.summarizer.kind)
        summarizers = build_summarizers(desk.config, self._link, desk.lane, late)
        blobs = Blobs(self._link, replicas=self._config.nats.replicas)
        parts = assemble(desk, publisher, summarizers, blobs, Contents(self._link), self._shelf)
        if desk.taken_over:
            log.warning("the lane was another owner's: its history is folded quietly first", lane=desk.lane)
        else:
            desk.taken_over = await takeover_open(desk) or await disk_is_behind(desk, self._link, publisher)
        if desk.taken_over:
            await takeover_begun(desk)
            await drop_unsent(desk)
        await parts.compactor.close_interrupted()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(claim.renew_forever)
            tasks.start_soon(parts.relay.run)
            tasks.start_soon(parts.compactor.run)
            async with anyio.create_task_group() as working:
                working.start_soon(parts.packets.run)
                working.start_soon(parts.states.run)
                working.start_soon(parts.deadlines.run)
                working.start_soon(parts.observer.tick)
                working.start_soon(Retention(desk, self._link, parts.packets, parts.compactor).run)
                working.start_soon(serve_asks, self._link, desk.tenant, desk.lane, parts.responder.answer)
                heritage = Heritage(desk, self._link, publisher, parts.deadlines.watch)
                reader = Reader(desk, self._link, publisher, parts.intake, heritage)

                async def caught_up() -> None:
                    if desk.taken_over:
                        await heritage.finish()
                        await adopt_states(desk, self._link, publisher, parts.packets)
                        desk.metrics.took_over(desk.mono() - began)
                    if desk.runs.lane.settled and desk.runs.lane.settings != fold_settings_of(desk.config):
                        # The newest in the stream need not be those that hold: a former owner's come too late.
                        await publish_settings(desk, publisher)
                    await parts.observer.caught_up()
                    if desk.taken_over:
                        await takeover_done(desk)
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
    states: StateRenewal
    observer: Observer
    intake: Intake


def assemble(
    desk: Desk,
    publisher: LanePublisher,
    summarizers: tuple[Summarizer, Summarizer | None],
    blobs: Blobs | None = None,
    contents: Contents | None = None,
    shelf: Shelf | None = None,
) -> Parts:
    """The parts wired to each other; nothing of them runs yet. ``summarizers``: the one asked, its fallback.
    ``blobs``: where states too large for a message go; without it they are refused as such. ``contents``: where texts
    too large for a message are; ``shelf``: the daemon's, for those it reads."""
    packets = Packets(desk)
    states = StateRenewal(desk, packets, blobs)
    compactor = Compactor(desk, packets, Generation(desk, *summarizers), states)
    deadlines = Deadlines(desk, publisher)
    large = None if contents is None else LargeContents(desk, contents, shelf or Shelf())
    responder = Responder(desk, publisher, packets, compactor, large)
    observer = Observer(desk, packets, compactor, deadlines, responder, states)
    return Parts(
        packets=packets,
        compactor=compactor,
        deadlines=deadlines,
        responder=responder,
        relay=Relay(desk, publisher, blobs, states.apart),
        states=states,
        observer=observer,
        intake=Intake(desk, observer),
    )
