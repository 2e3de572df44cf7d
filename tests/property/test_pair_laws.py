"""Pairs: what has two halves is whole wherever history was cut between them.

A call and its results, an assistant message and its calls are never parted (``test_boundary_pairs``). An approval,
a question, an operation or a correction whose halves lie on both sides of a cut stands in the packet as the
ledger has it, and a summary made of the first half is accepted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given

from protocol.codec import decode_event, encode
from protocol.events import Settings
from protocol.handoff import Tail
from sidecar.core.boundary import TailItem, stable_positions
from sidecar.core.digest import digest
from sidecar.core.material import event_text, exchange_items
from sidecar.core.packet import build_packet
from sidecar.core.planning import open_calls
from sidecar.core.state import Lane, Ledger
from sidecar.core.tokens import estimate
from sidecar.core.validation import decode_summary
from sidecar.transport.pump import Delivery
from support.digests import judged, request
from support.laws import law
from support.packets import checkpoint, inputs
from support.story import AT, D1
from support.tellings import MODEL, Deal, words
from support.truth import Truth
from support.voyages import prove_shown

Json = dict[str, Any]
_MOST_CUTS = 3


class _Told:
    """One run's stream: its messages as the tail has them, and what each pair has come to."""

    def __init__(self) -> None:
        self.truth = Truth(Lane(settings=Settings(approval_kinds=("deploy",))))
        self.items: list[TailItem] = []
        self.ledgers: list[Ledger] = []
        """After each message."""
        self.approvals: dict[str, str] = {}
        self.questions: set[str] = set()
        self.operations: dict[str, str] = {}
        self.withdrawn: set[str] = set()
        """Texts of the user that were corrected."""
        self.halves: list[tuple[int, int]] = []
        """Positions of a call and its result."""

    def tell(self, type_: str, *, channel: Any = "event", **fields: Any) -> str:
        number = len(self.items) + 1
        body: Json = {"v": 1, "id": f"e-{number}", "type": type_, "at": AT, **fields}
        payload = json.dumps(body).encode()
        self.truth.take([Delivery(f"wk.v1.in.t.main.r.{channel}", payload, number, 0, None, 0.0)])
        assert len(self.truth.order) == number
        event = decode_event(payload, run="r", channel=channel)
        self.items.append(
            TailItem(position=number, channel=channel, event=event, tokens=estimate(event).tokens)
        )
        self.ledgers.append(self.truth.runs["r"].snapshot())
        return f"e-{number}"

    def resolve(self, ref: str) -> str | None:
        kind, _, name = ref.partition(":")
        number = name.removeprefix("e-") if kind in ("event", "pos") else ""
        if not number.isdigit() or not 0 < int(number) <= len(self.items):
            return None
        event = self.items[int(number) - 1].event
        return event_text(event) or event.id


# --- first halves, each with what its second one would be ----------------------------------------------

Half = Callable[[], None]


def _approval(told: _Told, deal: Deal, name: str) -> Half:
    fields = {"approval_id": f"ap-{name}", "action": "deploy", "payload_digest": D1}
    told.tell("approval.requested", **fields)
    told.approvals[f"ap-{name}"] = "pending"
    outcome = deal.pick(("granted", "denied"))

    def resolved() -> None:
        told.tell("approval.resolved", channel="authority", outcome=outcome, by="ann", **fields)
        told.approvals[f"ap-{name}"] = outcome

    return resolved


def _question(told: _Told, deal: Deal, name: str) -> Half:
    told.tell("question.opened", question_id=f"q-{name}", text=f"Which one of {name}?")
    told.questions.add(f"q-{name}")

    def answered() -> None:
        told.tell("question.answered", question_id=f"q-{name}", answer="the first")
        told.questions.discard(f"q-{name}")

    return answered


def _operation(told: _Told, deal: Deal, name: str) -> Half:
    operation = f"op-{name}"
    told.tell("operation.declared", operation_id=operation, kind="mail", idempotency_key=name)
    told.operations[operation] = "not_started"
    if deal.pick((False, True)):
        told.tell("operation.dispatched", operation_id=operation)
        told.operations[operation] = "pending"
    state = deal.pick(("succeeded", "unknown"))

    def settled() -> None:
        told.tell("operation.settled", operation_id=operation, state=state)
        told.operations[operation] = state

    return settled


