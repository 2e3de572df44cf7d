"""The single questions ``gate`` asks: does a constraint forbid it, is it in scope, does an approval cover it.

Each answers for one operation as it stands in the ledgers. Nothing here reads prose, and where a field that
would decide is missing the answer is the one that permits less.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Final, NamedTuple

from protocol.asks import AuthorizeCode
from protocol.events import Forbids
from sidecar.core import family
from sidecar.core.globs import any_matches
from sidecar.core.state import Approval, ConstraintItem, Lane, Ledger, Operation

_CODE_OF_STATE: Final[dict[str, AuthorizeCode]] = {
    "pending": "approval_pending",
    "denied": "approval_denied",
    "expired": "approval_expired",
    "revoked": "approval_revoked",
    "consumed": "approval_consumed",
}
_WORDS: Final[dict[AuthorizeCode, tuple[str, str]]] = {
    "approval_missing": ("it needs an approval and has none", "an approval for it is requested and granted"),
    "approval_pending": ("its approval is not resolved", "an authority resolves the approval"),
    "approval_denied": ("its approval was denied", "another approval is granted"),
    "approval_expired": ("its approval has expired", "another approval is granted"),
    "approval_revoked": ("its approval was revoked", "another approval is granted"),
    "approval_consumed": ("its approval was used up", "another approval is granted"),
    "payload_mismatch": (
        "its payload digest is not the one approved",
        "an approval that names it and carries its payload digest is granted",
    ),
}


class Standing(NamedTuple):
    """How an operation stands with its approval; without a fault nothing is missing."""

    approval: Approval | None
    """The one that is meant, where one is needed."""
    fault: AuthorizeCode | None = None
    reason: str = ""
    clears_when: str = ""


def forbids(rule: Forbids, operation: Operation) -> bool:
    """Whether every list given has an entry that matches; a field the operation lacks matches.

    A list without entries is as good as none, and no list at all forbids nothing.
    """
    given = False
    for patterns, value in (
        (rule.targets, operation.target),
        (rule.tools, operation.tool),
        (rule.kinds, operation.kind),
    ):
        if patterns:
            given = True
            if value is not None and not any_matches(patterns, value):
                return False
    return given


def forbidding(runs: Mapping[str, Ledger], run: str, operation: Operation) -> ConstraintItem | None:
    """The constraint that forbids the operation, if one does: of the nearest run, the first by its id."""
    for ledger in family.line(runs, run):
        found = [
            item
            for item in ledger.index.rules.concerning(operation)
            if (ledger.head.run == run or item.source in family.BINDING_SOURCES)
            and item.forbids is not None
            and forbids(item.forbids, operation)
        ]
        if found:
            return min(found, key=lambda item: item.id)
    return None


def kind_is_forbidden(lane: Lane, runs: Mapping[str, Ledger], run: str, operation: Operation) -> bool:
    """Whether a list of forbidden kinds holds the operation's kind; a missing kind is held by any entry."""
    kinds = family.forbidden_kinds(lane, runs, run)
    return bool(kinds) if operation.kind is None else any_matches(kinds, operation.kind)


def beyond_scope(ledger: Ledger, operation: Operation) -> str | None:
    """What of the operation the run's scope, or what its parent allowed it, does not hold; else ``None``.

    An absent list allows everything, an empty one nothing. An operation without a tool is held by no list of
    tools.
    """
    scope = ledger.task.scope
    if scope is not None and scope.kinds is not None:
        kind = operation.kind
        if kind is None or not any_matches(scope.kinds, kind):
            return "its kind"
    if operation.tool is not None:
        tools = None if scope is None else scope.tools
        if any(
            allowed is not None and not any_matches(allowed, operation.tool)
            for allowed in (tools, ledger.head.allowed_tools)
        ):
            return "its tool"
    return None


def kind_needs_approval(lane: Lane, runs: Mapping[str, Ledger], run: str, operation: Operation) -> bool:
    """Whether the operation's kind is one that needs approval."""
    kinds = family.approval_kinds(lane, runs, run)
    return bool(kinds) if operation.kind is None else any_matches(kinds, operation.kind)


