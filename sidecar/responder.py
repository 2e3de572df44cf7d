"""Answers the questions agents ask about their run.

Its state is read from committed memory under the lane's lock, by the owner within its lease only; evidence is
read from the store (``retrieval``, ``contexts``).
``authorize`` with an operation is an act: a record is published, and the answer is what the fold decided
where it met that record. Whatever is unsure is answered ``unavailable``; nothing is ever allowed for it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Literal

import anyio
import msgspec
import structlog
from msgspec import UNSET

from protocol import asks, subjects
from protocol.codec import decode_ask, encode
from protocol.errors import AskErrorCode, AskRefused
from protocol.events import AuthorizationRequested
from protocol.handoff import CoversThrough
from protocol.identifiers import is_token
from sidecar import tracing
from sidecar.compactor import Compactor
from sidecar.contexts import Contexts
from sidecar.core import gate, policy
from sidecar.core.course import Defer
from sidecar.core.gate import Decision
from sidecar.desk import Desk
from sidecar.indexing import Indexing
from sidecar.large_contents import LargeContents
from sidecar.notices import derived_id
from sidecar.packets import Packets
from sidecar.retrieval import Retrieval
from sidecar.runs import HotRun
from sidecar.transport.errors import TransportError
from sidecar.transport.micro import AskAnswer
from sidecar.transport.publisher import LanePublisher
from storage.errors import StorageError

AFTER_SECONDS = 2.0
"""How long ``after`` and the fold of an authorization are waited for (wire protocol, section 3)."""

_STATUS_OF_ERROR: dict[AskErrorCode, int] = {
    "run_unknown": 404,
    "invalid_request": 400,
    "too_large": 413,
    "unavailable": 503,
    "behind": 503,
}

log = structlog.get_logger(__name__)


class Responder:
    """One lane's answers. ``decided`` is called for every authorization the fold met and committed."""

    def __init__(
        self,
        desk: Desk,
        publisher: LanePublisher,
        packets: Packets,
        compactor: Compactor,
        large: LargeContents | None = None,
    ) -> None:
        self._desk = desk
        self._publisher = publisher
        self._packets = packets
        self._compactor = compactor
        self._retrieval = Retrieval(desk, Indexing(desk), large)
        self.contexts = Contexts(desk, packets)
        self._waiting: dict[tuple[str, str], _Wait] = {}

    def rest(self) -> None:
        """Let go of what is kept for answers about runs that left memory."""
        self._packets.rest()
        self.contexts.rest()

    async def answer(self, run: str, verb: str, payload: bytes) -> AskAnswer | None:
        """The reply to one request; every failure is a typed error reply.

        None, which is silence, once the lease is not certain: another may own the lane, and its answer counts.
        """
        desk = self._desk
        began = desk.mono()
        error: str | None = None
        try:
            body = await self._traced(run, verb, payload)
            if len(body) + 1024 > desk.max_payload:
                raise AskRefused("too_large", "the answer is larger than the broker's limit")
            return self._if_ours(AskAnswer(body=body, error_code=None, error=None))
        except AskRefused as refused:
            error = refused.code
            if error == "run_unknown" and verb in ("packet", "context"):
                desk.metrics.retrieved(verb, "not_found")
            return self._if_ours(_refusal(refused))
        except (StorageError, TransportError) as trouble:
            error = "unavailable"
            log.warning("question not answered", run=run, verb=verb, error=str(trouble))
            told = AskRefused("unavailable", "storage or broker is not available; ask again")
            return self._if_ours(_refusal(told))
        finally:
            desk.metrics.asked(verb, desk.mono() - began, error)

    async def _traced(self, run: str, verb: str, payload: bytes) -> bytes:
        """The answer, as one span of the asker's trace and with its ids in every line logged meanwhile."""
        desk = self._desk
        known = verb if verb in subjects.VERBS else "unknown"
        attributes: dict[str, tracing.Attribute] = {
            "gen_ai.conversation.id": run,
            "watchkeeper.lane": desk.lane,
            "watchkeeper.verb": known,
        }
        with (
            structlog.contextvars.bound_contextvars(lane=desk.lane, run=run, action=known),
            desk.tracer.span(f"watchkeeper.ask {known}", kind="server", attributes=attributes) as span,
        ):
            try:
                return await self._answer(run, verb, payload)
            except AskRefused as refused:
                span.failed(refused.code)
                raise

    def _if_ours(self, answer: AskAnswer) -> AskAnswer | None:
        return answer if self._desk.lease_valid() else None

    async def _answer(self, run: str, verb: str, payload: bytes) -> bytes:
        if verb not in subjects.VERBS:
            raise AskRefused("invalid_request", f"verb {verb[:40]} is not answered here")
        if not is_token(run):
            raise AskRefused("invalid_request", "the run in the subject is not a subject token")
        request = decode_ask(verb, payload)  # type: ignore[arg-type]
        self._still_ours()
        if not self._desk.caught_up:
            raise AskRefused("unavailable", "the lane's history is still being read; ask again")
        if request.after is not None and not await self._desk.reached(request.after, AFTER_SECONDS):
            raise AskRefused("behind", f"sequence {request.after} is not read yet; ask again")
        match request:
            case asks.AskPacket():
                return await self._packet(run)
            case asks.AskStatus():
                return await self._status(run)
            case asks.AskAuthorize():
                return await self._authorize(run, request)
            case asks.AskCompact():
                return await self._compact(run, request)
            case asks.AskFetch():
                return await self._retrieval.fetch(run, request)
            case asks.AskSearch():
                return await self._retrieval.search(run, request)
            case asks.AskContext():
                return await self.contexts.context(run, request)
        raise AskRefused("invalid_request", f"verb {verb[:40]} is not answered here")

    async def _hot(self, run: str) -> HotRun:
        """The run in memory; hold the lock."""
        await self._desk.runs.load([run])
        hot = self._desk.runs.hot.get(run)
        if hot is None:
            raise AskRefused("run_unknown", f"no message of run {run} was read in this lane")
        return hot

    def _still_ours(self) -> None:
        if not self._desk.lease_valid():
            raise AskRefused("unavailable", "the lane's ownership is not certain now; ask again")

    async def _packet(self, run: str) -> bytes:
        async with self._desk.lock:
            await self._hot(run)
            packet = await self._packets.asked(run)
            self._still_ours()
            self._desk.metrics.retrieved("packet", "found")
            return encode(packet)

    async def _status(self, run: str) -> bytes:
        desk = self._desk
        async with desk.lock:
            hot = await self._hot(run)
            checkpoint = await self._packets.checkpoint(run)
            pending = await desk.store.outbox_count(desk.tenant, desk.lane)
            ledger, view = hot.ledger, hot.view
            mode, _ = desk.config.mode_for(ledger.head.labels)
            violations = dict(ledger.head.violations)
            for code, count in view.violations.items():
                violations[code] = violations.get(code, 0) + count
            reply = asks.StatusReply(
                epoch=desk.voice.epoch,
                level=view.budget.level,
                budget=asks.StatusBudget(
                    used=max(0, view.budget.used()),
                    usable=view.budget.usable(desk.budget),
                    window=view.budget.window,
                ),
                checkpoint=None
                if checkpoint is None
                else asks.StatusCheckpoint(
                    id=checkpoint.id,
                    version=checkpoint.version,
                    covers_through=CoversThrough(
                        position=checkpoint.covers_through.position,
                        event_id=checkpoint.covers_through.event_id,
                    ),
                ),
                ledger_version=ledger.head.version,
                position=ledger.head.position,
                open_calls=tuple(
                    asks.StatusCall(call_id=call.call_id, tool=call.tool, event_id=call.id)
                    for call in ledger.active["call"].values()
                    if call.state == "open"
                ),
                open_operations=tuple(
                    asks.StatusOperation(id=item.id, kind=item.kind or "", state=item.state)
                    for item in ledger.active["operation"].values()
                ),
                pending_approvals=tuple(
                    asks.StatusApproval(id=item.id, action=item.action)
                    for item in ledger.active["approval"].values()
                    if item.state == "pending"
                ),
                gaps=tuple(
                    asks.StatusGap(
                        from_=gap.first,
                        through=gap.through,
                        channel=gap.channel,
                        state="declared" if gap.declared else "open",
                        session=UNSET if gap.session is None else gap.session,
                    )
                    for gap in ledger.active["gap"].values()
                ),
                violations=violations,
                mode=mode,
                lag=desk.lag,
                compaction=self._compaction(run, hot),
                outbox_pending=pending,
                stream_seq=desk.cursor.stream_seq,
                trimmed_through=view.course.trimmed_through,
                packet_id=view.published.shortening_id or UNSET,
            )
            self._still_ours()
            return encode(reply)

    def _compaction(self, run: str, hot: HotRun) -> asks.StatusCompaction:
        job = self._compactor.running.get(run)
        if job is not None:
            if job.attempt_id:
                return asks.StatusCompaction(state="running", attempt_id=job.attempt_id)
            return asks.StatusCompaction(state="due")
        reason = hot.view.course.deferred
        if reason:
            return asks.StatusCompaction(state="deferred", reason=reason)
        return asks.StatusCompaction(state="idle")

    async def _compact(self, run: str, request: asks.AskCompact) -> bytes:
        desk = self._desk
        while True:
            async with desk.lock:
                hot = await self._hot(run)
                under_way = self._compactor.running.get(run)
                if under_way is None:
                    step = await self._requested(run, hot)
                    if isinstance(step, Defer):
                        return self._compact_reply("deferred", reason=step.reason)
                    said = desk.redactor.text(request.reason or "")
                    job = self._compactor.prepare(run, step.trigger, fallback=step.fallback, reason=said)
                    break
                if under_way.attempt_id:
                    return self._compact_reply("running", under_way.attempt_id)
            # What is only planned may end as a trim or be put off: that would not be what was asked for.
            await under_way.settled.wait()
        if job is None:
            raise AskRefused("unavailable", "the daemon is stopping; ask again")
        await job.settled.wait()
        if job.attempt_id:
            return self._compact_reply("started", job.attempt_id)
        return self._compact_reply("deferred", reason=job.deferred or "cool_down")

    async def _requested(self, run: str, hot: HotRun) -> policy.Prepare | Defer:
        """What the core says to the request; hold the lock."""
        desk = self._desk
        mode, bypass = desk.config.mode_for(hot.ledger.head.labels)
        course = hot.view.course_of(mode)
        asked = course.asked
        step = policy.on_request(
            hot.ledger, hot.view.budget, course, desk.budget, mode=mode, bypass=bypass, now=desk.wall()
        )
        if isinstance(step, Defer) and course.asked != asked:
            # Since when is waited outlives us.
            await desk.commit(touched=[run])
        return step

    def _compact_reply(
        self, state: Literal["started", "running", "deferred"], attempt_id: str = "", *, reason: str = ""
    ) -> bytes:
        return encode(
            asks.CompactReply(
                epoch=self._desk.voice.epoch,
                state=state,
                attempt_id=attempt_id or UNSET,
                reason=reason or UNSET,
            )
        )

    # --- authorize --------------------------------------------------------------------------------------

    async def _authorize(self, run: str, request: asks.AskAuthorize) -> bytes:
        desk = self._desk
        acts = request.operation_id is not None and not request.dry_run
        if request.target is not None:
            # What it is compared with has lost its secrets too.
            request = msgspec.structs.replace(request, target=desk.redactor.text(request.target))
        async with desk.lock:
            hot = await self._hot(run)
            operation = hot.ledger.get("operation", request.operation_id or "")
            short = operation is not None and gate.is_put_off(operation) and await self._packets.short(run)
            decide = partial(
                gate.before_act if acts else gate.look,
                desk.runs.lane,
                desk.runs.ledgers,
                run,
                request,
                now=datetime.fromtimestamp(desk.wall(), UTC),
                short=short,
            )
            decision = await desk.aside(run, decide, shown=True)
            if decision is not None:
                self._still_ours()
                desk.metrics.authorized(decision.code, act=acts)
                return self._reply(hot.ledger.head.version, decision)
            version = hot.ledger.head.version
        assert request.operation_id is not None
        assert request.request_id is not None
        record = AuthorizationRequested(
            v=1,
            id=derived_id("authorize", request.operation_id, request.request_id, version),
            at=datetime.fromtimestamp(desk.wall(), UTC),
            epoch=desk.voice.epoch,
            operation_id=request.operation_id,
            request_id=request.request_id,
            policy_version=request.policy_version,
            traceparent=tracing.current(),
        )
        decision, version = await self._act(run, record)
        desk.metrics.authorized(decision.code)
        return self._reply(version, decision)

    async def _act(self, run: str, record: AuthorizationRequested) -> tuple[Decision, int]:
        """Publish the record and wait for the fold's word on it, two seconds in all; the word and the ledger
        version it was given at."""
        key = (run, record.id)
        wait = self._waiting.setdefault(key, _Wait())
        wait.askers += 1
        try:
            with anyio.move_on_after(AFTER_SECONDS):
                subject = subjects.inbound(self._desk.tenant, self._desk.lane, run, "record")
                await self._publisher.publish_record(subject, encode(record))
                await wait.done.wait()
        finally:
            wait.askers -= 1
            if not wait.askers:
                self._waiting.pop(key, None)
        if wait.decision is None:
            raise AskRefused(
                "unavailable", "not decided within two seconds; ask again with the same request_id"
            )
        self._still_ours()
        return wait.decision, wait.version

    def decided(self, run: str, record_id: str, decision: Decision, version: int) -> None:
        """The fold met this record at ledger ``version`` and the decision is committed."""
        wait = self._waiting.get((run, record_id))
        if wait is not None:
            wait.decision, wait.version = decision, version
            wait.done.set()

    def _reply(self, version: int, decision: Decision) -> bytes:
        return encode(gate.reply(decision, epoch=self._desk.voice.epoch, version=version))


class _Wait:
    """Askers of one record, and the fold's word once it is there."""

    def __init__(self) -> None:
        self.askers = 0
        self.done = anyio.Event()
        self.decision: Decision | None = None
        self.version = 0


def _refusal(refused: AskRefused) -> AskAnswer:
    body = encode(asks.AskError(error=asks.ErrorBody(code=refused.code, message=refused.message)))
    return AskAnswer(
        body=body, error_code=_STATUS_OF_ERROR[refused.code], error=f"{refused.code}: {refused.message}"
    )
