"""Whether what is protected fits the window: what counts, what does not, and where the choices begin."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.events import NextAction, Settings
from sidecar.core import gate
from sidecar.core.fitting import MAX_WIRE_BYTES, MIN_TEXT_TOKENS
from sidecar.core.packet import BudgetFigures, build_packet
from sidecar.core.room import FRAME_BYTES, MAX_TEXT_BYTES, Fit, fit_of, text_bytes, usable_of
from sidecar.core.state import (
    Approval,
    Call,
    ConstraintItem,
    Decision,
    Evidence,
    Lane,
    Ledger,
    ModelInfo,
    Operation,
    PlanStep,
    Progress,
    Question,
    Request,
)
from sidecar.core.verdict import POSTPONED, PROTECTED_TOO_LARGE
from tests.support.packets import busy, checkpoint, cleared, inputs, lines_about, says, started, windowed

LANE = Lane(settings=Settings())


def _fit(*family: Ledger, run: str | None = None) -> Fit:
    runs = {ledger.head.run: ledger for ledger in family}
    return fit_of(LANE, runs, run or family[0].head.run)


def _asking(questions: int, usable: int = 20_000) -> Ledger:
    ledger = windowed(started(), usable)
    ledger.put("operation", Operation(id="side", kind="x", idempotency_key="s", nonessential=True))
    ledger.put("operation", Operation(id="main", kind="x", idempotency_key="m"))
    for number in range(questions):
        ledger.put("question", Question(id=f"q-{number:04}", text="t" * 60))
    return ledger


def _codes(ledger: Ledger) -> dict[str, str]:
    runs = {"r1": ledger}
    return {
        name: gate.judge(
            LANE,
            runs,
            "r1",
            ledger.items["operation"][name],
            postpone=fit_of(LANE, runs, "r1") != "fits",
        ).code
        for name in ("side", "main")
    }


def test_the_choices_follow_each_other() -> None:
    fits = [_fit(_asking(count)) for count in range(0, 900, 20)]
    order = ["fits", "postpone", "pause"]
    assert set(fits) == set(order)
    assert fits == sorted(fits, key=order.index)


@pytest.mark.parametrize(("questions", "side"), [(0, "ok"), (350, "postponed"), (800, "postponed")])
def test_only_the_nonessential_waits_for_room(questions: int, side: str) -> None:
    assert _codes(_asking(questions)) == {"side": side, "main": "ok"}


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no room": {"packet_tokens": 1},
    "checkpoint": {"checkpoint": checkpoint(30, observations=(says("o" * 900, "event:e-1"),) * 30)},
    "cleared": {"cleared": cleared(1_000)},
    "recent": {"recent": lines_about(40, "r" * 300)},
    "never saved": {"missing_artifacts": tuple(f"gone-{number}" for number in range(400))},
    "another budget": {"budget": BudgetFigures(9_000, 4_500, 4_000, 4_000, "critical")},
    "no budget": {"budget": BudgetFigures(0, 0, 0, 0, "ok")},
    "small messages": {"wire_bytes": 400_000},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("questions", [0, 100, 350, 800])
def test_what_a_packet_is_built_of_changes_nothing(questions: int, way: str) -> None:
    """However it is told, the packet waits and stops exactly where ``authorize`` does."""
    ledger = _asking(questions)
    built = build_packet(inputs(ledger, **WAYS[way]))
    fits = _fit(ledger)
    codes = {blocker.code for blocker in built.packet.blockers}
    assert (POSTPONED.code in codes) == (fits == "postpone")
    assert (PROTECTED_TOO_LARGE.code in codes) == (fits == "pause")
    assert built.choice in ({None, "reduced"} if fits == "fits" else {fits})
    may = {item.id: item.may for item in built.packet.operations}
    if fits != "pause":
        assert may == {"main": "dispatch", "side": "dispatch" if fits == "fits" else "wait"}
    assert len(built.packet.text.encode()) <= max(
        4 * (built.packet.budget.usable // 4 or 10**6), text_bytes(LANE, {"r1": ledger}, "r1") + FRAME_BYTES
    )


COUNTS: dict[str, Any] = {
    "constraint": ConstraintItem(id="z", text="never", source="user", told_by="agent"),
    "question": Question(id="z", text="why?"),
    "operation": Operation(id="z", kind="k", idempotency_key="z"),
    "approval": Approval(id="z", action="k"),
    "request": Request(id="z", text="do it", position=40),
    "call": Call(id="z", call_id="z", tool="t", position=40),
    "progress": Progress(
        next_action=NextAction(verb="call"), plan=(PlanStep(id="z", text="test", state="todo"),)
    ),
}
COUNTS_NOT: dict[str, Any] = {
    "settled": ("operation", Operation(id="z", kind="k", idempotency_key="z", state="succeeded")),
    "lifted": (
        "constraint",
        ConstraintItem(id="z", text="t", source="user", told_by="agent", state="lifted"),
    ),
    "decision": ("decision", Decision(id="z", summary="s" * 500)),
    "evidence": ("evidence", Evidence(id="z", claim="c" * 500, kind="observed", source="event:e-1")),
    "abandoned": ("call", Call(id="z", call_id="z", tool="t", state="abandoned", position=40)),
}


@pytest.mark.parametrize("kind", COUNTS)
def test_what_is_protected_takes_room(kind: str) -> None:
    ledger = started()
    before = text_bytes(LANE, {"r1": ledger}, "r1")
    ledger.put(kind, COUNTS[kind])
    assert text_bytes(LANE, {"r1": ledger}, "r1") > before


@pytest.mark.parametrize("name", COUNTS_NOT)
def test_what_is_not_protected_takes_none(name: str) -> None:
    ledger = busy()
    before = text_bytes(LANE, {"r1": ledger}, "r1")
    ledger.put(*COUNTS_NOT[name])
    assert text_bytes(LANE, {"r1": ledger}, "r1") == before


def test_an_ancestors_constraints_take_room_in_the_child() -> None:
    parent, child = started("p"), windowed(started("c", parent="p", spawned=True), 20_000)
    for number in range(400):
        parent.put(
            "constraint",
            ConstraintItem(id=f"k-{number}", text="never", source="user", told_by="authority"),
        )
    assert _fit(child) == "fits"
    assert _fit(parent, child, run="c") == "postpone"


def test_long_texts_take_no_more_room_than_their_beginning() -> None:
    short, long = _asking(0), _asking(0)
    for number in range(30):
        short.put("question", Question(id=f"z-{number}", text="t" * 200))
        long.put("question", Question(id=f"z-{number}", text="t" * 200_000))
    spare = text_bytes(LANE, {"r1": long}, "r1") - text_bytes(LANE, {"r1": short}, "r1")
    assert 0 < spare <= 30 * 3


def test_the_window_is_the_declared_one() -> None:
    ledger = _asking(350)
    assert _fit(ledger) == "postpone"
    ledger.head.model = ModelInfo("m", 400_000)
    assert usable_of(ledger) == 400_000 - 8_192 - 8_000
    assert _fit(ledger) == "fits"
    ledger.head.model = None
    assert _fit(ledger) == "fits"


def test_a_little_fits_every_window() -> None:
    assert text_bytes(LANE, {"r1": busy()}, "r1") < 4 * MIN_TEXT_TOKENS
    assert _fit(windowed(busy(), 100)) == "fits"


def test_no_window_is_larger_than_a_message() -> None:
    ledger = _asking(4_500, usable=10**7)
    assert text_bytes(LANE, {"r1": ledger}, "r1") + FRAME_BYTES > MAX_TEXT_BYTES
    assert _fit(ledger) == "pause"
    assert build_packet(inputs(ledger, cleared=cleared(1_000))).choice == "pause"
    fewer = _asking(3_700, usable=10**7)
    assert _fit(fewer) == "fits"
    built = build_packet(inputs(fewer, cleared=cleared(1_000)))
    assert built.choice == "reduced"
    assert len(built.packet.questions) == 3_700
    assert len(built.packet.text.encode()) * 2 > MAX_WIRE_BYTES * 0.6


def test_very_many_are_not_even_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = _asking(0)
    for number in range(20_000):
        ledger.put("operation", Operation(id=f"op-{number}", kind="k", idempotency_key=f"k{number}"))
    monkeypatch.setattr("sidecar.core.room.protected_view", None)
    assert _fit(ledger) == "pause"
