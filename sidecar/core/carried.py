"""What a resume packet carries in its lists: operations, steps, records, messages, statements, recent
lines.

Each item is a piece that says whether it must stay and, if not, how early it goes. Ledger items come from
the ledger, a summary's statements only from the summary, and neither becomes the other. Whether a piece
fits is not decided here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from protocol.handoff import May, Recent
from protocol.identifiers import parse_ref
from protocol.state import StateCheckpoint
from protocol.summary import Statement
from sidecar.core.fitting import shorten
from sidecar.core.protected import (
    RestedOn,
    artifact_fields,
    contradictions_of,
    decision_fields,
    evidence_fields,
    operation_fields,
)
from sidecar.core.shelf import Group, Piece
from sidecar.core.state import Artifact, Child, Decision, Evidence, Ledger, Operation, UserMessage

KEPT_STEPS: Final = 20
"""Newest completed steps and finished plan items that always stay; older ones only while there is room."""

CANDIDATES: Final = 200
"""Newest items of a kind that are considered where they need not stay; older ones are only counted."""

CHOSEN: Final = frozenset({"artifact", "decision", "evidence"})
"""Kinds of which a packet looks at the newest and at what is named, however many there are."""

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


def settled_operations(ledger: Ledger, left: Counter[str]) -> Iterator[Group]:
    """Settled operations, newest first behind the others."""

    def piece(rank: int, placed: tuple[int, Operation]) -> Piece:
        place, operation = placed
        return Piece(slot="operations", order=(1, place), value=_operation(operation, "none"), rank=rank)

    found = list(enumerate(_newest("operations", ledger, "operation", left)))
    yield from _aged("operations", _SETTLED, found[:FEW], found[FEW:], piece)


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


def rested(ledger: Ledger, rested_on: RestedOn) -> Iterator[Piece]:
    """The artifacts and evidence that something protected rests on: they always stay."""
    for key in rested_on.artifacts:
        yield _artifact(None, ledger.items["artifact"][key])
    for key in rested_on.evidence:
        yield _evidence(None, ledger.items["evidence"][key])


def records(ledger: Ledger, rested_on: RestedOn, left: Counter[str]) -> Iterator[Group]:
    """Children, decisions in force, and the artifacts and evidence that nothing protected rests on."""
    children = sorted(ledger.active["child"].values(), key=lambda item: item.status != "running")
    yield Group(_CHILD, {"children": len(children)}, map(_child, children))
    yield from _decisions(_newest("decisions", ledger, "decision", left))
    artifacts = _newest("artifacts", ledger, "artifact", left, rested_on.artifacts)
    yield from _aged("artifacts", _RECORD, artifacts[:FEW], artifacts[FEW:], _artifact)
    found = _newest("evidence", ledger, "evidence", left, rested_on.evidence)
    few, old = found[:FEW], found[FEW:]
    disputed = {ref for pair in contradictions_of(ledger) for ref in pair}
    if disputed:
        argued = [item for item in found if f"evidence:{item.id}" in disputed]
        few, old = ([item for item in some if item not in argued] for some in (few, old))
        yield Group(_DECISION, {"evidence": len(argued)}, (_evidence(_DECISION, item) for item in argued))
    yield from _aged("evidence", _RECORD, few, old, _evidence)


def _decisions(newest: list[Decision]) -> Iterator[Group]:
    """Decisions, what each rejected going before it does; of the older ones both go together."""

    def decision(rank: int, item: Decision) -> Piece:
        fields = decision_fields(item)
        fields.pop("rejected", None)
        return Piece(slot="decisions", order=item.id, value=fields, rank=rank)

    def rejected(rank: int, item: Decision) -> Piece:
        return Piece(
            slot="rejected", order=item.id, value=(item.id, decision_fields(item)["rejected"]), rank=rank
        )

    few, old = newest[:FEW], newest[FEW:]
    yield Group(_DECISION, {"decisions": len(few)}, (decision(_DECISION, item) for item in few))
    chose = [item for item in few if item.rejected]
    yield Group(_REJECTED, {"rejected": len(chose)}, (rejected(_REJECTED, item) for item in chose))
    yield Group(
        _OLD,
        {"decisions": len(old), "rejected": sum(bool(item.rejected) for item in old)},
        (
            piece
            for item in old
            for piece in (decision(_OLD, item), *([rejected(_OLD, item)] if item.rejected else []))
        ),
    )


def in_groups(pieces: Iterable[Piece]) -> Iterator[Group]:
    """Pieces that were made already, those of one rank together."""
    of_rank: dict[int, list[Piece]] = {}
    for piece in pieces:
        of_rank.setdefault(piece.rank, []).append(piece)
    for rank, found in of_rank.items():
        yield Group(rank, Counter(piece.slot for piece in found), found)


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
        items = ledger.items["artifact"]
        versions = [items[key] for *_, key in ledger.index.stock.versions(name)]
        named = [item for item in versions if name in (item.artifact_id, item.id)]
        return bool(named) and all(item.state == "withdrawn" for item in named)
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


def _child(child: Child) -> Piece:
    value = {"run": child.id, "task": child.task, "status": child.status}
    return Piece(slot="children", order=child.id, value=value, rank=_CHILD)


def _artifact(rank: int | None, item: Artifact) -> Piece:
    """``rank`` None: it must stay."""
    return Piece(
        slot="artifacts",
        order=(item.artifact_id, item.position, item.id),
        value=artifact_fields(item),
        rank=rank or 0,
        required=rank is None,
    )


def _evidence(rank: int | None, item: Evidence) -> Piece:
    """``rank`` None: it must stay."""
    return Piece(
        slot="evidence", order=item.id, value=evidence_fields(item), rank=rank or 0, required=rank is None
    )


def _newest(
    slot: str, ledger: Ledger, kind: str, left: Counter[str], but: frozenset[str] = frozenset()
) -> list[Any]:
    """At most ``CANDIDATES`` items, newest first, ``but`` these; the rest is counted as left out."""
    stock, items = ledger.index.stock, ledger.items[kind]
    found = [items[name] for name in stock.newest(kind, CANDIDATES, but)]
    left[slot] += stock.count(kind) - sum(items[name].live for name in but) - len(found)
    return found


def _aged(
    slot: str, rank: int, few: Sequence[Any], old: Sequence[Any], piece: Callable[[int, Any], Piece]
) -> Iterator[Group]:
    """The newest few in their turn, the older ones before anything else."""
    yield Group(rank, {slot: len(few)}, map(partial(piece, rank), few))
    yield Group(_OLD, {slot: len(old)}, map(partial(piece, _OLD), old))
