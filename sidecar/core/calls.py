"""Tool calls and their results: which are open, which nobody will answer, which result shows something.

A result settles no operation. One that says the call timed out or was cancelled makes its operation's outcome
unknown.
"""

from __future__ import annotations

from msgspec.structs import replace

from protocol.events import CallAbandoned, ToolCalled, ToolReturned
from sidecar.core import operations
from sidecar.core.entry import Entry
from sidecar.core.state import Call, ToolResult
from sidecar.core.transitions import CALL

ABANDONED_KEPT = 200
"""Abandoned calls a ledger remembers; the oldest are forgotten first."""
RESULTS_KEPT = 500
"""Results that may reconcile an operation; the oldest are forgotten first."""
RESULTS_NAMED = 32
"""Newest results whose place is known even while nothing is unsettled."""


def called(entry: Entry, event: ToolCalled) -> None:
    """A call goes out. An id that is open already is a violation, and the newer call is open too."""
    if event.operation_id is not None:
        operations.ran(entry, event.operation_id, by_call=True)
    if entry.foreign:
        return
    ledger = entry.ledger
    if ledger.indexed.open_calls.get(event.call_id):
        entry.violate("duplicate_call", entry.ref)
    ledger.put(
        "call",
        Call(
            id=entry.free_key("call"),
            call_id=event.call_id,
            tool=event.tool,
            operation_id=event.operation_id,
            repeatable=event.repeatable,
            session=ledger.head.session if entry.channel == "event" else None,
            position=entry.position,
        ),
    )
    entry.head.turn = "call"


def returned(entry: Entry, event: ToolReturned) -> None:
    """A result closes the newest open call of its id; ``pending`` is interim and closes none.

    Another session's result moves nothing, but the call it belongs to may be looked up by it later.
    """
    if entry.channel == "event":
        named = (event.id, 0 if entry.late else entry.position)
        head = entry.head
        head.results = (*head.results[1 - RESULTS_NAMED :], named)
    call = _newest(entry, event.call_id, "open")
    if entry.foreign:
        left = _newest(entry, event.call_id, "abandoned")
        if left is not None and left.session == event.session and event.status in ("ok", "error"):
            _remember(entry, left.operation_id)
        return
    entry.head.turn = "result"
    if call is None:
        entry.violate("orphan_result", entry.ref)
    if event.status == "pending":
        return
    if call is None:
        call = _newest(entry, event.call_id, "abandoned")
        if call is None:
            return
    if (call.state, "final result") in CALL:
        entry.ledger.drop("call", call.id)
    if event.status in ("timeout", "cancelled"):
        if call.operation_id is not None:
            operations.call_lost(entry, call.operation_id)
    else:
        _remember(entry, call.operation_id)


def abandoned(entry: Entry, event: CallAbandoned) -> None:
    """The owner's word that a call gets no result any more; nothing if it is not open."""
    call = entry.ledger.items["call"].get(event.event_id)
    if call is not None and call.call_id == event.call_id and (call.state, "abandoned") in CALL:
        _abandon(entry, call)


def abandon_others(entry: Entry, session: str) -> None:
    """Every open call of another session is abandoned."""
    left = [
        call
        for call in entry.ledger.items["call"].values()
        if (call.state, "abandoned") in CALL and call.session != session
    ]
    for call in sorted(left, key=lambda call: (call.position, call.id)):
        _abandon(entry, call)


def any_open(entry: Entry) -> bool:
    """Whether a call has no final result yet."""
    return bool(entry.ledger.indexed.open_calls)


def _abandon(entry: Entry, call: Call) -> None:
    ledger = entry.ledger
    ledger.put("call", replace(call, state="abandoned"))
    if call.operation_id is not None:
        operations.given_up(entry, call.operation_id)
    left = [call for call in ledger.items["call"].values() if call.state == "abandoned"]
    for oldest in sorted(left, key=lambda call: (call.position, call.id))[:-ABANDONED_KEPT]:
        ledger.drop("call", oldest.id)


def _newest(entry: Entry, call_id: str, state: str) -> Call | None:
    calls = entry.ledger.items["call"]
    found: list[Call]
    if state == "open":
        keys = entry.ledger.indexed.open_calls.get(call_id, ())
        if len(keys) == 1:
            return calls[keys[0]]  # type: ignore[no-any-return]
        found = [calls[key] for key in keys]
    else:
        found = [call for call in calls.values() if call.call_id == call_id and call.state == state]
    return max(found, key=lambda call: (call.position, call.id), default=None)


def _remember(entry: Entry, operation_id: str | None) -> None:
    """Keep a result while it may reconcile an operation. A late one proves no order and is not kept."""
    ledger = entry.ledger
    if entry.late or not ledger.indexed.unsettled:
        return
    result = ToolResult(id=entry.free_key("result"), position=entry.position, operation_id=operation_id)
    ledger.put("result", result)
    results = ledger.items["result"]
    if len(results) > RESULTS_KEPT:
        ledger.drop("result", min(results.values(), key=lambda item: (item.position, item.id)).id)
