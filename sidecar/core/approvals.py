"""Approvals: asked for by the agent, resolved by an authority, used up by what they permit.

Nothing but a grant that repeats the request's action and payload digest ever makes one granted.
"""

from __future__ import annotations

from datetime import UTC, datetime

from msgspec.structs import replace

from protocol.events import ApprovalExpired, ApprovalRequested, ApprovalResolved
from sidecar.core.entry import Entry
from sidecar.core.state import Approval, EarlyResolution
from sidecar.core.transitions import APPROVAL


def requested(entry: Entry, event: ApprovalRequested) -> None:
    """A request. A resolution that came before it counts now if it equals it, and is forgotten if not."""
    ledger = entry.ledger
    if event.approval_id in ledger.items["approval"]:
        entry.violate("illegal_transition", _ref(event.approval_id))
        return
    approval = Approval(
        id=event.approval_id,
        action=event.action,
        scope=event.scope,
        payload_ref=event.payload_ref,
        payload_digest=event.payload_digest,
        operation_id=event.operation_id,
        expires_at=_moment(event.expires_at),
        position=entry.position,
    )
    ledger.put("approval", approval)
    early: EarlyResolution | None = ledger.items["early"].get(approval.id)
    if early is not None:
        ledger.drop("early", early.id)
        _resolve(entry, approval, early)


def resolved(entry: Entry, event: ApprovalResolved) -> None:
    """An authority's word; before its request it waits for that."""
    ledger = entry.ledger
    word = EarlyResolution(
        id=event.approval_id,
        outcome=event.outcome,
        by=event.by,
        action=event.action,
        payload_digest=event.payload_digest,
        expires_at=_moment(event.expires_at),
        uses=event.uses,
        position=entry.position,
    )
    approval: Approval | None = ledger.items["approval"].get(word.id)
    if approval is not None:
        _resolve(entry, approval, word)
        return
    before: EarlyResolution | None = ledger.items["early"].get(word.id)
    if before is None or (before.outcome, word.outcome) == ("granted", "revoked"):
        ledger.put("early", word)
    else:
        entry.violate("illegal_transition", _ref(word.id))


def expired(entry: Entry, event: ApprovalExpired) -> None:
    """The owner noticed that its time is over; nothing if it is settled."""
    approval: Approval | None = entry.ledger.items["approval"].get(event.approval_id)
    if approval is not None:
        state = APPROVAL.get((approval.state, "expired"))
        if state is not None:
            entry.ledger.put("approval", replace(approval, state=state))


def consume(entry: Entry, approval: Approval) -> None:
    """One use of a granted approval is over."""
    left = approval.uses_left - 1
    state = APPROVAL[approval.state, "used" if left > 0 else "used up"]
    entry.ledger.put("approval", replace(approval, uses_left=left, state=state))


def _resolve(entry: Entry, approval: Approval, word: EarlyResolution) -> None:
    equal = approval.action == word.action and approval.payload_digest == word.payload_digest
    state = APPROVAL.get((approval.state, word.outcome)) if equal else None
    if state is None:
        entry.violate("illegal_transition", _ref(approval.id))
        return
    changes: dict[str, object] = {"state": state, "by": word.by}
    if state == "granted":
        changes |= {
            "expires_at": word.expires_at if word.expires_at is not None else approval.expires_at,
            "uses_left": word.uses,
            "granted_at": entry.position,
        }
    entry.ledger.put("approval", replace(approval, **changes))


def _moment(moment: datetime | None) -> str | None:
    """RFC 3339 in UTC."""
    return None if moment is None else moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _ref(approval_id: str) -> str:
    return f"approval:{approval_id}"
