"""How a compaction attempt ends: applied, shadow, failed or stale; each end is one transaction.

The compactor brings a validated candidate or the reason why there is none. Everything the end changes,
checkpoint, receipt, packet, state, notices and the run's course, is committed together by compare-and-set
on the parent checkpoint. Nothing is planned and no summary is asked for here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import msgspec
import structlog

from protocol.codec import digest, encode
from sidecar.attempts import Attempt, AttemptBody, Ending, Job, receipt, receipt_rows, traced
from sidecar.core.course import (
    Compact,
    Course,
    committed,
    failed,
    gains,
    given_up,
    mark_ineffective,
    used_tokens,
)
from sidecar.core.validation import Verdict
from sidecar.desk import Desk
from sidecar.notices import derived_id
from sidecar.packets import Packets, StoredBody, state_packet, stored_checkpoint
from sidecar.ranges import range_digest
from sidecar.runs import HotRun
from sidecar.state_renewal import StateRenewal
from sidecar.view import View, copy_view
from storage.errors import Stale
from storage.records import AttemptRow, Chain, CheckpointRow, OutboxRow

log = structlog.get_logger(__name__)


class Endings:
    """One lane's ends of attempts. ``covered(run, through)`` is called after a checkpoint was committed."""

    def __init__(
        self, desk: Desk, packets: Packets, states: StateRenewal, covered: Callable[[str, int], None]
    ) -> None:
        self._desk = desk
        self._packets = packets
        self._states = states
        self._covered = covered

    async def _hot(self, run: str) -> HotRun:
        """The run as it is now; hold the lock."""
        await self._desk.runs.load([run])
        return self._desk.runs.hot[run]

    # --- accepted --------------------------------------------------------------------------------------

    async def conclude(self, attempt: Attempt, plan: Compact, verdict: Verdict) -> None:
        desk, job = self._desk, attempt.job
        with desk.metrics.phase("commit"):
            async with desk.changing():
                hot = await self._hot(job.run)
                mode, bypass = desk.config.mode_for(hot.ledger.head.labels)
                if moved(hot.view.course_of(job.mode), job.course) or mode != job.mode or bypass:
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
        return await range_digest(self._desk, attempt.run, attempt.through) == attempt.range_digest

    def _checkpoint_row(self, attempt: Attempt, plan: Compact, verdict: Verdict) -> CheckpointRow:
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
            chain=chain_of(job.mode),
            version=version,
            parent_id=job.course.checkpoint_id or None,
            covers_through=plan.through,
            event_id=plan.event_id or "",
            range_digest=attempt.range_digest,
            created_at=desk.now_text(),
            body=encode(body),
        )

    async def _apply(
        self, attempt: Attempt, plan: Compact, verdict: Verdict, hot: HotRun, row: CheckpointRow
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
        if not gains(used, after, plan):
            await self._failed_locked(attempt, hot, "invalid", ("no_gain",), verdict)
            return
        built = await self._packets.build_on(job.run, "compacted", checkpoint, view, figures)
        committed(
            view.course,
            view.budget,
            plan,
            checkpoint_id=row.checkpoint_id,
            live=True,
            packet_tokens=built.text_tokens,
            tail_tokens=max(0, view.tail_now()),
        )
        view.note_packet(built.packet, self._packets.stood_on(built.packet))
        said = self._packets.choice_notice(hot, view, built)
        for code in verdict.violations:
            view.violations[code] = view.violations.get(code, 0) + 1
        hot.view = view
        state = await self._states.row(hot, checkpoint, state_packet(built.packet))
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
        told = receipt(desk, attempt, ending)
        message, stored = receipt_rows(desk, told)
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
            await self._close(attempt, await self._hot(job.run), "stale", "another checkpoint is newest")
            return
        desk.leaving(packet.msg_id)
        self._packets.forget(job.run)
        self._covered(job.run, plan.through)
        for code in verdict.violations:
            desk.metrics.violation(code)
        traced(attempt, told)
        desk.metrics.compacted("applied", job.trigger, used, figures.used_after)
        self._packets.count(built)
        log.info("compacted", run=job.run, through=plan.through, before=used, after=figures.used_after)

    async def _shadow(
        self, attempt: Attempt, plan: Compact, verdict: Verdict, hot: HotRun, row: CheckpointRow
    ) -> None:
        """Shadow: a checkpoint in a chain of its own and a receipt; nothing the agent sees changes."""
        desk, job = self._desk, attempt.job
        view = hot.view
        used = used_tokens(view.budget, view.shadow)
        # What the agent would have been given, built and thrown away: its size is part of the measurement.
        draft = copy_view(view)
        draft.covered(plan, job.budget)
        built = self._packets.build_with(job.run, "compacted", stored_checkpoint(row), draft)
        committed(
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
        told = receipt(desk, attempt, ending)
        message, stored = receipt_rows(desk, told)
        try:
            await desk.commit(
                touched=[job.run],
                outbox=[message],
                close_attempt=attempt.attempt_id,
                checkpoint=row,
                receipt=stored,
            )
        except Stale:
            await self._close(attempt, await self._hot(job.run), "stale", "another checkpoint is newest")
            return
        self._covered(job.run, plan.through)
        traced(attempt, told)
        desk.metrics.compacted("shadow", job.trigger, used, after)

    # --- other ends ------------------------------------------------------------------------------------

    async def failed(
        self,
        attempt: Attempt,
        reason: str,
        violations: Sequence[str],
        verdict: Verdict | None = None,
    ) -> None:
        async with self._desk.changing():
            await self._failed_locked(attempt, await self._hot(attempt.run), reason, violations, verdict)

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
        no_gain = "no_gain" in violations
        if not no_gain and not moved(course, attempt.job.course):
            # Too little to win says nothing against the summariser: no back-off, no step to the breaker.
            failed(course, reason, now=desk.wall(), settings=desk.budget)
        for code in violations:
            hot.view.violations[code] = hot.view.violations.get(code, 0) + 1
            desk.metrics.violation(code)
        said: list[OutboxRow] = []
        if no_gain and not course.ineffective:
            # The same range would not win more the next time: wait for something real to change.
            said.append(ineffective_notice(self._desk, attempt.job, "no_gain"))
            mark_ineffective(course, hot.view.budget, "no_gain")
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
            given_up(hot.view.course_of(attempt.job.mode))
        ending = Ending(outcome, reason, used, used, violations=violations, verdict=verdict)
        told = receipt(desk, attempt, ending)
        message, stored = receipt_rows(desk, told)
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
        traced(attempt, told)
        desk.metrics.compacted(outcome, attempt.job.trigger)
        if outcome == "failed":
            desk.metrics.failed(reason)
        elif outcome == "stale":
            desk.metrics.violation("stale")

    async def close_open(self, reason: str, run: str | None = None) -> None:
        """Close the lane's open attempts, or those of one run, as failed; nobody may be working on them."""
        desk = self._desk
        for row in await desk.store.open_attempts(desk.tenant, desk.lane):
            if run in (None, row.run):
                async with desk.changing():
                    await self._close_row(row, await self._hot(row.run), reason)

    async def _close_row(self, row: AttemptRow, hot: HotRun, reason: str) -> None:
        desk = self._desk
        body = msgspec.json.decode(row.body, type=AttemptBody)
        course = hot.view.course_of(body.mode)
        failed(course, reason, now=desk.wall(), settings=desk.budget)
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
        await self._close(attempt, hot, "failed", reason)


def ineffective_notice(desk: Desk, job: Job, reason: str) -> OutboxRow:
    """Compaction cannot help this run now; said once until something real changes."""
    return desk.voice.notice(job.run, "ineffective", desk.now(), (reason, job.position), reason=reason)


def moved(now: Course, then: Course) -> bool:
    """Whether another checkpoint became the newest of the chain meanwhile."""
    return now.checkpoint_version != then.checkpoint_version or now.checkpoint_id != then.checkpoint_id


def chain_of(mode: str) -> Chain:
    """The chain of checkpoints that a run in this mode has."""
    return "live" if mode == "live" else "shadow"
