"""Every outbound message: resume packet, receipt, notice, rejection, lane epoch.

Shapes with the fields of the wire in their order, and nothing that decides what stands in them. A field the
wire marks optional is ``UNSET`` and left out; one that is always there but may have nothing to say is None.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from protocol.content import (
    Count,
    Focus,
    Forbids,
    InputRef,
    NextAction,
    Ordinal,
    PlanItem,
    RejectedAlternative,
    Scalar,
    Scope,
    Source,
)
from protocol.errors import RejectionCode
from protocol.summary import Range, Statement

Instant = Annotated[datetime, Meta(tz=True)]

SummaryText = Statement
"""A statement of a packet: ``text`` and ``refs``."""

Level = Literal["ok", "checkpoint", "compact", "critical", "overflow"]
Verdict = Literal["pause", "new_context", "reload_policy", "reconcile", "await_approval", "continue"]
PacketReason = Literal["compacted", "trimmed", "checkpoint", "changed", "paused", "takeover", "asked"]
OperationState = Literal["not_started", "pending", "succeeded", "failed", "unknown"]
May = Literal["dispatch", "wait", "reconcile", "none"]
ApprovalState = Literal["pending", "granted", "denied", "expired", "revoked", "consumed"]
OmittedClass = Literal["reference", "summarise", "drop", "settled"]
Trigger = Literal["threshold", "critical", "overflow", "requested", "model_changed"]
ReceiptOutcome = Literal["applied", "shadow", "failed", "stale", "skipped"]
FailureReason = Literal[
    "timeout",
    "refused",
    "truncated",
    "echo",
    "invalid",
    "unavailable",
    "rate_limited",
    "interrupted",
    "storage",
]
DeferReason = Literal[
    "no_boundary",
    "in_flight",
    "open_gap",
    "artifact_unsaved",
    "little_new",
    "cool_down",
    "breaker",
    "not_applied",
    "mode",
]
NoticeKind = Literal[
    "level_changed",
    "compaction_started",
    "compaction_deferred",
    "ineffective",
    "not_applied",
    "choice",
    "violation",
    "operation_unknown",
    "history_gap",
]


class Projector(Struct, frozen=True, kw_only=True):
    """What made a summary: the version of the maker and, where a model was asked, which and how."""

    version: str
    model: str | UnsetType = UNSET
    instructions_digest: str | UnsetType = UNSET


class CoversThrough(Struct, frozen=True, kw_only=True):
    """The last position a checkpoint covers, and the last event of the event channel at or before it."""

    position: Count
    event_id: str | None


class Checkpoint(Struct, frozen=True, kw_only=True):
    """An accepted summary's coverage, without its words."""

    id: str
    version: Ordinal
    schema: int = 1
    summarizer: str
    projector: Projector
    covers_through: CoversThrough
    range_digest: str


class Tail(Struct, frozen=True, kw_only=True):
    """What comes after the checkpoint. Empty: ``from_position`` is one above ``through_position``."""

    from_position: Ordinal
    through_position: Count
    through_event_id: str | None
    events: Count
    tokens: Count


class ClearedResult(Struct, frozen=True, kw_only=True):
    """A tool result of the tail that became a reference."""

    call_id: str
    event_id: str
    ref: str
    status: str
    note: str


class PacketBlocker(Struct, frozen=True, kw_only=True):
    """One cause of a verdict and what clears it. ``ref`` is None where the cause is no item."""

    code: str
    ref: str | None
    text: str
    clears_when: str


class PacketConstraint(Struct, frozen=True, kw_only=True):
    """A constraint in force."""

    id: str
    text: str
    source: Source
    told_by: Literal["agent", "authority"]
    forbids: Forbids | UnsetType = UNSET


class PacketRequest(Struct, frozen=True, kw_only=True):
    """A user's message."""

    event_id: str
    text: str


class PacketTask(Struct, frozen=True, kw_only=True):
    """The contract and what the user asks now. ``goal`` is empty while the contract is missing."""

    goal: str
    done_when: tuple[str, ...]
    scope: Scope | None
    constraints: tuple[PacketConstraint, ...]
    current_request: tuple[PacketRequest, ...]
    user_messages: tuple[PacketRequest, ...]


class PolicyView(Struct, frozen=True, kw_only=True):
    """The version in force and the one the agent works under."""

    released: str | None
    loaded: str | None


class Progress(Struct, frozen=True, kw_only=True):
    """Where the work stands, from the ledger alone."""

    phase: str | None
    completed: tuple[Statement, ...]
    plan: tuple[PlanItem, ...]
    focus: Focus
    next_action: NextAction | None
    uncertain: tuple[str, ...]


