"""The packet: its fields, its digest, byte stability of its text, children, and the order of what is left
out."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
import pytest

from protocol.codec import canonical, digest, encode
from protocol.events import Settings
from protocol.handoff import DIGEST_EXCLUDES, Packet
from sidecar.core.packet import BudgetFigures, build_packet
from sidecar.core.protected import protected_digest, protected_view
from sidecar.core.state import (
    Approval,
    Call,
    ConstraintItem,
    Evidence,
    Gap,
    Ledger,
    Operation,
    Pause,
    Request,
    UserMessage,
)
from sidecar.core.text import render
from tests.support.packets import busy, checkpoint, cleared, inputs, lines_about, says, started


def test_everything_of_a_busy_run_is_in_it() -> None:
    built = build_packet(
        inputs(
            busy(),
            checkpoint=checkpoint(observations=(says("it builds", "event:e-5"),), narrative="fine"),
            recent=lines_about(2, "line"),
            cleared=cleared(1),
        )
    )
    packet = built.packet
    assert built.choice is None
    assert packet.verdict == "reconcile"
    assert [item.id for item in packet.task.constraints] == ["c-1", "c-2"]
    assert [item.event_id for item in packet.task.current_request] == ["e-29", "e-30"]
    assert [item.event_id for item in packet.task.user_messages] == ["e-2", "e-9"]
    assert [(item.id, item.state, item.may) for item in packet.operations] == [
        ("op-1", "not_started", "dispatch"),
        ("op-2", "unknown", "reconcile"),
        ("op-0", "succeeded", "none"),
    ]
    assert packet.operations[2].receipt == "tag v1"
    assert [item.id for item in packet.approvals] == ["ap-1"]
    assert [item.id for item in packet.decisions] == ["d-1"]
    assert [item.id for item in packet.artifacts] == ["log", "patch"]
    assert [item.id for item in packet.evidence] == ["ev-1", "ev-2", "ev-3"]
    assert packet.contradictions == (("evidence:ev-2", "evidence:ev-3"),)
    assert [(item.run, item.status) for item in packet.children] == [("r1-child", "running")]
    assert [item.call_id for item in packet.open_calls] == ["c-38"]
    assert [item.call_id for item in packet.abandoned_calls] == ["c-20"]
    assert [item.text for item in packet.summary.observations] == ["it builds"]
    assert packet.summary.narrative == "fine"
    assert [(item.code, item.count) for item in packet.violations] == [
        ("duplicate_call", 1),
        ("orphan_result", 2),
    ]
    assert packet.checkpoint is not None
    assert packet.checkpoint.covers_through.position == 10
    assert packet.ledger_version == 42
    assert (packet.authority, packet.contract) == ("required", "declared")
    assert packet.omitted == ()
    assert packet.protected_digest == protected_digest(protected_view({"r1": busy()}, "r1"))


def test_before_the_first_checkpoint() -> None:
    packet = build_packet(inputs(started())).packet
    plain = msgspec.json.decode(encode(packet))
    assert plain["checkpoint"] is None
    assert plain["summary"] == {"completed": [], "observations": [], "inferences": [], "narrative": ""}
    assert plain["parent"] is None
    assert plain["policy"] == {"released": None, "loaded": None}
    assert plain["progress"]["next_action"] is None
    assert plain["task"]["scope"] is None
    assert "allowed_tools" not in plain


def test_it_reads_back_from_its_bytes_and_the_text_is_that_of_its_fields() -> None:
    packet = build_packet(inputs(busy(), checkpoint=checkpoint(), cleared=cleared(2))).packet
    assert msgspec.json.decode(encode(packet), type=Packet) == packet
    assert render(packet) == packet.text


def test_the_wire_shows_the_protected_view_as_it_was_digested() -> None:
    ledger = busy()
    ledger.put("evidence", Evidence(id="ev-1", claim="0.1", kind="observed", source="event:e-5", value=False))
    ledger.put("gap", Gap(id="event/s1/4", channel="event", session="s1", first=4, through=5))
    view = protected_view({"r1": ledger}, "r1")
    plain = msgspec.json.decode(encode(build_packet(inputs(ledger)).packet))
    plain["task"].pop("user_messages")
    for name in (
        "task",
        "inputs",
        "policy",
        "progress",
        "questions",
        "approvals",
        "contradictions",
        "parent",
    ):
        assert plain[name] == view[name]
    assert [item for item in plain["evidence"] if item["id"] == "ev-1"] == view["evidence"]
    assert [item for item in plain["artifacts"] if item["id"] == "patch"] == view["artifacts"]
    unsettled = [dict(item) for item in plain["operations"] if item["state"] in ("not_started", "unknown")]
    assert [item.pop("may") for item in unsettled] == ["wait", "reconcile"]
    assert unsettled == view["operations"]


def test_the_digest_is_over_the_message_as_read() -> None:
    packet = build_packet(inputs(busy())).packet
    plain = msgspec.json.decode(encode(packet))
    assert plain["digest"] == digest(
        {name: item for name, item in plain.items() if name not in DIGEST_EXCLUDES}
    )
    plain["at"], plain["epoch"], plain["packet_id"] = "2027-01-01T00:00:00Z", 99, "other"
    assert plain["digest"] == digest(
        {name: item for name, item in plain.items() if name not in DIGEST_EXCLUDES}
    )


@pytest.mark.parametrize("reason", ["changed", "takeover"])
def test_text_and_protected_digest_do_not_move_with_moment_owner_budget_or_version(reason: Any) -> None:
    first = build_packet(inputs(busy(), checkpoint=checkpoint(narrative="fine"))).packet
    later = busy()
    later.head.version += 17
    later.head.position += 5
    second = build_packet(
        inputs(
            later,
            checkpoint=checkpoint(narrative="fine"),
            epoch=8,
            at="2027-03-01T00:00:00Z",
            packet_id="pk-2",
            reason=reason,
            budget=BudgetFigures(200_000, 170_000, 130_000, 60_000, "critical"),
            cleared=cleared(3),
        )
    ).packet
    assert first.text == second.text
    assert first.protected_digest == second.protected_digest
    assert canonical(first) != canonical(second)


def test_the_same_inputs_give_the_same_bytes() -> None:
    given = inputs(busy(), checkpoint=checkpoint(narrative="fine"), recent=lines_about(3, "x"))
    assert encode(build_packet(given).packet) == encode(build_packet(given).packet)


def test_no_time_version_id_or_budget_figure_is_in_the_text() -> None:
    given = inputs(
        busy(),
        packet_id="pk-unique",
        epoch=918273,
        budget=BudgetFigures(654321, 543210, 432109, 321098, "critical"),
        checkpoint=checkpoint(),
    )
    text = build_packet(given).packet.text
    for absent in (
        "pk-unique",
        "918273",
        "654321",
        "543210",
        "432109",
        "321098",
        "critical",
        "2026-",
        "cp-1",
    ):
        assert absent not in text


def test_order_of_the_text() -> None:
    text = build_packet(
        inputs(busy(), checkpoint=checkpoint(narrative="fine"), recent=lines_about(1, "x"))
    ).packet.text
    headings = [line.split(" ")[0] for line in text.splitlines()]
    wanted = [
        "VERDICT",
        "GOAL",
        "CONSTRAINT",
        "REQUEST",
        "INPUT",
        "COMPLETED",
        "PLAN",
        "NEXT",
        "OPERATION",
        "APPROVAL",
        "DECISION",
        "OPEN-QUESTION",
        "ARTIFACT",
        "EVIDENCE",
        "UNCERTAIN",
        "SUMMARY-NARRATIVE",
        "RECENT",
    ]
    places = [headings.index(heading) for heading in wanted]
    assert places == sorted(places)


def test_who_told_a_constraint_stands_beside_it() -> None:
    text = build_packet(inputs(busy())).packet.text
    assert 'CONSTRAINT "c-1" (operator, as told by the agent): "never deploy on Friday" forbids' in text
    assert 'CONSTRAINT "c-2" (user, told by authority): "no force push"' in text


def test_without_a_required_authority_the_packet_says_so() -> None:
    packet = build_packet(inputs(started(), settings=Settings(authority_required=False))).packet
    assert packet.authority == "agent"
    assert "AUTHORITY agent" in packet.text


@pytest.mark.parametrize("contract", ["missing", "inferred", "declared"])
def test_contract(contract: str) -> None:
    ledger = started(constraint_seen=contract == "declared")
    ledger.head.started = contract != "missing"
    packet = build_packet(inputs(ledger)).packet
    assert packet.contract == contract
    assert (f"CONTRACT {contract}" in packet.text) == (contract != "declared")
    assert (packet.verdict == "pause") == (contract == "missing")


def test_a_childs_packet_is_its_own() -> None:
    parent = busy()
    child = started(
        "r1-child", parent="r1", spawned=True, allowed_tools=("bash",), required_artifacts=("report",)
    )
    child.put("request", Request(id="e-1", text="translate it", position=1))
    packet = build_packet(inputs(child, parent)).packet
    assert packet.parent is not None
    assert packet.parent.run == "r1"
    assert [item.id for item in packet.task.constraints] == ["c-1", "c-2"]
    assert (packet.operations, packet.approvals, packet.decisions, packet.questions) == ((), (), (), ())
    assert (packet.artifacts, packet.evidence, packet.inputs, packet.task.user_messages) == ((), (), (), ())
    assert packet.allowed_tools == ("bash",)
    assert packet.required_artifacts == ("report",)
    assert packet.contract == "declared"
    assert packet.verdict == "reload_policy"


def test_a_childs_constraints_of_its_own_agent_do_not_reach_its_parent() -> None:
    parent = busy()
    child = started("r1-child", parent="r1", spawned=True)
    child.put("constraint", ConstraintItem(id="mine", text="x", source="user", told_by="authority"))
    packet = build_packet(inputs(parent, child)).packet
    assert "mine" not in [item.id for item in packet.task.constraints]


def test_calls_abandoned_before_the_boundary_are_not_told_again() -> None:
    ledger = busy()
    assert [
        item.call_id
        for item in build_packet(inputs(ledger, checkpoint=checkpoint(19))).packet.abandoned_calls
    ] == ["c-20"]
    assert build_packet(inputs(ledger, checkpoint=checkpoint(20))).packet.abandoned_calls == ()


def test_statements_about_what_no_longer_holds_are_not_rendered() -> None:
    ledger = busy()
    given = inputs(
        ledger,
        checkpoint=checkpoint(
            completed=(says("did C", "decision:d-0"), says("did B", "decision:d-1", "decision:d-0")),
            observations=(says("old rule", "constraint:c-0"), says("forgotten", "event:e-3")),
            inferences=(says("no refs"),),
        ),
        statements_dead=lambda ref: ref == "event:e-3",
    )
    packet = build_packet(given).packet
    assert [item.text for item in packet.summary.completed] == ["did B"]
    assert packet.summary.observations == ()
    assert [item.text for item in packet.summary.inferences] == ["no refs"]
    assert [(item.cls, item.count) for item in packet.omitted] == [("drop", 3)]


def test_user_messages_within_their_budget_by_rank() -> None:
    ledger = started()
    texts = {
        "e-1": (3, "first " * 8),
        "e-2": (1, "chat " * 8),
        "e-3": (2, "never x " * 8),
        "e-4": (1, "hello " * 8),
    }
    for position, (name, (rank, text)) in enumerate(texts.items(), start=1):
        ledger.put("user", UserMessage(id=name, text=text, position=position, rank=rank))
    packet = build_packet(inputs(ledger, user_tokens=29)).packet
    assert [item.event_id for item in packet.task.user_messages] == ["e-1", "e-3"]
    assert [(item.cls, item.count) for item in packet.omitted] == [("reference", 2)]
    whole = build_packet(inputs(ledger, user_tokens=60)).packet
    assert [item.event_id for item in whole.task.user_messages] == ["e-1", "e-2", "e-3", "e-4"]


def test_a_long_user_message_is_given_by_reference() -> None:
    ledger = started()
    ledger.put("user", UserMessage(id="e-1", text="x" * 5000, position=1, rank=3))
    (message,) = build_packet(inputs(ledger, user_tokens=200)).packet.task.user_messages
    assert message.text == "x" * 200 + "… [5000 bytes, ref event:e-1]"


def _may(change: Any, **given: Any) -> str:
    ledger = started()
    ledger.put("operation", Operation(id="op", kind="deploy", idempotency_key="k"))
    change(ledger)
    (operation,) = build_packet(inputs(ledger, **given)).packet.operations
    return operation.may


@pytest.mark.parametrize(
    ("may", "change"),
    [
        ("dispatch", lambda ledger: None),
        ("wait", lambda ledger: ledger.put("approval", Approval(id="a", action="deploy", operation_id="op"))),
        (
            "none",
            lambda ledger: ledger.put(
                "approval", Approval(id="a", action="deploy", operation_id="op", state="denied")
            ),
        ),
        (
            "dispatch",
            lambda ledger: ledger.put(
                "approval",
                Approval(id="a", action="deploy", operation_id="op", state="granted", uses_left=1),
            ),
        ),
        (
            "wait",
            lambda ledger: ledger.put("call", Call(id="e-9", call_id="c", tool="sh", operation_id="op")),
        ),
        ("none", lambda ledger: setattr(ledger.head, "pauses", (Pause("authority", "audit"),))),
        ("none", lambda ledger: setattr(ledger.head, "finished", "failed")),
    ],
    ids=["free", "pending", "denied", "granted", "call", "paused", "finished"],
)
def test_may_of_an_operation_not_started(may: str, change: Any) -> None:
    assert _may(change) == may


@pytest.mark.parametrize(
    ("state", "may"),
    [("pending", "wait"), ("unknown", "reconcile"), ("succeeded", "none"), ("failed", "none")],
)
def test_may_of_others(state: Any, may: str) -> None:
    ledger = started()
    ledger.put("operation", Operation(id="op", kind="deploy", idempotency_key="k", state=state))
    (operation,) = build_packet(inputs(ledger)).packet.operations
    assert operation.may == may


def test_a_forbidden_operation_may_nothing() -> None:
    settings = Settings(forbidden_kinds=("deploy*",))
    assert _may(lambda ledger: None, settings=settings) == "none"


@pytest.mark.parametrize("moment", ["2026-12-01T00:00:00+00:00", "2027-01-01T01:00:00+01:00"])
def test_an_approval_whose_time_is_over_permits_no_dispatch_though_no_record_says_so(moment: str) -> None:
    """The clock takes a permission away, and changes nothing else that is said."""

    def approved(ledger: Ledger) -> None:
        ledger.put(
            "approval",
            Approval(
                id="a",
                action="deploy",
                operation_id="op",
                state="granted",
                uses_left=1,
                expires_at="2026-12-01T00:00:00Z",
            ),
        )

    before = datetime.fromisoformat("2026-11-30T23:59:59.999+00:00")
    assert _may(approved) == _may(approved, now=before) == "dispatch"
    assert _may(approved, now=datetime.fromisoformat(moment)) == "none"
    ledger = started()
    ledger.put("operation", Operation(id="op", kind="deploy", idempotency_key="k"))
    approved(ledger)
    early, late = (
        build_packet(inputs(ledger, now=now)).packet for now in (before, datetime.fromisoformat(moment))
    )
    assert early.protected_digest == late.protected_digest
    assert (early.verdict, early.blockers) == (late.verdict, late.blockers)
    assert early.approvals == late.approvals
    assert "may=none" in late.text
