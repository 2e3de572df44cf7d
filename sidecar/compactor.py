"""Compaction of one lane's runs: prepare, generate, validate, commit; at most one attempt per run.

The shell around the core's decisions: it reads the range, asks the summariser under a time limit, and
commits checkpoint, receipt, packet and notices in one transaction. Whatever fails, the previous
checkpoint and the tail stay as they were.
"""

from __future__ import annotations

from typing import Any

import anyio
import anyio.to_thread
import msgspec
import structlog
from anyio.abc import TaskGroup

from protocol import subjects
from protocol.codec import decode_event, digest, encode
from protocol.errors import ProtocolError
from protocol.handoff import Receipt
from protocol.summary import Summary
from sidecar.core import policy
from sidecar.core.boundary import TailItem
from sidecar.core.budget import Budget
from sidecar.core.state import Ledger, ledger_value
from sidecar.core.tokens import estimate
from sidecar.desk import Desk
from sidecar.generation import Generated, Generation
from sidecar.notices import derived_id
from sidecar.packets import Packets, StoredBody, stored_checkpoint
from sidecar.runs import HotRun
from sidecar.states import state_row
from sidecar.summarizers import SummarizerFailure
from storage.errors import Stale, StorageError
from storage.records import AttemptRow, CheckpointRow, JournalEntry, OutboxRow, ReceiptRow

log = structlog.get_logger(__name__)


class Job(msgspec.Struct, kw_only=True):
    """One need for compaction, frozen at the message where it fell due."""

    run: str
    trigger: str
    mode: str
    position: int
    ledger: Ledger
    ledger_digest: str
    budget: Budget
    course: policy.Course
    chain_parent: str | None
    session: str | None
    reason: str = ""


