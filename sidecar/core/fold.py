"""The fold: one message more, and the ledger is what it is then.

The only writer of ledgers, and a pure function of the messages of a family in stream order: it reads no
clock, no summary, no packet and no budget. It never raises for a message that ``protocol.codec`` decodes. One
that it refuses changes nothing but the counters of what came (numbers of the session, violations).
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, Final

from protocol import events as wire
from protocol.events import AUTHORITY_ONLY_TYPES, EVENT_TYPES, RECORD_TYPES, Event, SettingsApplied, type_of
from sidecar.core import approvals, calls, children, contract, family, operations, sessions, turns, work
from sidecar.core.entry import RUN_VIOLATIONS, Entry, Origin, Outcome, Violation, count_violation
from sidecar.core.state import Channel, Gap, Head, Lane, Ledger

__all__ = [
    "RUN_VIOLATIONS",
    "Origin",
    "Outcome",
    "Violation",
    "fold",
    "fold_settings",
    "note_rejected",
    "touches",
]

Rule = Callable[[Entry, Any], None]


def _nothing(entry: Entry, event: Event) -> None:
    """Kept and counted; the ledger has no use for it."""


def _dispatched(entry: Entry, event: wire.OperationDispatched) -> None:
    operations.ran(entry, event.operation_id, by_call=False)


def _timed_out(entry: Entry, event: wire.OperationTimedOut) -> None:
    if event.operation_id in entry.ledger.items["operation"]:
        operations.given_up(entry, event.operation_id)


_RULES: Final[dict[type[Event], Rule]] = {
    wire.RunStarted: contract.started,
    wire.RunPaused: contract.paused,
    wire.RunFinished: contract.finished,
    wire.RunResumed: contract.resumed,
    wire.ContextReplaced: _nothing,
    wire.TaskChanged: contract.task_changed,
    wire.ModelChanged: work.model_changed,
    wire.Message: turns.said,
    wire.ToolCalled: calls.called,
    wire.ToolReturned: calls.returned,
    wire.UsageReported: _nothing,
    wire.StepChanged: work.step_changed,
    wire.InputPinned: work.input_pinned,
    wire.ConstraintSet: contract.constraint_set,
    wire.ConstraintLifted: contract.constraint_lifted,
    wire.DecisionMade: work.decided,
    wire.QuestionOpened: work.asked,
    wire.QuestionAnswered: work.answered,
    wire.OperationDeclared: operations.declared,
    wire.OperationDispatched: _dispatched,
    wire.OperationSettled: operations.settled,
    wire.OperationReconciled: operations.reconciled,
    wire.ApprovalRequested: approvals.requested,
    wire.ApprovalResolved: approvals.resolved,
    wire.ArtifactSaved: work.artifact_saved,
    wire.ArtifactWithdrawn: work.artifact_withdrawn,
    wire.EvidenceRecorded: work.observed,
    wire.PolicyReleased: contract.policy_released,
    wire.PolicyLoaded: contract.policy_loaded,
    wire.BoundaryMarked: turns.marked,
    wire.ChildSpawned: children.spawned,
    wire.ChildReturned: children.returned,
    wire.GapAccepted: sessions.accept_gap,
    wire.SettingsApplied: _nothing,
    wire.AuthorizationRequested: operations.authorization,
    wire.ApprovalExpired: approvals.expired,
    wire.OperationTimedOut: _timed_out,
    wire.CallAbandoned: calls.abandoned,
    wire.GapDeclared: sessions.declare_gap,
}

_RECORDS: Final = frozenset(EVENT_TYPES[name] for name in RECORD_TYPES)
_RESERVED: Final = frozenset(
    {*(EVENT_TYPES[name] for name in AUTHORITY_ONLY_TYPES), wire.ConstraintLifted, wire.ConstraintSet}
)
"""What may be refused to an agent."""
_RESTRICTED: Final = _RECORDS | _RESERVED
"""What is not for everybody to say."""
_TOUCHING: Final[frozenset[type[Event]]] = frozenset({wire.ChildSpawned, wire.ChildReturned, wire.RunStarted})
_EVIDENCE: Final[frozenset[type[Event]]] = frozenset(
    {
        wire.ToolCalled,
        wire.ToolReturned,
        wire.OperationDispatched,
        wire.OperationSettled,
        wire.OperationReconciled,
    }
)
"""What another session may still say: that an operation ran."""


def fold(lane: Lane, runs: MutableMapping[str, Ledger], run: str, event: Event, origin: Origin) -> Outcome:
    """Fold one message into ``runs[run]``, which is made if it is not there, and into relatives it concerns.

    ``runs`` must hold the whole families of ``run`` and of ``touches(event)``, as far as they have messages.
    Duplicates are the caller's to keep out. A record's epoch raises ``lane.epoch``; a lower one is ignored,
    which still counts as a message of the run.
    """
    ledger, channel = runs.get(run), origin.channel
    if channel == "record" or type(event) in _RESTRICTED:
        refusal = _refusal(lane, ledger, event, channel)
        if refusal is not None:
            return _refused(ledger, run, event, channel, refusal)
    if ledger is None:
        ledger = runs[run] = Ledger(Head(run=run))
    head = ledger.head
    before = family.handed_down(ledger)
    head.version += 1
    if channel != "record":
        head.position += 1
    entry = Entry(lane, runs, run, event, origin)
    if channel == "record":
        _record(entry)
    else:
        _message(entry)
    if before is not None:
        entry.outcome.handed_down = before != family.handed_down(ledger)
    return entry.outcome


def fold_settings(lane: Lane, event: SettingsApplied) -> bool:
    """Apply a ``settings.applied`` of the lane; false, and nothing changed, if a higher epoch was seen."""
    if not _epoch_counts(lane, event):
        return False
    lane.settings = event.settings
    lane.settled = True
    return True


def touches(event: Event) -> tuple[str, ...]:
    """Other runs whose families must be at hand to fold this message."""
    if type(event) not in _TOUCHING:
        return ()
    match event:
        case wire.ChildSpawned() | wire.ChildReturned():
            return (event.child_run,)
        case wire.RunStarted(parent_run=str(parent)):
            return (parent,)
        case _:
            return ()


def note_rejected(
    ledger: Ledger,
    code: str,
    *,
    channel: Channel | None = None,
    session: str | None = None,
    seq: int | None = None,
) -> Violation | None:
    """Take note of a message that was rejected before the fold: its code, if a violation of the run, counts.

    With ``channel``, ``session`` and ``seq`` its number counts as come, so that a message which was refused and
    answered does not look like one that was lost.
    """
    if channel in ("event", "authority") and session is not None and seq is not None and seq > 0:
        _, gap = sessions.note_number(ledger, channel, session, seq)
        if gap is not None:
            count_violation(ledger.head, "history_gap")
    if code not in RUN_VIOLATIONS:
        return None
    count_violation(ledger.head, code)
    return Violation(code)


def _refusal(lane: Lane, ledger: Ledger | None, event: Event, channel: Channel) -> str | None:
    """Why the sender may not say this at all, or ``None``."""
    kind = type(event)
    if (kind in _RECORDS) != (channel == "record"):
        return f"{type_of(event)} does not belong on the channel {channel}"
    if kind not in _RESERVED or channel != "event" or not lane.settings.authority_required:
        return None
    if type_of(event) in AUTHORITY_ONLY_TYPES:
        return f"{type_of(event)} counts from an authority only"
    if ledger is not None:
        return contract.refusal(ledger, event)
    if isinstance(event, wire.ConstraintLifted):
        return contract.refusal(_NO_LEDGER, event)
    return None


def _refused(ledger: Ledger | None, run: str, event: Event, channel: Channel, detail: str) -> Outcome:
    outcome = Outcome(rejection=("not_authorized", detail))
    code = "not_authorized"
    if channel == "event" and isinstance(event, wire.ApprovalResolved):
        code = "self_approval"
        outcome.violations.append(Violation(code, (f"approval:{event.approval_id}",)))
    if ledger is None:
        return outcome
    note_rejected(
        ledger,
        code,
        channel=channel,
        session=event.session,
        seq=event.seq,
    )
    outcome.touched.add(run)
    return outcome


def _message(entry: Entry) -> None:
    """A message of the agent or of an authority."""
    event, head = entry.event, entry.head
    arrival, gap = sessions.arrive(entry.ledger, event, entry.channel)
    foreign = sessions.is_foreign(entry.ledger, event, entry.channel)
    if foreign or arrival != "next":
        _take_note(entry, arrival, gap, foreign=foreign)
    if entry.channel == "event":
        head.last_event_id = event.id
        if head.session is None and type(event) not in sessions.BEGINS:
            head.session = event.session
    if not foreign or type(event) in _EVIDENCE:
        _RULES[type(event)](entry, event)


def _take_note(entry: Entry, arrival: sessions.Arrival, gap: Gap | None, *, foreign: bool) -> None:
    """What is not usual about the coming of a message."""
    outcome = entry.outcome
    outcome.late = entry.late = arrival == "late"
    outcome.foreign = entry.foreign = foreign
    if gap is not None:
        outcome.gaps.append(gap)
        entry.violate("history_gap")
    if arrival == "late":
        entry.violate("late_event")
    elif arrival == "twice":
        entry.violate("sequence_conflict")
    if foreign:
        entry.violate("foreign_session")


def _record(entry: Entry) -> None:
    """A message of the lane's owner, or of a former one."""
    if not _epoch_counts(entry.lane, entry.event):
        entry.outcome.ignored = True
        return
    _RULES[type(entry.event)](entry, entry.event)


def _epoch_counts(lane: Lane, event: Event) -> bool:
    """Whether no higher epoch was seen before; a record without one has the lowest."""
    epoch = event.epoch or 0
    if epoch < lane.epoch:
        return False
    lane.epoch = epoch
    return True


_NO_LEDGER: Final = Ledger(Head(run=""))
