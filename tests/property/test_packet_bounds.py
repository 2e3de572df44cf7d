"""A packet fits its bound or says why not, and what is protected is in it either way."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import encode
from protocol.events import Settings
from sidecar.core.fitting import MAX_WIRE_BYTES, MIN_TEXT_TOKENS
from sidecar.core.packet import BudgetFigures, build_packet
from sidecar.core.protected import protected_digest, protected_view
from sidecar.core.room import FRAME_BYTES, fit_of, text_bytes
from sidecar.core.state import (
    Approval,
    ConstraintItem,
    Decision,
    Evidence,
    Lane,
    Ledger,
    Operation,
    Question,
    Request,
    UserMessage,
)
from tests.support.packets import checkpoint, inputs, lines_about, says, started, windowed

lengths = st.sampled_from([0, 3, 40, 300, 2_000])
letters = st.sampled_from(["a", "é", "漢", "\u202e", '"', "\n"])
texts = st.builds(lambda letter, length: letter * length, letters, lengths)


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    ledger = started()

    def fill(kind: str, most: int, make: Any) -> None:
        for number in range(draw(st.integers(0, most))):
            ledger.put(kind, make(number, draw(texts)))

    fill(
        "constraint",
        12,
        lambda n, text: ConstraintItem(id=f"c-{n}", text=text, source="user", told_by="agent"),
    )
    fill("request", 3, lambda n, text: Request(id=f"e-{n}", text=text, position=n))
    fill("user", 6, lambda n, text: UserMessage(id=f"e-{n}", text=text, position=n, rank=1 + n % 3))
    fill("question", 6, lambda n, text: Question(id=f"q-{n}", text=text))
    states = ("not_started", "pending", "unknown", "succeeded", "failed")
    fill(
        "operation",
        12,
        lambda n, text: Operation(
            id=f"op-{n}", kind="k", idempotency_key=f"k{n}", target=text, state=states[n % 5], position=n
        ),
    )
    fill("approval", 6, lambda n, text: Approval(id=f"ap-{n}", action="k", scope=text))
    fill("decision", 12, lambda n, text: Decision(id=f"d-{n}", summary=text, refs=(f"evidence:ev-{n}",)))
    fill(
        "evidence",
        12,
        lambda n, text: Evidence(id=f"ev-{n}", claim=text, kind="observed", source="event:e-1", position=n),
    )
    return ledger


@given(
    ledgers(),
    st.integers(400, 6_000),
    st.integers(0, 60_000),
    st.sampled_from([6_000, 60_000, 950_000]),
    st.integers(0, 30),
)
def test_it_fits_or_the_choice_is_announced(
    ledger: Ledger, packet_tokens: int, usable: int, wire_bytes: int, count: int
) -> None:
    built = build_packet(
        inputs(
            windowed(ledger, usable),
            checkpoint=checkpoint(1, observations=tuple(says("o" * 90, "event:e-1") for _ in range(count))),
            recent=lines_about(count, "r" * 90),
            packet_tokens=packet_tokens,
            budget=BudgetFigures(usable * 2, usable, 0, 0, "ok"),
            wire_bytes=wire_bytes,
            missing_artifacts=tuple(f"gone-{number}" for number in range(count)),
        )
    )
    packet = built.packet
    size = len(encode(packet))
    assert size <= wire_bytes
    assert built.tokens * 4 >= size - len(encode(packet.cleared)) - 80
    assert built.text_tokens == -(-len(packet.text.encode()) // 4)
    assert packet.budget.packet_tokens == built.tokens
    match built.choice:
        case None:
            assert size <= packet_tokens * 4
            assert usable == 0 or built.text_tokens <= max(usable // 4, MIN_TEXT_TOKENS)
        case "reduced":
            # A small text may take more than a quarter of a tiny window.
            assert len(packet.text.encode()) <= max(usable // 4 * 4, 4 * MIN_TEXT_TOKENS + FRAME_BYTES)
        case "postpone":
            assert built.text_tokens * 2 <= usable
        case "pause":
            assert packet.verdict == "pause"
    lane, runs = Lane(settings=Settings()), {"r1": ledger}
    fits = fit_of(lane, runs, "r1")
    if fits == "fits":
        assert built.choice in (None, "reduced") or wire_bytes < MAX_WIRE_BYTES
    else:
        assert built.choice == fits or wire_bytes < MAX_WIRE_BYTES
        assert len(packet.text.encode()) <= text_bytes(lane, runs, "r1") + FRAME_BYTES
    view = protected_view({"r1": ledger}, "r1")
    assert packet.protected_digest == protected_digest(view)
    if built.choice == "pause":
        return
    unsettled = [item for item in packet.operations if item.state not in ("succeeded", "failed")]
    assert [item.id for item in packet.task.constraints] == [
        item["id"] for item in view["task"]["constraints"]
    ]
    assert [item.event_id for item in packet.task.current_request] == [
        item["event_id"] for item in view["task"]["current_request"]
    ]
    assert [item.id for item in packet.questions] == [item["id"] for item in view["questions"]]
    assert [item.id for item in unsettled] == [item["id"] for item in view["operations"]]
    assert [item.id for item in packet.approvals] == [item["id"] for item in view["approvals"]]
    assert {item["id"] for item in view["evidence"]} <= {item.id for item in packet.evidence}
    if built.choice is None:
        assert [item.text for item in packet.task.constraints] == [
            item["text"] for item in view["task"]["constraints"]
        ]
        everything = {
            "operations": len(packet.operations) + _left(packet, "settled"),
            "recent": len(packet.recent) + _left(packet, "recent"),
            "observations": len(packet.summary.observations) + _left(packet, "observations"),
            "decisions": len(packet.decisions) + _left(packet, "decisions"),
            "evidence": len(packet.evidence) + _left(packet, "evidence"),
        }
        assert everything == {
            "operations": len(ledger.items["operation"]),
            "recent": count,
            "observations": count,
            "decisions": len(ledger.items["decision"]),
            "evidence": len(ledger.items["evidence"]),
        }


def _left(packet: Any, name: str) -> int:
    return sum(item.count for item in packet.omitted if item.how.startswith(name))
