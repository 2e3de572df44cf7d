"""Asks a summariser for one candidate and has it validated: time limit, parts, failures told apart.

The one place between the compactor and the summarisers. It commits nothing and decides nothing about
when; what may become a checkpoint is decided by ``core.validation``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import anyio
import anyio.to_thread
import msgspec

from protocol.codec import encode
from protocol.identifiers import parse_ref
from protocol.summary import Exchange, Range, SummarizeReply, SummarizeRequest, Summary
from sidecar.attempts import Attempt, Generated
from sidecar.core.claims import statement_tokens
from sidecar.core.exchanges import TailItem
from sidecar.core.material import event_text, exchange_items, parts
from sidecar.core.packet import protected_names
from sidecar.core.state import Ledger
from sidecar.core.tokens import bytes_tokens
from sidecar.core.validation import Limits, SchemaInvalid, Verdict, decode_summary, validate
from sidecar.desk import Desk
from sidecar.summarizers import Summarizer, SummarizerFailure

SUMMARY_SHARE: Final = 0.3
"""Part of the packet's budget that a summary may take; the rest is for what is protected."""
LEAST_SUMMARY_TOKENS: Final = 400
INSTRUCTIONS: Final = ""
"""The deterministic summariser takes none."""

_NO_SUMMARY: Final = Summary(
    accepted_decisions=(),
    open_questions=(),
    completed=(),
    observations=(),
    inferences=(),
    contradictions=(),
    evidence_refs=(),
    pending_action_refs=(),
    operations={},
    approvals={},
    objective="",
    next_action=None,
    narrative="",
)


