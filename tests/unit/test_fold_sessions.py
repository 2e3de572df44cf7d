"""Sessions, numbers and gaps: late and doubled numbers, foreign sessions, what an authority accepts."""

from __future__ import annotations

import pytest

from protocol.events import Settings
from sidecar.core.fold import fold_settings, note_rejected
from sidecar.core.state import ledger_value
from support.story import D1, Story, codes, event


@pytest.fixture
def story() -> Story:
    story = Story()
    story.start(session="s1", seq=1)
    return story


def say(story: Story, seq: int | None, session: str | None = "s1", **fields: object) -> list[str]:
    return codes(
        story.tell("message", role="assistant", content="x", session=session, seq=seq, **fields)  # type: ignore[arg-type]
    )


def gaps(story: Story, kind: str = "gap") -> list[tuple[str | None, int, int]]:
    items = story.ledger().items[kind].values()
    return sorted((gap.session, gap.first, gap.through) for gap in items)


def test_a_missing_number_opens_a_gap_and_the_message_closes_its_part(story: Story) -> None:
    story.declare("op")
    assert say(story, 6) == ["history_gap"]
    assert gaps(story) == [("s1", 2, 5)]
    assert story.code("op") == "history_gap"
    assert say(story, 4) == ["late_event"]
    assert gaps(story) == [("s1", 2, 3), ("s1", 5, 5)]
    assert say(story, 4) == ["sequence_conflict"]
    for seq in (3, 5, 2):
        assert story.code("op") == "history_gap"
        assert say(story, seq) == ["late_event"]
    assert gaps(story) == []
    assert story.code("op") == "ok"


def test_a_first_number_above_one_opens_a_gap_from_one() -> None:
    story = Story()
    outcome = story.start(session="s1", seq=3)
    assert [(gap.first, gap.through) for gap in outcome.gaps] == [(1, 2)]
    assert gaps(story) == [("s1", 1, 2)]


def test_numbers_are_per_session_and_channel(story: Story) -> None:
    assert say(story, 1, "s1", id_="again") == ["sequence_conflict"]
    story.authority("message", role="user", content="x", session="s1", seq=1)
    story.tell("run.resumed", session="s2", seq=1)
    assert story.violations() == {"sequence_conflict": 1}
    assert gaps(story) == []


def test_accepted_ranges_add_up(story: Story) -> None:
    say(story, 9)
    story.authority("gap.accepted", session="s1", from_=1, through=4, by="ann")
    assert gaps(story) == [("s1", 5, 8)]
    story.authority("gap.accepted", session="s1", from_=6, through=6, by="ann")
    assert gaps(story) == [("s1", 5, 5), ("s1", 7, 8)]
    story.authority("gap.accepted", session="s1", from_=5, through=8, by="ann")
    assert gaps(story) == []
    assert story.violations() == {"history_gap": 1}
    assert say(story, 3) == ["late_event"]
    assert say(story, 3) == ["sequence_conflict"]
    story.authority("gap.accepted", session="s1", from_=5, through=8, by="ann")
    assert story.violations()["history_gap"] == 1


def test_accepting_needs_an_authority_and_a_gap(story: Story) -> None:
    say(story, 3)
    outcome = story.tell("gap.accepted", session="s1", from_=2, through=2, by="me")
    assert outcome.rejection is not None
    assert gaps(story) == [("s1", 2, 2)]
    outcome = story.authority("gap.accepted", session="s1", from_=20, through=30, by="ann")
    assert codes(outcome) == ["illegal_transition"]
    story.authority("gap.accepted", from_=2, through=2, by="ann")
    assert gaps(story) == []


def test_what_was_accepted_before_does_not_cover_what_is_lost_later(story: Story) -> None:
    say(story, 3)
    story.authority("gap.accepted", session="s1", from_=1, through=100, by="ann")
    assert say(story, 6) == ["history_gap"]
    assert gaps(story) == [("s1", 4, 5)]


