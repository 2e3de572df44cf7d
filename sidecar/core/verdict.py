"""What an agent may do next with a run as it stands: one verdict, and every cause with what clears it.

Reads the family's ledgers alone, no clock: an approval whose time is over stands here until the ledger says so,
and ``authorize`` refuses it before. A verdict permits nothing; it says what comes first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

from protocol.handoff import PacketBlocker, Verdict
from sidecar.core import permission
from sidecar.core.family import line
from sidecar.core.protected import policy_of
from sidecar.core.state import Gap, Lane, Ledger, Operation

ORDER: Final[tuple[Verdict, ...]] = (
    "pause",
    "new_context",
    "reload_policy",
    "reconcile",
    "await_approval",
    "continue",
)
"""First that applies."""

CODES: Final[dict[str, Verdict]] = {
    "run_finished": "pause",
    "run_paused": "pause",
    "contract_missing": "pause",
    "child_not_spawned": "pause",
    "parent_unknown": "pause",
    "history_gap": "pause",
    "storage_unavailable": "pause",
    "protected_too_large": "pause",
    "context_changed": "new_context",
    "policy_stale": "reload_policy",
    "outcome_unknown": "reconcile",
    "approval_pending": "await_approval",
    "approval_missing": "await_approval",
    "approval_denied": "await_approval",
    "approval_expired": "await_approval",
    "approval_revoked": "await_approval",
    "approval_consumed": "await_approval",
    "payload_mismatch": "await_approval",
    "gap_open": "continue",
    "postponed": "continue",
    "artifact_missing": "continue",
    "work_blocked": "continue",
}
"""Every blocker's code and the verdict it asks for; ``continue``: worth knowing, stops nothing by itself."""

MOST_OF_A_CODE: Final = 20
"""Blockers shown of a code in ``_SHOWN_ELSEWHERE``; the rest is one blocker that counts them."""

_SHOWN_ELSEWHERE: Final = frozenset({"outcome_unknown", "artifact_missing"})
"""Causes whose items stand in the packet anyway; gaps, pauses and what the agent said stand only in its
blockers."""


_WAITS: Final = "the next action waits for it"
_DOES_NOTHING: Final = frozenset({"inspect", "ask_human", "reconcile", "finish", "stop"})
"""Verbs that do not do the operation they name: asking for an approval needs none."""


class Stop(NamedTuple):
    """A reason to pause that the ledger does not know: ``code`` of ``CODES``, our words, what ends it."""

    code: str
    text: str
    clears_when: str


STORAGE_UNAVAILABLE: Final = Stop(
    "storage_unavailable", "the run's state cannot be stored", "the sidecar can store again"
)
PROTECTED_TOO_LARGE: Final = Stop(
    "protected_too_large",
    "what must survive does not fit the context",
    "constraints, operations, approvals or questions are settled, or the window is larger",
)
POSTPONED: Final = Stop(
    "postponed",
    "what must survive hardly fits the context; operations labelled nonessential are postponed",
    "operations, approvals or questions are settled",
)


def blockers(
    lane: Lane,
    runs: Mapping[str, Ledger],
    run: str,
    *,
    stops: Collection[Stop] = (),
    missing_artifacts: Collection[str] = (),
    brief: bool = False,
) -> list[PacketBlocker]:
    """All causes in the order of ``CODES``; of unknown operations at most ``MOST_OF_A_CODE`` one by one.

    ``stops`` come from outside the ledger; ``missing_artifacts`` are ids of artifacts that history names
    and nobody saved, only counted where ``brief``. Raises KeyError when ``run`` is not in ``runs``.
    """
    found: dict[str, list[PacketBlocker]] = {code: [] for code in CODES}
    for blocker in (*_causes(lane, runs, run, stops), *_missing(missing_artifacts, brief)):
        found[blocker.code].append(blocker)
    return [blocker for of_code in found.values() for blocker in _bounded(of_code)]


def verdict(causes: Collection[PacketBlocker]) -> Verdict:
    """The first verdict of ``ORDER`` that a cause asks for."""
    asked = {CODES[blocker.code] for blocker in causes}
    return next(verdict for verdict in ORDER if verdict in asked or verdict == "continue")


def awaited_approval(lane: Lane, runs: Mapping[str, Ledger], run: str) -> PacketBlocker | None:
    """What the next action lacks of an approval, under the code ``authorize`` would give.

    Of the operation it names: any fault of its approval; while that is only not granted yet whatever the verb,
    else where the verb may do it. Of a ``wait`` that names none: the oldest pending approval.
    """
    ledger = runs[run]
    action = ledger.progress.next_action
    if action is None:
        return None
    if action.operation_id is None:
        pending = [item for item in ledger.active["approval"].values() if item.state == "pending"]
        if action.verb != "wait" or not pending:
            return None
        oldest = min(pending, key=lambda item: (item.position, item.id))
        return _blocker("approval_pending", f"approval:{oldest.id}", _WAITS, "an authority resolves it")
    operation = ledger.active["operation"].get(action.operation_id)
    if operation is None or operation.state != "not_started":
        return None
    standing = permission.approval_standing(lane, runs, run, operation)
    if standing.fault is None or (standing.fault != "approval_pending" and action.verb in _DOES_NOTHING):
        return None
    if standing.fault == "approval_pending":
        text, clears = _WAITS, "an authority resolves it"
    else:
        text, clears = f"the next action's operation may not be done: {standing.reason}", standing.clears_when
    about = f"operation:{operation.id}" if standing.approval is None else f"approval:{standing.approval.id}"
    return _blocker(standing.fault, about, text, clears)


