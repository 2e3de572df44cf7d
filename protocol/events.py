"""Every inbound message: what an agent, an authority or the lane's own sidecar says about a run.

Frozen values with the fields of the wire and nothing else. What an event *means* is the ledger's matter;
types and bounds are checked when bytes are decoded (``protocol.codec``), not when a value is built in code.

The envelope's ``id`` names the event. The item an event speaks of (operation, approval, question, …) has a
field of its own, ``operation_id``, ``approval_id``, ``question_id``, …; where that is left out, ``id`` names
the item as well, so that both ways to read "``id``" in a type's list of fields work. ``identity`` is what
deduplication compares.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final, Literal, get_args

from msgspec import Meta, Raw, Struct, field
from msgspec.structs import force_setattr

from protocol.content import (
    Blocker,
    CompletedStep,
    Constraint,
    Content,
    ContentBlob,
    ContentPart,
    Count,
    DataPart,
    Focus,
    Forbids,
    ImagePart,
    InputRef,
    Model,
    NextAction,
    Number,
    Ordinal,
    PlanItem,
    ReasoningPart,
    RejectedAlternative,
    Scalar,
    Scope,
    Settings,
    Source,
    TextPart,
)
from protocol.identifiers import Digest, Id, Token

__all__ = [
    "AUTHORITY_ONLY_TYPES",
    "EVENT_TYPES",
    "RECORD_TYPES",
    "AnyEvent",
    "ApprovalExpired",
    "ApprovalRequested",
    "ApprovalResolved",
    "ArtifactSaved",
    "ArtifactWithdrawn",
    "AuthorizationRequested",
    "Blocker",
    "BoundaryMarked",
    "CallAbandoned",
    "ChildReturned",
    "ChildSpawned",
    "CompletedStep",
    "Constraint",
    "ConstraintLifted",
    "ConstraintSet",
    "Content",
    "ContentBlob",
    "ContentPart",
    "ContextReplaced",
    "DataPart",
    "DecisionMade",
    "Event",
    "EvidenceRecorded",
    "Focus",
    "Forbids",
    "GapAccepted",
    "GapDeclared",
    "ImagePart",
    "InputPinned",
    "InputRef",
    "Message",
    "Model",
    "ModelChanged",
    "NextAction",
    "OperationDeclared",
    "OperationDispatched",
    "OperationReconciled",
    "OperationSettled",
    "OperationTimedOut",
    "PlanItem",
    "PolicyLoaded",
    "PolicyReleased",
    "QuestionAnswered",
    "QuestionOpened",
    "ReasoningPart",
    "RejectedAlternative",
    "RunFinished",
    "RunPaused",
    "RunResumed",
    "RunStarted",
    "Scalar",
    "Scope",
    "Settings",
    "SettingsApplied",
    "Source",
    "StepChanged",
    "TaskChanged",
    "TextPart",
    "ToolCalled",
    "ToolReturned",
    "UsageReported",
    "identity",
    "item_id",
    "type_of",
]

Instant = Annotated[datetime, Meta(tz=True)]
"""A moment with its offset; written in UTC."""
Version = Annotated[int, Meta(ge=1, le=1)]
Sha256 = Annotated[str, Meta(pattern=r"^(sha256:)?[0-9a-f]{64}$(?!\n)")]

Outcome = Literal["succeeded", "failed", "cancelled"]
CallStatus = Literal["ok", "error", "timeout", "cancelled", "pending"]


class Event(Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True, tag_field="type"):
    """The envelope. ``id`` is unique in run and channel; ``seq`` counts 1, 2, 3 … within ``session``.

    ``epoch`` is for the record channel only. Unknown fields are ignored unless named by ``must_understand``.
    Kept from the garbage collector, as all it may hold (``protocol.content``): no event is part of a cycle.
    """

    v: Version
    id: Id
    at: Instant
    session: Id | None = None
    seq: Number | None = None
    run: str | None = None
    traceparent: str | None = None
    must_understand: tuple[str, ...] = ()
    epoch: Count | None = None


class OfConstraint(Event, frozen=True, kw_only=True):
    """Speaks of one constraint: ``constraint_id``, on the wire by default the event's own id."""

    constraint_id: Id = ""

    def __post_init__(self) -> None:
        if not self.constraint_id:
            force_setattr(self, "constraint_id", self.id)


