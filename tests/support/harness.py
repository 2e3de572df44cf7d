"""One lane of the daemon without a broker: the real store on disk and the real parts, fed deliveries directly.

The stream, and what was sent, are lists; the clock is a number. A life of the daemon can be ended at any
commit, as a kill would end it, and a new one begun on the same files. What is decided, stored and sent is the
daemon's own code; only reading from and writing to the network is not.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel

from protocol.asks import AskAuthorize
from sidecar.config import load_config
from sidecar.core import gate
from sidecar.core.state import Lane, ledger_value
from sidecar.desk import Desk, fold_settings_of
from sidecar.health import Health
from sidecar.intake import decode_lane, lane_key
from sidecar.lane import Parts, assemble
from sidecar.metrics import Metrics
from sidecar.notices import Voice
from sidecar.runs import Runs
from sidecar.summarizers import Summarizer
from sidecar.transport.pump import Delivery
from storage.data_dir import DATABASE
from storage.errors import StorageFull
from storage.records import Cursor
from storage.store import Store
from support.summaries import Script

Json = dict[str, Any]
TENANT = "t"
LANE = "main"
CREATED = "2026-11-30T00:00:00+00:00"
BEGAN = datetime(2026, 11, 30, 9, 0, tzinfo=UTC).timestamp()
WINDOW = 40_000
EPOCH = 2
MODEL = {"name": "m", "context_window": WINDOW}
SETTINGS: Json = {
    "tenant": TENANT,
    "lanes": LANE,
    "mode": "live",
    "summarizer.kind": "nats",
    "summarizer.fallback": "none",
    "summarizer.timeout_seconds": 0.1,
    "authority.approval_kinds": "deploy",
}
_MEMORY = Path("/dev/shm")


class Killed(BaseException):
    """The process died here: nothing of it runs any more."""


@dataclass
class Fault:
    """What becomes of the commit after so many others: it is ``refused`` (disk full), or the process dies
    ``before`` or ``after`` it."""

    kind: str
    after: int = 0


@dataclass
class Sent:
    """One message that left."""

    stream: str
    subject: str
    payload: bytes
    msg_id: str

    @property
    def run(self) -> str:
        return self.subject.split(".")[5]

    @property
    def kind(self) -> str:
        parts = self.subject.split(".")
        return parts[6] if parts[2] == "out" else parts[2]

    @property
    def body(self) -> Json:
        value: Json = json.loads(self.payload)
        return value


class Broker:
    """The streams, as the lane's parts see them: what is put in comes out again, one id is stored once."""

    def __init__(self) -> None:
        self.stream: list[Delivery] = []
        self.sent: list[Sent] = []
        self.now = BEGAN
        self._ids: dict[str, Sent] = {}

    def put(self, run: str, channel: str, payload: bytes) -> int:
        """Store one inbound message; its sequence."""
        seq = len(self.stream) + 1
        subject = f"wk.v1.in.{TENANT}.{LANE}.{run}.{channel}"
        self.stream.append(Delivery(subject, payload, seq, 0, None, self.now))
        return seq

    async def publish(
        self, stream: str, subject: str, payload: bytes, msg_id: str, headers: Mapping[str, str] | None = None
    ) -> None:
        await anyio.lowlevel.checkpoint()
        self._store(Sent(stream, subject, payload, msg_id))

    async def publish_rejected(self, subject: str, payload: bytes, msg_id: str) -> None:
        await anyio.lowlevel.checkpoint()
        self._store(Sent("rejected", subject, payload, msg_id))

    async def publish_record(self, subject: str, payload: bytes) -> int:
        await anyio.lowlevel.checkpoint()
        return self.put(subject.split(".")[5], "record", payload)

    def _store(self, sent: Sent) -> None:
        before = self._ids.setdefault(sent.msg_id, sent)
        if before is sent:
            self.sent.append(sent)
        elif sent.kind == "packet":
            # No id of a packet ever stands on two contents.
            assert before.payload == sent.payload


