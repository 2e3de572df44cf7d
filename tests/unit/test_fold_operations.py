"""Operations: their table, evidence against it, authorization as an act, reconciliation, repeated effects."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.core.calls import RESULTS_NAMED
from support.story import D1, D2, Story, codes


@pytest.fixture
def story() -> Story:
    story = Story()
    story.start()
    return story


def unknown(story: Story, operation: str = "op", **fields: str) -> None:
    story.declare(operation, **fields)
    story.act(operation)
    story.tell("operation.dispatched", operation_id=operation)
    story.tell("operation.settled", operation_id=operation, state="unknown")
    assert story.state(operation) == "unknown"


def test_ok_reserves_and_a_dispatch_confirms_it(story: Story) -> None:
    story.declare("op")
    decision = story.act("op")
    assert (decision.code, decision.allowed, decision.reserved) == ("ok", True, True)
    assert story.state("op") == "pending"
    assert codes(story.tell("operation.dispatched", operation_id="op")) == []
    assert codes(story.tell("tool.called", call_id="c", tool="t", arguments={}, operation_id="op")) == []
    outcome = story.tell("operation.settled", operation_id="op", state="succeeded", receipt="r-1")
    assert codes(outcome) == []
    assert story.ledger().items["operation"]["op"].receipt == "r-1"
    assert story.violations() == {}


def test_same_request_gets_the_same_answer_only_until_the_operation_went_out(story: Story) -> None:
    story.declare("op")
    assert story.act("op", "q-1").reserved
    again = story.act("op", "q-1")
    assert (again.code, again.reserved) == ("ok", True)
    assert story.act("op", "q-2").code == "in_flight"
    story.tell("operation.dispatched", operation_id="op")
    assert story.act("op", "q-1").code == "in_flight"
    story.tell("operation.settled", operation_id="op", state="succeeded")
    assert story.act("op", "q-1").code == "already_succeeded"


def test_two_askers_of_one_approval_cannot_both_get_it(story: Story) -> None:
    story.grant("ap", digest=D1)
    story.lane.settings = type(story.lane.settings)(approval_kinds=("deploy",))
    story.declare("a", payload_digest=D1)
    story.declare("b", payload_digest=D1)
    assert story.act("a", "q-a").code == "ok"
    assert story.approval("ap") == "consumed"
    assert story.act("b", "q-b").code == "approval_consumed"


def test_a_request_id_names_one_operation(story: Story) -> None:
    story.declare("a")
    story.declare("b")
    story.act("a", "q-1")
    decision = story.act("b", "q-1")
    assert decision.invalid
    assert not decision.allowed
    assert story.state("b") == "not_started"


def test_an_undeclared_operation_is_unknown_to_authorize(story: Story) -> None:
    assert story.act("nothing").code == "unknown_operation"
    assert story.act("nothing").operation_id == "nothing"


def test_dispatch_without_ok_is_judged(story: Story) -> None:
    story.declare("op")
    assert codes(story.tell("operation.dispatched", operation_id="op")) == []
    assert story.state("op") == "pending"


def test_dispatch_without_permission_is_pending_and_recorded(story: Story) -> None:
    story.lane.settings = type(story.lane.settings)(approval_kinds=("deploy",))
    story.declare("op", payload_digest=D1)
    outcome = story.tell("tool.called", call_id="c", tool="t", arguments={}, operation_id="op")
    assert codes(outcome) == ["unauthorized_write"]
    assert story.state("op") == "pending"


def test_dispatch_under_an_expired_approval(story: Story) -> None:
    story.grant("ap", operation_id="op")
    story.declare("op", payload_digest=D1)
    story.record("approval.expired", approval_id="ap")
    outcome = story.tell("operation.dispatched", operation_id="op")
    assert codes(outcome) == ["expired_approval_used", "unauthorized_write"]


def test_an_unauthorised_run_uses_up_the_approval_it_ran_under(story: Story) -> None:
    story.grant("ap", digest=D1)
    story.lane.settings = type(story.lane.settings)(approval_kinds=("deploy",))
    story.declare("a", payload_digest=D1)
    story.declare("b", payload_digest=D1)
    story.tell("run.paused", reason="wait")
    assert codes(story.tell("operation.dispatched", operation_id="a")) == ["unauthorized_write"]
    story.tell("run.resumed")
    assert story.code("b") == "approval_consumed"


@pytest.mark.parametrize(
    ("said", "state"), [("succeeded", "succeeded"), ("failed", "unknown"), ("unknown", "unknown")]
)
def test_settled_without_dispatch(story: Story, said: str, state: str) -> None:
    story.declare("op")
    assert codes(story.tell("operation.settled", operation_id="op", state=said)) == ["illegal_transition"]
    assert story.state("op") == state


@pytest.mark.parametrize(
    ("type_", "fields", "expected"),
    [
        ("operation.dispatched", {}, ["illegal_transition", "unauthorized_write"]),
        ("operation.settled", {"state": "succeeded"}, ["illegal_transition"]),
        ("operation.settled", {"state": "failed"}, ["illegal_transition"]),
        ("operation.reconciled", {"state": "failed", "evidence": "event:x"}, ["illegal_transition"]),
    ],
)
def test_anything_of_an_undeclared_id_may_have_happened(
    story: Story, type_: str, fields: dict[str, str], expected: list[str]
) -> None:
    outcome = story.tell(type_, operation_id="op", **fields)
    assert codes(outcome) == expected
    assert outcome.operations_unknown == ["op"]
    assert story.code("op") == "outcome_unknown"


def test_a_later_declaration_fills_kind_and_key_only(story: Story) -> None:
    story.tell("operation.dispatched", operation_id="op")
    assert codes(story.declare("op", kind="mail", idempotency_key="k", target="x")) == []
    item = story.ledger().items["operation"]["op"]
    assert (item.kind, item.idempotency_key, item.target, item.state) == ("mail", "k", None, "unknown")
    story.declare("other", idempotency_key="k")
    assert story.code("other") == "outcome_unknown"


def test_ids_are_set_once_also_when_settled(story: Story) -> None:
    story.declare("op")
    story.tell("operation.dispatched", operation_id="op")
    story.tell("operation.settled", operation_id="op", state="failed")
    assert codes(story.declare("op", kind="other")) == ["illegal_transition"]
    item = story.ledger().items["operation"]["op"]
    assert (item.kind, item.state) == ("deploy", "failed")
    assert story.code("op") == "already_failed"


def test_failed_frees_the_key_and_nothing_else_does(story: Story) -> None:
    story.declare("a", idempotency_key="k")
    story.declare("b", idempotency_key="k")
    story.act("a", "q-a")
    assert story.code("b") == "in_flight"
    story.tell("operation.settled", operation_id="a", state="failed")
    assert story.code("b") == "ok"
    assert story.code("a") == "already_failed"


@pytest.mark.parametrize("sign", ["operation.dispatched", "said", "call"])
def test_a_failed_operation_that_runs_after_all_takes_its_key_back(story: Story, sign: str) -> None:
    story.declare("a", idempotency_key="k")
    story.declare("b", idempotency_key="k")
    story.tell("tool.called", call_id="c", tool="t", arguments={}, operation_id="a")
    story.tell("operation.settled", operation_id="a", state="failed")
    if sign == "operation.dispatched":
        outcome = story.tell(sign, operation_id="a")
    elif sign == "said":
        outcome = story.tell("operation.settled", operation_id="a", state="succeeded")
    else:
        outcome = story.tell("tool.returned", call_id="c", status="timeout", content="")
    assert "illegal_transition" in codes(outcome)
    assert story.state("a") == "unknown"
    assert story.code("b") == "outcome_unknown"


@pytest.mark.parametrize("status", ["timeout", "cancelled"])
def test_a_lost_call_makes_its_operation_unknown(story: Story, status: str) -> None:
    story.declare("op")
    story.tell("tool.called", call_id="c", tool="t", arguments={}, operation_id="op")
    outcome = story.tell("tool.returned", call_id="c", status=status, content="")
    assert outcome.operations_unknown == ["op"]
    assert story.code("op") == "outcome_unknown"
    assert codes(story.tell("operation.settled", operation_id="op", state="failed")) == ["illegal_transition"]
    assert codes(story.tell("operation.settled", operation_id="op", state="unknown")) == []
    assert story.state("op") == "unknown"


@pytest.mark.parametrize("status", ["ok", "error"])
def test_a_result_settles_nothing(story: Story, status: str) -> None:
    story.declare("op")
    story.tell("tool.called", call_id="c", tool="t", arguments={}, operation_id="op")
    story.tell("tool.returned", call_id="c", status=status, content="done")
    assert story.state("op") == "pending"


def test_dispatched_again_is_a_repeat(story: Story) -> None:
    story.declare("op")
    story.act("op")
    story.tell("tool.called", call_id="c1", tool="t", arguments={}, operation_id="op")
    outcome = story.tell("tool.called", call_id="c2", tool="t", arguments={}, operation_id="op")
    assert codes(outcome) == ["repeated_operation", "unauthorized_write"]
    story.tell("operation.settled", operation_id="op", state="succeeded")
    outcome = story.tell("operation.dispatched", operation_id="op")
    assert codes(outcome) == ["illegal_transition", "repeated_operation", "unauthorized_write"]
    assert story.state("op") == "succeeded"


def test_a_second_operation_with_the_key(story: Story) -> None:
    story.declare("a", idempotency_key="k")
    story.declare("b", idempotency_key="k")
    story.act("a", "q-a")
    story.tell("operation.settled", operation_id="a", state="succeeded", receipt="r-1")
    outcome = story.record("authorization.requested", operation_id="b", request_id="q-b")
    assert outcome.decision is not None
    assert outcome.decision.code == "already_succeeded"
    assert outcome.decision.holder is not None
    assert outcome.decision.holder.operation.receipt == "r-1"
    assert codes(outcome) == ["repeated_operation"]
    assert codes(story.tell("operation.dispatched", operation_id="b")) == [
        "repeated_operation",
        "unauthorized_write",
    ]
    assert story.state("b") == "pending"


def test_timed_out_is_a_record_that_repeats_without_harm(story: Story) -> None:
    story.declare("op")
    assert story.record("operation.timed_out", operation_id="op").operations_unknown == []
    story.act("op")
    assert story.record("operation.timed_out", operation_id="op").operations_unknown == ["op"]
    outcome = story.record("operation.timed_out", operation_id="op")
    assert (outcome.operations_unknown, codes(outcome)) == ([], [])
    assert story.violations() == {}


def test_records_of_a_former_owner_are_ignored_and_counted_as_messages(story: Story) -> None:
    story.declare("op")
    story.record("operation.timed_out", operation_id="op", epoch=5)
    version = story.ledger().head.version
    outcome = story.record("authorization.requested", operation_id="op", request_id="q", epoch=4)
    assert (outcome.ignored, outcome.decision) == (True, None)
    assert story.state("op") == "not_started"
    assert story.ledger().head.version == version + 1


# --- reconciliation -------------------------------------------------------------------------------------------


def test_reconciled_by_observed_evidence_after_the_dispatch(story: Story) -> None:
    story.tell("evidence.recorded", evidence_id="old", claim="c", kind="observed", source="x")
    unknown(story)
    story.tell("evidence.recorded", evidence_id="guess", claim="c", kind="inferred", source="x")
    story.tell("evidence.recorded", evidence_id="seen", claim="c", kind="observed", source="x")
    for evidence in ("evidence:old", "evidence:guess", "evidence:none", "event:e-1", "pos:1", "nonsense"):
        outcome = story.tell("operation.reconciled", operation_id="op", state="failed", evidence=evidence)
        assert codes(outcome) == ["illegal_transition"], evidence
        assert story.state("op") == "unknown"
    outcome = story.tell("operation.reconciled", operation_id="op", state="failed", evidence="evidence:seen")
    assert codes(outcome) == []
    assert story.state("op") == "failed"
    assert story.ledger().items["operation"]["op"].evidence == "evidence:seen"


@pytest.mark.parametrize("by", ["event", "pos"])
def test_reconciled_by_a_result_after_the_dispatch(story: Story, by: str) -> None:
    unknown(story)
    story.tell("tool.called", call_id="look", tool="t", arguments={})
    story.tell("tool.returned", call_id="look", status="ok", content="it is there", id_="res")
    ref = "event:res" if by == "event" else f"pos:{story.ledger().head.position}"
    story.tell("operation.reconciled", operation_id="op", state="succeeded", evidence=ref)
    assert story.state("op") == "succeeded"
    assert story.ledger().items["result"] == {}


@pytest.mark.parametrize("status", ["timeout", "cancelled", "pending"])
def test_no_result_reconciles_nothing(story: Story, status: str) -> None:
    unknown(story)
    story.tell("tool.called", call_id="look", tool="t", arguments={})
    story.tell("tool.returned", call_id="look", status=status, content="", id_="res")
    story.tell("operation.reconciled", operation_id="op", state="succeeded", evidence="event:res")
    assert story.state("op") == "unknown"


def test_a_result_before_the_dispatch_reconciles_nothing(story: Story) -> None:
    unknown(story, "other")
    story.tell("tool.called", call_id="look", tool="t", arguments={})
    story.tell("tool.returned", call_id="look", status="ok", content="not there", id_="res")
    unknown(story, "op")
    story.tell("operation.reconciled", operation_id="op", state="failed", evidence="event:res")
    assert story.state("op") == "unknown"
    story.tell("operation.reconciled", operation_id="other", state="failed", evidence="event:res")
    assert story.state("other") == "failed"


def looked(story: Story, id_: str, **fields: Any) -> str:
    """A call and its result; the result's position."""
    story.tell("tool.called", call_id=f"c-{id_}", tool="t", arguments={})
    story.tell("tool.returned", call_id=f"c-{id_}", status="ok", content="not there", id_=id_, **fields)
    return f"pos:{story.ledger().head.position}"


