"""Memory follows the disk whatever ends a change: cancellation, refusal, eviction, a defect."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from protocol.codec import digest
from protocol.handoff import Projector
from protocol.summary import SummarizeReply, SummarizeRequest
from sidecar.core.state import ledger_value
from sidecar.health import Health
from sidecar.lane import LaneService
from sidecar.metrics import Metrics
from sidecar.summarizers import Summarizer
from storage.errors import StorageClosed
from storage.transaction import Transaction
from support.bench import Bench, bench, configured, event, settled, started
from support.harness import Harness, Json
from tests.support.links import eventually

pytestmark = pytest.mark.anyio

RUN = "r1"


def _ledger(made: Bench, run: str = RUN) -> str:
    return digest(ledger_value(made.desk.runs.ledgers[run]))


async def _stored(made: Bench, run: str = RUN) -> str:
    """The digest of the ledger as the disk has it."""
    made.desk.runs.discard()
    await made.desk.runs.load([run])
    return _ledger(made, run)


def _words(number: int, count: int = 160) -> list[dict[str, Any]]:
    return [
        event("message", f"w{number}-{i}", role="user" if i % 2 else "assistant", content=f"word{i} " * 400)
        for i in range(count)
    ]


@asynccontextmanager
async def _readers_taken(made: Bench) -> AsyncIterator[None]:
    """No read of the store goes on for the length of the block."""
    free = made.store._free
    await free.acquire()
    await free.acquire()
    try:
        yield
    finally:
        free.release()
        free.release()


async def test_cancelled_between_fold_and_commit_nothing_of_it_reaches_the_disk(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        await made.tell(RUN, started())
        before = _ledger(made)
        last = made.delivery(RUN, event("run.finished", "e-end", outcome="succeeded"))
        async with anyio.create_task_group() as tasks, _readers_taken(made):
            # The state of a finished run stands on its checkpoint, which is read after folding.
            tasks.start_soon(made.intake.take, [last])
            await eventually(
                lambda: made.desk.runs.ledgers[RUN].head.finished is not None, "folding of the end"
            )
            tasks.cancel_scope.cancel()
        await made.desk.commit(touched=list(made.desk.runs.hot))
        assert await _stored(made) == before
        await made.intake.take([last])
        assert made.desk.runs.ledgers[RUN].head.version == 2
        assert await made.store.verify_chain("acme", "main", RUN) is None


async def test_cancelled_during_the_commit_memory_and_cursor_are_where_the_disk_is(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        await made.tell(RUN, started())
        blocked, go_on = threading.Event(), threading.Event()

        def hold(tx: Transaction) -> None:
            blocked.set()
            go_on.wait(30)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.store._writer.submit, hold, 1)
            await eventually(blocked.is_set, "the writer to be held")
            async with anyio.create_task_group() as reading:
                next_one = made.delivery(RUN, event("message", "m1", role="user", content="hello"))
                reading.start_soon(made.intake.take, [next_one])
                await eventually(lambda: bool(made.store._writer._queue), "the commit to be queued")
                reading.cancel_scope.cancel()
                go_on.set()
        assert made.desk.cursor.stream_seq == 2
        in_memory = _ledger(made)
        assert made.desk.runs.ledgers[RUN].head.version == 2
        assert await _stored(made) == in_memory


async def test_the_number_of_a_refused_message_is_on_disk_as_well(tmp_path: Path) -> None:
    forbidden = event("task.changed", "e2", goal="something else", reason="mine", session="s", seq=2)
    async with bench(tmp_path) as made:
        await made.tell(RUN, started(session="s", seq=1))
        await made.tell(RUN, forbidden)
        in_memory = _ledger(made)
        assert await _stored(made) == in_memory
        await made.tell(RUN, event("message", "e3", role="user", content="go on", session="s", seq=3))
        assert not made.desk.runs.ledgers[RUN].active["gap"]


async def test_waiting_runs_are_looked_at_no_further_once_storage_has_refused(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        for run in ("r1", "r2"):
            # Both wait: the level is reached, and a call is open.
            await made.tell(run, started(), event("tool.called", "c", call_id="c", tool="t", arguments={}))
            await made.tell(run, event("message", "long", role="user", content="x " * 146_000))
            await settled(made)
            hot = made.desk.runs.hot[run]
            assert hot.view.course.deferred == "in_flight"
            hot.view.course.deferred = ""
        made.desk.runs.hot["r2"].view.course.wanted_at = 0.0
        await made.store._writer.stop()
        await made.observer.look_again()
        assert not made.desk.runs.hot
        with pytest.raises(StorageClosed):
            await made.tell(RUN, event("message", "m", role="user", content="?"))


async def test_an_attempts_rules_are_those_of_its_moment_whatever_becomes_of_memory(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        await made.tell(
            "root",
            started(),
            event("constraint.set", "no-prod", text="Never touch production.", source="user"),
            event("child.spawned", "e-spawn", child_run="leaf", task="look"),
        )
        async with made.desk.lock:
            job = made.compactor.prepare("leaf", "requested")
            made.desk.runs.discard()
        assert job is not None
        assert "no-prod" in job.ancestors["root"].active["constraint"]
        await settled(made)


async def test_another_owners_attempt_has_another_id(tmp_path: Path) -> None:
    ids = set()
    for epoch in (1, 2):
        async with bench(tmp_path / str(epoch), epoch=epoch) as made:
            await made.tell(RUN, started(), *_words(1))
            await settled(made)
            ids |= {row.attempt_id for row in await made.store.receipts("acme", "main", RUN)}
    assert len(ids) == 2


class _Broken:
    """A summariser with a defect."""

    name = "digest"
    window_tokens = 100_000
    projector = Projector(version="1")
    instructions = ""

    async def summarize(self, request: SummarizeRequest) -> SummarizeReply:
        raise ZeroDivisionError("nobody foresaw it")


async def test_a_defect_in_a_compaction_is_a_failed_attempt_and_stops_nothing_else(tmp_path: Path) -> None:
    broken = cast(Summarizer, _Broken())
    async with bench(tmp_path, summarizers=(broken, None)) as made:
        await made.tell(RUN, started(), *_words(1))
        await settled(made)
        assert made.desk.metrics.total("unforeseen_errors_total") == 1
        receipts = await made.store.receipts("acme", "main", RUN)
        assert [row.outcome for row in receipts] == ["failed"]
        assert not await made.store.open_attempts("acme", "main")
        course = made.desk.runs.hot[RUN].view.course
        assert (course.failures, course.covers_through) == (1, 0)
        assert (await made.ask(RUN, "status"))["position"] == 161


class _Doomed(LaneService):
    """A lane that meets a defect each time it is served."""

    times = 0

    async def _own(self, stop: anyio.Event) -> None:
        self.times += 1
        if self.times == 2:
            stop.set()
        raise ExceptionGroup("as from a task group", [ZeroDivisionError("nobody foresaw it")])


async def test_a_defect_in_a_lane_stops_that_lane_and_is_told(tmp_path: Path) -> None:
    metrics, health = Metrics(lanes=["main"]), Health()
    parts: dict[str, Any] = dict.fromkeys(("link", "store", "tracer", "shelf"))
    lane = _Doomed(
        config=configured(tmp_path), metrics=metrics, health=health, lane="main", owner="me", **parts
    )
    with anyio.fail_after(60):
        await lane.run(anyio.Event())
    assert metrics.total("unforeseen_errors_total") == 2
    assert "defect" in health.ready().reasons["defect main"]


async def test_a_childs_packet_follows_what_its_parent_is_told(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        await made.tell("root", started(), event("child.spawned", "e-spawn", child_run="leaf", task="look"))
        await made.tell("leaf", started(parent_run="root", goal="look"))
        await made.packets.publish("leaf", "changed")
        first = made.desk.runs.hot["leaf"].view.published
        made.packets._dirty.clear()
        await made.tell("root", event("run.paused", "e-pause", reason="wait"), channel="authority")
        assert "leaf" in made.packets._dirty
        await made.packets.publish("leaf", "changed")
        assert first.verdict == "continue"
        assert made.desk.runs.hot["leaf"].view.published.verdict == "pause"


BY_THE_PARENT: dict[str, tuple[str, dict[str, Any]]] = {
    "constraint.set": ("event", {"constraint_id": "k", "text": "never", "source": "user"}),
    "constraint.lifted": ("authority", {"constraint_id": "k0", "reason": "r"}),
    "policy.released": ("authority", {"version": "p1", "approval_kinds": ["mail"]}),
    "run.paused": ("event", {"reason": "wait"}),
    "child.spawned": ("event", {"child_run": "leaf", "task": "look twice"}),
}
NOT_FOR_THE_CHILD: dict[str, tuple[str, dict[str, Any]]] = {
    "constraint.set": ("event", {"constraint_id": "k", "text": "mine", "source": "agent"}),
    "message": ("event", {"role": "user", "content": "never mind"}),
    "run.resumed": ("event", {"session": "s2"}),
    "policy.loaded": ("event", {"version": "p1"}),
    "operation.declared": ("event", {"operation_id": "o", "kind": "x", "idempotency_key": "k"}),
}


@pytest.mark.parametrize("asked", [False, True], ids=["published", "asked"])
@pytest.mark.parametrize(
    ("type_", "channel", "fields", "stale"),
    [
        *((name, *told, True) for name, told in BY_THE_PARENT.items()),
        *((name, *told, False) for name, told in NOT_FOR_THE_CHILD.items()),
    ],
)
async def test_a_childs_packet_is_stale_once_an_ancestor_changed_what_holds_for_it(
    tmp_path: Path, type_: str, channel: str, fields: dict[str, Any], stale: bool, asked: bool
) -> None:
    async with bench(tmp_path) as made:
        rule = event("constraint.set", "e-k0", constraint_id="k0", text="t", source="user")
        other = event("child.spawned", "e-other", child_run="other", task="look")
        await made.tell("root", started(), rule, other)
        await made.tell("leaf", started(parent_run="root", goal="look"))
        if type_ != "child.spawned":
            await made.tell("root", event("child.spawned", "e-spawn", child_run="leaf", task="look"))
        hot = made.desk.runs.hot["leaf"]

        async def packet_id() -> str:
            if asked:
                return str((await made.ask("leaf", "packet"))["packet_id"])
            await made.packets.publish("leaf", "takeover")
            return made.desk.runs.hot["leaf"].view.published.packet_id

        before = await packet_id()
        await made.tell("root", event(type_, "e-change", **fields), channel=channel)
        await made.tell("leaf", event("run.resumed", "e-take", packet_id=before))
        assert hot.view.violations.get("stale_packet", 0) == stale
        # One that was made after the change is not, though the run's own version is the same.
        await made.tell("leaf", event("run.resumed", "e-take2", packet_id=await packet_id()))
        assert hot.view.violations.get("stale_packet", 0) == stale


async def test_a_refused_question_for_a_compaction_says_nothing_to_others(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        await made.tell(RUN, started(), event("tool.called", "c", call_id="c", tool="t", arguments={}))
        assert (await made.ask(RUN, "compact"))["state"] == "deferred"
        assert made.desk.runs.hot[RUN].view.course.deferred == ""


async def test_a_record_said_again_is_the_same_record_whatever_time_it_carries(tmp_path: Path) -> None:
    declared = event("operation.declared", "op-1", kind="mail.send", idempotency_key="k-1")
    async with bench(tmp_path) as made:
        await made.tell(RUN, started(), declared, event("operation.dispatched", "e-go", operation_id="op-1"))
        for epoch, second in ((1, "00"), (1, "10"), (2, "20")):
            record = event("operation.timed_out", "timed-out-1", operation_id="op-1", epoch=epoch)
            record["at"] = f"2026-11-30T10:00:{second}Z"
            await made.tell(RUN, record, channel="record")
        ledger = made.desk.runs.ledgers[RUN]
        assert ledger.items["operation"]["op-1"].state == "unknown"
        # Another owner's is one more message, which changes nothing else.
        assert ledger.head.version == 5
        assert set(ledger.head.violations) <= {"unauthorized_write"}
        assert made.desk.metrics.total("events_duplicate_total") == 1
        assert made.desk.metrics.total("events_rejected_total") == 0


async def test_nobody_is_told_of_a_compaction_that_was_only_planned(tmp_path: Path) -> None:
    """What is planned may be put off: two who ask at once are both told what became of it."""
    harness = Harness(tmp_path)
    harness.start()
    harness.turn(200)
    answers: list[Json] = []
    async with harness.alive() as life:
        await life.read_all()
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                answers.append(await life.ask("compact"))

            for _ in range(4):
                tasks.start_soon(ask)
    assert len(answers) == 4
    assert [item for item in answers if item["state"] == "running" and not item.get("attempt_id")] == []
