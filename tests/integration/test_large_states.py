"""States too large for a message: what is new goes out on the object that stands, and nothing of it is lost."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import nats
import pytest
from nats.js.errors import ObjectDeletedError, ObjectNotFoundError

from protocol.codec import encode
from protocol.state import Blob, RunStateReference
from sidecar import relay, state_renewal
from storage.errors import StorageFull
from storage.records import OutboxRow
from support.bench import LANE, TENANT, Bench, bench, event, settled, started
from tests.support.blackbox import Box, Json, blackbox, eventually
from tests.support.blackbox import event as told
from tests.support.conversation import Talk, talk
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.anyio

ROOM = 48 * 1024
"""Of a state's message here; the ledgers are larger."""
QUICK = {"lease.seconds": 1}


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as started:
        yield started


@pytest.fixture(autouse=True)
def small_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_STATE_BYTES", ROOM)
    monkeypatch.setattr(state_renewal, "MAX_STATE_BYTES", ROOM)


@pytest.fixture
def never_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_renewal, "SOONEST_SECONDS", 3_600.0)


@pytest.fixture
def renewed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_renewal, "SOONEST_SECONDS", 0.0)
    # However long the last one took.
    monkeypatch.setattr(state_renewal, "LATEST_SECONDS", 0.0)


def decisions(count: int) -> list[Json]:
    """So many settled matters, which no packet need show and every state holds."""
    made = [
        told("decision.made", decision_id=f"d{n}", summary=f"{n} " + "why it was so " * 60)
        for n in range(count)
    ]
    return made + [
        told("decision.made", decision_id=f"e{n}", summary=f"{n}", supersedes=f"d{n}") for n in range(count)
    ]


async def compacted(it: Talk, version: int) -> Json:
    """Fill the run's window until it is compacted for that time, and take the packet up; the packet."""
    await it.fill(0.75)
    packet = (await it.box.hear(it.run, "packet", version, reason="compacted"))[-1]
    await it.box.settled(it.run)
    assert packet["checkpoint"]["version"] == version
    known = {"packet_id": packet["packet_id"], "ledger_version": packet["ledger_version"]}
    await it.tell(told("run.resumed", **known))
    return packet


async def message(server: NatsServer, run: str) -> Json:
    """What the state stream holds of the run."""
    async with await nats.connect(server.url) as client:
        found = await client.jetstream().get_last_msg("WK_STATE", f"wk.v1.state.{TENANT}.{LANE}.{run}")
        body: Json = json.loads(found.data or b"")
        return body


async def objects(server: NatsServer) -> dict[str, bytes]:
    """What the bucket holds; of an object that goes while it is read, nothing."""
    found = {}
    async with await nats.connect(server.url) as client:
        bucket = await client.jetstream().object_store("WK_BLOBS")
        for item in await bucket.list(ignore_deletes=True):
            # Between the two reads of one call the object may go: the second would wait for ever.
            with suppress(ObjectNotFoundError, ObjectDeletedError), anyio.move_on_after(2):
                found[item.name or ""] = (await bucket.get(item.name or "")).data or b""
    return found


async def answers(box: Box, run: str) -> Json:
    """What must not change with the owner."""
    packet = await box.packet(run)
    context = await box.ask(run, "context", format="openai")
    return {
        "protected": packet["protected_digest"],
        "verdict": packet["verdict"],
        "checkpoint": (packet["checkpoint"]["version"], packet["checkpoint"]["id"]),
        "context": [context.body.get(name) for name in ("packet_id", "messages")],
    }


@asynccontextmanager
async def killed_after_the_second(server: NatsServer, folder: Path) -> AsyncIterator[tuple[str, Json, Json]]:
    """The streams as an owner leaves them that ends behind its second checkpoint, the object still the first's:
    the run, what was answered, the message."""
    async with blackbox(server, folder, QUICK) as box:
        it = await talk(box)
        await it.tell(*decisions(60))
        await compacted(it, 1)

        async def apart() -> bool:
            return "blob" in await message(server, it.run)

        await eventually(apart, "the object")
        await compacted(it, 2)
        await it.tell(told("message", role="user", content="and now the other one"))
        before = await answers(box, it.run)

        async def on_it() -> bool:
            said = await message(server, it.run)
            return said.get("since", {}).get("checkpoint", {}).get("version") == 2

        await eventually(on_it, "what is new on the object")
        left, kept = await message(server, it.run), await objects(server)
    # The drain wrote the whole of it. Back to how it was before.
    newer = (await objects(server)).keys() - kept.keys()
    async with await nats.connect(server.url) as client:
        bucket = await client.jetstream().object_store("WK_BLOBS")
        for name, data in kept.items():
            await bucket.put(name, data)
        for name in newer:
            await bucket.delete(name)
        await client.jetstream().publish(f"wk.v1.state.{TENANT}.{LANE}.{it.run}", json.dumps(left).encode())
    yield it.run, before, left


