"""Where history may be cut, and what is cleared before."""

from __future__ import annotations

import pytest

from sidecar.core.boundary import Cut, Exchange, NoCut, choose_cut, exchanges, recent_from, stable_positions
from sidecar.core.trimming import Trimming, trim_plan
from support.tape import Tape, words


def spans(tape: Tape, **fields: list[str]) -> list[tuple[int, int]]:
    return [(found.start, found.end) for found in exchanges(tape.items, **fields)]


def cut(tape: Tape, keep: int = 1_000, **fields: object) -> Cut:
    found = choose_cut(tape.items, keep_recent=keep, **fields)  # type: ignore[arg-type]
    assert isinstance(found, Cut)
    return found


def test_an_exchange_is_an_assistant_message_with_its_calls_and_results() -> None:
    tape = Tape()
    tape.user()
    tape.said()
    tape.call("a")
    tape.call("b")
    tape.result("b")
    tape.result("a")
    tape.user()
    assert spans(tape) == [(1, 1), (2, 2), (3, 7), (8, 8)]


def test_parallel_calls_hold_a_message_that_came_between_them() -> None:
    tape = Tape()
    tape.said()
    for name in ("a", "b", "c"):
        tape.call(name)
    tape.result("b")
    tape.user()
    tape.result("a")
    tape.result("c")
    assert spans(tape) == [(1, 1), (2, 9)]


def test_interleaving_exchanges_are_one() -> None:
    tape = Tape()
    tape.said()
    tape.call("a")
    tape.said()
    tape.call("b")
    tape.result("b")
    assert spans(tape) == [(1, 1), (2, 6)]
    tape.result("a")
    assert spans(tape) == [(1, 1), (2, 7)]
    assert stable_positions(tape.items, None) == [1, 7]


def test_a_call_belongs_to_the_message_it_names() -> None:
    tape = Tape()
    tape.said(message_id="m-1")
    tape.said(message_id="m-2")
    tape.add("tool.called", call_id="a", tool="t", arguments={}, message_id="m-1")
    tape.result("a")
    assert spans(tape) == [(1, 1), (2, 5)]


def test_bookkeeping_between_message_and_call_makes_the_calls_an_exchange_of_their_own() -> None:
    tape = Tape()
    tape.said()
    tape.add("step.changed", phase="x")
    tape.call("a")
    tape.call("b")
    tape.result("a")
    tape.result("b")
    tape.call("c")
    tape.result("c")
    assert spans(tape) == [(1, 1), (2, 2), (3, 3), (4, 7), (8, 9)]


def test_usage_does_not_part_a_message_from_its_calls() -> None:
    tape = Tape()
    tape.said()
    tape.usage(100)
    tape.call("a")
    tape.result("a")
    assert spans(tape) == [(1, 1), (2, 5)]


def test_an_interim_result_leaves_the_call_open() -> None:
    tape = Tape()
    tape.said()
    tape.call("a")
    tape.result("a", status="pending")
    tape.user()
    assert exchanges(tape.items)[-1] == Exchange(
        start=2, end=5, open_calls=("e-3",), tokens=exchanges(tape.items)[-1].tokens, talk=True
    )
    assert stable_positions(tape.items, None) == [1]


def test_a_call_id_may_be_used_again_and_a_result_closes_the_newest() -> None:
    tape = Tape()
    tape.said()
    tape.call("a")
    tape.result("a")
    tape.said()
    tape.call("a")
    tape.result("a")
    assert spans(tape) == [(1, 1), (2, 4), (5, 7)]


def test_an_orphan_result_is_one_by_itself() -> None:
    tape = Tape()
    tape.result("nobody")
    assert spans(tape) == [(1, 1), (2, 2)]


def test_a_new_session_abandons_what_was_open() -> None:
    tape = Tape()
    tape.said(session="s1")
    tape.add("tool.called", call_id="a", tool="t", arguments={}, session="s1")
    tape.add("run.resumed", session="s2")
    tape.user(session="s2")
    assert spans(tape) == [(1, 1), (2, 3), (4, 4), (5, 5)]
    # The same session resumed: still open.
    tape = Tape()
    tape.said(session="s1")
    tape.add("tool.called", call_id="a", tool="t", arguments={}, session="s1")
    tape.add("run.resumed", session="s1")
    assert spans(tape) == [(1, 1), (2, 4)]


def test_the_ledger_says_which_calls_are_open() -> None:
    tape = Tape()
    tape.said()
    tape.call("a")
    tape.user()
    assert spans(tape, open_calls=["e-3"]) == [(1, 1), (2, 4)]
    assert spans(tape, open_calls=[]) == [(1, 1), (2, 3), (4, 4)]


def test_a_result_of_another_session_does_not_close_the_call() -> None:
    tape = Tape()
    tape.said(session="s2")
    tape.add("tool.called", call_id="a", tool="t", arguments={}, session="s2")
    tape.result("a", session="s1")
    tape.result("a", session="s2")
    assert spans(tape) == [(1, 1), (2, 5)]


def test_nothing_is_stable_from_an_undeclared_gap_on() -> None:
    tape = Tape()
    for _ in range(4):
        tape.user()
    assert stable_positions(tape.items, None) == [1, 2, 3, 4, 5]
    assert stable_positions(tape.items, 4) == [1, 2, 3]
    assert stable_positions(tape.items, 1) == []


# --- the cut ---------------------------------------------------------------------------------------------


