"""What the daemon takes in and what it refuses: types, rejection codes, limits, counters."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import pytest

from tests.support.blackbox import (
    LANE,
    MODEL,
    TENANT,
    Box,
    Json,
    blackbox,
    event,
    eventually,
    new_run,
    stored,
    words,
)
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.anyio

SHA = "sha256:" + "ab" * 32


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer(config="max_payload: 16777216\n") as started:
        yield started


@pytest.fixture(scope="module")
async def box(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Box]:
    folder = tmp_path_factory.mktemp("intake")
    async with blackbox(server, folder, {"intake.max_event_bytes": 12_000_000}) as opened:
        yield opened


def told(type: str, **fields: Any) -> Json:
    return event(type, **fields)


ACCEPTED: list[tuple[str, Json]] = [
    (
        "event",
        told(
            "run.started",
            goal="Move the column.",
            done_when=["rows match"],
            constraints=[
                {"id": "c-1", "text": "Never drop it.", "source": "user", "forbids": {"kinds": ["db.drop*"]}}
            ],
            scope={"actor": "a", "purpose": "p", "channels": ["x"], "tools": ["*"], "kinds": ["*"]},
            model=MODEL,
            policy_version="p1",
            inputs=[{"name": "spec", "version": "3", "digest": SHA}],
            agent="agent",
            owner="team",
            labels={"env": "prod"},
        ),
    ),
    ("event", told("message", role="system", content="You are careful.")),
    ("event", told("message", role="developer", content="Use tools.")),
    ("event", told("message", id="u-1", role="user", content="Go.", message_id="m-0")),
    (
        "event",
        told(
            "message",
            role="assistant",
            message_id="m-1",
            in_reply_to="u-1",
            content=[
                {"kind": "text", "text": "Looking."},
                {"kind": "reasoning", "text": "hm", "tokens": 3},
                {"kind": "image", "media_type": "image/png", "tokens": 9},
                {"kind": "data", "value": {"a": [1, 2.5, None, True]}},
            ],
        ),
    ),
    (
        "event",
        told(
            "tool.called",
            call_id="c1",
            tool="sh",
            arguments={"cmd": "ls"},
            repeatable=True,
            message_id="m-1",
        ),
    ),
    ("event", told("tool.returned", call_id="c1", status="pending", content="running")),
    (
        "event",
        told("tool.returned", id="r-1", call_id="c1", status="ok", content="a\nb", conclusion="two files"),
    ),
    (
        "event",
        told(
            "usage.reported",
            model="test-model",
            context_tokens=900,
            output_tokens=12,
            input_tokens=900,
            cache_read_tokens=0,
            cache_write_tokens=0,
        ),
    ),
    (
        "event",
        told(
            "step.changed",
            phase="expand",
            completed=[{"text": "read it", "refs": ["event:r-1"]}],
            plan=[{"id": "p1", "text": "add column", "state": "doing"}],
            focus={"files": ["a.sql"], "hypothesis": "it is big", "remaining": ["verify"]},
            next_action={"verb": "inspect", "detail": "look"},
            blockers=[{"id": "b1", "text": "slow"}],
            uncertain=["size"],
        ),
    ),
    ("event", told("input.pinned", name="repo", version="9f31")),
    ("event", told("constraint.set", constraint_id="c-2", text="Be quick.", source="agent")),
    ("event", told("constraint.lifted", constraint_id="c-2", reason="done")),
    ("authority", told("constraint.lifted", constraint_id="c-1", reason="allowed now")),
    (
        "event",
        told(
            "decision.made",
            decision_id="d-1",
            summary="in batches",
            reason="locks",
            refs=["event:r-1"],
            rejected=[{"alternative": "at once", "reason": "locks"}],
        ),
    ),
    ("event", told("question.opened", question_id="q-1", text="Which zone?")),
    ("event", told("question.answered", question_id="q-1", answer="UTC", by="user")),
    (
        "event",
        told(
            "operation.declared",
            operation_id="op-1",
            kind="db.write",
            idempotency_key="k-1",
            target="db/x",
            tool="sh",
            description="write",
            payload_digest=SHA,
            approval_id="ap-1",
        ),
    ),
    (
        "event",
        told(
            "approval.requested",
            approval_id="ap-1",
            action="db.write",
            scope="once",
            payload_digest=SHA,
            operation_id="op-1",
            expires_at="2099-01-01T00:00:00Z",
        ),
    ),
    (
        "authority",
        told(
            "approval.resolved",
            approval_id="ap-1",
            outcome="granted",
            by="ann",
            action="db.write",
            payload_digest=SHA,
        ),
    ),
    ("event", told("operation.dispatched", operation_id="op-1")),
    ("event", told("operation.settled", operation_id="op-1", state="unknown", detail="timed out")),
    (
        "event",
        told(
            "evidence.recorded",
            evidence_id="ev-1",
            claim="row there",
            kind="observed",
            source="s3://b/rows",
            value=3,
            unit="rows",
        ),
    ),
    (
        "event",
        told("operation.reconciled", operation_id="op-1", state="succeeded", evidence="evidence:ev-1"),
    ),
    (
        "event",
        told("artifact.saved", artifact_id="art-1", uri="s3://b/a", sha256="cd" * 32, description="report"),
    ),
    ("event", told("artifact.withdrawn", artifact_id="art-1", reason="wrong")),
    ("authority", told("policy.released", version="p2", approval_kinds=["db.*"], forbidden_kinds=["rm.*"])),
    ("event", told("policy.loaded", version="p2")),
    ("event", told("boundary.marked", kind="turn_ended")),
    ("event", told("child.spawned", child_run="child-of-all", task="count", allowed_tools=["sh"])),
    ("event", told("child.returned", child_run="child-of-all", status="succeeded")),
    ("authority", told("task.changed", goal="Move it slowly.", reason="asked")),
    ("event", told("model.changed", model={**MODEL, "name": "other"})),
    ("event", told("context.replaced", by="agent", context_tokens=500)),
    ("event", told("run.paused", reason="lunch")),
    ("event", told("run.resumed", ledger_version=1, policy_version="p2", first_action={"verb": "inspect"})),
    ("authority", told("gap.accepted", session="s9", from_=1, through=2, by="ann")),
    ("event", told("run.finished", outcome="succeeded", accepted=True, detail="done")),
]


TYPES = {
    *("run.started", "run.paused", "run.finished", "run.resumed", "context.replaced", "task.changed"),
    *("model.changed", "message", "tool.called", "tool.returned", "usage.reported", "step.changed"),
    *("input.pinned", "constraint.set", "constraint.lifted", "decision.made", "question.opened"),
    *("question.answered", "operation.declared", "operation.dispatched", "operation.settled"),
    *("operation.reconciled", "approval.requested", "approval.resolved", "artifact.saved"),
    *("artifact.withdrawn", "evidence.recorded", "policy.released", "policy.loaded", "boundary.marked"),
    *("child.spawned", "child.returned", "gap.accepted"),
}
"""Of the wire protocol, section 1."""


async def test_every_type_is_accepted_and_counted_in_its_position(box: Box) -> None:
    run = new_run("all-types")
    for number, (channel, message) in enumerate(ACCEPTED):
        known = {"ledger_version": number} if "ledger_version" in message else {}
        await box.send(run, {**message, **known}, channel)
    status = await box.status(run)
    assert status["position"] == len(ACCEPTED)
    assert status["ledger_version"] == len(ACCEPTED)
    assert box.of(run, "rejected") == []
    # The one thing among them the ledger cannot use is an acceptance of a gap nobody missed.
    assert status["violations"] == {"illegal_transition": 1}
    assert {message["type"] for _, message in ACCEPTED} == TYPES


async def test_an_item_may_be_named_by_the_message_id_alone(box: Box) -> None:
    run = await box.start()
    await box.tell(
        run,
        event("operation.declared", id="op-7", kind="db.write", idempotency_key="k"),
        event("approval.requested", id="ap-7", action="db.write", operation_id="op-7", payload_digest=SHA),
        event("question.opened", id="q-7", text="Why?"),
    )
    packet = await box.packet(run)
    assert [item["id"] for item in packet["operations"]] == ["op-7"]
    assert [item["id"] for item in packet["approvals"]] == ["ap-7"]
    assert [item["id"] for item in packet["questions"]] == ["q-7"]
    await box.tell(
        run,
        event("operation.dispatched", id="op-7"),
        event("operation.settled", id="op-7", state="succeeded", receipt="r"),
        event("question.answered", id="q-7", answer="because"),
    )
    await box.tell(
        run,
        event(
            "approval.resolved", id="ap-7", outcome="granted", by="a", action="db.write", payload_digest=SHA
        ),
        channel="authority",
    )
    packet = await box.packet(run)
    assert [(item["id"], item["state"]) for item in packet["operations"]] == [("op-7", "succeeded")]
    assert [(item["id"], item["state"]) for item in packet["approvals"]] == [("ap-7", "granted")]
    assert packet["questions"] == []
    assert box.of(run, "rejected") == []


async def test_what_a_newer_agent_adds_is_ignored(box: Box) -> None:
    run = await box.start(
        mood="fine", labels={"a": "b"}, traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    )
    await box.send(run, {**event("message", role="user", content="Hi."), "later": {"x": [1]}, "run": run})
    assert (await box.status(run))["position"] == 2


def good(**changes: Any) -> Json:
    message = {**event("message", role="user", content="Hello."), **changes}
    return {name: value for name, value in message.items() if value is not ...}


def nested(depth: int) -> bytes:
    head = json.dumps(event("tool.called", call_id="c", tool="t"))[:-1]
    inside = depth - 1
    return f'{head}, "arguments": {"[" * inside}{"]" * inside}}}'.encode()


def huge_nesting() -> bytes:
    half = 5 * 1024 * 1024
    head = json.dumps(event("tool.called", call_id="c", tool="t"))[:-1].encode()
    return head + b', "arguments": ' + b"[" * half + b"]" * half + b"}"


MALFORMED = {
    "nothing": b"",
    "words": b"hello",
    "half": json.dumps(good()).encode()[:-5],
    "two objects": json.dumps(good()).encode() * 2,
    "an array": b"[1,2]",
    "a number": b"17",
    "null": b"null",
    "a string": b'"text"',
    "bytes that are no UTF-8": b'{"v":1,"id":"\xff\xfe"}',
    "an overlong encoding": json.dumps(good(content="X")).encode().replace(b'"X"', b'"\xc0\xaf"'),
    "a surrogate in UTF-8": json.dumps(good(content="X")).encode().replace(b'"X"', b'"\xed\xa0\x80"'),
    "an escaped NUL": json.dumps(good(content="a\0b")).encode(),
    "a raw NUL": json.dumps(good(content="X")).encode().replace(b'"X"', b'"\x00"'),
    "a NUL in a name": json.dumps(good(**{"a\0": 1})).encode(),
    "a lone high surrogate": json.dumps(good(content="\ud800")).encode(),
    "a lone low surrogate": json.dumps(good(content="\udc00x")).encode(),
    "surrogates in the wrong order": json.dumps(good(content="\udc00\ud800")).encode(),
    "65 levels": nested(65),
    "10 MB of brackets": huge_nesting(),
    "NaN": json.dumps(good(content="X")).encode().replace(b'"X"', b"NaN"),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_what_is_no_message_is_malformed_and_the_next_one_is_folded(box: Box, name: str) -> None:
    run = await box.start()
    sequence = await box.send(run, MALFORMED[name])
    await box.send(run, good())
    said = await box.hear_rejected(run, sequence)
    assert said["code"] == "malformed", said
    check_rejected(said, run, sequence)
    assert (await box.status(run))["position"] == 2


def check_rejected(said: Json, run: str, sequence: int, channel: str = "event") -> None:
    assert said["type"] == "message.rejected"
    assert (said["v"], said["tenant"], said["lane"], said["run"]) == (1, TENANT, LANE, run)
    assert said["stream_seq"] == sequence
    assert said["subject"] == f"wk.v1.in.{TENANT}.{LANE}.{run}.{channel}"
    assert said["detail"]
    assert said["epoch"] >= 1
    assert said["must_understand"] == []


async def test_text_at_the_edge_is_fine(box: Box) -> None:
    run = await box.start()
    await box.send(run, json.dumps(good(content="\U0001f600 \\u0000 \\ud800")).encode())
    await box.send(run, nested(64))
    await box.send(run, json.dumps(good(content="[" * 500 + '"{')).encode())
    assert (await box.status(run))["position"] == 4
    assert box.of(run, "rejected") == []


REFUSED: dict[str, tuple[str, Json]] = {
    "no version": ("invalid_field", good(v=...)),
    "version of the wrong type": ("invalid_field", good(v="1")),
    "version 0": ("invalid_field", good(v=0)),
    "no id": ("invalid_field", good(id=...)),
    "an id with a space": ("invalid_field", good(id="a b")),
    "an id of 129": ("invalid_field", good(id="x" * 129)),
    "an empty id": ("invalid_field", good(id="")),
    "no time": ("invalid_field", good(at=...)),
    "a time without zone": ("invalid_field", good(at="2026-11-30T09:12:00")),
    "a time that is no time": ("invalid_field", good(at="yesterday")),
    "no type": ("invalid_field", good(type=...)),
    "a type that is no text": ("invalid_field", good(type=7)),
    "no content": ("invalid_field", good(content=...)),
    "content of the wrong type": ("invalid_field", good(content=5)),
    "an unknown part": ("invalid_field", good(content=[{"kind": "smell"}])),
    "an unknown role": ("invalid_field", good(role="boss")),
    "seq without session": ("invalid_field", good(seq=1)),
    "seq 0": ("invalid_field", good(session="s", seq=0)),
    "seq of the wrong type": ("invalid_field", good(session="s", seq="1")),
    "session of the wrong type": ("invalid_field", good(session=3)),
    "negative usage": (
        "invalid_field",
        event("usage.reported", model="m", context_tokens=-1, output_tokens=0),
    ),
    "a window of 0": ("invalid_field", event("model.changed", model={"name": "m", "context_window": 0})),
    "a window below 0": ("invalid_field", event("model.changed", model={"name": "m", "context_window": -5})),
    "an unknown verb": ("invalid_field", event("step.changed", next_action={"verb": "dance"})),
    "an unknown state": (
        "invalid_field",
        event("operation.settled", operation_id="op", state="perhaps"),
    ),
    "a digest that is none": (
        "invalid_field",
        event("operation.declared", operation_id="o", kind="k", idempotency_key="i", payload_digest="abc"),
    ),
    "a list for a text": ("invalid_field", event("decision.made", decision_id="d", summary=["x"])),
    "an unknown type": ("unknown_type", good(type="message.sung")),
    "a type of the daemon's own": ("unknown_type", good(type="resume.packet")),
    "a newer version": ("unsupported_version", good(v=2)),
    "a newer version of an unknown type": ("unsupported_version", good(v=7, type="x")),
    "a field to be understood": ("must_understand", good(must_understand=["tempo"], tempo=3)),
    "a field to be understood of another type": ("must_understand", good(must_understand=["call_id"])),
    "another run": ("run_mismatch", good(run="somebody-else")),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_message_that_cannot_be_accepted_is_refused_by_code(box: Box, name: str) -> None:
    code, message = REFUSED[name]
    run = await box.start()
    sequence = await box.send(run, message)
    await box.send(run, good())
    said = await box.hear_rejected(run, sequence)
    assert said["code"] == code, said
    check_rejected(said, run, sequence)
    if re.fullmatch(r"[A-Za-z0-9._:/@+=-]{1,128}", str(message.get("id", ""))):
        assert said["event_id"] == message["id"]
    assert (await box.status(run))["position"] == 2


async def test_fields_a_reader_must_know_are_named(box: Box) -> None:
    run = await box.start()
    sequence = await box.send(run, good(must_understand=["role", "tempo"], tempo=3))
    assert "tempo" in (await box.hear_rejected(run, sequence))["detail"]
    await box.send(run, good(must_understand=["role", "content"]))
    assert (await box.status(run))["position"] == 2


async def test_a_window_that_is_refused_leaves_the_old_one(box: Box) -> None:
    run = await box.start()
    sequence = await box.send(run, event("model.changed", model={"name": "m", "context_window": 0}))
    await box.hear_rejected(run, sequence)
    assert (await box.status(run))["budget"]["window"] == MODEL["context_window"]


async def test_a_message_over_the_limit_is_too_large(box: Box) -> None:
    run = await box.start()
    sequence = await box.send(run, good(content="x" * 12_000_000))
    await box.send(run, good(content=words(1000)))
    said = await box.hear_rejected(run, sequence)
    assert said["code"] == "too_large"
    check_rejected(said, run, sequence)
    assert (await box.status(run))["position"] == 2


AUTHORITY_ONLY = {
    "approval.resolved": event(
        "approval.resolved", approval_id="ap-1", outcome="granted", by="me", action="db.write"
    ),
    "policy.released": event("policy.released", version="p9"),
    "constraint.lifted": event("constraint.lifted", constraint_id="c-1", reason="in the way"),
    "a constraint replaced": event(
        "constraint.set", constraint_id="c-9", text="None.", source="user", replaces="c-1"
    ),
    "task.changed": event("task.changed", goal="Something else.", reason="easier"),
    "gap.accepted": event("gap.accepted", session="s", from_=1, through=1, by="me"),
}


@pytest.mark.parametrize("name", AUTHORITY_ONLY)
async def test_what_only_an_authority_may_say_is_refused_from_the_agent(box: Box, name: str) -> None:
    run = await box.start(
        constraints=[{"id": "c-1", "text": "Never.", "source": "user", "forbids": {"kinds": ["x"]}}]
    )
    await box.tell(run, event("approval.requested", approval_id="ap-1", action="db.write"))
    before = (await box.packet(run))["protected_digest"]
    sequence = await box.send(run, AUTHORITY_ONLY[name])
    said = await box.hear_rejected(run, sequence)
    assert said["code"] == "not_authorized", said
    check_rejected(said, run, sequence)
    packet = await box.packet(run)
    assert packet["protected_digest"] == before
    assert (await box.status(run))["position"] == 2


async def test_an_agent_that_grants_its_own_approval_is_noted(box: Box) -> None:
    run = await box.start()
    await box.tell(run, event("approval.requested", approval_id="ap-1", action="db.write"))
    await box.send(run, {**AUTHORITY_ONLY["approval.resolved"], "id": "self"})
    assert (await box.status(run))["violations"] == {"self_approval": 1}
    await box.hear(run, "notice", kind="violation", code="self_approval")


RECORDS = {
    "settings.applied": {"settings": {"authority_required": False}},
    "authorization.requested": {"operation_id": "op-1", "request_id": "r"},
    "approval.expired": {"approval_id": "ap-1"},
    "operation.timed_out": {"operation_id": "op-1"},
    "call.abandoned": {"call_id": "c", "event_id": "e"},
    "gap.declared": {"session": "s", "from": 1, "through": 2},
}


@pytest.mark.parametrize("channel", ["event", "authority"])
@pytest.mark.parametrize("name", RECORDS)
async def test_the_sidecars_own_types_are_refused_elsewhere(box: Box, name: str, channel: str) -> None:
    run = await box.start()
    sequence = await box.send(run, event(name, epoch=1, **RECORDS[name]), channel)
    said = await box.hear_rejected(run, sequence)
    # ``settings.applied`` belongs to the lane, so it is a stranger in a run in two ways.
    assert said["code"] in ("not_authorized", *(["run_mismatch"] if name == "settings.applied" else [])), said
    check_rejected(said, run, sequence, channel)


async def test_an_agents_type_on_the_record_channel_is_refused(box: Box) -> None:
    run = await box.start()
    sequence = await box.send(run, good(epoch=1), "record")
    assert (await box.hear_rejected(run, sequence))["code"] == "not_authorized"
    assert (await box.status(run))["position"] == 1


async def test_a_channel_or_run_that_is_none_is_answered_to_nobody_in_particular(box: Box) -> None:
    for tail in ("_odd.event", "fine.gossip"):
        subject = f"wk.v1.in.{TENANT}.{LANE}.{tail}"
        ack = await box.js.publish(subject, json.dumps(good()).encode())
        said = (await box.hear("_", "rejected", stream_seq=ack.seq))[0]
        assert said["subject"] == subject
        assert said["run"] == "_"


async def test_the_same_id_with_other_bytes_is_a_conflict_and_the_first_stands(box: Box) -> None:
    run = await box.start()
    first = good(id="twice", content="First.")
    await box.send(run, first)
    await box.send(run, first)
    sequence = await box.send(run, {**first, "content": "Second."})
    said = await box.hear_rejected(run, sequence)
    assert said["code"] == "duplicate_conflict"
    assert said["event_id"] == "twice"
    check_rejected(said, run, sequence)
    status = await box.status(run)
    assert status["position"] == 2
    assert status["violations"] == {"duplicate_conflict": 1}
    packet = await box.packet(run)
    assert [item["text"] for item in packet["task"]["current_request"]] == ["First."]
    assert {"code": "duplicate_conflict", "count": 1} in packet["violations"]


async def test_every_answer_stands_in_its_own_stream_unfenced(box: Box) -> None:
    run = await box.start()
    sequence = await box.send(run, b"nonsense")
    await box.hear_rejected(run, sequence)
    found = await stored(box.js, "WK_REJECTED", f"wk.v1.out.{TENANT}.{LANE}.{run}.rejected")
    assert [json.loads(data)["stream_seq"] for _, data, _ in found] == [sequence]
    assert "Nats-Expected-Last-Subject-Sequence" not in found[0][2]


async def test_at_most_sixty_a_minute_are_answered_and_all_are_counted(box: Box) -> None:
    before = await box.metric("events_rejected_total", code="malformed")
    run = await box.start()
    # Two minutes at most can be touched by a burst of this size; what is answered tells how many were.
    sequences = [await box.send(run, b"noise %d" % number) for number in range(200)]
    await box.status(run)
    await eventually(lambda: _all_counted(box, before + 200), "count of all")
    minutes = 1 + (await _minute_of(box, sequences[0]) != await _minute_of(box, sequences[-1]))
    told = await box.hear(run, "rejected", 60)
    await box.send(run, good())
    await box.status(run)
    await eventually(lambda: _drained(box, run), "an empty outbox")
    told = box.of(run, "rejected")
    assert 60 <= len(told) <= 60 * minutes
    assert [item["stream_seq"] for item in told[:60]] == sequences[:60]
    other = await box.start()
    quiet = await box.send(other, b"noise")
    await box.hear_rejected(other, quiet)


async def _all_counted(box: Box, wanted: float) -> bool:
    return await box.metric("events_rejected_total", code="malformed") == wanted


async def _drained(box: Box, run: str) -> bool:
    return (await box.status(run))["outbox_pending"] == 0


async def _minute_of(box: Box, sequence: int) -> str:
    message = await box.js.get_msg("WK_IN", seq=sequence)
    assert message.time is not None
    return message.time.strftime("%H:%M")


async def test_what_came_is_counted_by_type_and_duplicates_beside_it(box: Box) -> None:
    before = await box.metric("events_total", type="boundary.marked")
    twice = await box.metric("events_duplicate_total")
    run = await box.start()
    mark = event("boundary.marked", kind="other")
    for _ in range(3):
        await box.send(run, mark)
    await box.status(run)
    assert await box.metric("events_total", type="boundary.marked") == before + 1
    assert await box.metric("events_duplicate_total") == twice + 2


async def test_a_stormy_mixture_leaves_the_good_ones_in_order(box: Box) -> None:
    run = await box.start()
    names: list[str] = []
    refused: list[int] = []
    for number in range(40):
        message = good(id=f"g-{number}", content=f"word {number}")
        names.append(message["id"])
        await box.send(run, message)
        if number % 2:
            broken = list(MALFORMED.values())[number % len(MALFORMED)]
            refused.append(await box.send(run, broken[:1000]))
    packet = await box.packet(run)
    assert [item["event_id"] for item in packet["task"]["current_request"]] == names
    with anyio.fail_after(30):
        await box.hear(run, "rejected", len(refused))
    assert sorted(item["stream_seq"] for item in box.of(run, "rejected")) == refused
