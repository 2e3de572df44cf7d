"""Questions to the owner of a run, their answers and refusals.

Shapes, and which fields go together; who may ask what and what the answer is are decided elsewhere. The reply
to ``packet`` is a ``protocol.handoff.Packet``.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from msgspec import UNSET, Raw, Struct, UnsetType, field

from protocol.content import Count, Ordinal
from protocol.errors import AskErrorCode
from protocol.handoff import CoversThrough, Level, OperationState
from protocol.identifiers import Id, Token
from protocol.subjects import Verb

AuthorizeCode = Literal[
    "unknown_operation",
    "run_finished",
    "run_paused",
    "history_gap",
    "already_succeeded",
    "already_failed",
    "in_flight",
    "outcome_unknown",
    "policy_stale",
    "out_of_scope",
    "constraint_forbids",
    "approval_missing",
    "approval_pending",
    "approval_denied",
    "approval_expired",
    "approval_revoked",
    "approval_consumed",
    "payload_mismatch",
    "postponed",
    "ok",
]
"""Answers of ``authorize`` in their order: the first that applies."""

FetchStatus = Literal["found", "not_found", "gone", "redacted", "out_of_scope", "digest_mismatch"]
Mode = Literal["observe", "shadow", "live"]


class Ask(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Common to every question. ``after`` is a sequence of the in stream the answer must include."""

    after: Count | None = None


class AskPacket(Ask, frozen=True, kw_only=True):
    """A fresh resume packet."""


class AskContext(Ask, frozen=True, kw_only=True):
    """The message list to go on with, in a provider's shape, within ``max_tokens`` tokens."""

    format: Literal["openai", "openai_responses", "anthropic"]
    max_tokens: Ordinal | None = None


class AskFetch(Ask, frozen=True, kw_only=True):
    """Original evidence by refs, or by positions ``from_`` to ``through``, with that many events around.

    ``cursor`` is the ``next`` of the answer before, with every other field repeated.
    """

    refs: tuple[str, ...] | None = None
    from_: Ordinal | None = field(name="from", default=None)
    through: Ordinal | None = None
    before: Count = 0
    after_events: Count = 0
    max_tokens: Ordinal | None = None
    cursor: str | None = None
    of_run: Token | None = None

    def __post_init__(self) -> None:
        ranged = self.from_ is not None and self.through is not None
        if (self.from_ is None) != (self.through is None):
            raise ValueError("from and through go together")
        if ranged == (self.refs is not None):
            raise ValueError("needs refs, or from and through")


class AskSearch(Ask, frozen=True, kw_only=True):
    """Words in the run's original events, newest and best first."""

    query: str
    limit: Ordinal | None = None
    types: tuple[str, ...] | None = None
    from_: Ordinal | None = field(name="from", default=None)
    through: Ordinal | None = None
    max_tokens: Ordinal | None = None
    of_run: Token | None = None


class AskAuthorize(Ask, frozen=True, kw_only=True):
    """May this operation be done now? With ``operation_id`` it is an act, unless ``dry_run``.

    An act needs ``request_id``. Without ``operation_id`` it only looks, by ``kind`` and ``idempotency_key``.
    """

    operation_id: Id | None = None
    request_id: Id | None = None
    policy_version: str | None = None
    dry_run: bool = False
    kind: str | None = None
    idempotency_key: str | None = None
    approval_id: Id | None = None
    payload_digest: str | None = None
    target: str | None = None
    tool: str | None = None

    def __post_init__(self) -> None:
        if self.operation_id is None:
            if self.kind is None or self.idempotency_key is None:
                raise ValueError("needs operation_id, or kind and idempotency_key")
        elif self.request_id is None and not self.dry_run:
            raise ValueError("an act needs request_id")


class AskCompact(Ask, frozen=True, kw_only=True):
    """Compact now if it is safe. ``reason`` reaches nobody but the receipt."""

    reason: str | None = None


class AskStatus(Ask, frozen=True, kw_only=True):
    """How the run stands."""


AnyAsk = AskPacket | AskContext | AskFetch | AskSearch | AskAuthorize | AskCompact | AskStatus

ASKS: Final[dict[Verb, type[Ask]]] = {
    "packet": AskPacket,
    "context": AskContext,
    "fetch": AskFetch,
    "search": AskSearch,
    "authorize": AskAuthorize,
    "compact": AskCompact,
    "status": AskStatus,
}


class Reply(Struct, frozen=True, kw_only=True):
    """Common to every answer but the packet."""

    v: int = 1
    epoch: Count


class ContextReply(Reply, frozen=True, kw_only=True):
    """The message list. ``system`` holds the system texts where the provider keeps them apart (anthropic)."""

    packet_id: str
    messages: tuple[dict[str, Any], ...]
    tokens: Count
    through_event_id: str | None
    system: str | UnsetType = UNSET