@pytest.mark.parametrize("source", ["event:old", "pos:{old}", "run:r/event:old", "event:ask", "pos:1"])
def test_evidence_of_what_was_before_the_dispatch_reconciles_nothing(story: Story, source: str) -> None:
    story.tell("message", role="user", content="send it", id_="ask")
    old = looked(story, "old").removeprefix("pos:")
    for number in range(RESULTS_NAMED - 1):
        looked(story, f"more-{number}")
    unknown(story)
    source = source.format(old=old)
    story.tell("evidence.recorded", evidence_id="seen", claim="not sent", kind="observed", source=source)
    outcome = story.tell("operation.reconciled", operation_id="op", state="failed", evidence="evidence:seen")
    assert codes(outcome) == ["illegal_transition"]
    assert story.state("op") == "unknown"


@pytest.mark.parametrize(
    "source",
    ["event:new", "pos:{new}", "event:never", "run:other/event:old", "https://x/y", "artifact:a", "as I saw"],
)
def test_evidence_of_what_came_after_it_or_lies_elsewhere_does(story: Story, source: str) -> None:
    looked(story, "old")
    unknown(story)
    source = source.format(new=looked(story, "new").removeprefix("pos:"))
    story.tell("evidence.recorded", evidence_id="seen", claim="not sent", kind="observed", source=source)
    story.tell("operation.reconciled", operation_id="op", state="failed", evidence="evidence:seen")
    assert story.state("op") == "failed"