def test_declared_gaps(story: Story) -> None:
    say(story, 4)
    for _ in range(2):
        story.record("gap.declared", session="s1", from_=2, through=3)
    assert [gap.declared for gap in story.ledger().items["gap"].values()] == [True]
    say(story, 2)
    story.record("gap.declared", session="s1", from_=2, through=3)
    assert gaps(story) == [("s1", 3, 3)]
    story.authority("gap.accepted", session="s1", from_=3, through=3, by="ann")
    story.record("gap.declared", session="s1", from_=2, through=3)
    assert gaps(story) == []


def test_gaps_of_the_stream(story: Story) -> None:
    story.declare("op")
    for _ in range(2):
        story.record("gap.declared", stream_from=10, stream_through=20)
    assert gaps(story) == [(None, 10, 20)]
    assert story.violations() == {"history_gap": 1}
    assert story.code("op") == "history_gap"
    story.authority("gap.accepted", from_=1, through=15, by="ann")
    assert gaps(story) == [(None, 16, 20)]
    story.record("gap.declared", stream_from=10, stream_through=22)
    assert gaps(story) == [(None, 16, 20), (None, 21, 22)]
    story.authority("gap.accepted", from_=16, through=22, by="ann")
    story.record("gap.declared", stream_from=10, stream_through=22)
    assert gaps(story) == []
    assert story.code("op") == "ok"


LATE_AND_WITHOUT_EFFECT = [
    ("event", "step.changed", {"phase": "x", "next_action": {"verb": "stop"}}),
    ("event", "model.changed", {"model": {"name": "z", "context_window": 5}}),
    ("event", "usage.reported", {"model": "m", "context_tokens": 5, "output_tokens": 5}),
    ("event", "input.pinned", {"name": "n", "version": "9"}),
    ("event", "policy.loaded", {"version": "v9"}),
    ("authority", "policy.released", {"version": "v9"}),
    ("authority", "task.changed", {"goal": "other", "reason": "r"}),
    ("event", "run.started", {"goal": "other", "model": {"name": "z", "context_window": 5}}),
    ("event", "run.resumed", {"policy_version": "v9", "ledger_version": 1}),
    ("event", "constraint.lifted", {"constraint_id": "c", "reason": "r"}),
    ("authority", "constraint.lifted", {"constraint_id": "c", "reason": "r"}),
]


@pytest.mark.parametrize(("channel", "type_", "fields"), LATE_AND_WITHOUT_EFFECT)
def test_late_ones_that_would_set_a_current_value_change_nothing(
    story: Story, channel: str, type_: str, fields: dict[str, object]
) -> None:
    story.tell("constraint.set", constraint_id="c", text="t", source="agent", session="s1", seq=2)
    story.tell("run.paused", reason="r", session="s1", seq=4)
    story.authority("message", role="system", content="x", session="a", seq=2)
    before = ledger_value(story.ledger())
    session, seq = ("s1", 3) if channel == "event" else ("a", 1)
    outcome = story.tell(type_, channel=channel, session=session, seq=seq, **fields)  # type: ignore[arg-type]
    assert outcome.late
    assert codes(outcome) == ["late_event"]
    after = ledger_value(story.ledger())
    after["items"].pop("gap", None)
    before["items"].pop("gap", None)
    assert after["items"] == before["items"]
    for name in ("version", "position", "last_event_id", "violations"):
        after["head"].pop(name)
        before["head"].pop(name)
    assert after["head"] == before["head"]


def test_a_late_start_fills_in_a_contract_that_is_missing() -> None:
    story = Story()
    say(story, 2)
    assert not story.ledger().head.started
    story.start(session="s1", seq=1, constraints=[{"id": "c", "text": "t", "source": "user"}])
    assert story.ledger().head.started
    assert story.ledger().task.goal == "mend the pump"


def test_a_late_start_loses_no_constraint(story: Story) -> None:
    say(story, 3)
    story.start(session="s1", seq=2, constraints=[{"id": "c", "text": "t", "source": "user"}])
    assert story.ledger().active["constraint"]["c"].text == "t"


def test_lists_of_an_overtaken_release_hold_where_the_newer_one_gave_none(story: Story) -> None:
    story.authority("policy.released", version="v2", approval_kinds=["a"], session="p", seq=2)
    story.authority(
        "policy.released", version="v1", approval_kinds=["b"], forbidden_kinds=["c"], session="p", seq=1
    )
    policy = story.ledger().policy
    assert (policy.released, policy.approval_kinds, policy.forbidden_kinds) == ("v2", ("a",), ("c",))


