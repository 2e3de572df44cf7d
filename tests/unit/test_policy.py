"""When history is shortened, how, and why not: every reason to wait, and that nothing loops."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest

from sidecar.core import course, planning, policy
from sidecar.core.budget import BudgetSettings
from sidecar.core.course import Compact, Course, Defer, Ineffective, Trim
from sidecar.core.policy import Nothing, Prepare
from sidecar.core.state import Call, Gap, Head, Ledger, ModelInfo, Operation
from support.tape import SETTINGS, Tape, words

NOW = 1_000.0


class Run(Tape):
    """A tape with a ledger and a course, driven as the shell drives them."""

    def __init__(self, window: int = 100_000, settings: BudgetSettings = SETTINGS) -> None:
        self.course = Course()
        self.ledger = Ledger(Head(run="r", started=True, model=ModelInfo("m", window)))
        self.not_applied: list[int] = []
        self.ineffective: list[int] = []
        super().__init__(window, settings)

    def add(self, type_: str, channel: str = "event", **fields: Any) -> Any:
        observed = super().add(type_, channel, **fields)
        self.ledger.head.position = self.count
        told = course.follow(self.course, self.budget, observed, self.settings)
        if told == "not_applied":
            self.not_applied.append(self.count)
        elif told == "ineffective":
            self.ineffective.append(self.count)
        return observed

    def decide(
        self, now: float = NOW, *, mode: str = "live", bypass: bool = False, requested: bool = False
    ) -> policy.Step:
        ask = policy.on_request if requested else policy.decide
        return ask(self.ledger, self.budget, self.course, self.settings, mode=mode, bypass=bypass, now=now)

    def plan(self, trigger: str = "threshold") -> planning.Plan:
        tail = [item for item in self.items if item.position > self.course.covers_through]
        return planning.plan(tail, self.ledger, self.budget, self.course, self.settings, trigger=trigger)

    def fill(self, tokens: int, turn: int = 1_000, report: bool = True) -> None:
        """Turns of talk (nothing to clear) until about so many tokens are used."""
        while self.budget.used() < tokens:
            self.user(words(turn // 2))
            self.said(words(turn // 2))
        if report:
            self.usage(tokens, through=self.items[-1].event.id)

    def commit(self, plan: Compact, *, live: bool = True, packet: int = 2_000) -> None:
        course.committed(
            self.course,
            self.budget,
            plan,
            checkpoint_id=f"cp-{self.course.checkpoint_version + 1}",
            live=live,
            packet_tokens=packet,
            tail_tokens=plan.kept_tokens,
        )

    def take_up(self) -> None:
        self.add("run.resumed", packet_id="p", session="s")

    def open_call(self) -> str:
        self.said()
        self.call("open")
        name = f"e-{self.count}"
        self.ledger.put("call", Call(id=name, call_id="open", tool="bash", position=self.count))
        return name


def reason(step: object) -> str:
    assert isinstance(step, (Defer, Ineffective)), step
    return step.reason


def compact(found: object) -> Compact:
    assert isinstance(found, Compact), found
    return found


def test_nothing_is_wanted_below_compact() -> None:
    run = Run()
    run.fill(60_000)
    assert run.budget.level == "checkpoint"
    assert run.decide() == Nothing()


@pytest.mark.parametrize(
    ("used", "trigger"), [(64_000, "threshold"), (76_000, "critical"), (90_000, "overflow")]
)
def test_triggers_by_level(used: int, trigger: str) -> None:
    run = Run()
    run.fill(used)
    assert run.decide() == Prepare(trigger=trigger)  # type: ignore[arg-type]


def test_a_smaller_model_is_a_trigger_of_its_own() -> None:
    run = Run(window=200_000)
    run.fill(70_000)
    assert run.decide() == Nothing()
    run.add("model.changed", model={"name": "m2", "context_window": 100_000})
    assert run.decide() == Prepare(trigger="model_changed")


def test_a_request_counts_at_any_level_and_keeps_the_floor() -> None:
    run = Run()
    run.fill(30_000)
    assert run.decide(requested=True) == Prepare(trigger="requested")
    assert compact(run.plan("requested")).trigger == "requested"
    small = Run()
    small.user()
    assert reason(small.plan("requested")) == "little_new"


def test_observe_and_bypass_defer_by_mode_once() -> None:
    run = Run()
    run.fill(70_000)
    assert run.decide(mode="observe") == Defer(reason="mode", changed=True)
    assert run.decide(mode="observe") == Defer(reason="mode", changed=False)
    assert run.decide(bypass=True) == Defer(reason="mode", changed=False)
    assert isinstance(run.decide(), Prepare)


def test_a_finished_run_is_left_alone() -> None:
    run = Run()
    run.fill(70_000)
    run.ledger.head.finished = "succeeded"
    assert run.decide() == Nothing()
    assert run.decide(requested=True) == Defer(reason="little_new", changed=False)


def test_without_a_window_there_is_nothing_to_make_room_in() -> None:
    run = Run()
    run.fill(30_000)
    run.budget.window = 0
    assert run.decide(requested=True) == Defer(reason="little_new", changed=False)


def test_who_asks_again_waits_for_work_in_flight_no_longer_than_a_minute_in_all() -> None:
    run = Run()
    run.ledger.put("operation", Operation(id="op", state="pending"))
    run.fill(30_000)
    for second in (0, 20, 40, 59):
        assert run.decide(NOW + second, requested=True) == Defer(reason="in_flight", changed=True)
        run.user()
        assert run.decide(NOW + second) == Nothing()
    assert run.course.deferred == ""
    assert run.decide(NOW + 60, requested=True) == Prepare(trigger="requested")


def test_the_wait_of_one_who_asked_ends_with_the_work() -> None:
    run = Run()
    run.ledger.put("operation", Operation(id="op", state="pending"))
    run.fill(30_000)
    assert run.decide(requested=True) == Defer(reason="in_flight", changed=True)
    run.ledger.put("operation", Operation(id="op", state="succeeded"))
    assert run.decide(NOW + 50) == Nothing()
    run.ledger.put("operation", Operation(id="op2", state="pending"))
    assert run.decide(NOW + 100, requested=True) == Defer(reason="in_flight", changed=True)
    assert run.decide(NOW + 159, requested=True) == Defer(reason="in_flight", changed=True)
    assert run.decide(NOW + 160, requested=True) == Prepare(trigger="requested")


def test_a_wait_for_the_level_begins_anew_with_the_level() -> None:
    run = Run()
    run.ledger.put("operation", Operation(id="op", state="pending"))
    run.fill(66_000)
    assert run.decide(NOW) == Defer(reason="in_flight", changed=True)
    run.add("context.replaced", by="agent", context_tokens=1_000)
    assert run.decide(NOW + 50) == Nothing()
    run.fill(66_000)
    assert run.decide(NOW + 70) == Defer(reason="in_flight", changed=True)
    assert run.decide(NOW + 129) == Defer(reason="in_flight", changed=False)
    assert isinstance(run.decide(NOW + 130), Prepare)


def test_work_in_flight_holds_a_minute_below_critical() -> None:
    run = Run()
    run.ledger.put("operation", Operation(id="op", state="pending"))
    run.fill(66_000)
    assert run.decide(NOW) == Defer(reason="in_flight", changed=True)
    assert run.decide(NOW + 59.9) == Defer(reason="in_flight", changed=False)
    assert isinstance(run.decide(NOW + 60), Prepare)
    run = Run()
    run.ledger.put("operation", Operation(id="op", state="pending"))
    run.fill(78_000)
    assert run.decide() == Prepare(trigger="critical")
    run.ledger.put("operation", Operation(id="op", state="unknown"))
    run.fill(66_000)
    assert run.budget.level != "ok"


def test_an_open_call_is_never_covered() -> None:
    run = Run()
    run.fill(40_000)
    opened = run.count
    run.open_call()
    run.fill(78_000)
    plan = compact(run.plan("critical"))
    assert plan.through <= opened
    run = Run()
    run.open_call()
    run.fill(78_000)
    assert reason(run.plan("critical")) == "no_boundary"


def test_an_undeclared_gap_bounds_the_cut_and_a_declared_one_does_not() -> None:
    run = Run()
    run.fill(40_000)
    run.user(session="s", seq=1)
    run.user(session="s", seq=4)
    behind = run.count
    run.fill(70_000)
    gap = Gap(id="event/s/2", channel="event", session="s", first=2, through=3)
    run.ledger.put("gap", gap)
    assert compact(run.plan()).through < behind
    run.ledger.put("gap", msgspec.structs.replace(gap, declared=True))
    assert compact(run.plan()).through > behind
    run.ledger.put("gap", Gap(id="stream/7", channel="event", session=None, first=7, through=9))
    assert reason(run.plan()) == "open_gap"


def test_who_asks_is_told_of_an_open_gap_that_leaves_hardly_anything_to_cover() -> None:
    run = Run()
    run.user(session="s", seq=1)
    run.said("I look.")
    run.user(session="s", seq=3)
    run.fill(40_000)
    gap = Gap(id="event/s/2", channel="event", session="s", first=2, through=2)
    run.ledger.put("gap", gap)
    assert reason(run.plan("requested")) == "open_gap"
    run.ledger.drop("gap", gap.id)
    assert compact(run.plan("requested")).through > 3


def test_an_unsaved_artifact_defers_and_is_listed_at_critical() -> None:
    run = Run()
    run.call("c", command="x")
    run.result("c", artifact_id="art-1")
    run.add("decision.made", decision_id="d", summary="s", refs=["artifact:art-2", "run:other/artifact:x"])
    run.fill(66_000)
    assert reason(run.plan()) == "artifact_unsaved"
    run.fill(78_000)
    assert compact(run.plan("critical")).missing_artifacts == ("art-1", "art-2")


# --- clearing, cut, rebuild ------------------------------------------------------------------------------


def test_clearing_is_enough_where_it_brings_the_figure_down() -> None:
    run = Run()
    run.fill(20_000, report=False)
    for _ in range(10):
        run.turn(4_000)
    run.usage(66_000, through=run.items[-1].event.id)
    plan = run.plan()
    assert isinstance(plan, Trim)
    before = run.budget.used()
    projected = before - plan.saved_tokens
    assert projected < (SETTINGS.compact_at - 0.05) * run.budget.usable(SETTINGS)
    course.trimmed(run.course, run.budget, plan)
    assert run.course.trimmed_through == plan.through
    assert run.budget.used() == before
    assert run.decide() == Nothing()
    run.take_up()
    assert run.budget.used() == pytest.approx(projected, rel=0.02)
    # Nothing is cleared twice.
    again = run.plan()
    assert not isinstance(again, Trim) or not again.cleared


def test_what_clearing_cannot_do_is_covered() -> None:
    run = Run()
    run.fill(66_000)
    plan = compact(run.plan())
    assert (plan.first, plan.rebuild, plan.missing_artifacts) == (1, False, ())
    assert plan.kept_tokens >= 10_000
    assert plan.range_tokens + plan.kept_tokens == pytest.approx(66_000, rel=0.02)


def test_every_kth_layer_is_rebuilt_from_the_first_event() -> None:
    run = Run()
    for version in range(1, 11):
        run.fill(66_000)
        plan = compact(run.plan())
        assert plan.rebuild == (version % 5 == 0)
        assert plan.first == (1 if plan.rebuild else run.course.covers_through + 1)
        run.commit(plan)
        run.take_up()
    assert run.course.checkpoint_version == 10
    never = Run(settings=msgspec.structs.replace(SETTINGS, rebuild_every=0))
    never.fill(66_000)
    never.course.checkpoint_version = 4
    assert not compact(never.plan()).rebuild


def test_the_same_input_gives_the_same_plan_whatever_the_clock() -> None:
    one, other = Run(), Run()
    for run, now in ((one, 5.0), (other, 9_999.0)):
        while not isinstance(run.decide(now), Prepare):
            run.turn(700)
            now += 17
    assert one.count == other.count
    assert one.plan() == other.plan()


# --- take-up ---------------------------------------------------------------------------------------------


def test_no_second_compaction_before_the_first_is_taken_up() -> None:
    run = Run()
    run.fill(66_000)
    run.commit(compact(run.plan()))
    assert run.budget.level == "compact"
    assert run.decide() == Nothing()
    assert run.decide(requested=True) == Defer(reason="cool_down", changed=True)
    run.fill(80_000, report=False)
    assert run.decide() == Nothing()
    run.take_up()
    assert run.budget.level == "ok"
    assert not run.course.awaiting_take_up
    assert run.decide() == Nothing()


def test_not_applied_is_said_once_after_three_samples_and_ends_with_a_take_up() -> None:
    run = Run()
    run.fill(66_000)
    run.commit(compact(run.plan()))
    for _ in range(5):
        run.said()
        run.usage(66_500)
    assert len(run.not_applied) == 1
    assert run.course.samples_since_commit == 5
    assert run.decide() == Defer(reason="not_applied", changed=True)
    assert run.decide() == Defer(reason="not_applied", changed=False)
    run.said()
    run.usage(20_000)
    assert run.decide() == Nothing()
    assert not run.course.not_applied


def test_a_trim_nobody_applies_does_not_hold_a_compaction_at_critical() -> None:
    run = Run()
    run.fill(20_000, report=False)
    for _ in range(10):
        run.turn(4_000)
    run.usage(66_000, through=run.items[-1].event.id)
    plan = run.plan()
    assert isinstance(plan, Trim)
    course.trimmed(run.course, run.budget, plan)
    run.fill(80_000, report=False)
    assert run.decide() == Prepare(trigger="critical")


# --- no loops --------------------------------------------------------------------------------------------


def test_a_fixed_cost_above_the_trigger_is_ineffective_not_a_loop() -> None:
    run = Run(window=32_000)
    plans: list[planning.Plan] = []
    for _ in range(50):
        run.user("short words")
        run.said("short words")
        run.usage(29_000 + run.count)
        if isinstance(run.decide(), Prepare):
            plan = run.plan("overflow")
            plans.append(plan)
            if isinstance(plan, Ineffective):
                course.mark_ineffective(run.course, run.budget, plan.reason)
    assert [type(plan) for plan in plans] == [Ineffective]
    assert run.course.ineffective == "fixed_cost"
    # A window that really changes makes it worth looking again.
    run.add("model.changed", model={"name": "m3", "context_window": 34_000})
    assert run.course.ineffective == ""
    assert isinstance(run.decide(), Prepare)


def _taken_up_to(run: Run, tokens: int) -> None:
    """The next compaction, committed and taken up; the next request is reported as so large."""
    run.commit(compact(run.plan("requested")))
    run.take_up()
    run.usage(tokens)


def test_a_compaction_that_wins_nothing_is_told_and_not_repeated() -> None:
    run = Run()
    run.fill(70_000)
    _taken_up_to(run, 69_500)
    assert len(run.ineffective) == 1
    assert run.course.ineffective == "no_gain"
    assert run.decide() == Nothing()
    # What has to come before the next try doubles with every one in a row.
    waits = []
    for _ in range(3):
        came = 0
        while run.decide() == Nothing():
            run.user(words(2_000))
            run.usage(70_000)
            came += 1
            assert came < 200
        waits.append(came)
        _taken_up_to(run, 69_500)
    assert len(run.ineffective) == 4
    assert waits == sorted(waits)
    assert waits[2] >= 3 * waits[0]
    # One that wins starts it over.
    while run.decide() == Nothing():
        run.user(words(2_000))
        run.usage(70_000)
    _taken_up_to(run, 30_000)
    assert (run.course.ineffective, run.course.ineffective_times) == ("", 0)
    assert len(run.ineffective) == 4


def test_what_came_since_the_take_up_is_not_held_against_it() -> None:
    run = Run()
    run.fill(70_000)
    run.commit(compact(run.plan("requested")))
    run.take_up()
    run.user(words(55_000))
    run.usage(68_000)
    assert run.ineffective == []
    assert run.course.ineffective == ""


def test_a_clearing_that_wins_what_it_promised_is_not_ineffective() -> None:
    run = Run()
    run.fill(76_000)
    saved = 2_000
    course.trimmed(run.course, run.budget, Trim(through=5, cleared=(), saved_tokens=saved))
    run.take_up()
    run.usage(76_000 - saved)
    assert run.ineffective == []
    course.trimmed(run.course, run.budget, Trim(through=6, cleared=(), saved_tokens=saved))
    run.take_up()
    run.usage(76_000 - saved)
    assert len(run.ineffective) == 1


def test_a_real_drop_clears_ineffective() -> None:
    run = Run(window=32_000)
    run.user()
    run.usage(29_000)
    assert isinstance(run.decide(), Prepare)
    course.mark_ineffective(run.course, run.budget, "fixed_cost")
    assert run.decide() == Nothing()
    run.said()
    run.usage(9_000)
    assert run.course.ineffective == ""


def test_new_material_makes_it_worth_looking_again() -> None:
    run = Run(window=32_000)
    run.user()
    run.usage(29_000)
    course.mark_ineffective(run.course, run.budget, "fixed_cost")
    run.user(words(1_000))
    assert run.decide() == Nothing()
    run.user(words(2_500))
    assert isinstance(run.decide(), Prepare)


def test_a_poor_gain_waits_for_more_material_and_is_taken_at_critical() -> None:
    # Half of the window is fixed: at ``compact`` the range is under 30 % of what is used.
    run = Run()
    run.fill(27_000, report=False)
    run.usage(64_000, through=run.items[-1].event.id)
    assert reason(run.plan()) == "little_new"
    run.fill(76_000, report=False)
    assert compact(run.plan("critical")).range_tokens > 20_000


def test_a_deferred_plan_is_not_made_again_for_every_message() -> None:
    run = Run()
    run.fill(27_000, turn=100, report=False)
    run.usage(64_000, through=run.items[-1].event.id)
    assert isinstance(run.decide(), Prepare)
    planned = 0
    for _ in range(30):
        run.add("step.changed", phase="x")
        planned += isinstance(run.decide(), Prepare)
    assert 1 <= planned <= 3
    run.ledger.put("gap", Gap(id="stream/7", channel="event", session=None, first=7, through=9))
    assert isinstance(run.decide(), Prepare)


def test_failures_back_off_then_the_breaker_opens_and_the_fallback_is_asked() -> None:
    run = Run()
    run.fill(66_000)
    now = NOW
    for number in (1, 2):
        assert run.decide(now) == Prepare(trigger="threshold")
        assert run.course.attempt == number
        assert not course.failed(run.course, "timeout", now=now, settings=SETTINGS)
        step = run.decide(now + 1)
        assert isinstance(step, Defer)
        assert step.reason == "cool_down"
        assert run.course.retry_at is not None
        now = run.course.retry_at
    assert isinstance(run.decide(now), Prepare)
    assert course.failed(run.course, "invalid", now=now, settings=SETTINGS)
    assert run.decide(now) == Prepare(trigger="threshold", fallback=True)
    course.failed(run.course, "invalid", now=now, settings=SETTINGS)
    assert reason(run.decide(now)) == "breaker"
    assert run.decide(now + 301) == Prepare(trigger="threshold")
    assert course.failed(run.course, "timeout", now=now + 301, settings=SETTINGS)


def test_without_a_fallback_the_breaker_holds_and_success_forgets() -> None:
    settings = msgspec.structs.replace(SETTINGS, fallback=False)
    run = Run(settings=settings)
    run.fill(66_000)
    for number in range(3):
        course.failed(run.course, "timeout", now=NOW + number, settings=settings)
    assert reason(run.decide(NOW + 10)) == "breaker"
    run.commit(compact(run.plan()))
    assert (run.course.failures, run.course.breaker_until) == (0, None)


def test_interrupted_attempts_do_not_count() -> None:
    run = Run()
    run.fill(66_000)
    for _ in range(5):
        assert isinstance(run.decide(), Prepare)
        assert not course.failed(run.course, "interrupted", now=NOW, settings=SETTINGS)
    assert run.course.failures == 0


def test_gains_keeps_the_hard_floor() -> None:
    run = Run()
    run.fill(66_000)
    plan = compact(run.plan())
    used = run.budget.used()
    assert course.gains(used, used - plan.range_tokens // 2, plan)
    assert not course.gains(used, used, plan)
    assert not course.gains(used, used + 5, plan)
    assert not course.gains(used, used - plan.range_tokens // 20, plan)


def test_shadow_compactions_follow_each_other_without_any_take_up() -> None:
    run = Run()
    run.fill(66_000)
    assert isinstance(run.decide(mode="shadow"), Prepare)
    run.commit(compact(run.plan()), live=False)
    assert not run.course.awaiting_take_up
    assert run.decide(mode="shadow") == Nothing()
    before = run.course.covers_through
    run.fill(130_000, report=False)
    assert isinstance(run.decide(mode="shadow"), Prepare)
    assert compact(run.plan()).first == before + 1


def test_the_course_survives_a_round_trip_and_a_copy() -> None:
    run = Run()
    run.fill(66_000)
    run.decide()
    run.commit(compact(run.plan()))
    kept = copy.copy(run.course)
    packed = msgspec.msgpack.encode(run.course)
    assert msgspec.msgpack.decode(packed, type=Course) == run.course
    course.failed(run.course, "timeout", now=NOW, settings=SETTINGS)
    assert msgspec.msgpack.encode(kept) == packed
