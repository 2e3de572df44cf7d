"""Children: what binds them, who makes them, claims, cycles, policy of a family."""

from __future__ import annotations

import pytest

from sidecar.core import family
from sidecar.core.fold import touches
from support.story import D1, Story, codes, event


@pytest.fixture
def story() -> Story:
    story = Story()
    story.start()
    story.tell("child.spawned", child_run="c", task="part", allowed_tools=["ls"], granted_refs=["event:e-1"])
    story.start(run="c", goal="part")
    story.tell("child.spawned", run="c", child_run="g", task="part of part")
    story.start(run="g", goal="part of part")
    for run in ("r", "c", "g"):
        story.declare("op", run=run, idempotency_key=f"{run}-op")
    return story


def codes_of(story: Story) -> list[str]:
    return [story.code("op", run=run) for run in ("r", "c", "g")]


def test_binding_constraints_reach_descendants_at_once(story: Story) -> None:
    assert codes_of(story) == ["ok", "ok", "ok"]
    story.tell(
        "constraint.set", run="c", constraint_id="x", text="t", source="user", forbids={"kinds": ["deploy"]}
    )
    assert codes_of(story) == ["ok", "constraint_forbids", "constraint_forbids"]
    story.authority("constraint.lifted", run="c", constraint_id="x", reason="r")
    assert codes_of(story) == ["ok", "ok", "ok"]


def test_an_agents_own_constraint_binds_it_alone(story: Story) -> None:
    story.tell("constraint.set", constraint_id="x", text="t", source="agent", forbids={"kinds": ["deploy"]})
    assert codes_of(story) == ["constraint_forbids", "ok", "ok"]


def test_pauses_reach_descendants(story: Story) -> None:
    story.tell("run.paused", run="c", reason="r")
    assert codes_of(story) == ["ok", "run_paused", "run_paused"]


def test_policy_and_kinds_reach_descendants(story: Story) -> None:
    story.authority("policy.released", version="v1", approval_kinds=["deploy"])
    assert codes_of(story) == ["policy_stale"] * 3
    for run in ("r", "c", "g"):
        story.tell("policy.loaded", run=run, version="v1")
    assert codes_of(story) == ["approval_missing"] * 3
    story.authority("policy.released", run="g", version="v1", approval_kinds=[])
    assert codes_of(story) == ["approval_missing"] * 3


def test_the_newest_release_of_the_line_is_in_force(story: Story) -> None:
    story.authority("policy.released", run="c", version="child-1")
    assert [family.released(story.runs, run) for run in ("r", "c", "g")] == [None, "child-1", "child-1"]
    outcome = story.authority("policy.released", version="root-1")
    assert outcome.touched == {"r"}
    assert [family.released(story.runs, run) for run in ("r", "c", "g")] == ["root-1"] * 3
    assert story.authority("policy.released", run="c", version="child-2").touched == {"r", "c"}
    assert [family.released(story.runs, run) for run in ("r", "c", "g")] == ["root-1", "child-2", "child-2"]


def test_approvals_are_never_inherited(story: Story) -> None:
    story.lane.settings = type(story.lane.settings)(approval_kinds=("deploy",))
    story.declare("paid", payload_digest=D1)
    story.declare("paid", run="c", payload_digest=D1, idempotency_key="other")
    story.grant("ap")
    assert story.code("paid") == "ok"
    assert story.code("paid", run="c") == "approval_missing"


def test_tools_allowed_by_the_parent(story: Story) -> None:
    story.declare("ls", run="c", tool="ls")
    story.declare("rm", run="c", tool="rm")
    assert (story.code("ls", run="c"), story.code("rm", run="c")) == ("ok", "out_of_scope")
    assert story.ledger("c").head.granted_refs == ("event:e-1",)


def test_a_child_without_being_spawned_is_paused_until_it_is() -> None:
    story = Story()
    story.start()
    outcome = story.start(run="c", goal="mine", parent_run="r", inputs=[{"name": "n", "version": "1"}])
    assert outcome.touched == {"r", "c"}
    story.declare("op", run="c")
    assert story.code("op", run="c") == "run_paused"
    outcome = story.tell(
        "child.spawned", child_run="c", task="theirs", done_when=["x"], inputs=[{"name": "n", "version": "2"}]
    )
    assert outcome.touched == {"r", "c"}
    child = story.ledger("c")
    assert (child.task.goal, child.task.done_when) == ("theirs", ("x",))
    assert child.items["input"]["n"].version == "2"
    assert story.ledger("r").items["claim"] == {}
    assert story.code("op", run="c") == "ok"


