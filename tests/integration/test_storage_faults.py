"""Real faults: kill -9 in mid commit, a full disk, a foreign lock, flipped bits."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from storage import AlreadyOpen, Cursor, StorageBusy, StorageCorrupt, StorageError, StorageFull, Store
from support.storage_rows import LANE, TENANT, Messages, commit, opened, outgoing, run_row

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).resolve().parents[2]


def child(folder: Path) -> subprocess.Popen[str]:
    """The committing process, once it has the store open."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/support/storage_child.py"), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


def killed_after(process: subprocess.Popen[str], acknowledgements: int) -> int:
    """Kill -9 after so many acknowledgements; the last version acknowledged."""
    assert process.stdout is not None
    for _ in range(acknowledgements):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().split("\n")
    process.stdout.close()
    process.wait()
    whole = [line for line in rest[:-1] if line]
    return int(whole[-1]) if whole else 0


async def test_kill_9_loses_nothing_acknowledged_and_keeps_order(tmp_path: Path) -> None:
    acknowledged = 0
    for acknowledgements in (1, 17, 40, 80, 5):
        process = await anyio.to_thread.run_sync(child, tmp_path)
        acknowledged = max(
            acknowledged, await anyio.to_thread.run_sync(killed_after, process, acknowledgements)
        )
        async with opened(tmp_path) as store:
            (run,) = await store.load_family(TENANT, LANE, "r1")
            assert run.version >= acknowledged
            assert run.version % 3 == 0
            found = await store.tail(TENANT, LANE, "r1", after=0)
            assert [message.version for message in found] == list(range(1, run.version + 1))
            assert await store.verify_chain(TENANT, LANE, "r1") is None
            assert await store.cursor(TENANT, LANE) == Cursor(run.version, "then")
            waiting = await store.outbox(TENANT, LANE, limit=100_000)
            assert [row.msg_id for row in waiting] == [f"m{n}" for n in range(3, run.version + 1, 3)]
            names = [("r1", "event", message.event_id) for message in found]
            assert len(await store.find_ids(TENANT, LANE, names)) == run.version


async def test_another_process_has_the_directory(tmp_path: Path) -> None:
    process = await anyio.to_thread.run_sync(child, tmp_path)
    try:
        with pytest.raises(AlreadyOpen, match=str(process.pid)):
            await Store.open(tmp_path)
    finally:
        await anyio.to_thread.run_sync(killed_after, process, 0)
    async with opened(tmp_path) as store:
        await commit(store, meta={"a": b"1"})


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("mounting a small tmpfs is not permitted here: run as root to test a full disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take every byte that is left."""
    hog = folder / "hog"
    with hog.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 65536) == 65536:
                pass
            while file.write(b"x"):
                pass
        except OSError:
            pass
    return hog


async def test_a_disk_that_fills_up_and_is_given_space(small_disk: Path) -> None:
    run, data = Messages(), small_disk / "data"
    stored: list[int] = []

    async def one(store: Store, number: int) -> None:
        try:
            await commit(store, journal=Messages(f"p{number}").some(1), outbox=(outgoing(number, 2000),))
        except StorageFull:
            return
        stored.append(number)

    async with opened(data) as store:
        await commit(store, journal=run.some(3), runs=(run_row(),), cursor=Cursor(3, "then"))
        number = 0
        while not store.full:
            async with anyio.create_task_group() as group:
                for at in range(20):
                    group.start_soon(one, store, number + at)
            number += 20
        with pytest.raises(StorageFull):
            await commit(store, journal=Messages("late").some(1), meta={"large": b"x" * 3_000_000})
        assert store.full
        assert await store.outbox_count(TENANT, LANE) == len(stored)
        assert {row.run for row in await store.runs(TENANT, LANE)} == {"r1", *(f"p{n}" for n in stored)}
        assert await store.verify_chain(TENANT, LANE, "r1") is None
        assert not store.maybe_known(TENANT, LANE, "late", "event", "event-1")

        await anyio.run_process(["mount", "-o", "remount,size=16m", str(small_disk)])
        await commit(store, journal=run.some(2))
        assert not store.full
        counts = await store.counts()
    async with opened(data) as store:
        assert await store.counts() == counts
        assert await store.verify_chain(TENANT, LANE, "r1") is None