def test_a_late_result_is_no_source_since_it_proves_no_order(story: Story) -> None:
    story.tell("tool.called", call_id="c-late", tool="t", arguments={}, session="s", seq=1)
    story.tell("boundary.marked", kind="other", session="s", seq=3)
    unknown(story)
    story.tell("tool.returned", call_id="c-late", status="ok", content="no", id_="late", session="s", seq=2)
    story.tell(
        "evidence.recorded", evidence_id="seen", claim="not sent", kind="observed", source="event:late"
    )
    story.tell("operation.reconciled", operation_id="op", state="failed", evidence="evidence:seen")
    assert story.state("op") == "unknown"


def test_after_review_only_an_authority_settles(story: Story) -> None:
    unknown(story)
    story.tell("evidence.recorded", evidence_id="seen", claim="c", kind="observed", source="x")
    story.tell("operation.reconciled", operation_id="op", state="review", evidence="evidence:seen")
    assert story.state("op") == "unknown"
    for type_, fields in (
        ("operation.settled", {"state": "failed"}),
        ("operation.reconciled", {"state": "failed", "evidence": "evidence:seen"}),
    ):
        assert codes(story.tell(type_, operation_id="op", **fields)) == ["illegal_transition"]
        assert story.state("op") == "unknown"
    story.authority("operation.reconciled", operation_id="op", state="failed", evidence="event:any")
    assert story.state("op") == "failed"