@pytest.mark.usefixtures("never_renewed")
@pytest.mark.parametrize("cut", [False, True], ids=["whole stream", "stream cut behind the object"])
async def test_a_new_owner_has_what_came_after_the_object(
    server: NatsServer, tmp_path: Path, cut: bool
) -> None:
    async with killed_after_the_second(server, tmp_path / "one") as (run, before, left):
        packed = (await objects(server))[left["blob"]["name"]]
        state = json.loads(gzip.decompress(packed))
        assert state["checkpoint"]["version"] == 1
        assert state["ledger_digest"] == left["ledger_digest"]
        if cut:
            async with await nats.connect(server.url) as client:
                await client.jetstream().purge_stream("WK_IN", seq=state["cursor"]["stream_seq"] + 1)
        async with blackbox(server, tmp_path / "two", QUICK) as box:
            assert await answers(box, run) == before
            assert await box.metric("ledger_mismatches_total") == 0
        # The whole of it stands again, and nothing else is left.
        said = await message(server, run)
        assert "since" not in said
        assert list(await objects(server)) == [said["blob"]["name"]]


@pytest.mark.usefixtures("never_renewed")
async def test_a_checkpoint_of_lost_messages_covers_no_later_ones(server: NatsServer, tmp_path: Path) -> None:
    """The object is older than what the stream lost: positions are counted on from the object's."""
    async with killed_after_the_second(server, tmp_path / "one") as (run, _, left):
        state = json.loads(gzip.decompress((await objects(server))[left["blob"]["name"]]))
        folded = state["ledger"]["head"]["position"]
        covered = left["since"]["checkpoint"]["covers_through"]["position"]
        assert covered > folded
        later = [told("message", role="user", content=f"later {n}.") for n in range(covered - folded + 5)]
        async with await nats.connect(server.url) as client:
            js = client.jetstream()
            await js.purge_stream("WK_IN", seq=left["since"]["stream_seq"] + 1)
            for message_ in later:
                await js.publish(f"wk.v1.in.{TENANT}.{LANE}.{run}.event", json.dumps(message_).encode())
        async with blackbox(server, tmp_path / "two", QUICK) as box:
            packet = await box.packet(run)
            assert packet["verdict"] == "pause"
            assert packet["checkpoint"]["version"] == 1
            context = json.dumps((await box.ask(run, "context", format="openai")).body)
            assert [m["content"] for m in later if m["content"] not in context] == []


@pytest.mark.usefixtures("renewed_at_once")
async def test_the_object_is_made_anew_behind_a_checkpoint(server: NatsServer, tmp_path: Path) -> None:
    async with blackbox(server, tmp_path / "one", QUICK) as box:
        it = await talk(box)
        await it.tell(*decisions(60))
        await compacted(it, 1)
        packet = await compacted(it, 2)

        async def anew() -> bool:
            said, kept = await message(server, it.run), await objects(server)
            if "since" in said or list(kept) != [said["blob"]["name"]]:
                return False
            state = json.loads(gzip.decompress(kept[said["blob"]["name"]]))
            return bool(state["checkpoint"]["id"] == packet["checkpoint"]["id"])

        await eventually(anew, "an object with the newest checkpoint, alone")


class Bucket:
    """Stands where the broker stands; a put waits while ``open`` is not set."""

    def __init__(self) -> None:
        self.open = anyio.Event()
        self.open.set()
        self.waiting = anyio.Event()
        self.kept: dict[str, bytes] = {}
        self.last: dict[str, bytes] = {}

    async def put(self, name: str, payload: bytes) -> None:
        self.waiting.set()
        await self.open.wait()
        self.kept[name] = payload

    async def delete(self, name: str) -> None:
        self.kept.pop(name, None)

    async def get_last(self, subject: str) -> tuple[int, bytes] | None:
        return (1, self.last[subject]) if subject in self.last else None

    async def publish(self, stream: str, subject: str, payload: bytes, *_: Any) -> None:
        if stream == "state":
            self.last[subject] = payload