@pytest.mark.parametrize("type_", ["run.started", "run.resumed"])
def test_another_session_ends_the_current_one(story: Story, type_: str) -> None:
    story.declare("op")
    story.tell(
        "tool.called", call_id="c", tool="t", arguments={}, operation_id="op", id_="call", session="s1"
    )
    fields = {} if type_ == "run.resumed" else {"goal": "mend the pump"}
    begin = story.start if type_ == "run.started" else lambda **f: story.tell("run.resumed", **f)
    outcome = begin(session="s2", **fields)
    assert outcome.operations_unknown == ["op"]
    assert story.ledger().items["call"]["call"].state == "abandoned"
    assert (story.ledger().head.session, story.ledger().head.ended_sessions) == ("s2", ("s1",))
    for same in ({"session": "s2"}, {}):
        begin(**same, **fields)
        assert (story.ledger().head.session, story.ledger().head.ended_sessions) == ("s2", ("s1",))


FOREIGN = [
    ("message", {"role": "user", "content": "x"}),
    ("run.paused", {"reason": "r"}),
    ("run.finished", {"outcome": "failed"}),
    ("step.changed", {"phase": "x"}),
    ("constraint.set", {"constraint_id": "n", "text": "t", "source": "user"}),
    ("constraint.lifted", {"constraint_id": "c", "reason": "r"}),
    ("decision.made", {"decision_id": "d", "summary": "s"}),
    ("question.opened", {"question_id": "q", "text": "s"}),
    ("operation.declared", {"operation_id": "n", "kind": "k", "idempotency_key": "k"}),
    ("approval.requested", {"approval_id": "n", "action": "deploy"}),
    ("evidence.recorded", {"evidence_id": "n", "claim": "c", "kind": "observed", "source": "s"}),
    ("artifact.saved", {"artifact_id": "n", "uri": "u", "sha256": D1, "description": "d"}),
    ("policy.loaded", {"version": "v"}),
    ("child.spawned", {"child_run": "kid", "task": "t"}),
    ("tool.called", {"call_id": "n", "tool": "t", "arguments": {}}),
    ("tool.returned", {"call_id": "n", "status": "ok", "content": "x"}),
    ("boundary.marked", {"kind": "turn_ended"}),
    ("operation.settled", {"operation_id": "unknown", "state": "failed"}),
    (
        "operation.reconciled",
        {"operation_id": "unknown", "state": "failed", "evidence": "evidence:seen"},
    ),
]


@pytest.mark.parametrize(("type_", "fields"), FOREIGN)
def test_a_foreign_session_moves_nothing(story: Story, type_: str, fields: dict[str, object]) -> None:
    story.tell("constraint.set", constraint_id="c", text="t", source="agent")
    story.tell("message", role="user", content="do it")
    story.declare("unknown")
    story.act("unknown")
    story.tell("operation.settled", operation_id="unknown", state="unknown")
    story.tell("evidence.recorded", evidence_id="seen", claim="c", kind="observed", source="x")
    story.tell("run.resumed", session="s2")
    before = ledger_value(story.ledger())
    outcome = story.tell(type_, session="s1", **fields)  # type: ignore[arg-type]
    assert outcome.foreign
    assert outcome.rejection is None
    after = ledger_value(story.ledger())
    assert after["items"] == before["items"]
    assert after["head"]["turn"] == before["head"]["turn"]
    assert after["head"]["pauses"] == before["head"]["pauses"]
    assert after["head"]["finished"] is None
    assert after["head"]["position"] == before["head"]["position"] + 1


@pytest.mark.parametrize(
    ("said", "state"), [("succeeded", "succeeded"), ("failed", "unknown"), ("unknown", "unknown")]
)
def test_a_foreign_session_may_say_that_an_operation_ran(story: Story, said: str, state: str) -> None:
    story.declare("op")
    story.act("op")
    story.tell("run.resumed", session="s2")
    outcome = story.tell("operation.settled", operation_id="op", state=said, session="s1")
    assert codes(outcome) == ["foreign_session"]
    assert story.state("op") == state


