"""Schemas: an old version becomes the newest with its rows, a newer is refused, a failure leaves the old."""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest

from storage import SchemaTooNew, StorageError, StorageFull, Store
from storage.schema import APPLICATION_ID, PAGE_BYTES, Migration, migrate, migrations
from support.storage_rows import LANE, TENANT, Messages, commit, opened, run_row

pytestmark = pytest.mark.anyio

KNOWN = migrations()


def schema_of(path: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(path)) as raw:
        return sorted(raw.execute("SELECT name, coalesce(sql, '') FROM sqlite_schema"))


def test_migrations_are_numbered_without_holes() -> None:
    assert [migration.version for migration in KNOWN] == list(range(1, len(KNOWN) + 1))


@pytest.mark.parametrize("version", [migration.version for migration in KNOWN])
async def test_every_old_schema_becomes_the_newest(tmp_path: Path, version: int) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    with closing(sqlite3.connect(old / "watchkeeper.db", isolation_level=None)) as raw:
        assert migrate(raw, old, KNOWN[:version]) == (0, version)
        raw.execute("INSERT INTO lanes VALUES (1, ?, ?, 7, 'then')", (TENANT, LANE))
        raw.execute("INSERT INTO runs (lane_no, run, family, chain) VALUES (1, 'r0', 'r0', zeroblob(32))")
        raw.execute("INSERT INTO meta VALUES ('a', x'31')")
    async with opened(old) as store, opened(new):
        assert (store.info.migrated_from, store.info.schema_version) == (version, len(KNOWN))
        assert await store.meta("a") == b"1"
        assert [run.run for run in await store.runs(TENANT, LANE)] == ["r0"]
        await commit(store, journal=Messages().some(3), runs=(run_row(),))
        assert await store.verify_chain(TENANT, LANE, "r1") is None
    assert schema_of(old / "watchkeeper.db") == schema_of(new / "watchkeeper.db")


@pytest.mark.parametrize("page", [4096, PAGE_BYTES])
async def test_a_database_keeps_the_page_size_it_was_made_with(tmp_path: Path, page: int) -> None:
    if page != PAGE_BYTES:
        with closing(sqlite3.connect(tmp_path / "watchkeeper.db", isolation_level=None)) as raw:
            raw.execute(f"PRAGMA page_size={page}")
            migrate(raw, tmp_path, KNOWN)
    run = Messages()
    async with opened(tmp_path, max_bytes=512 * 1024) as store:
        with suppress(StorageFull):
            while True:
                await commit(store, journal=(run.next(body=b"x" * 20_000),))
        assert store.full
    database = tmp_path / "watchkeeper.db"
    with closing(sqlite3.connect(database)) as raw:
        assert raw.execute("PRAGMA page_size").fetchone() == (page,)
    assert 450_000 < database.stat().st_size <= 512 * 1024
    async with opened(tmp_path) as store:
        assert await store.verify_chain(TENANT, LANE, "r1") is None
        await store.backup(tmp_path / "copy.db")
    with closing(sqlite3.connect(tmp_path / "copy.db")) as raw:
        assert raw.execute("PRAGMA page_size").fetchone() == (page,)


async def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await commit(store, journal=Messages().some(3))
    later = (*KNOWN, Migration(len(KNOWN) + 1, "later", "CREATE TABLE later (a);"))
    async with opened(tmp_path, migrations=later):
        pass
    before = (tmp_path / "watchkeeper.db").read_bytes()
    with pytest.raises(SchemaTooNew) as refused:
        await Store.open(tmp_path)
    assert refused.value.answer == "stop"
    assert (tmp_path / "watchkeeper.db").read_bytes() == before


async def test_a_migration_that_fails_leaves_the_version_before_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await commit(store, journal=Messages().some(3))
    number = len(KNOWN) + 1
    broken = (*KNOWN, Migration(number, "broken", "CREATE TABLE half (a); INSERT INTO nowhere VALUES (1);"))
    before = schema_of(tmp_path / "watchkeeper.db")
    with pytest.raises(StorageError):
        await Store.open(tmp_path, migrations=broken)
    assert schema_of(tmp_path / "watchkeeper.db") == before
    async with opened(tmp_path) as store:
        assert store.info.migrated_from == len(KNOWN)
        assert (await store.counts()).entries == 3


async def test_the_file_says_whose_it_is(tmp_path: Path) -> None:
    async with opened(tmp_path):
        pass
    with closing(sqlite3.connect(tmp_path / "watchkeeper.db")) as raw:
        assert raw.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert raw.execute("PRAGMA user_version").fetchone() == (len(KNOWN),)
        assert raw.execute("PRAGMA journal_mode").fetchone() == ("wal",)