class PacketOperation(Struct, frozen=True, kw_only=True):
    """An operation and what may be done with it."""

    id: str
    kind: str
    idempotency_key: str
    state: OperationState
    may: May
    target: str | UnsetType = UNSET
    approval_id: str | UnsetType = UNSET
    receipt: str | UnsetType = UNSET


class PacketApproval(Struct, frozen=True, kw_only=True):
    """An approval, asked for or resolved."""

    id: str
    action: str
    state: ApprovalState
    scope: str | UnsetType = UNSET
    by: str | UnsetType = UNSET
    expires_at: Instant | UnsetType = UNSET
    payload_ref: str | UnsetType = UNSET
    payload_digest: str | UnsetType = UNSET
    uses_left: Count | UnsetType = UNSET


class PacketDecision(Struct, frozen=True, kw_only=True):
    """A decision in force."""

    id: str
    summary: str
    reason: str | UnsetType = UNSET
    rejected: tuple[RejectedAlternative, ...] | UnsetType = UNSET


class PacketQuestion(Struct, frozen=True, kw_only=True):
    """An open question."""

    id: str
    text: str


class PacketArtifact(Struct, frozen=True, kw_only=True):
    """An artifact that is not withdrawn."""

    id: str
    uri: str
    sha256: str
    description: str


class PacketEvidence(Struct, frozen=True, kw_only=True):
    """A claim and where it comes from."""

    id: str
    claim: str
    kind: Literal["observed", "inferred"]
    source: str
    value: Scalar | UnsetType = UNSET
    unit: str | UnsetType = UNSET


class PacketChild(Struct, frozen=True, kw_only=True):
    """A child run."""

    run: str
    task: str
    status: Literal["running", "succeeded", "failed", "cancelled"]


class PacketParent(Struct, frozen=True, kw_only=True):
    """The run this one is a child of."""

    run: str


class PacketCall(Struct, frozen=True, kw_only=True):
    """A call without a final result."""

    call_id: str
    tool: str


class PacketSummary(Struct, frozen=True, kw_only=True):
    """The accepted summary's own statements; never authoritative."""

    completed: tuple[Statement, ...]
    observations: tuple[Statement, ...]
    inferences: tuple[Statement, ...]
    narrative: str


class Recent(Struct, frozen=True, kw_only=True):
    """A line about the newest history."""

    text: str
    ref: str


class Omitted(Struct, frozen=True, kw_only=True):
    """How many items of a class are not in the packet, and how to get them."""

    cls: OmittedClass = field(name="class")
    count: Count
    how: str


class ViolationCount(Struct, frozen=True, kw_only=True):
    """How often a run broke an invariant."""

    code: str
    count: Ordinal


class PacketBudget(Struct, frozen=True, kw_only=True):
    """Tokens of window and packet. ``window`` and ``usable`` are 0 while no model is known."""

    window: Count
    usable: int
    used_before: Count
    used_after: Count
    level: Level
    packet_tokens: Count


class Outbound(Struct, frozen=True, kw_only=True):
    """Common to every outbound message of a run."""

    v: int = 1
    type: str
    tenant: str
    lane: str
    run: str
    at: Instant
    epoch: Count
    must_understand: tuple[str, ...] = ()


class Packet(Outbound, frozen=True, kw_only=True):
    """The bounded view of a run to continue from. ``text`` is the same as plain lines for a model."""

    type: Literal["resume.packet"] = "resume.packet"
    packet_id: str
    reason: PacketReason
    checkpoint: Checkpoint | None
    ledger_version: Count
    protected_digest: str
    tail: Tail
    cleared: tuple[ClearedResult, ...]
    verdict: Verdict
    blockers: tuple[PacketBlocker, ...]
    authority: Literal["required", "agent"]
    contract: Literal["declared", "inferred", "missing"]
    task: PacketTask
    inputs: tuple[InputRef, ...]
    policy: PolicyView
    progress: Progress
    operations: tuple[PacketOperation, ...]
    approvals: tuple[PacketApproval, ...]
    decisions: tuple[PacketDecision, ...]
    questions: tuple[PacketQuestion, ...]
    artifacts: tuple[PacketArtifact, ...]
    evidence: tuple[PacketEvidence, ...]
    contradictions: tuple[tuple[str, str], ...]
    children: tuple[PacketChild, ...]
    parent: PacketParent | None
    allowed_tools: tuple[str, ...] | UnsetType = UNSET
    required_artifacts: tuple[str, ...] | UnsetType = UNSET
    abandoned_calls: tuple[PacketCall, ...]
    open_calls: tuple[PacketCall, ...]
    summary: PacketSummary
    recent: tuple[Recent, ...]
    omitted: tuple[Omitted, ...]
    violations: tuple[ViolationCount, ...]
    budget: PacketBudget
    digest: str
    text: str


