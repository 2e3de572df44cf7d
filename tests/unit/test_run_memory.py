"""What stays in memory of the runs a lane knows: by number, by bytes, and no longer than somebody speaks of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.memory import allocated, give_back
from sidecar.runs import KEPT, HotRun
from storage.records import RunSummary
from support.bench import LANE, TENANT, Bench, bench, event, started

pytestmark = pytest.mark.anyio


def name(number: int) -> str:
    return f"r{number:04d}"


async def tell(made: Bench, first: int, count: int, text: str = "") -> None:
    for number in range(first, first + count):
        await made.tell(name(number), started(), event("message", "m", role="user", content=f"go on {text}"))


def stays_never(_: HotRun) -> bool:
    return False


async def test_a_run_nobody_speaks_of_leaves_memory_and_comes_back_as_it_was(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        runs = made.desk.runs
        await tell(made, 0, KEPT + 20)
        before = await made.ask(name(0), "packet")
        async with made.desk.changing():
            assert runs.rest(stays_never) == 0
            assert runs.rest(lambda hot: hot.ledger.head.run == name(1)) == 20
        assert len(runs.hot) == KEPT
        # Asked for last, and kept for a reason.
        assert {name(0), name(1)} <= set(runs.hot)
        assert name(2) not in runs.hot
        assert list(runs.resting) == [name(number) for number in range(2, 22)]
        assert runs.bytes == sum(hot.weight for hot in runs.hot.values())
        await made.tell(name(2), event("message", "m2", role="assistant", content="yes"))
        assert name(2) in runs.hot
        assert name(2) not in runs.resting
        after = await made.ask(name(0), "packet")
        assert after["protected_digest"] == before["protected_digest"]


async def test_what_was_hot_lately_is_told_the_next_owner_when_the_lane_is_given_up(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        await tell(made, 0, KEPT + 3)
        async with made.desk.changing():
            made.desk.runs.rest(stays_never)
            made.desk.runs.rest(stays_never)
        assert len(made.desk.runs.resting) == 3
        await made.observer.drained()
        states = [row for row in await made.store.outbox(TENANT, LANE, limit=1_000) if row.stream == "state"]
        assert {row.subject.rsplit(".", 1)[1] for row in states} == {name(n) for n in range(KEPT + 3)}


async def test_hot_runs_are_bounded_in_bytes_but_for_the_one_in_use(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        runs = made.desk.runs
        runs._most_bytes = runs._allowed_bytes = 400_000
        for number in range(12):
            claims = (
                event(
                    "evidence.recorded",
                    f"ev-{n}",
                    evidence_id=f"ev-{n}",
                    claim="x" * 4_000,
                    kind="observed",
                    source="event:e-start",
                )
                for n in range(20)
            )
            await made.tell(name(number), started(), *claims)
            assert runs.bytes <= 400_000
            assert name(number) in runs.hot
        assert len(runs.hot) < 6
        # One that is too large alone stays while it is used, and is not tried to let go with each batch.
        runs._most_bytes = runs._allowed_bytes = 50_000
        await made.tell(name(11), event("message", "m", role="assistant", content="go on"))
        assert set(runs.hot) == {name(11)}
        assert not runs.crowded


async def test_what_takes_the_place_of_something_is_not_reckoned_twice_for_ever(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        await made.tell("r", started())
        for number in range(60):
            step = event("step.changed", f"s{number}", phase="p" * 4_000, uncertain=["u" * 4_000])
            await made.tell("r", step)
        assert made.desk.runs.hot["r"].weight < 250_000


async def test_after_a_start_only_what_waits_and_the_newest_are_in_memory(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        await made.tell("full", started())
        await made.tell(
            "full",
            event("usage.reported", "u", model="test-model", context_tokens=70_000, output_tokens=1),
        )
        await tell(made, 0, KEPT + 20)
    async with bench(tmp_path) as made:
        await made.observer.caught_up()
        assert set(made.desk.runs.hot) == {"full", *(name(n) for n in range(20, KEPT + 20))}
        assert sum(made.desk.runs.levels.values()) == KEPT + 21


async def test_each_run_is_looked_at_once_and_nothing_else_of_it_is_held(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        await tell(made, 0, 5)

        def look(row: RunSummary) -> str | None:
            return row.run if row.run != name(3) else None

        found = await made.store.each_run(TENANT, LANE, look, finished=False)
        assert found == [name(0), name(1), name(2), name(4)]
        assert await made.store.each_run(TENANT, LANE, look, finished=True) == []
        assert await made.store.each_run("unknown", LANE, look) == []


def test_giving_memory_back_can_be_asked_for_anywhere() -> None:
    assert give_back() in (True, False)


def test_what_the_allocator_has_handed_out_is_told_in_bytes() -> None:
    before, _ = allocated()
    kept = [bytes(100_000) for _ in range(100)]
    after, _ = allocated()
    assert (before, after) == (0, 0) or after - before >= 9_000_000
    assert len(kept) == 100


def test_many_threads_have_two_stocks_of_memory_between_them() -> None:
    """In a process of its own: what is chosen here is so until it ends."""
    script = """
import ctypes, sys, threading
from sidecar.memory import few_arenas
if few_arenas():
    held, done = threading.Barrier(9), threading.Event()
    def work():
        kept = bytearray(100_000)
        held.wait()
        done.wait()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    held.wait()
    libc = ctypes.CDLL(None)
    libc.fdopen.restype = ctypes.c_void_p
    out = libc.fdopen(1, b"w")
    libc.malloc_info(0, ctypes.c_void_p(out))
    libc.fflush(ctypes.c_void_p(out))
    done.set()
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert told.count("<heap nr=") <= 2
