"""Contract, constraints, pauses, policy, task: what is set once, who may change it."""

from __future__ import annotations

import pytest

from support.story import Story, codes

USER = {"id": "c1", "text": "never touch prod", "source": "user"}


@pytest.fixture
def story() -> Story:
    story = Story()
    story.start(constraints=[USER])
    return story


def active(story: Story, run: str = "r") -> list[str]:
    return sorted(story.ledger(run).active["constraint"])


def test_the_contract(story: Story) -> None:
    story = Story()
    story.start(
        done_when=["green"],
        scope={"kinds": ["x"]},
        policy_version="v1",
        inputs=[{"name": "repo", "version": "1"}],
        agent="a",
        owner="ann",
        labels={"team": "t"},
        continues="r0",
        constraints=[USER],
    )
    ledger = story.ledger()
    assert (ledger.task.goal, ledger.task.done_when, ledger.task.owner) == (
        "mend the pump",
        ("green",),
        "ann",
    )
    assert ledger.task.scope is not None
    assert (ledger.policy.loaded, ledger.head.agent, ledger.head.continues) == ("v1", "a", "r0")
    assert (ledger.head.labels, ledger.head.constraint_seen) == ({"team": "t"}, True)
    assert ledger.items["input"]["repo"].version == "1"
    assert ledger.items["constraint"]["c1"].told_by == "agent"


@pytest.mark.parametrize(
    "fields",
    [
        {"goal": "other"},
        {"done_when": ["x"]},
        {"scope": {"kinds": ["*"]}},
        {"owner": "bob"},
        {"agent": "b"},
        {"labels": {"a": "b"}},
        {"parent_run": "p"},
        {"continues": "p"},
        {"inputs": [{"name": "n", "version": "1"}]},
        {"constraints": [USER | {"text": "prod is fine"}]},
    ],
)
def test_a_second_start_changes_no_contract(story: Story, fields: dict[str, object]) -> None:
    task, head = story.ledger().task, story.ledger().head
    before = (task, head.agent, head.labels, head.parent, head.continues, dict(story.ledger().items["input"]))
    outcome = story.start(policy_version="v2", model={"name": "n", "context_window": 7}, **fields)
    assert codes(outcome) == ["contract_conflict"]
    task, head = story.ledger().task, story.ledger().head
    assert before == (
        task,
        head.agent,
        head.labels,
        head.parent,
        head.continues,
        dict(story.ledger().items["input"]),
    )
    assert story.ledger().items["constraint"]["c1"].text == USER["text"]
    assert head.model is not None
    assert (head.model.name, story.ledger().policy.loaded) == ("n", "v2")


def test_the_same_start_again_is_no_conflict(story: Story) -> None:
    assert codes(story.start(constraints=[USER])) == []


def test_a_second_start_loses_no_constraint(story: Story) -> None:
    outcome = story.start(constraints=[{"id": "c2", "text": "nor test", "source": "user"}])
    assert codes(outcome) == ["contract_conflict"]
    assert active(story) == ["c1", "c2"]


def test_only_an_authority_lifts(story: Story) -> None:
    outcome = story.tell("constraint.lifted", constraint_id="c1", reason="r")
    assert outcome.rejection is not None
    assert active(story) == ["c1"]
    assert story.tell("constraint.lifted", constraint_id="none", reason="r").rejection is not None
    story.authority("constraint.lifted", constraint_id="c1", reason="r")
    assert active(story) == []
    assert codes(story.authority("constraint.lifted", constraint_id="c1", reason="r")) == [
        "illegal_transition"
    ]


def test_only_an_authority_replaces(story: Story) -> None:
    fields = {"constraint_id": "c2", "text": "softer", "source": "user", "replaces": "c1"}
    assert story.tell("constraint.set", **fields).rejection is not None
    assert active(story) == ["c1"]
    assert codes(story.authority("constraint.set", **fields)) == []
    assert active(story) == ["c2"]
    assert story.ledger().items["constraint"]["c2"].told_by == "authority"
    assert story.ledger().items["constraint"]["c1"].state == "replaced"


def test_the_agent_may_change_its_own(story: Story) -> None:
    story.tell("constraint.set", constraint_id="a1", text="t", source="agent")
    story.tell("constraint.set", constraint_id="a2", text="t2", source="agent", replaces="a1")
    assert active(story) == ["a2", "c1"]
    story.tell("constraint.lifted", constraint_id="a2", reason="r")
    assert active(story) == ["c1"]


