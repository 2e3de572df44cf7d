"""Making a packet fit: the order of what is left out, shortened texts, and the choices that are announced."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from protocol.codec import encode
from protocol.events import NextAction, Scope
from sidecar.core.fitting import MAX_WIRE_BYTES, MIN_TEXT_TOKENS, shorten
from sidecar.core.packet import CLEARED_SHOWN, BudgetFigures, Built, PacketInputs, build_packet
from sidecar.core.protected import protected_digest, protected_view
from sidecar.core.state import (
    CompletedStep,
    ConstraintItem,
    Decision,
    Evidence,
    Ledger,
    Operation,
    PlanStep,
    Progress,
    Question,
    Task,
)
from tests.support.packets import busy, checkpoint, cleared, inputs, lines_about, says, started, windowed


def _omitted(built: Built) -> dict[str, int]:
    return {item.how.split(":")[0]: item.count for item in built.packet.omitted}


def _crowded() -> Ledger:
    ledger = busy()
    for number in range(25):
        ledger.put(
            "operation",
            Operation(
                id=f"done-{number:02}",
                kind="k",
                idempotency_key=f"d{number}",
                state="succeeded",
                position=100 + number,
            ),
        )
        ledger.put(
            "decision",
            Decision(id=f"d-{number + 10}", summary="s" * 60, rejected=(("a", "b"),), position=number),
        )
        ledger.put(
            "evidence",
            Evidence(
                id=f"ev-{number + 10}", claim="c" * 60, kind="observed", source="event:e-1", position=number
            ),
        )
    return ledger


def _protected_ids(built: Built) -> dict[str, list[str]]:
    packet = built.packet
    return {
        "constraints": [item.id for item in packet.task.constraints],
        "requests": [item.event_id for item in packet.task.current_request],
        "questions": [item.id for item in packet.questions],
        "operations": [
            item.id for item in packet.operations if item.state in ("not_started", "pending", "unknown")
        ],
        "approvals": [item.id for item in packet.approvals],
        "plan": [item.id for item in packet.progress.plan if item.state in ("todo", "doing")],
    }


def _crowded_inputs(**given: Any) -> PacketInputs:
    observations = tuple(says(f"seen {number} {'o' * 60}", "event:e-5") for number in range(30))
    return inputs(
        _crowded(),
        checkpoint=checkpoint(observations=observations, narrative="n" * 400),
        recent=lines_about(30, "recent " + "r" * 60),
        **given,
    )


def test_what_is_not_protected_goes_first_in_order_and_is_counted() -> None:
    full = build_packet(_crowded_inputs(packet_tokens=50_000))
    assert full.choice is None
    assert full.packet.omitted == ()
    kinds = ("recent", "narrative of the summary", "observations of the summary", "rejected alternatives")
    seen: list[set[str]] = []
    for bound in range(full.tokens - 100, 2_000, -400):
        built = build_packet(_crowded_inputs(packet_tokens=bound))
        assert built.choice is None
        assert built.tokens <= bound
        assert built.tokens == built.packet.budget.packet_tokens
        assert len(encode(built.packet)) <= bound * 4
        assert _protected_ids(built) == _protected_ids(full)
        assert built.packet.protected_digest == full.packet.protected_digest
        seen.append({name.removesuffix(" items") for name in _omitted(built)})
    assert seen[0] == {"recent"}
    assert set(kinds) <= seen[-1]
    assert all(earlier <= later for earlier, later in pairwise(seen))
    assert "evidence" not in seen[len(seen) // 3]


def test_recent_lines_and_observations_go_from_the_oldest() -> None:
    full = build_packet(_crowded_inputs(packet_tokens=50_000))
    built = build_packet(_crowded_inputs(packet_tokens=full.tokens - 600))
    kept = [item.ref for item in built.packet.recent]
    assert kept == [f"event:e-{number}" for number in range(30 - len(kept), 30)]
    smaller = build_packet(_crowded_inputs(packet_tokens=full.tokens - 2_600))
    seen = [item.text.split(" ")[1] for item in smaller.packet.summary.observations]
    assert 0 < len(seen) < 30
    assert seen == [str(number) for number in range(30 - len(seen), 30)]


def test_a_long_history_does_not_push_the_summary_out() -> None:
    ledger = _crowded()
    for number in range(400):
        ledger.put("decision", Decision(id=f"old-{number}", summary="s" * 200, position=-number))
        ledger.put(
            "evidence",
            Evidence(
                id=f"old-{number}", claim="c" * 200, kind="observed", source="event:e-1", position=-number
            ),
        )
    stored = checkpoint(observations=(says("seen", "event:e-5"),), narrative="fine")
    packet = build_packet(inputs(ledger, checkpoint=stored, packet_tokens=11_000)).packet
    assert packet.summary.narrative == "fine"
    assert "d-10" in [item.id for item in packet.decisions]
    assert _omitted(build_packet(inputs(ledger, packet_tokens=11_000)))["evidence"] > 300


def test_settled_operations_stay_newest_first() -> None:
    full = build_packet(_crowded_inputs(packet_tokens=50_000))
    assert full.packet.operations[2].id == "done-24"
    for bound in range(full.tokens, 2_000, -300):
        built = build_packet(_crowded_inputs(packet_tokens=bound))
        settled = [item.id for item in built.packet.operations if item.state == "succeeded"]
        assert settled == [item.id for item in full.packet.operations[2:]][: len(settled)]
        for item in built.packet.omitted:
            if item.cls == "settled":
                assert item.count == 26 - len(settled)


def _heavy(constraints: int = 3, size: int = 3_000) -> Ledger:
    ledger = busy()
    for number in range(constraints):
        ledger.put(
            "constraint",
            ConstraintItem(
                id=f"big-{number:03}", text=f"never {'w' * size}", source="user", told_by="authority"
            ),
        )
    ledger.put("question", Question(id="q-big", text="why " + "q" * size))
    return ledger


def _budget(usable: int) -> BudgetFigures:
    return BudgetFigures(usable * 2, usable, 0, 0, "ok")


def _in_a_window(ledger: Ledger, usable: int, **given: Any) -> Built:
    """The packet in a window that leaves so many usable tokens."""
    return build_packet(inputs(windowed(ledger, usable), budget=_budget(usable), **given))


def test_reduced_gives_long_texts_by_reference_and_binding_ones_last() -> None:
    ledger = _heavy()
    built = _in_a_window(ledger, 14_000, packet_tokens=3_000)
    assert built.choice == "reduced"
    assert built.text_tokens * 4 <= 14_000
    assert [item.text for item in built.packet.task.constraints if item.id == "big-000"] == [
        f"never {'w' * 3_000}"
    ]
    (question,) = [item for item in built.packet.questions if item.id == "q-big"]
    assert question.text.endswith("… [3004 bytes, ref question:q-big]")
    assert built.packet.protected_digest == protected_digest(protected_view({"r1": ledger}, "r1"))
    assert built.packet.verdict == "reconcile"


def test_when_that_is_not_enough_constraints_are_shortened_too() -> None:
    built = _in_a_window(_heavy(10), 10_000, packet_tokens=3_000)
    assert built.choice == "reduced"
    assert built.text_tokens * 4 <= 10_000
    (text,) = [item.text for item in built.packet.task.constraints if item.id == "big-009"]
    assert text.startswith("never www")
    assert text.endswith("bytes, ref constraint:big-009]")


def test_postpone_and_pause_are_announced_and_nothing_protected_is_dropped() -> None:
    ledger = _heavy(200, 2_000)
    full = _in_a_window(ledger, 10**8, packet_tokens=10**6)
    choices = []
    for usable in (200_000, 60_000, 45_000, 30_000, 20_000, 4_000):
        built = _in_a_window(ledger, usable, packet_tokens=3_000)
        choices.append(built.choice)
        assert _protected_ids(built) == _protected_ids(full)
        codes = [item.code for item in built.packet.blockers]
        assert ("postponed" in codes) == (built.choice == "postpone")
        assert ("protected_too_large" in codes) == (built.choice == "pause")
        assert (built.packet.verdict == "pause") == (built.choice == "pause")
        if built.choice == "pause":
            assert {item.may for item in built.packet.operations} == {"none"}
    order = ["reduced", "postpone", "pause"]
    assert set(choices) == set(order)
    assert choices == sorted(choices, key=lambda choice: order.index(choice or ""))


def test_nothing_exceeds_the_wire_even_when_all_of_it_is_protected() -> None:
    ledger = started()
    for number in range(12_000):
        ledger.put("operation", Operation(id=f"op-{number:05}", kind="k", idempotency_key=f"key-{number}"))
    built = _in_a_window(ledger, 10**8)
    assert built.choice == "pause"
    assert len(encode(built.packet)) <= MAX_WIRE_BYTES
    assert sum(item.count for item in built.packet.omitted) + len(built.packet.operations) == 12_000


def test_not_even_a_list_within_the_scope_exceeds_the_wire() -> None:
    ledger = started()
    tools = tuple(f"tool-{number}" for number in range(100_000))
    ledger.put("task", Task(goal="g", scope=Scope(tools=tools)))
    built = _in_a_window(ledger, 10**8)
    assert built.choice == "pause"
    assert len(encode(built.packet)) <= MAX_WIRE_BYTES
    assert built.packet.task.scope is not None
    assert set(built.packet.task.scope.tools or ()) < set(tools)


def test_refs_stay_whole_where_texts_are_cut() -> None:
    ledger = _heavy(60, 2_000)
    ref = "event:" + "e" * 128
    ledger.put("progress", Progress(completed=(CompletedStep(text="s" * 400, refs=(ref,)),)))
    built = _in_a_window(ledger, 60_000, packet_tokens=3_000)
    assert built.choice is not None
    (step,) = built.packet.progress.completed
    assert len(step.text) < 400
    assert step.refs == (ref,)


def test_finished_steps_are_kept_to_the_newest_only_for_want_of_room() -> None:
    ledger = started()
    ledger.put(
        "progress",
        Progress(
            completed=tuple(CompletedStep(text=f"step {n} {'s' * 80}") for n in range(100)),
            plan=tuple(
                PlanStep(id=f"t-{n}", text="t" * 80, state="done" if n < 60 else "todo") for n in range(70)
            ),
            next_action=NextAction(verb="finish"),
        ),
    )
    full = build_packet(inputs(ledger, packet_tokens=20_000)).packet
    assert (len(full.progress.completed), len(full.progress.plan)) == (100, 70)
    tight = build_packet(inputs(ledger, packet_tokens=5_500))
    assert tight.choice is None
    assert tight.packet.progress.completed[-20:] == full.progress.completed[-20:]
    assert [item.id for item in tight.packet.progress.plan if item.state == "todo"] == [
        f"t-{n}" for n in range(60, 70)
    ]
    assert tight.packet.protected_digest == full.protected_digest


def test_cleared_results_do_not_push_the_ledger_out() -> None:
    built = build_packet(inputs(busy(), cleared=cleared(500), packet_tokens=3_000))
    assert built.choice is None
    assert len(built.packet.cleared) == 500


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("short", 4, "short"),
        ("x" * 100, 20, "x" * 20 + "… [100 bytes, ref event:e]"),
        ("é" * 100, 20, "é" * 20 + "… [200 bytes, ref event:e]"),
        ("👩" * 100, 20, "👩" * 20 + "… [400 bytes, ref event:e]"),
        ("a\u0301" * 100, 3, "a\u0301… [300 bytes, ref event:e]"),
    ],
)
def test_cuts_fall_between_characters(text: str, limit: int, expected: str) -> None:
    assert shorten(text, limit, "event:e") == expected


def test_only_the_newest_cleared_results_are_listed() -> None:
    built = build_packet(inputs(busy(), cleared=cleared(CLEARED_SHOWN + 5)))
    assert built.packet.cleared[0].call_id == "c-5"
    assert _omitted(built) == {"older cleared results": 5}


def test_a_small_text_is_not_too_large_for_any_window() -> None:
    built = _in_a_window(busy(), 500)
    assert built.choice is None
    assert built.text_tokens <= MIN_TEXT_TOKENS
