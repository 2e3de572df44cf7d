"""After another owner took a lane over on an empty disk, an agent goes on from the same messages as before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.blackbox import Box, Json, blackbox, event, eventually
from support.conversation import Talk, talk
from support.daemon import DaemonProcess
from support.nats_server import NatsServer

pytestmark = pytest.mark.anyio

FORMATS = ("openai", "openai_responses", "anthropic")


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as started:
        yield started


async def contexts(box: Box, run: str) -> dict[str, Any]:
    """What an agent would go on from, in every shape: packet, messages, texts apart."""
    found = {}
    for format in FORMATS:
        answer = await box.ask(run, "context", format=format)
        assert answer.status is None, answer
        found[format] = [
            answer.body.get(name) for name in ("packet_id", "messages", "system", "through_event_id")
        ]
    return found


async def take_up(it: Talk) -> None:
    packet = await it.box.packet(it.run)
    await it.tell(
        event("run.resumed", packet_id=packet["packet_id"], ledger_version=packet["ledger_version"])
    )


async def compacted_run(box: Box, **fields: Any) -> Talk:
    """A run with a system text and one applied compaction."""
    it = await talk(box, **fields)
    await it.tell(event("message", role="system", content="You mend pumps."))
    await it.fill(0.75)
    await box.hear(it.run, "packet", reason="compacted")
    return it


async def changed(it: Talk) -> None:
    """What the packet of before does not say: a user's word, a question, an authority's rule, an open call."""
    await it.tell(
        event("message", role="user", content="and now the other one"),
        event("question.opened", question_id="q-late", text="Which one?"),
        event("tool.called", call_id="open", tool="valve", arguments={"turn": 1}),
    )
    rule = event("constraint.set", constraint_id="c9", text="touch nothing red", source="operator")
    await it.box.tell(it.run, rule, channel="authority")


async def runs_of_every_kind(box: Box) -> dict[str, Talk]:
    """One run for each way a context can stand when its owner goes."""
    found = {"offered": await compacted_run(box), "taken up": await compacted_run(box)}
    await take_up(found["taken up"])
    found["changed"] = await compacted_run(box)
    await take_up(found["changed"])
    await changed(found["changed"])
    trimmed = found["trimmed"] = await talk(box)
    for tokens in (2_500, 2_600):
        await trimmed.exchange(tokens)
    await trimmed.fill(0.75)
    await box.hear(trimmed.run, "packet", reason="trimmed")
    assert (await box.status(trimmed.run))["checkpoint"] is None
    again = found["trimmed after a checkpoint"] = await compacted_run(box)
    await take_up(again)
    await again.exchange(2_500)
    await again.fill(0.75)
    await eventually(
        lambda: len([p for p in box.of(again.run, "packet") if p["reason"] in ("trimmed", "compacted")]) > 1,
        "another shortening",
    )
    found["never shortened"] = await talk(box)
    await changed(found["never shortened"])
    for it in found.values():
        await box.settled(it.run)
    return found


def check(name: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    for format in FORMATS:
        if name == "never shortened":
            # A packet of the moment, which another owner makes for itself: the same words.
            assert after[format][1:] == before[format][1:], name
        else:
            assert after[format] == before[format], name


@pytest.mark.parametrize("goes", ["stops", "is killed"])
async def test_the_next_owner_answers_as_the_former_one(
    server: NatsServer, tmp_path: Path, goes: str
) -> None:
    quick = {"lease.seconds": 1}
    if goes == "stops":
        async with blackbox(server, tmp_path / "first", quick) as box:
            runs = await runs_of_every_kind(box)
            before = {name: await contexts(box, it.run) for name, it in runs.items()}
            newest = dict(box.newest)
    else:
        with DaemonProcess(
            server.url, tmp_path / "killed", {"LEASE__SECONDS": "1", "TENANT": "acme"}
        ) as daemon:
            daemon.start()
            await daemon.owning()
            # A second daemon of this process would compete for the lane: only its clients are wanted.
            async with blackbox(server, tmp_path / "beside", {**quick, "lanes": "other"}) as box:
                runs = await runs_of_every_kind(box)
                before = {name: await contexts(box, it.run) for name, it in runs.items()}
                newest = dict(box.newest)
            daemon.kill9()
    told = json.dumps(before)
    assert "CHANGES since" in told
    assert "touch nothing red" in told
    assert "You mend pumps." in told
    assert "result left out" in told
    async with blackbox(server, tmp_path / "second", quick) as box:
        box.newest.update(newest)
        after = {name: await contexts(box, it.run) for name, it in runs.items()}
        for name in runs:
            check(name, before[name], after[name])
        # And it stays so after a restart on the new disk.
    async with blackbox(server, tmp_path / "second", quick) as box:
        for name, it in runs.items():
            check(name, before[name], await contexts(box, it.run))


async def test_a_state_without_the_packet_is_answered_with_a_fresh_one(
    server: NatsServer, tmp_path: Path
) -> None:
    async with blackbox(server, tmp_path / "first") as box:
        it = await compacted_run(box)
        subject = f"wk.v1.state.acme.main.{it.run}"
        told: list[Json] = []

        async def is_told() -> bool:
            told[:] = [item.body for item in box.heard if item.subject == subject and item.body["checkpoint"]]
            return bool(told)

        await eventually(is_told, "the state")
        packet = (await box.hear(it.run, "packet", reason="compacted"))[-1]
        assert told[-1]["packet"] == {
            "packet_id": packet["packet_id"],
            "text": packet["text"],
            "checkpoint_id": packet["checkpoint"]["id"],
            "position": packet["tail"]["through_position"],
        }
    # As an owner of an older version leaves it.
    old = {name: value for name, value in told[-1].items() if name != "packet"}
    async with blackbox(server, tmp_path / "other", {"lanes": "elsewhere"}) as box:
        await box.js.publish(subject, json.dumps(old).encode())
    async with blackbox(server, tmp_path / "second") as box:
        found = await contexts(box, it.run)
        assert found["openai"][0] != packet["packet_id"]
        assert "You mend pumps." in json.dumps(found["openai"])


async def test_a_forgotten_run_is_gone_for_an_owner_that_never_saw_it(
    server: NatsServer, tmp_path: Path
) -> None:
    soon = {"retention.succeeded_days": 1e-6, "lease.seconds": 1}
    async with blackbox(server, tmp_path / "first", soon) as box:
        run = await box.start()
        await box.tell(run, event("message", id="said", role="user", content="hello"))
        await box.tell(run, event("decision.made", decision_id="d", summary="so be it"))
        await box.tell(run, event("run.finished", outcome="succeeded"))
        subject = f"wk.v1.state.acme.main.{run}"

        async def buried() -> bool:
            return any(item.subject == subject and item.body.get("tombstones") for item in box.heard)

        await eventually(buried, "the tombstone")
        wanted = {
            "event:said": "gone",
            "pos:2": "gone",
            "pos:4": "gone",
            "pos:5": "not_found",
            "decision:d": "gone",
        }
        known = (await box.ask_once(run, "fetch", {"refs": list(wanted)})).body["items"]
        assert {item["ref"]: item["status"] for item in known} == wanted
    async with blackbox(server, tmp_path / "second") as box:
        found = (await box.ask(run, "fetch", refs=list(wanted))).body["items"]
        assert {item["ref"]: item["status"] for item in found} == wanted
        # Nothing is left that could tell which ids there were.
        (other,) = (await box.ask(run, "fetch", refs=["event:never"])).body["items"]
        assert other["status"] == "gone"
        ranged = (await box.ask(run, "fetch", **{"from": 1, "through": 99})).body["items"]
        assert [item["status"] for item in ranged] == ["gone"] * 4
        assert (await box.ask(run, "status")).code == "run_unknown"
        assert (await box.ask("never-was", "fetch", refs=["pos:1"])).code == "run_unknown"
