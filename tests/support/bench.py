"""One lane's parts on a real store, without a broker: deliveries go in as if the pump had brought them.

For what happens inside the daemon between a message and its commit. Records that the daemon would publish
are kept in ``records``; ``deliver_records`` folds them as the stream would bring them back.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from protocol.events import Settings
from sidecar.compactor import Compactor
from sidecar.config import Config, load_config
from sidecar.core.state import Lane
from sidecar.deadlines import Deadlines
from sidecar.desk import Desk, fold_settings_of
from sidecar.health import Health
from sidecar.intake import Intake, decode_lane, lane_key
from sidecar.lane import assemble
from sidecar.metrics import Metrics
from sidecar.notices import Voice
from sidecar.observer import Observer
from sidecar.packets import Packets
from sidecar.responder import Responder
from sidecar.runs import Runs
from sidecar.state_renewal import StateRenewal
from sidecar.summarizers import Summarizer
from sidecar.summarizers.choice import build_summarizers
from sidecar.transport.pump import Delivery
from storage.records import Cursor
from storage.store import Store

TENANT = "acme"
LANE = "main"
MODEL = {"name": "test-model", "context_window": 100_000, "max_output_tokens": 4_000}
AT = "2026-11-30T09:12:00Z"


class Recorder:
    """Stands where the publisher stands: keeps records instead of sending them."""

    def __init__(self) -> None:
        self.records: list[tuple[str, bytes]] = []

    async def publish_record(self, subject: str, payload: bytes) -> int:
        self.records.append((subject, payload))
        return len(self.records)


@dataclass
class Bench:
    """The parts of one lane, wired as ``LaneService`` wires them."""

    desk: Desk
    store: Store
    packets: Packets
    compactor: Compactor
    deadlines: Deadlines
    responder: Responder
    observer: Observer
    intake: Intake
    states: StateRenewal
    recorder: Recorder
    sequence: int = 0
    made: list[Delivery] = field(default_factory=list)

    def delivery(self, run: str, message: dict[str, Any] | bytes, channel: str = "event") -> Delivery:
        """The next message of the stream."""
        self.sequence += 1
        payload = message if isinstance(message, bytes) else json.dumps(message).encode()
        made = Delivery(
            subject=f"wk.v1.in.{TENANT}.{LANE}.{run}.{channel}",
            payload=payload,
            stream_seq=self.sequence,
            pending=0,
            headers=None,
            stamp=1_000_000.0 + self.sequence,
        )
        self.made.append(made)
        return made

    async def tell(self, run: str, *messages: dict[str, Any] | bytes, channel: str = "event") -> None:
        """Take these messages as one batch."""
        await self.intake.take([self.delivery(run, message, channel) for message in messages])

    async def deliver_records(self) -> None:
        """Fold what was recorded since the last time."""
        records, self.recorder.records = self.recorder.records, []
        for subject, payload in records:
            await self.intake.take([self.delivery(subject.split(".")[5], payload, "record")])

    async def ask(self, run: str, verb: str, **request: Any) -> dict[str, Any]:
        """An answer's body; an error's too."""
        answer = await self.responder.answer(run, verb, json.dumps(request).encode())
        assert answer is not None, "the question was met with silence"
        body: dict[str, Any] = json.loads(answer.body)
        return body


def event(type: str, id: str, **fields: Any) -> dict[str, Any]:
    """One message. A trailing underscore in a name is left away."""
    return {"v": 1, "id": id, "type": type, "at": AT, **{n.rstrip("_"): v for n, v in fields.items()}}


def started(id: str = "e-start", **fields: Any) -> dict[str, Any]:
    """A contract."""
    return event("run.started", id, **{"goal": "reach the harbour", "model": MODEL, **fields})


def configured(folder: Path, **settings: str) -> Config:
    """The default configuration with these variables (without their prefix)."""
    env = {f"WATCHKEEPER_{name}": value for name, value in settings.items()}
    env |= {"WATCHKEEPER_DATA_DIR": str(folder), "WATCHKEEPER_TENANT": TENANT, "WATCHKEEPER_LANES": LANE}
    return load_config(None, env, {})


@asynccontextmanager
async def bench(
    folder: Path,
    *,
    epoch: int = 1,
    capacity: int = 2_000,
    summarizers: tuple[Summarizer, Summarizer | None] | None = None,
    blobs: Any = None,
    **settings: str,
) -> AsyncIterator[Bench]:
    """The lane on a store in ``folder``, as after a start; what was stored before is there again."""
    config = configured(folder, **settings)
    async with await Store.open(folder) as store, anyio.create_task_group() as tasks:
        await tasks.start(store.run_writer)
        desk = Desk(
            tenant=TENANT,
            lane=LANE,
            configured=config,
            store=store,
            runs=Runs(store, TENANT, LANE, capacity=capacity),
            voice=Voice(TENANT, LANE),
            metrics=Metrics(lanes=[LANE]),
            health=Health(),
        )
        desk.voice.epoch = epoch
        desk.lease_valid = lambda: True
        desk.caught_up = True
        stored = await store.meta(lane_key(TENANT, LANE))
        known = Lane(settings=fold_settings_of(config)) if stored is None else decode_lane(stored)
        assert isinstance(known.settings, Settings)
        desk.runs.begin(known)
        desk.cursor = await store.cursor(TENANT, LANE) or Cursor(stream_seq=0, stream_created=AT)
        recorder: Any = Recorder()
        parts = assemble(desk, recorder, summarizers or build_summarizers(config), blobs)
        tasks.start_soon(parts.compactor.run)
        await anyio.lowlevel.checkpoint()
        made = Bench(
            desk=desk,
            store=store,
            packets=parts.packets,
            compactor=parts.compactor,
            deadlines=parts.deadlines,
            responder=parts.responder,
            observer=parts.observer,
            intake=parts.intake,
            states=parts.states,
            recorder=recorder,
            sequence=desk.cursor.stream_seq,
        )
        try:
            yield made
        finally:
            tasks.cancel_scope.cancel()


async def settled(made: Bench) -> None:
    """Wait until no compaction is under way."""
    with anyio.fail_after(60):
        while made.compactor.running:
            await anyio.sleep(0.01)