def test_kinds_only_an_authority_reconciles() -> None:
    story = Story(reconcile_by_authority_kinds=("pay*",))
    story.start()
    unknown(story, kind="payment")
    story.tell("evidence.recorded", evidence_id="seen", claim="c", kind="observed", source="x")
    fields = {"operation_id": "op", "state": "succeeded", "evidence": "evidence:seen"}
    assert codes(story.tell("operation.reconciled", **fields)) == ["illegal_transition"]
    story.authority("operation.reconciled", **fields)
    assert story.state("op") == "succeeded"


def test_an_authority_may_settle_what_nobody_knows(story: Story) -> None:
    unknown(story)
    story.authority("operation.settled", operation_id="op", state="failed")
    assert story.state("op") == "failed"


def test_reconciling_what_is_not_unknown_changes_nothing(story: Story) -> None:
    story.declare("op")
    story.act("op")
    outcome = story.tell("operation.reconciled", operation_id="op", state="failed", evidence="event:x")
    assert codes(outcome) == ["illegal_transition"]
    assert story.state("op") == "pending"


def test_keys_are_checked_over_the_family(story: Story) -> None:
    for child in ("c1", "c2"):
        story.tell("child.spawned", child_run=child, task="part")
        story.start(run=child)
    story.declare("a", run="c1", idempotency_key="k")
    story.declare("b", run="c2", idempotency_key="k")
    story.declare("c", run="r", idempotency_key="k")
    assert story.act("a", run="c1").code == "ok"
    assert story.code("b", run="c2") == "in_flight"
    assert story.code("c") == "in_flight"
    story.tell("operation.settled", run="c1", operation_id="a", state="unknown")
    decision = story.look("c")
    assert decision.code == "outcome_unknown"
    assert decision.holder is not None
    assert (decision.holder.run, decision.holder.operation.id) == ("c1", "a")


