"""Group commit: what is committed together, what fails alone, and what cancelling does."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from storage import (
    Cursor,
    ItemRow,
    OutOfOrder,
    SearchRow,
    Stale,
    StorageClosed,
    StorageError,
    StorageFull,
    Store,
    TombstoneRow,
    transaction,
)
from storage.writer import Job
from support.storage_rows import (
    LANE,
    TENANT,
    Messages,
    attempt,
    checkpoint,
    commit,
    opened,
    outgoing,
    receipt,
    run_row,
    unit,
)

pytestmark = pytest.mark.anyio


async def test_a_refused_unit_takes_no_other_with_it(tmp_path: Path) -> None:
    outcomes: dict[int, str] = {}

    async def one(store: Store, number: int) -> None:
        run = Messages(f"r{number}")
        bad = number % 5 == 0
        try:
            await commit(
                store,
                journal=run.some(2),
                runs=(run_row(run.run),),
                outbox=(outgoing(number),),
                checkpoint=checkpoint(2 if bad else 1, run=run.run),
            )
        except Stale:
            outcomes[number] = "stale"
        else:
            outcomes[number] = "stored"

    async with opened(tmp_path) as store:
        async with anyio.create_task_group() as group:
            for number in range(40):
                group.start_soon(one, store, number)
        assert sorted(number for number, end in outcomes.items() if end == "stale") == list(range(0, 40, 5))
        assert {run.run for run in await store.runs(TENANT, LANE)} == {f"r{n}" for n in range(40) if n % 5}
        assert await store.outbox_count(TENANT, LANE) == 32
        assert (await store.counts()).entries == 64
        assert not store.maybe_known(TENANT, LANE, "r5", "event", "event-1")
        assert store.maybe_known(TENANT, LANE, "r6", "event", "event-1")
        for number in range(1, 5):
            assert await store.verify_chain(TENANT, LANE, f"r{number}") is None


async def test_a_unit_refused_alone_leaves_nothing_and_the_next_one_stands(tmp_path: Path) -> None:
    run, other = Messages(), Messages("r2")
    entries = run.some(3)
    async with opened(tmp_path) as store:
        await commit(store, journal=entries[:1], runs=(run_row(),), cursor=Cursor(1, "then"))
        for refused in ({"journal": entries[2:]}, {"journal": other.some(1), "checkpoint": checkpoint(2)}):
            with pytest.raises((OutOfOrder, Stale)):
                await commit(store, **refused, runs=(run_row("r3"),), cursor=Cursor(9, "now"))
            assert await store.cursor(TENANT, LANE) == Cursor(1, "then")
            assert {row.run for row in await store.runs(TENANT, LANE)} == {"r1"}
            assert not store.maybe_known(TENANT, LANE, "r2", "event", "event-1")
        done = await commit(store, journal=entries[1:], runs=(run_row("r3"),))
        assert done.entries == range(2, 4)
        assert await store.verify_chain(TENANT, LANE, "r1") is None
        assert {row.run for row in await store.runs(TENANT, LANE)} == {"r1", "r3"}


async def test_more_runs_than_the_writer_remembers_are_each_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "_KEPT_RUNS", 3)
    runs = [Messages(f"r{number}") for number in range(7)]
    async with opened(tmp_path) as store:
        for _ in range(3):
            for run in runs:
                await commit(store, journal=run.some(1))
        for run in runs:
            assert len(await store.tail(TENANT, LANE, run.run, after=0)) == 3
            assert await store.verify_chain(TENANT, LANE, run.run) is None


async def test_a_fault_of_our_own_ends_the_writer_and_answers_everyone(tmp_path: Path) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("a fault")

    async def both(store: Store) -> None:
        async with anyio.create_task_group() as group:
            await group.start(store.run_writer)
            faulty, behind = store._writer.enqueue(fail, 1), store.begin(unit(meta={"a": b"1"}))
            with pytest.raises(StorageError, match="the writer failed"):
                await faulty.outcome()
            with pytest.raises(StorageClosed):
                await behind.outcome()

    store = await Store.open(tmp_path)
    with pytest.raises(ExceptionGroup) as ended:
        await both(store)
    assert ended.group_contains(RuntimeError, match="a fault")
    await store.aclose()
    async with opened(tmp_path) as again:
        assert await again.meta("a") is None


async def test_units_of_one_task_queue_commit_in_the_order_handed_over(tmp_path: Path) -> None:
    run = Messages()
    entries = run.some(100)
    async with opened(tmp_path) as store, anyio.create_task_group() as group:
        for entry in entries:
            group.start_soon(store.commit, unit(journal=(entry,), outbox=(outgoing(entry.version),)))
            await anyio.lowlevel.checkpoint()
    async with opened(tmp_path) as store:
        assert await store.tail(TENANT, LANE, "r1", after=0) == list(entries)
        waiting = await store.outbox(TENANT, LANE, limit=1000)
        assert [row.msg_id for row in waiting] == [f"m{number}" for number in range(1, 101)]


async def test_closing_commits_what_is_queued(tmp_path: Path) -> None:
    run = Messages()
    async with opened(tmp_path) as store, anyio.create_task_group() as group:
        for entry in run.some(20):
            group.start_soon(store.commit, unit(journal=(entry,)))
        await anyio.wait_all_tasks_blocked()
        await store.aclose()
        await store.aclose()
    with pytest.raises(StorageClosed):
        await store.commit(unit())
    with pytest.raises(StorageClosed):
        await store.counts()
    async with opened(tmp_path) as store:
        assert (await store.counts()).entries == 20


async def test_without_a_writer_closing_answers_those_who_wait(tmp_path: Path) -> None:
    store = await Store.open(tmp_path)
    async with anyio.create_task_group() as group:

        async def wait() -> None:
            with pytest.raises(StorageClosed):
                await store.commit(unit())

        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        await store.aclose()


async def test_a_cancelled_writer_answers_everyone(tmp_path: Path) -> None:
    stored: list[int] = []
    refused: list[int] = []
    async with await Store.open(tmp_path) as store, anyio.create_task_group() as callers:

        async def one(number: int) -> None:
            try:
                await commit(store, journal=Messages(f"r{number}").some(1))
            except StorageClosed:
                refused.append(number)
            else:
                stored.append(number)

        async with anyio.create_task_group() as group:
            await group.start(store.run_writer)
            for number in range(600):
                callers.start_soon(one, number)
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
    assert sorted(stored + refused) == list(range(600))
    async with await Store.open(tmp_path) as store:
        assert {run.run for run in await store.runs(TENANT, LANE)} == {f"r{number}" for number in stored}


async def test_the_writer_beats(tmp_path: Path) -> None:
    beats: list[int] = []
    async with opened(tmp_path, on_beat=lambda: beats.append(1)) as store:
        before = len(beats)
        await commit(store, meta={"a": b"1"})
        assert len(beats) > before


async def test_a_bounded_file_is_told_as_full_until_a_commit_succeeds(tmp_path: Path) -> None:
    run = Messages()
    async with opened(tmp_path, max_bytes=480 * 1024) as store:
        stored = 0

        async def until_full() -> None:
            nonlocal stored
            while True:
                message = run.next(body=b"x" * 20_000)
                await commit(store, journal=(message,), cursor=Cursor(stored + 1, "then"))
                stored += 1

        with pytest.raises(StorageFull) as full:
            await until_full()
        assert full.value.answer == "page"
        assert store.full
        assert len(await store.tail(TENANT, LANE, "r1", after=0)) == stored
        assert await store.cursor(TENANT, LANE) == Cursor(stored, "then")
        assert not store.maybe_known(TENANT, LANE, "r1", "event", f"event-{stored + 1}")
        assert (await store.counts()).entries == stored
        assert store.size_bytes > 20_000 * stored
    async with opened(tmp_path) as store:
        assert not store.full
        assert await store.verify_chain(TENANT, LANE, "r1") is None


async def test_full_ends_with_the_next_commit_that_fits(tmp_path: Path) -> None:
    async with opened(tmp_path, max_bytes=480 * 1024) as store:
        with pytest.raises(StorageFull):
            await commit(store, meta={"large": b"x" * 1_000_000})
        assert store.full
        await commit(store, meta={"small": b"x"})
        assert not store.full
        assert await store.meta("large") is None


READS: dict[str, Callable[[Store], Awaitable[object]]] = {
    "find_ids": lambda store: store.find_ids(TENANT, LANE, [("r1", "event", "event-1")]),
    "load_family": lambda store: store.load_family(TENANT, LANE, "r1"),
    "runs": lambda store: store.runs(TENANT, LANE),
    "item": lambda store: store.item(TENANT, LANE, "r1", "k", "a"),
    "tail": lambda store: store.tail(TENANT, LANE, "r1", after=0),
    "entry_id": lambda store: store.entry(TENANT, LANE, "r1", event_id="event-1"),
    "entry_position": lambda store: store.entry(TENANT, LANE, "r1", position=1),
    "verify_chain": lambda store: store.verify_chain(TENANT, LANE, "r1"),
    "tombstones": lambda store: store.tombstones(TENANT, LANE),
    "newest_checkpoint": lambda store: store.newest_checkpoint(TENANT, LANE, "r1"),
    "checkpoint": lambda store: store.checkpoint(TENANT, LANE, "r1", "c1"),
    "checkpoints": lambda store: store.checkpoints(TENANT, LANE, "r1"),
    "receipts": lambda store: store.receipts(TENANT, LANE, "r1"),
    "open_attempts": lambda store: store.open_attempts(TENANT, LANE),
    "cursor": lambda store: store.cursor(TENANT, LANE),
    "outbox": lambda store: store.outbox(TENANT, LANE, limit=5),
    "outbox_count": lambda store: store.outbox_count(TENANT, LANE),
    "search": lambda store: store.search(TENANT, LANE, "r1", "word", limit=5),
    "searchable_through": lambda store: store.searchable_through(TENANT, LANE, "r1"),
    "meta": lambda store: store.meta("a"),
    "counts": lambda store: store.counts(),
}


async def filled(store: Store) -> None:
    await commit(
        store,
        journal=Messages().some(3),
        runs=(run_row(),),
        items=(ItemRow(run="r1", kind="k", key="a", body=b"1"),),
        open_attempt=attempt(),
        checkpoint=checkpoint(1),
        receipt=receipt(),
        outbox=(outgoing(1),),
        search=(SearchRow(run="r1", position=1, event_id="e", type="message", text="a word"),),
        cursor=Cursor(3, "then"),
        meta={"a": b"1"},
    )


async def cancel_after(turns: int, verb: Awaitable[object]) -> bool:
    """Run ``verb`` and cancel it after so many turns of the loop; True if it was cut short."""
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def cancel() -> None:
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                scope.cancel()

            group.start_soon(cancel)
            await verb
            group.cancel_scope.cancel()
            return False
    return True


@pytest.mark.parametrize("verb", READS)
async def test_a_cancelled_read_leaves_nothing_behind(tmp_path: Path, verb: str) -> None:
    async with opened(tmp_path) as store:
        await filled(store)
        expected = await READS[verb](store)
        for turns in range(12):
            await cancel_after(turns, READS[verb](store))
            await commit(store, meta={"turn": str(turns).encode()})
        with anyio.fail_after(30):
            for _ in range(4):
                assert await READS[verb](store) == expected


WRITES = {
    "journal": {"journal": Messages("w").some(3)},
    "runs": {"runs": (run_row("w"),)},
    "items": {"items": (ItemRow(run="w", kind="k", key="a", body=b"1"),)},
    "open_attempt": {"open_attempt": attempt("w", "w")},
    "close_attempt": {"close_attempt": "a1"},
    "checkpoint": {"checkpoint": checkpoint(2)},
    "receipt": {"receipt": receipt("w")},
    "forget": {"forget": (TombstoneRow(run="r1", forgotten_at="", body=b""),)},
    "search": {"search": (SearchRow(run="w", position=1, event_id="e", type="message", text="t"),)},
    "cursor": {"cursor": Cursor(9, "now")},
}


@pytest.mark.parametrize("verb", WRITES)
@pytest.mark.parametrize("turns", range(5))
async def test_a_cancelled_commit_is_whole_or_absent(tmp_path: Path, verb: str, turns: int) -> None:
    async with opened(tmp_path) as store:
        await filled(store)
        before = await store.counts()
        await cancel_after(turns, commit(store, **WRITES[verb], outbox=(outgoing(2),), meta={"w": b"1"}))
        await commit(store, meta={"after": b"1"})
        marked = await store.meta("w") is not None
        after = await store.counts()
        assert after.outbox == before.outbox + marked
        assert after.entries == before.entries + (3 if marked and verb == "journal" else 0)
        assert store.maybe_known(TENANT, LANE, "w", "event", "event-1") == (marked and verb == "journal")
    async with opened(tmp_path) as store:
        assert (await store.counts()) == after


@pytest.mark.parametrize("turns", range(6))
async def test_cancelling_outbox_sent_is_harmless(tmp_path: Path, turns: int) -> None:
    async with opened(tmp_path) as store:
        done = await commit(store, outbox=(outgoing(1), outgoing(2)))
        await cancel_after(turns, store.outbox_sent(done.outbox_ids))
        await commit(store, meta={"after": b"1"})
        assert await store.outbox_count(TENANT, LANE) in (0, 2)
        await store.outbox_sent(done.outbox_ids)
        assert await store.outbox_count(TENANT, LANE) == 0


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 40])
async def test_cancelling_open_gives_the_lock_back(tmp_path: Path, turns: int) -> None:
    async def open_and_close() -> None:
        async with await Store.open(tmp_path):
            pass

    await cancel_after(turns, open_and_close())
    async with opened(tmp_path) as store:
        await commit(store, meta={"a": b"1"})


async def test_a_cancelled_close_closes(tmp_path: Path) -> None:
    for turns in range(4):
        async with anyio.create_task_group() as group:
            store = await Store.open(tmp_path)
            await group.start(store.run_writer)
            await commit(store, meta={"a": b"1"})
            await cancel_after(turns, store.aclose())
            await store.aclose()


async def test_closing_waits_for_a_writer_that_was_cancelled_with_work_under_way(tmp_path: Path) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slow(tx: transaction.Transaction) -> None:
        began.set()
        assert go_on.wait(30)

    async def told(job: Job[None], answers: list[bool]) -> None:
        await job.outcome()
        answers.append(True)

    store = await Store.open(tmp_path)
    answers: list[bool] = []
    with anyio.fail_after(30):
        async with anyio.create_task_group() as outer, anyio.create_task_group() as writing:
            await writing.start(store.run_writer)
            # More than the log may hold uncopied: there is something to do behind it.
            job = store._writer.enqueue(slow, 1 << 30)
            outer.start_soon(told, job, answers)
            await anyio.to_thread.run_sync(began.wait)
            writing.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                # Cancelled, and waiting for its thread.
                await anyio.wait_all_tasks_blocked()
                outer.start_soon(store.aclose)
                await anyio.wait_all_tasks_blocked()
                go_on.set()
    assert answers == [True]
    async with opened(tmp_path) as again:
        assert (await again.counts()).entries == 0