class FetchPart(Struct, frozen=True, kw_only=True):
    """Which piece of a long text an item carries, in characters, counted from 0."""

    offset: Count
    chars: Count
    total_chars: Count


class FetchItem(Struct, frozen=True, kw_only=True):
    """One answer to a ref or position. ``event`` is the original, ``record`` the ledger's view of an item.

    Where the text is longer than the answer may be, ``part`` says which piece of it the event carries.
    """

    ref: str
    status: FetchStatus
    position: Ordinal | UnsetType = UNSET
    event: Raw | UnsetType = UNSET
    record: Raw | UnsetType = UNSET
    digest: str | UnsetType = UNSET
    part: FetchPart | UnsetType = UNSET


class FetchReply(Reply, frozen=True, kw_only=True):
    """Items in the order asked for. ``next`` is the ``cursor`` of the question that goes on."""

    items: tuple[FetchItem, ...]
    next: str | UnsetType = UNSET
    truncated: bool


class SearchHit(Struct, frozen=True, kw_only=True):
    """One event found. A higher ``score`` is a better match."""

    position: Ordinal
    event_id: str
    type: str
    snippet: str
    score: float


class SearchReply(Reply, frozen=True, kw_only=True):
    """What was found, best first; ``truncated`` when more would have been.

    ``status`` is there only where nothing of ``of_run`` may be read, whether there is such a run or not.
    """

    hits: tuple[SearchHit, ...]
    truncated: bool
    status: Literal["out_of_scope"] | UnsetType = UNSET


class OperationView(Struct, frozen=True, kw_only=True):
    """The operation an answer of ``authorize`` speaks of."""

    id: str
    kind: str
    idempotency_key: str
    state: OperationState
    run: str | UnsetType = UNSET
    target: str | UnsetType = UNSET
    approval_id: str | UnsetType = UNSET
    receipt: str | UnsetType = UNSET


class AuthorizeReply(Reply, frozen=True, kw_only=True):
    """The answer. ``reserved``: the operation is pending by this request and its approval consumed."""

    allowed: bool
    code: AuthorizeCode
    reason: str
    clears_when: str | UnsetType = UNSET
    operation: OperationView | UnsetType = UNSET
    reserved: bool
    ledger_version: Count


class CompactReply(Reply, frozen=True, kw_only=True):
    """Whether an attempt started, runs already, or waits and why."""

    attempt_id: str | UnsetType = UNSET
    state: Literal["started", "running", "deferred"]
    reason: str | UnsetType = UNSET


class StatusBudget(Struct, frozen=True, kw_only=True):
    """Tokens used, usable, and of the model's window (0: no model known)."""

    used: Count
    usable: int
    window: Count


class StatusCheckpoint(Struct, frozen=True, kw_only=True):
    """The newest checkpoint."""

    id: str
    version: Ordinal
    covers_through: CoversThrough


class StatusCall(Struct, frozen=True, kw_only=True):
    """A call without a final result."""

    call_id: str
    tool: str
    event_id: str | UnsetType = UNSET


class StatusOperation(Struct, frozen=True, kw_only=True):
    """An operation that is not finally settled."""

    id: str
    kind: str
    state: OperationState


class StatusApproval(Struct, frozen=True, kw_only=True):
    """An approval that is pending."""

    id: str
    action: str


class StatusGap(Struct, frozen=True, kw_only=True):
    """Missing messages: numbers of a session and channel, or sequences of the stream."""

    from_: Count = field(name="from")
    through: Count
    session: str | UnsetType = UNSET
    channel: str | UnsetType = UNSET
    state: Literal["open", "declared", "accepted"] | UnsetType = UNSET


class StatusCompaction(Struct, frozen=True, kw_only=True):
    """What compaction does now, and why it waits."""

    state: Literal["idle", "due", "running", "deferred"]
    attempt_id: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class StatusReply(Reply, frozen=True, kw_only=True):
    """How a run stands.

    ``stream_seq`` is the newest sequence of the in stream that is folded, ``lag`` how many messages of the
    lane are not yet, ``violations`` the number by code. ``packet_id`` is that of the newest packet that
    shortened the context, if one was published.
    """

    level: Level
    budget: StatusBudget
    checkpoint: StatusCheckpoint | None
    ledger_version: Count
    position: Count
    open_calls: tuple[StatusCall, ...]
    open_operations: tuple[StatusOperation, ...]
    pending_approvals: tuple[StatusApproval, ...]
    gaps: tuple[StatusGap, ...]
    violations: dict[str, Count]
    mode: Mode
    lag: Count
    compaction: StatusCompaction
    outbox_pending: Count
    stream_seq: Count
    trimmed_through: Count
    packet_id: str | UnsetType = UNSET


class ErrorBody(Struct, frozen=True, kw_only=True):
    """Why a question is refused, for a program and for a person."""

    code: AskErrorCode
    message: str


class AskError(Struct, frozen=True, kw_only=True):
    """The body of an error reply."""

    error: ErrorBody
