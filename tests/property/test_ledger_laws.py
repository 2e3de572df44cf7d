"""Laws of the ledger, over any messages: what no order, repetition, session or sender may ever achieve."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from protocol.events import Event, RunStarted
from sidecar.core import gate, transitions
from sidecar.core.fold import Origin, Outcome, fold
from sidecar.core.state import (
    Ledger,
    decode_head,
    decode_item,
    encode_head,
    encode_item,
    ledger_value,
)
from support.laws import law
from support.story import Story, event
from support.tellings import AGENT, MESSAGE, OPERATIONS, STORY, Deal, words

laws = law(10)


def begin(required: bool = True) -> Story:
    story = Story(approval_kinds=("deploy",), authority_required=required)
    story.start()
    story.tell("child.spawned", child_run="c", task="t")
    story.start(run="c")
    return story


def tell(story: Story, message: tuple[str, str, str, dict[str, Any]]) -> Outcome:
    run, channel, type_, body = message
    story.count += 1
    one = event(type_, f"e-{story.count}", channel, **body)
    return fold(story.lane, story.runs, run, one, Origin(channel=channel, stream_seq=story.count))  # type: ignore[arg-type]


def values(story: Story) -> dict[str, Any]:
    return {run: ledger_value(ledger) for run, ledger in sorted(story.runs.items())}


def states(story: Story, kind: str) -> dict[tuple[str, str], str]:
    return {
        (run, item.id): item.state
        for run, ledger in story.runs.items()
        for item in ledger.items[kind].values()
    }


def copied(ledger: Ledger) -> Ledger:
    """The ledger as a store would give it back."""
    twin = Ledger(decode_head(encode_head(ledger.head)))
    for kind, items in ledger.items.items():
        for key in sorted(items, reverse=True):
            twin.put(kind, decode_item(kind, encode_item(items[key])))
    return twin


@laws
@given(STORY, st.booleans())
def test_fold_takes_everything_and_a_refusal_changes_only_counters(messages: Any, required: bool) -> None:
    story = begin(required)
    for message in messages:
        before = values(story)
        outcome = tell(story, message)
        after = values(story)
        changed = {run for run in after if before.get(run) != after[run]}
        assert changed <= outcome.touched
        for run, ledger in story.runs.items():
            assert ledger.index.covers(ledger.items)
            assert set(ledger.head.violations) <= {
                *outcome_codes(),
                *before.get(run, {}).get("head", {}).get("violations", {}),
            }
        if outcome.rejection is None:
            continue
        for run, value in after.items():
            for part in ("violations", "next_seq"):
                value["head"].pop(part)
                before[run]["head"].pop(part)
            value["items"].pop("gap", None)
            before[run]["items"].pop("gap", None)
            assert value == before[run]


def outcome_codes() -> frozenset[str]:
    from sidecar.core.fold import RUN_VIOLATIONS

    return RUN_VIOLATIONS


@laws
@given(STORY)
def test_positions_and_versions_have_no_holes(messages: Any) -> None:
    story = begin()
    for message in messages:
        head = story.runs[message[0]].head if message[0] in story.runs else None
        before = (head.position, head.version) if head is not None else (0, 0)
        outcome = tell(story, message)
        step = outcome.rejection is None
        expected = (before[0] + (step and message[1] != "record"), before[1] + step)
        head = story.runs[message[0]].head if message[0] in story.runs else None
        assert ((head.position, head.version) if head is not None else (0, 0)) == expected


@laws
@given(STORY)
def test_only_reconciliation_makes_an_operation_more_allowed(messages: Any) -> None:
    story = begin()
    for message in messages:
        before = states(story, "operation")
        tell(story, message)
        run, channel, type_, body = message
        for name, state in states(story, "operation").items():
            old = before.get(name)
            if old in (None, state):
                continue
            assert state != "not_started"
            assert old != "succeeded"
            if old == "unknown":
                by_authority = type_ == "operation.settled" and channel == "authority"
                assert type_ == "operation.reconciled" or by_authority
                assert name == (run, body["operation_id"])
            if state == "failed" and old == "pending":
                assert type_ == "operation.settled"


@laws
@given(STORY)
def test_an_approval_is_granted_only_by_an_authority(messages: Any) -> None:
    story = begin()
    granted: set[tuple[str, str, str, str | None]] = set()
    for message in messages:
        before = states(story, "approval")
        tell(story, message)
        run, channel, type_, body = message
        if (type_, channel, body.get("outcome")) == ("approval.resolved", "authority", "granted"):
            granted.add((run, body["approval_id"], body["action"], body["payload_digest"]))
        for name, state in states(story, "approval").items():
            old = before.get(name, "pending")
            if old == state:
                continue
            assert (
                state in {new for (was, _), new in transitions.APPROVAL.items() if was == old}
                or type_ == "approval.requested"
            )
            if state == "granted":
                item = story.runs[name[0]].items["approval"][name[1]]
                assert (*name, item.action, item.payload_digest) in granted


@laws
@given(STORY)
def test_a_constraint_goes_only_by_those_who_may(messages: Any) -> None:
    story = begin()
    for message in messages:
        before = {run: dict(ledger.active["constraint"]) for run, ledger in story.runs.items()}
        tell(story, message)
        _, channel, type_, _ = message
        for run, items in before.items():
            for key, item in items.items():
                if key in story.runs[run].active["constraint"]:
                    assert story.runs[run].active["constraint"][key] == item
                    continue
                assert type_ in ("constraint.lifted", "constraint.set")
                own = (item.source, item.told_by) == ("agent", "agent")
                assert channel == "authority" or own


@laws
@given(STORY)
def test_one_ok_for_one_key_of_a_family_at_a_time(messages: Any) -> None:
    story = begin()
    holding: dict[str, tuple[str, str]] = {}
    for message in messages:
        outcome = tell(story, message)
        decision = outcome.decision
        if decision is None or not decision.reserved:
            continue
        run = message[0]
        root = next(iter(list(gate.family.line(story.runs, run))[-1:])).head.run
        operation = story.runs[run].items["operation"][decision.operation_id]
        other = holding.get(f"{root}/{operation.idempotency_key}")
        if other is not None and other != (run, operation.id):
            assert story.runs[other[0]].items["operation"][other[1]].state == "failed"
        holding[f"{root}/{operation.idempotency_key}"] = (run, operation.id)
        for constraint in gate.family.constraints(story.runs, run):
            assert constraint.forbids is None or not gate.permission.forbids(constraint.forbids, operation)


@laws
@given(STORY, MESSAGE)
def test_a_record_said_twice_changes_nothing_more(messages: Any, last: Any) -> None:
    story = begin()
    for message in messages:
        tell(story, message)
    for message in [message for message in [*messages, last] if message[1] == "record"]:
        message[3].pop("epoch")
        tell(story, (*message[:3], message[3] | {"epoch": 2}))
        before = values(story)
        decided = tell(story, (*message[:3], message[3] | {"epoch": 2})).decision
        after = values(story)
        for run, value in after.items():
            assert value["items"] == before[run]["items"]
        assert decided is None or not decided.allowed or decided.reserved


@laws
@given(STORY, st.integers(0, 30))
def test_stored_and_read_back_it_is_the_same_and_goes_on_the_same(messages: Any, at: int) -> None:
    story, twin = begin(), begin()
    for place, message in enumerate(messages):
        if place == at:
            twin.runs = {run: copied(ledger) for run, ledger in reversed(twin.runs.items())}
            assert values(twin) == values(story)
        left, right = tell(story, message), tell(twin, message)
        assert left == right
    assert values(twin) == values(story)
    for run, ledger in story.runs.items():
        snapshot = ledger.snapshot()
        assert ledger_value(snapshot) == ledger_value(ledger)
        assert snapshot.index.holding == twin.runs[run].index.holding


@laws
@given(STORY)
def test_looking_changes_nothing_and_dry_answers_are_the_acts_answers(messages: Any) -> None:
    story = begin()
    for message in messages:
        tell(story, message)
    for run in list(story.runs):
        for operation in sorted(story.runs[run].items["operation"]):
            before = values(story)
            looked = story.look(operation, run=run)
            assert values(story) == before
            acted = tell(
                story,
                (
                    run,
                    "record",
                    "authorization.requested",
                    {"operation_id": operation, "request_id": "new", "epoch": 9},
                ),
            ).decision
            assert acted is not None
            if not acted.invalid:
                assert acted.code == looked.code
            story.runs = {name: copied(story.runs[name]) for name in story.runs}


AGENT_IN_ORDER = [
    name
    for name in AGENT
    if name
    not in (
        # Not the agent's to say, or such that the first to come stands or a session changes hands.
        "approval.resolved", "policy.released", "task.changed", "gap.accepted", "run.started", "child.spawned",
        "policy.loaded", "run.resumed", "operation.declared", "approval.requested", "evidence.recorded",
    )
]  # fmt: skip

OF_OPERATIONS = ("operation.dispatched", "operation.settled", "operation.settled", "operation.reconciled") * 6


@law()
@given(words(1, 13), st.integers(0, 2**32 - 1))
def test_out_of_order_nothing_is_more_allowed_than_in_order(drawn: list[int], order_: int) -> None:
    """Operations, approvals and evidence each told once; then everything of the agent arrives in any order,
    late numbers and all."""
    first = Deal(drawn[0])
    reconciled = [name for name in OPERATIONS if first.pick((False, True))]
    agent: list[tuple[str, dict[str, Any]]] = []
    for number in (1, 2, 3):
        fields_ = {"kind": "mail", "idempotency_key": f"key{number % 2}"}
        agent.append(("operation.declared", {"operation_id": f"op{number}", **fields_}))
    agent.append(("approval.requested", {"approval_id": "ap1", "action": "mail", "operation_id": "op3"}))
    for word in drawn[1:]:
        deal = Deal(word)
        name = deal.pick((*OF_OPERATIONS, *AGENT_IN_ORDER))
        agent.append((name, deal.fields(AGENT[name])))
    for name in reconciled:
        agent.append(
            ("evidence.recorded", {"evidence_id": name, "claim": "c", "kind": "observed", "source": "s"})
        )
        agent.append(
            (
                "operation.reconciled",
                {"operation_id": name, "state": "failed", "evidence": f"evidence:{name}"},
            )
        )
    numbered = [(type_, fields_, seq) for seq, (type_, fields_) in enumerate(agent, 2)]
    shuffled = list(numbered)
    Random(order_).shuffle(shuffled)
    answers = []
    for order in (numbered, shuffled):
        story = Story()
        story.start(session="s", seq=1)
        story.authority("approval.resolved", approval_id="ap1", outcome="granted", by="ann", action="mail")
        for type_, fields_, seq in order:
            one: Event = event(type_, f"e-{seq}", session="s", seq=seq, **fields_)
            assert not isinstance(one, RunStarted)
            fold(story.lane, story.runs, "r", one, Origin("event"))
            if story.ledger().active["gap"]:
                # While a number is missing nothing is allowed at all.
                assert not {name for name in OPERATIONS if story.code(name) == "ok"}
        assert story.ledger().items["gap"] == {}
        answers.append({name for name in OPERATIONS if story.code(name) == "ok"})
    # Only a reconciliation, from an observed result, may have freed a key in the other order.
    operations = story.ledger().items["operation"]
    freed = {item.idempotency_key for item in operations.values() if item.evidence is not None}
    more = answers[1] - answers[0]
    assert {name for name in more if operations[name].idempotency_key not in freed} == set()
