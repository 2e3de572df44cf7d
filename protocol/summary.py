"""A summary as every summariser returns it, and the messages to a summariser over NATS.

Shapes only: whether a summary may be accepted is decided by validation, never here. Every field of a summary
is required, so that a reply cut short cannot pass for a small one; unknown fields are ignored.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Raw, Struct, UnsetType, field

from protocol.content import Count, NextAction, Ordinal


class Statement(Struct, frozen=True, kw_only=True):
    """One sentence and the refs it rests on."""

    text: str
    refs: tuple[str, ...]


class Summary(Struct, frozen=True, kw_only=True):
    """What a summariser says about a range, with its echo of the ledger's open matters."""

    accepted_decisions: tuple[str, ...]
    open_questions: tuple[str, ...]
    completed: tuple[Statement, ...]
    observations: tuple[Statement, ...]
    inferences: tuple[Statement, ...]
    contradictions: tuple[tuple[str, str], ...]
    evidence_refs: tuple[str, ...]
    pending_action_refs: tuple[str, ...]
    operations: dict[str, str]
    approvals: dict[str, str]
    objective: str
    next_action: NextAction | None
    narrative: str


class Range(Struct, frozen=True, kw_only=True):
    """Positions of a run, both ends included."""

    from_: Ordinal = field(name="from")
    through: Ordinal


class Exchange(Struct, frozen=True, kw_only=True):
    """One message, call or result of the covered range, as text. ``tokens`` is an estimate."""

    position: Ordinal
    event_id: str
    type: str
    role: str | UnsetType = UNSET
    text: str
    tokens: Count


class SummarizeRequest(Struct, frozen=True, kw_only=True):
    """Asks a summariser for one candidate of at most ``max_tokens`` tokens.

    ``ledger`` is the protected view at the handoff, with the packet's names.
    """

    v: int = 1
    type: Literal["summarize.request"] = "summarize.request"
    attempt_id: str
    run: str
    range: Range
    previous: Summary | None
    ledger: Raw
    exchanges: tuple[Exchange, ...]
    max_tokens: Count
    instructions: str
    instructions_digest: str


class Usage(Struct, frozen=True, kw_only=True):
    """Tokens one request to a summariser cost; a number it does not tell counts as 0."""

    input_tokens: Count = 0
    output_tokens: Count = 0


class SummarizeReply(Struct, frozen=True, kw_only=True):
    """A summariser's candidate. ``summary`` is kept as bytes: a wrong shape is a finding of validation."""

    v: int = 1
    summary: Raw
    finish_reason: Literal["stop", "length", "refusal"] | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET


class SummarizeFault(Struct, frozen=True, kw_only=True):
    """What went wrong at the summariser, in its words."""

    code: str
    message: str


class SummarizeError(Struct, frozen=True, kw_only=True):
    """A summariser's refusal: the reply instead of a candidate."""

    error: SummarizeFault
