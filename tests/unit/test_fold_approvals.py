"""Approvals: who may resolve, what a resolution must repeat, early ones, uses, expiry, illegal steps."""

from __future__ import annotations

import pytest

from support.story import D1, D2, Story, codes


@pytest.fixture
def story() -> Story:
    story = Story()
    story.start()
    return story


def request(story: Story, approval: str = "ap", **fields: object) -> None:
    fields = {"action": "deploy", "payload_digest": D1} | fields
    story.tell("approval.requested", approval_id=approval, **fields)


def test_an_agent_cannot_approve_itself(story: Story) -> None:
    request(story)
    before = story.ledger().head.version
    outcome = story.tell(
        "approval.resolved", approval_id="ap", outcome="granted", by="me", action="deploy", payload_digest=D1
    )
    assert outcome.rejection is not None
    assert outcome.rejection[0] == "not_authorized"
    assert codes(outcome) == ["self_approval"]
    assert story.approval("ap") == "pending"
    assert story.violations() == {"self_approval": 1}
    assert story.ledger().head.version == before


def test_a_refused_message_came_all_the_same(story: Story) -> None:
    story = Story()
    story.start(session="s", seq=1)
    story.tell(
        "approval.resolved", approval_id="a", outcome="granted", by="me", action="x", session="s", seq=2
    )
    story.tell("message", role="user", content="hi", session="s", seq=3)
    assert story.ledger().items["gap"] == {}


def test_one_user_one_terminal() -> None:
    story = Story(authority_required=False)
    story.start()
    request(story)
    outcome = story.tell(
        "approval.resolved", approval_id="ap", outcome="granted", by="me", action="deploy", payload_digest=D1
    )
    assert outcome.rejection is None
    assert story.approval("ap") == "granted"


@pytest.mark.parametrize("fields", [{"action": "deploy2"}, {"digest": D2}, {"digest": None}])
@pytest.mark.parametrize("early", [False, True])
def test_a_resolution_must_repeat_the_request(story: Story, fields: dict[str, str], early: bool) -> None:
    if not early:
        request(story)
    story.resolve("ap", **fields)  # type: ignore[arg-type]
    if early:
        request(story)
    assert story.approval("ap") == "pending"
    assert story.violations() == {"illegal_transition": 1}
    story.resolve("ap")
    assert story.approval("ap") == "granted"


def test_an_early_resolution_waits_for_its_request(story: Story) -> None:
    assert codes(story.resolve("ap", uses=2, expires_at="2027-01-01T00:00:00+01:00")) == []
    request(story)
    item = story.ledger().items["approval"]["ap"]
    assert (item.state, item.uses_left, item.expires_at) == ("granted", 2, "2026-12-31T23:00:00Z")
    assert story.ledger().items["early"] == {}


@pytest.mark.parametrize(
    ("words", "state"),
    [
        (("granted", "revoked"), "revoked"),
        (("revoked", "granted"), "revoked"),
        (("denied", "granted"), "denied"),
        (("granted", "denied"), "granted"),
    ],
)
@pytest.mark.parametrize("requested_after", [0, 1, 2])
def test_the_order_of_words_counts_wherever_the_request_comes(
    story: Story, words: tuple[str, str], state: str, requested_after: int
) -> None:
    for place, word in enumerate((*words, None)):
        if place == requested_after:
            request(story)
        if word is not None:
            story.resolve("ap", word)
    assert story.approval("ap") == state


@pytest.mark.parametrize(
    ("state", "word"),
    [
        ("denied", "granted"),
        ("denied", "revoked"),
        ("revoked", "granted"),
        ("expired", "granted"),
        ("consumed", "revoked"),
        ("consumed", "granted"),
        ("granted", "denied"),
        ("granted", "granted"),
    ],
)
def test_illegal_steps_change_nothing(story: Story, state: str, word: str) -> None:
    request(story)
    if state in ("denied", "revoked"):
        story.resolve("ap", state)
    elif state == "expired":
        story.record("approval.expired", approval_id="ap")
    else:
        story.resolve("ap")
    if state == "consumed":
        story.declare("op", payload_digest=D1, approval_id="ap")
        assert story.act("op").code == "ok"
    assert story.approval("ap") == state
    assert codes(story.resolve("ap", word)) == ["illegal_transition"]
    assert story.approval("ap") == state


def test_a_request_is_set_once(story: Story) -> None:
    request(story)
    story.tell("approval.requested", approval_id="ap", action="other", payload_digest=D2)
    assert story.violations() == {"illegal_transition": 1}
    assert story.ledger().items["approval"]["ap"].action == "deploy"


def test_expiry_is_a_record_and_repeats_without_harm(story: Story) -> None:
    request(story)
    story.resolve("ap")
    story.record("approval.expired", approval_id="ap")
    story.record("approval.expired", approval_id="ap")
    story.record("approval.expired", approval_id="none")
    assert story.approval("ap") == "expired"
    assert story.violations() == {}


def test_uses_are_counted(story: Story) -> None:
    request(story)
    story.resolve("ap", uses=2)
    for number in (1, 2, 3):
        story.declare(f"op{number}", approval_id="ap", payload_digest=D1)
    assert story.act("op1", "q1").code == "ok"
    assert story.approval("ap") == "granted"
    assert codes(story.tell("operation.dispatched", operation_id="op2")) == []
    assert story.approval("ap") == "consumed"
    assert story.act("op3", "q3").code == "approval_consumed"


def test_a_denied_operation_uses_nothing_up(story: Story) -> None:
    request(story)
    story.resolve("ap")
    story.declare("op", approval_id="ap", payload_digest=D1)
    story.tell("run.paused", reason="r")
    assert story.act("op").code == "run_paused"
    assert story.approval("ap") == "granted"
