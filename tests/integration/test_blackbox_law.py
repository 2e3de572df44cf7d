"""The law from outside: one stream of messages, one protected part and one set of answers, however served.

The same messages go to daemons that compact, only look, read one at a time, hear everything twice, or take
over half-way with nothing on disk. Also here: what is done when the protected part does not fit.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.blackbox import Box, Json, blackbox, event, eventually, words
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.anyio

SHA = [f"sha256:{number:064x}" for number in range(4)]
MODEL = {"name": "small", "context_window": 16_000, "max_output_tokens": 1_000}
KINDS = ("db.write", "note.write", "web.post", "x.y")
SEEDS = range(6)
SETTINGS: Json = {"authority.approval_kinds": ["db.*"], "intake.gap_after_seconds": 3600}


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as started:
        yield started


def history(seed: int) -> list[tuple[str, Json]]:
    """A life of about 150 messages: everything a run may say, in an order nobody would choose."""
    dice = random.Random(seed)
    out: list[tuple[str, Json]] = []
    seq = {"s1": 0, "s2": 0}
    session = "s1"

    def tell(type: str, channel: str = "event", **fields: Any) -> None:
        message = event(type, **fields)
        message["id"] = f"m-{len(out)}"
        if channel == "event" and dice.random() < 0.5:
            seq[session] += 1 if dice.random() < 0.97 else 2
            message |= {"session": session, "seq": seq[session]}
        out.append((channel, message))

    def name(kind: str) -> str:
        return f"{kind}-{dice.randrange(4)}"

    tell("run.started", goal="Do it.", model=MODEL, policy_version="p0")
    for number in range(150):
        match dice.randrange(26):
            case 0 | 1 | 2:
                role = dice.choice(["user", "assistant"])
                tell("message", role=role, content=words(400, f"w{number}"))
            case 3 | 4:
                more = {"operation_id": name("op")} if dice.random() < 0.3 else {}
                tell("tool.called", call_id=name("c"), tool="t", arguments={"n": number}, **more)
            case 5 | 6 | 7:
                status = dice.choice(["ok", "ok", "error", "timeout", "pending"])
                tell("tool.returned", call_id=name("c"), status=status, content=words(600, f"r{number}"))
            case 8:
                tell(
                    "usage.reported",
                    model="small",
                    context_tokens=100 * number + 1,
                    output_tokens=1,
                    scope="aggregate",
                )
            case 9:
                tell(
                    "step.changed",
                    phase=f"ph{number}",
                    next_action={"verb": "call", "operation_id": name("op")},
                    plan=crowd(dice.choice([0, 0, 3, 400])),
                )
            case 10:
                forbids = {"kinds": [dice.choice(KINDS)]} if dice.random() < 0.3 else {"targets": ["nowhere"]}
                source = dice.choice(["agent", "user"])
                tell(
                    "constraint.set",
                    constraint_id=name("k"),
                    text=f"t{number}",
                    source=source,
                    forbids=forbids,
                )
            case 11:
                tell("constraint.lifted", "authority", constraint_id=name("k"), reason="r")
            case 12:
                tell(
                    "decision.made",
                    decision_id=name("d"),
                    summary=f"s{number}",
                    refs=[f"evidence:{name('ev')}"],
                )
            case 13:
                tell("question.opened", question_id=name("q"), text="?")
            case 14:
                tell("question.answered", question_id=name("q"), answer="!")
            case 15 | 16:
                known = {"payload_digest": dice.choice(SHA)} if dice.random() < 0.8 else {}
                tell(
                    "operation.declared",
                    operation_id=name("op"),
                    kind=dice.choice(KINDS),
                    idempotency_key=name("key"),
                    target="t",
                    nonessential=dice.random() < 0.3,
                    **known,
                )
            case 17:
                tell("operation.dispatched", operation_id=name("op"))
            case 18:
                state = dice.choice(["succeeded", "failed", "unknown"])
                tell("operation.settled", operation_id=name("op"), state=state)
            case 19:
                state, proof = dice.choice(["succeeded", "failed", "review"]), f"evidence:{name('ev')}"
                tell("operation.reconciled", operation_id=name("op"), state=state, evidence=proof)
            case 20:
                tell(
                    "approval.requested",
                    approval_id=name("ap"),
                    action=dice.choice(KINDS),
                    payload_digest=dice.choice(SHA),
                )
            case 21:
                asked = [item for _, item in out if item["type"] == "approval.requested"]
                if asked:
                    item = dice.choice(asked)
                    tell(
                        "approval.resolved",
                        "authority",
                        approval_id=item["approval_id"],
                        action=item["action"],
                        payload_digest=item["payload_digest"],
                        outcome=dice.choice(["granted", "granted", "denied", "revoked"]),
                        by="ann",
                    )
            case 22:
                kind = dice.choice(["observed", "inferred"])
                tell(
                    "evidence.recorded",
                    evidence_id=name("ev"),
                    claim=f"c{number}",
                    kind=kind,
                    source="event:m-1",
                )
            case 23:
                tell("policy.released", "authority", version=dice.choice(["p0", "p1"]))
            case 24:
                tell("policy.loaded", version=dice.choice(["p0", "p1"]))
            case 25:
                if number == 100:
                    session = "s2"
                tell(dice.choice(["run.paused", "run.resumed"]), reason="r")
    if seed % 3:
        # Otherwise the first causes would hide every other.
        tell("run.resumed", "authority")
        for name_of in seq:
            tell("gap.accepted", "authority", session=name_of, from_=1, through=1000, by="ann")
        tell("policy.released", "authority", version="p2")
        tell("policy.loaded", version="p2")
    # One that nothing stands against but the want of room, where there is such a want.
    tell(
        "operation.declared",
        operation_id="op-4",
        kind="calm",
        idempotency_key="key-4",
        target="t",
        nonessential=True,
    )
    tell("step.changed", plan=crowd(400 if seed % 2 else 0))
    return out


def crowd(count: int) -> list[Json]:
    """A plan of so many things to do; 400 are more than the small window has room for."""
    return [{"id": f"t{n}", "text": f"look at part {n} of the tree", "state": "todo"} for n in range(count)]


def facts_of(packet: Json, status: Json, looks: Json) -> Json:
    """What may not depend on how the messages were served."""
    kept = ("task", "inputs", "policy", "progress", "operations", "approvals", "questions", "evidence")
    return {
        "protected_digest": packet["protected_digest"],
        "verdict": packet["verdict"],
        "blockers": packet["blockers"],
        "violations": packet["violations"],
        "open_calls": packet["open_calls"],
        "ledger_version": packet["ledger_version"],
        "gaps": status["gaps"],
        "looks": looks,
        **{name: packet[name] for name in kept if name in ("policy", "progress", "approvals", "questions")},
        "unsettled": [item for item in packet["operations"] if item["state"] not in ("succeeded", "failed")],
    }


async def facts(box: Box, run: str) -> Json:
    looks = {name: (await box.look(run, operation_id=name))["code"] for name in [f"op-{n}" for n in range(5)]}
    looks |= {
        f"{kind}/{key}": (await box.look(run, kind=kind, idempotency_key=key, payload_digest=SHA[0]))["code"]
        for kind in KINDS
        for key in ("key-0", "key-new")
    }
    return facts_of(await box.packet(run), await box.status(run), looks)


@asynccontextmanager
async def served(server: NatsServer, folder: Path, way: str, **more: Any) -> AsyncIterator[Box]:
    async with blackbox(server, folder, {**SETTINGS, "tenant": way, **more}) as box:
        box.tenant = way
        yield box


WAYS: dict[str, Json] = {
    "live": {"mode": "live", "budget.min_gain": 0.1},
    "observe": {"mode": "observe"},
    "shadow": {"mode": "shadow"},
    "single": {"intake.batch": 1},
    "twice": {"mode": "live"},
}


async def test_however_it_is_served_the_same_messages_mean_the_same(
    server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lives = {f"life-{seed}": history(seed) for seed in SEEDS}
    found: dict[str, Json] = {}
    compactions = 0
    for way, more in WAYS.items():
        async with served(server, tmp_path_factory.mktemp(way), way, **more) as box:
            for run, life in lives.items():
                for number, (channel, message) in enumerate(life):
                    await box.send(run, message, channel)
                    if way == "twice":
                        await box.send(run, message, channel)
                        earlier = life[(number * 7) % (number + 1)]
                        await box.send(run, earlier[1], earlier[0])
                found[f"{way}/{run}"] = await facts(box, run)
            if way == "live":
                compactions = len([item for item in box.heard if item.kind == "receipt"])
    assert compactions > 0
    half: dict[str, int] = {}
    async with served(server, tmp_path_factory.mktemp("taken"), "taken") as box:
        for run, life in lives.items():
            for channel, message in life[:75]:
                half[run] = await box.send(run, message, channel)
            await box.status(run)
    async with served(server, tmp_path_factory.mktemp("over"), "taken") as box:
        box.newest = half
        for run, life in lives.items():
            for channel, message in life[75:]:
                await box.send(run, message, channel)
            found[f"taken/{run}"] = await facts(box, run)
    for run in lives:
        for way in (*WAYS, "taken"):
            assert found[f"{way}/{run}"] == found[f"live/{run}"], (way, run)
    # The lives are not all alike, and hold what is worth comparing.
    codes = {code for item in found.values() for code in item["looks"].values()}
    assert len(codes) >= 6, codes
    assert {"ok", "postponed"} <= {item["looks"]["op-4"] for item in found.values()}
    assert len({item["protected_digest"] for item in found.values()}) == len(lives)


# --- what does not fit ----------------------------------------------------------------------------------------


async def test_what_must_survive_is_reduced_then_work_is_postponed_then_all_is_stopped(
    server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with served(server, tmp_path_factory.mktemp("fit"), "fit") as box:
        run = await box.start(model=MODEL)
        await box.tell(
            run,
            event(
                "operation.declared", operation_id="side", kind="x", idempotency_key="a", nonessential=True
            ),
            event("operation.declared", operation_id="main", kind="x", idempotency_key="b"),
        )
        usable = (await box.status(run))["budget"]["usable"]
        number = 0

        async def more(count: int) -> Json:
            nonlocal number
            for _ in range(count):
                number += 1
                text = f"rule {number} " + "word " * 60
                told = event("constraint.set", constraint_id=f"k{number}", text=text, source="user")
                await box.tell(run, told)
            packet = await box.packet(run)
            # Never is a protected item dropped to fit.
            assert len(packet["task"]["constraints"]) == number
            assert len(packet["operations"]) == 2
            return packet

        packet = await more(5)
        whole = packet["task"]["constraints"][0]["text"]
        while packet["task"]["constraints"][0]["text"] == whole:
            assert number < 200
            packet = await more(5)
        assert "constraint:k1" in packet["task"]["constraints"][0]["text"]
        assert packet["verdict"] == "continue"
        await box.hear(run, "notice", kind="choice", choice="reduced")
        assert len(packet["text"].encode()) / 4 <= usable / 4
        while not [item for item in packet["blockers"] if item["code"] == "postponed"]:
            assert (await box.look(run, operation_id="side"))["code"] == "ok"
            assert number < 300
            packet = await more(5)
        assert {item["id"]: item["may"] for item in packet["operations"]} == {
            "main": "dispatch",
            "side": "wait",
        }
        assert (await box.look(run, operation_id="side"))["code"] == "postponed"
        assert (await box.authorize(run, "side"))["code"] == "postponed"
        assert (await box.look(run, operation_id="main"))["code"] == "ok"
        await box.hear(run, "notice", kind="choice", choice="postpone")
        while packet["verdict"] != "pause":
            assert number < 500
            packet = await more(10)
        assert "protected_too_large" in {item["code"] for item in packet["blockers"]}
        await box.hear(run, "notice", kind="choice", choice="pause")
        assert (await box.authorize(run, "side"))["code"] == "postponed"
        choices = [item["choice"] for item in box.of(run, "notice", kind="choice")]
        assert choices == ["reduced", "postpone", "pause"]
        # Room again: everything is as before.
        for place in range(1, number + 1):
            lifted = event("constraint.lifted", constraint_id=f"k{place}", reason="done")
            await box.tell(run, lifted, channel="authority")
        packet = await box.packet(run)
        assert packet["verdict"] == "continue"
        assert (await box.authorize(run, "side"))["code"] == "ok"
        await eventually(lambda: box.of(run, "packet")[-1]["verdict"] == "continue", "a packet that goes on")
