"""Asks a summariser for one candidate and has it validated: time limit, parts, failures told apart.

The one place between the compactor and the summarisers. It commits nothing and decides nothing about
when; what may become a checkpoint is decided by ``core.validation``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final

import anyio
import anyio.to_thread
import msgspec

from protocol.codec import digest_bytes, encode
from protocol.identifiers import parse_ref
from protocol.summary import Exchange, Range, SummarizeReply, SummarizeRequest, Summary
from sidecar import tracing
from sidecar.attempts import Attempt, Job
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
WINDOW_SHARE: Final = 0.15
"""Part of the summariser's window that a summary may take: it is there twice, as the previous one and the new."""
LEAST_ROOM_TOKENS: Final = 512
"""Of history that one request must have room for; below that a range would go in hundreds of requests."""

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

    def asked(self, job: Job) -> Summarizer:
        """Whom an attempt at this job asks."""
        return self._fallback if job.fallback and self._fallback is not None else self._primary

    async def generate(
        self,
        attempt: Attempt,
        *,
        runs: Mapping[str, Ledger],
        covered: Sequence[TailItem],
        previous: Summary | None,
        range_tokens: int,
    ) -> Verdict:
        """One validated candidate, accepted or not. ``runs`` is the family with the run as of the handoff. What
        was spent is added to the attempt, whatever its end.

        Raises ``SummarizerFailure`` when there is no candidate at all.
        """
        summarizer = self.asked(attempt.job)
        desk = self._desk
        protected = protected_names(runs, attempt.run)
        exchanges = await anyio.to_thread.run_sync(exchange_items, covered)
        attempt.summarised, attempt.dropped = len(exchanges), len(covered) - len(exchanges)
        limit = round(min(desk.budget.packet_tokens * SUMMARY_SHARE, summarizer.window_tokens * WINDOW_SHARE))
        limit = max(LEAST_SUMMARY_TOKENS, limit)
        try:
            with desk.metrics.phase("generate"):
                reply = await self._ask(summarizer, attempt, protected, exchanges, previous, limit)
            with desk.metrics.phase("validate"):
                verdict = await self._validate(
                    attempt, reply, protected, covered, exchanges, previous, limit, range_tokens
                )
        except SummarizerFailure as failure:
            desk.metrics.summarized(summarizer.name, failure.reason)
            raise
        wrong_shape = "schema_invalid" in verdict.violations
        desk.metrics.summarized(summarizer.name, "invalid" if wrong_shape else "ok")
        return verdict

    async def _ask(
        self,
        summarizer: Summarizer,
        attempt: Attempt,
        protected: Mapping[str, object],
        exchanges: Sequence[Exchange],
        previous: Summary | None,
        limit: int,
    ) -> SummarizeReply:
        """The reply to the last part of the range; each part goes on from the summary of the one before."""
        instructions = summarizer.instructions
        request = SummarizeRequest(
            attempt_id=attempt.attempt_id,
            run=attempt.run,
            range=Range(from_=attempt.first, through=attempt.through),
            previous=previous,
            ledger=msgspec.Raw(encode(protected)),
            exchanges=(),
            max_tokens=limit,
            instructions=instructions,
            instructions_digest=digest_bytes(instructions.encode()) if instructions else "",
        )
        left = exchanges
        while True:
            overhead = bytes_tokens(len(encode(request))) + limit
            if overhead + LEAST_ROOM_TOKENS > summarizer.window_tokens:
                raise SummarizerFailure(
                    "unavailable",
                    f"its window of {summarizer.window_tokens} tokens has no room for history: "
                    f"{overhead} are taken by ledger, summaries and instructions",
                )
            part = await anyio.to_thread.run_sync(_next_part, left, summarizer.window_tokens, overhead)
            left = left[len(part) :]
            reply = await self._once(summarizer, attempt, msgspec.structs.replace(request, exchanges=part))
            if not left:
                return reply
            request = msgspec.structs.replace(request, previous=_go_on_from(reply, limit))
            self._desk.metrics.summarized(summarizer.name, "ok")

    async def _once(
        self, summarizer: Summarizer, attempt: Attempt, request: SummarizeRequest
    ) -> SummarizeReply:
        """One request under the time limit; what it cost is counted before anything else is said of it."""
        reply: SummarizeReply | None = None
        with self._asking(summarizer, attempt) as span:
            try:
                with anyio.move_on_after(self._desk.config.summarizer.timeout_seconds):
                    reply = await summarizer.summarize(request)
                if reply is None:
                    raise SummarizerFailure("timeout", "no summary within the time limit")
            except SummarizerFailure as failure:
                span.failed(failure.reason)
                raise
            span.set(_told(reply))
        if isinstance(reply.usage, msgspec.Struct):
            attempt.tokens_in += reply.usage.input_tokens
            attempt.tokens_out += reply.usage.output_tokens
            self._desk.metrics.summary_cost(
                summarizer.name, reply.usage.input_tokens, reply.usage.output_tokens
            )
        if reply.finish_reason == "length":
            raise SummarizerFailure("truncated", "the answer was cut at its length limit")
        if reply.finish_reason == "refusal":
            raise SummarizerFailure("refused", "the summariser refused")
        return reply

    def _asking(self, summarizer: Summarizer, attempt: Attempt) -> AbstractContextManager[tracing.Span]:
        """The span of one request, named as the conventions for generative AI name a model's."""
        attributes: dict[str, tracing.Attribute] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": summarizer.name,
            "gen_ai.conversation.id": attempt.run,
            "watchkeeper.attempt_id": attempt.attempt_id,
        }
        model = summarizer.projector.model
        if isinstance(model, str):
            attributes["gen_ai.request.model"] = model
        name = f"chat {model}" if isinstance(model, str) else f"summarize {summarizer.name}"
        return self._desk.tracer.span(name, kind="client", attributes=attributes)

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


def _told(reply: SummarizeReply) -> dict[str, tracing.Attribute]:
    """What an answer says about itself, for its span."""
    told: dict[str, tracing.Attribute] = {}
    if isinstance(reply.usage, msgspec.Struct):
        told["gen_ai.usage.input_tokens"] = reply.usage.input_tokens
        told["gen_ai.usage.output_tokens"] = reply.usage.output_tokens
    return told


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


def _next_part(left: Sequence[Exchange], window_tokens: int, overhead_tokens: int) -> tuple[Exchange, ...]:
    return next(parts(left, window_tokens, overhead_tokens=overhead_tokens))


def _go_on_from(reply: SummarizeReply, limit: int) -> Summary:
    """The summary of one part as the previous one of the next."""
    try:
        summary = decode_summary(reply.summary)
    except SchemaInvalid as error:
        raise SummarizerFailure("invalid", "the summary of a part is none") from error
    if statement_tokens(summary) > limit:
        raise SummarizerFailure("invalid", "the summary of a part is over its limit")
    return summary