class Harness:
    """The lane over all its lives: stream, files, clock. ``settings`` are dotted keys of the configuration."""

    def __init__(
        self,
        folder: Path,
        settings: Json | None = None,
        script: Script | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.folder = folder
        self.config = load_config(None, {}, SETTINGS | {"data_dir": str(folder)} | (settings or {}))
        self.metrics = metrics or Metrics()
        self.broker = Broker()
        self.script = script or Script()
        self.fallback: Summarizer | None = None
        self.fault: Fault | None = None
        self.lives = 0
        self.count = 0
        body = {"settings": _plain_settings(self), "epoch": 1}
        self.tell("settings.applied", run="_lane", channel="record", **body)

    # --- the stream -------------------------------------------------------------------------------------

    def tell(self, type_: str, *, run: str = "r", channel: str = "event", **fields: Any) -> Json:
        """Put one message of an agent (or authority) into the stream; the message."""
        self.count += 1
        at = datetime.fromtimestamp(self.broker.now, UTC).isoformat().replace("+00:00", "Z")
        body = {"v": 1, "id": fields.pop("id_", f"e-{self.count}"), "type": type_, "at": at}
        body |= {name.rstrip("_"): value for name, value in fields.items() if value is not None}
        self.broker.put(run, channel, json.dumps(body).encode())
        return body

    def authority(self, type_: str, **fields: Any) -> Json:
        return self.tell(type_, channel="authority", **fields)

    def start(self, run: str = "r", **fields: Any) -> Json:
        fields.setdefault("goal", "mend the pump")
        fields.setdefault("model", MODEL)
        return self.tell("run.started", run=run, **fields)

    def turn(self, tokens: int, *, run: str = "r", say: str = "go on", wordy: bool = False) -> list[str]:
        """User, assistant, call, result: about so many tokens, nearly all in the result, or in what the
        assistant says if it is ``wordy``; the four ids."""
        call = f"call-{self.count}"
        much, little = lines(tokens, call), f"I look at part {self.count}."
        said = [
            self.tell("message", run=run, role="user", content=f"{say} ({self.count})"),
            self.tell("message", run=run, role="assistant", content=much if wordy else little),
            self.tell("tool.called", run=run, call_id=call, tool="bash", arguments={"command": call}),
            self.tell("tool.returned", run=run, call_id=call, status="ok", content=little if wordy else much),
        ]
        return [body["id"] for body in said]

    def parallel(self, order: Sequence[int], tokens: int, *, run: str = "r", user_at: int = 0) -> list[str]:
        """An assistant message with a call for each of ``order``, the results in that order, and a user's
        word before the ``user_at``-th result (0: none); the ids of all but that word."""
        names = [f"call-{self.count}-{number}" for number in range(len(order))]
        said = [self.tell("message", run=run, role="assistant", content="I look at these together.")]
        said += [self.tell("tool.called", run=run, call_id=n, tool="bash", arguments={}) for n in names]
        for place, number in enumerate(order):
            if user_at and place == user_at:
                self.tell("message", run=run, role="user", content=f"hurry ({self.count})")
            name = names[number]
            content = lines(tokens, name)
            said.append(self.tell("tool.returned", run=run, call_id=name, status="ok", content=content))
        return [body["id"] for body in said]

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.broker.now += seconds

    # --- lives ------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def alive(self) -> AsyncIterator[Life]:
        """One life of the daemon, from opening its files to a clean close or ``Killed``."""
        self.lives += 1
        self.fault = None
        store = await Store.open(self.folder)
        async with store, anyio.create_task_group() as background:
            await background.start(store.run_writer)
            async with anyio.create_task_group() as tasks:
                life = Life(self, store)
                await life.begin()
                for part in (life.parts.relay, life.parts.compactor):
                    tasks.start_soon(part.run)
                await anyio.lowlevel.checkpoint()
                yield life
                tasks.cancel_scope.cancel()
            background.cancel_scope.cancel()

    # --- what left --------------------------------------------------------------------------------------

    def sent(self, kind: str, run: str = "r", /, **wanted: Any) -> list[Json]:
        """Bodies of what was sent of that kind whose fields have these values."""
        found = (item.body for item in self.broker.sent if item.kind == kind and item.run == run)
        return [body for body in found if all(body.get(name) == value for name, value in wanted.items())]


class Life:
    """One life of the daemon."""

    def __init__(self, harness: Harness, store: Store) -> None:
        self.harness = harness
        self.store = store
        self.dead = False
        self.refused = 0
        config = harness.config
        self.desk = Desk(
            tenant=TENANT,
            lane=LANE,
            configured=config,
            store=store,
            runs=Runs(store, TENANT, LANE),
            voice=Voice(TENANT, LANE),
            metrics=harness.metrics,
            health=Health(),
            wall=lambda: harness.broker.now,
            mono=lambda: harness.broker.now,
            lease_valid=lambda: True,
            caught_up=True,
        )
        self.desk.voice.epoch = EPOCH
        self.parts: Parts = assemble(self.desk, harness.broker, (harness.script, harness.fallback))
        self._commit, self._remove = store.commit, store.outbox_sent
        store.commit = self._faulty_commit
        store.outbox_sent = self._faulty_remove

    async def begin(self) -> None:
        stored = await self.store.meta(lane_key(TENANT, LANE))
        fresh = Lane(settings=fold_settings_of(self.harness.config))
        self.desk.runs.begin(fresh if stored is None else decode_lane(stored))
        self.desk.cursor = await self.store.cursor(TENANT, LANE) or Cursor(0, CREATED)
        await self.parts.compactor.close_interrupted()

    async def _faulty_commit(self, unit: Any) -> Any:
        if self.dead:
            raise Killed
        fault = self.harness.fault
        if fault is None:
            return await self._commit(unit)
        if fault.after:
            fault.after -= 1
            return await self._commit(unit)
        self.harness.fault = None
        if fault.kind == "refused":
            raise StorageFull("no space for the test")
        if fault.kind == "after":
            await self._commit(unit)
        self.dead = True
        raise Killed

    async def _faulty_remove(self, ids: Sequence[int]) -> int:
        return 0 if self.dead else await self._remove(ids)

    def kill(self) -> None:
        """End this life here."""
        self.dead = True
        raise Killed

    async def stop(self) -> None:
        """End this life as a drain does."""
        parts = self.parts
        try:
            await parts.compactor.abandon()
            await parts.observer.drained()
            await parts.relay.drained(5)
        except StorageFull:
            self.refused += 1
        self.kill()

    # --- reading ----------------------------------------------------------------------------------------

    @property
    def unread(self) -> int:
        return len(self.harness.broker.stream) - self.desk.cursor.stream_seq

    async def read(self, batch: int = 256) -> None:
        """One batch from the cursor on, as the lane's reader does it: a refused commit is read again."""
        start = self.desk.cursor.stream_seq
        deliveries = self.harness.broker.stream[start : start + batch]
        if not deliveries:
            return
        try:
            await self.parts.intake.take(deliveries)
        except StorageFull:
            self.refused += 1

    async def read_all(self, batch: int = 256) -> None:
        """Everything there is, and until no compaction is under way."""
        while True:
            while self.unread:
                await self.read(batch)
            await self.settled()
            if not self.unread:
                return

    async def settled(self) -> None:
        """Until no compaction is under way."""
        pause = 0.0005
        with anyio.fail_after(30):
            while self.parts.compactor.running:
                await anyio.sleep(pause)
                pause = min(2 * pause, 0.01)

    async def relayed(self) -> None:
        """Until everything that was to be sent is sent."""
        with anyio.fail_after(30):
            while await self.store.outbox_count(TENANT, LANE):
                self.desk.wake_relay()
                await anyio.sleep(0.0005)

    # --- asking -----------------------------------------------------------------------------------------

    async def ask(self, verb: str, run: str = "r", **body: Any) -> Json:
        """One question as the responder answers it; an error as ``{"error": {"code": …}}``."""
        answer = await self.parts.responder.answer(run, verb, json.dumps(body).encode())
        value: Json = json.loads(answer.body)
        return value

    async def packet(self, run: str = "r") -> Json:
        return await self.ask("packet", run)

    async def act(self, operation: str, request: str, run: str = "r") -> Json:
        """``authorize`` as an act: what it publishes is read while it waits."""
        found: list[Json] = []
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                found.append(await self.ask("authorize", run, operation_id=operation, request_id=request))

            tasks.start_soon(ask)
            while not found:
                await self.read()
                await anyio.sleep(0.0005)
        return found[0]

    async def compact(self, run: str = "r", reason: str = "wanted") -> Json:
        """Ask for a compaction and wait for its end; the answer."""
        answer = await self.ask("compact", run, reason=reason)
        await self.settled()
        return answer

    async def publish(self, run: str = "r") -> None:
        """What the pace of publishing would do: a packet if it says something new; a refused commit waits."""
        try:
            await self.parts.packets.publish(run, "changed")
        except StorageFull:
            self.refused += 1

    # --- looking ----------------------------------------------------------------------------------------

    async def ledger(self, run: str = "r") -> Any:
        await self.desk.runs.load([run])
        return self.desk.runs.ledgers[run]

    async def view(self, run: str = "r") -> Any:
        await self.desk.runs.load([run])
        return self.desk.runs.hot[run].view

    async def value(self, run: str) -> Json:
        return ledger_value(await self.ledger(run))

    async def looks(self, run: str) -> dict[str, str]:
        """What ``authorize`` would say of every operation of the run, no clock in it."""
        ledger = await self.ledger(run)
        runs = self.desk.runs
        return {
            name: gate.look(runs.lane, runs.ledgers, run, AskAuthorize(operation_id=name, dry_run=True)).code
            for name in sorted(ledger.items["operation"])
        }

    async def checkpoints(self, run: str = "r", chain: Any = "live") -> list[Any]:
        return await self.store.checkpoints(TENANT, LANE, run, chain=chain)

    async def receipts(self, run: str = "r") -> list[Json]:
        return [json.loads(row.body) for row in await self.store.receipts(TENANT, LANE, run)]


@contextmanager
def workplace(*, prepared: bool = False) -> Iterator[Path]:
    """A folder for one harness, in memory where the system has such a place: a test dies, not the machine.

    ``prepared``: with an empty database in it already, which is quicker than to have one made.
    """
    where = _MEMORY if _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="watchkeeper-", dir=where) as name:
        if prepared:
            Path(name, DATABASE).write_bytes(_empty_database())
        yield Path(name)


@cache
def _empty_database() -> bytes:
    async def make(folder: Path) -> None:
        async with await Store.open(folder):
            pass

    with workplace() as folder:
        anyio.run(make, folder)
        return Path(folder, DATABASE).read_bytes()


def lines(tokens: int, name: str) -> str:
    """Output of a tool of about so many tokens, other lines for each name."""
    line = f"{name}: nothing to be done for this part of the tree\n"
    return (line * (tokens * 4 // len(line) + 1))[: tokens * 4]


def _plain_settings(harness: Harness) -> Json:
    settings = fold_settings_of(harness.config)
    return {
        "authority_required": settings.authority_required,
        "approval_kinds": list(settings.approval_kinds),
        "forbidden_kinds": list(settings.forbidden_kinds),
        "reconcile_by_authority_kinds": list(settings.reconcile_by_authority_kinds),
    }
