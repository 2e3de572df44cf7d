"""Everything a daemon can be made to count, told to it over the wire: the load behind dashboards and alerts.

Each function tells runs of its own and can go on beside the others. What is asked is only whether the daemon
counts it; what it has to answer is for other tests to say.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import anyio
import nats

from tests.support.bad_summaries import FAILURES, REJECTED, first_ref, only, open_matters
from tests.support.blackbox import Box, Heard, Json, event, eventually, new_run, words
from tests.support.conversation import Talk, at, talk
from tests.support.planted import KINDS, planted
from tests.support.summary_service import Held, Service, altered, silent

SHA: Final = "sha256:" + "5" * 64
OTHER_SHA: Final = "sha256:" + "6" * 64
TRACE: Final = "00-{:032x}-00f067aa0ba902b7-{:02x}"
SAMPLED: Final = TRACE.format(0xAB1E, 1)
UNSAMPLED: Final = TRACE.format(0xDEAF, 0)
FULL: Final = 0.76
LARGE: Final = 1_500
VECTORS: Final = Path(__file__).resolve().parents[1] / "vectors" / "v1"
_OF_AUTHORITY: Final = frozenset(
    {"approval.resolved", "policy.released", "constraint.lifted", "task.changed", "gap.accepted"}
)


@asynccontextmanager
async def outside(url: str, lane: str, tenant: str = "default") -> AsyncIterator[Box]:
    """A client of daemons in other processes that hears all they say of one lane."""
    client = await nats.connect(url)
    heard: list[Heard] = []

    async def note(message: Any) -> None:
        heard.append(
            Heard(message.subject, json.loads(message.data), dict(message.headers or {}), message.data)
        )

    try:
        for space in ("out", "state"):
            await client.subscribe(f"wk.v1.{space}.{tenant}.{lane}.>", cb=note)
        await client.flush()
        nobody: Any = None
        yield Box(url, nobody, client, client.jetstream(), Path(), tenant, lane, heard=heard)
    finally:
        await client.close()


def _in_seconds(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


async def _act(box: Box, run: str, *operations: str) -> None:
    for name in operations:
        await box.authorize(run, name)


async def _declare(box: Box, run: str, name: str, kind: str = "mail", **fields: Any) -> None:
    declared = {"operation_id": name, "kind": kind, "idempotency_key": f"k-{name}", **fields}
    await box.tell(run, event("operation.declared", **declared))


async def _resolve(box: Box, run: str, approval: str, outcome: str, **fields: Any) -> None:
    body = {
        "approval_id": approval,
        "outcome": outcome,
        "by": "ann",
        "action": "deploy",
        "payload_digest": SHA,
    }
    await box.tell(run, event("approval.resolved", **{**body, **fields}), channel="authority")


async def _request(box: Box, run: str, approval: str, **fields: Any) -> None:
    body = {"approval_id": approval, "action": "deploy", "payload_digest": SHA}
    await box.tell(run, event("approval.requested", **{**body, **fields}))


async def take_up(it: Talk, **more: Any) -> None:
    """As an agent that goes on from the newest packet."""
    packet = await it.box.packet(it.run)
    await it.tell(event("context.replaced", by="agent", packet_id=packet["packet_id"]))
    resumed = {"packet_id": packet["packet_id"], "ledger_version": packet["ledger_version"]}
    await it.tell(event("run.resumed", **{**resumed, **more}))


# --- what comes in --------------------------------------------------------------------------------------------


async def every_type(box: Box) -> None:
    """One message of each type an agent or an authority can send, and the ends a run can have."""
    run = await box.start(new_run("types"))
    for path in sorted(VECTORS.glob("*.json")):
        body = json.loads(path.read_bytes())
        plain = {name: value for name, value in body.items() if name not in ("seq", "session", "run", "blob")}
        if "at" in body and body["type"] not in ("run.started", "run.finished"):
            channel = "authority" if body["type"] in _OF_AUTHORITY else "event"
            await box.tell(run, plain, channel=channel)
    for outcome in ("succeeded", "failed", "cancelled"):
        other = await box.start(new_run("short"))
        await box.tell(other, event("run.finished", outcome=outcome))


async def what_is_refused(box: Box) -> None:
    """One message for each reason, more of them in a minute than are answered, and one that comes again."""
    run = await box.start(new_run("refused"))
    said = event("message", role="user", content="once")
    await box.tell(run, said, said, {**said, "content": "twice"})
    broken = [
        b"not json",
        {**event("message", role="user", content="?"), "v": 2},
        {**event("message", role="user", content="?"), "must_understand": ["mood"]},
        event("no.such.type"),
        event("message", role="captain", content="?"),
        {**event("message", role="user", content="?"), "run": "another"},
        event("message", role="user", content="x" * 70_000),
        event("policy.released", version="mine"),
    ]
    for message in broken:
        await box.send(run, message)
    for _ in range(70):
        await box.send(run, b"[]")


async def backlog(box: Box, number: int = 6_000) -> None:
    """More than is read in a moment: to be told while nobody reads."""
    run = new_run("backlog")
    for place in range(number):
        told = event("boundary.marked", id=f"backlog-{place}", kind="other")
        await box.client.publish(f"wk.v1.in.{box.tenant}.{box.lane}.{run}.event", json.dumps(told).encode())
    await box.client.flush()


async def secrets(box: Box) -> None:
    """Every kind that is known by its form."""
    run = await box.start(new_run("secrets"))
    for number, one in enumerate(planted(len(KINDS), seed=7)):
        await box.tell(run, event("message", id=f"secret-{number}", role="user", content=one.text))
    await box.ask(run, "fetch", refs=[f"event:secret-{number}" for number in range(5)])


async def odd_sequences(box: Box) -> None:
    """What a run can do to its own history."""
    run = await box.start(new_run("odd"), session="s1", seq=1)
    begin = event("run.started", goal="Another.", model={"name": "m", "context_window": 9_000})
    await box.tell(
        run,
        {**begin, "session": "s1", "seq": 2},
        event("tool.returned", call_id="none", status="ok", content="", session="s1", seq=3),
        event("tool.called", call_id="c", tool="t", arguments={}, session="s1", seq=4),
        event("tool.called", call_id="c", tool="t", arguments={}, session="s1", seq=5),
        event("message", role="user", content="a", session="s1", seq=5),
        event("message", role="user", content="c", session="s1", seq=7),
    )
    await _declare(box, run, "held")
    await _act(box, run, "held")

    async def declared() -> bool:
        gaps = (await box.status(run))["gaps"]
        return bool(gaps) and gaps[0]["state"] == "declared"

    await eventually(declared, "a declared gap")
    await box.tell(run, event("message", role="user", content="b", session="s1", seq=6))
    await box.tell(run, event("run.resumed", session="s2", seq=1))
    await box.tell(run, event("message", role="user", content="?", session="s1", seq=8))


async def time_passes(box: Box) -> None:
    """What the owner notices by the clock: an approval over, a call and an operation without an end."""
    run = await box.start(new_run("time"))
    await _declare(box, run, "op", "deploy", payload_digest=SHA)
    await _request(box, run, "ap", operation_id="op", expires_at=_in_seconds(1))
    await _resolve(box, run, "ap", "granted", expires_at=_in_seconds(1))
    await _declare(box, run, "long")
    await _act(box, run, "long")
    await box.tell(run, event("tool.called", call_id="c", tool="t", arguments={}))
    wanted = {"approval.expired", "operation.timed_out", "call.abandoned"}

    async def recorded() -> bool:
        return wanted <= {item["type"] for item in await box.records(run)}

    await eventually(recorded, "records of what time did")
    await box.tell(run, event("boundary.marked", kind="other"))
    await _act(box, run, "op")
    await box.tell(run, event("operation.dispatched", operation_id="op"))


# --- what is allowed ------------------------------------------------------------------------------------------


async def permissions(box: Box) -> None:
    """Every answer ``authorize`` knows but those that other loads bring with them."""
    run = await box.start(
        new_run("allowed"),
        constraints=[{"id": "c", "text": "Never wipe.", "source": "user", "forbids": {"kinds": ["wipe"]}}],
    )
    await _act(box, run, "nothing")
    for name in ("done", "lost", "torn"):
        await _declare(box, run, name)
        await _act(box, run, name, name)
    for name, state in (("done", "succeeded"), ("lost", "failed"), ("torn", "unknown")):
        await box.tell(run, event("operation.settled", operation_id=name, state=state))
    await _act(box, run, "done", "lost", "torn")
    await _declare(box, run, "wipe", "wipe")
    await _act(box, run, "wipe")
    for outcome in ("pending", "denied", "revoked", "other"):
        digest = OTHER_SHA if outcome == "other" else SHA
        await _declare(
            box, run, f"op-{outcome}", "deploy", payload_digest=digest, approval_id=f"ap-{outcome}"
        )
        await _act(box, run, f"op-{outcome}")
        await _request(box, run, f"ap-{outcome}")
        if outcome in ("revoked", "other"):
            await _resolve(box, run, f"ap-{outcome}", "granted")
        if outcome in ("denied", "revoked"):
            await _resolve(box, run, f"ap-{outcome}", outcome)
        await _act(box, run, f"op-{outcome}")
    for name in ("first", "second"):
        await _declare(box, run, name, "deploy", payload_digest=SHA, approval_id="ap-once")
        if name == "first":
            await _request(box, run, "ap-once")
            await _resolve(box, run, "ap-once", "granted")
        await _act(box, run, name)
    await box.hear(run, "packet", verdict="reconcile")
    await _resolve(box, run, "ap-pending", "granted")
    await box.tell(
        run,
        # The agent grants itself something, does without asking, does again, and says what cannot be.
        event("approval.resolved", approval_id="ap-x", outcome="granted", by="me", action="deploy"),
        event("operation.dispatched", operation_id="undeclared"),
        event("operation.declared", operation_id="done-2", kind="mail", idempotency_key="k-done"),
        event("operation.dispatched", operation_id="done-2"),
        event("question.answered", question_id="none", answer="?"),
    )
    scoped = await box.start(new_run("scoped"), scope={"kinds": ["read"]}, policy_version="p1")
    await _declare(box, scoped, "op")
    await _act(box, scoped, "op")
    await box.tell(scoped, event("policy.released", version="p2"), channel="authority")
    await box.hear(scoped, "packet", verdict="reload_policy")
    await _act(box, scoped, "op")
    await box.tell(scoped, event("policy.loaded", version="p2"))
    changed = event("task.changed", goal="Another.", owner="bob", trust="low", reason="moved")
    await box.tell(scoped, changed, channel="authority")
    await box.hear(scoped, "packet", verdict="new_context")
    await box.tell(scoped, event("run.resumed"), event("run.paused", reason="lunch"))
    await _act(box, scoped, "op")
    await box.hear(scoped, "packet", verdict="pause")
    await box.tell(scoped, event("run.resumed"), event("run.finished", outcome="cancelled"))
    await _act(box, scoped, "op")
    waiting = await box.start(new_run("waiting"))
    await _declare(box, waiting, "op", "deploy", payload_digest=SHA, approval_id="ap")
    await _request(box, waiting, "ap", operation_id="op")
    await box.tell(waiting, event("step.changed", next_action={"verb": "call", "operation_id": "op"}))
    await box.hear(waiting, "packet", verdict="await_approval")


async def resumes(box: Box) -> None:
    """An agent that goes on well, and in each way that is wrong."""
    run = await box.start(new_run("resumes"), policy_version="p1")
    await box.tell(run, event("policy.released", version="p1"), channel="authority")
    await box.tell(run, event("step.changed", next_action={"verb": "inspect"}))
    await box.hear(run, "packet")
    old = box.of(run, "packet")[-1]
    await box.tell(
        run,
        event("run.resumed", policy_version="p1", first_action={"verb": "inspect"}),
        event("run.resumed", policy_version="p0", first_action={"verb": "inspect"}),
        event("run.resumed", policy_version="p1", first_action={"verb": "edit"}),
        event("run.resumed", policy_version="p1", ledger_version=10**6),
    )
    lifted = event("constraint.set", constraint_id="new", text="Quietly.", source="operator")
    await box.tell(run, lifted, channel="authority")
    await box.tell(
        run, event("run.resumed", packet_id=old["packet_id"], ledger_version=old["ledger_version"])
    )


# --- what is asked --------------------------------------------------------------------------------------------


async def questions(box: Box) -> None:
    """Every verb, every way to fail that does not need a failing daemon, every kind of evidence."""
    run = await box.start(new_run("asked"))
    await box.tell(run, event("message", id="u-1", role="user", content="Where does the zebra sleep?"))
    spawned = event("child.spawned", child_run=f"{run}-child", task="look")
    await box.tell(run, spawned)
    await box.start(f"{run}-child", parent_run=run)
    await box.packet(run)
    await box.ask(run, "context", format="openai")
    await box.ask(run, "context", format="openai", max_tokens=1)
    await box.ask(run, "fetch", refs=["event:u-1", "event:none", "run:elsewhere/event:u-1"])
    await box.ask(run, "search", query="zebra")
    await box.ask(run, "search", query="okapi")
    await box.ask(f"{run}-child", "search", query="zebra", of_run=run)
    await box.ask(run, "compact", reason="may it")
    await box.ask("nobody", "packet")
    await box.ask("nobody", "context", format="openai")
    await box.ask_once(run, "packet", b"no json")
    await box.ask_once(run, "packet", {"after": 10**9})
    done = await box.start(new_run("done"))
    await box.tell(done, event("run.finished", outcome="succeeded"))

    async def gone() -> bool:
        return (await box.ask(done, "status")).code == "run_unknown"

    await eventually(gone, "a forgotten run")
    await box.ask(done, "fetch", **{"from": 1, "through": 1})


# --- budget and compaction ------------------------------------------------------------------------------------


async def usage(box: Box) -> None:
    """Reports that agree, and one that is nonsense."""
    it = await talk(box)
    for number in range(1, 30):
        await it.exchange(40)
        status = await it.box.status(it.run)
        await it.used(status["budget"]["used"] + 20 * (number % 2), traceparent=SAMPLED)
    await it.used(10**6)


async def failures(box: Box, service: Service) -> None:
    """A summariser that fails, in each way it can, for a run each."""
    ways = ("rate_limited", "unavailable", "refused", "length", "echo", "no_json", "silence")

    async def one(name: str) -> None:
        it = await talk(box, run=new_run(f"fails-{name}"))
        service.always[it.run] = FAILURES[name][0]
        await it.fill(FULL, LARGE)
        await box.hear(it.run, "receipt")

    async with anyio.create_task_group() as tasks:
        for name in ways:
            tasks.start_soon(one, name)


async def lies(box: Box, service: Service) -> None:
    """A candidate for each check, a run each."""

    async def one(code: str) -> None:
        it = await talk(box, run=new_run(f"lies-{code}"))
        service.always[it.run] = altered(REJECTED[code])
        await open_matters(it)
        await it.fill(FULL, LARGE)
        await box.hear(it.run, "receipt")

    for codes in (list(REJECTED)[:10], list(REJECTED)[10:]):
        async with anyio.create_task_group() as tasks:
            for code in codes:
                tasks.start_soon(one, code)


async def compactions(box: Box, service: Service) -> None:
    """What sets one off, what comes of it, and what is done without a summary."""

    def nearly(summary: Json, request: Json) -> None:
        good = [{"text": f"Seen part {place} of it.", "refs": [first_ref(request)]} for place in "abcdefgh"]
        text = only("It took 4711 steps.", first_ref(request))
        summary.update(completed=[], inferences=[], observations=[*good, *text])

    async def plain(outcome: str) -> None:
        it = await talk(box, run=new_run(f"plain-{outcome}"), traceparent=SAMPLED)
        await it.fill(FULL)
        await box.hear(it.run, "receipt")
        await take_up(it)
        await it.tell(event("run.finished", outcome=outcome))

    async def trimmed() -> None:
        it = await talk(box, run=new_run("trimmed"))
        await it.exchange(2_500)
        await it.exchange(2_600)
        await it.fill(0.75)
        await box.hear(it.run, "packet", reason="trimmed")
        await take_up(it)

    async def sudden(share: float) -> None:
        it = await talk(box, run=new_run("sudden"))
        await it.fill(0.70)
        await it.used(at(share))
        await box.hear(it.run, "receipt")
        await take_up(it)

    async def smaller() -> None:
        it = await talk(box, run=new_run("smaller"))
        await it.fill(0.6)
        model = {"name": "smaller-model", "context_window": 15_000, "max_output_tokens": 500}
        await it.tell(event("model.changed", model=model))
        await it.exchange(100)
        await box.hear(it.run, "receipt")

    async def requested() -> None:
        it = await talk(box, run=new_run("requested"))
        await it.fill(0.6)
        await box.ask(it.run, "compact", reason="wanted")
        await box.hear(it.run, "receipt")

    async def shadow() -> None:
        it = await talk(box, run=new_run("shadow"), labels={"kind": "shadow"})
        await it.fill(FULL)
        await box.hear(it.run, "receipt")

    async def removed() -> None:
        it = await talk(box, run=new_run("removed"))
        service.always[it.run] = altered(nearly)
        await it.fill(FULL)
        await box.hear(it.run, "receipt")

    async def late() -> None:
        it, held = await talk(box, run=new_run("late")), Held()
        service.script[it.run], service.always[it.run] = [held], silent
        await it.fill(FULL, LARGE)
        await box.hear(it.run, "receipt")
        held.release.set()

    async def ignored() -> None:
        it = await talk(box, run=new_run("ignored"))
        status = await it.fill(FULL)
        await box.hear(it.run, "receipt")
        used = status["budget"]["used"]
        for _ in range(4):
            await it.exchange(100)
            used += 300
            await it.used(used)
        await box.hear(it.run, "notice", kind="not_applied")

    async with anyio.create_task_group() as tasks:
        for outcome in ("succeeded", "failed", "cancelled"):
            tasks.start_soon(plain, outcome)
        for share in (0.91, 1.02):
            tasks.start_soon(sudden, share)
        for one in (trimmed, smaller, requested, shadow, removed, late, ignored):
            tasks.start_soon(one)


async def deferrals(box: Box) -> None:
    """Everything a compaction can wait for, a run each."""

    async def waits(it: Talk, reason: str) -> None:
        await it.box.hear(it.run, "notice", kind="compaction_deferred", reason=reason)

    async def in_flight() -> None:
        it = await talk(box, run=new_run("flight"))
        await it.fill(0.70)
        await it.tell(event("tool.called", call_id="long", tool="build", arguments={}, message_id="mm"))
        await it.used(at(0.76))
        await waits(it, "in_flight")

    async def no_boundary() -> None:
        it = await talk(box, run=new_run("boundary"))
        await it.tell(
            event("message", role="assistant", message_id="m-long", content="Building."),
            event("tool.called", call_id="long", tool="build", arguments={}, message_id="m-long"),
        )
        # Quickly: the call is given up before long.
        await it.exchange(1_500)
        await it.exchange(1_500)
        await it.used(at(0.92))
        await waits(it, "no_boundary")

    async def open_gap() -> None:
        it = await talk(box, run=new_run("gap"), session="s1", seq=1)
        # Quickly: the gap is declared before long.
        await it.tell(event("message", role="user", content="?", session="s1", seq=3))
        await it.exchange(1_500)
        await it.exchange(1_500)
        await it.used(at(FULL))
        await waits(it, "open_gap")

    async def unsaved() -> None:
        it = await talk(box, run=new_run("unsaved"))
        await it.exchange(artifact_id="report")
        await it.fill(FULL)
        await waits(it, "artifact_unsaved")
        await it.fill(0.92)
        await box.hear(it.run, "receipt")
        await take_up(it)

    async with anyio.create_task_group() as tasks:
        for one in (in_flight, no_boundary, open_gap, unsaved):
            tasks.start_soon(one)


async def too_much(box: Box) -> None:
    """More to protect than fits: shortened, then work postponed, then the run is paused."""
    it = await talk(box, run=new_run("too-much"))
    run, number = it.run, 0
    await _declare(box, run, "side", "mail", nonessential=True)
    for choice in ("reduced", "postpone", "pause"):
        while not box.of(run, "notice", kind="choice", choice=choice):
            assert number < 600, f"{choice} was not reached"
            for _ in range(5):
                number += 1
                text = f"rule {number} " + words(75, f"r{number}")
                await box.tell(
                    run, event("constraint.set", constraint_id=f"k{number}", text=text, source="user")
                )
            await box.status(run)
            # A packet is published at most once a second; what it would say is decided at each question.
            if (await box.packet(run))["blockers"] and choice == "postpone":
                await _act(box, run, "side")
            await anyio.sleep(0.1)