class Compactor:
    """``prepare`` under the lock where the need arises; the rest runs in its own task."""

    def __init__(self, desk: Desk, packets: Packets, generation: Generation) -> None:
        self._desk = desk
        self._packets = packets
        self._generation = generation
        self._tasks: TaskGroup | None = None
        self._limit = anyio.CapacityLimiter(4)
        self.running: dict[str, str] = {}
        """Run → attempt id, or empty while it is still being planned."""

    async def run(self) -> None:
        """Host of the attempts' tasks, until cancelled."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            await anyio.sleep_forever()

    def prepare(self, run: str, trigger: str, reason: str = "") -> None:
        """Freeze the run as it is now and start working; hold the lock. No second attempt beside a first."""
        if run in self.running or self._tasks is None:
            return
        hot = self._desk.runs.hot[run]
        mode, _ = self._desk.config.mode_for(hot.ledger.head.labels)
        ledger = hot.ledger.snapshot()
        job = Job(
            run=run,
            trigger=trigger,
            mode=mode,
            position=ledger.head.position,
            ledger=ledger,
            ledger_digest=digest(ledger_value(ledger)),
            budget=_copy(hot.view.budget, Budget),
            course=_copy(hot.view.course, policy.Course),
            chain_parent=hot.view.course.checkpoint_id or None,
            session=ledger.head.session,
            reason=reason,
        )
        self.running[run] = ""
        hot.busy += 1
        self._tasks.start_soon(self._work, job)

    async def _work(self, job: Job) -> None:
        desk = self._desk
        try:
            async with self._limit:
                await self._plan(job)
        except StorageError as error:
            log.warning("compaction given up: storage", run=job.run, error=str(error))
        finally:
            self.running.pop(job.run, None)
            hot = desk.runs.hot.get(job.run)
            if hot is not None:
                hot.busy = max(0, hot.busy - 1)

    # --- prepare -------------------------------------------------------------------------------------

    async def _plan(self, job: Job) -> None:
        desk = self._desk
        with desk.metrics.phase("prepare"):
            entries = await desk.store.tail(
                desk.tenant, desk.lane, job.run, after=job.course.covers_through, through=job.position
            )
            items = await anyio.to_thread.run_sync(_tail_items, entries)
            plan = await anyio.to_thread.run_sync(
                lambda: policy.plan(
                    items, job.ledger, job.budget, job.course, desk.budget, trigger=job.trigger, now=desk.wall()
                )
            )
        match plan:
            case policy.Defer(reason=reason):
                await self._deferred(job, reason)
            case policy.Ineffective(reason=reason):
                await self._ineffective(job, reason)
            case policy.Trim():
                await self._trim(job, plan)
            case policy.Compact():
                await self._compact(job, plan, entries, items)

    async def _deferred(self, job: Job, reason: str) -> None:
        desk = self._desk
        async with desk.lock:
            await desk.runs.load([job.run])
            hot = desk.runs.hot[job.run]
            changed = hot.view.course.deferred != reason
            hot.view.course.deferred = reason
            hot.view.course.deferred_at = job.position
            outbox: list[OutboxRow] = []
            if changed:
                desk.metrics.deferred(reason)
                outbox.append(
                    desk.voice.notice(job.run, "compaction_deferred", desk.now_text(), job.position, reason=reason)
                )
            await desk.commit(touched=[job.run], outbox=outbox)

    async def _ineffective(self, job: Job, reason: str) -> None:
        desk = self._desk
        async with desk.lock:
            await desk.runs.load([job.run])
            hot = desk.runs.hot[job.run]
            outbox: list[OutboxRow] = []
            if not hot.view.course.ineffective:
                outbox.append(desk.voice.notice(job.run, "ineffective", desk.now_text(), job.position, reason=reason))
            policy.mark_ineffective(hot.view.course, job.budget, reason, position=job.position)
            await desk.commit(touched=[job.run], outbox=outbox)

    async def _trim(self, job: Job, plan: policy.Trim) -> None:
        desk = self._desk
        async with desk.lock:
            await desk.runs.load([job.run])
            hot = desk.runs.hot[job.run]
            if hot.view.course.checkpoint_version != job.course.checkpoint_version:
                return
            policy.trimmed(hot.view.course, hot.view.budget, plan)
            hot.view.cleared = [*hot.view.cleared, *plan.cleared]
            outbox: list[OutboxRow] = []
            built = None
            if job.mode == "live":
                built = await self._packets.build(job.run, "trimmed")
                self._packets.published(hot, built.packet)
                outbox.append(self._packets.row(built.packet))
            hot.view.trims += 1
            await desk.commit(touched=[job.run], outbox=outbox)
            desk.metrics.trimmed()
            if built is not None:
                self._packets.count(built)

    # --- generate, validate, commit --------------------------------------------------------------------

    async def _compact(
        self, job: Job, plan: policy.Compact, entries: list[JournalEntry], items: list[TailItem]
    ) -> None:
        desk = self._desk
        if plan.rebuild:
            entries = await desk.store.tail(desk.tenant, desk.lane, job.run, after=0, through=plan.through)
            items = await anyio.to_thread.run_sync(_tail_items, entries)
        covered = [item for item in items if item.position <= plan.through]
        range_digest = _range_digest(entries, plan.through)
        started = desk.now_text()
        first = 1 if plan.rebuild else plan.first
        async with desk.lock:
            await desk.runs.load([job.run])
            hot = desk.runs.hot[job.run]
            hot.view.course.attempts += 1
            attempt_id = derived_id(
                "at", desk.tenant, desk.lane, job.run, hot.view.course.attempts, first, plan.through
            )
            self.running[job.run] = attempt_id
            await desk.commit(
                touched=[job.run],
                open_attempt=AttemptRow(
                    attempt_id=attempt_id,
                    run=job.run,
                    trigger=job.trigger,
                    first=first,
                    through=plan.through,
                    range_digest=range_digest,
                    handoff_position=job.position,
                    ledger_digest=job.ledger_digest,
                    started_at=started,
                    body=b"",
                ),
                outbox=[
                    desk.voice.notice(
                        job.run, "compaction_started", started, attempt_id, attempt_id=attempt_id
                    )
                ],
            )
        attempt = Attempt(
            attempt_id=attempt_id,
            job=job,
            plan=plan,
            first=first,
            range_digest=range_digest,
            started_at=started,
            number=hot.view.course.failures + 1,
        )
        try:
            previous = None
            if not plan.rebuild:
                checkpoint = await self._packets.checkpoint(job.run)
                previous = checkpoint.summary if checkpoint is not None else None
            generated = await self._generation.generate(
                attempt_id=attempt_id,
                run=job.run,
                ledger=job.ledger,
                runs=desk.runs.ledgers,
                covered=covered,
                first=first,
                through=plan.through,
                previous=previous,
                tokens_before=job.budget.used(),
            )
        except SummarizerFailure as failure:
            await self._failed(attempt, failure.reason, [])
            return
        if not generated.verdict.accepted:
            await self._failed(attempt, "invalid", list(generated.verdict.violations), generated)
            return
        await self._commit(attempt, generated)

    async def _commit(self, attempt: Attempt, generated: Generated) -> None:
        desk, job, plan = self._desk, attempt.job, attempt.plan
        async with desk.lock:
            await desk.runs.load([job.run])
            hot = desk.runs.hot[job.run]
            course = hot.view.course
            if course.checkpoint_version != job.course.checkpoint_version or job.mode == "observe":
                await self._close(attempt, hot, outcome="stale", reason="another checkpoint is newest")
                return
            finished = desk.now_text()
            body = StoredBody(
                summarizer=generated.summarizer,
                projector=generated.projector,
                summary=generated.verdict.summary,
                attempt_id=attempt.attempt_id,
            )
            encoded = encode(body)
            row = CheckpointRow(
                checkpoint_id=derived_id("cp", desk.tenant, desk.lane, job.run, attempt.range_digest, digest(body)),
                run=job.run,
                chain="live" if job.mode == "live" else "shadow",
                version=course.checkpoint_version + 1,
                parent_id=job.chain_parent,
                covers_through=plan.through,
                event_id=plan.event_id,
                range_digest=attempt.range_digest,
                created_at=finished,
                body=encoded,
            )
            used_before = hot.view.budget.used()
            hot.view.committed(row, plan, hot.ledger.head)
            outbox: list[OutboxRow] = []
            built = None
            tokens_after = used_before
            if job.mode == "live":
                checkpoint = stored_checkpoint(row)
                built = self._packets.build_with(job.run, "compacted", checkpoint)
                tokens_after = hot.view.after_take_up(built.tokens)
                if not policy.gains(used_before, tokens_after, plan, desk.budget):
                    desk.runs.discard()
                    await desk.runs.load([job.run])
                    await self._close(
                        attempt, desk.runs.hot[job.run], outcome="failed", reason="invalid", violations=["no_gain"]
                    )
                    return
                built = hot.view.fix_budget(built, used_before, tokens_after)
                self._packets.published(hot, built.packet)
                outbox.append(state_row(desk, hot, checkpoint))
                outbox.append(self._packets.row(built.packet))
            receipt = self._receipt(
                attempt,
                outcome="applied" if job.mode == "live" else "shadow",
                reason="",
                finished_at=finished,
                tokens={
                    "before": used_before,
                    "after": tokens_after,
                    "packet": 0 if built is None else built.tokens,
                    **generated.tokens(),
                },
                generated=generated,
                checkpoint_id=row.checkpoint_id,
                built=built,
            )
            outbox.append(self._receipt_row(receipt))
            try:
                await desk.commit(
                    touched=[job.run],
                    outbox=outbox,
                    close_attempt=attempt.attempt_id,
                    checkpoint=row,
                    receipt=self._stored(receipt),
                )
            except Stale:
                await desk.runs.load([job.run])
                await self._close(attempt, desk.runs.hot[job.run], outcome="stale", reason="parent moved")
                return
            self._packets.forget(job.run)
            desk.metrics.compacted(receipt.outcome, job.trigger, used_before, tokens_after)
            if built is not None:
                self._packets.count(built)
            log.info("compacted", run=job.run, through=plan.through, before=used_before, after=tokens_after)
