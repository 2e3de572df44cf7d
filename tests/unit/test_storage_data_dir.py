"""The directory on disk, the lock, damaged files moved aside, and what errors say."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import anyio
import pytest

import storage
from storage import (
    AlreadyOpen,
    NotOurs,
    StorageConflict,
    StorageCorrupt,
    StorageError,
    StorageFull,
    StorageIo,
    Store,
    set_aside,
)
from storage.data_dir import DataDir
from storage.errors import NotPermitted, translate
from storage.schema import PAGE_BYTES
from support.storage_rows import Messages, commit, opened

pytestmark = pytest.mark.anyio


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_only_the_owner_may_read(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "data"
    old = os.umask(0)
    try:
        async with opened(folder) as store:
            await commit(store, journal=Messages().some(1))
            assert mode(folder) == 0o700
            for name in ("watchkeeper.db", "watchkeeper.db-wal", "watchkeeper.db-shm", "lock"):
                assert mode(folder / name) == 0o600, name
    finally:
        os.umask(old)


async def test_a_file_left_open_to_others_is_closed_to_them(tmp_path: Path) -> None:
    async with opened(tmp_path):
        pass
    (tmp_path / "watchkeeper.db").chmod(0o644)
    async with opened(tmp_path):
        assert mode(tmp_path / "watchkeeper.db") == 0o600


async def test_a_second_holder_is_refused_in_one_clear_line(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        with pytest.raises(AlreadyOpen) as refused:
            await Store.open(tmp_path)
        assert str(tmp_path) in str(refused.value)
        assert str(os.getpid()) in str(refused.value)
        assert "\n" not in str(refused.value)
        assert refused.value.answer == "stop"
        with pytest.raises(AlreadyOpen):
            set_aside(tmp_path)
        await commit(store, journal=Messages().some(1))
    async with opened(tmp_path) as store:
        assert (await store.counts()).entries == 1


async def test_a_damaged_file_is_told_and_moved_aside(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await commit(store, journal=Messages().some(50))
    database = tmp_path / "watchkeeper.db"
    for number in (1, 2):
        with database.open("r+b") as file:
            file.write(b"not a database at all")
        with pytest.raises(StorageCorrupt) as damaged:
            await Store.open(tmp_path)
        assert damaged.value.answer == "stop"
        moved = set_aside(tmp_path)
        assert moved.name == f"watchkeeper.db.damaged-{number}"
        assert moved.read_bytes().startswith(b"not a database")
        async with opened(tmp_path) as store:
            assert (await store.counts()).entries == 0
            await commit(store, journal=Messages().some(1))


def test_the_log_of_a_damaged_file_goes_with_it(tmp_path: Path) -> None:
    (tmp_path / "watchkeeper.db").write_bytes(b"junk")
    (tmp_path / "watchkeeper.db-wal").write_bytes(b"log")
    moved = set_aside(tmp_path)
    assert moved.with_name(moved.name + "-wal").read_bytes() == b"log"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["lock", moved.name, moved.name + "-wal"]
    )


async def test_pages_full_of_noise_are_damage(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await commit(store, journal=Messages().some(500))
    database = tmp_path / "watchkeeper.db"
    size = database.stat().st_size
    with database.open("r+b") as file:
        for page in range(1, size // 4096):
            file.seek(page * 4096)
            file.write(os.urandom(64))
    with pytest.raises(StorageCorrupt):
        await Store.open(tmp_path)


async def test_a_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    database = tmp_path / "watchkeeper.db"
    with closing(sqlite3.connect(database)) as raw:
        raw.execute("CREATE TABLE theirs (a)")
    before = database.read_bytes()
    with pytest.raises(NotOurs):
        await Store.open(tmp_path)
    with closing(sqlite3.connect(database)) as raw:
        assert raw.execute("SELECT name FROM sqlite_schema").fetchall() == [("theirs",)]
    assert len(before) == database.stat().st_size


async def test_a_path_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageIo) as refused:
        await Store.open(tmp_path / "file")
    assert refused.value.answer == "page"


async def test_odd_names_of_directories(tmp_path: Path) -> None:
    folder = tmp_path / "a b?c#d%20é"
    async with opened(folder) as store:
        await commit(store, journal=Messages().some(1))
    assert (folder / "watchkeeper.db").stat().st_size > 0


async def test_opening_says_what_it_found(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        assert (store.info.migrated_from, store.info.quick_check) == (0, "ok")
        assert store.info.sqlite_version == sqlite3.sqlite_version
        assert store.size_bytes > 0
    async with opened(tmp_path) as store:
        assert store.info.migrated_from == store.info.schema_version


async def test_what_was_left_whole_is_read_through_behind_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.schema.CHECKED_FIRST_BYTES", 0)
    monkeypatch.setattr("storage.store._READ_THROUGH_AFTER", 0.0)
    async with opened(tmp_path) as store:
        await commit(store, journal=Messages().some(500))
    # As one that was killed: it held the lock and told nothing.
    DataDir.take(tmp_path).release()
    async with opened(tmp_path) as store:
        assert store.info.quick_check == "ok"
    async with opened(tmp_path) as store:
        assert store.info.quick_check == "later"
        await commit(store, meta={"a": b"1"})
    database = tmp_path / "watchkeeper.db"
    with closing(sqlite3.connect(database)) as raw:
        (root,) = raw.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'bodies'").fetchone()
    with database.open("r+b") as file:
        # Not of what the opening itself reads.
        file.seek((root - 1) * PAGE_BYTES)
        file.write(b"\xff" * PAGE_BYTES)
    seen = []

    async def served() -> None:
        async with opened(tmp_path) as store:
            seen.append(store.info.quick_check)
            # Also while every reader is at work, what is met is remembered.
            store._readers.clear()
            await anyio.sleep_forever()

    with anyio.fail_after(60), pytest.raises(ExceptionGroup) as told:
        await served()
    assert told.group_contains(StorageCorrupt)
    assert seen == ["later"]
    with pytest.raises(StorageCorrupt):
        await Store.open(tmp_path)


async def test_a_large_file_is_not_read_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.schema.CHECKED_BYTES", 1000)
    async with opened(tmp_path):
        pass
    async with opened(tmp_path) as store:
        assert store.info.quick_check == "skipped"


def test_every_error_says_what_now() -> None:
    kinds = [
        kind for kind in vars(storage).values() if isinstance(kind, type) and issubclass(kind, StorageError)
    ]
    assert len(kinds) == 12
    for kind in kinds:
        assert kind.answer in ("retry", "reject", "stop", "page")
        assert kind.hint in str(kind("what happened"))


def test_room_is_what_is_free_on_the_disk_or_left_of_the_limit(tmp_path: Path) -> None:
    held = DataDir.take(tmp_path / "data")
    free = held.free_bytes()
    assert free > 0
    held.limit = 10_000
    assert held.free_bytes() == 10_000
    held.database.write_bytes(b"x" * 9_000)
    assert held.free_bytes() == 1_000
    held.database.write_bytes(b"x" * 11_000)
    assert held.free_bytes() == 0
    held.release()


def test_errors_of_the_system_are_translated(tmp_path: Path) -> None:
    assert type(translate(OSError(errno.ENOSPC, "no space"), tmp_path)) is StorageFull
    assert type(translate(OSError(errno.EACCES, "denied"), tmp_path)) is NotPermitted
    assert type(translate(OSError(errno.EIO, "broken"), tmp_path)) is StorageIo
    assert type(translate(sqlite3.ProgrammingError("odd value"), tmp_path)) is StorageConflict


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("SQLITE_FULL", "StorageFull"),
        ("SQLITE_CORRUPT_VTAB", "StorageCorrupt"),
        ("SQLITE_NOTADB", "StorageCorrupt"),
        ("SQLITE_BUSY_SNAPSHOT", "StorageBusy"),
        ("SQLITE_IOERR_WRITE", "StorageIo"),
        ("SQLITE_READONLY_DBMOVED", "StorageIo"),
        ("SQLITE_CONSTRAINT_CHECK", "StorageConflict"),
        ("SQLITE_ERROR", "StorageError"),
    ],
)
def test_errors_of_the_driver_are_translated(tmp_path: Path, name: str, kind: str) -> None:
    error = sqlite3.OperationalError("it says")
    error.sqlite_errorname = name
    mine = translate(error, tmp_path / "watchkeeper.db")
    assert type(mine).__name__ == kind
    assert name in str(mine)
