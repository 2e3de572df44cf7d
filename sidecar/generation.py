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
from protocol.summary import Range, SummarizeReply, SummarizeRequest, Summary
from sidecar import tracing
from sidecar.attempts import Attempt, Job
from sidecar.core.claims import statement_tokens
from sidecar.core.exchanges import TailItem
from sidecar.core.material import event_text, exchange_items
from sidecar.core.packet import protected_names
from sidecar.core.state import Ledger
from sidecar.core.tokens import bytes_tokens
from sidecar.core.validation import Compared, Limits, SchemaInvalid, Verdict, decode_summary, validate
from sidecar.desk import Desk
from sidecar.portions import Portions
from sidecar.ranges import Reading, tail_items
from sidecar.summarizers import Summarizer, SummarizerFailure
from storage.records import JournalEntry

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
        previous: Summary | None,
        range_tokens: int,
    ) -> Verdict:
        """One validated candidate, accepted or not. ``runs`` is the family with the run as of the handoff. What
        was spent is added to the attempt, whatever its end. The range is read from storage, a page at a time.

        Raises ``SummarizerFailure`` when there is no candidate at all.
        """
        summarizer = self.asked(attempt.job)
        desk = self._desk
        protected = await anyio.to_thread.run_sync(protected_names, runs, attempt.run)
        limit = round(min(desk.budget.packet_tokens * SUMMARY_SHARE, summarizer.window_tokens * WINDOW_SHARE))
        limit = max(LEAST_SUMMARY_TOKENS, limit)
        try:
            with desk.metrics.phase("generate"):
                reply = await self._ask(summarizer, attempt, protected, previous, limit)
            with desk.metrics.phase("validate"):
                verdict = await self._validate(attempt, reply, protected, previous, limit, range_tokens)
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
            ledger=msgspec.Raw(await anyio.to_thread.run_sync(encode, protected)),
            exchanges=(),
            max_tokens=limit,
            instructions=instructions,
            instructions_digest=digest_bytes(instructions.encode()) if instructions else "",
        )
        portions = Portions(self._reading(attempt))
        while True:
            overhead = bytes_tokens(len(await anyio.to_thread.run_sync(encode, request))) + limit
            if overhead + LEAST_ROOM_TOKENS > summarizer.window_tokens:
                raise SummarizerFailure(
                    "unavailable",
                    f"its window of {summarizer.window_tokens} tokens has no room for history: "
                    f"{overhead} are taken by ledger, summaries and instructions",
                )
            part = await portions.next(summarizer.window_tokens, overhead)
            reply = await self._once(summarizer, attempt, msgspec.structs.replace(request, exchanges=part))
            if portions.ended:
                attempt.summarised, attempt.dropped = portions.shown, portions.others
                return reply
            request = msgspec.structs.replace(request, previous=_go_on_from(reply, limit))
            self._desk.metrics.summarized(summarizer.name, "ok")

    def _reading(self, attempt: Attempt) -> Reading:
        return Reading(self._desk, attempt.run, attempt.first - 1, attempt.through)

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
        previous: Summary | None,
        limit: int,
        range_tokens: int,
    ) -> Verdict:
        try:
            candidate = decode_summary(reply.summary)
        except SchemaInvalid:
            return Verdict(accepted=False, summary=_NO_SUMMARY, violations=("schema_invalid",))
        limits = Limits(max_tokens=limit)
        compared = Compared(candidate, limits)
        # Of a message the stream holds no more, what was accepted about it stands in its place.
        texts = _accepted(previous) | await self._texts(attempt, candidate, compared)
        after = statement_tokens(candidate)
        verdict = await anyio.to_thread.run_sync(
            lambda: validate(
                candidate,
                ledger=attempt.job.ledger,
                protected=protected,
                covered=compared,
                resolve=texts.get,
                previous=previous,
                limits=limits,
                tokens_before=max(range_tokens, 1),
                tokens_after=after,
            )
        )
        if verdict.echo:
            raise SummarizerFailure("echo", "the answer repeats an assistant's message")
        return verdict

    async def _texts(self, attempt: Attempt, candidate: Summary, compared: Compared) -> dict[str, str]:
        """The text each ref of the candidate leads to; a ref that leads nowhere is absent. The candidate is
        compared with the range on the way through it."""
        found: dict[str, str] = {}
        named = _Named(compared)
        messages: list[tuple[str, str, str]] = []
        for ref in _refs(candidate):
            try:
                parsed = parse_ref(ref)
            except ValueError:
                continue
            if parsed.run is not None:
                continue
            if parsed.kind in ("event", "pos"):
                messages.append((ref, parsed.kind, parsed.value))
            elif parsed.kind in _ITEM_KINDS:
                known = attempt.job.ledger.get(parsed.kind, parsed.value)
                if known is not None:
                    found[ref] = encode(known).decode()
        named.events = {value for _, kind, value in messages if kind == "event"}
        named.positions = {int(value) for _, kind, value in messages if kind == "pos"}
        if compared.types or messages:
            await self._reading(attempt).pages(named.take)
        for ref, kind, value in messages:
            text = named.texts.get(value if kind == "event" else int(value))
            text = await self._stored(attempt, kind, value) if text is None else text
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


def _accepted(previous: Summary | None) -> dict[str, str]:
    """By ref: what the statements of the summary before, accepted in its time, say by it."""
    said: dict[str, str] = {}
    if previous is not None:
        for statement in (*previous.completed, *previous.observations, *previous.inferences):
            for ref in statement.refs:
                said[ref] = f"{said[ref]}\n{statement.text}" if ref in said else statement.text
    return said


class _Named:
    """The texts of the range's messages that a candidate names, gathered page by page."""

    def __init__(self, compared: Compared) -> None:
        self._compared = compared
        self.events: set[str] = set()
        self.positions: set[int] = set()
        self.texts: dict[str | int, str] = {}
        """By id or position."""

    def take(self, entries: Sequence[JournalEntry]) -> None:
        """CPU only, run it off the loop. What makes no difference is not even decoded."""
        types = self._compared.types
        wanted = [
            entry
            for entry in entries
            if entry.type in types or entry.event_id in self.events or entry.position in self.positions
        ]
        items = tail_items(wanted)
        for item in items:
            if item.position in self.positions:
                self.texts[item.position] = _text(item)
            if item.channel == "event" and item.event.id in self.events:
                self.texts[item.event.id] = _text(item)
        self._compared.take(exchange_items(items))


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


def _go_on_from(reply: SummarizeReply, limit: int) -> Summary:
    """The summary of one part as the previous one of the next."""
    try:
        summary = decode_summary(reply.summary)
    except SchemaInvalid as error:
        raise SummarizerFailure("invalid", "the summary of a part is none") from error
    if statement_tokens(summary) > limit:
        raise SummarizerFailure("invalid", "the summary of a part is over its limit")
    return summary
