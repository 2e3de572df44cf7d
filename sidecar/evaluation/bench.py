"""One lane in this process: real storage, fold, compaction and answers; the streams are lists, the clock a number.

What is decided, stored and answered is the daemon's own code. Only the broker is not there, so the same messages
give the same bytes every time. It must never be used to serve agents.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import anyio
import anyio.lowlevel
import msgspec

from protocol import subjects
from protocol.codec import decode_event
from protocol.errors import ProtocolError
from protocol.events import SettingsApplied
from sidecar.config import Config
from sidecar.core.state import Lane
from sidecar.desk import Desk, fold_settings_of, moment
from sidecar.health import Health
from sidecar.lane import Parts, assemble
from sidecar.metrics import Metrics
from sidecar.notices import Voice
from sidecar.runs import Runs
from sidecar.summarizers import Summarizer
from sidecar.transport.publisher import LanePublisher
from sidecar.transport.pump import Delivery
from storage.records import Cursor
from storage.store import Store

Json = dict[str, Any]

TENANT: Final = "bench"
LANE: Final = "main"
BEGAN: Final = 1_796_029_200.0
"""The clock at the first message: 2026-11-30T09:00:00Z."""
STEP_SECONDS: Final = 1.0
"""Time from one message to the next."""

_CREATED = "2026-11-30T00:00:00+00:00"
_EPOCH = 2
_MEMORY = Path("/dev/shm")
_POLL_SECONDS = 0.0005
_GIVE_UP_SECONDS = 120.0


class BenchFailure(Exception):
    """The lane did not answer as it must. The text says to what."""


@dataclass(frozen=True)
class Rejected:
    """A message the daemon would not accept."""

    run: str
    code: str
    detail: str


class Quay:
    """What stands in the place of the broker: messages in order, the ids that were sent."""

    def __init__(self) -> None:
        self.now = BEGAN
        self.stream: list[Delivery] = []
        self.receipts: list[Json] = []
        self.rejected: list[Rejected] = []
        self._sent: set[str] = set()

    def put(self, run: str, channel: str, payload: bytes) -> int:
        """Store one inbound message; its sequence."""
        self.now += STEP_SECONDS
        seq = len(self.stream) + 1
        subject = f"{subjects.PREFIX}.in.{TENANT}.{LANE}.{run}.{channel}"
        self.stream.append(Delivery(subject, payload, seq, 0, None, self.now))
        return seq

    async def publish(
        self,
        stream: str,
        subject: str,
        payload: bytes,
        msg_id: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        await anyio.lowlevel.checkpoint()
        if msg_id in self._sent:
            return
        self._sent.add(msg_id)
        if subject.endswith(".receipt"):
            self.receipts.append(msgspec.json.decode(payload))

    async def publish_rejected(self, subject: str, payload: bytes, msg_id: str) -> None:
        await anyio.lowlevel.checkpoint()
        if msg_id in self._sent:
            return
        self._sent.add(msg_id)
        body = msgspec.json.decode(payload)
        self.rejected.append(Rejected(body["run"], body["code"], body["detail"]))

    async def publish_record(self, subject: str, payload: bytes) -> int:
        await anyio.lowlevel.checkpoint()
        return self.put(subject.split(".")[5], "record", payload)


class Bench:
    """The lane. Made by ``bench``; every method works on the one run named."""

    def __init__(
        self, config: Config, store: Store, summarizers: tuple[Summarizer, Summarizer | None]
    ) -> None:
        self.quay = Quay()
        self.store = store
        self._taken: dict[str, tuple[int, int]] = {}
        self.metrics = Metrics()
        self.desk = Desk(
            tenant=TENANT,
            lane=LANE,
            configured=config,
            store=store,
            runs=Runs(store, TENANT, LANE),
            voice=Voice(TENANT, LANE),
            metrics=self.metrics,
            health=Health(),
            wall=lambda: self.quay.now,
            mono=lambda: self.quay.now,
            lease_valid=lambda: True,
            caught_up=True,
        )
        self.desk.voice.epoch = _EPOCH
        self.desk.runs.begin(Lane(settings=fold_settings_of(config)))
        self.desk.cursor = Cursor(0, _CREATED)
        self.parts: Parts = assemble(self.desk, cast(LanePublisher, self.quay), summarizers)
        applied = SettingsApplied(
            v=1, id="bench-settings", at=moment(BEGAN), epoch=1, settings=fold_settings_of(config)
        )
        self.quay.put("_lane", "record", msgspec.json.encode(applied))

    # --- telling ----------------------------------------------------------------------------------------

    def put(self, run: str, channel: str, event: Mapping[str, Any]) -> None:
        """Put one message into the stream."""
        self.quay.put(run, channel, msgspec.json.encode(event))

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.quay.now += seconds

    async def read(self) -> None:
        """Fold everything there is, and wait until no compaction is under way."""
        while True:
            while deliveries := self.quay.stream[self.desk.cursor.stream_seq :][:256]:
                await self.parts.intake.take(deliveries)
            await self._settled()
            if len(self.quay.stream) == self.desk.cursor.stream_seq:
                return

    async def _settled(self) -> None:
        with anyio.fail_after(_GIVE_UP_SECONDS):
            while jobs := list(self.parts.compactor.running.values()):
                await jobs[0].settled.wait()
                await anyio.sleep(_POLL_SECONDS)

    async def sent(self) -> None:
        """Wait until everything that was to be sent is sent."""
        with anyio.fail_after(_GIVE_UP_SECONDS):
            while await self.store.outbox_count(TENANT, LANE):
                self.desk.wake_relay()
                await anyio.sleep(_POLL_SECONDS)

    # --- asking -----------------------------------------------------------------------------------------

    async def ask(self, verb: str, run: str, **body: Any) -> Json:
        """One question as the daemon answers it; an error is ``{"error": {"code", "message"}}``."""
        answer = await self.parts.responder.answer(run, verb, msgspec.json.encode(body))
        if answer is None:
            raise BenchFailure(f"run {run}: {verb} was not answered")
        value: Json = msgspec.json.decode(answer.body)
        return value

    async def compact(self, run: str) -> None:
        """Ask for a compaction, wait for its end, and take the packet up as an agent does."""
        await self.ask("compact", run, reason="evaluation")
        await self._settled()
        await self.take_up(run)

    async def take_up(self, run: str) -> None:
        """Take up the packet that shortens the context further, if there is one."""
        status = await self.ask("status", run)
        if "error" in status:
            return
        checkpoint = status["checkpoint"]
        newest = (0 if checkpoint is None else checkpoint["version"], status["trimmed_through"])
        if newest == self._taken.get(run, (0, 0)):
            return
        self._taken[run] = newest
        taken = {
            "v": 1,
            "id": f"bench-take-up-{len(self.quay.stream)}",
            "type": "context.replaced",
            "at": moment(self.quay.now),
            "by": "agent",
            "packet_id": status.get("packet_id"),
        }
        self.put(run, "event", taken)
        await self.read()

    async def receipts(self, run: str) -> list[Json]:
        """Every receipt of the run so far."""
        await self.sent()
        return [receipt for receipt in self.quay.receipts if receipt["run"] == run]

    async def messages(self, run: str) -> list[tuple[int, str, Any]]:
        """(position, channel, event) of every message stored for the run, records left out."""
        entries = await self.store.tail(TENANT, LANE, run, after=0)
        found: list[tuple[int, str, Any]] = []
        for entry in entries:
            if entry.channel == "record" or not entry.body:
                continue
            try:
                found.append((entry.position, entry.channel, decode_event(entry.body, channel=entry.channel)))
            except ProtocolError:
                continue
        return found


@asynccontextmanager
async def bench(config: Config, summarizers: tuple[Summarizer, Summarizer | None]) -> AsyncIterator[Bench]:
    """A lane of its own on an empty database, removed afterwards."""
    with _folder() as folder:
        store = await Store.open(folder)
        async with store, anyio.create_task_group() as background:
            await background.start(store.run_writer)
            async with anyio.create_task_group() as tasks:
                lane = Bench(config, store, summarizers)
                tasks.start_soon(lane.parts.relay.run)
                tasks.start_soon(lane.parts.compactor.run)
                await anyio.lowlevel.checkpoint()
                yield lane
                tasks.cancel_scope.cancel()
            background.cancel_scope.cancel()


@contextmanager
def _folder() -> Iterator[Path]:
    """In memory where the system has such a place: nothing here outlives the command."""
    where = _MEMORY if _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="watchkeeper-", dir=where) as name:
        yield Path(name)
