"""Side effects: declared, authorised, gone out, settled, found out.

Nothing but reconciliation ever makes an operation more allowed, and a sign that one ran always counts,
whoever gives it and however irregular it is.
"""

from __future__ import annotations

from msgspec.structs import replace

from protocol.events import (
    AuthorizationRequested,
    OperationDeclared,
    OperationReconciled,
    OperationSettled,
)
from protocol.identifiers import parse_ref
from sidecar.core import gate, permission
from sidecar.core.approvals import consume
from sidecar.core.entry import Entry
from sidecar.core.globs import any_matches
from sidecar.core.state import Ledger, Operation
from sidecar.core.transitions import OPERATION, OPERATION_EVIDENCE


def declared(entry: Entry, event: OperationDeclared) -> None:
    """The first declaration stands; of an operation seen running before it, only kind and key are taken."""
    ledger = entry.ledger
    known: Operation | None = ledger.items["operation"].get(event.operation_id)
    told = Operation(
        id=event.operation_id,
        kind=event.kind,
        idempotency_key=event.idempotency_key,
        target=event.target,
        tool=event.tool,
        description=event.description,
        approval_id=event.approval_id,
        payload_digest=event.payload_digest,
        nonessential=event.nonessential,
        position=entry.position,
    )
    if known is None:
        ledger.put("operation", told)
    elif known.declared:
        entry.violate("illegal_transition", _ref(known.id))
    else:
        used = _use_approval(entry, told)
        _put(
            entry,
            known,
            kind=event.kind,
            idempotency_key=event.idempotency_key,
            declared=True,
            used_approval=used,
        )


def ran(entry: Entry, operation_id: str, *, by_call: bool) -> None:
    """A dispatch was seen: ``operation.dispatched``, or a call that names the operation.

    One of each is one dispatch. Without an ``ok`` before it, it is judged now.
    """
    known: Operation | None = entry.ledger.items["operation"].get(operation_id)
    if known is None:
        _undeclared(entry, operation_id, dispatched=True, announced=not by_call, called=by_call)
        entry.violate("unauthorized_write", _ref(operation_id))
        return
    first_sign = not (known.called if by_call else known.announced)
    signs = {"called": True} if by_call else {"announced": True}
    signs |= {"dispatched": True}
    if known.state == "pending" and first_sign:
        at = entry.position if not known.dispatched else known.dispatched_at
        _put(entry, known, dispatched_at=at, **signs)
    elif known.state == "not_started":
        _dispatch(entry, known, signs)
    elif known.state == "unknown" and not known.declared and known.dispatched and first_sign:
        _put(entry, known, **signs)
        entry.violate("illegal_transition", _ref(known.id))
    else:
        _again(entry, known, signs)


def settled(entry: Entry, event: OperationSettled) -> None:
    """What is said to have become of it. Another session's, and a late, ``failed`` counts as ``unknown``."""
    known: Operation | None = entry.ledger.items["operation"].get(event.operation_id)
    if known is None:
        _undeclared(entry, event.operation_id, receipt=event.receipt, detail=event.detail)
        return
    said = event.state
    if said == "failed" and (entry.foreign or entry.late) and known.state != "failed":
        said = "unknown"
    trigger = f"said {said}"
    if known.state == "unknown" and entry.channel == "authority" and said != "unknown":
        trigger = f"reconciled {said}"
    fields: dict[str, object] = {
        "receipt": event.receipt if event.receipt is not None else known.receipt,
        "detail": event.detail if event.detail is not None else known.detail,
    }
    _move(entry, known, trigger, fields)


def reconciled(entry: Entry, event: OperationReconciled) -> None:
    """An unknown outcome is found out: by an authority's word, or by the agent from an observed result."""
    ledger = entry.ledger
    known: Operation | None = ledger.items["operation"].get(event.operation_id)
    if known is None:
        _undeclared(entry, event.operation_id)
        return
    trigger = f"reconciled {event.state}"
    if known.state != "unknown":
        _move(entry, known, trigger, {})
    elif entry.foreign:
        return
    elif event.state == "review":
        _put(entry, known, review=True)
    elif _may_reconcile(entry, known, event):
        _move(entry, known, trigger, {"evidence": event.evidence, "review": False})
    else:
        entry.violate("illegal_transition", _ref(known.id))


def call_lost(entry: Entry, operation_id: str) -> None:
    """A call of it timed out or was cancelled."""
    known: Operation | None = entry.ledger.items["operation"].get(operation_id)
    if known is not None:
        _move(entry, known, "call lost", {})


def given_up(entry: Entry, operation_id: str) -> None:
    """The owner waits no longer for its outcome. Only one that is pending becomes unknown."""
    known: Operation | None = entry.ledger.items["operation"].get(operation_id)
    if known is not None:
        _move(entry, known, "given up", {})


def authorization(entry: Entry, event: AuthorizationRequested) -> None:
    """Decide an act here and now: an ``ok`` makes the operation pending and uses its approval up."""
    known: Operation | None = entry.ledger.items["operation"].get(event.operation_id)
    decision = gate.judge(
        entry.lane,
        entry.runs,
        entry.run,
        known,
        request_id=event.request_id,
        policy_version=event.policy_version,
    )
    if decision.allowed and not decision.reserved and known is not None:
        if decision.approval is not None:
            consume(entry, decision.approval)
        reserved = _put(
            entry,
            known,
            state=OPERATION[known.state, "authorized"],
            request_id=event.request_id,
            used_approval=None if decision.approval is None else decision.approval.id,
            dispatched_at=entry.position,
        )
        decision = replace(decision, reserved=True, operation=reserved)
    elif not decision.invalid and decision.holder is not None:
        entry.violate("repeated_operation", _ref(event.operation_id), _ref(decision.holder.operation.id))
    entry.outcome.decision = replace(decision, operation_id=event.operation_id)


