"""May this operation be done? The one place that answers, for questions and for the fold alike.

A pure function of the family's ledgers and the lane's settings. The clock of an answer, and the want of room for
what is not essential, only turn an ``ok`` into a refusal; the fold knows neither. Answering changes nothing; what
an ``ok`` reserves is for the fold.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Final

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from protocol.asks import AskAuthorize, AuthorizeCode, AuthorizeReply, OperationView
from protocol.errors import AskRefused
from protocol.handoff import May
from sidecar.core import family, permission, room
from sidecar.core.family import Holder
from sidecar.core.state import Approval, Lane, Ledger, Operation

_OF_STATE: Final[dict[str, AuthorizeCode]] = {
    "succeeded": "already_succeeded",
    "failed": "already_failed",
    "pending": "in_flight",
    "unknown": "outcome_unknown",
}
_KEY_HELD: Final = ("succeeded", "pending", "unknown")
"""States of another operation that hold the key, in the order of their codes. ``failed`` frees it."""

PREVENTING: Final[frozenset[AuthorizeCode]] = frozenset({"already_succeeded", "in_flight", "outcome_unknown"})
"""Refusals that keep an effect from happening twice."""

_REASON_OF_STATE: Final = {
    "succeeded": "it has succeeded already",
    "failed": "it has failed",
    "pending": "it is under way",
    "unknown": "nobody knows whether it happened",
}
_CLEARS_STATE: Final = {
    "succeeded": None,
    "failed": "a new operation is declared with the same key",
    "pending": "it is settled",
    "unknown": "operation.reconciled with an observed result",
}

_MAY: Final[dict[AuthorizeCode, May]] = {
    "ok": "dispatch",
    "history_gap": "wait",
    "in_flight": "wait",
    "outcome_unknown": "wait",
    "policy_stale": "wait",
    "approval_pending": "wait",
    "postponed": "wait",
}
"""What would be answered of an operation that has not started → what may be done; anything else: nothing."""


class Decision(Struct, frozen=True, kw_only=True):
    """One answer. ``allowed`` is true exactly for code ``ok``."""

    code: AuthorizeCode
    reason: str
    clears_when: str | None = None
    operation_id: str | None = None
    request_id: str | None = None
    reserved: bool = False
    """The operation is pending by this request, its approval consumed."""
    operation: Operation | None = None
    """The operation as it stands after this answer."""
    holder: Holder | None = None
    """Another operation of the family whose hold on the idempotency key is the reason."""
    approval: Approval | None = None
    """The approval that was meant, where one was needed."""
    invalid: bool = False
    """The request id belongs to another operation: an error ``invalid_request``, no answer."""

    @property
    def allowed(self) -> bool:
        return self.code == "ok"


def judge(
    lane: Lane,
    runs: Mapping[str, Ledger],
    run: str,
    operation: Operation | None,
    *,
    request_id: str | None = None,
    policy_version: str | None = None,
    now: datetime | None = None,
    postpone: bool = False,
) -> Decision:
    """The first code that applies to this operation of ``run``; ``None``: an operation the run does not know.

    An operation with an empty id is a candidate, not declared yet. ``request_id`` is the asker's;
    ``policy_version`` the one it works under, if it says. ``now`` (with its offset) and ``postpone`` (room is
    short) only refuse; the fold gives neither.
    """
    answer = _Answer(operation, request_id)
    ledger = runs.get(run)
    if operation is None or ledger is None:
        return answer.no("unknown_operation", "the run has no such operation", "operation.declared")
    if request_id is not None:
        if holds_reservation(operation, request_id):
            return answer.yes(reserved=True)
        if ledger.index.requests.get(request_id, operation.id) != operation.id:
            return answer.no("in_flight", "the request id belongs to another operation", None, invalid=True)
    return (
        _run_fault(answer, runs, run)
        or _state_fault(answer, runs, run, operation)
        or _rule_fault(answer, lane, runs, run, operation, policy_version)
        or _approval_fault(answer, lane, runs, run, operation, now, postpone)
    )


def look(
    lane: Lane,
    runs: Mapping[str, Ledger],
    run: str,
    ask: AskAuthorize,
    *,
    now: datetime | None = None,
    short: bool = False,
) -> Decision:
    """What ``authorize`` would say now, by operation id or by kind and key. Reserves nothing, ever.

    ``short``: room is short for a reason that no ledger knows, so that what is not essential is put off.
    """
    operation = _candidate(ask) if ask.operation_id is None else _known(runs, run, ask.operation_id)
    decision = judge(
        lane,
        runs,
        run,
        operation,
        policy_version=ask.policy_version,
        now=now,
        postpone=_postpones(lane, runs, run, operation, short),
    )
    return replace(decision, operation_id=ask.operation_id)


def before_act(
    lane: Lane,
    runs: Mapping[str, Ledger],
    run: str,
    ask: AskAuthorize,
    *,
    now: datetime | None = None,
    short: bool = False,
) -> Decision | None:
    """The answer to an act that needs no message of its own, or ``None``: publish, and let the fold decide.

    Answered at once are a retry whose reservation stands, and what only the answer may refuse: an approval
    whose time is over by the clock, and an operation that is postponed (``short`` as for ``look``). Everything
    else, refusals too, is the fold's. Raises AskRefused ``invalid_request`` where the request id belongs to
    another operation.
    """
    operation = None if ask.operation_id is None else _known(runs, run, ask.operation_id)
    decision = judge(
        lane,
        runs,
        run,
        operation,
        request_id=ask.request_id,
        policy_version=ask.policy_version,
        now=now,
        postpone=_postpones(lane, runs, run, operation, short),
    )
    if decision.invalid:
        raise AskRefused("invalid_request", decision.reason)
    if decision.reserved or decision.code in ("postponed", "approval_expired"):
        return replace(decision, operation_id=ask.operation_id)
    return None


def may(
    lane: Lane,
    runs: Mapping[str, Ledger],
    run: str,
    operation: Operation,
    *,
    paused: bool,
    postpone: bool,
    now: datetime | None = None,
) -> May:
    """What may be done with an operation now. ``paused``: the verdict is ``pause``; the rest as for ``judge``."""
    if paused or not operation.live:
        return "none"
    if operation.state == "unknown":
        return "reconcile"
    if operation.state == "pending" or operation.id in runs[run].index.calls_of_operation:
        return "wait"
    return _MAY.get(judge(lane, runs, run, operation, now=now, postpone=postpone).code, "none")


def reply(decision: Decision, *, epoch: int, version: int) -> AuthorizeReply:
    """The decision as it goes out. ``version`` is the ledger version it was taken at.

    Raises AskRefused ``invalid_request`` for an ``invalid`` one.
    """
    if decision.invalid:
        raise AskRefused("invalid_request", decision.reason)
    return AuthorizeReply(
        epoch=epoch,
        allowed=decision.allowed,
        code=decision.code,
        reason=decision.reason,
        clears_when=UNSET if decision.clears_when is None else decision.clears_when,
        operation=_view(decision),
        reserved=decision.reserved,
        ledger_version=version,
    )


def holds_reservation(operation: Operation, request_id: str) -> bool:
    """Whether the operation is pending by this request and nothing says that it went out yet.

    Once a dispatch was seen the ``ok`` is spent: saying it again could repeat the effect.
    """
    return operation.state == "pending" and operation.request_id == request_id and not operation.dispatched


class _Answer:
    """Makes decisions about one operation."""

    def __init__(self, operation: Operation | None, request_id: str | None) -> None:
        self._operation = operation
        self._request_id = request_id

    def no(
        self,
        code: AuthorizeCode,
        reason: str,
        clears_when: str | None,
        *,
        holder: Holder | None = None,
        approval: Approval | None = None,
        invalid: bool = False,
    ) -> Decision:
        return Decision(
            code=code,
            reason=reason,
            clears_when=clears_when,
            operation_id=(self._operation.id or None) if self._operation is not None else None,
            request_id=self._request_id,
            operation=self._operation,
            holder=holder,
            approval=approval,
            invalid=invalid,
        )

    def yes(self, *, reserved: bool = False, approval: Approval | None = None) -> Decision:
        assert self._operation is not None
        return Decision(
            code="ok",
            reason="nothing stands against it",
            operation_id=self._operation.id or None,
            request_id=self._request_id,
            reserved=reserved,
            operation=self._operation,
            approval=approval,
        )


def _run_fault(answer: _Answer, runs: Mapping[str, Ledger], run: str) -> Decision | None:
    finished = runs[run].head.finished
    if finished is not None:
        return answer.no("run_finished", f"the run has finished: {finished}", "an authority's run.resumed")
    stop = family.stop(runs, run)
    if stop is not None:
        return answer.no("run_paused", stop.text, stop.clears_when)
    missing = family.open_gap(runs, run)
    if missing is not None:
        whose, gap = missing
        where = "the stream" if gap.session is None else f"session {gap.session}"
        text = f"messages {gap.first} to {gap.through} of {where} of run {whose} are missing"
        return answer.no("history_gap", text, "they come, or an authority accepts the gap")
    return None


def _state_fault(
    answer: _Answer, runs: Mapping[str, Ledger], run: str, operation: Operation
) -> Decision | None:
    code = _OF_STATE.get(operation.state)
    if code is not None:
        clears = _CLEARS_STATE[operation.state]
        if operation.state == "unknown" and operation.review:
            clears = "an authority's operation.reconciled"
        return answer.no(code, _REASON_OF_STATE[operation.state], clears)
    if operation.idempotency_key is None:
        return None
    for state in _KEY_HELD:
        holder = family.holder(runs, run, operation, state)
        if holder is not None:
            which = f"operation {holder.operation.id} of run {holder.run} has the same key: "
            return answer.no(
                _OF_STATE[state], which + _REASON_OF_STATE[state], _CLEARS_STATE[state], holder=holder
            )
    return None


def _rule_fault(
    answer: _Answer,
    lane: Lane,
    runs: Mapping[str, Ledger],
    run: str,
    operation: Operation,
    policy_version: str | None,
) -> Decision | None:
    ledger = runs[run]
    released = family.released(runs, run)
    if released is not None:
        loads = "policy.loaded or run.resumed with the released version"
        if ledger.policy.loaded != released:
            return answer.no("policy_stale", "the policy loaded is not the one released", loads)
        if policy_version is not None and policy_version != released:
            return answer.no("policy_stale", "the asker's policy is not the one released", loads)
    beyond = permission.beyond_scope(ledger, operation)
    if beyond is not None:
        return answer.no("out_of_scope", f"the scope does not hold {beyond}", None)
    if permission.kind_is_forbidden(lane, runs, run, operation):
        return answer.no("constraint_forbids", "policy forbids its kind", "another policy is released")
    constraint = permission.forbidding(runs, run, operation)
    if constraint is not None:
        return answer.no(
            "constraint_forbids",
            f"constraint {constraint.id} forbids it",
            f"constraint {constraint.id} is lifted or replaced",
        )
    return None


def _approval_fault(
    answer: _Answer,
    lane: Lane,
    runs: Mapping[str, Ledger],
    run: str,
    operation: Operation,
    now: datetime | None,
    postpone: bool,
) -> Decision:
    standing = permission.approval_standing(lane, runs, run, operation, now=now)
    if standing.fault is not None:
        return answer.no(standing.fault, standing.reason, standing.clears_when, approval=standing.approval)
    if postpone and operation.nonessential:
        return answer.no("postponed", "it is nonessential and room is short", "more room in the context")
    return answer.yes(approval=standing.approval)


def _known(runs: Mapping[str, Ledger], run: str, operation_id: str) -> Operation | None:
    ledger = runs.get(run)
    return None if ledger is None else ledger.items["operation"].get(operation_id)


def _postpones(
    lane: Lane, runs: Mapping[str, Ledger], run: str, operation: Operation | None, short: bool
) -> bool:
    """Whether the operation is one to be put off, and room is short."""
    if operation is None or not is_put_off(operation):
        return False
    return short or room.fit_of(lane, runs, run) != "fits"


def is_put_off(operation: Operation) -> bool:
    """Whether it waits while room is short."""
    return operation.nonessential and operation.state == "not_started"


def _candidate(ask: AskAuthorize) -> Operation:
    return Operation(
        id="",
        kind=ask.kind,
        idempotency_key=ask.idempotency_key,
        target=ask.target,
        tool=ask.tool,
        approval_id=ask.approval_id,
        payload_digest=ask.payload_digest,
    )


def _view(decision: Decision) -> OperationView | UnsetType:
    """The operation the answer is about: the one that holds the key, else the one asked for."""
    operation = decision.operation if decision.holder is None else decision.holder.operation
    if operation is None or not operation.id:
        return UNSET
    return OperationView(
        id=operation.id,
        kind=operation.kind or "",
        idempotency_key=operation.idempotency_key or "",
        state=operation.state,
        run=UNSET if decision.holder is None else decision.holder.run,
        target=UNSET if operation.target is None else operation.target,
        approval_id=UNSET if operation.approval_id is None else operation.approval_id,
        receipt=UNSET if operation.receipt is None else operation.receipt,
    )
