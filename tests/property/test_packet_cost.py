"""A packet costs by what it shows, and says to the byte what it said when every item was looked at."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import encode
from protocol.events import Settings
from sidecar.core import carried
from sidecar.core.index import Index
from sidecar.core.packet import BudgetFigures, Built, PacketInputs, build_packet
from sidecar.core.room import fit_of
from sidecar.core.state import (
    Approval,
    Artifact,
    Call,
    Child,
    CompletedStep,
    ConstraintItem,
    Decision,
    Evidence,
    Lane,
    Ledger,
    Operation,
    PlanStep,
    Progress,
    Question,
    Request,
    UserMessage,
)
from support.laws import law
from tests.support.packets import PATCH, checkpoint, cleared, inputs, lines_about, says, started, windowed
from tests.support.plain_packet import plain_packet, plain_rested_on, plain_view

laws = law(5)

TEXTS = (
    "",
    "a",
    "ok",
    "x" * 40,
    "é" * 30,
    "漢字",
    '"q"\n\t',
    "\u202e" * 20,
    "y" * 300,
    "\\n" * 9,
    "z" * 2_000,
)
RARE = (*TEXTS, "w" * 9_000)
REFS = ("evidence:ev-1", "evidence:ev-3", "artifact:a1", "artifact:a2", f"sha256:{'b' * 64}", "junk",
        "artifact:a1/r9", "artifact:a3@v3")  # fmt: skip
DIGESTS = (PATCH, "b" * 64, f"sha256:{'b' * 64}")


class Dice:
    """Draws the items of a ledger: few texts and refs, so that they meet."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.at = 0

    def text(self) -> str:
        return self.r.choice(TEXTS if self.r.random() < 0.97 else RARE)

    def count(self, most: int) -> int:
        return self.r.choice((0, 1, 2, 5, most, self.r.randint(0, most)))

    def maybe(self, *choices: Any) -> Any:
        return self.r.choice((None, *choices))

    def position(self) -> int:
        self.at += 1
        return self.at

    def of(self, kind: str, n: int) -> Any:
        r, text = self.r, self.text()
        match kind:
            case "operation":
                state = r.choices(
                    ("not_started", "pending", "unknown", "succeeded", "failed"), (1, 1, 1, 40, 40)
                )
                return Operation(
                    id=f"op-{n}",
                    kind=self.maybe("k", "git.commit"),
                    idempotency_key=self.maybe(f"k{n}"),
                    target=self.maybe(text, *REFS[:3]),
                    receipt=self.maybe(text, REFS[1]),
                    payload_digest=self.maybe(PATCH),
                    state=state[0],
                    position=self.position(),
                )
            case "evidence":
                against = tuple(f"ev-{r.randint(0, 9)}" for _ in range(r.choice((0, 0, 0, 0, 0, 1, 2))))
                return Evidence(
                    id=f"ev-{n}",
                    claim=text,
                    kind="observed",
                    source="event:e-1",
                    value=self.maybe(1, True, 1.0, "x", 0),
                    contradicts=against,
                    position=self.position(),
                )
            case "decision":
                return Decision(
                    id=f"d-{n}",
                    summary=text,
                    reason=self.maybe(self.text()),
                    refs=tuple(r.choices(REFS, k=r.choice((0, 0, 0, 1, 2)))),
                    rejected=tuple((self.text(), "slow") for _ in range(r.choice((0, 0, 1, 3)))),
                    state=r.choice(("in_force", "in_force", "superseded")),
                    position=self.position(),
                )
            case "artifact":
                return Artifact(
                    id=f"a{n % 7}" if n < 7 else f"a{n % 7}@v{n}",
                    artifact_id=f"a{n % 7}",
                    uri="file:x",
                    sha256=r.choice((*DIGESTS, f"{n:064x}")),
                    description=text,
                    state=r.choice(("saved", "saved", "superseded", "withdrawn")),
                    position=self.position(),
                )
            case "child":
                return Child(id=f"c-{n}", task=text, status=r.choice(("running", "failed")))
            case "user":
                return UserMessage(id=f"e-{n}", text=text, position=self.position(), rank=r.randint(1, 3))
            case "question":
                return Question(id=f"q-{n}", text=text)
            case "approval":
                ref, state = self.maybe(*REFS[2:5]), r.choice(("pending", "granted", "denied"))
                return Approval(
                    id=f"ap-{n}", action="k", payload_ref=ref, payload_digest=self.maybe(PATCH), state=state
                )
            case "constraint":
                return ConstraintItem(id=f"c-{n}", text=text, source="user", told_by="agent")
            case "call":
                state = r.choice(("open", "abandoned"))
                return Call(id=f"e-c{n}", call_id=f"c-{n}", tool="sh", state=state, position=self.position())
            case _:
                return Request(id=f"e-r{n}", text=text, position=self.position())

    def ledger(self) -> Ledger:
        most = {"operation": 260, "evidence": 260, "decision": 230, "artifact": 230, "child": 40, "user": 12,
                "question": 9, "approval": 9, "constraint": 9, "call": 9, "request": 3}  # fmt: skip
        told = [(kind, n) for kind, number in most.items() for n in range(self.count(number))]
        self.r.shuffle(told)
        ledger = started()
        # Some are told again, and then say something else.
        for kind, n in told + self.r.sample(told, min(len(told), self.r.choice((0, 5, 60)))):
            ledger.put(kind, self.of(kind, n))
        for key in list(ledger.items["evidence"])[: self.r.choice((0, 0, 3))]:
            ledger.drop("evidence", key)
        completed = tuple(
            CompletedStep(text=f"{self.text()} {n}", refs=self.r.choice(((), REFS[:1])))
            for n in range(self.count(60))
        )
        plan = tuple(
            PlanStep(id=f"p{n}", text=self.text(), state=self.r.choice(("todo", "doing", "done", "dropped")))
            for n in range(self.count(50))
        )
        ledger.put("progress", Progress(completed=completed, plan=plan))
        ledger.head.position = ledger.head.version = self.at
        return ledger

    def given(self, ledger: Ledger) -> PacketInputs:
        r = self.r
        usable, k = r.choice((0, 0, 3_000, 12_000, 60_000, 180_000)), r.choice((0, 3, 30))
        said = [says("o" * r.choice((3, 90)), *r.choices(("event:e-1", "decision:d-1", "artifact:a3"), k=2))
                for _ in range(k)]  # fmt: skip
        narrated = checkpoint(
            r.choice((1, 50)),
            observations=tuple(said),
            inferences=tuple(said),
            narrative=r.choice(("", "n" * 99)),
        )
        return inputs(
            windowed(ledger, usable) if usable else ledger,
            checkpoint=r.choice((None, narrated)),
            recent=lines_about(r.choice((0, 1, 3)), "r" * r.choice((1, 90))),
            cleared=cleared(r.choice((0, 3, 40))),
            packet_tokens=r.choice((800, 1_500, 3_000, 8_000, 20_000, r.randint(300, 9_000))),
            user_tokens=r.choice((50, 2_000)),
            budget=BudgetFigures(usable * 2, usable, 0, 0, "ok"),
            wire_bytes=r.choice((9_000, 60_000, 950_000)),
            missing_artifacts=tuple(f"gone-{n}" for n in range(r.choice((0, 0, 5)))),
        )


