"""The verdict: its order, and every cause with what clears it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any, get_args

import pytest

from protocol.asks import AskAuthorize
from protocol.events import NextAction, Settings
from protocol.handoff import Verdict
from sidecar.core import gate
from sidecar.core import verdict as verdicts
from sidecar.core.state import (
    Approval,
    ConstraintItem,
    Gap,
    Lane,
    Ledger,
    Note,
    Operation,
    Pause,
    Policy,
    Progress,
)
from tests.support.packets import started

LANE = Lane(settings=Settings())

Change = Callable[[Ledger], object]


def _await(ledger: Ledger) -> None:
    ledger.put("operation", Operation(id="op-a", kind="deploy", idempotency_key="ka", approval_id="ap-a"))
    ledger.put("approval", Approval(id="ap-a", action="deploy", operation_id="op-a"))
    ledger.put("progress", Progress(next_action=NextAction(verb="call", operation_id="op-a")))


CAUSES: dict[Verdict, tuple[str, Change]] = {
    "pause": ("run_paused", lambda ledger: setattr(ledger.head, "pauses", (Pause("agent", "lunch"),))),
    "new_context": ("context_changed", lambda ledger: setattr(ledger.head, "context_changed_at", 5)),
    "reload_policy": (
        "policy_stale",
        lambda ledger: ledger.put("policy", Policy(released="p-2", loaded="p-1")),
    ),
    "reconcile": (
        "outcome_unknown",
        lambda ledger: ledger.put(
            "operation", Operation(id="op-u", kind="x", idempotency_key="ku", state="unknown")
        ),
    ),
    "await_approval": ("approval_pending", _await),
}


def _causes(ledger: Ledger, **given: object) -> list[str]:
    found = verdicts.blockers(LANE, {"r1": ledger}, "r1", **given)  # type: ignore[arg-type]
    return [blocker.code for blocker in found]


def _verdict(ledger: Ledger) -> str:
    return verdicts.verdict(verdicts.blockers(LANE, {"r1": ledger}, "r1"))


def test_the_order_names_every_verdict_once() -> None:
    assert sorted(verdicts.ORDER) == sorted(get_args(Verdict))
    assert set(verdicts.CODES.values()) == set(verdicts.ORDER)


def test_nothing_in_the_way_is_continue() -> None:
    assert _verdict(started()) == "continue"
    assert _causes(started()) == []


@pytest.mark.parametrize("count", range(1, len(CAUSES) + 1))
def test_the_first_that_applies_wins_and_all_are_told(count: int) -> None:
    for names in combinations(CAUSES, count):
        ledger = started()
        for name in names:
            CAUSES[name][1](ledger)
        assert _verdict(ledger) == names[0]
        assert _causes(ledger) == [CAUSES[name][0] for name in names]


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("run_finished", lambda ledger: setattr(ledger.head, "finished", "succeeded")),
        ("contract_missing", lambda ledger: setattr(ledger.head, "started", False)),
        ("child_not_spawned", lambda ledger: setattr(ledger.head, "parent", "p")),
        (
            "history_gap",
            lambda ledger: ledger.put(
                "gap", Gap(id="g", channel="event", session="s1", first=3, through=4, declared=True)
            ),
        ),
    ],
)
def test_what_else_pauses(code: str, change: Change) -> None:
    ledger = started()
    change(ledger)
    assert _causes(ledger) == [code]
    assert _verdict(ledger) == "pause"


def test_a_gap_not_declared_yet_is_told_and_pauses_nothing() -> None:
    ledger = started()
    ledger.put("gap", Gap(id="g", channel="event", session="s1", first=3, through=4))
    assert _causes(ledger) == ["gap_open"]
    assert _verdict(ledger) == "continue"


def test_an_ancestors_pause_is_the_childs() -> None:
    parent, child = started("p"), started("c", parent="p", spawned=True)
    parent.head.pauses = (Pause("authority", "audit"),)
    (blocker,) = verdicts.blockers(LANE, {"p": parent, "c": child}, "c")
    assert blocker.code == "run_paused"
    assert "audit" in blocker.text
    assert "authority" in blocker.clears_when


def test_both_pauses_are_told() -> None:
    ledger = started()
    ledger.head.pauses = (Pause("agent", "lunch"), Pause("authority", "audit"))
    assert _causes(ledger) == ["run_paused", "run_paused"]


def test_a_resume_at_or_after_the_change_ends_new_context() -> None:
    ledger = started()
    ledger.head.context_changed_at = 5
    ledger.head.context_known_at = 4
    assert _verdict(ledger) == "new_context"
    ledger.head.context_known_at = 5
    assert _verdict(ledger) == "continue"


def test_a_policy_loaded_without_a_release_stops_nothing() -> None:
    ledger = started()
    ledger.put("policy", Policy(loaded="p-9"))
    assert _verdict(ledger) == "continue"
    ledger.put("policy", Policy(released="p-9"))
    assert _verdict(ledger) == "reload_policy"


def test_a_childs_loaded_policy_is_compared_with_the_ancestors_release() -> None:
    parent, child = started("p"), started("c", parent="p", spawned=True)
    parent.put("policy", Policy(released="p-1", loaded="p-1"))
    assert verdicts.verdict(verdicts.blockers(LANE, {"p": parent, "c": child}, "c")) == "reload_policy"
    child.put("policy", Policy(loaded="p-1"))
    assert verdicts.verdict(verdicts.blockers(LANE, {"p": parent, "c": child}, "c")) == "continue"


def test_a_pending_approval_of_another_operation_is_not_awaited() -> None:
    ledger = started()
    _await(ledger)
    ledger.put("operation", Operation(id="op-b", kind="test", idempotency_key="kb"))
    ledger.put("progress", Progress(next_action=NextAction(verb="call", operation_id="op-b")))
    assert _verdict(ledger) == "continue"


def test_a_granted_approval_is_not_awaited() -> None:
    ledger = started()
    _await(ledger)
    ledger.put(
        "approval", Approval(id="ap-a", action="deploy", operation_id="op-a", state="granted", uses_left=1)
    )
    assert _verdict(ledger) == "continue"


D1, D2 = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"


def _next(ledger: Ledger, verb: str = "call", **operation: Any) -> None:
    fields = {"id": "op", "kind": "pay.out", "idempotency_key": "k", "payload_digest": D1} | operation
    ledger.put("operation", Operation(**fields))
    ledger.put("progress", Progress(next_action=NextAction(verb=verb, operation_id="op")))


def _approve(ledger: Ledger, state: Any, **fields: Any) -> None:
    known = {"id": "ap", "action": "pay.out", "payload_digest": D1, "uses_left": 1} | fields
    ledger.put("approval", Approval(state=state, **known))


PAYING = Lane(settings=Settings(approval_kinds=("pay.*",)))


@pytest.mark.parametrize(
    ("state", "fields", "code", "ref"),
    [
        (None, {}, "approval_missing", "operation:op"),
        ("pending", {}, "approval_pending", "approval:ap"),
        ("denied", {}, "approval_denied", "approval:ap"),
        ("expired", {}, "approval_expired", "approval:ap"),
        ("revoked", {}, "approval_revoked", "approval:ap"),
        ("consumed", {"uses_left": 0}, "approval_consumed", "approval:ap"),
        ("granted", {"payload_digest": D2}, "payload_mismatch", "approval:ap"),
    ],
)
def test_the_next_action_waits_for_whatever_its_approval_lacks(
    state: Any, fields: dict[str, Any], code: str, ref: str
) -> None:
    """The packet says what ``authorize`` would: the same code, and what clears it."""
    ledger = started()
    _next(ledger)
    if state is not None:
        _approve(ledger, state, **fields)
    runs = {"r1": ledger}
    (blocker,) = verdicts.blockers(PAYING, runs, "r1")
    assert (blocker.code, blocker.ref) == (code, ref)
    assert verdicts.verdict([blocker]) == "await_approval"
    asked = gate.look(PAYING, runs, "r1", AskAuthorize(operation_id="op", dry_run=True))
    assert asked.code == code
    # Another approval clears every one of them.
    _approve(ledger, "granted", id="ap2", operation_id="op", granted_at=9, position=9)
    if state != "pending" or code != "approval_pending":
        assert verdicts.blockers(PAYING, runs, "r1") == []
    ledger.put("progress", Progress(next_action=NextAction(verb="call")))
    assert verdicts.blockers(PAYING, runs, "r1") == []


@pytest.mark.parametrize("state", ["denied", "expired", "revoked", "consumed"])
def test_what_names_its_approval_needs_to_be_declared_anew(state: Any) -> None:
    ledger = started()
    _next(ledger, approval_id="ap")
    _approve(ledger, state)
    _approve(ledger, "granted", id="ap2", granted_at=9, position=9)
    (blocker,) = verdicts.blockers(PAYING, {"r1": ledger}, "r1")
    assert blocker.code == f"approval_{state}"
    assert "another operation is declared" in blocker.clears_when


@pytest.mark.parametrize("verb", ["ask_human", "inspect", "reconcile", "finish", "stop"])
def test_what_does_not_do_the_operation_waits_for_no_approval_that_is_missing(verb: str) -> None:
    ledger = started()
    _next(ledger, verb)
    assert verdicts.blockers(PAYING, {"r1": ledger}, "r1") == []
    _approve(ledger, "pending")
    assert [item.code for item in verdicts.blockers(PAYING, {"r1": ledger}, "r1")] == ["approval_pending"]


@pytest.mark.parametrize("state", ["pending", "succeeded", "failed"])
def test_what_has_begun_waits_for_no_approval(state: Any) -> None:
    ledger = started()
    _next(ledger, state=state)
    _approve(ledger, "denied")
    assert verdicts.blockers(PAYING, {"r1": ledger}, "r1") == []


def test_an_approval_whose_time_is_over_blocks_once_the_ledger_says_so() -> None:
    ledger = started()
    _next(ledger)
    _approve(ledger, "granted", expires_at="2001-01-01T00:00:00Z")
    assert verdicts.blockers(PAYING, {"r1": ledger}, "r1") == []


def test_waiting_for_nothing_named_waits_for_the_oldest_pending_approval() -> None:
    ledger = started()
    _await(ledger)
    ledger.put("approval", Approval(id="ap-0", action="x", position=9))
    ledger.put("approval", Approval(id="ap-1", action="x", position=8))
    ledger.put("approval", Approval(id="ap-a", action="x", position=10))
    ledger.put("progress", Progress(next_action=NextAction(verb="wait")))
    (blocker,) = verdicts.blockers(LANE, {"r1": ledger}, "r1")
    assert (blocker.code, blocker.ref) == ("approval_pending", "approval:ap-1")


def test_reasons_from_outside_the_ledger() -> None:
    ledger = started()
    assert _causes(ledger, stops=[verdicts.STORAGE_UNAVAILABLE], missing_artifacts=["log"]) == [
        "storage_unavailable",
        "artifact_missing",
    ]
    found = verdicts.blockers(LANE, {"r1": ledger}, "r1", stops=[verdicts.STORAGE_UNAVAILABLE])
    assert verdicts.verdict(found) == "pause"
    assert verdicts.CODES[verdicts.POSTPONED.code] == "continue"
    assert verdicts.CODES[verdicts.PROTECTED_TOO_LARGE.code] == "pause"


def test_what_the_agent_says_blocks_it_is_told_whole() -> None:
    ledger = started()
    ledger.put("progress", Progress(blockers=tuple(Note(id=f"b-{n}", text=f"t {n}") for n in range(30))))
    found = verdicts.blockers(LANE, {"r1": ledger}, "r1")
    assert len(found) == 30
    assert verdicts.verdict(found) == "continue"


def test_many_unknown_operations_are_counted_not_listed_twice() -> None:
    ledger = started()
    for number in range(verdicts.MOST_OF_A_CODE + 7):
        ledger.put(
            "operation",
            Operation(id=f"op-{number:02}", kind="x", idempotency_key=str(number), state="unknown"),
        )
    found = verdicts.blockers(LANE, {"r1": ledger}, "r1")
    assert len(found) == verdicts.MOST_OF_A_CODE + 1
    assert found[-1].ref is None
    assert "7 more" in found[-1].text


def test_an_operation_under_review_is_the_authoritys() -> None:
    ledger = started()
    ledger.put("operation", Operation(id="op", kind="x", idempotency_key="1", state="unknown", review=True))
    (blocker,) = verdicts.blockers(LANE, {"r1": ledger}, "r1")
    assert "authority" in blocker.clears_when


def test_constraints_do_not_pause() -> None:
    ledger = started()
    ledger.put("constraint", ConstraintItem(id="c", text="never", source="user", told_by="authority"))
    assert _verdict(ledger) == "continue"