def needs_approval(lane: Lane, runs: Mapping[str, Ledger], run: str, operation: Operation) -> bool:
    """Whether its kind needs one, it names one, or one of the run names it."""
    return (
        operation.approval_id is not None
        or operation.id in runs[run].index.approvals_of_operation
        or kind_needs_approval(lane, runs, run, operation)
    )


def meant_approval(ledger: Ledger, operation: Operation) -> Approval | None:
    """The approval that is meant for the operation, in whatever state it is.

    The one it names; else the newest granted that names it; else the oldest granted for its kind that names
    no operation; else the newest of either sort in any state.
    """
    approvals: dict[str, Approval] = ledger.items["approval"]
    if operation.approval_id is not None:
        named = approvals.get(operation.approval_id)
        return named if named is not None and _concerns(named, operation) else None
    index = ledger.index
    if operation.id and (naming := index.granted.get(("operation", operation.id))):
        return approvals[naming[-1][-1]]
    if for_kind := index.granted.get(("action", operation.kind)):
        return approvals[for_kind[0][-1]]
    newest = max(
        (
            entry
            for entry in (
                index.approvals_of_operation.get(operation.id) if operation.id else None,
                None if operation.kind is None else index.approvals_of_kind.get(operation.kind),
            )
            if entry is not None
        ),
        default=None,
    )
    return None if newest is None else approvals[newest[1]]


def approval_standing(
    lane: Lane,
    runs: Mapping[str, Ledger],
    run: str,
    operation: Operation,
    *,
    now: datetime | None = None,
) -> Standing:
    """Whether the approval the operation needs, if it needs one, permits it. ``now`` only takes permission
    away."""
    if not needs_approval(lane, runs, run, operation):
        return Standing(None)
    approval = meant_approval(runs[run], operation)
    by_kind = kind_needs_approval(lane, runs, run, operation)
    fault = _fault(approval, operation, by_kind=by_kind, now=now)
    if fault is None:
        return Standing(approval)
    reason, clears_when = _WORDS[fault]
    return Standing(approval, fault, reason, _declared_anew(runs[run], operation, fault) or clears_when)


def _declared_anew(ledger: Ledger, operation: Operation, fault: AuthorizeCode) -> str | None:
    """What clears the fault where no word of an authority does: what an operation names is set once."""
    named = operation.approval_id
    if fault == "approval_pending" or (named is not None and named not in ledger.items["approval"]):
        return None
    hopeless = named is not None or (fault == "payload_mismatch" and operation.payload_digest is None)
    return "another operation is declared, with an approval that covers it" if hopeless else None


def _fault(
    approval: Approval | None, operation: Operation, *, by_kind: bool, now: datetime | None
) -> AuthorizeCode | None:
    """Why the approval does not permit the operation, or ``None`` where it does.

    ``by_kind``: the kind needs approval, so that a payload digest must be there.
    """
    if approval is None:
        return "approval_missing"
    if approval.state != "granted":
        return _CODE_OF_STATE[approval.state]
    if now is not None and is_over(approval, now):
        return "approval_expired"
    if approval.uses_left < 1:
        return "approval_consumed"
    if approval.payload_digest != operation.payload_digest:
        return "payload_mismatch"
    if operation.payload_digest is None and by_kind:
        return "payload_mismatch"
    return None


def is_over(approval: Approval, now: datetime) -> bool:
    """Whether its time has come; a moment that cannot be read counts as come. ``now`` carries its offset."""
    if approval.expires_at is None:
        return False
    try:
        return now >= datetime.fromisoformat(approval.expires_at)
    except (ValueError, TypeError, OverflowError):
        return True


def _concerns(approval: Approval, operation: Operation) -> bool:
    if approval.operation_id is not None:
        return bool(operation.id) and approval.operation_id == operation.id
    return approval.action == operation.kind
