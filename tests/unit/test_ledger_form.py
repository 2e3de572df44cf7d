"""A ledger's form made item by item is that of the whole."""

from __future__ import annotations

from protocol.codec import digest, encode
from sidecar.core.ledger_form import ledger_digest, ledger_json
from sidecar.core.state import Head, Ledger, ledger_value
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
