"""What the schema itself refuses, whoever asks."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from support.storage_rows import Messages, checkpoint, commit, opened

pytestmark = pytest.mark.anyio


@pytest.fixture
async def database(tmp_path: Path) -> Path:
    async with opened(tmp_path) as store:
        await commit(store, journal=Messages().some(3), checkpoint=checkpoint(1))
    return tmp_path / "watchkeeper.db"


@pytest.fixture
def raw(database: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("PRAGMA recursive_triggers=ON")
        yield connection


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE heads SET type = 'other' WHERE entry = 2",
        "DELETE FROM heads WHERE entry = 2",
        "DELETE FROM heads",
        "INSERT OR REPLACE INTO heads SELECT * FROM heads WHERE entry = 2",
        "REPLACE INTO heads SELECT * FROM heads WHERE entry = 2",
        "UPDATE bodies SET body = x'00' WHERE entry = 2",
        "DELETE FROM bodies WHERE entry = 2",
        "INSERT OR REPLACE INTO bodies VALUES (2, x'00')",
        "UPDATE checkpoints SET body = x'00'",
        "DELETE FROM checkpoints",
        "INSERT OR REPLACE INTO checkpoints SELECT * FROM checkpoints",
    ],
)
async def test_history_is_never_changed(raw: sqlite3.Connection, statement: str) -> None:
    before = list(raw.execute("SELECT * FROM heads JOIN bodies USING (entry)"))
    with pytest.raises(sqlite3.IntegrityError, match=r"append-only|never changed|tombstone"):
        raw.execute(statement)
    assert list(raw.execute("SELECT * FROM heads JOIN bodies USING (entry)")) == before


async def test_bodies_go_only_under_a_tombstone(raw: sqlite3.Connection) -> None:
    raw.execute("BEGIN")
    raw.execute("INSERT INTO tombstones VALUES (1, '2026-11-30T09:00:00Z', x'00')")
    assert raw.execute("DELETE FROM bodies").rowcount == 3
    raw.execute("ROLLBACK")
    with pytest.raises(sqlite3.IntegrityError, match="tombstone"):
        raw.execute("DELETE FROM bodies")


async def test_no_index_of_the_journal_grows_with_history(raw: sqlite3.Connection) -> None:
    assert list(raw.execute("PRAGMA index_list(heads)")) == []
    assert list(raw.execute("PRAGMA index_list(bodies)")) == []
