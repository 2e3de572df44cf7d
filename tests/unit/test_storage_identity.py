"""Known ids over sealing, merging and restarts, compared with a plain set."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from storage import schema
from storage.identity import SIGN, Identity, identity_key
from storage.segments import Compaction, load
from support.storage_rows import LANE, TENANT, Messages, commit, opened

pytestmark = pytest.mark.anyio


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    path = tmp_path / "ids.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as raw:
        raw.execute("PRAGMA synchronous=OFF")
        schema.migrate(raw, path, schema.migrations())
        raw.execute("INSERT INTO lanes (tenant, lane) VALUES (?, ?)", (TENANT, LANE))
        raw.execute("INSERT INTO runs (lane_no, run, family, chain) VALUES (1, 'r1', 'r1', zeroblob(32))")
        yield raw


def store_ids(raw: sqlite3.Connection, first: int, keys: list[int]) -> list[tuple[int, int]]:
    pairs = [(key, entry) for entry, key in enumerate(keys, first)]
    raw.execute("BEGIN")
    raw.executemany(
        "INSERT INTO heads VALUES (?, 1, 0, ?, 1, 0, 1, ?, 'message', zeroblob(32), zeroblob(32), ?, NULL)",
        [(entry, entry, f"e{entry}", key - SIGN) for key, entry in pairs],
    )
    raw.execute("COMMIT")
    return pairs


def found(identity: Identity, raw: sqlite3.Connection, entry: int, key: int) -> bool:
    name = ("r1", "event", f"e{entry}")
    return identity.find(raw, 1, [(name, key)]).get(name) is not None


async def test_every_key_is_found_and_no_other(connection: sqlite3.Connection) -> None:
    chance = random.Random(7)
    identity = Identity()
    work = Compaction(identity, seal_keys=512, step_keys=2048)
    stored: list[tuple[int, int]] = []
    for _ in range(150):
        pairs = store_ids(connection, len(stored) + 1, [chance.getrandbits(64) for _ in range(100)])
        identity.add(pairs)
        stored += pairs
        if work.committed(len(pairs)):
            work.step(connection)
    assert len({segment.level for segment in identity.segments}) > 1
    assert len(identity.segments) < 12
    assert sum(segment.count for segment in identity.segments) + len(identity.newest) == len(stored)
    assert all(identity.maybe(key) for key, _ in stored)
    for key, entry in chance.sample(stored, 200):
        assert found(identity, connection, entry, key)
        assert not found(identity, connection, entry + 1, key)
    strangers = [chance.getrandbits(64) for _ in range(20_000)]
    assert sum(identity.maybe(key) for key in strangers) < 400

    again = Identity()
    load(connection, again)
    assert all(again.maybe(key) for key, _ in stored)
    assert sum(segment.count for segment in again.segments) + len(again.newest) == len(stored)


async def test_two_ids_of_one_key_are_told_apart(connection: sqlite3.Connection) -> None:
    identity = Identity()
    identity.add(store_ids(connection, 1, [5, 5, 5, 9]))
    assert [found(identity, connection, entry, 5) for entry in (1, 2, 3, 4)] == [True, True, True, False]
    work = Compaction(identity, seal_keys=2)
    assert work.committed(4)
    work.step(connection)
    assert identity.newest == {}
    assert [found(identity, connection, entry, 5) for entry in (1, 2, 3, 4)] == [True, True, True, False]


async def test_extreme_keys(connection: sqlite3.Connection) -> None:
    keys = [0, 1, (1 << 64) - 1, (1 << 64) - 2, 1 << 63, (1 << 63) - 1] * 20
    identity = Identity()
    identity.add(store_ids(connection, 1, keys))
    Compaction(identity, seal_keys=4).step(connection)
    assert all(found(identity, connection, entry, key) for entry, key in enumerate(keys, 1))


async def test_a_merge_cut_short_is_begun_again(connection: sqlite3.Connection) -> None:
    chance = random.Random(3)
    identity = Identity()
    work = Compaction(identity, seal_keys=256, step_keys=100)
    entry = 1
    while len(identity.segments) < 4:
        pairs = store_ids(connection, entry, [chance.getrandbits(64) for _ in range(256)])
        entry += 256
        identity.add(pairs)
        work.committed(256)
        work.step(connection)
    work.step(connection)
    states = [state for (state,) in connection.execute("SELECT state FROM id_segments ORDER BY segment")]
    assert states == [0, 0, 0, 0, 2]

    again = Identity()
    load(connection, again)
    work = Compaction(again, seal_keys=256, step_keys=100)
    while len(again.segments) == 4:
        work.step(connection)
    assert [segment.count for segment in again.segments] == [1024]
    # Retired segments keep their blocks until the step after, for readers that looked just before.
    assert connection.execute("SELECT count(*) FROM id_segments WHERE state = 1").fetchone() == (4,)
    assert found(identity, connection, 1, identity_of(connection, 1))
    work.step(connection)
    assert connection.execute("SELECT count(*) FROM id_segments").fetchone() == (1,)
    assert connection.execute("SELECT count(DISTINCT block >> 24) FROM id_blocks").fetchone() == (1,)
    assert found(again, connection, 700, identity_of(connection, 700))


def identity_of(connection: sqlite3.Connection, entry: int) -> int:
    (key,) = connection.execute("SELECT identity FROM heads WHERE entry = ?", (entry,)).fetchone()
    return int(key) + SIGN


async def test_a_failed_step_leaves_memory_and_file_agreeing(connection: sqlite3.Connection) -> None:
    chance = random.Random(11)
    identity = Identity()
    work = Compaction(identity, seal_keys=256)
    identity.add(store_ids(connection, 1, [chance.getrandbits(64) for _ in range(256)]))
    connection.execute(
        "CREATE TRIGGER broken BEFORE INSERT ON id_blocks BEGIN SELECT RAISE(ABORT, 'no'); END"
    )
    with pytest.raises(sqlite3.IntegrityError):
        work.step(connection)
    assert not connection.in_transaction
    assert (len(identity.newest), identity.segments) == (256, ())
    connection.execute("DROP TRIGGER broken")
    work.step(connection)
    assert [segment.count for segment in identity.segments] == [256]


async def test_the_filter_is_small(connection: sqlite3.Connection) -> None:
    chance = random.Random(5)
    identity = Identity()
    identity.add((chance.getrandbits(64), entry) for entry in range(1, 100_001))
    Compaction(identity, seal_keys=1000).step(connection)
    (segment,) = identity.segments
    held = len(segment.high) + len(segment.low) + len(segment.offsets) * segment.offsets.itemsize
    assert held < 2.3 * 100_000


async def test_ids_stay_known_through_sealing_in_a_store(tmp_path: Path) -> None:
    run = Messages()
    async with opened(tmp_path, seal_keys=64) as store:
        for _ in range(60):
            await commit(store, journal=run.some(20))
            assert len(await store.find_ids(TENANT, LANE, [("r1", "event", "event-1")])) == 1
        names = [("r1", "event", f"event-{number}") for number in range(1, 1300)]
        assert len(await store.find_ids(TENANT, LANE, names)) == 1200
    async with opened(tmp_path, seal_keys=64) as store:
        assert len(await store.find_ids(TENANT, LANE, names)) == 1200
        assert store.maybe_known(TENANT, LANE, "r1", "event", "event-1200")


def test_keys_depend_on_every_part() -> None:
    parts = ("t", "l", "r", "event", "e")
    keys = {identity_key(*parts)}
    for at in range(5):
        changed = list(parts)
        changed[at] += "x"
        keys.add(identity_key(*changed))
    assert len(keys) == 6
