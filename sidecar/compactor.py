"""Compaction of one lane's runs: prepare, generate, validate, commit; at most one attempt per run.

The shell around the core's decisions: it reads the range, asks for a summary under a time limit, and
commits checkpoint, receipt, packet and notices in one transaction. Whatever fails, the previous
checkpoint and the tail stay as they were.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import anyio
import anyio.to_thread
import msgspec
import structlog
from anyio.abc import TaskGroup

from protocol.codec import digest, encode
from sidecar.attempts import Attempt, AttemptBody, Ending, Job, receipt, receipt_rows
from sidecar.core import family, policy
from sidecar.core.course import DeferReason, used_tokens
from sidecar.core.exchanges import TailItem
from sidecar.core.state import ledger_value
from sidecar.core.validation import Verdict
from sidecar.desk import Desk
from sidecar.generation import Generation
from sidecar.indexing import Indexing
from sidecar.notices import derived_id
from sidecar.packets import Packets, StoredBody, stored_checkpoint
from sidecar.ranges import range_digest, tail_items
from sidecar.runs import HotRun
from sidecar.states import state_row
from sidecar.summarizers import SummarizerFailure
from sidecar.view import View, copy_view
from storage.errors import Stale, StorageError
from storage.records import AttemptRow, Chain, CheckpointRow, JournalEntry, OutboxRow

_AT_ONCE = 4
"""Attempts of a lane under way together; more wait."""

log = structlog.get_logger(__name__)


class Compactor:
    """``prepare`` under the lock where the need arises; the rest runs in its own task."""

    def __init__(self, desk: Desk, packets: Packets, generation: Generation) -> None:
        self._desk = desk
        self._packets = packets
        self._generation = generation
        self._indexing = Indexing(desk)
        self._tasks: TaskGroup | None = None
        self._ended = anyio.Event()
        self._limit = anyio.CapacityLimiter(_AT_ONCE)
        self.running: dict[str, Job] = {}

    async def run(self) -> None:
        """Host of the attempts' tasks, until cancelled: what is under way then is closed as interrupted at
        the next start."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                await anyio.sleep_forever()
        finally:
            self._tasks = None
            self._ended.set()

    async def abandon(self) -> None:
        """Start nothing new; what is being generated is given up and recorded as interrupted."""
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()
            self._tasks = None
            # One that is committing just now does so; it must not be taken for open meanwhile.
            await self._ended.wait()
        await self.close_interrupted()

    def prepare(self, run: str, trigger: str, *, fallback: bool = False, reason: str = "") -> Job | None:
        """Freeze the run as it is now and start working; hold the lock. None while stopping; a job that is
        already under way is returned instead of a second one."""
        if run in self.running:
            return self.running[run]
        if self._tasks is None:
            return None
        hot = self._desk.runs.hot[run]
        mode, _ = self._desk.config.mode_for(hot.ledger.head.labels)
        job = Job(
            run=run,
            trigger=trigger,
            fallback=fallback,
            mode=mode,
            ledger=hot.ledger.snapshot(),
            ancestors={
                ledger.head.run: ledger.snapshot()
                for ledger in family.line(self._desk.runs.ledgers, run)
                if ledger.head.run != run
            },
            budget=copy.copy(hot.view.budget),
            course=copy.copy(hot.view.course_of(mode)),
            reason=reason,
        )
        self.running[run] = job
        hot.busy += 1
        self._tasks.start_soon(self._work, job)
        return job

    async def _work(self, job: Job) -> None:
        """One of the daemon's two supervisors: an error that nobody foresaw ends this attempt, as a failed one,
        and never what the lane is there for."""
        try:
            async with self._limit:
                # One whose end storage refused to take would keep every later one from beginning.
                await self._close_open("storage", job.run)
                await self._plan(job)
        except StorageError as error:
            log.warning("compaction given up: storage refuses", run=job.run, error=str(error))
            await self._refused(job)
        except Exception as error:
            log.error("compaction stopped by a defect", run=job.run, exc_info=error)
            self._desk.metrics.unforeseen("compaction")
            await self._broken(job)
        finally:
            job.settled.set()
            self.running.pop(job.run, None)
            hot = self._desk.runs.hot.get(job.run)
            if hot is not None:
                hot.busy = max(0, hot.busy - 1)

    async def _refused(self, job: Job) -> None:
        """Record that storage ended the attempt, if storage takes that; else the run's next one does."""
        try:
            await self._close_open("storage", job.run)
        except StorageError as error:
            log.warning("end of a compaction not stored yet", run=job.run, error=str(error))
        hot = self._desk.runs.hot.get(job.run)
        if hot is not None:
            policy.given_up(hot.view.course_of(job.mode))

    async def _broken(self, job: Job) -> None:
        """Count a defect as a failure, so that back-off, breaker and fallback hold for it as well."""
        desk = self._desk
        try:
            if job.attempt is not None:
                await self._failed(job.attempt, "invalid", ())
                return
            async with desk.changing():
                course = (await self._hot(job)).view.course_of(job.mode)
                policy.failed(course, "invalid", now=desk.wall(), settings=desk.budget)
                await desk.commit(touched=[job.run])
        except StorageError as error:
            log.warning("compaction given up: storage refuses", run=job.run, error=str(error))
            await self._refused(job)

    async def _hot(self, job: Job) -> HotRun:
        """The run as it is now; hold the lock."""
        await self._desk.runs.load([job.run])
        return self._desk.runs.hot[job.run]

    # --- prepare -------------------------------------------------------------------------------------

    async def _plan(self, job: Job) -> None:
        desk = self._desk
        settings = desk.budget
        with desk.metrics.phase("prepare"):
            entries = await desk.store.tail(
                desk.tenant, desk.lane, job.run, after=job.course.covers_through, through=job.position
            )
            items = await anyio.to_thread.run_sync(tail_items, entries)
            plan = await anyio.to_thread.run_sync(
                lambda: policy.plan(items, job.ledger, job.budget, job.course, settings, trigger=job.trigger)
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

    async def _deferred(self, job: Job, reason: DeferReason) -> None:
        desk = self._desk
        job.deferred = reason
        async with desk.changing():
            course = (await self._hot(job)).view.course_of(job.mode)
            outbox: list[OutboxRow] = []
            if course.deferred != reason:
                desk.metrics.deferred(reason)
                key = (reason, job.ledger.head.version)
                outbox.append(
                    desk.voice.notice(job.run, "compaction_deferred", desk.now(), key, reason=reason)
                )
            course.deferred = reason
            course.deferred_at = job.position
            await desk.commit(touched=[job.run], outbox=outbox)

    async def _ineffective(self, job: Job, reason: str) -> None:
        desk = self._desk
        job.deferred = "little_new"
        async with desk.changing():
            course = (await self._hot(job)).view.course_of(job.mode)
            outbox = [] if course.ineffective else [self._ineffective_notice(job, reason)]
            policy.mark_ineffective(course, job.budget, reason, position=job.position)
            await desk.commit(touched=[job.run], outbox=outbox)

    def _ineffective_notice(self, job: Job, reason: str) -> OutboxRow:
        desk = self._desk
        return desk.voice.notice(job.run, "ineffective", desk.now(), (reason, job.position), reason=reason)

    async def _trim(self, job: Job, plan: policy.Trim) -> None:
        desk = self._desk
        job.deferred = "little_new"
        async with desk.changing():
            hot = await self._hot(job)
            if _moved(hot.view.course_of(job.mode), job.course):
                return
            live = job.mode == "live"
            # Read before anything is changed: it may fail.
            checkpoint = await self._packets.checkpoint(job.run)
            policy.trimmed(hot.view.course_of(job.mode), hot.view.budget, plan, live=live)
            if not live:
                await desk.commit(touched=[job.run])
                return
            hot.view.trimmed(plan)
            built = await self._packets.build_on(job.run, "trimmed", checkpoint, hot.view)
            hot.view.note_packet(built.packet)
            said = self._packets.choice_notice(hot, hot.view, built)
            row = self._packets.row(built.packet)
            await desk.commit(
                touched=[job.run], outbox=[row, *said], packet=self._packets.kept(built.packet, row)
            )
            desk.metrics.trimmed()
            self._packets.count(built)

    # --- generate ------------------------------------------------------------------------------------

    async def _compact(
        self, job: Job, plan: policy.Compact, entries: Sequence[JournalEntry], items: Sequence[TailItem]
    ) -> None:
        desk = self._desk
        if plan.rebuild:
            entries = await desk.store.tail(desk.tenant, desk.lane, job.run, after=0, through=plan.through)
            items = await anyio.to_thread.run_sync(tail_items, entries)
        covered = [item for item in items if item.position <= plan.through]
        ledger_digest = await anyio.to_thread.run_sync(lambda: digest(ledger_value(job.ledger)))
        attempt = await self._open(job, plan, range_digest(entries, plan.through), ledger_digest)
        previous = None
        if not plan.rebuild:
            row = await desk.store.newest_checkpoint(desk.tenant, desk.lane, job.run, chain=_chain(job.mode))
            previous = None if row is None else stored_checkpoint(row).summary
        try:
            verdict = await self._generation.generate(
                attempt,
                runs={**job.ancestors, job.run: job.ledger},
                covered=covered,
                previous=previous,
                range_tokens=plan.range_tokens + job.course.packet_tokens,
            )
        except SummarizerFailure as failure:
            log.warning("summary failed", run=job.run, reason=failure.reason, error=str(failure))
            await self._failed(attempt, failure.reason, ())
            return
        if not verdict.accepted:
            await self._failed(attempt, "invalid", verdict.violations, verdict)
            return
        await self._commit(attempt, plan, verdict)

    async def _open(self, job: Job, plan: policy.Compact, covers_digest: str, ledger_digest: str) -> Attempt:
        desk = self._desk
        summarizer = self._generation.asked(job)
        async with desk.changing():
            hot = await self._hot(job)
            course = hot.view.course_of(job.mode)
            course.attempts += 1
            attempt = Attempt(
                # With the epoch: a count that began anew on an empty disk must not give an old id again.
                attempt_id=derived_id(
                    "at",
                    desk.tenant,
                    desk.lane,
                    job.run,
                    job.mode,
                    desk.voice.epoch,
                    course.attempts,
                    plan.through,
                ),
                job=job,
                first=plan.first,
                through=plan.through,
                range_digest=covers_digest,
                handoff_position=job.position,
                ledger_digest=ledger_digest,
                number=course.attempt,
                started_at=desk.now_text(),
                summarizer=summarizer.name,
                projector=summarizer.projector,
                session=job.ledger.head.session,
            )
            started = desk.voice.notice(
                job.run, "compaction_started", desk.now(), attempt.attempt_id, attempt_id=attempt.attempt_id
            )
            await desk.commit(touched=[job.run], open_attempt=attempt.row(), outbox=[started])
        job.attempt = attempt
        job.attempt_id = attempt.attempt_id
        job.settled.set()
        return attempt

    # --- commit --------------------------------------------------------------------------------------

    async def _commit(self, attempt: Attempt, plan: policy.Compact, verdict: Verdict) -> None:
        desk, job = self._desk, attempt.job
        with desk.metrics.phase("commit"):
            async with desk.changing():
                hot = await self._hot(job)
                mode, bypass = desk.config.mode_for(hot.ledger.head.labels)
                if _moved(hot.view.course_of(job.mode), job.course) or mode != job.mode or bypass:
                    await self._close(
                        attempt, hot, "stale", "another checkpoint is newest, or the mode changed"
                    )
                    return
                if not await self._unchanged(attempt):
                    await self._close(attempt, hot, "failed", "storage")
                    return
                row = self._checkpoint_row(attempt, plan, verdict)
                if job.mode == "live":
                    await self._apply(attempt, plan, verdict, hot, row)
                else:
                    await self._shadow(attempt, plan, verdict, hot, row)

    async def _unchanged(self, attempt: Attempt) -> bool:
        """Whether the range reads as it did when the attempt began."""
        desk = self._desk
        entry = await desk.store.entry(desk.tenant, desk.lane, attempt.run, position=attempt.through)
        return entry is not None and f"sha256:{entry.chain.hex()}" == attempt.range_digest

    def _checkpoint_row(self, attempt: Attempt, plan: policy.Compact, verdict: Verdict) -> CheckpointRow:
        desk, job = self._desk, attempt.job
        body = StoredBody(
            summarizer=attempt.summarizer,
            projector=attempt.projector,
            attempt_id=attempt.attempt_id,
            parent_checkpoint_id=job.course.checkpoint_id or None,
            summary=verdict.summary,
        )
        version = job.course.checkpoint_version + 1
        return CheckpointRow(
            checkpoint_id=derived_id(
                "cp",
                desk.tenant,
                desk.lane,
                job.run,
                job.mode,
                version,
                attempt.range_digest,
                digest(body.summary),
            ),
            run=job.run,
            chain=_chain(job.mode),
            version=version,
            parent_id=job.course.checkpoint_id or None,
            covers_through=plan.through,
            event_id=plan.event_id or "",
            range_digest=attempt.range_digest,
            created_at=desk.now_text(),
            body=encode(body),
        )

    async def _apply(
        self, attempt: Attempt, plan: policy.Compact, verdict: Verdict, hot: HotRun, row: CheckpointRow
    ) -> None:
        """Live: checkpoint, receipt, state, packet and course in one transaction."""
        desk, job = self._desk, attempt.job
        settings = desk.budget
        checkpoint = stored_checkpoint(row)
        view: View = copy_view(hot.view)
        used = max(0, view.budget.used())
        view.covered(plan, job.budget)
        draft = await self._packets.build_on(job.run, "compacted", checkpoint, view)
        # The text names no figure, so that the second build differs in nothing but these.
        after = view.after_take_up(draft.text_tokens)
        figures = view.figures(settings)._replace(used_before=used, used_after=max(0, min(after, used)))
        if not policy.gains(used, after, plan, settings):
            await self._failed_locked(attempt, hot, "invalid", ("no_gain",), verdict)
            return
        built = await self._packets.build_on(job.run, "compacted", checkpoint, view, figures)
        policy.committed(
            view.course,
            view.budget,
            plan,
            checkpoint_id=row.checkpoint_id,
            live=True,
            packet_tokens=built.text_tokens,
            tail_tokens=max(0, view.tail_now()),
        )
        view.last_attempt = attempt.attempt_id
        view.note_packet(built.packet)
        said = self._packets.choice_notice(hot, view, built)
        for code in verdict.violations:
            view.violations[code] = view.violations.get(code, 0) + 1
        hot.view = view
        state = await desk.aside(job.run, lambda: state_row(desk, hot, checkpoint))
        ending = Ending(
            "applied",
            None,
            used,
            figures.used_after,
            violations=verdict.violations,
            verdict=verdict,
            built=built,
            checkpoint=row,
        )
        message, stored = receipt_rows(desk, receipt(desk, attempt, ending))
        packet = self._packets.row(built.packet)
        outbox = [*([state] if state is not None else []), packet, message, *said]
        try:
            await desk.commit(
                touched=[job.run],
                outbox=outbox,
                close_attempt=attempt.attempt_id,
                checkpoint=row,
                receipt=stored,
                packet=self._packets.kept(built.packet, packet),
            )
        except Stale:
            await self._close(attempt, await self._hot(job), "stale", "another checkpoint is newest")
            return
        self._packets.forget(job.run)
        self._index(job.run, plan.through)
        for code in verdict.violations:
            desk.metrics.violation(code)
        desk.metrics.compacted("applied", job.trigger, used, figures.used_after)
        self._packets.count(built)
        log.info("compacted", run=job.run, through=plan.through, before=used, after=figures.used_after)

    async def _shadow(
        self, attempt: Attempt, plan: policy.Compact, verdict: Verdict, hot: HotRun, row: CheckpointRow
    ) -> None:
        """Shadow: a checkpoint in a chain of its own and a receipt; nothing the agent sees changes."""
        desk, job = self._desk, attempt.job
        view = hot.view
        used = used_tokens(view.budget, view.shadow)
        # What the agent would have been given, built and thrown away: its size is part of the measurement.
        draft = copy_view(view)
        draft.covered(plan, job.budget)
        built = self._packets.build_with(job.run, "compacted", stored_checkpoint(row), draft)
        policy.committed(
            view.shadow,
            view.budget,
            plan,
            checkpoint_id=row.checkpoint_id,
            live=False,
            packet_tokens=built.text_tokens,
        )
        after = used_tokens(view.budget, view.shadow)
        ending = Ending(
            "shadow",
            None,
            used,
            after,
            violations=verdict.violations,
            verdict=verdict,
            built=built,
            checkpoint=row,
        )
        message, stored = receipt_rows(desk, receipt(desk, attempt, ending))
        try:
            await desk.commit(
                touched=[job.run],
                outbox=[message],
                close_attempt=attempt.attempt_id,
                checkpoint=row,
                receipt=stored,
            )
        except Stale:
            await self._close(attempt, await self._hot(job), "stale", "another checkpoint is newest")
            return
        self._index(job.run, plan.through)
        desk.metrics.compacted("shadow", job.trigger, used, after)

    def _index(self, run: str, through: int) -> None:
        """Make what is covered now quick to search, in a task of its own."""
        if self._tasks is not None:
            self._tasks.start_soon(self._indexing.cover, run, through)

    # --- other ends ------------------------------------------------------------------------------------

    async def _failed(
        self,
        attempt: Attempt,
        reason: str,
        violations: Sequence[str],
        verdict: Verdict | None = None,
    ) -> None:
        async with self._desk.changing():
            await self._failed_locked(attempt, await self._hot(attempt.job), reason, violations, verdict)

    async def _failed_locked(
        self,
        attempt: Attempt,
        hot: HotRun,
        reason: str,
        violations: Sequence[str],
        verdict: Verdict | None,
    ) -> None:
        desk = self._desk
        course = hot.view.course_of(attempt.job.mode)
        if not _moved(course, attempt.job.course):
            policy.failed(course, reason, now=desk.wall(), settings=desk.budget)
        for code in violations:
            hot.view.violations[code] = hot.view.violations.get(code, 0) + 1
            desk.metrics.violation(code)
        desk.metrics.failed(reason)
        said: list[OutboxRow] = []
        if "no_gain" in violations and not course.ineffective:
            # The same range would not win more the next time: wait for something real to change.
            said.append(self._ineffective_notice(attempt.job, "no_gain"))
            policy.mark_ineffective(course, hot.view.budget, "no_gain", position=hot.ledger.head.position)
        await self._close(attempt, hot, "failed", reason, violations, verdict, said)

    async def _close(
        self,
        attempt: Attempt,
        hot: HotRun,
        outcome: str,
        reason: str,
        violations: Sequence[str] = (),
        verdict: Verdict | None = None,
        said: Sequence[OutboxRow] = (),
    ) -> None:
        """Close the attempt with a receipt and what else is ``said``; hold the lock."""
        desk = self._desk
        used = max(0, hot.view.budget.used())
        if outcome == "stale":
            policy.given_up(hot.view.course_of(attempt.job.mode))
        hot.view.last_attempt = attempt.attempt_id
        ending = Ending(outcome, reason, used, used, violations=violations, verdict=verdict)
        message, stored = receipt_rows(desk, receipt(desk, attempt, ending))
        try:
            await desk.commit(
                touched=[attempt.run],
                outbox=[message, *said],
                close_attempt=attempt.attempt_id,
                receipt=stored,
            )
        except Stale:
            # Closed already, as interrupted, by a start in between.
            return
        desk.metrics.compacted(outcome, attempt.job.trigger)

    async def close_interrupted(self) -> None:
        """Every attempt still open ends ``failed``/``interrupted``; the next one has a new id."""
        await self._close_open("interrupted")

    async def _close_open(self, reason: str, run: str | None = None) -> None:
        """Close the lane's open attempts, or those of one run, as failed; nobody may be working on them."""
        desk = self._desk
        for row in await desk.store.open_attempts(desk.tenant, desk.lane):
            if run in (None, row.run):
                async with desk.changing():
                    await desk.runs.load([row.run])
                    await self._close_row(row, desk.runs.hot[row.run], reason)

    async def _close_row(self, row: AttemptRow, hot: HotRun, reason: str) -> None:
        desk = self._desk
        body = msgspec.json.decode(row.body, type=AttemptBody)
        course = hot.view.course_of(body.mode)
        policy.failed(course, reason, now=desk.wall(), settings=desk.budget)
        job = Job(
            run=row.run,
            trigger=row.trigger,
            fallback=False,
            mode=body.mode,
            ledger=hot.ledger.snapshot(),
            budget=hot.view.budget,
            course=copy.copy(course),
        )
        attempt = Attempt(
            attempt_id=row.attempt_id,
            job=job,
            first=row.first,
            through=row.through,
            range_digest=row.range_digest,
            handoff_position=row.handoff_position,
            ledger_digest=row.ledger_digest,
            number=body.number,
            started_at=row.started_at,
            summarizer=body.summarizer,
            projector=body.projector,
        )
        desk.metrics.failed(reason)
        await self._close(attempt, hot, "failed", reason)


def _moved(now: policy.Course, then: policy.Course) -> bool:
    return now.checkpoint_version != then.checkpoint_version or now.checkpoint_id != then.checkpoint_id


def _chain(mode: str) -> Chain:
    return "live" if mode == "live" else "shadow"