async def test_a_disk_full_at_start(small_disk: Path) -> None:
    run, data = Messages(), small_disk / "data"
    async with opened(data) as store:
        await commit(store, journal=run.some(30))
    hog = fill(small_disk)
    with pytest.raises(StorageFull) as full:
        await Store.open(data)
    assert full.value.answer == "page"
    hog.unlink()
    async with opened(data) as store:
        assert (await store.counts()).entries == 30
        assert await store.verify_chain(TENANT, LANE, "r1") is None


async def test_a_disk_full_before_the_first_start(small_disk: Path) -> None:
    hog = fill(small_disk)
    with pytest.raises(StorageFull):
        await Store.open(small_disk / "data")
    hog.unlink()
    async with opened(small_disk / "data") as store:
        await commit(store, journal=Messages().some(3))


class ForeignLock:
    """Another program's connection that holds the write lock."""

    def __init__(self, database: Path) -> None:
        self._raw = sqlite3.connect(database, isolation_level=None, check_same_thread=False)
        self._raw.execute("BEGIN IMMEDIATE")

    def release(self) -> None:
        self._raw.execute("ROLLBACK")
        self._raw.close()


async def test_a_foreign_lock_of_three_seconds_is_waited_for(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        lock = ForeignLock(tmp_path / "watchkeeper.db")
        # The length of the hold is what is tested; nothing is synchronised by it.
        timer = threading.Timer(3, lock.release)
        timer.start()
        await commit(store, journal=Messages().some(1))
        await anyio.to_thread.run_sync(timer.join)
        assert (await store.counts()).entries == 1


async def test_a_foreign_lock_held_too_long_is_told_and_survived(tmp_path: Path) -> None:
    run = Messages()
    async with opened(tmp_path, busy_timeout_ms=50) as store:
        lock = ForeignLock(tmp_path / "watchkeeper.db")
        with pytest.raises(StorageBusy) as busy:
            await commit(store, journal=run.some(1))
        assert busy.value.answer == "retry"
        assert (await store.counts()).entries == 0
        lock.release()
        await commit(store, journal=Messages().some(1))
        assert not store.full


async def test_a_flipped_bit_in_a_body_breaks_the_chain(tmp_path: Path) -> None:
    run = Messages()
    async with opened(tmp_path) as store:
        await commit(
            store, journal=(*run.some(20), run.next(body=b'{"text":"needle in the journal"}'), *run.some(20))
        )
    database = tmp_path / "watchkeeper.db"
    content = database.read_bytes()
    database.write_bytes(content.replace(b"needle in the journal", b"noodle in the journal"))
    async with opened(tmp_path) as store:
        broken = await store.verify_chain(TENANT, LANE, "r1")
        assert broken is not None
        assert (broken.version, broken.reason) == (21, "body")


async def test_a_damaged_log_never_shows_half_a_unit(tmp_path: Path) -> None:
    """SQLite drops a damaged log from the damage on, silently: what is left must be whole units."""
    source, copy = tmp_path / "source", tmp_path / "copy"
    copy.mkdir()
    run = Messages()
    async with opened(source) as store:
        for _ in range(40):
            await commit(store, journal=run.some(3), runs=(run_row(),), cursor=Cursor(run.version, "then"))
        for name in ("watchkeeper.db", "watchkeeper.db-wal"):
            shutil.copy(source / name, copy / name)
    log = bytearray((copy / "watchkeeper.db-wal").read_bytes())
    log[len(log) // 2] ^= 0x10
    (copy / "watchkeeper.db-wal").write_bytes(log)
    async with opened(copy) as store:
        cursor = await store.cursor(TENANT, LANE)
        (left,) = await store.load_family(TENANT, LANE, "r1")
        assert cursor == Cursor(left.version, "then")
        assert 0 < left.version < run.version
        assert await store.verify_chain(TENANT, LANE, "r1") is None


async def test_damage_met_while_running_is_told(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for _ in range(20):
            await commit(store, journal=Messages(f"r{os.urandom(4).hex()}").some(50))
    database = tmp_path / "watchkeeper.db"
    with closing(sqlite3.connect(database)) as raw:
        (page,) = raw.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'bodies'").fetchone()
        (size,) = raw.execute("PRAGMA page_size").fetchone()
    async with opened(tmp_path) as store:
        with database.open("r+b") as file:
            file.seek((page - 1) * size)
            file.write(b"\xff" * size)
        runs = await store.runs(TENANT, LANE)
        with pytest.raises(StorageCorrupt):
            await store.tail(TENANT, LANE, runs[0].run, after=0)
    with pytest.raises(StorageError):
        await Store.open(tmp_path)
