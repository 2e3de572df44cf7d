"""Turns, calls, progress, decisions, questions, evidence, artifacts, and the tables in print."""

from __future__ import annotations

import pytest

from sidecar.core import calls, transitions, turns
from sidecar.core.state import ITEM_TYPES
from support.story import D1, D2, Story, codes


@pytest.fixture
def story() -> Story:
    story = Story()
    story.start()
    return story


def user(story: Story, text: str, **fields: object) -> None:
    story.tell("message", role="user", content=text, **fields)  # type: ignore[arg-type]


def assistant(story: Story, **fields: object) -> None:
    story.tell("message", role="assistant", content="well", **fields)  # type: ignore[arg-type]


def request(story: Story) -> list[str]:
    return [item.text for item in story.ledger().items["request"].values()]


def call(story: Story, call_id: str = "c", **fields: object) -> str:
    outcome = story.tell("tool.called", call_id=call_id, tool="t", arguments={}, **fields)  # type: ignore[arg-type]
    del outcome
    return f"e-{story.count}"


def result(story: Story, call_id: str = "c", status: str = "ok", **fields: object) -> list[str]:
    return codes(story.tell("tool.returned", call_id=call_id, status=status, content="x", **fields))  # type: ignore[arg-type]


def test_the_current_request(story: Story) -> None:
    user(story, "one")
    user(story, "two")
    assert request(story) == ["one", "two"]
    assistant(story)
    assert request(story) == ["one", "two"]
    call(story)
    user(story, "three")
    result(story)
    user(story, "four")
    assert request(story) == ["one", "two", "three", "four"]
    assistant(story)
    user(story, "new")
    assert request(story) == ["new"]
    story.tell("boundary.marked", kind="tests_finished")
    assert request(story) == ["new"]
    story.tell("boundary.marked", kind="turn_ended")
    assert request(story) == []


def test_an_open_call_keeps_the_turn(story: Story) -> None:
    user(story, "one")
    call(story)
    assistant(story)
    user(story, "two")
    assert request(story) == ["one", "two"]
    event_id = f"e-{story.count - 2}"
    story.record("call.abandoned", call_id="c", event_id=event_id)
    user(story, "three")
    assert request(story) == ["three"]


def test_a_correction_replaces(story: Story) -> None:
    user(story, "one", id_="m1")
    user(story, "two", id_="m2")
    user(story, "one, corrected", supersedes="m1")
    assert request(story) == ["two", "one, corrected"]
    assert sorted(item.text for item in story.ledger().items["user"].values()) == ["one, corrected", "two"]
    assert {item.rank for item in story.ledger().items["user"].values()} == {3, 1}


def test_late_messages_end_no_request() -> None:
    story = Story()
    story.start(session="s", seq=1)
    user(story, "one", session="s", seq=2)
    assistant(story, session="s", seq=5)
    user(story, "late", session="s", seq=3)
    assert request(story) == ["one", "late"]
    user(story, "next", session="s", seq=6)
    assistant(story, session="s", seq=4)
    user(story, "and", session="s", seq=7)
    assert request(story) == ["next", "and"]


def test_an_authoritys_message_is_named_by_position(story: Story) -> None:
    story.authority("message", role="user", content="from the front end", id_="e-1")
    position = story.ledger().head.position
    assert list(story.ledger().items["request"]) == [f"pos:{position}"]
    user(story, "agent", id_=f"pos:{position}")
    assert len(request(story)) == 2


def test_user_messages_are_kept_by_rank(story: Story) -> None:
    user(story, "first")
    user(story, "never delete data/prod.db")
    for number in range(40):
        user(story, f"chatter {'x' * 3000}")
        del number
    user(story, "y" * 9000)
    kept = sorted(story.ledger().items["user"].values(), key=lambda item: item.position)
    assert kept[0].text == "first"
    assert kept[1].text == "never delete data/prod.db"
    assert kept[-1].text == "y" * turns.KEPT_CHARS
    assert sum(len(item.text) for item in kept) <= turns.KEPT_BYTES
    assert request(story)[-1] == "y" * 9000
    for _ in range(2000):
        user(story, "")
    assert len(story.ledger().items["user"]) <= turns.KEPT_BYTES // 64 + 2


def test_calls(story: Story) -> None:
    first = call(story)
    assert result(story, status="pending") == []
    assert list(story.ledger().items["call"]) == [first]
    outcome = story.tell("tool.called", call_id="c", tool="t", arguments={})
    assert codes(outcome) == ["duplicate_call"]
    assert len(story.ledger().items["call"]) == 2
    result(story)
    assert list(story.ledger().items["call"]) == [first]
    result(story)
    assert result(story) == ["orphan_result"]
    assert result(story, "x", "pending") == ["orphan_result"]
    call(story)
    assert story.violations() == {"duplicate_call": 1, "orphan_result": 2}


def test_an_abandoned_call_that_is_answered_after_all(story: Story) -> None:
    event_id = call(story)
    story.record("call.abandoned", call_id="other", event_id=event_id)
    assert story.ledger().items["call"][event_id].state == "open"
    for _ in range(2):
        story.record("call.abandoned", call_id="c", event_id=event_id)
    assert story.ledger().items["call"][event_id].state == "abandoned"
    assert result(story) == ["orphan_result"]
    assert story.ledger().items["call"] == {}