class OfDecision(Event, frozen=True, kw_only=True):
    """Speaks of one decision: ``decision_id``, on the wire by default the event's own id."""

    decision_id: Id = ""

    def __post_init__(self) -> None:
        if not self.decision_id:
            force_setattr(self, "decision_id", self.id)


class OfQuestion(Event, frozen=True, kw_only=True):
    """Speaks of one question: ``question_id``, on the wire by default the event's own id."""

    question_id: Id = ""

    def __post_init__(self) -> None:
        if not self.question_id:
            force_setattr(self, "question_id", self.id)


class OfOperation(Event, frozen=True, kw_only=True):
    """Speaks of one operation: ``operation_id``, on the wire by default the event's own id."""

    operation_id: Id = ""

    def __post_init__(self) -> None:
        if not self.operation_id:
            force_setattr(self, "operation_id", self.id)


class OfApproval(Event, frozen=True, kw_only=True):
    """Speaks of one approval: ``approval_id``, on the wire by default the event's own id."""

    approval_id: Id = ""

    def __post_init__(self) -> None:
        if not self.approval_id:
            force_setattr(self, "approval_id", self.id)


class OfArtifact(Event, frozen=True, kw_only=True):
    """Speaks of one artifact: ``artifact_id``, on the wire by default the event's own id."""

    artifact_id: Id = ""

    def __post_init__(self) -> None:
        if not self.artifact_id:
            force_setattr(self, "artifact_id", self.id)


class OfEvidence(Event, frozen=True, kw_only=True):
    """Speaks of one piece of evidence: ``evidence_id``, on the wire by default the event's own id."""

    evidence_id: Id = ""

    def __post_init__(self) -> None:
        if not self.evidence_id:
            force_setattr(self, "evidence_id", self.id)


