"""Copies of the database, putting one back, and that forgetting leaves no word in any file."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from storage import (
    AlreadyOpen,
    NotOurs,
    SchemaTooNew,
    SearchRow,
    StorageConflict,
    StorageCorrupt,
    StorageIo,
    Store,
    TombstoneRow,
    Unit,
    restore,
)
from support.storage_rows import LANE, TENANT, Messages, commit, opened

pytestmark = pytest.mark.anyio

WORD = "marlinspike"
KEEP_RUN_NUMBERS = {"runs", "heads", "marks", "tombstones", "permits"}
"""Tables that know a forgotten run still: no column of theirs holds what was said."""


async def test_a_copy_is_of_one_moment_and_can_be_put_back(tmp_path: Path) -> None:
    messages = Messages()
    async with opened(tmp_path / "one") as store:
        await commit(store, journal=messages.some(300))
        size = await store.backup(tmp_path / "copy.db")
        await commit(store, journal=messages.some(5))
        assert await store.lanes() == [(TENANT, LANE)]
    copy = tmp_path / "copy.db"
    assert (size, copy.stat().st_mode & 0o777) == (copy.stat().st_size, 0o600)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.db", "one"]
    assert await restore(copy, tmp_path / "two") == 4
    async with opened(tmp_path / "two") as store:
        found = await store.tail(TENANT, LANE, "r1", after=-1)
        assert [message.version for message in found] == list(range(1, 301))
        assert await store.verify_chain(TENANT, LANE, "r1") is None


async def test_nothing_is_overwritten(tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    async with opened(tmp_path / "one") as store:
        await commit(store, journal=Messages().some(1))
        await store.backup(copy)
        before = copy.read_bytes()
        with pytest.raises(StorageConflict, match="not overwritten"):
            await store.backup(copy)
        with pytest.raises(AlreadyOpen):
            await restore(copy, tmp_path / "one")
        with pytest.raises(StorageIo):
            await store.backup(tmp_path / "no" / "folder.db")
    assert copy.read_bytes() == before
    database = tmp_path / "one" / "watchkeeper.db"
    before = database.read_bytes()
    with pytest.raises(StorageConflict, match="not overwritten"):
        await restore(copy, tmp_path / "one")
    assert database.read_bytes() == before


async def test_only_a_whole_copy_of_ours_is_put_back(tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    async with opened(tmp_path / "one") as store:
        await commit(store, journal=Messages().some(600))
        await store.backup(copy)
    theirs = tmp_path / "theirs.db"
    with closing(sqlite3.connect(theirs)) as raw:
        raw.execute("CREATE TABLE theirs (x)")
    newer = tmp_path / "newer.db"
    newer.write_bytes(copy.read_bytes())
    with closing(sqlite3.connect(newer)) as raw:
        raw.execute("PRAGMA user_version=99")
    torn = tmp_path / "torn.db"
    torn.write_bytes(copy.read_bytes()[: copy.stat().st_size // 2])
    wrong = {theirs: NotOurs, newer: SchemaTooNew, torn: StorageCorrupt, tmp_path / "none.db": StorageIo}
    for file, error in wrong.items():
        with pytest.raises(error):
            await restore(file, tmp_path / "fresh")
    assert not (tmp_path / "fresh").exists()


async def test_forgetting_empties_every_table_that_knows_a_run(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.backup(tmp_path / "empty.db")
    with closing(sqlite3.connect(tmp_path / "empty.db")) as raw:
        tables = [name for (name,) in raw.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        knowing = {
            name
            for name in tables
            if "run_no" in [column[1] for column in raw.execute(f"PRAGMA table_info('{name}')")]
        }
    from storage import retention

    cleared = {*retention._CLEARED, "search_rows", "search_through"}
    assert knowing - KEEP_RUN_NUMBERS == cleared


@pytest.mark.parametrize("others", [0, 400])
async def test_no_word_of_a_forgotten_run_is_left_in_the_files(tmp_path: Path, others: int) -> None:
    gone, kept = Messages("gone"), Messages("kept")
    async with opened(tmp_path) as store:
        for number in range(1, 60):
            body = f'{{"text":"{WORD} {number}"}}'.encode()
            await commit(store, journal=[gone.next(body=body)])
            rows = [
                SearchRow(
                    run="gone", position=number, event_id=f"e{number}", type="message", text=f"{WORD} x"
                )
            ]
            await store.commit(Unit(tenant=TENANT, lane=LANE, search=tuple(rows)))
        for number in range(1, others):
            row = SearchRow(
                run="kept", position=number, event_id=f"k{number}", type="message", text=f"word{number}"
            )
            await commit(store, journal=[kept.next()])
            await store.commit(Unit(tenant=TENANT, lane=LANE, search=(row,)))
        tombstone = TombstoneRow(run="gone", forgotten_at="now", body=b"{}")
        await store.commit(Unit(tenant=TENANT, lane=LANE, forget=(tombstone,)))
        await store.scrub()
        # The log is emptied behind the commit that asked for it.
        await commit(store, journal=[kept.next()])
        left = [path.name for path in tmp_path.iterdir() if WORD.encode() in path.read_bytes()]
        assert left == []
        assert await store.verify_chain(TENANT, LANE, "gone") is None
        assert await store.verify_chain(TENANT, LANE, "kept") is None


async def test_a_store_that_is_only_read_can_be_copied_and_not_scrubbed(tmp_path: Path) -> None:
    async with opened(tmp_path / "one") as store:
        await commit(store, journal=Messages().some(3))
        async with await Store.open_to_read(tmp_path / "one") as reading:
            assert await reading.backup(tmp_path / "copy.db") > 0