@pytest.mark.usefixtures("renewed_at_once")
async def test_an_object_that_comes_too_late_is_let_go(tmp_path: Path) -> None:
    """The run ended while its ledger was written: the end is not said over by what was before."""
    place: Any = Bucket()
    async with bench(tmp_path, blobs=place) as made, anyio.create_task_group() as tasks:
        tasks.start_soon(relay.Relay(made.desk, place, place, made.states.apart).run)
        # So wide that it is compacted only when that is asked for.
        await made.tell("r", started(model={"name": "wide", "context_window": 1_000_000}))
        await made.tell("r", *(item | {"id": f"x{n}"} for n, item in enumerate(decisions(60))))
        await _compacted(made, 0)
        subject = f"wk.v1.state.{TENANT}.{LANE}.r"
        await eventually(lambda: len(place.kept) == 1 and subject in place.last, "the object")
        place.open, place.waiting = anyio.Event(), anyio.Event()
        tasks.start_soon(made.states.run)
        await _compacted(made, 1)
        await eventually(lambda: place.waiting.is_set(), "another on its way")
        await made.tell("r", event("run.finished", "e-end", outcome="succeeded"))
        place.open.set()

        async def ended() -> bool:
            found = json.loads(place.last[subject])
            name = found["blob"]["name"]
            if list(place.kept) != [name] or "since" in found:
                return False
            ledger = json.loads(gzip.decompress(place.kept[name]))["ledger"]
            return bool(ledger["head"].get("finished") == "succeeded")

        await eventually(ended, "the end's state alone")
        tasks.cancel_scope.cancel()


@pytest.mark.usefixtures("renewed_at_once")
async def test_an_object_whose_message_the_disk_refuses_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place: Any = Bucket()
    async with bench(tmp_path, blobs=place) as made, anyio.create_task_group() as tasks:
        tasks.start_soon(relay.Relay(made.desk, place, place, made.states.apart).run)
        await made.tell("r", started(model={"name": "wide", "context_window": 1_000_000}))
        await made.tell("r", *(item | {"id": f"x{n}"} for n, item in enumerate(decisions(60))))
        await _compacted(made, 0)
        await eventually(lambda: len(place.kept) == 1, "the object")
        first = set(place.kept)
        await _compacted(made, 1)
        refused = anyio.Event()

        async def full(**_: Any) -> None:
            refused.set()
            raise StorageFull("no room")

        place.open, place.waiting = anyio.Event(), anyio.Event()
        tasks.start_soon(made.states.run)
        await eventually(lambda: place.waiting.is_set(), "another on its way")
        with monkeypatch.context() as patch:
            patch.setattr(made.desk, "commit", full)
            # Tried again only after a while.
            patch.setattr(state_renewal, "LATEST_SECONDS", 3_600.0)
            place.open.set()
            await refused.wait()
            await eventually(lambda: set(place.kept) == first, "nothing but what is named")
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("remembered", [True, False], ids=["soon", "after the broker forgot the ids"])
async def test_what_goes_out_again_after_a_kill_costs_the_newest_message_no_object(
    tmp_path: Path, remembered: bool
) -> None:
    """Both rows were sent and stand in the outbox still: the first one's message takes the second one's place."""
    subject = f"wk.v1.state.{TENANT}.{LANE}.r"

    def row(name: str) -> OutboxRow:
        blob = Blob(name=name, digest="sha256:" + "0" * 64, bytes=1, encoding="gzip")
        reference = RunStateReference(
            epoch=1, ledger_version=5, ledger_digest="sha256:" + "1" * 64, blob=blob
        )
        return OutboxRow(stream="state", subject=subject, msg_id=f"m-{name}", payload=encode(reference))

    class Remembering(Bucket):
        async def publish(self, stream: str, subject: str, payload: bytes, msg_id: str, *_: Any) -> None:
            if not remembered:
                await super().publish(stream, subject, payload)

    place: Any = Remembering()
    rows = [row("one"), row("two")]
    place.kept, place.last = {"two": b"2"}, {subject: rows[1].payload}
    async with bench(tmp_path, blobs=place) as made, anyio.create_task_group() as tasks:
        async with made.desk.changing():
            await made.desk.commit(outbox=rows)
        tasks.start_soon(relay.Relay(made.desk, place, place, made.states.apart).run)

        async def sent() -> bool:
            return not await made.store.outbox_count(TENANT, LANE)

        await eventually(sent, "an empty outbox")
        tasks.cancel_scope.cancel()
    assert place.last == {subject: rows[1].payload}
    assert place.kept == {"two": b"2"}


async def _compacted(made: Bench, number: int) -> None:
    turns = [
        event("message", f"m{number}-{n}", role=("user", "assistant")[n % 2], content="so and so " * 900)
        for n in range(24)
    ]
    await made.tell("r", *turns)
    answer = await made.ask("r", "compact", reason="test")
    assert answer["state"] == "started", answer
    await settled(made)
    packet = await made.ask("r", "packet")
    known = {"packet_id": packet["packet_id"], "ledger_version": packet["ledger_version"]}
    await made.tell("r", event("run.resumed", f"up-{number}", **known))