def test_what_an_authority_told_as_the_agents_is_not_the_agents_own(story: Story) -> None:
    story.authority("constraint.set", constraint_id="a1", text="t", source="agent")
    assert story.tell("constraint.lifted", constraint_id="a1", reason="r").rejection is not None


def test_without_required_authority_the_agent_lifts() -> None:
    story = Story(authority_required=False)
    story.start(constraints=[USER])
    story.tell("constraint.lifted", constraint_id="c1", reason="r")
    assert active(story) == []


@pytest.mark.parametrize("replaces", ["none", "c2"])
def test_a_constraint_that_replaces_nothing_holds(story: Story, replaces: str) -> None:
    outcome = story.tell("constraint.set", constraint_id="c2", text="t", source="user", replaces=replaces)
    assert codes(outcome) == ["illegal_transition"]
    assert active(story) == ["c1", "c2"]


def test_a_constraint_overtaken_by_another_of_its_id_holds_too() -> None:
    story = Story()
    story.start(session="s", seq=1)
    fields = {"constraint_id": "c", "source": "user", "session": "s"}
    story.tell("constraint.set", text="second", seq=3, **fields)
    outcome = story.tell("constraint.set", text="first", seq=2, **fields)
    assert codes(outcome) == ["illegal_transition", "late_event"]
    assert sorted(item.text for item in story.ledger().active["constraint"].values()) == ["first", "second"]


@pytest.mark.parametrize("how", ["active", "lifted", "replaced"])
def test_a_constraint_id_is_set_once(story: Story, how: str) -> None:
    if how == "lifted":
        story.authority("constraint.lifted", constraint_id="c1", reason="r")
    elif how == "replaced":
        story.authority("constraint.set", constraint_id="c9", text="t", source="user", replaces="c1")
    before = active(story)
    fields = {"constraint_id": "c1", "text": "new", "source": "agent", "replaces": "c9"}
    assert codes(story.tell("constraint.set", **fields)) == ["illegal_transition"]
    assert active(story) == before


def test_pauses(story: Story) -> None:
    story.declare("op")
    story.tell("run.paused", reason="mine")
    story.authority("run.paused", reason="theirs")
    story.tell("run.resumed")
    assert [(pause.by, pause.reason) for pause in story.ledger().head.pauses] == [("authority", "theirs")]
    assert story.code("op") == "run_paused"
    story.tell("run.paused", reason="mine")
    story.authority("run.resumed")
    assert story.ledger().head.pauses == ()


def test_the_end_and_who_reopens(story: Story) -> None:
    story.tell("run.finished", outcome="succeeded")
    assert codes(story.tell("run.finished", outcome="failed")) == ["illegal_transition"]
    story.tell("run.resumed", session="s2")
    assert story.ledger().head.session == "s2"
    assert story.ledger().head.finished == "succeeded"
    story.authority("run.resumed")
    assert story.ledger().head.finished is None


def test_task_changed_asks_for_a_resume_that_knows_it(story: Story) -> None:
    assert story.tell("task.changed", reason="r", goal="g").rejection is not None
    story.authority("task.changed", reason="r", goal="new goal", trust="low", done_when=[])
    ledger = story.ledger()
    version = ledger.head.version
    assert (ledger.task.goal, ledger.task.trust, ledger.task.done_when) == ("new goal", "low", ())
    assert ledger.head.context_changed_at == version
    story.tell("run.resumed", ledger_version=version - 1)
    assert ledger.head.context_known_at < ledger.head.context_changed_at
    story.tell("run.resumed", ledger_version=10**9)
    assert ledger.head.context_known_at < ledger.head.context_changed_at
    story.tell("run.resumed", ledger_version=version, packet_id="p")
    assert ledger.head.context_known_at == ledger.head.context_changed_at


def test_an_authoritys_task_stands_against_the_agents_start() -> None:
    story = Story()
    story.authority("task.changed", reason="r", goal="the real goal")
    assert codes(story.start()) == ["contract_conflict"]
    assert story.ledger().task.goal == "the real goal"


def test_an_empty_run() -> None:
    story = Story()
    story.tell("message", role="user", content="hi")
    head = story.ledger().head
    assert (head.position, head.version) == (1, 1)
    assert not story.ledger().head.started
    assert story.tell("constraint.lifted", run="none", constraint_id="c", reason="r").rejection is not None
    assert "none" not in story.runs
