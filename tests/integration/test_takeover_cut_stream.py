"""The stream lost a run's first messages: a new owner on an empty disk goes on from the last owner's state."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest

from storage import Store
from tests.support.blackbox import Box, Json, blackbox, event, eventually, new_run, words
from tests.support.conversation import SMALL_MODEL
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.anyio

RULE = {"constraint_id": "c1", "text": "Never touch prod", "source": "user", "forbids": {"targets": ["prod"]}}
QUICK = {"lease.seconds": 1}


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as started:
        yield started


class Teller:
    """An agent that numbers what it says, or not."""

    def __init__(self, box: Box, run: str, numbered: bool) -> None:
        self.box, self.run, self.numbered, self.count = box, run, numbered, 0

    async def tell(self, type_: str, **fields: Any) -> Json:
        if self.numbered:
            self.count += 1
            fields |= {"session": "s1", "seq": self.count}
        told = event(type_, **fields)
        await self.box.tell(self.run, told)
        return told

    async def declare(self, name: str, key: str, target: str = "x") -> None:
        await self.tell(
            "operation.declared", operation_id=name, kind="pay", idempotency_key=key, target=target
        )

    async def begin(self, **fields: Any) -> None:
        await self.tell("run.started", goal="Pay.", model=SMALL_MODEL, **fields)
        await self.tell("constraint.set", **RULE)
        await self.tell("question.opened", question_id="q", text="Which one?")
        for name, state in (("done", "succeeded"), ("lost", "unknown")):
            await self.declare(f"{name}-{self.run}", f"{name}-{self.run}")
            assert (await self.box.authorize(self.run, f"{name}-{self.run}"))["code"] == "ok"
            await self.tell("operation.settled", operation_id=f"{name}-{self.run}", state=state)
        await self.declare("open", "open")
        await self.declare("forbidden", "forbidden", "prod")

    async def turns(self, first: int, last: int) -> Json:
        for number in range(first, last):
            await self.tell("message", role="user", content=f"turn {number}")
            await self.tell(
                "message", role="assistant", message_id=f"m{number}", content=words(60, f"s{number}")
            )
            await self.tell(
                "tool.called", call_id=f"k{number}", tool="sh", arguments={}, message_id=f"m{number}"
            )
            await self.tell(
                "tool.returned", call_id=f"k{number}", status="ok", content=words(700, f"r{number}")
            )
        return await self.tell("message", role="assistant", content="so far")


async def compacted(box: Box, run: str, version: int) -> None:
    """Ask for a compaction until the checkpoint is there."""

    async def there() -> bool:
        await box.ask(run, "compact")
        await box.settled(run)
        checkpoint = (await box.packet(run))["checkpoint"]
        return checkpoint is not None and checkpoint["version"] >= version

    await eventually(there, f"checkpoint {version}")


async def answers(box: Box, run: str) -> Json:
    """What must not change with the owner."""
    packet = await box.packet(run)
    codes = {}
    for name in (f"done-{run}", f"lost-{run}", "open", "forbidden"):
        codes[name] = (await box.look(run, operation_id=name))["code"]
    checkpoint = packet["checkpoint"]
    return {
        "protected": packet["protected_digest"],
        "verdict": packet["verdict"],
        "codes": codes,
        "checkpoint": checkpoint and (checkpoint["version"], checkpoint["id"]),
    }


async def cut(server: NatsServer, run: str, through: str) -> None:
    """Take messages out of the inbound stream, oldest first."""
    async with await nats.connect(server.url) as client:
        js = client.jetstream()
        state = json.loads((await js.get_last_msg("WK_STATE", f"wk.v1.state.acme.main.{run}")).data or b"")
        seq = state["cursor"]["stream_seq"] if through == "cursor" else await first_of(js, run)
        await js.purge_stream("WK_IN", seq=seq + 1)


async def first_of(js: Any, run: str) -> int:
    found = await js.get_msg("WK_IN", seq=1, subject=f"wk.v1.in.acme.main.{run}.event", next=True)
    return int(found.seq)


@asynccontextmanager
async def owner(server: NatsServer, folder: Path, newest: dict[str, int]) -> AsyncIterator[Box]:
    async with blackbox(server, folder, QUICK) as box:
        yield box
        newest.update(box.newest)


@pytest.mark.parametrize("numbered", [True, False], ids=["numbered", "unnumbered"])
@pytest.mark.parametrize("through", ["cursor", "first message"])
async def test_the_state_goes_on_where_the_stream_is_cut(
    server: NatsServer, tmp_path: Path, through: str, numbered: bool
) -> None:
    newest: dict[str, int] = {}
    async with owner(server, tmp_path / "one", newest) as box:
        agent = Teller(box, new_run(), numbered)
        run = agent.run
        await agent.begin()
        await agent.turns(0, 8)
        await compacted(box, run, 1)
        packet = await box.packet(run)
        await agent.tell(
            "run.resumed", packet_id=packet["packet_id"], ledger_version=packet["ledger_version"]
        )
        told = await agent.turns(8, 10)
        await agent.tell("boundary.marked", kind="turn_ended")
        before = await answers(box, run)
        places = await box.ask(run, "fetch", refs=[f"event:{told['id']}"])
    assert (
        before["codes"]
        == {
            f"done-{run}": "already_succeeded",
            f"lost-{run}": "outcome_unknown",
            "open": "ok",
            "forbidden": "constraint_forbids",
        }
        or before["codes"]["forbidden"] == "constraint_forbids"
    )
    await cut(server, run, through)
    async with owner(server, tmp_path / "two", newest) as agent.box:
        box = agent.box
        assert await answers(box, run) == before
        packet = await box.packet(run)
        assert [item["id"] for item in packet["task"]["constraints"]] == ["c1"]
        again = await box.ask(run, "fetch", refs=[f"event:{told['id']}"])
        if through == "cursor":
            asked: Any = {"from": 2, "through": 2}
            gone = await box.ask(run, "fetch", **asked)
            assert gone.body["items"][0]["status"] == "gone", gone
        else:
            # The chain proves its place, so that it is still there as it was.
            assert again.body["items"] == places.body["items"]
            # Known again, though it came before the state.
            await box.tell(run, told)
            assert await answers(box, run) == before
        # A second declaration under the same key is not let through either.
        await agent.declare("again", f"done-{run}", "elsewhere")
        assert (await box.authorize(run, "again"))["code"] == "already_succeeded"
        taken_up = (await box.packet(run))["packet_id"]
        version = (await box.packet(run))["ledger_version"]
        await agent.tell("run.resumed", packet_id=taken_up, ledger_version=version)
        await agent.turns(10, 14)
        await agent.tell("usage.reported", model=SMALL_MODEL["name"], context_tokens=9_000, output_tokens=1)
        await agent.turns(14, 16)
        await compacted(box, run, 2)
        later = await answers(box, run)
        assert later["codes"] == before["codes"]
    async with owner(server, tmp_path / "two", newest) as box:
        box.newest.update(newest)
        assert await answers(box, run) == later
        assert await box.metric("ledger_mismatches_total") == 0
    async with await Store.open_to_read(tmp_path / "two" / "data") as store:
        assert await store.verify_chain("acme", "main", run) is None


@pytest.mark.parametrize("through", ["cursor", "first message"])
async def test_a_child_goes_on_with_its_parent(server: NatsServer, tmp_path: Path, through: str) -> None:
    newest: dict[str, int] = {}
    async with owner(server, tmp_path / "one", newest) as box:
        parent, child = Teller(box, new_run(), True), Teller(box, new_run("child"), True)
        await parent.tell("run.started", goal="Pay.", model=SMALL_MODEL)
        await parent.tell("constraint.set", **RULE)
        await parent.tell("child.spawned", child_run=child.run, task="Help.")
        await child.begin(parent_run=parent.run)
        before = await answers(box, child.run)
        assert before["codes"]["forbidden"] == "constraint_forbids"
        above = (await box.packet(parent.run))["protected_digest"]
    async with await nats.connect(server.url) as client:
        js = client.jetstream()
        if through == "cursor":
            await cut(server, child.run, through)
        else:
            # All of the parent's, and nothing of the child's.
            await js.purge_stream("WK_IN", seq=await first_of(js, child.run))
    async with owner(server, tmp_path / "two", newest) as box:
        assert await answers(box, child.run) == before
        assert (await box.packet(parent.run))["protected_digest"] == above
    async with owner(server, tmp_path / "two", newest) as box:
        assert await answers(box, child.run) == before


@pytest.mark.parametrize("numbered", [True, False], ids=["numbered", "unnumbered"])
@pytest.mark.parametrize(
    "spoilt",
    [
        {"fold_version": 999},
        {"ledger_digest": "sha256:" + "0" * 64},
        {"ledger": {"head": {"what": 1}, "items": {}}},
        {"v": 7},
    ],
    ids=["newer fold", "other digest", "other form", "newer version"],
)
async def test_a_state_that_cannot_be_read_is_a_gap(
    server: NatsServer, tmp_path: Path, spoilt: Json, numbered: bool
) -> None:
    newest: dict[str, int] = {}
    async with owner(server, tmp_path / "one", newest) as box:
        agent = Teller(box, new_run(), numbered)
        run = agent.run
        await agent.begin()
        await agent.turns(0, 1)
        await box.packet(run)
    await cut(server, run, "cursor" if "v" in spoilt else "first message")
    async with await nats.connect(server.url) as client:
        js, subject = client.jetstream(), f"wk.v1.state.acme.main.{run}"
        state = json.loads((await js.get_last_msg("WK_STATE", subject)).data or b"")
        await js.publish(subject, json.dumps({**state, **spoilt}).encode())
    async with owner(server, tmp_path / "two", newest) as agent.box:
        box = agent.box
        await agent.tell("run.started", goal="Pay.", model=SMALL_MODEL)
        await agent.declare("again", f"done-{run}")

        assert (await box.authorize(run, "again"))["code"] == "history_gap"
        packet = await box.packet(run)
        assert packet["verdict"] == "pause"
        assert "history_gap" in [item["code"] for item in packet["blockers"]]
        for gap in [item["text"] for item in packet["blockers"] if "missing" in item["text"]]:
            first, through = (int(number) for number in re.findall(r" (\d+) ", gap)[:2])
            session = {"session": "s1"} if "session" in gap else {}
            accepted = event("gap.accepted", from_=first, through=through, by="ann", **session)
            await box.tell(run, accepted, channel="authority")
    async with owner(server, tmp_path / "two", newest) as box:
        # Accepted once is accepted for good.
        assert "history_gap" not in [item["code"] for item in (await box.packet(run))["blockers"]], packet


async def test_a_disk_that_is_behind_goes_on_the_same_way(server: NatsServer, tmp_path: Path) -> None:
    newest: dict[str, int] = {}
    async with owner(server, tmp_path / "one", newest) as box:
        agent = Teller(box, new_run(), False)
        run = agent.run
        await agent.tell("run.started", goal="Pay.", model=SMALL_MODEL)
        await box.packet(run)
    shutil.copytree(tmp_path / "one" / "data", tmp_path / "old" / "data")
    async with owner(server, tmp_path / "one", newest) as agent.box:
        box = agent.box
        await agent.begin()
        await agent.turns(0, 2)
        before = await answers(box, run)
    await cut(server, run, "cursor")
    async with owner(server, tmp_path / "old", newest) as box:
        assert await answers(box, run) == before
    async with owner(server, tmp_path / "old", newest) as box:
        assert await answers(box, run) == before
