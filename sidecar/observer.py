"""What follows from a folded message beside the ledger: budget, levels, notices, and whether to compact.

Called by the intake under the lock, message by message; everything it wants stored goes into the same
transaction, everything it wants told happens after COMMIT. It folds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import structlog

from protocol.events import (
    ChildSpawned,
    Event,
    GapDeclared,
    Message,
    OperationDispatched,
    RunPaused,
    RunResumed,
    ToolCalled,
    type_of,
)
from protocol.handoff import Recent
from sidecar import catching_up
from sidecar.core import policy
from sidecar.core.budget import LEVELS, Observed, at_least, observe
from sidecar.core.course import Defer, follow
from sidecar.core.excerpt import content_text, first_sentence
from sidecar.core.fold import Outcome
from sidecar.core.resume import StoodOn, resume_faults
from sidecar.core.state import Head
from sidecar.deadlines import Deadlines, note_changes
from sidecar.desk import Desk
from sidecar.memory import give_back, much_is_spare
from sidecar.packets import Packets
from sidecar.runs import HotRun
from sidecar.state_renewal import StateRenewal
from sidecar.view import RECENT_LINES, waits
from storage.errors import StorageError
from storage.records import OutboxRow

if TYPE_CHECKING:
    from sidecar.chunk import Chunk, Incoming
    from sidecar.compactor import Compactor
    from sidecar.responder import Responder

_TICK_SECONDS = 1.0
_REST_SECONDS = 60.0
_WORTH_GIVING_BACK = 100
"""Runs let go from which on the memory is given back at once."""
_STATES_AT_ONCE = 16
"""States of one transaction; each may have half a megabyte."""

_OF_THE_AGENT = frozenset({"authorization.requested", "run.resumed", "usage.reported", "boundary.marked"})
"""Types that are no news to the agent whatever channel they come on."""
log = structlog.get_logger(__name__)


class Observer:
    """One lane's observer."""

    def __init__(
        self,
        desk: Desk,
        packets: Packets,
        compactor: Compactor,
        deadlines: Deadlines,
        responder: Responder,
        states: StateRenewal,
    ) -> None:
        self._desk = desk
        self._packets = packets
        self._compactor = compactor
        self._deadlines = deadlines
        self._responder = responder
        self._states = states

    def folded(self, run: str, hot: HotRun, outcome: Outcome, item: Incoming, chunk: Chunk) -> bool:
        """Account for one folded message; whether the transaction must end here for a compaction."""
        event = item.event
        assert event is not None
        desk, view, head = self._desk, hot.view, hot.ledger.head
        kind, name = type(event), type_of(event)
        chunk.folded[name] = chunk.folded.get(name, 0) + 1
        view.stream_seq = item.delivery.stream_seq
        for touched in outcome.touched:
            waits = note_changes(hot if touched == run else desk.runs.of(touched), item.delivery.stamp)
            if waits:
                chunk.waits.setdefault(touched, {}).update(waits)
            if touched != run:
                chunk.mark(touched, "changed")
        if item.channel != "event" and name not in _OF_THE_AGENT and not outcome.ignored:
            view.changed_by_others_at = head.version
        if outcome.handed_down:
            view.handed_down += 1
            chunk.after.append(partial(self._packets.mark_descendants, run))
        # Types are compared: that an event is no instance of a class takes ``isinstance`` six times as long.
        if type(event) is ChildSpawned and event.child_run in outcome.touched:
            desk.runs.of(event.child_run).view.spawned += 1
        if view.unproven_before:
            self._prove(hot, event, outcome)
        if outcome.violations or outcome.operations_unknown or name == "gap.declared":
            self._say(run, hot, outcome, item, chunk)
        observed = observe(
            view.budget,
            event,
            position=head.position,
            current=not outcome.foreign,
            late=outcome.late,
            settings=desk.budget,
            channel=item.channel,
        )
        shadowed = desk.config.mode_for(head.labels)[0] == "shadow"
        self._account(run, hot, observed, chunk, shadowed=shadowed)
        if type(event) is Message and event.role == "assistant" and not outcome.foreign:
            self._recent(hot, event)
        if type(event) is RunResumed:
            self._resumed(run, hot, event, chunk)
        if kind is RunPaused or run not in chunk.marks:
            chunk.mark(run, "paused" if kind is RunPaused else "changed")
        if name == "run.finished" and head.finished is not None and not outcome.late and not outcome.foreign:
            self._finished(hot, head, item, chunk)
        if outcome.decision is not None:
            chunk.after.append(
                partial(self._responder.decided, run, event.id, outcome.decision, head.version)
            )
        if not shadowed and not at_least(view.budget.level, "compact") and view.course.at_rest:
            # Nothing to decide, as for nearly every message.
            return False
        return self._decide(run, hot, item, chunk)

    def committed(self, chunk: Chunk) -> None:
        """What was counted while folding is on disk: tell it, once for the whole transaction."""
        for name, count in chunk.folded.items():
            self._desk.metrics.folded(name, count)
        for run, reason in chunk.marks.items():
            self._packets.mark(run, reason)
        for run, told in chunk.waits.items():
            self._deadlines.watch(run, told.items())
        for tell in chunk.after:
            tell()

    def after_rejection(self, run: str, outcome: Outcome, item: Incoming, chunk: Chunk) -> None:
        """A message the fold rejected may still count as a violation of the run."""
        if outcome.violations:
            chunk.touched.add(run)
            self._say(run, self._desk.runs.of(run), outcome, item, chunk)

    def conflict(self, run: str, item: Incoming, chunk: Chunk) -> None:
        """A message came again with other bytes: its run's violation is told."""
        if run in self._desk.runs.ledgers and item.event is not None:
            self._violation(run, "duplicate_conflict", (f"event:{item.event.id}",), item, chunk)

    # --- what is told -----------------------------------------------------------------------------------

    def _say(self, run: str, hot: HotRun, outcome: Outcome, item: Incoming, chunk: Chunk) -> None:
        desk = self._desk
        for violation in outcome.violations:
            self._violation(run, violation.code, violation.refs, item, chunk)
        for operation in outcome.operations_unknown:
            chunk.outbox.append(
                desk.voice.notice(
                    run,
                    "operation_unknown",
                    desk.now(),
                    (operation, hot.ledger.head.version),
                    operation_id=operation,
                )
            )
        if isinstance(item.event, GapDeclared):
            for gap in hot.ledger.active["gap"].values():
                if gap.declared:
                    chunk.outbox.append(
                        desk.voice.notice(
                            run, "history_gap", desk.now(), gap.id, from_=gap.first, through=gap.through
                        )
                    )

    def _violation(self, run: str, code: str, refs: tuple[str, ...], item: Incoming, chunk: Chunk) -> None:
        desk = self._desk
        chunk.after.append(lambda: desk.metrics.violation(code))
        if code == "repeated_operation" and isinstance(item.event, OperationDispatched | ToolCalled):
            chunk.after.append(desk.metrics.prevented)
        if chunk.said.setdefault((run, code), 0) >= 10:
            return
        chunk.said[run, code] += 1
        key = (code, item.delivery.stream_seq, refs)
        chunk.outbox.append(desk.voice.notice(run, "violation", desk.now(), key, code=code, refs=refs[:50]))

    def _account(self, run: str, hot: HotRun, observed: Observed, chunk: Chunk, *, shadowed: bool) -> None:
        desk, view, head = self._desk, hot.view, hot.ledger.head
        settings = desk.budget
        if observed.sampled and observed.usable > 0:
            share, error = observed.used / observed.usable, observed.sample_error
            chunk.after.append(lambda: desk.metrics.usage(share, error, hot.traceparent))
        if observed.ignored is not None:
            chunk.after.append(desk.metrics.usage_ignored)
        if observed.took_up:
            view.cleared = [
                cleared for cleared in view.cleared if cleared.position > view.course.covers_through
            ]
        if observed.level_after != observed.level_before:
            self._level(run, hot, observed, chunk)
        told = follow(view.course, view.budget, observed, settings)
        if told is not None:
            more = {"reason": view.course.ineffective} if told == "ineffective" else {}
            key = (view.course.checkpoint_id, head.position)
            chunk.outbox.append(desk.voice.notice(run, told, desk.now(), key, **more))
        if told == "not_applied":
            chunk.after.append(desk.metrics.not_taken_up)
        if shadowed:
            follow(view.shadow, view.budget, observed, settings)

    def _level(self, run: str, hot: HotRun, observed: Observed, chunk: Chunk) -> None:
        desk, head = self._desk, hot.ledger.head
        chunk.outbox.append(
            desk.voice.notice(
                run,
                "level_changed",
                desk.now(),
                (head.position, observed.level_after),
                from_=observed.level_before,
                to=observed.level_after,
                used=max(0, observed.used),
                usable=observed.usable,
            )
        )
        rose = LEVELS.index(observed.level_after) > LEVELS.index(observed.level_before)
        if rose and observed.level_before == "ok":
            chunk.mark(run, "checkpoint")

    def _recent(self, hot: HotRun, event: Message) -> None:
        text = first_sentence(content_text(event.content)[:8_000])
        if text:
            line = Recent(text=text[:200], ref=f"event:{event.id}")
            hot.view.recent = [*hot.view.recent, line][-RECENT_LINES:]

    def _resumed(self, run: str, hot: HotRun, event: RunResumed, chunk: Chunk) -> None:
        desk = self._desk
        view = hot.view
        faults = resume_faults(
            desk.runs.ledgers,
            run,
            event,
            packet=self._packets.remembered(run, event.packet_id or ""),
            newest=StoodOn(
                view.course.checkpoint_version, view.changed_by_others_at, desk.runs.received(run)
            ),
            missing_artifacts=view.missing_artifacts,
        )
        for code in faults:
            hot.view.violations[code] = hot.view.violations.get(code, 0) + 1
            chunk.after.append(lambda code=code: desk.metrics.violation(code))  # type: ignore[misc]
            chunk.outbox.append(
                desk.voice.notice(
                    run, "violation", desk.now(), (code, event.id), code=code, refs=(f"event:{event.id}",)
                )
            )
        outcome = faults[0] if faults else "ok"
        chunk.after.append(lambda: desk.metrics.resumed(outcome))

    def _finished(self, hot: HotRun, head: Head, item: Incoming, chunk: Chunk) -> None:
        hot.view.ended, hot.view.ended_at = head.finished or "", item.delivery.stamp
        outcome, compactions = head.finished or "", hot.view.course.compactions
        chunk.after.append(lambda: self._desk.metrics.finished(outcome, compactions))
        chunk.states.add(head.run)

    def _prove(self, hot: HotRun, event: Event, outcome: Outcome) -> None:
        """After messages of the stream were lost: a contiguous number proves that none was this run's."""
        declared = isinstance(event, GapDeclared) and event.stream_from is not None and not outcome.ignored
        if declared:
            # Told: from here on it is for an authority, and not to be told again with every start.
            hot.view.unproven_before = 0
        if event.session is not None and event.seq is not None and not outcome.gaps and not outcome.late:
            hot.view.unproven_before = 0

    # --- compaction -------------------------------------------------------------------------------------

    def _decide(self, run: str, hot: HotRun, item: Incoming, chunk: Chunk) -> bool:
        desk = self._desk
        if run in self._compactor.running or item.delivery.stream_seq <= desk.quiet_through:
            return False
        step = self._step(hot)
        if isinstance(step, policy.Prepare):
            chunk.after.append(partial(self._prepare, run, step))
            return True
        if isinstance(step, Defer) and step.changed:
            chunk.after.append(partial(desk.metrics.deferred, step.reason))
            chunk.outbox.append(self._deferred(run, hot, step))
        return False

    def _step(self, hot: HotRun) -> policy.Step:
        desk = self._desk
        mode, bypass = desk.config.mode_for(hot.ledger.head.labels)
        return policy.decide(
            hot.ledger,
            hot.view.budget,
            hot.view.course_of(mode),
            desk.budget,
            mode=mode,
            bypass=bypass,
            now=desk.wall(),
        )

    def _deferred(self, run: str, hot: HotRun, step: Defer) -> OutboxRow:
        key = (step.reason, hot.ledger.head.version)
        return self._desk.voice.notice(run, "compaction_deferred", self._desk.now(), key, reason=step.reason)

    def _prepare(self, run: str, step: policy.Prepare) -> None:
        self._compactor.prepare(run, step.trigger, fallback=step.fallback)

    async def tick(self) -> None:
        """What time alone changes, once a second. Until cancelled."""
        rested, started = self._desk.mono(), False
        while True:
            await anyio.sleep(_TICK_SECONDS)
            if not self._desk.caught_up:
                continue
            await self.look_again()
            if not started:
                # What was read to get here is read by now, and let go.
                await anyio.to_thread.run_sync(give_back)
                started = True
            if self._desk.mono() - rested >= _REST_SECONDS:
                await self.rest()
                rested = self._desk.mono()

    async def rest(self) -> None:
        """Let go of runs that nobody spoke of for a while and that wait for nothing."""
        async with self._desk.changing():
            gone = self._desk.runs.rest(lambda hot: hot.ledger.head.finished is None and waits(hot.view))
        self._responder.rest()
        if gone >= _WORTH_GIVING_BACK or much_is_spare():
            await anyio.to_thread.run_sync(give_back)

    async def look_again(self) -> None:
        """Decide anew for runs that wait: patience, back-off and breaker run out; show the gauges."""
        desk = self._desk
        async with desk.changing():
            now = desk.wall()
            broken = sum(
                course.breaker_until is not None and now < course.breaker_until
                for hot in desk.runs.hot.values()
                for course in (hot.view.course, hot.view.shadow)
            )
            for run, hot in list(desk.runs.hot.items()):
                waiting = at_least(hot.view.budget.level, "compact") and hot.ledger.head.finished is None
                if waiting and run not in self._compactor.running and not await self._reconsider(run, hot):
                    # Memory was let go with the failed commit: what is left of the list is no longer it.
                    break
        desk.metrics.levels(desk.lane, desk.runs.levels)
        desk.metrics.breaker(desk.lane, desk.config.summarizer.kind, broken)
        desk.metrics.storage_size(desk.store.size_bytes)
        desk.metrics.storage_free(desk.store.free_bytes)

    async def _reconsider(self, run: str, hot: HotRun) -> bool:
        """Decide again because time has passed; hold the lock. False when storage refused."""
        step = self._step(hot)
        if isinstance(step, policy.Prepare):
            self._prepare(run, step)
        elif isinstance(step, Defer) and step.changed:
            self._desk.metrics.deferred(step.reason)
            try:
                await self._desk.commit(touched=[run], outbox=[self._deferred(run, hot, step)])
            except StorageError as error:
                log.warning("deferral not told: storage refuses", run=run, error=str(error))
                return False
        return True

    # --- the stream as a whole ---------------------------------------------------------------------------

    async def stream_gap(self, first: int, through: int) -> None:
        """Messages of the stream are gone: every unfinished run has to be proven whole."""
        await catching_up.stream_gap(self._desk, first, through)

    async def caught_up(self) -> None:
        """Everything there was is read: runs not proven whole after a loss get their gap declared."""
        await catching_up.caught_up(self._desk, self._packets, self._deadlines)

    async def states(self, runs: Iterable[str]) -> list[OutboxRow]:
        """The state of these runs as they stand in memory, for whoever owns the lane next; hold the lock."""
        return [row for run in runs if (row := await self._states.whole_of(run)) is not None]

    async def drained(self) -> None:
        """Put the state of every unfinished run that was hot lately into the outbox."""
        desk = self._desk
        async with desk.changing():
            open_runs = [run for run, hot in desk.runs.hot.items() if hot.ledger.head.finished is None]
            open_runs += desk.runs.resting
            for first in range(0, len(open_runs), _STATES_AT_ONCE):
                some = open_runs[first : first + _STATES_AT_ONCE]
                await desk.runs.load(some)
                rows = await self.states(run for run in some if run in desk.runs.hot)
                if rows:
                    await desk.commit(outbox=rows)
