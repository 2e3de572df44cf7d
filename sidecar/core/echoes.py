"""A candidate's echoes of the ledger, compared with the ledger at the handoff.

An echo may never say more than the ledger: whatever is missing, or claimed beyond it, rejects the candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from protocol.content import NextAction
from protocol.identifiers import parse_ref
from protocol.summary import Summary
from sidecar.core.permission import forbids
from sidecar.core.state import Ledger

_LIVE_OPERATIONS = frozenset({"not_started", "pending", "unknown"})
_LIVE_APPROVALS = frozenset({"pending", "granted"})


class Echoes:
    """The echo checks of one candidate. ``text_of``: the text a ref leads to, or None."""

    def __init__(
        self, ledger: Ledger, protected: Mapping[str, Any], text_of: Callable[[str], str | None]
    ) -> None:
        self._ledger = ledger
        self._protected = protected
        self._text_of = text_of

    def check(self, candidate: Summary) -> list[str]:
        """The codes that the echoes violate; each of them rejects."""
        return [
            *self._references(candidate),
            *self._questions(candidate),
            *self._operations(candidate.operations),
            *self._approvals(candidate.approvals),
            *self._direction(candidate),
            *self._contradictions(candidate),
        ]

    def with_ledger_states(self, candidate: Summary) -> Summary:
        """The same with the ledger's own states, each ref once; what the ledger does not know is left out."""
        get = self._ledger.get
        operations = {name: get("operation", name) for name in candidate.operations}
        approvals = {name: get("approval", name) for name in candidate.approvals}
        return msgspec.structs.replace(
            candidate,
            operations={name: item.state for name, item in operations.items() if item is not None},
            approvals={name: item.state for name, item in approvals.items() if item is not None},
            accepted_decisions=tuple(dict.fromkeys(candidate.accepted_decisions)),
            open_questions=tuple(dict.fromkeys(candidate.open_questions)),
            evidence_refs=tuple(dict.fromkeys(candidate.evidence_refs)),
            pending_action_refs=tuple(dict.fromkeys(candidate.pending_action_refs)),
            contradictions=tuple(dict.fromkeys(candidate.contradictions)),
        )

    def _references(self, candidate: Summary) -> Iterator[str]:
        refs = [(ref, "decision") for ref in candidate.accepted_decisions]
        refs += [(ref, "question") for ref in candidate.open_questions]
        refs += [(ref, "evidence") for ref in candidate.evidence_refs]
        refs += [(ref, "evidence") for pair in candidate.contradictions for ref in pair]
        lost = any(not self._leads_to(ref, kind) for ref, kind in refs)
        if lost or any(self._text_of(ref) is None for ref in candidate.pending_action_refs):
            yield "unknown_reference"

    def _leads_to(self, ref: str, kind: str) -> bool:
        try:
            parsed = parse_ref(ref)
        except ValueError:
            return False
        return parsed.kind == kind and self._text_of(ref) is not None

    def _questions(self, candidate: Summary) -> Iterator[str]:
        echoed = set(candidate.open_questions)
        if any(f"question:{item['id']}" not in echoed for item in self._protected["questions"]):
            yield "question_dropped"

    def _operations(self, echoed: Mapping[str, str]) -> Iterator[str]:
        for item in self._protected["operations"]:
            if item["state"] in _LIVE_OPERATIONS and item["id"] not in echoed:
                yield "operation_dropped"
        for name, state in echoed.items():
            operation = self._ledger.get("operation", name)
            if operation is None:
                yield "unknown_reference"
            elif state not in (operation.state, "unknown"):
                # Any other difference claims more than is known or offers again what was done.
                yield "operation_promoted"

    def _approvals(self, echoed: Mapping[str, str]) -> Iterator[str]:
        for item in self._protected["approvals"]:
            if item["state"] in _LIVE_APPROVALS and item["id"] not in echoed:
                yield "approval_dropped"
        for name, state in echoed.items():
            approval = self._ledger.get("approval", name)
            if approval is None:
                yield "unknown_reference"
            elif _strength(state) > _strength(approval.state):
                yield "approval_promoted"
            elif _strength(state) == 0 < _strength(approval.state):
                # Said to be settled, it would leave the open matters.
                yield "approval_dropped"

    def _direction(self, candidate: Summary) -> Iterator[str]:
        if candidate.objective.split() != str(self._protected["task"]["goal"]).split():
            yield "objective_changed"
        if _named(candidate.next_action) != _named(ledger_action(self._protected)):
            yield "next_action_changed"

    def _contradictions(self, candidate: Summary) -> Iterator[str]:
        told = {frozenset(pair) for pair in candidate.contradictions}
        if any(frozenset(pair) not in told for pair in self._protected["contradictions"]):
            yield "contradiction_hidden"


def ledger_action(protected: Mapping[str, Any]) -> NextAction | None:
    """The ledger's next action."""
    action = protected["progress"]["next_action"]
    return None if action is None else msgspec.convert(action, NextAction)


def is_forbidden(ledger: Ledger, operation_id: str | None) -> bool:
    """Whether an active constraint forbids a known operation of the run."""
    operation = None if operation_id is None else ledger.get("operation", operation_id)
    if operation is None:
        return False
    return any(
        constraint.forbids is not None and forbids(constraint.forbids, operation)
        for constraint in ledger.active["constraint"].values()
    )


def _named(action: NextAction | None) -> tuple[str, str | None] | None:
    return None if action is None else (action.verb, action.operation_id)


def _strength(state: str) -> int:
    """How much an approval in this state allows; a word that is no state claims the most."""
    return {"denied": 0, "expired": 0, "revoked": 0, "consumed": 0, "pending": 1, "granted": 2}.get(state, 3)