def same(found: Built, plain: Built) -> None:
    assert encode(found.packet) == encode(plain.packet)
    assert found[1:] == plain[1:]


@laws
@given(st.integers(0, 2**32))
def test_a_packet_is_to_the_byte_what_looking_at_every_item_gives(seed: int) -> None:
    dice = Dice(seed)
    ledger = dice.ledger()
    given_ = dice.given(ledger)
    same(build_packet(given_), plain_packet(given_))
    assert Index.of(ledger.items).stock == ledger.index.stock
    lane = Lane(settings=Settings())
    runs = {"r1": ledger}
    assert fit_of(lane, runs, "r1") == fit_of(lane, runs, "r1", plain_view(runs, "r1"))


@laws
@given(st.integers(0, 2**32))
def test_a_snapshot_keeps_what_it_had(seed: int) -> None:
    dice = Dice(seed)
    ledger = dice.ledger()
    early, before = ledger.snapshot(), plain_rested_on(ledger)
    for kind in ("operation", "decision", "artifact", "evidence"):
        for n in range(3):
            ledger.put(kind, dice.of(kind, n))
    assert Index.of(early.items).stock == early.index.stock
    assert plain_rested_on(early) == before


def test_how_much_is_rendered_does_not_grow_with_what_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = 0

    def counted(fields: Any) -> Any:
        def of(item: Any) -> Any:
            nonlocal rendered
            rendered += 1
            return fields(item)

        return of

    for name in ("operation_fields", "evidence_fields", "decision_fields", "artifact_fields"):
        monkeypatch.setattr(carried, name, counted(getattr(carried, name)))
    found = []
    for many in (250, 5_000):
        ledger = started()
        for n in range(many):
            ledger.put(
                "operation", Operation(id=f"op-{n}", kind="k", state="succeeded", target="t" * 50, position=n)
            )
            ledger.put(
                "evidence",
                Evidence(id=f"ev-{n}", claim="c" * 500, kind="observed", source="event:e", position=n),
            )
            ledger.put("decision", Decision(id=f"d-{n}", summary="s" * 90, position=n))
            ledger.put(
                "artifact",
                Artifact(id=f"a-{n}", artifact_id=f"a-{n}", uri="u", sha256="0" * 64, description="d"),
            )
        rendered = 0
        build_packet(inputs(ledger))
        found.append(rendered)
    assert found[0] == found[1] < 200
