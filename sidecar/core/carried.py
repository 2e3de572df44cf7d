"""What a resume packet carries in its lists: operations, steps, records, messages, statements, recent
lines.

Each item is a piece that says whether it must stay and, if not, how early it goes. Ledger items come from
the ledger, a summary's statements only from the summary, and neither becomes the other. Whether a piece
fits is not decided here.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from protocol.handoff import May, Recent
from protocol.identifiers import parse_ref
from protocol.state import StateCheckpoint
from protocol.summary import Statement
from sidecar.core.fitting import Piece, shorten
from sidecar.core.protected import (
    RestedOn,
    artifact_fields,
    contradictions_of,
    decision_fields,
    evidence_fields,
    in_artifact_order,
    operation_fields,
)
from sidecar.core.state import Artifact, Ledger, Operation, UserMessage

KEPT_STEPS: Final = 20
"""Newest completed steps and finished plan items that always stay; older ones only while there is room."""

CANDIDATES: Final = 200
"""Newest items of a kind that are considered where they need not stay; older ones are only counted."""

FEW: Final = 30
"""Newest items of a kind that go in their turn; older ones go before anything else does."""

CONCLUSIONS: Final = 3
"""Newest inferences of a summary that stay longer than its observations: where the work stood."""

SHORT_MESSAGE: Final = 200
"""Characters shown of a user message that is given by reference."""

_CALL, _CHILD, _DECISION, _STEP, _RECORD, _MESSAGE, _SETTLED, _REJECTED, _SUMMARY, _RECENT, _OLD = range(11)
"""Ranks: the last goes first."""


def operation_piece(operation: Operation, allowed: May) -> Piece:
    """An operation that is not finally settled; by id."""
    return Piece(
        slot="operations", order=(0, operation.id), value=_operation(operation, allowed), required=True
    )


def settled_operations(ledger: Ledger, left: Counter[str]) -> list[Piece]:
    """Settled operations, newest first behind the others."""
    settled = [item for item in ledger.items["operation"].values() if not item.live]
    return [
        Piece(
            slot="operations", order=(1, place), value=_operation(item, "none"), rank=_rank(place, _SETTLED)
        )
        for place, item in enumerate(_newest("operations", settled, left))
    ]


def abandoned_calls(ledger: Ledger, covered: int) -> Iterator[Piece]:
    """Calls behind the covered range whose outcome nobody will tell, in the order they were made."""
    for call in ledger.active["call"].values():
        if call.state == "abandoned" and call.position > covered:
            value = {"call_id": call.call_id, "tool": call.tool}
            yield Piece(slot="abandoned_calls", order=(call.position, call.id), value=value, rank=_CALL)


def steps(progress: Mapping[str, Any]) -> Iterator[Piece]:
    """Completed steps and the plan, in their order; unfinished plan items always stay."""
    for slot, items in (("completed", progress["completed"]), ("plan", progress["plan"])):
        finished = 0
        for index in reversed(range(len(items))):
            item = items[index]
            over = slot == "completed" or item["state"] in ("done", "dropped")
            finished += over
            yield Piece(
                slot=slot, order=index, value=item, rank=_STEP, required=not over or finished <= KEPT_STEPS
            )


def records(ledger: Ledger, rested: RestedOn, left: Counter[str]) -> Iterator[Piece]:
    """Children, decisions in force, artifacts and evidence; those something protected rests on always
    stay."""
    children = sorted(ledger.active["child"].values(), key=lambda item: item.status != "running")
    for child in children:
        value = {"run": child.id, "task": child.task, "status": child.status}
        yield Piece(slot="children", order=child.id, value=value, rank=_CHILD)
    for age, decision in enumerate(_newest("decisions", ledger.active["decision"].values(), left)):
        fields = decision_fields(decision)
        rejected = fields.pop("rejected", None)
        yield Piece(slot="decisions", order=decision.id, value=fields, rank=_rank(age, _DECISION))
        if rejected is not None:
            yield Piece(
                slot="rejected", order=decision.id, value=(decision.id, rejected), rank=_rank(age, _REJECTED)
            )
    place = {
        item.id: index for index, item in enumerate(in_artifact_order(ledger.items["artifact"].values()))
    }
    for key in rested.artifacts:
        artifact = ledger.items["artifact"][key]
        yield Piece(slot="artifacts", order=place[key], value=artifact_fields(artifact), required=True)
    others: Iterable[Artifact] = (
        item for item in ledger.active["artifact"].values() if item.id not in rested.artifacts
    )
    for age, artifact in enumerate(_newest("artifacts", others, left)):
        value = artifact_fields(artifact)
        yield Piece(slot="artifacts", order=place[artifact.id], value=value, rank=_rank(age, _RECORD))
    for key in rested.evidence:
        evidence = ledger.items["evidence"][key]
        yield Piece(slot="evidence", order=key, value=evidence_fields(evidence), required=True)
    told = (item for item in ledger.active["evidence"].values() if item.id not in rested.evidence)
    disputed = {ref for pair in contradictions_of(ledger) for ref in pair}
    for age, evidence in enumerate(_newest("evidence", told, left)):
        rank = _DECISION if f"evidence:{evidence.id}" in disputed else _rank(age, _RECORD)
        yield Piece(slot="evidence", order=evidence.id, value=evidence_fields(evidence), rank=rank)


def user_messages(ledger: Ledger, user_tokens: int, left: Counter[str]) -> Iterator[Piece]:
    """Earlier user messages within ``user_tokens`` (bytes / 4): the first, prohibitions and exact
    identifiers, others.

    Messages of the current request are not repeated, nor one that is the goal word for word. What does not fit
    whole is shown by reference, else counted.
    """
    goal = ledger.task.goal.strip()
    messages: list[UserMessage] = [
        item
        for item in ledger.active["user"].values()
        if item.id not in ledger.active["request"] and item.text.strip() != goal
    ]
    room = user_tokens * 4
    for message in sorted(messages, key=lambda item: (-item.rank, -item.position)):
        for text in (message.text, shorten(message.text, SHORT_MESSAGE, f"event:{message.id}")):
            cost = len(text.encode("utf-8", "surrogatepass"))
            if cost <= room:
                room -= cost
                value = {"event_id": message.id, "text": text}
                yield Piece(slot="user_messages", order=message.position, value=value, rank=_MESSAGE)
                break
        else:
            left["user_messages"] += 1


def statements(
    checkpoint: StateCheckpoint | None, dead: Callable[[str], bool], left: Counter[str]
) -> Iterator[Piece]:
    """The summary's statements without those whose refs are all dead; the oldest of a kind go first, the
    narrative last."""
    if checkpoint is None:
        return
    summary = checkpoint.summary
    if summary.narrative:
        yield Piece(slot="summary.narrative", order=0, value=summary.narrative, rank=_SUMMARY)
    newest = max(0, len(summary.inferences) - CONCLUSIONS)
    kinds: tuple[tuple[str, Sequence[Statement], int], ...] = (
        ("summary.completed", summary.completed, 0),
        ("summary.inferences", summary.inferences[newest:], newest),
        ("summary.observations", summary.observations, 0),
        ("summary.inferences", summary.inferences[:newest], 0),
    )
    for slot, found, first in kinds:
        for index in reversed(range(len(found))):
            statement = found[index]
            if statement.refs and all(dead(ref) for ref in statement.refs):
                left["dead"] += 1
            else:
                yield Piece(
                    slot=slot,
                    order=first + index,
                    value={"text": statement.text, "refs": list(statement.refs)},
                    rank=_SUMMARY,
                )


def recent(items: Sequence[Recent]) -> Iterator[Piece]:
    """Recent lines; the oldest go first."""
    for index in reversed(range(len(items))):
        yield Piece(
            slot="recent",
            order=index,
            value={"text": items[index].text, "ref": items[index].ref},
            rank=_RECENT,
        )


def is_dead(ledger: Ledger, ref: str) -> bool:
    """Whether the ledger itself says that what a ref names holds no longer."""
    try:
        kind, name, run = parse_ref(ref)
    except ValueError:
        return False
    if run is not None and run != ledger.head.run:
        return False
    if kind == "artifact":
        versions = [item for item in ledger.items["artifact"].values() if name in (item.artifact_id, item.id)]
        return bool(versions) and all(item.state == "withdrawn" for item in versions)
    if kind == "event":
        return ledger.get("corrected", name) is not None
    if kind not in ("decision", "constraint"):
        return False
    item = ledger.get(kind, name)
    return item is not None and not item.live


def _operation(operation: Operation, allowed: May) -> dict[str, Any]:
    plain = operation_fields(operation)
    fields = (
        {name: plain.pop(name) for name in ("id", "kind", "idempotency_key", "state")}
        | {"may": allowed}
        | plain
    )
    if operation.receipt is not None:
        fields["receipt"] = operation.receipt
    return fields


def _rank(age: int, rank: int) -> int:
    return rank if age < FEW else _OLD


def _newest(slot: str, items: Iterable[Any], left: Counter[str]) -> list[Any]:
    """At most ``CANDIDATES`` items, newest first; the rest is counted as left out."""
    found = list(items)
    left[slot] += max(0, len(found) - CANDIDATES)
    return heapq.nlargest(CANDIDATES, found, key=lambda item: (item.position, item.id))
