"""The lane's one reader: opens the pump at cursor + 1, again and again, and feeds the intake in stream order.

It decides where to read from: after a restart, a loss of messages, a stream that is another one. It folds
nothing and acknowledges nothing; the cursor commits with the events.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import structlog

from protocol import subjects
from sidecar.desk import Desk
from sidecar.heritage import Heritage
from sidecar.intake import Intake
from sidecar.transport.errors import Unavailable
from sidecar.transport.jetstream import Link
from sidecar.transport.publisher import LanePublisher
from sidecar.transport.pump import Delivery, Pump
from storage.errors import StorageError, StorageFull
from storage.records import Cursor

_NEXT_SECONDS = 1.0
_RETRY_SECONDS = 0.2
_REMIND_SECONDS = 30.0

log = structlog.get_logger(__name__)


class Reader:
    """See the module. ``run`` once per ownership of the lane."""

    def __init__(
        self, desk: Desk, link: Link, publisher: LanePublisher, intake: Intake, heritage: Heritage
    ) -> None:
        self._desk = desk
        self._heritage = heritage
        self._held: list[Delivery] = []
        """Beyond the cursor of a state that has to be looked at first."""
        self._publisher = publisher
        self._intake = intake
        self._pump = Pump(
            link,
            subjects.STREAM_IN,
            subjects.inbound_filter(desk.tenant, desk.lane),
            batch=desk.config.intake.batch,
        )
        self._told = ""
        self._told_at = 0.0
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
                self._tell(str(error))
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

    def _tell(self, reason: str) -> None:
        """Each trouble once, and again twice a minute: it is tried several times a second."""
        now = self._desk.mono()
        if reason != self._told or now - self._told_at >= _REMIND_SECONDS:
            self._told, self._told_at = reason, now
            log.info("reader starts again", lane=self._desk.lane, reason=reason)

    async def _open(self) -> None:
        desk = self._desk
        self._held = []
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
            await self._heritage.read(facts.first_seq)
        await self._look_up()

    async def _step(self) -> None:
        desk = self._desk
        if self._held:
            # All before them is on disk.
            await self._heritage.settle(self._held[0].stream_seq - 1)
        deliveries = self._cut(self._held or await self._pump.next(desk.config.intake.batch, _NEXT_SECONDS))
        if not deliveries and self._held:
            return
        if deliveries:
            await self._intake.take(deliveries, self._more)
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

    async def _more(self) -> list[Delivery]:
        """What has arrived while the last messages were folded, while nobody else has to get a turn first."""
        desk = self._desk
        first_seen = not desk.caught_up and desk.cursor.stream_seq >= self._backlog
        if self._held or not self._pump.arrived or desk.wanted or desk.runs.crowded or first_seen:
            return []
        desk.metrics.lag(desk.lane, desk.lag)
        return self._cut(await self._pump.next(desk.config.intake.batch, 0))

    def _cut(self, deliveries: list[Delivery]) -> list[Delivery]:
        """What may be folded by now; the rest is held."""
        through = self._heritage.due
        self._held = [] if through is None else [item for item in deliveries if item.stream_seq > through]
        return deliveries[: len(deliveries) - len(self._held)]

    async def _look_up(self) -> None:
        if not self._desk.caught_up and self._desk.cursor.stream_seq >= self._backlog:
            await self._caught_up()
            self._desk.caught_up = True

    async def _move(self, cursor: Cursor) -> None:
        async with self._desk.lock:
            await self._desk.commit(cursor=cursor)

    def _health(self, name: str, ok: bool, reason: str) -> None:
        self._desk.health.set(f"{name} {self._desk.lane}", ok, reason)