DIGEST_EXCLUDES: Final[frozenset[str]] = frozenset(
    {"digest", "text", "packet_id", "at", "epoch", "reason", "ledger_version"}
)
"""Fields of a packet its ``digest`` is not over."""


class HandoffPoint(Struct, frozen=True, kw_only=True):
    """The ledger an attempt started from."""

    position: Count
    ledger_digest: str


class ProtectedCount(Struct, frozen=True, kw_only=True):
    """How many items were carried over because they are protected."""

    total: Count
    by_kind: dict[str, Count]


class ReceiptTokens(Struct, frozen=True, kw_only=True):
    """Tokens before and after an attempt, of the packet, and what the summariser read and wrote."""

    before: Count
    after: Count
    packet: Count
    summarizer_in: Count | UnsetType = UNSET
    summarizer_out: Count | UnsetType = UNSET


class OmittedCounts(Struct, frozen=True, kw_only=True):
    """How many items of the range were dropped, referenced, summarised."""

    drop: Count
    reference: Count
    summarise: Count


class Receipt(Outbound, frozen=True, kw_only=True):
    """One compaction attempt, whatever its end. ``reason`` is a failure or skip reason, None when applied."""

    type: Literal["compaction.receipt"] = "compaction.receipt"
    receipt_id: str
    attempt_id: str
    trigger: Trigger
    outcome: ReceiptOutcome
    reason: str | None
    summarizer: str
    projector: Projector
    source_session: str | UnsetType = UNSET
    range: Range
    range_digest: str
    handoff: HandoffPoint
    protected: ProtectedCount
    artifacts: Count
    tokens: ReceiptTokens
    omitted: OmittedCounts
    removed_statements: Count
    violations: tuple[str, ...]
    checkpoint_id: str | UnsetType = UNSET
    parent_checkpoint_id: str | UnsetType = UNSET
    attempt: Ordinal
    started_at: Instant
    finished_at: Instant


class Notice(Outbound, frozen=True, kw_only=True):
    """Something the agent or its keeper should know. ``NOTICE_FIELDS`` says which fields a kind has.

    ``from_`` and ``to`` are levels (``level_changed``), ``from_`` and ``through`` numbers (``history_gap``).
    """

    type: Literal["run.notice"] = "run.notice"
    notice_id: str
    kind: NoticeKind
    from_: Level | Count | UnsetType = field(name="from", default=UNSET)
    to: Level | UnsetType = UNSET
    through: Count | UnsetType = UNSET
    used: Count | UnsetType = UNSET
    usable: int | UnsetType = UNSET
    attempt_id: str | UnsetType = UNSET
    choice: Literal["reduced", "postpone", "pause"] | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    code: str | UnsetType = UNSET
    refs: tuple[str, ...] | UnsetType = UNSET
    operation_id: str | UnsetType = UNSET
    session: str | UnsetType = UNSET


NOTICE_FIELDS: Final[dict[NoticeKind, tuple[str, ...]]] = {
    "level_changed": ("from_", "to", "used", "usable"),
    "compaction_started": ("attempt_id",),
    "compaction_deferred": ("reason",),
    "ineffective": ("reason",),
    "not_applied": (),
    "choice": ("choice", "reason"),
    "violation": ("code", "refs"),
    "operation_unknown": ("operation_id",),
    "history_gap": ("from_", "through"),
}
"""The fields each kind of notice always has, by attribute name. ``session`` may stand beside a gap."""


class Rejected(Outbound, frozen=True, kw_only=True):
    """A message that was not accepted, by its sequence in the in stream."""

    type: Literal["message.rejected"] = "message.rejected"
    stream_seq: Count
    subject: str
    code: RejectionCode
    detail: str
    event_id: str | UnsetType = UNSET


class LaneEpoch(Struct, frozen=True, kw_only=True):
    """Who owns a lane. ``owner`` is new at each process start; ``released`` says that nobody does now."""

    v: int = 1
    type: Literal["lane.epoch"] = "lane.epoch"
    epoch: Ordinal
    owner: str
    at: Instant
    released: bool | UnsetType = UNSET