def never_saved(count: int) -> PacketBlocker:
    """So many artifacts were named and never saved."""
    return _blocker(
        "artifact_missing", None, f"{count} artifacts were named but never saved", "artifact.saved"
    )


def _causes(
    lane: Lane, runs: Mapping[str, Ledger], run: str, stops: Collection[Stop]
) -> Iterator[PacketBlocker]:
    ledger = runs[run]
    head = ledger.head
    if head.finished is not None:
        yield _blocker(
            "run_finished", None, f"the run has finished: {head.finished}", "an authority reopens it"
        )
    for own_or_ancestor in line(runs, run):
        yield from _standstill(runs, run, own_or_ancestor)
    for stop in stops:
        yield _blocker(stop.code, None, stop.text, stop.clears_when)
    if head.context_changed_at > head.context_known_at:
        yield _blocker(
            "context_changed",
            None,
            "task, owner or trust was changed",
            "run.resumed with a ledger version at or after the change",
        )
    policy = policy_of(runs, run)
    if policy["released"] is not None and policy["released"] != policy["loaded"]:
        yield _blocker(
            "policy_stale",
            None,
            "the policy in force is not the one loaded",
            "policy.loaded or run.resumed with the released version",
        )
    for operation in sorted(ledger.active["operation"].values(), key=lambda item: item.id):
        if operation.state == "unknown":
            yield _unknown(operation)
    awaited = awaited_approval(lane, runs, run)
    if awaited is not None:
        yield awaited
    for note in sorted(ledger.progress.blockers, key=lambda item: item.id):
        yield _blocker("work_blocked", None, note.text, f"step.changed without the blocker {note.id}")


def _missing(artifacts: Collection[str], brief: bool) -> Iterator[PacketBlocker]:
    if brief and artifacts:
        yield never_saved(len(artifacts))
        return
    for artifact_id in sorted(artifacts):
        yield _blocker(
            "artifact_missing", f"artifact:{artifact_id}", "it was named but never saved", "artifact.saved"
        )


def _standstill(runs: Mapping[str, Ledger], run: str, ledger: Ledger) -> Iterator[PacketBlocker]:
    """Why nothing may be done, from the run's own ledger or an ancestor's: that stops its descendants too."""
    head = ledger.head
    whose = "" if head.run == run else f" (run {head.run}, an ancestor)"
    for pause in head.pauses:
        by = "an authority" if pause.by == "authority" else "the agent"
        clears = "an authority's run.resumed" if pause.by == "authority" else "run.resumed"
        yield _blocker("run_paused", None, f"paused by {by}{whose}: {pause.reason}", clears)
    if not head.started:
        yield _blocker("contract_missing", None, f"the run's beginning is not known{whose}", "run.started")
    if head.parent is not None and not head.spawned:
        yield _blocker("child_not_spawned", None, f"the parent run did not spawn it{whose}", "child.spawned")
    elif head.parent is not None and head.parent not in runs:
        yield _blocker(
            "parent_unknown", None, f"the parent run is not known here{whose}", "its messages are read"
        )
    for gap in sorted(
        ledger.active["gap"].values(), key=lambda item: (item.session or "", item.first, item.id)
    ):
        yield _gap(gap, whose)


def _gap(gap: Gap, whose: str) -> PacketBlocker:
    where = "the stream" if gap.session is None else f"session {gap.session}"
    text = f"messages {gap.first} to {gap.through} of {where} are missing{whose}"
    if gap.declared:
        return _blocker("history_gap", None, text, "they come, or an authority accepts the gap")
    return _blocker("gap_open", None, text, "they come; else the gap is declared")


def _unknown(operation: Operation) -> PacketBlocker:
    clears = (
        "an authority reconciles it" if operation.review else "operation.reconciled with an observed result"
    )
    return _blocker(
        "outcome_unknown", f"operation:{operation.id}", "nobody knows whether it happened", clears
    )


def _bounded(found: list[PacketBlocker]) -> list[PacketBlocker]:
    if len(found) <= MOST_OF_A_CODE or found[0].code not in _SHOWN_ELSEWHERE:
        return found
    more = len(found) - MOST_OF_A_CODE
    last = found[MOST_OF_A_CODE]
    return [
        *found[:MOST_OF_A_CODE],
        _blocker(last.code, None, f"and {more} more of this kind", last.clears_when),
    ]


def _blocker(code: str, ref: str | None, text: str, clears_when: str) -> PacketBlocker:
    return PacketBlocker(code=code, ref=ref, text=text, clears_when=clears_when)
