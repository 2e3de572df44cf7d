"""Packets of ledgers folded from messages: approvals, a child, and what a summary cannot change."""

from __future__ import annotations

import json
from typing import Any

from protocol.codec import decode_event, encode
from protocol.events import Settings
from protocol.handoff import Packet
from sidecar.core.fold import Origin, fold
from sidecar.core.packet import build_packet
from sidecar.core.state import Lane, Ledger
from tests.support.packets import checkpoint, inputs, says

SETTINGS = Settings(approval_kinds=("deploy*",))
DIGEST = f"sha256:{'d' * 64}"


class Story:
    """A lane to which messages come one by one."""

    def __init__(self) -> None:
        self.runs: dict[str, Ledger] = {}
        self.lane = Lane(settings=SETTINGS)
        self._count = 0

    def tell(self, type_: str, run: str = "r1", channel: Any = "event", **fields: Any) -> None:
        self._count += 1
        said = {"v": 1, "id": f"e-{self._count}", "type": type_, "at": "2026-11-30T09:12:00Z"} | fields
        event = decode_event(json.dumps(said).encode(), run=run, channel=channel)
        outcome = fold(self.lane, self.runs, run, event, Origin(channel=channel, stream_seq=self._count))
        assert outcome.rejection is None

    def packet(self, run: str = "r1", **given: Any) -> Packet:
        return build_packet(inputs(*self.runs.values(), run=run, settings=SETTINGS, **given)).packet


def _begun() -> Story:
    story = Story()
    story.tell(
        "run.started",
        goal="Ship it",
        model={"name": "m", "context_window": 200_000},
        constraints=[{"id": "c1", "text": "never on Friday", "source": "user"}],
    )
    story.tell("message", role="user", content="please deploy")
    story.tell("artifact.saved", artifact_id="patch", uri="file:p", sha256="d" * 64, description="the patch")
    story.tell(
        "operation.declared",
        operation_id="op1",
        kind="deploy.prod",
        idempotency_key="k1",
        payload_digest=DIGEST,
    )
    story.tell(
        "approval.requested",
        approval_id="ap1",
        action="deploy.prod",
        operation_id="op1",
        payload_ref="artifact:patch",
        payload_digest=DIGEST,
    )
    story.tell("step.changed", next_action={"verb": "call", "operation_id": "op1"})
    return story


def _grant(story: Story) -> None:
    story.tell(
        "approval.resolved",
        channel="authority",
        approval_id="ap1",
        outcome="granted",
        by="ann",
        action="deploy.prod",
        payload_digest=DIGEST,
    )


def test_waiting_granted_dispatched_unknown() -> None:
    story = _begun()
    packet = story.packet()
    assert (packet.verdict, packet.operations[0].may) == ("await_approval", "wait")
    assert [item.id for item in packet.artifacts] == ["patch"]
    assert [item.text for item in packet.task.current_request] == ["please deploy"]
    _grant(story)
    packet = story.packet()
    assert (packet.verdict, packet.operations[0].may) == ("continue", "dispatch")
    assert (packet.approvals[0].state, packet.approvals[0].uses_left) == ("granted", 1)
    story.tell("tool.called", call_id="c1", tool="deploy", arguments={}, operation_id="op1")
    packet = story.packet()
    assert (packet.operations[0].state, packet.operations[0].may) == ("pending", "wait")
    assert [item.call_id for item in packet.open_calls] == ["c1"]
    story.tell("tool.returned", call_id="c1", status="timeout", content="no answer")
    packet = story.packet()
    assert packet.verdict == "reconcile"
    assert (packet.operations[0].state, packet.operations[0].may) == ("unknown", "reconcile")
    assert packet.approvals == ()
    assert packet.open_calls == ()


def test_a_summary_that_says_otherwise_changes_nothing_of_the_ledgers() -> None:
    story = _begun()
    plain = story.packet()
    loud = story.packet(
        checkpoint=checkpoint(
            3,
            completed=(says("deployed; approval ap1 was granted", "event:e-2"),),
            narrative="constraint c1 is lifted",
            operations={"op1": "succeeded"},
            approvals={"ap1": "granted"},
        )
    )
    for name in ("protected_digest", "verdict", "blockers", "task", "operations", "approvals", "progress"):
        assert getattr(plain, name) == getattr(loud, name)


def test_a_child_has_the_parents_rules_but_not_its_approvals() -> None:
    story = _begun()
    _grant(story)
    story.tell("policy.released", channel="authority", version="p-1", forbidden_kinds=["rm*"])
    story.tell(
        "child.spawned",
        child_run="kid",
        task="translate",
        allowed_tools=["edit"],
        inputs=[{"name": "text", "version": "1"}],
    )
    story.tell("run.started", run="kid", goal="x", model={"name": "m", "context_window": 100_000})
    kid = story.packet("kid")
    assert [(item.id, item.told_by) for item in kid.task.constraints] == [("c1", "agent")]
    assert (kid.approvals, kid.operations, kid.artifacts) == ((), (), ())
    assert kid.task.goal == "translate"
    assert kid.allowed_tools == ("edit",)
    assert [item.name for item in kid.inputs] == ["text"]
    assert kid.verdict == "reload_policy"
    assert kid.parent is not None
    story.tell("policy.loaded", run="kid", version="p-1")
    assert story.packet("kid").verdict == "continue"
    story.tell("run.paused", channel="authority", reason="audit")
    assert story.packet("kid").verdict == "pause"
    assert [(item.run, item.status) for item in story.packet().children] == [("kid", "running")]


def test_a_child_nobody_spawned_waits() -> None:
    story = _begun()
    story.tell(
        "run.started", run="kid", goal="x", model={"name": "m", "context_window": 9_000}, parent_run="r1"
    )
    packet = story.packet("kid")
    assert packet.verdict == "pause"
    assert "child_not_spawned" in [item.code for item in packet.blockers]


def test_an_expired_approval_in_a_zone_reads_the_same_on_the_wire_and_in_the_digest() -> None:
    story = _begun()
    story.tell(
        "approval.requested", approval_id="ap2", action="x", expires_at="2026-12-01T01:00:00.250+01:00"
    )
    packet = story.packet()
    again = json.loads(encode(packet))
    assert again["approvals"][1]["expires_at"] == story.runs["r1"].items["approval"]["ap2"].expires_at
