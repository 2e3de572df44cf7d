"""What a compaction attempt is made of, and the receipt it leaves whatever its end.

Values only: nothing here asks, stores or sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec

from protocol import subjects
from protocol.codec import encode
from protocol.handoff import (
    HandoffPoint,
    OmittedCounts,
    Projector,
    ProtectedCount,
    Receipt,
    ReceiptTokens,
)
from protocol.summary import Range
from sidecar import tracing
from sidecar.core.budget import Budget
from sidecar.core.course import Course
from sidecar.core.packet import Built
from sidecar.core.state import Ledger
from sidecar.core.validation import Verdict
from sidecar.desk import Desk, moment, moment_of
from sidecar.notices import derived_id
from storage.records import AttemptRow, CheckpointRow, OutboxRow, ReceiptRow

PROTECTED_KINDS = ("constraint", "question", "operation", "approval", "decision", "request", "gap")


@dataclass
class Job:
    """One need for compaction, frozen at the message where it fell due."""

    run: str
    trigger: str
    fallback: bool
    mode: str
    ledger: Ledger
    budget: Budget
    course: Course
    ancestors: dict[str, Ledger] = field(default_factory=dict)
    """Of the same moment: their constraints and policy hold for the run."""
    reason: str = ""
    traceparent: str | None = None
    """Of the question that asked for it, else of the run's newest message that had one."""
    settled: anyio.Event = field(default_factory=anyio.Event)
    """Set once it is known whether an attempt starts."""
    span: tracing.Span = field(default_factory=tracing.Span)
    attempt_id: str = ""
    attempt: Attempt | None = None
    """The same, once it is open."""
    deferred: str = ""

    @property
    def position(self) -> int:
        return self.ledger.head.position


@dataclass
class Attempt:
    """One try to meet a job: its range and what it started from."""

    attempt_id: str
    job: Job
    first: int
    through: int
    range_digest: str
    handoff_position: int
    ledger_digest: str
    number: int
    started_at: str
    summarizer: str
    projector: Projector
    """Who is asked, and with what."""
    session: str | None = None
    tokens_in: int = 0
    tokens_out: int = 0
    """What the summariser said it cost so far, over all parts."""
    summarised: int = 0
    """Messages, calls and results of the range, which a summary takes the place of."""
    dropped: int = 0
    """Other messages of the range: what they said stands in the ledger."""

    @property
    def run(self) -> str:
        return self.job.run

    def row(self) -> AttemptRow:
        """As it is stored before a summary is asked for."""
        return AttemptRow(
            attempt_id=self.attempt_id,
            run=self.run,
            trigger=self.job.trigger,
            first=self.first,
            through=self.through,
            range_digest=self.range_digest,
            handoff_position=self.handoff_position,
            ledger_digest=self.ledger_digest,
            started_at=self.started_at,
            body=encode(
                AttemptBody(
                    mode=self.job.mode,
                    number=self.number,
                    summarizer=self.summarizer,
                    projector=self.projector,
                )
            ),
        )


class AttemptBody(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored of an attempt beside its columns, for the receipt of one that was interrupted."""

    mode: str
    number: int
    summarizer: str = "digest"
    projector: Projector = Projector(version="1")


@dataclass
class Ending:
    """How an attempt ended; ``reason`` None when it was applied."""

    outcome: str
    reason: str | None
    before: int
    after: int
    violations: Sequence[str] = ()
    verdict: Verdict | None = None
    """What validation said, where there was a candidate."""
    built: Built | None = None
    checkpoint: CheckpointRow | None = None


def receipt(desk: Desk, attempt: Attempt, ending: Ending) -> Receipt:
    """The record of one attempt."""
    ledger = attempt.job.ledger
    kinds = Counter({kind: len(ledger.active[kind]) for kind in PROTECTED_KINDS if ledger.active[kind]})
    checkpoint = ending.checkpoint
    optional: dict[str, Any] = {}
    if attempt.session is not None:
        optional["source_session"] = attempt.session
    if checkpoint is not None:
        optional["checkpoint_id"] = checkpoint.checkpoint_id
    if attempt.job.course.checkpoint_id:
        optional["parent_checkpoint_id"] = attempt.job.course.checkpoint_id
    cost: dict[str, Any] = {}
    if attempt.tokens_in or attempt.tokens_out:
        cost = {"summarizer_in": attempt.tokens_in, "summarizer_out": attempt.tokens_out}
    return Receipt(
        tenant=desk.tenant,
        lane=desk.lane,
        run=attempt.run,
        at=moment(desk.wall()),
        epoch=desk.voice.epoch,
        receipt_id=derived_id("rc", attempt.attempt_id),
        attempt_id=attempt.attempt_id,
        trigger=attempt.job.trigger,  # type: ignore[arg-type]
        outcome=ending.outcome,  # type: ignore[arg-type]
        reason=ending.reason or attempt.job.reason or None,
        summarizer=attempt.summarizer,
        projector=attempt.projector,
        range=Range(from_=attempt.first, through=attempt.through),
        range_digest=attempt.range_digest,
        handoff=HandoffPoint(position=attempt.handoff_position, ledger_digest=attempt.ledger_digest),
        protected=ProtectedCount(total=kinds.total(), by_kind=dict(kinds)),
        artifacts=len(ledger.active["artifact"]),
        tokens=ReceiptTokens(
            before=max(0, ending.before),
            after=max(0, ending.after),
            packet=0 if ending.built is None else ending.built.tokens,
            **cost,
        ),
        omitted=_omitted(attempt, ending),
        removed_statements=0 if ending.verdict is None else ending.verdict.removed,
        violations=tuple(ending.violations),
        attempt=attempt.number,
        started_at=moment_of(attempt.started_at),
        finished_at=moment(desk.wall()),
        **optional,
    )


def receipt_rows(desk: Desk, told: Receipt) -> tuple[OutboxRow, ReceiptRow]:
    """The receipt as a message to be sent and as it is stored."""
    payload = encode(told)
    message = OutboxRow(
        stream="out",
        subject=subjects.outbound(desk.tenant, desk.lane, told.run, "receipt"),
        msg_id=told.receipt_id,
        payload=payload,
    )
    stored = ReceiptRow(
        receipt_id=told.receipt_id,
        run=told.run,
        attempt_id=told.attempt_id,
        outcome=told.outcome,
        body=payload,
        created_at=desk.now_text(),
    )
    return message, stored


def traced(attempt: Attempt, told: Receipt) -> None:
    """Say on the attempt's span how it ended, once that is committed."""
    span = attempt.job.span
    span.set(
        {
            "watchkeeper.attempt_id": told.attempt_id,
            "watchkeeper.outcome": told.outcome,
            "watchkeeper.summarizer": told.summarizer,
            "watchkeeper.tokens_before": told.tokens.before,
            "watchkeeper.tokens_after": told.tokens.after,
        }
    )
    if told.outcome == "applied":
        # Of the convention: set only when it is true.
        span.set({"gen_ai.conversation.compacted": True})
    elif told.outcome == "failed":
        span.failed(told.reason or "failed")


def _omitted(attempt: Attempt, ending: Ending) -> OmittedCounts:
    """What the agent's next prompt holds no more: of the range as it was covered, and of the packet as it fits."""
    counts: Counter[str] = Counter()
    if ending.built is not None:
        for item in ending.built.packet.omitted:
            counts[item.cls] += item.count
    covered = ending.checkpoint is not None
    return OmittedCounts(
        drop=counts["drop"] + (attempt.dropped if covered else 0),
        reference=counts["reference"],
        summarise=counts["summarise"] + counts["settled"] + (attempt.summarised if covered else 0),
    )