def test_the_cut_leaves_the_recent_part() -> None:
    tape = Tape()
    for _ in range(10):
        tape.turn(1_000)
    found = cut(tape, keep=2_500)
    assert found.reason == "recent"
    assert 2_500 <= found.kept <= 5_000
    assert found.through in stable_positions(tape.items, None)
    assert found.event_id == f"e-{found.through}"


def test_the_last_exchange_stays_whatever_its_size() -> None:
    tape = Tape()
    tape.turn(5_000)
    tape.turn(50_000)
    found = cut(tape, keep=1_000)
    assert found.kept >= 50_000
    assert found.through == 6


def test_a_huge_exchange_before_the_last_one_does_not_hold_everything() -> None:
    tape = Tape()
    tape.turn(500)
    tape.turn(50_000)
    tape.user()
    tape.said()
    found = cut(tape, keep=2_000)
    assert found.tokens >= 50_000
    assert found.kept < 2_000


def test_a_marked_boundary_is_preferred_where_it_costs_little() -> None:
    tape = Tape()
    for index in range(20):
        tape.turn(500)
        if index == 16:
            tape.add("boundary.marked", kind="turn_ended")
            marked = tape.count
        if index == 3:
            tape.add("boundary.marked", kind="turn_ended")
    assert cut(tape, keep=600).through == marked
    assert cut(tape, keep=600).reason == "marked"
    assert cut(tape, keep=600, critical=True).through > marked
    assert cut(tape, keep=5_000).reason == "recent"


def test_the_cut_is_before_the_oldest_open_call() -> None:
    tape = Tape()
    for _ in range(5):
        tape.turn(1_000)
    tape.said()
    opened = tape.count
    tape.call("open")
    for _ in range(5):
        tape.turn(1_000)
    assert cut(tape, keep=100).through < opened
    assert cut(tape, keep=100, open_calls=[]).through > opened


def test_reasons_why_there_is_no_cut() -> None:
    tape = Tape()
    assert choose_cut([], keep_recent=10) == NoCut(reason="little_new")
    tape = Tape()
    tape.items.clear()
    tape.said()
    tape.call("a")
    tape.result("a", words(5_000))
    tape.call("b")
    assert choose_cut(tape.items, keep_recent=10) == NoCut(reason="no_boundary")
    tape = Tape()
    for _ in range(4):
        tape.turn(1_000)
    assert choose_cut(tape.items, keep_recent=10, open_gap_from=1) == NoCut(reason="open_gap")
    assert choose_cut(tape.items, keep_recent=10_000) == NoCut(reason="little_new")


def test_the_event_id_is_of_the_event_channel() -> None:
    tape = Tape()
    for _ in range(3):
        tape.turn(1_000)
    tape.user(channel="authority", id_="a-1")
    through = tape.count
    tape.said(words(2_000))
    found = cut(tape, keep=1_500)
    assert (found.through, found.event_id) == (through, f"e-{through - 1}")


# --- clearing --------------------------------------------------------------------------------------------


def trimming(tape: Tape, keep: int = 2_000, trimmed: int = 0, **fields: bool) -> Trimming:
    return trim_plan(tape.items, keep_recent=keep, result_tokens=300, trimmed_through=trimmed, **fields)


def test_old_large_results_become_references() -> None:
    tape = Tape()
    tape.said()
    tape.call("a")
    tape.result("a", "line one\nValueError: boom at 0x10\n" + words(4_000), status="error")
    tape.said()
    tape.call("b")
    tape.result("b", words(3_000), conclusion="All fine. More words.")
    tape.turn(100)
    tape.turn(1_900)
    found = trimming(tape)
    assert [(item.call_id, item.status, item.note) for item in found.cleared] == [
        ("a", "error", "ValueError: boom at 0x10"),
        ("b", "ok", "All fine."),
    ]
    assert found.cleared[0].digest.startswith("sha256:")
    assert found.saved_tokens > 6_500
    assert found.through >= 7
    again = trimming(tape, trimmed=found.through)
    assert (again.cleared, again.through, again.saved_tokens) == ((), found.through, 0)


def test_small_and_recent_results_stay() -> None:
    tape = Tape()
    tape.turn(250)
    tape.turn(1_500)
    assert trimming(tape).cleared == ()
    tape.turn(50_000)
    assert [item.position for item in trimming(tape).cleared] == [9]


def test_the_mark_never_goes_back() -> None:
    tape = Tape()
    tape.turn(5_000)
    assert trimming(tape, trimmed=40).through == 40


def test_inside_a_huge_exchange_only_when_asked() -> None:
    tape = Tape()
    tape.said()
    for index in range(10):
        tape.call(f"c{index}")
        tape.result(f"c{index}", words(3_000))
    assert trimming(tape).cleared == ()
    found = trimming(tape, keep=7_000, inside=True)
    assert len(found.cleared) == 8
    assert trimming(tape, keep=100, inside=True).through < tape.count
    assert recent_from(tape.items, 100, inside=True) == tape.count


@pytest.mark.parametrize("note", ["", "\n\n  \n"])
def test_an_error_without_text_has_an_empty_note(note: str) -> None:
    tape = Tape()
    tape.call("a")
    tape.add(
        "tool.returned",
        call_id="a",
        status="timeout",
        content=[{"kind": "text", "text": note}, {"kind": "image", "media_type": "image/png", "tokens": 900}],
    )
    tape.turn(5_000)
    assert trimming(tape).cleared[0].note == "[image image/png]"