def test_payload_digest_of_an_operation_named_by_its_approval(story: Story) -> None:
    story.grant("ap", digest=D2, operation_id="op")
    story.declare("op", payload_digest=D1)
    assert story.code("op") == "payload_mismatch"


@pytest.mark.parametrize("by", ["evidence", "result"])
def test_what_came_late_proves_no_outcome(by: str) -> None:
    story = Story()
    story.start(session="s", seq=1)
    unknown(story)
    story.tell("tool.called", call_id="c", tool="t", arguments={}, session="s", seq=2)
    story.tell("message", role="assistant", content="x", session="s", seq=4)
    if by == "evidence":
        fields = {"evidence_id": "seen", "claim": "c", "kind": "observed", "source": "x"}
        story.tell("evidence.recorded", session="s", seq=3, **fields)
        ref = "evidence:seen"
    else:
        story.tell("tool.returned", call_id="c", status="ok", content="", id_="res", session="s", seq=3)
        ref = "event:res"
    story.tell("operation.reconciled", operation_id="op", state="failed", evidence=ref)
    assert story.state("op") == "unknown"


def test_a_declaration_that_comes_after_the_run_uses_the_approval_up() -> None:
    story = Story(approval_kinds=("deploy",))
    story.start()
    story.grant("ap", digest=D1)
    story.tell("operation.dispatched", operation_id="a")
    story.declare("b", payload_digest=D1)
    assert story.code("b") == "ok"
    story.declare("a", payload_digest=D1)
    assert story.ledger().items["operation"]["a"].used_approval == "ap"
    assert story.code("b") == "approval_consumed"
