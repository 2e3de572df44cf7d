"""The journal as the sidecar reads and writes it."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from storage import Cursor, OutOfOrder, StorageConflict, StoredId, schema
from storage.journal import MARK_EVERY
from storage.transaction import Transaction
from storage.units import apply
from support.storage_rows import LANE, TENANT, Messages, commit, opened, run_row, unit

pytestmark = pytest.mark.anyio


async def test_messages_come_back_as_they_went_in(tmp_path: Path) -> None:
    run = Messages()
    told = (run.next(), run.next(channel="authority"), run.next(channel="record"), run.next())
    async with opened(tmp_path) as store:
        done = await commit(store, journal=told, runs=(run_row(),))
        assert list(done.entries) == [1, 2, 3, 4]
        assert await store.tail(TENANT, LANE, "r1", after=0) == list(told)
        assert await store.tail(TENANT, LANE, "r1", after=0, limit=0) == []
        assert await store.tail(TENANT, LANE, "unknown", after=0) == []
        assert await store.tail("unknown", LANE, "r1", after=0) == []
        bare = await store.tail(TENANT, LANE, "r1", after=2, bodies=False)
        assert [(message.position, message.body) for message in bare] == [(3, b"")]
    async with opened(tmp_path) as store:
        assert await store.tail(TENANT, LANE, "r1", after=0) == list(told)


async def test_tail_takes_positions_after_and_through(tmp_path: Path) -> None:
    run, other = Messages(), Messages("r2")
    async with opened(tmp_path) as store:
        for _ in range(5):
            await commit(store, journal=(*run.some(3), *other.some(2), run.next(channel="record")))
        found = await store.tail(TENANT, LANE, "r1", after=4, through=9)
        assert [message.position for message in found] == [5, 6, 6, 7, 8, 9, 9]
        assert [message.version for message in found] == sorted(message.version for message in found)
        assert {message.run for message in found} == {"r1"}


async def test_a_record_before_the_first_message_has_position_zero(tmp_path: Path) -> None:
    run = Messages("_lane")
    async with opened(tmp_path) as store:
        settings = run.next("settings-1", channel="record")
        await commit(store, journal=(settings,))
        assert await store.tail(TENANT, LANE, "_lane", after=0) == []
        assert await store.tail(TENANT, LANE, "_lane", after=-1) == [settings]
        assert await store.entry(TENANT, LANE, "_lane", event_id="settings-1", channel="record") == settings


async def test_long_runs_are_entered_in_the_middle_and_paged(tmp_path: Path) -> None:
    run, other = Messages(), Messages("r2")
    count = MARK_EVERY * 4 + 10
    async with opened(tmp_path) as store:
        for _ in range(count // 10):
            await commit(store, journal=(*run.some(10), *other.some(1)))
        total = run.version
        page, seen = [0], 0
        while page:
            found = await store.tail(
                TENANT, LANE, "r1", after=-1, after_version=seen, limit=100, bodies=False
            )
            page = [message.version for message in found]
            assert page == list(range(seen + 1, min(seen + 100, total) + 1))
            seen = page[-1] if page else seen
        assert seen == total
        first = await store.tail(TENANT, LANE, "r1", after=3, through=5)
        assert [message.position for message in first] == [4, 5]
        middle = await store.entry(TENANT, LANE, "r1", position=MARK_EVERY * 2)
        assert middle is not None
        assert middle.version == MARK_EVERY * 2


async def test_pages_are_full_in_a_run_with_holes(tmp_path: Path) -> None:
    run = Messages()
    async with opened(tmp_path) as store:
        for _ in range(12):
            await commit(store, journal=(run.next(),), holes=True)
            run.version += MARK_EVERY
        found = await store.tail(TENANT, LANE, "r1", after=-1, limit=8)
        assert [message.position for message in found] == list(range(1, 9))


async def test_one_message_by_position_or_id(tmp_path: Path) -> None:
    run = Messages()
    event, authority = run.next("same"), run.next("same", channel="authority")
    records = (run.next("n1", channel="record"), run.next("n2", channel="record"))
    async with opened(tmp_path) as store:
        await commit(store, journal=(event, authority, *records))
        assert await store.entry(TENANT, LANE, "r1", event_id="same") == event
        assert await store.entry(TENANT, LANE, "r1", event_id="same", channel="authority") == authority
        assert await store.entry(TENANT, LANE, "r1", event_id="same", channel="record") is None
        assert await store.entry(TENANT, LANE, "r1", position=2) == authority
        assert await store.entry(TENANT, LANE, "r1", position=2, channel="record") == records[1]
        assert await store.entry(TENANT, LANE, "r1", position=3) is None
        assert await store.entry(TENANT, "other", "r1", event_id="same") is None


async def test_a_stream_made_anew_may_repeat_its_sequences(tmp_path: Path) -> None:
    run = Messages()
    async with opened(tmp_path) as store:
        await commit(store, journal=(run.next(stream_seq=7), run.next(stream_seq=7), run.next(stream_seq=1)))
        found = await store.tail(TENANT, LANE, "r1", after=0)
        assert [message.stream_seq for message in found] == [7, 7, 1]


async def test_a_message_must_follow_the_one_before(tmp_path: Path) -> None:
    run = Messages()
    first, second, third = run.some(3)
    async with opened(tmp_path) as store:
        await commit(store, journal=(first, second))
        with pytest.raises(OutOfOrder) as refused:
            await commit(store, journal=(second,))
        assert refused.value.answer == "reject"
        hole, fork, back = Messages(), Messages(), Messages()
        hole.version, hole.position, hole.chain = 5, 5, second.chain
        fork.version, fork.position, fork.chain = 2, 2, first.chain
        back.version, back.position, back.chain = 2, 0, second.chain
        for wrong in (hole, fork, back):
            entry = wrong.next()
            with pytest.raises(OutOfOrder):
                await commit(store, journal=(entry,))
            assert not store.maybe_known(TENANT, LANE, "r1", "event", f"event-{entry.version}")
        done = await commit(store, journal=(third,))
        assert list(done.entries) == [3]
        assert (await store.counts()).entries == 3


async def test_ids_are_known_by_run_and_channel(tmp_path: Path) -> None:
    run, other = Messages(), Messages("r2")
    event, authority = run.next("e1"), run.next("e1", channel="authority")
    async with opened(tmp_path) as store:
        assert not store.maybe_known(TENANT, LANE, "r1", "event", "e1")
        await commit(store, journal=(event, authority, other.next("e2")))
        assert store.maybe_known(TENANT, LANE, "r1", "event", "e1")
        assert not store.maybe_known(TENANT, LANE, "r1", "record", "e1")
        found = await store.find_ids(
            TENANT,
            LANE,
            [("r1", "event", "e1"), ("r1", "authority", "e1"), ("r1", "event", "e2"), ("r2", "event", "e1")],
        )
        assert found == {
            ("r1", "event", "e1"): StoredId(entry=1, sha256=event.sha256, version=1, position=1),
            ("r1", "authority", "e1"): StoredId(entry=2, sha256=authority.sha256, version=2, position=2),
        }
        assert await store.find_ids("other", LANE, [("r1", "event", "e1")]) == {}
        assert await store.find_ids(TENANT, LANE, []) == {}
    async with opened(tmp_path) as store:
        assert len(await store.find_ids(TENANT, LANE, [("r1", "event", "e1")])) == 1


async def test_a_text_no_database_can_hold_is_refused_alone(tmp_path: Path) -> None:
    run = Messages()
    async with opened(tmp_path) as store:
        with pytest.raises(StorageConflict):
            await commit(store, journal=(run.next("\ud800"),))
        with pytest.raises(StorageConflict):
            await commit(store, journal=(Messages().next(stream_seq=1 << 70),))
        await commit(store, journal=(Messages().next(),))


async def test_the_chain_holds_over_pages_and_redaction(tmp_path: Path) -> None:
    run = Messages()
    async with opened(tmp_path) as store:
        await commit(store, journal=run.some(700))
        await commit(store, journal=(run.next(received=b'{"key":"sk-1"}', body=b'{"key":"[redacted]"}'),))
        await commit(store, journal=run.some(5))
        assert await store.verify_chain(TENANT, LANE, "r1") is None
        assert await store.verify_chain(TENANT, LANE, "unknown") is None
        (redacted,) = await store.tail(TENANT, LANE, "r1", after=700, through=701)
        assert redacted.redacted


async def test_a_run_known_from_the_middle_is_trusted_from_there(tmp_path: Path) -> None:
    run = Messages()
    run.some(40)
    async with opened(tmp_path) as store:
        await commit(store, journal=run.some(3))
        assert await store.verify_chain(TENANT, LANE, "r1") is None


async def test_a_wrong_chain_and_a_hole_are_found(tmp_path: Path) -> None:
    wrong, holed = Messages(), Messages("r2")
    async with opened(tmp_path) as store:
        await commit(store, journal=(*wrong.some(3), *holed.some(3)))
        wrong.chain, holed.version = bytes(32), holed.version + 1
        await commit(store, journal=(*wrong.some(2), *holed.some(2)), holes=True)
        broken = await store.verify_chain(TENANT, LANE, "r1")
        assert broken is not None
        assert (broken.version, broken.reason) == (4, "chain")
        broken = await store.verify_chain(TENANT, LANE, "r2")
        assert broken is not None
        assert (broken.version, broken.reason) == (5, "hole")


async def test_a_hole_is_taken_only_before_the_first_and_only_if_said(tmp_path: Path) -> None:
    run = Messages()
    async with opened(tmp_path) as store:
        first = run.next()
        run.next()
        later, last = run.next(), run.next()
        await commit(store, journal=(first,))
        with pytest.raises(OutOfOrder):
            await commit(store, journal=(first, last), holes=True)
        with pytest.raises(OutOfOrder):
            await commit(store, journal=(later,))
        run.next()
        with pytest.raises(OutOfOrder):
            await commit(store, journal=(later, run.next()), holes=True)
        await commit(store, journal=(later, last), holes=True)
        assert [message.version for message in await store.tail(TENANT, LANE, "r1", after=0)] == [1, 3, 4]


async def test_no_body_reaches_a_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Messages()
    with caplog.at_level(logging.DEBUG):
        async with opened(tmp_path) as store:
            await commit(store, journal=(run.next(body=b"very private"),), meta={"k": b"very private"})
            await store.tail(TENANT, LANE, "r1", after=0)
    assert "private" not in caplog.text


def test_the_work_per_message_does_not_grow(tmp_path: Path) -> None:
    """Counted in instructions of SQLite's machine, which a scan of what was stored before would raise."""
    path = tmp_path / "steps.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as raw:
        raw.execute("PRAGMA synchronous=OFF")
        schema.migrate(raw, path, schema.migrations())
        runs = [Messages(f"r{number}") for number in range(20)]
        costs = []
        for _ in range(60):
            steps = 0

            def count() -> int:
                nonlocal steps
                steps += 1
                return 0

            entries = [run.next() for _ in range(5) for run in runs]
            rows = tuple(run_row(run.run) for run in runs)
            raw.set_progress_handler(count, 10)
            raw.execute("BEGIN IMMEDIATE")
            apply(unit(journal=tuple(entries), runs=rows, cursor=Cursor(1, "then")), Transaction(raw))
            raw.execute("COMMIT")
            raw.set_progress_handler(None, 10)
            costs.append(steps)
    assert max(costs[2:]) < 1.2 * min(costs[2:])
