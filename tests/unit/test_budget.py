"""The context figure: what counts, what is ignored, levels, take-up, what is learnt."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest

from sidecar.core.budget import Budget, BudgetSettings, expect, level_of, took_up, usable
from sidecar.core.samples import MARKS
from sidecar.core.tokens import IMAGE_TOKENS, MOST_TOKENS, Estimate, added, estimate, text_tokens
from support.story import event
from support.tape import SETTINGS, Tape, words


@pytest.mark.parametrize(
    ("window", "output", "expected"),
    [
        (200_000, None, 200_000 - 8_192 - 8_000),
        (200_000, 64_000, 200_000 - 50_000 - 8_000),
        (32_000, None, 32_000 - 8_000 - 3_200),
        (0, None, 0),
    ],
)
def test_usable_is_the_window_less_output_and_reserve(window: int, output: int | None, expected: int) -> None:
    assert usable(window, output, SETTINGS) == expected


def test_levels_jump_several_steps_and_are_left_below_their_threshold() -> None:
    assert level_of(64, 100, "ok", SETTINGS) == "ok"
    assert level_of(65, 100, "ok", SETTINGS) == "checkpoint"
    assert level_of(130, 100, "ok", SETTINGS) == "overflow"
    assert level_of(71, 100, "compact", SETTINGS) == "compact"
    assert level_of(70, 100, "compact", SETTINGS) == "checkpoint"
    assert level_of(10, 100, "overflow", SETTINGS) == "ok"
    assert level_of(96, 100, "overflow", SETTINGS) == "overflow"
    assert level_of(50, 0, "ok", SETTINGS) == "ok"


def test_estimates_go_by_bytes_and_kind() -> None:
    assert text_tokens("") == 0
    assert text_tokens("abcde") == 2
    assert text_tokens("日本") == 2
    assert estimate(event("message", role="user", content="a" * 40)) == Estimate(prose=10)
    assert estimate(event("tool.returned", call_id="c", status="ok", content="a" * 40)) == Estimate(data=10)
    assert estimate(event("boundary.marked", kind="other")).tokens == 0
    parts = [
        {"kind": "text", "text": "a" * 8},
        {"kind": "reasoning", "tokens": 7},
        {"kind": "reasoning"},
        {"kind": "image", "media_type": "image/png"},
        {"kind": "image", "media_type": "image/png", "tokens": 11},
        {"kind": "data", "value": {"a": 1}},
    ]
    assert estimate(event("message", role="assistant", content=parts)) == Estimate(2, 2, 7, IMAGE_TOKENS + 11)


def test_used_is_the_newest_sample_and_what_came_since_its_last_event() -> None:
    tape = Tape()
    tape.user(words(1_000))
    tape.said("b" * 400)
    tape.usage(5_000)
    # By default the prompt ended before the newest assistant message, so its output counts on top.
    assert tape.budget.used() == 5_000 + 100
    tape.call("c", command="x")
    before = tape.budget.used()
    tape.result("c", words(2_000))
    assert tape.budget.used() == before + 2_000


def test_through_names_the_last_event_of_the_prompt() -> None:
    tape = Tape()
    tape.user(words(1_000), id_="u-1")
    tape.user(words(500), id_="u-2")
    tape.usage(5_000, through="u-1")
    assert tape.budget.used() == 5_500
    tape.usage(5_500, through="u-2")
    assert tape.budget.used() == 5_500
    assert tape.usage(9_000, through="u-1").ignored == "older"
    assert tape.budget.used() == 5_500


def test_a_message_of_another_channel_may_be_named_too() -> None:
    tape = Tape()
    tape.user(words(1_000), channel="authority", id_="front-end-1")
    assert tape.usage(5_000, through="front-end-1").sampled


def test_sums_and_zero_and_nonsense_move_nothing_and_are_counted() -> None:
    tape = Tape(window=300_000)
    for _ in range(12):
        tape.said()
        tape.usage(76_700)
    level = tape.budget.used()
    assert tape.usage(920_400, scope="aggregate").ignored == "aggregate"
    assert tape.usage(920_400).ignored == "nonsense"
    assert tape.usage(0).ignored == "zero"
    assert tape.usage(90_000, late=True).ignored == "late"
    assert tape.usage(1_200_000, current=False).ignored == "foreign_session"
    assert tape.budget.used() == level
    assert tape.budget.ignored == {"aggregate": 1, "nonsense": 1, "zero": 1, "late": 1, "foreign_session": 1}


def test_what_another_session_says_takes_no_room() -> None:
    tape = Tape()
    before = tape.budget.used()
    tape.user(words(5_000), current=False)
    assert tape.budget.used() == before
    tape.user(words(5_000), late=True)
    assert tape.budget.used() == before + 5_000


def test_a_small_model_asked_on_the_side_does_not_count_but_a_lasting_change_does() -> None:
    tape = Tape()
    tape.usage(50_000, model="m-20260101")
    assert tape.usage(900, model="tiny").ignored == "other_model"
    assert tape.usage(900, model="tiny").ignored == "other_model"
    assert tape.budget.used() == 50_000
    assert tape.usage(51_000, model="m").sampled
    tape.usage(900, model="tiny")
    tape.usage(900, model="tiny")
    assert tape.usage(900, model="tiny").sampled


def test_a_run_whose_reports_name_unknown_events_does_not_go_blind() -> None:
    tape = Tape()
    tape.said()
    tape.usage(10_000)
    assert [tape.usage(11_000, through="nowhere").sampled for _ in range(3)] == [False, False, True]


def test_model_change_sets_the_level_anew() -> None:
    tape = Tape(window=100_000)
    tape.usage(60_000)
    assert tape.budget.level == "checkpoint"
    seen = tape.add("model.changed", model={"name": "small", "context_window": 50_000})
    assert (seen.level_before, seen.level_after) == ("checkpoint", "overflow")
    assert tape.budget.by_model
    seen = tape.add("model.changed", model={"name": "large", "context_window": 1_000_000})
    assert seen.level_after == "ok"
    assert not tape.budget.by_model
    late = tape.add("model.changed", late=True, model={"name": "small", "context_window": 50_000})
    assert late.level_after == "ok"


# --- take-up ---------------------------------------------------------------------------------------------


def test_the_figure_drops_when_the_packet_is_taken_up_not_before() -> None:
    tape = Tape()
    tape.usage(80_000)
    expect(tape.budget, packet_tokens=3_000, tail_tokens=9_000)
    assert tape.budget.used() == 80_000
    tape.user(words(500))
    seen = tape.add("run.resumed", packet_id="p-1", session="s1")
    assert seen.took_up
    assert seen.used == 12_500
    assert seen.level_after == "ok"


def test_resuming_without_a_packet_drops_nothing() -> None:
    tape = Tape()
    tape.usage(80_000)
    expect(tape.budget, packet_tokens=3_000, tail_tokens=9_000)
    assert not tape.add("run.resumed", session="s2").took_up
    assert tape.budget.used() == 80_000


def test_context_replaced_says_its_own_figure_or_what_was_kept() -> None:
    tape = Tape()
    tape.usage(80_000)
    assert tape.add("context.replaced", by="framework", context_tokens=20_000).used == 20_000
    tape = Tape()
    tape.usage(80_000)
    tape.user(words(1_000), id_="kept")
    seen = tape.add("context.replaced", by="framework", kept_from="kept")
    assert seen.used <= SETTINGS.packet_tokens + 1_000


def test_a_sample_a_fifth_lower_is_a_take_up() -> None:
    tape = Tape()
    tape.said()
    tape.usage(80_000)
    tape.said()
    assert not tape.usage(64_100).took_up
    tape.said()
    assert tape.usage(51_000).took_up
    assert tape.budget.used() == pytest.approx(51_000, abs=10)


def test_a_first_sample_far_below_the_estimate_is_no_take_up() -> None:
    tape = Tape()
    tape.user(words(50_000))
    seen = tape.usage(20_000)
    assert seen.sampled
    assert not seen.took_up


def test_samples_from_before_the_take_up_do_not_count() -> None:
    tape = Tape()
    tape.user(id_="u-1")
    tape.said()
    tape.usage(80_000, through="u-1")
    expect(tape.budget, packet_tokens=3_000, tail_tokens=5_000)
    tape.add("run.resumed", packet_id="p-1", session="s1")
    assert tape.usage(81_000, through="u-1").ignored == "before_take_up"
    # A report without ``through`` of about the old size was for the request before.
    tape.add("context.replaced", by="agent", packet_id="p-1")
    assert tape.usage(80_500, through="e-3").ignored == "before_take_up"
    assert tape.budget.used() < 10_000
    tape.said()
    seen = tape.usage(8_200)
    assert seen.sampled
    assert tape.budget.used() == pytest.approx(8_200, abs=10)


def test_the_first_request_after_a_take_up_may_name_the_last_event_before_it() -> None:
    tape = Tape()
    tape.said()
    tape.usage(80_000)
    tape.user(words(100), id_="last")
    expect(tape.budget, packet_tokens=3_000, tail_tokens=5_000)
    tape.add("run.resumed", packet_id="p-1", session="s1")
    assert tape.usage(9_000, through="last").sampled
    assert tape.budget.used() == 9_000


def test_took_up_can_be_told() -> None:
    tape = Tape()
    tape.usage(80_000)
    took_up(tape.budget, packet_tokens=2_000, tail_tokens=3_000, settings=SETTINGS)
    assert tape.budget.used() == 5_000
    assert tape.budget.level == "ok"


# --- what is learnt --------------------------------------------------------------------------------------


def test_fixed_cost_needs_two_reports_that_agree() -> None:
    tape = Tape()
    tape.user(words(1_000))
    tape.usage(13_000)
    assert tape.budget.fixed == 0
    tape.said(words(500))
    tape.user()
    tape.said()
    tape.usage(13_500)
    assert tape.budget.fixed == pytest.approx(12_000, abs=10)


def test_one_odd_low_report_does_not_become_the_fixed_cost() -> None:
    tape = Tape()
    for tokens in (13_000, 13_000, 10_900, 13_000):
        tape.said()
        tape.usage(tokens)
    assert tape.budget.fixed == pytest.approx(13_000, abs=20)


def test_factors_follow_the_reports_and_forgive_an_odd_one() -> None:
    tape = Tape(window=1_000_000)
    reported = 10_000
    for _ in range(5):
        tape.call(f"c-{tape.count}", command="x")
        tape.result(f"c-{tape.count - 1}", words(2_000), id_=f"r-{tape.count}")
        tape.usage(reported, through=tape.items[-1].event.id)
        reported += 3_000
    learnt = tape.budget.factor("data")
    assert learnt == pytest.approx(1.5, abs=0.02)
    assert tape.budget.factor("prose") == 1.0
    tape.result("x", words(2_000), id_="odd")
    tape.usage(reported + 9_000, through="odd")
    assert tape.budget.factor("data") == pytest.approx(learnt, abs=0.02)
    before = tape.budget.used()
    tape.result("y", words(1_000))
    assert tape.budget.used() == pytest.approx(before + 1_500, abs=30)


def test_the_error_of_the_estimate_is_told() -> None:
    tape = Tape()
    tape.user(words(10), id_="a")
    assert tape.usage(10_000, through="a").sample_error is None
    tape.user(words(2_000), id_="b")
    assert tape.usage(11_000, through="b").sample_error == pytest.approx(1_000 / 11_000)


# --- state -----------------------------------------------------------------------------------------------


def test_state_survives_a_round_trip_and_a_shallow_copy_is_a_copy() -> None:
    tape = Tape()
    for _ in range(3):
        tape.turn(400)
        tape.usage(20_000 + tape.count)
    expect(tape.budget, packet_tokens=1, tail_tokens=2)
    kept = copy.copy(tape.budget)
    packed = msgspec.msgpack.encode(tape.budget)
    assert msgspec.msgpack.decode(packed, type=Budget) == tape.budget
    tape.turn(400)
    tape.usage(0)
    assert msgspec.msgpack.encode(kept) == packed


def test_memory_is_bounded_however_long_nothing_is_reported() -> None:
    tape = Tape(window=10_000_000)
    for _ in range(400):
        tape.turn(10)
    assert len(msgspec.msgpack.encode(tape.budget)) < 8_000
    assert tape.usage(50_000, through="e-2").sampled


def test_settings_are_plain_values() -> None:
    assert msgspec.json.decode(msgspec.json.encode(SETTINGS), type=BudgetSettings) == SETTINGS


@pytest.mark.parametrize(
    ("type_", "fields"),
    [
        ("message", {"role": "user", "content": "naïve words"}),
        ("message", {"role": "user", "content": [{"kind": "image", "media_type": "image/png"}]}),
        ("tool.called", {"call_id": "c", "tool": "bash", "arguments": {"command": "make"}}),
        ("tool.returned", {"call_id": "c", "status": "ok", "content": "fine"}),
        ("step.changed", {"phase": "p"}),
    ],
)
def test_what_an_event_adds_is_its_estimate(type_: str, fields: dict[str, Any]) -> None:
    told, total = event(type_, **fields), Estimate(1_000, 2_000, 3_000, 4_000)
    assert added(total, told) == total + estimate(told)
    full = Estimate(MOST_TOKENS, MOST_TOKENS, MOST_TOKENS, MOST_TOKENS)
    assert added(full, told) == full


def test_a_copy_of_a_budget_stays_as_it_is() -> None:
    tape = Tape()
    tape.turn(50)
    taken, packed = copy.copy(tape.budget), msgspec.msgpack.encode(tape.budget)
    tape.turn(50)
    tape.usage(9_000)
    assert msgspec.msgpack.encode(taken) == packed
    assert msgspec.msgpack.decode(packed, type=Budget) == taken


def test_the_newest_marks_are_kept_and_it_is_known_that_others_are_not() -> None:
    tape = Tape(window=10_000_000)
    for _ in range(MARKS - 1):
        tape.said("x")
    assert (len(tape.budget.marks), tape.budget.marks_lost) == (MARKS, False)
    tape.said("x")
    assert (len(tape.budget.marks), tape.budget.marks_lost) == (MARKS, True)
    assert tape.budget.marks[-1].event_id == f"e-{tape.count}"