def test_abandoned_calls_are_bounded(story: Story) -> None:
    for number in range(calls.ABANDONED_KEPT + 5):
        event_id = call(story, f"c{number}")
        story.record("call.abandoned", call_id=f"c{number}", event_id=event_id)
    assert len(story.ledger().items["call"]) == calls.ABANDONED_KEPT
    assert "c0" not in {item.call_id for item in story.ledger().items["call"].values()}


def test_results_are_bounded(story: Story) -> None:
    story.tell("operation.dispatched", operation_id="op")
    for number in range(calls.RESULTS_KEPT + 5):
        call(story, f"c{number}")
        result(story, f"c{number}")
    assert len(story.ledger().items["result"]) == calls.RESULTS_KEPT


def test_step_changed(story: Story) -> None:
    story.tell(
        "step.changed",
        phase="p",
        completed=[{"text": "a", "refs": ["event:e-1"]}],
        plan=[{"id": "1", "text": "x", "state": "todo"}],
        focus={"files": ["f"], "remaining": ["r"]},
        next_action={"verb": "test"},
        blockers=[{"id": "b", "text": "x"}],
        uncertain=["u"],
    )
    before = story.ledger().progress
    story.tell("step.changed", plan=[], uncertain=[])
    after = story.ledger().progress
    assert (after.plan, after.uncertain) == ((), ())
    assert (after.phase, after.completed, after.focus, after.next_action, after.blockers) == (
        before.phase,
        before.completed,
        before.focus,
        before.next_action,
        before.blockers,
    )


def test_decisions(story: Story) -> None:
    story.tell("decision.made", decision_id="d1", summary="a", rejected=[{"alternative": "b", "reason": "c"}])
    story.tell("decision.made", decision_id="d2", summary="b", supersedes="d1")
    assert sorted(story.ledger().active["decision"]) == ["d2"]
    assert codes(story.tell("decision.made", decision_id="d1", summary="x")) == ["illegal_transition"]
    for superseded in ("d1", "none", "d3"):
        outcome = story.tell("decision.made", decision_id="d3", summary="c", supersedes=superseded)
        assert codes(outcome) == ["illegal_transition"]
    assert sorted(story.ledger().active["decision"]) == ["d2", "d3"]


def test_questions(story: Story) -> None:
    assert codes(story.tell("question.answered", question_id="q", answer="a")) == ["illegal_transition"]
    story.tell("question.opened", question_id="q", text="t")
    story.tell("question.answered", question_id="q", answer="a", by="ann")
    assert codes(story.tell("question.answered", question_id="q", answer="b")) == ["illegal_transition"]
    assert codes(story.tell("question.opened", question_id="q", text="u")) == ["illegal_transition"]
    item = story.ledger().items["question"]["q"]
    assert (item.answer, item.by, item.live) == ("a", "ann", False)


def test_evidence_is_set_once(story: Story) -> None:
    fields = {"evidence_id": "e", "kind": "observed", "source": "s", "contradicts": ["x"]}
    story.tell("evidence.recorded", claim="a", value=1.5, unit="s", **fields)
    assert codes(story.tell("evidence.recorded", claim="b", **fields)) == ["illegal_transition"]
    assert story.ledger().items["evidence"]["e"].claim == "a"


def save(
    story: Story, artifact: str, version: str | None = None, digest: str = D1, **fields: object
) -> list[str]:
    return codes(
        story.tell(
            "artifact.saved",
            artifact_id=artifact,
            uri="u",
            sha256=digest,
            description="d",
            version=version,
            **fields,  # type: ignore[arg-type]
        )
    )


def artifacts(story: Story) -> dict[str, str]:
    return {key: item.state for key, item in story.ledger().items["artifact"].items()}


def test_artifact_versions(story: Story) -> None:
    assert save(story, "a", "1") == []
    assert save(story, "a", "1", D2) == ["illegal_transition"]
    assert save(story, "a", None) == ["illegal_transition"]
    assert save(story, "a", "2") == []
    assert artifacts(story) == {"a": "superseded", "a@2": "saved"}
    assert codes(story.tell("artifact.withdrawn", artifact_id="a", reason="r")) == []
    assert codes(story.tell("artifact.withdrawn", artifact_id="a", reason="r")) == ["illegal_transition"]
    assert artifacts(story) == {"a": "withdrawn", "a@2": "withdrawn"}
    assert save(story, "a", "2") == ["illegal_transition"]
    assert save(story, "a", "3") == []
    assert artifacts(story)["a@3"] == "saved"


def test_artifact_ids_that_look_like_versions(story: Story) -> None:
    save(story, "a", "0")
    save(story, "a@1", "x")
    save(story, "a", "1")
    assert artifacts(story) == {"a": "superseded", "a@1": "saved", "a@1@": "saved"}


def test_a_late_artifact_does_not_take_the_newer_ones_place() -> None:
    story = Story()
    story.start(session="s", seq=1)
    save(story, "a", "2", session="s", seq=3)
    save(story, "a", "1", session="s", seq=2)
    assert artifacts(story) == {"a": "saved", "a@1": "superseded"}


def test_every_table_prints() -> None:
    text = transitions.render()
    for title, table in transitions.TABLES.items():
        assert f"### {title}\n" in text
        for (state, happens), new in table.items():
            assert f"| {state} | {happens} | {new} |" in text
    assert not set(transitions.OPERATION) & set(transitions.OPERATION_EVIDENCE)


def test_every_type_has_a_rule() -> None:
    from protocol.events import EVENT_TYPES
    from sidecar.core.fold import _RULES

    assert set(_RULES) == set(EVENT_TYPES.values())
    assert set(ITEM_TYPES) >= {"accepted", "claim"}
