"""A ledger's form made item by item is that of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import inspect

from protocol.codec import digest, encode
from sidecar.core.ledger_form import TOLD_NUMBERS, ledger_digest, ledger_json, ledger_of
from sidecar.core.state import ITEM_TYPES, Head, Ledger, ledger_value
from sidecar.states import filled
from support.run_states import STATE
from support.story import Story


def _told() -> Ledger:
    story = Story()
    story.start(goal="reach the harbour — \U0001f6a2 »now«")
    for number in range(3):
        story.tell("decision.made", decision_id=f"d{number}", summary=f"route {number}")
        story.tell("question.opened", question_id=f"q{number}", text="which\nharbour?")
    story.declare("op1")
    for value, claim in ((1.5, "depth"), (2**53 - 1, "mass"), (True, "afloat"), ("\x7f", "flag")):
        story.tell(
            "evidence.recorded",
            evidence_id=claim,
            claim=claim,
            kind="observed",
            source="event:e-1",
            value=value,
        )
    return story.ledger()


def test_the_bytes_are_those_of_the_whole() -> None:
    for ledger in (_told(), Ledger(Head(run="r"))):
        assert ledger_json(ledger) == encode(ledger_value(ledger))


def test_the_digest_is_that_of_the_whole() -> None:
    for ledger in (_told(), Ledger(Head(run="r"))):
        assert ledger_digest(ledger) == digest(ledger_value(ledger))


def test_items_beyond_one_call_are_in_their_order() -> None:
    story = Story()
    story.start()
    for number in range(200):
        value: Any = (2**60 + number, 0.1 * number, number, "x")[number % 4] if number > 70 else number
        more = {"kind": "observed", "source": "event:e-1", "value": value}
        story.tell("evidence.recorded", evidence_id=f"e{number}", claim=f"\u00e9\U0001f6a2{number}", **more)
    ledger = story.ledger()
    assert ledger_digest(ledger) == digest(ledger_value(ledger))
    assert ledger_json(ledger) == encode(ledger_value(ledger))


def test_a_state_brings_numbers_back_as_they_were_told() -> None:
    """The form that is digested rounds the first and makes an integer of the second."""
    story = Story()
    story.start()
    for name, value in (("serial", 2**60 + 1), ("depth", 1.0)):
        more = {"kind": "observed", "source": "event:e-1", "claim": name, "value": value}
        story.tell("evidence.recorded", evidence_id=name, **more)
    ledger = story.ledger()
    state = filled(STATE, ledger)
    assert state is not None
    back = ledger_of(bytes(state.ledger))
    assert encode(ledger_value(back)) == encode(ledger_value(ledger))
    assert state.ledger_digest == ledger_digest(back) == digest(ledger_value(ledger))


OWN = {
    "position",
    "dispatched_at",
    "granted_at",
    "rank",
    "release",
    "approval_kinds_seq",
    "forbidden_kinds_seq",
}
"""Fields that hold numbers the fold counts itself."""


@pytest.mark.parametrize("kind", sorted(ITEM_TYPES))
def test_items_hold_nothing_that_the_quick_form_writes_otherwise(kind: str) -> None:
    top = inspect.type_info(ITEM_TYPES[kind])
    assert isinstance(top, inspect.StructType)
    for field in top.fields:
        for found in _leaves(field.type):
            assert not isinstance(found, inspect.DictType | inspect.RawType | inspect.AnyType), field.name
            if isinstance(found, inspect.IntType | inspect.FloatType):
                assert field.name in OWN or field.name in TOLD_NUMBERS[kind], field.name


def _leaves(found: inspect.Type) -> Iterator[inspect.Type]:
    match found:
        case inspect.StructType():
            for field in found.fields:
                yield from _leaves(field.type)
        case inspect.UnionType():
            for one in found.types:
                yield from _leaves(one)
        case inspect.VarTupleType() | inspect.ListType() | inspect.SetType():
            yield from _leaves(found.item_type)
        case inspect.TupleType():
            for one in found.item_types:
                yield from _leaves(one)
        case _:
            yield found
