"""Compaction of one lane's runs: freeze, plan, have a summary made; at most one attempt per run.

The shell around the core's decisions. How an attempt ends is ``endings``'; whatever fails, the previous
checkpoint and the tail stay as they were.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import anyio.to_thread
import structlog
from anyio.abc import TaskGroup

from sidecar import tracing
from sidecar.attempts import Attempt, Job
from sidecar.core import family, planning
from sidecar.core.course import (
    Compact,
    Defer,
    DeferReason,
    Ineffective,
    Trim,
    failed,
    given_up,
    mark_ineffective,
    trimmed,
)
from sidecar.core.ledger_form import ledger_digest
from sidecar.desk import Desk
from sidecar.endings import Endings, chain_of, ineffective_notice, moved
from sidecar.generation import Generation
from sidecar.indexing import Indexing
from sidecar.notices import derived_id
from sidecar.packets import Packets, state_packet, stored_checkpoint
from sidecar.ranges import Reading, range_digest, tail_items
from sidecar.runs import HotRun
from sidecar.state_renewal import StateRenewal
from sidecar.summarizers import SummarizerFailure
from storage.errors import StorageError
from storage.records import OutboxRow

_AT_ONCE = 4
"""Attempts of a lane under way together; more wait."""

log = structlog.get_logger(__name__)


class Compactor:
    """``prepare`` under the lock where the need arises; the rest runs in its own task."""

    def __init__(self, desk: Desk, packets: Packets, generation: Generation, states: StateRenewal) -> None:
        self._desk = desk
        self._packets = packets
        self._generation = generation
        self._states = states
        self._indexing = Indexing(desk)
        self._endings = Endings(desk, packets, states, self._index)
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
            traceparent=tracing.current() or hot.traceparent,
        )
        self.running[run] = job
        hot.busy += 1
        self._tasks.start_soon(self._work, job)
        return job

    async def _work(self, job: Job) -> None:
        """One of the daemon's two supervisors: an error that nobody foresaw ends this attempt, as a failed one,
        and never what the lane is there for."""
        try:
            with tracing.carrying(job.traceparent), self._traced(job):
                async with self._limit:
                    # One whose end storage refused to take would keep every later one from beginning.
                    await self._endings.close_open("storage", job.run)
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

    @contextmanager
    def _traced(self, job: Job) -> Iterator[None]:
        """The attempt as one span, and its ids in every line that is logged meanwhile."""
        desk = self._desk
        attributes: dict[str, tracing.Attribute] = {
            "gen_ai.conversation.id": job.run,
            "watchkeeper.lane": desk.lane,
            "watchkeeper.trigger": job.trigger,
            "watchkeeper.mode": job.mode,
        }
        with (
            structlog.contextvars.bound_contextvars(lane=desk.lane, run=job.run, action="compact"),
            desk.tracer.span("watchkeeper.compaction", attributes=attributes) as job.span,
        ):
            yield

    async def _refused(self, job: Job) -> None:
        """Record that storage ended the attempt, if storage takes that; else the run's next one does."""
        try:
            await self._endings.close_open("storage", job.run)
        except StorageError as error:
            log.warning("end of a compaction not stored yet", run=job.run, error=str(error))
        hot = self._desk.runs.hot.get(job.run)
        if hot is not None:
            given_up(hot.view.course_of(job.mode))

    async def _broken(self, job: Job) -> None:
        """Count a defect as a failure, so that back-off, breaker and fallback hold for it as well."""
        desk = self._desk
        try:
            if job.attempt is not None:
                await self._endings.failed(job.attempt, "invalid", ())
                return
            async with desk.changing():
                course = (await self._hot(job)).view.course_of(job.mode)
                failed(course, "invalid", now=desk.wall(), settings=desk.budget)
                await desk.commit(touched=[job.run])
        except StorageError as error:
            log.warning("compaction given up: storage refuses", run=job.run, error=str(error))
            await self._refused(job)

    async def _hot(self, job: Job) -> HotRun:
        """The run as it is now; hold the lock."""
        await self._desk.runs.load([job.run])
        return self._desk.runs.hot[job.run]

    async def close_interrupted(self) -> None:
        """Every attempt still open ends ``failed``/``interrupted``; the next one has a new id."""
        await self._endings.close_open("interrupted")

    def _index(self, run: str, through: int) -> None:
        """Make what is covered now quick to search, in a task of its own."""
        if self._tasks is not None:
            self._tasks.start_soon(self._indexing.cover, run, through)

    # --- prepare -------------------------------------------------------------------------------------

    async def _plan(self, job: Job) -> None:
        with self._desk.metrics.phase("prepare"):
            plan = await self._planned(job)
        match plan:
            case Defer(reason=reason):
                await self._deferred(job, reason)
            case Ineffective(reason=reason):
                await self._ineffective(job, reason)
            case Trim():
                await self._trim(job, plan)
            case Compact():
                await self._compact(job, plan)

    async def _planned(self, job: Job) -> planning.Plan:
        """What to do, from figures of the tail; its messages are let go page by page."""
        settings = self._desk.budget
        tails = [planning.empty_tail(job.ledger, job.course, settings)]
        await Reading(self._desk, job.run, job.course.covers_through, job.position).pages(
            lambda entries: tails[0].extend(tail_items(entries))
        )
        # Taken out there, so that what was gathered of a very long tail is let go on the thread as well.
        return await anyio.to_thread.run_sync(
            lambda: planning.plan(
                tails.pop(), job.ledger, job.budget, job.course, settings, trigger=job.trigger
            )
        )

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
            await desk.commit(touched=[job.run], outbox=outbox)

    async def _ineffective(self, job: Job, reason: str) -> None:
        desk = self._desk
        job.deferred = "little_new"
        async with desk.changing():
            course = (await self._hot(job)).view.course_of(job.mode)
            outbox = [] if course.ineffective else [ineffective_notice(desk, job, reason)]
            mark_ineffective(course, job.budget, reason)
            await desk.commit(touched=[job.run], outbox=outbox)

    async def _trim(self, job: Job, plan: Trim) -> None:
        desk = self._desk
        job.deferred = "little_new"
        async with desk.changing():
            hot = await self._hot(job)
            if moved(hot.view.course_of(job.mode), job.course):
                return
            live = job.mode == "live"
            # Read before anything is changed: it may fail.
            checkpoint = await self._packets.checkpoint(job.run)
            trimmed(hot.view.course_of(job.mode), hot.view.budget, plan, live=live)
            if not live:
                await desk.commit(touched=[job.run])
                return
            hot.view.trimmed(plan)
            built = await self._packets.build_on(job.run, "trimmed", checkpoint, hot.view)
            hot.view.note_packet(built.packet, self._packets.stood_on(built.packet))
            said = self._packets.choice_notice(hot, hot.view, built)
            row = self._packets.row(built.packet)
            state = await self._states.row(hot, checkpoint, state_packet(built.packet))
            await desk.commit(
                touched=[job.run],
                outbox=[*([state] if state is not None else []), row, *said],
                packet=self._packets.kept(built.packet, row),
            )
            desk.metrics.trimmed()
            self._packets.count(built)

    # --- generate ------------------------------------------------------------------------------------

    async def _compact(self, job: Job, plan: Compact) -> None:
        desk = self._desk
        covers_digest = await range_digest(desk, job.run, plan.through)
        if covers_digest is None:
            raise RuntimeError(f"position {plan.through} was read and is not there")
        handed = await anyio.to_thread.run_sync(ledger_digest, job.ledger)
        attempt = await self._open(job, plan, covers_digest, handed)
        previous = None
        if not plan.rebuild:
            row = await desk.store.newest_checkpoint(
                desk.tenant, desk.lane, job.run, chain=chain_of(job.mode)
            )
            previous = None if row is None else stored_checkpoint(row).summary
        try:
            verdict = await self._generation.generate(
                attempt,
                runs={**job.ancestors, job.run: job.ledger},
                previous=previous,
                range_tokens=plan.range_tokens + job.course.packet_tokens,
            )
        except SummarizerFailure as failure:
            log.warning("summary failed", run=job.run, reason=failure.reason, error=str(failure))
            await self._endings.failed(attempt, failure.reason, ())
            return
        if not verdict.accepted:
            await self._endings.failed(attempt, "invalid", verdict.violations, verdict)
            return
        await self._endings.conclude(attempt, plan, verdict)

    async def _open(self, job: Job, plan: Compact, covers_digest: str, ledger_digest: str) -> Attempt:
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
