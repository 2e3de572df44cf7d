"""``authorize``: its codes in their order, which approval is meant, forbids, scope, clock and budget."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from protocol.asks import AskAuthorize
from protocol.errors import AskRefused
from sidecar.core import gate
from sidecar.core.globs import matches
from support.story import D1, D2, Story


@pytest.fixture
def story() -> Story:
    story = Story(approval_kinds=("deploy",))
    story.start()
    return story


def test_the_first_code_that_applies() -> None:
    """Everything is wrong at once; taken away one by one, the codes come in their order."""
    story = Story(approval_kinds=("deploy",))
    story.start(scope={"kinds": ["mail"]}, policy_version="v1")
    story.tell("constraint.set", constraint_id="c", text="no", source="agent", forbids={"kinds": ["deploy"]})
    story.authority("policy.released", version="v2")
    story.declare("other", idempotency_key="k", kind="mail")
    story.tell("operation.settled", operation_id="other", state="succeeded")
    story.declare("op", idempotency_key="k", payload_digest=D1, nonessential=True)
    story.tell("message", role="user", content="x", session="s", seq=5)
    story.authority("run.paused", reason="stop")
    story.tell("run.finished", outcome="cancelled")
    assert story.code("nothing") == "unknown_operation"
    assert story.code("op") == "run_finished"
    story.ledger().head.finished = None
    assert story.code("op") == "run_paused"
    story.authority("run.resumed")
    assert story.code("op") == "history_gap"
    story.authority("gap.accepted", session="s", from_=1, through=4, by="ann")
    assert story.code("op") == "already_succeeded"
    story.declare("free", payload_digest=D1, nonessential=True)
    assert story.code("free") == "policy_stale"
    story.tell("policy.loaded", version="v2")
    assert story.code("free") == "out_of_scope"
    story.ledger().put("task", type(story.ledger().task)(goal="g"))
    assert story.code("free") == "constraint_forbids"
    story.tell("constraint.lifted", constraint_id="c", reason="mine")
    assert story.code("free") == "approval_missing"
    story.tell("approval.requested", approval_id="ap", action="deploy", payload_digest=D2)
    assert story.code("free") == "approval_pending"
    story.resolve("ap", digest=D2)
    assert story.code("free") == "payload_mismatch"
    story.grant("ap2", operation_id="free")
    _crowd(story)
    assert story.code("free") == "postponed"
    _disperse(story)
    assert story.code("free") == "ok"


def _crowd(story: Story) -> None:
    """More questions than the window has room for."""
    for number in range(2_000):
        story.tell("question.opened", question_id=f"q{number}", text="which of the two pumps is it then?")


def _disperse(story: Story) -> None:
    for number in range(2_000):
        story.tell("question.answered", question_id=f"q{number}", answer="the second")


def test_a_run_without_contract_may_do_nothing() -> None:
    story = Story()
    story.declare("op")
    assert story.code("op") == "run_paused"
    story.start()
    assert story.code("op") == "ok"


@pytest.mark.parametrize(
    ("loaded", "asked", "code"),
    [(None, None, "policy_stale"), ("v1", None, "policy_stale"), ("v2", "v1", "policy_stale"),
     ("v2", None, "ok"), ("v2", "v2", "ok")],
)  # fmt: skip
def test_policy(loaded: str | None, asked: str | None, code: str) -> None:
    story = Story()
    story.start(policy_version=loaded)
    story.declare("op")
    assert story.look("op", policy_version=asked or "v0").code == "ok"
    story.authority("policy.released", version="v2")
    assert story.look("op", policy_version=asked).code == code


def test_released_lists_replace_and_absent_ones_stay() -> None:
    story = Story(approval_kinds=("deploy",), forbidden_kinds=("wipe",))
    story.start(policy_version="v")
    story.declare("op", payload_digest=D1)
    story.declare("wipe", kind="wipe")
    story.declare("mail", kind="mail")
    assert (story.code("op"), story.code("wipe")) == ("approval_missing", "constraint_forbids")
    story.authority("policy.released", version="v", approval_kinds=["mail"])
    assert (story.code("op"), story.code("mail")) == ("ok", "approval_missing")
    assert story.code("wipe") == "constraint_forbids"
    story.authority("policy.released", version="v", approval_kinds=[], forbidden_kinds=[])
    assert {story.code(name) for name in ("op", "mail", "wipe")} == {"ok"}


@pytest.mark.parametrize(
    ("on_operation", "on_approval", "code"),
    [(D1, D1, "ok"), (D1, D2, "payload_mismatch"), (D1, None, "payload_mismatch"),
     (None, D1, "payload_mismatch"), (None, None, "payload_mismatch")],
)  # fmt: skip
def test_payload_digests_of_a_kind_that_needs_approval(
    story: Story, on_operation: str | None, on_approval: str | None, code: str
) -> None:
    story.declare("op", payload_digest=on_operation)
    story.grant("ap", digest=on_approval)
    assert story.code("op") == code


def test_without_digests_outside_the_kinds_an_approval_still_counts() -> None:
    story = Story()
    story.start()
    story.declare("op", approval_id="ap")
    assert story.code("op") == "approval_missing"
    story.grant("ap", digest=None)
    assert story.code("op") == "ok"


def test_an_approval_that_names_an_operation_makes_it_need_one() -> None:
    story = Story()
    story.start()
    story.declare("op")
    assert story.code("op") == "ok"
    story.tell("approval.requested", approval_id="ap", action="x", operation_id="op")
    assert story.code("op") == "approval_pending"
    story.resolve("ap", "denied", action="x", digest=None)
    assert story.code("op") == "approval_denied"


def test_the_named_approval_is_meant_and_no_other(story: Story) -> None:
    story.declare("op", payload_digest=D1, approval_id="ap")
    story.grant("other", operation_id="op")
    assert story.code("op") == "approval_missing"
    story.grant("ap", operation_id="elsewhere")
    assert story.code("op") == "approval_missing"


def test_a_named_approval_without_operation_must_be_for_the_kind(story: Story) -> None:
    story.declare("op", payload_digest=D1, approval_id="ap")
    story.grant("ap", action="mail")
    assert story.code("op") == "approval_missing"


def test_the_newest_granted_that_names_the_operation(story: Story) -> None:
    story.declare("op", payload_digest=D1)
    story.grant("good", operation_id="op")
    assert story.code("op") == "ok"
    story.grant("bad", digest=D2, operation_id="op")
    assert story.code("op") == "payload_mismatch"


def test_the_oldest_granted_for_the_kind(story: Story) -> None:
    story.declare("op", payload_digest=D1)
    story.grant("first")
    story.grant("second")
    story.grant("mine", operation_id="someone-else")
    decision = story.look("op")
    assert decision.approval is not None
    assert decision.approval.id == "first"
    story.resolve("first", "revoked")
    assert story.look("op").approval.id == "second"  # type: ignore[union-attr]


def test_approvals_that_name_others_are_no_approval(story: Story) -> None:
    story.declare("op", payload_digest=D1)
    story.grant("mine", operation_id="someone-else")
    assert story.code("op") == "approval_missing"


@pytest.mark.parametrize(
    ("outcome", "code"), [("denied", "approval_denied"), ("revoked", "approval_revoked")]
)
def test_the_newest_of_any_state(story: Story, outcome: str, code: str) -> None:
    story.declare("op", payload_digest=D1)
    story.tell("approval.requested", approval_id="a", action="deploy", payload_digest=D1)
    story.resolve("a", outcome)
    assert story.code("op") == code
    story.tell("approval.requested", approval_id="b", action="deploy", payload_digest=D1)
    assert story.code("op") == "approval_pending"
    story.record("approval.expired", approval_id="b")
    assert story.code("op") == "approval_expired"


def test_the_clock_only_takes_away(story: Story) -> None:
    story.declare("op", payload_digest=D1)
    story.grant("ap", expires_at="2026-12-01T00:00:00Z")
    before, after = datetime(2026, 11, 30, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC)
    assert story.code("op", now=before) == "ok"
    assert story.code("op", now=after) == "approval_expired"
    story.record("approval.expired", approval_id="ap")
    assert story.code("op", now=before) == "approval_expired"


def test_before_act_answers_only_what_the_fold_cannot(story: Story) -> None:
    story.declare("op", payload_digest=D1, nonessential=True)
    story.grant("ap", expires_at="2026-12-01T00:00:00Z")
    ask = AskAuthorize(operation_id="op", request_id="q-1")
    now = datetime(2026, 11, 30, tzinfo=UTC)

    def early(**fields: object) -> gate.Decision | None:
        return gate.before_act(story.lane, story.runs, "r", ask, **({"now": now} | fields))  # type: ignore[arg-type]

    assert early() is None
    assert early(now=datetime(2026, 12, 1, tzinfo=UTC)).code == "approval_expired"  # type: ignore[union-attr]
    _crowd(story)
    assert early().code == "postponed"  # type: ignore[union-attr]
    _disperse(story)
    story.act("op")
    assert early().reserved  # type: ignore[union-attr]
    story.declare("other", payload_digest=D1)
    with pytest.raises(AskRefused) as refused:
        gate.before_act(story.lane, story.runs, "r", AskAuthorize(operation_id="other", request_id="q-1"))
    assert refused.value.code == "invalid_request"


def test_looking_by_kind_and_key(story: Story) -> None:
    story.declare("op", idempotency_key="k", payload_digest=D1)
    story.tell("operation.settled", operation_id="op", state="succeeded", receipt="r-9")

    def look(**fields: object) -> gate.Decision:
        ask = AskAuthorize(**({"kind": "mail", "idempotency_key": "new"} | fields))  # type: ignore[arg-type]
        return gate.look(story.lane, story.runs, "r", ask)

    assert look().code == "ok"
    assert look(kind="deploy").code == "approval_missing"
    done = gate.reply(look(idempotency_key="k"), epoch=1, version=7)
    assert (done.allowed, done.code, done.reserved, done.ledger_version) == (
        False,
        "already_succeeded",
        False,
        7,
    )
    assert done.operation.receipt == "r-9"  # type: ignore[union-attr]
    story.grant("ap")
    assert look(kind="deploy", payload_digest=D1).code == "ok"
    assert look(kind="deploy", payload_digest=D1, approval_id="ap").code == "ok"
    story.grant("named", operation_id="op")
    assert look(kind="deploy", payload_digest=D1, approval_id="named").code == "approval_missing"
    assert story.approval("ap") == "granted"


@pytest.mark.parametrize(
    ("forbids", "fields", "code"),
    [
        ({}, {}, "ok"),
        ({"kinds": []}, {}, "ok"),
        ({"kinds": ["mail*"]}, {}, "constraint_forbids"),
        ({"kinds": ["MAIL"]}, {}, "ok"),
        ({"kinds": ["x", "m?il"]}, {}, "constraint_forbids"),
        ({"kinds": ["mail"], "targets": ["prod/*"]}, {"target": "prod/a/b.c"}, "constraint_forbids"),
        ({"kinds": ["mail"], "targets": ["prod/*"]}, {"target": "test/a"}, "ok"),
        ({"kinds": ["mail"], "targets": ["prod/*"]}, {}, "constraint_forbids"),
        ({"kinds": ["other"], "targets": ["prod/*"]}, {}, "ok"),
        ({"tools": ["rm"]}, {}, "constraint_forbids"),
        ({"tools": ["rm"]}, {"tool": "ls"}, "ok"),
        ({"kinds": ["mail"], "tools": [], "targets": []}, {"target": "x"}, "constraint_forbids"),
        ({"targets": ["[ab]"]}, {"target": "a"}, "ok"),
    ],
)
def test_forbids(forbids: dict[str, list[str]], fields: dict[str, str], code: str) -> None:
    story = Story()
    story.start()
    story.tell("constraint.set", constraint_id="c", text="t", source="user", forbids=forbids)
    story.declare("op", kind="mail", **fields)
    assert story.code("op") == code


@pytest.mark.parametrize(
    ("scope", "tool", "code"),
    [
        ({}, "ls", "ok"),
        ({"kinds": []}, None, "out_of_scope"),
        ({"kinds": ["ma*"]}, None, "ok"),
        ({"tools": []}, "ls", "out_of_scope"),
        ({"tools": []}, None, "ok"),
        ({"tools": ["l?"]}, "ls", "ok"),
        ({"tools": ["L?"]}, "ls", "out_of_scope"),
    ],
)
def test_scope(scope: dict[str, list[str]], tool: str | None, code: str) -> None:
    story = Story()
    story.start(scope=scope)
    story.declare("op", kind="mail", tool=tool)
    assert story.code("op") == code


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("", "", True),
        ("", "a", False),
        ("*", "", True),
        ("**", "a/b.c", True),
        ("a*c", "abbc", True),
        ("a*c", "abb", False),
        ("?", "", False),
        ("?", "ä", True),
        ("a?c", "a/c", True),
        ("[ab]", "a", False),
        ("[ab]", "[ab]", True),
        ("\\*", "\\anything", True),
        ("*.txt", "A.TXT", False),
        ("*ab*ab", "abxab", True),
        ("*" + "a*" * 60 + "b", "a" * 3000, False),
    ],
)
def test_globs(pattern: str, text: str, expected: bool) -> None:
    assert matches(pattern, text) is expected


def test_an_open_gap_of_an_ancestor_binds_too() -> None:
    story = Story()
    story.start()
    story.tell("child.spawned", child_run="c", task="part")
    story.start(run="c")
    story.declare("op", run="c")
    assert story.code("op", run="c") == "ok"
    story.tell("message", role="user", content="x", session="s", seq=2)
    assert story.code("op", run="c") == "history_gap"


def test_an_unknown_parent_permits_nothing() -> None:
    story = Story()
    story.start()
    story.tell("child.spawned", child_run="c", task="part")
    story.start(run="c")
    story.declare("op", run="c")
    del story.runs["r"]
    assert story.code("op", run="c") == "run_paused"