def test_the_parents_word_wins_over_the_childs_start() -> None:
    story = Story()
    story.start()
    story.tell("child.spawned", child_run="c", task="theirs", inputs=[{"name": "n", "version": "2"}])
    assert story.ledger("c").head.version == 0
    outcome = story.start(run="c", goal="mine", parent_run="r", inputs=[{"name": "n", "version": "1"}])
    assert codes(outcome) == ["contract_conflict"]
    assert story.ledger("c").task.goal == "theirs"
    assert story.ledger("c").items["input"]["n"].version == "2"


def test_a_claiming_run_holds_keys_of_the_family() -> None:
    story = Story()
    story.start()
    story.start(run="c", parent_run="r")
    story.declare("a", run="c", idempotency_key="k")
    assert codes(story.tell("operation.dispatched", run="c", operation_id="a")) == ["unauthorized_write"]
    story.declare("b", idempotency_key="k")
    assert story.code("b") == "in_flight"


def test_a_late_spawn_ends_the_pause() -> None:
    story = Story()
    story.start(session="s", seq=1)
    story.start(run="c", parent_run="r")
    story.declare("op", run="c")
    story.tell("message", role="user", content="x", session="s", seq=3)
    assert story.tell("child.spawned", child_run="c", task="t", session="s", seq=2).late
    assert story.code("op", run="c") == "ok"


@pytest.mark.parametrize(("by", "child"), [("r", "r"), ("g", "r"), ("g", "c"), ("r", "c"), ("r", "g")])
def test_refused_spawns(story: Story, by: str, child: str) -> None:
    parents = {run: ledger.head.parent for run, ledger in story.runs.items()}
    outcome = story.tell("child.spawned", run=by, child_run=child, task="again")
    assert codes(outcome) == ["illegal_transition"]
    assert parents == {run: ledger.head.parent for run, ledger in story.runs.items()}
    assert story.ledger("c").task.goal == "part"


@pytest.mark.parametrize("parent", ["a", "b"])
def test_a_claim_that_would_be_a_cycle_stays_paused(parent: str) -> None:
    story = Story()
    story.start(run="b", parent_run="a")
    outcome = story.start(run="a", parent_run=parent)
    assert codes(outcome) == ["illegal_transition"]
    assert story.ledger("a").head.parent is None
    story.declare("op", run="a")
    assert story.code("op", run="a") == "run_paused"


def test_a_child_returns_once(story: Story) -> None:
    fields = {"child_run": "c", "status": "succeeded", "artifacts": ["a1"], "evidence": ["e1"]}
    assert codes(story.tell("child.returned", **fields)) == []
    assert story.ledger().items["child"]["c"].status == "succeeded"
    assert codes(story.tell("child.returned", **fields)) == ["illegal_transition"]
    assert codes(story.tell("child.returned", child_run="x", status="failed")) == ["illegal_transition"]


def test_families_to_load() -> None:
    assert touches(event("child.spawned", child_run="c", task="t")) == ("c",)
    assert touches(event("child.returned", child_run="c", status="failed")) == ("c",)
    start = {"goal": "g", "model": {"name": "m", "context_window": 1}}
    assert touches(event("run.started", parent_run="p", **start)) == ("p",)
    assert touches(event("run.started", **start)) == ()


def test_members_are_the_whole_family(story: Story) -> None:
    story.start(run="x", parent_run="g")
    story.start(run="elsewhere")
    for run in ("r", "c", "g", "x"):
        assert [ledger.head.run for ledger in family.members(story.runs, run)] == ["r", "c", "g", "x"]


def test_an_authoritys_task_stands_against_a_late_spawn() -> None:
    story = Story()
    story.start()
    story.start(run="c", parent_run="r")
    story.authority("task.changed", run="c", reason="r", goal="the real goal")
    story.tell("child.spawned", child_run="c", task="theirs")
    assert story.ledger("c").task.goal == "the real goal"