@pytest.mark.parametrize("type_", ["operation.dispatched", "tool.called"])
def test_a_foreign_dispatch_counts(story: Story, type_: str) -> None:
    story.declare("op")
    story.tell("run.resumed", session="s2")
    fields = {"call_id": "c", "tool": "t", "arguments": {}} if type_ == "tool.called" else {}
    story.tell(type_, operation_id="op", session="s1", **fields)  # type: ignore[arg-type]
    assert story.state("op") == "pending"
    assert story.ledger().items["call"] == {}
    story.tell(type_, operation_id="other", session="s1", id_="x", **fields)  # type: ignore[arg-type]
    assert story.state("other") == "unknown"


def test_a_result_of_the_ended_session_may_be_looked_up(story: Story) -> None:
    story.declare("op")
    story.tell("tool.called", call_id="c", tool="t", arguments={}, operation_id="op", session="s1")
    story.tell("run.resumed", session="s2")
    story.tell("tool.returned", call_id="c", status="ok", content="done", session="s1", id_="res")
    assert story.state("op") == "unknown"
    story.tell("operation.reconciled", operation_id="op", state="succeeded", evidence="event:res")
    assert story.state("op") == "succeeded"


def test_an_authority_has_no_session_of_the_agent(story: Story) -> None:
    outcome = story.authority("run.paused", reason="r", session="elsewhere")
    assert not outcome.foreign
    assert story.ledger().head.pauses
    story.authority("run.resumed", session="elsewhere")
    assert story.ledger().head.session == "s1"
    assert story.ledger().head.pauses == ()


def test_a_late_failed_counts_as_unknown(story: Story) -> None:
    story.declare("op", session="s1", seq=2)
    story.tell("operation.dispatched", operation_id="op", session="s1", seq=3)
    say(story, 5)
    story.tell("operation.settled", operation_id="op", state="failed", session="s1", seq=4)
    assert story.state("op") == "unknown"


def test_settings_of_a_former_owner_are_ignored(story: Story) -> None:
    def applied(epoch: int, required: bool) -> bool:
        settings = {"authority_required": required}
        told = event("settings.applied", channel="record", epoch=epoch, settings=settings)
        return fold_settings(story.lane, told)  # type: ignore[arg-type]

    assert applied(3, False)
    assert not applied(2, True)
    assert story.lane.settings == Settings(authority_required=False)
    assert (story.lane.epoch, story.lane.settled) == (3, True)


def test_rejected_messages_are_noted(story: Story) -> None:
    ledger = story.ledger()
    assert note_rejected(ledger, "duplicate_conflict") is not None
    assert note_rejected(ledger, "malformed", channel="event", session="s1", seq=2) is None
    assert story.violations() == {"duplicate_conflict": 1}
    assert say(story, 3) == []


def test_records_belong_on_their_channel(story: Story) -> None:
    from sidecar.core.fold import Origin, fold

    told = event("operation.timed_out", channel="record", operation_id="x", epoch=1)
    assert fold(story.lane, story.runs, "r", told, Origin("event")).rejection is not None
    told = event("run.paused", reason="x")
    assert fold(story.lane, story.runs, "r", told, Origin("record")).rejection is not None


def test_a_gap_is_closed_on_its_own_channel_only(story: Story) -> None:
    say(story, 4)
    for seq in (3, 4):
        story.authority("message", role="user", content="x", session="s1", seq=seq)
    channels = sorted((gap.channel, gap.first, gap.through) for gap in story.ledger().items["gap"].values())
    assert channels == [("authority", 1, 2), ("event", 2, 3)]
    assert say(story, 2) == ["late_event"]
    channels = sorted((gap.channel, gap.first, gap.through) for gap in story.ledger().items["gap"].values())
    assert channels == [("authority", 1, 2), ("event", 3, 3)]


def test_the_first_session_that_speaks_is_the_current_one() -> None:
    story = Story()
    say(story, None, "s1")
    assert say(story, None, "s2") == ["foreign_session"]
    story.start()
    assert story.ledger().head.session == "s1"
    assert say(story, None, None) == []