class RunStarted(Event, frozen=True, kw_only=True, tag="run.started"):
    """The run's contract, or (a second time) a new session of it."""

    goal: str
    model: Model
    done_when: tuple[str, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    scope: Scope | None = None
    policy_version: str | None = None
    inputs: tuple[InputRef, ...] = ()
    parent_run: Token | None = None
    continues: Token | None = None
    agent: str | None = None
    owner: str | None = None
    labels: dict[str, str] = field(default_factory=dict)


class RunPaused(Event, frozen=True, kw_only=True, tag="run.paused"):
    """Nothing may be done until ``run.resumed``; if an authority paused, until an authority's."""

    reason: str


class RunFinished(Event, frozen=True, kw_only=True, tag="run.finished"):
    """The run's end."""

    outcome: Outcome
    accepted: bool | None = None
    detail: str | None = None


class RunResumed(Event, frozen=True, kw_only=True, tag="run.resumed"):
    """A session begins or goes on, usually from a packet."""

    packet_id: Id | None = None
    ledger_version: Count | None = None
    policy_version: str | None = None
    first_action: NextAction | None = None


class ContextReplaced(Event, frozen=True, kw_only=True, tag="context.replaced"):
    """The agent's message list was shortened. ``kept_from`` is the first event kept verbatim."""

    by: Literal["agent", "framework", "provider"]
    packet_id: Id | None = None
    kept_from: Id | None = None
    context_tokens: Count | None = None


class TaskChanged(Event, frozen=True, kw_only=True, tag="task.changed"):
    """An authority changes task, owner or trust. ``done_when`` absent: unchanged; empty: cleared."""

    reason: str
    goal: str | None = None
    done_when: tuple[str, ...] | None = None
    owner: str | None = None
    trust: str | None = None


class ModelChanged(Event, frozen=True, kw_only=True, tag="model.changed"):
    """Another model, or another window."""

    model: Model


class Message(Event, frozen=True, kw_only=True, tag="message"):
    """One message of the conversation. ``supersedes`` is the event id of the message it corrects.

    With ``blob`` the whole content lies apart and ``content`` is its beginning.
    """

    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    message_id: Id | None = None
    in_reply_to: Id | None = None
    supersedes: Id | None = None
    blob: ContentBlob | None = None


class ToolCalled(Event, frozen=True, kw_only=True, tag="tool.called"):
    """A call goes out. ``arguments`` are the JSON bytes as received."""

    call_id: Id
    tool: str
    arguments: Raw
    operation_id: Id | None = None
    repeatable: bool = False
    message_id: Id | None = None


class ToolReturned(Event, frozen=True, kw_only=True, tag="tool.returned"):
    """A call's result; ``pending`` is interim, any other status final.

    With ``blob`` the whole content lies apart and ``content`` is its beginning.
    """

    call_id: Id
    status: CallStatus
    content: Content
    conclusion: str | None = None
    artifact_id: Id | None = None
    truncated: bool = False
    blob: ContentBlob | None = None


class UsageReported(Event, frozen=True, kw_only=True, tag="usage.reported"):
    """Tokens of one request. ``context_tokens`` is the whole prompt, ``through`` the last event in it."""

    model: str
    context_tokens: Count
    output_tokens: Count
    input_tokens: Count | None = None
    cache_read_tokens: Count | None = None
    cache_write_tokens: Count | None = None
    through: Id | None = None
    scope: Literal["request", "aggregate"] = "request"


class StepChanged(Event, frozen=True, kw_only=True, tag="step.changed"):
    """Where the work stands. An absent field is unchanged, an empty list clears."""

    phase: str | None = None
    completed: tuple[CompletedStep, ...] | None = None
    plan: tuple[PlanItem, ...] | None = None
    focus: Focus | None = None
    next_action: NextAction | None = None
    blockers: tuple[Blocker, ...] | None = None
    uncertain: tuple[str, ...] | None = None


class InputPinned(Event, frozen=True, kw_only=True, tag="input.pinned"):
    """An input of the task has this version now."""

    name: str
    version: str | None = None
    digest: Digest | None = None


class ConstraintSet(OfConstraint, frozen=True, kw_only=True, tag="constraint.set"):
    """A constraint holds from here on; ``replaces`` is the id of the one it takes the place of."""

    text: str
    source: Source
    replaces: Id | None = None
    forbids: Forbids | None = None


class ConstraintLifted(OfConstraint, frozen=True, kw_only=True, tag="constraint.lifted"):
    """A constraint holds no longer. By an authority; by the agent only for its own."""

    reason: str


class DecisionMade(OfDecision, frozen=True, kw_only=True, tag="decision.made"):
    """A decision is settled; ``supersedes`` is the id of the one it takes the place of."""

    summary: str
    reason: str | None = None
    refs: tuple[str, ...] = ()
    rejected: tuple[RejectedAlternative, ...] = ()
    supersedes: Id | None = None


class QuestionOpened(OfQuestion, frozen=True, kw_only=True, tag="question.opened"):
    """Something is not known yet."""

    text: str


class QuestionAnswered(OfQuestion, frozen=True, kw_only=True, tag="question.answered"):
    """The question's answer."""

    answer: str
    by: str | None = None


class OperationDeclared(OfOperation, frozen=True, kw_only=True, tag="operation.declared"):
    """An effect on the outside is intended. Nothing is done yet."""

    kind: str
    idempotency_key: str
    target: str | None = None
    tool: str | None = None
    description: str | None = None
    approval_id: Id | None = None
    payload_digest: Digest | None = None
    nonessential: bool = False


class OperationDispatched(OfOperation, frozen=True, kw_only=True, tag="operation.dispatched"):
    """The operation went out."""


class OperationSettled(OfOperation, frozen=True, kw_only=True, tag="operation.settled"):
    """What became of a dispatched operation."""

    state: Literal["succeeded", "failed", "unknown"]
    receipt: str | None = None
    detail: str | None = None


class OperationReconciled(OfOperation, frozen=True, kw_only=True, tag="operation.reconciled"):
    """An unknown outcome is found out. ``evidence`` is a ref; ``review`` leaves it to an authority."""

    state: Literal["succeeded", "failed", "review"]
    evidence: str


class ApprovalRequested(OfApproval, frozen=True, kw_only=True, tag="approval.requested"):
    """The agent asks an authority. Nothing is granted yet."""

    action: str
    scope: str | None = None
    payload_ref: str | None = None
    payload_digest: Digest | None = None
    operation_id: Id | None = None
    expires_at: Instant | None = None


class ApprovalResolved(OfApproval, frozen=True, kw_only=True, tag="approval.resolved"):
    """An authority's word on a request; repeats its action and payload digest. ``uses`` is at least 1."""

    outcome: Literal["granted", "denied", "revoked"]
    by: str
    action: str
    payload_digest: Digest | None = None
    expires_at: Instant | None = None
    uses: Ordinal = 1


class ArtifactSaved(OfArtifact, frozen=True, kw_only=True, tag="artifact.saved"):
    """A file, patch or report is stored outside. ``sha256`` with or without prefix; ``bytes``: its size."""

    uri: str
    sha256: Sha256
    description: str
    version: str | None = None
    media_type: str | None = None
    bytes: Count | None = None

    @property
    def digest(self) -> str:
        """``sha256:<hex>``, whichever way it was written."""
        return self.sha256 if self.sha256.startswith("sha256:") else f"sha256:{self.sha256}"


class ArtifactWithdrawn(OfArtifact, frozen=True, kw_only=True, tag="artifact.withdrawn"):
    """The artifact is not to be used any more."""

    reason: str


class EvidenceRecorded(OfEvidence, frozen=True, kw_only=True, tag="evidence.recorded"):
    """A claim, observed or inferred, with its source (ref or URL). ``contradicts``: other evidence ids."""

    claim: str
    kind: Literal["observed", "inferred"]
    source: str
    value: Scalar = None
    unit: str | None = None
    contradicts: tuple[Id, ...] = ()


class PolicyReleased(Event, frozen=True, kw_only=True, tag="policy.released"):
    """A policy is in force. An absent list keeps the old one."""

    version: str
    summary: str | None = None
    approval_kinds: tuple[str, ...] | None = None
    forbidden_kinds: tuple[str, ...] | None = None


class PolicyLoaded(Event, frozen=True, kw_only=True, tag="policy.loaded"):
    """The agent works under this policy version now."""

    version: str


class BoundaryMarked(Event, frozen=True, kw_only=True, tag="boundary.marked"):
    """A good place to cut: preferred, never required nor sufficient."""

    kind: Literal["turn_ended", "tests_finished", "patch_saved", "approval_pause", "other"]


class ChildSpawned(Event, frozen=True, kw_only=True, tag="child.spawned"):
    """A sub-agent gets a task. ``allowed_tools`` absent: every tool; empty: none."""

    child_run: Token
    task: str
    done_when: tuple[str, ...] = ()
    inputs: tuple[InputRef, ...] = ()
    allowed_tools: tuple[str, ...] | None = None
    required_artifacts: tuple[str, ...] | None = None
    granted_refs: tuple[str, ...] = ()


class ChildReturned(Event, frozen=True, kw_only=True, tag="child.returned"):
    """A sub-agent's end and what it brings."""

    child_run: Token
    status: Outcome
    artifacts: tuple[Id, ...] = ()
    evidence: tuple[Id, ...] = ()


class GapAccepted(Event, frozen=True, kw_only=True, tag="gap.accepted"):
    """An authority goes on without the messages ``from_`` to ``through`` (``seq``, inclusive) of ``session``.

    ``channel`` is the one that counted them; absent: the event channel.
    """

    from_: Ordinal = field(name="from")
    through: Ordinal
    by: str
    session: Id | None = None
    channel: Literal["event", "authority"] | None = None


class SettingsApplied(Event, frozen=True, kw_only=True, tag="settings.applied"):
    """The lane's settings from here on."""

    settings: Settings


class AuthorizationRequested(OfOperation, frozen=True, kw_only=True, tag="authorization.requested"):
    """An agent asked to act; the fold decides where it meets this."""

    request_id: Id
    policy_version: str | None = None


class ApprovalExpired(OfApproval, frozen=True, kw_only=True, tag="approval.expired"):
    """The owner noticed that an approval's time is over."""


class OperationTimedOut(OfOperation, frozen=True, kw_only=True, tag="operation.timed_out"):
    """The owner noticed that a dispatched operation had no outcome for too long."""


class CallAbandoned(Event, frozen=True, kw_only=True, tag="call.abandoned"):
    """The owner noticed that a call gets no result any more. ``event_id`` is the call's event."""

    call_id: Id
    event_id: Id


class GapDeclared(Event, frozen=True, kw_only=True, tag="gap.declared"):
    """The owner noticed that messages will not come: ``seq`` numbers of a session, or stream sequences.

    Either ``session``, ``from_`` and ``through`` or ``stream_from`` and ``stream_through`` are set.
    ``channel`` is the one that counted; absent: the event channel.
    """

    from_: Ordinal | None = field(name="from", default=None)
    through: Ordinal | None = None
    stream_from: Ordinal | None = None
    stream_through: Ordinal | None = None
    channel: Literal["event", "authority"] | None = None

    def __post_init__(self) -> None:
        numbered = self.from_ is not None and self.through is not None and self.session is not None
        streamed = self.stream_from is not None and self.stream_through is not None
        if numbered == streamed:
            raise ValueError("needs session, from and through, or stream_from and stream_through")


AnyEvent = (
    RunStarted
    | RunPaused
    | RunFinished
    | RunResumed
    | ContextReplaced
    | TaskChanged
    | ModelChanged
    | Message
    | ToolCalled
    | ToolReturned
    | UsageReported
    | StepChanged
    | InputPinned
    | ConstraintSet
    | ConstraintLifted
    | DecisionMade
    | QuestionOpened
    | QuestionAnswered
    | OperationDeclared
    | OperationDispatched
    | OperationSettled
    | OperationReconciled
    | ApprovalRequested
    | ApprovalResolved
    | ArtifactSaved
    | ArtifactWithdrawn
    | EvidenceRecorded
    | PolicyReleased
    | PolicyLoaded
    | BoundaryMarked
    | ChildSpawned
    | ChildReturned
    | GapAccepted
    | SettingsApplied
    | AuthorizationRequested
    | ApprovalExpired
    | OperationTimedOut
    | CallAbandoned
    | GapDeclared
)

_TYPES: Final[dict[type[Event], str]] = {cls: str(cls.__struct_config__.tag) for cls in get_args(AnyEvent)}

EVENT_TYPES: Final[dict[str, type[Event]]] = {name: cls for cls, name in _TYPES.items()}
"""Every type that may stand on ``wk.v1.in``, by its wire name."""

RECORD_TYPES: Final[frozenset[str]] = frozenset(
    {
        "settings.applied",
        "authorization.requested",
        "approval.expired",
        "operation.timed_out",
        "call.abandoned",
        "gap.declared",
    }
)
"""Types of the record channel, and of no other."""

AUTHORITY_ONLY_TYPES: Final[frozenset[str]] = frozenset(
    {"approval.resolved", "policy.released", "task.changed", "gap.accepted"}
)
"""Types the agent may not send while an authority is required. ``constraint.lifted`` depends on whose."""


def type_of(event: Event) -> str:
    """The event's wire type, e.g. ``tool.called``. Raises KeyError for what is no message of the protocol."""
    return _TYPES[type(event)]


def item_id(event: Event) -> str | None:
    """The id of the item the event speaks of (operation, approval, …), or None where it speaks of none."""
    match event:
        case OfOperation():
            return event.operation_id
        case OfApproval():
            return event.approval_id
        case OfConstraint():
            return event.constraint_id
        case OfDecision():
            return event.decision_id
        case OfQuestion():
            return event.question_id
        case OfArtifact():
            return event.artifact_id
        case OfEvidence():
            return event.evidence_id
        case _:
            return None


def identity(event: Event) -> str:
    """What tells this event from others within run and channel: equal identity means the same or a conflict.

    The event's id; with ``#<type>`` behind it where the id names the item as well, since declaring,
    dispatching and settling one operation are three events. A sidecar's record has ``%<epoch>`` behind it: the
    same thing said by a former owner, which the fold ignored, must not keep the owner from saying it. Neither
    sign can stand in an id.
    """
    if type(event) not in _NAMING:
        return event.id
    if type_of(event) in RECORD_TYPES:
        return f"{event.id}%{event.epoch or 0}"
    return f"{event.id}#{type_of(event)}" if item_id(event) == event.id else event.id


_NAMING: Final = frozenset(
    cls
    for cls, name in _TYPES.items()
    if name in RECORD_TYPES
    or issubclass(
        cls, OfOperation | OfApproval | OfConstraint | OfDecision | OfQuestion | OfArtifact | OfEvidence
    )
)
"""The types of which an event's id alone is not what tells it from others."""