class Generation:
    """One lane's summariser and its fallback."""

    def __init__(self, desk: Desk, primary: Summarizer, fallback: Summarizer | None) -> None:
        self._desk = desk
        self._primary = primary
        self._fallback = fallback

    @property
    def name(self) -> str:
        """The configured summariser's kind."""
        return self._primary.name

    async def generate(
        self,
        attempt: Attempt,
        *,
        runs: Mapping[str, Ledger],
        covered: Sequence[TailItem],
        previous: Summary | None,
        range_tokens: int,
    ) -> Generated:
        """One validated candidate, accepted or not. ``runs`` is the family with the run as of the handoff.

        Raises ``SummarizerFailure`` when there is no candidate at all.
        """
        summarizer = self._primary
        if attempt.job.fallback and self._fallback is not None:
            summarizer = self._fallback
        desk = self._desk
        protected = protected_names(runs, attempt.run)
        exchanges = await anyio.to_thread.run_sync(exchange_items, covered)
        limit = max(LEAST_SUMMARY_TOKENS, round(desk.budget.packet_tokens * SUMMARY_SHARE))
        try:
            with desk.metrics.phase("generate"):
                reply, spent = await self._ask(summarizer, attempt, protected, exchanges, previous, limit)
        except SummarizerFailure as failure:
            desk.metrics.summarized(summarizer.name, failure.reason)
            raise
        desk.metrics.summarized(summarizer.name, "ok", *spent)
        with desk.metrics.phase("validate"):
            verdict = await self._validate(
                attempt, reply, protected, covered, exchanges, previous, limit, range_tokens
            )
        return Generated(
            summarizer=summarizer.name,
            projector=summarizer.projector,
            verdict=verdict,
            tokens_in=spent[0] or None,
            tokens_out=spent[1] or None,
        )

    async def _ask(
        self,
        summarizer: Summarizer,
        attempt: Attempt,
        protected: Mapping[str, object],
        exchanges: Sequence[Exchange],
        previous: Summary | None,
        limit: int,
    ) -> tuple[SummarizeReply, tuple[int, int]]:
        """The summariser's last reply, and tokens in and out over all parts of the range."""
        ledger = msgspec.Raw(encode(protected))
        overhead = bytes_tokens(len(bytes(ledger))) + limit * 2 + bytes_tokens(len(INSTRUCTIONS))
        pieces = parts(exchanges, summarizer.window_tokens, overhead_tokens=overhead)
        spent_in = spent_out = 0
        reply: SummarizeReply | None = None
        with anyio.move_on_after(self._desk.config.summarizer.timeout_seconds):
            for piece in pieces:
                if reply is not None:
                    previous = _decoded(reply)
                request = SummarizeRequest(
                    attempt_id=attempt.attempt_id,
                    run=attempt.run,
                    range=Range(from_=attempt.first, through=attempt.through),
                    previous=previous,
                    ledger=ledger,
                    exchanges=piece,
                    max_tokens=limit,
                    instructions=INSTRUCTIONS,
                    instructions_digest="",
                )
                reply = await summarizer.summarize(request)
                if isinstance(reply.usage, msgspec.Struct):
                    spent_in += reply.usage.input_tokens
                    spent_out += reply.usage.output_tokens
                if reply.finish_reason == "length":
                    raise SummarizerFailure("truncated", "the answer was cut at its length limit")
                if reply.finish_reason == "refusal":
                    raise SummarizerFailure("refused", "the summariser refused")
            if reply is not None:
                return reply, (spent_in, spent_out)
        raise SummarizerFailure("timeout", "no summary within the time limit")

    async def _validate(
        self,
        attempt: Attempt,
        reply: SummarizeReply,
        protected: Mapping[str, object],
        covered: Sequence[TailItem],
        exchanges: Sequence[Exchange],
        previous: Summary | None,
        limit: int,
        range_tokens: int,
    ) -> Verdict:
        try:
            candidate = decode_summary(reply.summary)
        except SchemaInvalid:
            return Verdict(accepted=False, summary=_NO_SUMMARY, violations=("schema_invalid",))
        texts = await self._texts(attempt, candidate, covered)
        after = statement_tokens(candidate)
        verdict = await anyio.to_thread.run_sync(
            lambda: validate(
                candidate,
                ledger=attempt.job.ledger,
                protected=protected,
                covered=exchanges,
                resolve=texts.get,
                previous=previous,
                limits=Limits(max_tokens=limit),
                tokens_before=max(range_tokens, 1),
                tokens_after=after,
            )
        )
        if verdict.echo:
            raise SummarizerFailure("echo", "the answer repeats an assistant's message")
        return verdict

    async def _texts(
        self, attempt: Attempt, candidate: Summary, covered: Sequence[TailItem]
    ) -> dict[str, str]:
        """The text each ref of the candidate leads to; a ref that leads nowhere is absent."""
        by_event = {item.event.id: item for item in covered if item.channel == "event"}
        by_position = {item.position: item for item in covered}
        found: dict[str, str] = {}
        for ref in _refs(candidate):
            try:
                parsed = parse_ref(ref)
            except ValueError:
                continue
            if parsed.run is not None:
                continue
            if parsed.kind in ("event", "pos"):
                item = (
                    by_event.get(parsed.value)
                    if parsed.kind == "event"
                    else by_position.get(int(parsed.value))
                )
                text = (
                    _text(item)
                    if item is not None
                    else await self._stored(attempt, parsed.kind, parsed.value)
                )
            else:
                known = (
                    attempt.job.ledger.get(parsed.kind, parsed.value) if parsed.kind in _ITEM_KINDS else None
                )
                text = None if known is None else encode(known).decode()
            if text is not None:
                found[ref] = text
        return found

    async def _stored(self, attempt: Attempt, kind: str, value: str) -> str | None:
        """The text of an older message of the run, at or before the handoff."""
        desk = self._desk
        if kind == "event":
            entry = await desk.store.entry(desk.tenant, desk.lane, attempt.run, event_id=value)
        else:
            entry = await desk.store.entry(desk.tenant, desk.lane, attempt.run, position=int(value))
        if entry is None or entry.position > attempt.through:
            return None
        return entry.body.decode()


_ITEM_KINDS: Final = frozenset(
    {"artifact", "evidence", "decision", "operation", "approval", "question", "constraint"}
)


def _refs(candidate: Summary) -> list[str]:
    statements = (*candidate.completed, *candidate.observations, *candidate.inferences)
    pairs = (ref for pair in candidate.contradictions for ref in pair)
    refs = dict.fromkeys(ref for statement in statements for ref in statement.refs)
    others = (
        candidate.accepted_decisions,
        candidate.open_questions,
        candidate.evidence_refs,
        candidate.pending_action_refs,
        pairs,
    )
    for more in others:
        refs.update(dict.fromkeys(more))
    return list(refs)


def _text(item: TailItem) -> str:
    text = event_text(item.event)
    return text if text is not None else encode(item.event).decode()


def _decoded(reply: SummarizeReply) -> Summary:
    try:
        return decode_summary(reply.summary)
    except SchemaInvalid as error:
        raise SummarizerFailure("invalid", str(error)) from error
