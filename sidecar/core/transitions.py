"""The state machines of the ledger, as tables: ``(state, what happens) → new state``.

A missing key is an illegal transition: it is recorded and changes nothing. The one exception is
``OPERATION_EVIDENCE``: evidence that an operation ran counts even where the machine has no such step, and is
recorded as illegal all the same. Nothing here reads or changes a ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

Table = Mapping[tuple[str, str], str]

RUN: Final[Table] = {
    ("running", "run.finished"): "finished",
    ("finished", "run.resumed by an authority"): "running",
}

CONSTRAINT: Final[Table] = {
    ("active", "replaced"): "replaced",
    ("active", "lifted"): "lifted",
}

DECISION: Final[Table] = {("in_force", "superseded"): "superseded"}

QUESTION: Final[Table] = {("open", "answered"): "answered"}

OPERATION: Final[Table] = {
    ("not_started", "authorized"): "pending",
    ("not_started", "dispatched"): "pending",
    ("pending", "dispatched"): "pending",
    ("pending", "said succeeded"): "succeeded",
    ("pending", "said failed"): "failed",
    ("pending", "said unknown"): "unknown",
    ("pending", "call lost"): "unknown",
    ("pending", "given up"): "unknown",
    ("unknown", "said unknown"): "unknown",
    ("unknown", "call lost"): "unknown",
    ("unknown", "given up"): "unknown",
    ("unknown", "reconciled succeeded"): "succeeded",
    ("unknown", "reconciled failed"): "failed",
    ("unknown", "reconciled review"): "unknown",
    ("not_started", "given up"): "not_started",
    ("succeeded", "given up"): "succeeded",
    ("failed", "given up"): "failed",
    ("succeeded", "call lost"): "succeeded",
}
"""``call lost``: a call of it timed out or was cancelled. ``given up``: the owner's ``operation.timed_out``,
or a call of it was abandoned. ``authorized``: an ``ok``, or a dispatch that would have got one."""

OPERATION_EVIDENCE: Final[Table] = {
    ("not_started", "said succeeded"): "succeeded",
    ("not_started", "said failed"): "unknown",
    ("not_started", "said unknown"): "unknown",
    ("not_started", "call lost"): "unknown",
    ("not_started", "reconciled succeeded"): "succeeded",
    ("not_started", "reconciled failed"): "unknown",
    ("not_started", "reconciled review"): "unknown",
    ("failed", "dispatched"): "unknown",
    ("failed", "said succeeded"): "unknown",
    ("failed", "said unknown"): "unknown",
    ("failed", "call lost"): "unknown",
    ("failed", "reconciled succeeded"): "unknown",
}
"""Illegal, recorded as such, and yet they count: what may have run must never look as if it had not. A failed
operation has freed its idempotency key; a sign that it ran after all takes the key back."""

APPROVAL: Final[Table] = {
    ("pending", "granted"): "granted",
    ("pending", "denied"): "denied",
    ("pending", "revoked"): "revoked",
    ("pending", "expired"): "expired",
    ("granted", "revoked"): "revoked",
    ("granted", "expired"): "expired",
    ("granted", "used"): "granted",
    ("granted", "used up"): "consumed",
}

CALL: Final[Table] = {
    ("open", "interim result"): "open",
    ("open", "final result"): "closed",
    ("open", "abandoned"): "abandoned",
    ("abandoned", "final result"): "closed",
}

ARTIFACT: Final[Table] = {
    ("saved", "newer version"): "superseded",
    ("saved", "withdrawn"): "withdrawn",
    ("superseded", "withdrawn"): "withdrawn",
}

CHILD: Final[Table] = {
    ("running", "succeeded"): "succeeded",
    ("running", "failed"): "failed",
    ("running", "cancelled"): "cancelled",
}

TABLES: Final[Mapping[str, Table]] = {
    "Run": RUN,
    "Constraint": CONSTRAINT,
    "Decision": DECISION,
    "Question": QUESTION,
    "Operation": OPERATION,
    "Operation, against the rules": OPERATION_EVIDENCE,
    "Approval": APPROVAL,
    "Call": CALL,
    "Artifact": ARTIFACT,
    "Child": CHILD,
}


def render() -> str:
    """All tables as Markdown, one heading and one table each, ending in a newline."""
    parts: list[str] = []
    for title, table in TABLES.items():
        rows = "".join(f"| {state} | {happens} | {new} |\n" for (state, happens), new in table.items())
        parts.append(f"### {title}\n\n| state | what happens | new state |\n|---|---|---|\n{rows}")
    return "\n".join(parts)
