"""What happens to the stream itself: messages lost from it, a stream made anew, rules changed at run time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.blackbox import LANE, Box, Json, blackbox, event, eventually
from tests.support.conversation import talk
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.anyio


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as started:
        yield started


def said(number: int) -> Json:
    return event("message", role="user", content=f"word {number}", session="s1", seq=number)


async def verdict(box: Box, run: str) -> str:
    return str((await box.packet(run))["verdict"])


async def test_messages_lost_from_the_stream_are_a_gap_unless_numbers_prove_otherwise(
    server: NatsServer, tmp_path: Path
) -> None:
    async with blackbox(server, tmp_path) as box:
        bare = await box.start()
        numbered = await box.start(session="s1", seq=1)
        hurt = await box.start(session="s1", seq=1)
        done = await box.start()
        await box.tell(done, event("run.finished", outcome="succeeded"))
        for run in (bare, numbered, hurt, done):
            assert (await box.status(run))["gaps"] == []
        client = await box.connect()
    js = client.jetstream()

    async def publish(run: str, message: Json) -> int:
        ack = await js.publish(f"wk.v1.in.acme.{LANE}.{run}.event", json.dumps(message).encode())
        return int(ack.seq)

    await publish(hurt, said(2))
    last = await publish(bare, event("message", role="user", content="lost"))
    await js.purge_stream("WK_IN", seq=last + 1)
    newest = {numbered: await publish(numbered, said(2)), hurt: await publish(hurt, said(3))}
    await client.close()
    async with blackbox(server, tmp_path) as box:
        box.newest = newest

        async def declared() -> bool:
            return bool((await box.status(bare))["gaps"])

        await eventually(declared, "a gap of the run that cannot prove itself whole")
        assert await verdict(box, bare) == "pause"
        records = [item for item in await box.records(bare) if item["type"] == "gap.declared"]
        assert len(records) == 1
        assert 1 <= records[0]["stream_from"] <= records[0]["stream_through"] <= last
        assert (await box.status(numbered))["gaps"] == []
        assert await verdict(box, numbered) == "continue"
        missing = [item for item in (await box.status(hurt))["gaps"] if "session" in item]
        assert [(item["session"], item["from"], item["through"]) for item in missing] == [("s1", 2, 2)]
        assert (await box.status(done))["gaps"] == []
        assert (await box.look(bare, kind="x", idempotency_key="k"))["code"] == "history_gap"
        accepted = event(
            "gap.accepted", from_=records[0]["stream_from"], through=records[0]["stream_through"], by="ann"
        )
        await box.tell(bare, accepted, channel="authority")
        assert await verdict(box, bare) == "continue"


async def test_a_stream_made_anew_is_read_from_its_beginning(server: NatsServer, tmp_path: Path) -> None:
    async with blackbox(server, tmp_path) as box:
        run = await box.start()
        first = event("question.opened", question_id="q", text="?")
        await box.tell(run, first)
        before = await box.packet(run)
        client = await box.connect()
    js = client.jetstream()
    config = (await js.stream_info("WK_IN")).config
    await js.delete_stream("WK_IN")
    await js.add_stream(config)
    await client.close()
    async with blackbox(server, tmp_path) as box:
        # What was known is recognised, what is new is folded.
        await box.send(run, first)
        await box.send(run, event("question.opened", question_id="q2", text="?"))
        packet = await box.packet(run)
        assert [item["id"] for item in packet["questions"]] == ["q", "q2"]
        assert packet["ledger_version"] >= before["ledger_version"] + 1
        assert box.of(run, "rejected") == []


async def test_what_was_taken_in_before_a_restart_is_a_duplicate_after_it(
    server: NatsServer, tmp_path: Path
) -> None:
    async with blackbox(server, tmp_path) as box:
        run = await box.start()
        told = event("message", id="once", role="user", content="Once.")
        await box.tell(run, told)
        before = await box.status(run)
    async with blackbox(server, tmp_path) as box:
        await box.send(run, told)
        assert (await box.status(run))["position"] == before["position"]
        sequence = await box.send(run, {**told, "content": "Twice."})
        assert (await box.hear_rejected(run, sequence))["code"] == "duplicate_conflict"


async def test_rules_change_at_run_time(server: NatsServer, tmp_path: Path) -> None:
    rule: Json = {"labels": {"stage": "careful"}, "mode": "observe"}
    async with blackbox(server, tmp_path, {}, [rule]) as box:
        it = await talk(box, labels={"stage": "careful"})
        await it.fill(0.78)
        assert (await box.status(it.run))["mode"] == "observe"
        assert box.of(it.run, "packet") == []
        file = tmp_path / "watchkeeper.toml"
        file.write_text("[[rules]]\nlabels = { stage = 'careful' }\nmode = 'loud'\n")
        box.daemon.reload()
        assert (await box.status(it.run))["mode"] == "observe"
        file.write_text("[[rules]]\nlabels = { stage = 'careful' }\nmode = 'live'\n")
        box.daemon.reload()
        assert (await box.status(it.run))["mode"] == "live"
        await it.exchange()
        await box.hear(it.run, "receipt", outcome="applied")
        await box.hear(it.run, "packet", reason="compacted")
        file.write_text("[[rules]]\nlabels = { stage = 'careful' }\nbypass = true\n")
        box.daemon.reload()
        await it.tell(event("question.opened", question_id="q", text="?"))
        assert (await box.packet(it.run))["questions"] == [{"id": "q", "text": "?"}]