def _dispatch(entry: Entry, known: Operation, signs: dict[str, bool]) -> None:
    """The first sign that it went out, without an ``ok``."""
    decision = gate.judge(entry.lane, entry.runs, entry.run, known)
    used = _use_approval(entry, known)
    _put(
        entry,
        known,
        state=OPERATION[known.state, "dispatched"],
        used_approval=used,
        dispatched_at=entry.position,
        **signs,
    )
    if decision.allowed:
        return
    entry.violate("unauthorized_write", _ref(known.id))
    if decision.code == "approval_expired":
        entry.violate("expired_approval_used", _ref(known.id))
    if decision.holder is not None:
        entry.violate("repeated_operation", _ref(known.id), _ref(decision.holder.operation.id))


def _again(entry: Entry, known: Operation, signs: dict[str, bool]) -> None:
    """It went out once more, or after its outcome was told."""
    if known.state == "pending":
        _put(entry, known, dispatched_at=entry.position, **signs)
    else:
        _move(entry, known, "dispatched", {"dispatched_at": entry.position, **signs})
    entry.violate("unauthorized_write", _ref(known.id))
    if known.state != "failed":
        entry.violate("repeated_operation", _ref(known.id))


def _undeclared(entry: Entry, operation_id: str, **fields: object) -> None:
    """Something of an id nobody declared: it may have happened."""
    values = {
        "declared": False,
        "state": "unknown",
        "dispatched_at": entry.position,
        "position": entry.position,
    }
    entry.ledger.put("operation", Operation(id=operation_id, **(values | fields)))  # type: ignore[arg-type]
    entry.outcome.operations_unknown.append(operation_id)
    entry.violate("illegal_transition", _ref(operation_id))


def _move(entry: Entry, known: Operation, trigger: str, fields: dict[str, object]) -> None:
    """Take the step the tables give, as a violation if only evidence gives it; else change nothing."""
    step = (known.state, trigger)
    state = OPERATION.get(step)
    if state is None:
        state = OPERATION_EVIDENCE.get(step)
        entry.violate("illegal_transition", _ref(known.id))
        if state is None:
            if trigger == "dispatched":
                _put(entry, known, **fields)
            return
        if known.state == "not_started":
            fields = {"used_approval": _use_approval(entry, known), "dispatched_at": entry.position, **fields}
    moved = _put(entry, known, state=state, **fields)
    if moved.state == known.state:
        return
    if moved.state == "unknown":
        entry.outcome.operations_unknown.append(known.id)
    elif moved.state in ("succeeded", "failed"):
        _forget_results(entry.ledger)


def _use_approval(entry: Entry, operation: Operation) -> str | None:
    """Use up the approval that covers an operation which ran, permitted or not: it was for one run of it."""
    standing = permission.approval_standing(entry.lane, entry.runs, entry.run, operation)
    if standing.approval is None or standing.fault is not None:
        return None
    consume(entry, standing.approval)
    return standing.approval.id


def _may_reconcile(entry: Entry, known: Operation, event: OperationReconciled) -> bool:
    if entry.has_authority:
        return True
    kinds = entry.lane.settings.reconcile_by_authority_kinds
    if known.review or (bool(kinds) if known.kind is None else any_matches(kinds, known.kind)):
        return False
    if entry.late and event.state == "failed":
        return False
    return _is_observed(entry.ledger, known, event.evidence)


def _is_observed(ledger: Ledger, known: Operation, evidence: str) -> bool:
    """Whether the ref names observed evidence, or a call's result, from after the operation went out."""
    try:
        ref = parse_ref(evidence)
    except ValueError:
        return False
    if ref.run is not None and ref.run != ledger.head.run:
        return False
    if ref.kind == "evidence":
        item = ledger.items["evidence"].get(ref.value)
        if item is None or item.kind != "observed" or item.late or item.position <= known.dispatched_at:
            return False
        return not _was_before(ledger, known, item.source)
    results = ledger.items["result"]
    if ref.kind == "event":
        result = results.get(ref.value)
        return result is not None and result.position > known.dispatched_at
    if ref.kind == "pos":
        return ref.position > known.dispatched_at and any(
            result.position == ref.position for result in results.values()
        )
    return False


def _was_before(ledger: Ledger, known: Operation, source: str) -> bool:
    """Whether the source is a message of this run that came, as far as the ledger knows, before the operation
    went out. What the ledger does not know may be a page, a file, or a message it has no more use for."""
    try:
        ref = parse_ref(source)
    except ValueError:
        return False
    if ref.run is not None and ref.run != ledger.head.run:
        return False
    if ref.kind == "pos":
        return ref.position <= known.dispatched_at
    if ref.kind != "event":
        return False
    positions = [position for name, position in ledger.head.results if name == ref.value]
    for kind in ("result", "request", "user", "call"):
        item = ledger.items[kind].get(ref.value)
        if item is not None:
            positions.append(item.position)
    # An id is the newest message's that has it.
    return bool(positions) and max(positions) <= known.dispatched_at


def _put(entry: Entry, known: Operation, **fields: object) -> Operation:
    moved = replace(known, **fields)
    if moved != known:
        entry.ledger.put("operation", moved)
    return moved


def _forget_results(ledger: Ledger) -> None:
    """Results are kept only while they may reconcile something."""
    if not ledger.index.unsettled:
        for key in list(ledger.items["result"]):
            ledger.drop("result", key)


def _ref(operation_id: str) -> str:
    return f"operation:{operation_id}"