def _correction(told: _Told, deal: Deal, name: str) -> Half:
    wrong, right = f"never touch {name}-a", f"never touch {name}-b"
    first = told.tell("message", role="user", content=wrong)

    def corrected() -> None:
        told.tell("message", role="user", content=right, supersedes=first)
        told.withdrawn.add(wrong)

    return corrected


def _call(told: _Told, deal: Deal, name: str) -> Half:
    told.tell("message", role="assistant", content=f"I look at {name}.")
    told.tell("tool.called", call_id=name, tool="bash", arguments={})
    at = len(told.items)

    def returned() -> None:
        told.tell("tool.returned", call_id=name, status="ok", content=f"{name} is as it was.")
        told.halves.append((at, len(told.items)))

    return returned


_FIRST = (_call, _approval, _question, _operation, _correction)
_LATER = (0, 1, 1, 2, 3, 5, 99)
"""After how many other halves the second one comes; the last is never."""


def _tell(drawn: list[int]) -> _Told:
    told = _Told()
    told.tell("run.started", goal="mend the pump", model=MODEL)
    due: list[tuple[int, Half]] = []
    for number, word in enumerate(drawn):
        deal = Deal(word)
        second = deal.pick(_FIRST)(told, deal, f"n{number}")
        due.append((number + deal.pick(_LATER), second))
        for half in [half for at, half in due if at <= number]:
            half()
        due = [(at, half) for at, half in due if at > number]
        if deal.pick((True, False)):
            told.tell("message", role="assistant", content=f"That was {number}.")
    return told


@law()
@given(words(2, 12))
def test_halves_on_both_sides_of_a_cut_stand_as_the_ledger_has_them(drawn: list[int]) -> None:
    told = _tell(drawn)
    ledger = told.truth.runs["r"]
    cuts = stable_positions(told.items, None, open_calls(ledger))
    deal = Deal(drawn[-1])
    for through in {deal.pick(cuts) for _ in range(_MOST_CUTS)} if cuts else ():
        assert all((call <= through) == (result <= through) for call, result in told.halves)
        handoff = through + deal.below(len(told.items) - through + 1)
        _prove(told, through, told.ledgers[handoff - 1])


def _prove(told: _Told, through: int, then: Ledger) -> None:
    """A summary of what is covered, made when the ledger was ``then``, and the packet of now on top of it."""
    asked = request(exchange_items(told.items[:through]), then)
    summary = digest(asked)
    verdict = judged(decode_summary(encode(summary)), asked, told.resolve, then)
    assert (verdict.accepted, verdict.violations, verdict.removed) == (True, (), 0)
    stored = msgspec.structs.replace(checkpoint(through), summary=verdict.summary)
    ledger = told.truth.runs["r"]
    tail = Tail(
        from_position=through + 1,
        through_position=ledger.head.position,
        through_event_id=ledger.head.last_event_id,
        events=ledger.head.position - through,
        tokens=100,
    )
    built = build_packet(inputs(ledger, checkpoint=stored, tail=tail))
    assert built.choice is None
    packet: Json = json.loads(encode(built.packet))
    prove_shown(packet, told.truth.protected("r"))
    assert packet["protected_digest"] == told.truth.protected_digest("r")
    assert packet["checkpoint"]["covers_through"]["position"] == through
    live = {name: state for name, state in told.approvals.items() if state in ("pending", "granted")}
    assert {item["id"]: item["state"] for item in packet["approvals"]} == live
    assert {item["id"] for item in packet["questions"]} == told.questions
    assert {item["id"]: item["state"] for item in packet["operations"]} == told.operations
    asked_for = [item["text"] for item in packet["task"]["current_request"]]
    kept = [item.get("text") for item in packet["task"]["user_messages"]]
    assert told.withdrawn.isdisjoint([*asked_for, *kept])
