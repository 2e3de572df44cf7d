"""Runs, items, compaction rows, outbox, cursor, search and forgetting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from storage import (
    Adoption,
    Cursor,
    ItemRow,
    SearchRow,
    Stale,
    StorageConflict,
    StoredItem,
    StoredOutbox,
    TombstoneRow,
)
from storage.records import PacketRow
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
)

pytestmark = pytest.mark.anyio


async def test_a_family_is_loaded_whole(tmp_path: Path) -> None:
    root, child = Messages("root"), Messages("child")
    async with opened(tmp_path) as store:
        await commit(
            store,
            journal=(*root.some(3), *child.some(1)),
            runs=(
                run_row("root"),
                run_row("child", family="root", parent="root", head=b"h", view=b"v"),
                run_row("other", finished=True),
            ),
            items=(
                ItemRow(run="root", kind="operation", key="op-2", body=b"2", live=False),
                ItemRow(run="root", kind="operation", key="op-1", body=b"1"),
                ItemRow(run="child", kind="task", key="", body=b"t"),
            ),
        )
        first, second = await store.load_family(TENANT, LANE, "child")
        assert (first.run, first.version, first.position, first.chain, first.last_entry) == (
            "root",
            3,
            3,
            root.chain,
            3,
        )
        assert first.items == [
            StoredItem("operation", "op-1", b"1", True),
            StoredItem("operation", "op-2", b"2", False),
        ]
        assert (second.run, second.parent, second.family, second.head, second.view) == (
            "child",
            "root",
            "root",
            b"h",
            b"v",
        )
        assert [
            item.key for item in (await store.load_family(TENANT, LANE, "root", live_only=True))[0].items
        ] == ["op-1"]
        assert await store.load_family(TENANT, LANE, "unknown") == []
        assert await store.load_family(TENANT, "unknown", "root") == []
        assert [run.run for run in await store.runs(TENANT, LANE)] == ["root", "child", "other"]
        assert [run.run for run in await store.runs(TENANT, LANE, finished=True)] == ["other"]
        assert await store.runs("unknown", LANE) == []
        assert await store.item(TENANT, LANE, "root", "operation", "op-2") == StoredItem(
            "operation", "op-2", b"2", False
        )
        assert await store.item(TENANT, LANE, "root", "operation", "none") is None


async def test_items_are_changed_one_by_one_in_the_order_given(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await commit(
            store,
            items=(
                ItemRow(run="r1", kind="k", key="a", body=b"1"),
                ItemRow(run="r1", kind="k", key="b", body=b"1"),
            ),
        )
        await commit(
            store,
            items=(
                ItemRow(run="r1", kind="k", key="a", body=b"2", live=False),
                ItemRow(run="r1", kind="k", key="b", body=None),
                ItemRow(run="r1", kind="k", key="c", body=None),
                ItemRow(run="r1", kind="k", key="c", body=b"3"),
            ),
        )
        (run,) = await store.load_family(TENANT, LANE, "r1")
        assert run.items == [StoredItem("k", "a", b"2", False), StoredItem("k", "c", b"3", True)]
        assert run.head == b""


async def test_the_row_of_a_run_moves_with_its_journal_and_its_family_may_change(tmp_path: Path) -> None:
    run = Messages()
    async with opened(tmp_path) as store:
        await commit(store, journal=run.some(2), runs=(run_row(),))
        await commit(store, journal=run.some(2))
        await commit(store, runs=(run_row("r0"), run_row(family="r0", parent="r0", finished=True)))
        _, mine = sorted(await store.load_family(TENANT, LANE, "r0"), key=lambda row: row.run)
        assert (mine.version, mine.chain, mine.head, mine.finished) == (4, run.chain, b"head", True)
        assert (mine.family, mine.parent) == ("r0", "r0")
        await commit(store, journal=run.some(1), runs=(run_row(),))
        (mine,) = await store.load_family(TENANT, LANE, "r1")
        assert (mine.family, mine.parent, mine.version) == ("r1", None, 5)


async def test_lanes_and_tenants_are_apart(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await commit(store, journal=Messages().some(2), cursor=Cursor(9, "then"), outbox=(outgoing(1),))
        await commit(store, lane="l2", journal=Messages().some(1), cursor=Cursor(4, "now"))
        assert await store.cursor(TENANT, LANE) == Cursor(9, "then")
        assert await store.cursor(TENANT, "l2") == Cursor(4, "now")
        assert await store.cursor("t2", LANE) is None
        assert await store.outbox_count(TENANT, "l2") == 0
        assert len(await store.tail(TENANT, "l2", "r1", after=0)) == 1
        await commit(store, cursor=Cursor(1, "anew"))
        assert await store.cursor(TENANT, LANE) == Cursor(1, "anew")


async def test_a_lane_without_cursor_has_none(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await commit(store, outbox=(outgoing(1),))
        assert await store.cursor(TENANT, LANE) is None


async def test_the_outbox_keeps_order_and_never_repeats_an_id(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        done = await commit(store, outbox=(outgoing(1), outgoing(2), outgoing(3)))
        assert list(done.outbox_ids) == sorted(done.outbox_ids)
        waiting = await store.outbox(TENANT, LANE, after_id=done.outbox_ids[0], limit=10)
        assert [row.msg_id for row in waiting] == ["m2", "m3"]
        row = outgoing(2)
        assert waiting[0] == StoredOutbox(
            id=done.outbox_ids[1], stream="out", subject=row.subject, msg_id="m2", payload=row.payload
        )
        assert len(await store.outbox(TENANT, LANE, limit=1)) == 1
        assert await store.outbox_sent(done.outbox_ids) == 3
        assert await store.outbox_sent(done.outbox_ids) == 0
        assert await store.outbox_sent([]) == 0
        assert await store.outbox_count(TENANT, LANE) == 0
    async with opened(tmp_path) as store:
        again = await commit(store, outbox=(outgoing(4),))
        assert again.outbox_ids[0] > done.outbox_ids[-1]


async def test_meta_is_set_and_deleted(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await commit(store, meta={"a": b"1", "b": b"2"})
        await commit(store, meta={"a": b"3", "b": None, "c": None})
        assert [await store.meta(key) for key in "abc"] == [b"3", None, None]


async def test_one_attempt_per_run_is_open(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await commit(store, open_attempt=attempt("a1"))
        await commit(store, open_attempt=attempt("a2", "r2"))
        with pytest.raises(Stale):
            await commit(store, open_attempt=attempt("a3"))
        assert await store.open_attempts(TENANT, LANE) == [attempt("a1"), attempt("a2", "r2")]
        assert await store.open_attempts("t2", LANE) == []
        with pytest.raises(Stale):
            await commit(store, lane="l2", close_attempt="a1")
        await commit(store, close_attempt="a1", receipt=receipt())
        with pytest.raises(Stale) as late:
            await commit(store, close_attempt="a1", receipt=receipt("x2"), outbox=(outgoing(1),))
        assert late.value.answer == "reject"
        with pytest.raises(Stale):
            await commit(store, open_attempt=attempt("a1"))
        await commit(store, open_attempt=attempt("a3"))
        assert await store.receipts(TENANT, LANE, "r1") == [receipt()]
        assert await store.outbox_count(TENANT, LANE) == 0


async def test_checkpoints_are_compared_with_their_parent(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        assert await store.newest_checkpoint(TENANT, LANE, "r1") is None
        for wrong in (checkpoint(2), checkpoint(1, parent="c0"), checkpoint(2, parent=None)):
            with pytest.raises(Stale):
                await commit(store, checkpoint=wrong, meta={"seen": b"1"})
        await commit(store, checkpoint=checkpoint(1))
        await commit(store, checkpoint=checkpoint(2))
        for wrong in (
            checkpoint(2, name="d", parent="c1"),
            checkpoint(3, name="d", parent="c1"),
            checkpoint(4, parent="c2"),
            checkpoint(1, name="d"),
        ):
            with pytest.raises(Stale):
                await commit(store, checkpoint=wrong, meta={"seen": b"1"})
        assert await store.meta("seen") is None
        await commit(store, checkpoint=checkpoint(1, chain="shadow", name="s"))
        assert await store.newest_checkpoint(TENANT, LANE, "r1") == checkpoint(2)
        assert await store.newest_checkpoint(TENANT, LANE, "r1", chain="shadow") == checkpoint(
            1, chain="shadow", name="s"
        )
        assert await store.checkpoint(TENANT, LANE, "r1", "c1") == checkpoint(1)
        assert await store.checkpoint(TENANT, LANE, "r2", "c1") is None
        assert await store.checkpoints(TENANT, LANE, "r1") == [checkpoint(1), checkpoint(2)]


@pytest.mark.parametrize(
    ("theirs", "left"),
    [
        (checkpoint(2), ["c1", "c2"]),
        (checkpoint(3, name="d", parent="c2"), ["c1", "c2", "d3"]),
        (checkpoint(9, name="d", parent="d8"), ["d9"]),
        (checkpoint(3), ["c1", "c2", "c3"]),
        (None, []),
    ],
)
async def test_another_owners_chain_is_adopted(tmp_path: Path, theirs: object, left: list[str]) -> None:
    async with opened(tmp_path) as store:
        for version in (1, 2, 3):
            await commit(store, checkpoint=checkpoint(version))
        await commit(store, checkpoint=checkpoint(1, chain="shadow", name="s"))
        for _ in range(2):
            await commit(store, adopt=(Adoption(run="r1", chain="live", checkpoint=theirs),))
            assert [row.checkpoint_id for row in await store.checkpoints(TENANT, LANE, "r1")] == left
        assert len(await store.checkpoints(TENANT, LANE, "r1", chain="shadow")) == 1


async def test_an_adopted_checkpoint_can_be_followed(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await commit(store, adopt=(Adoption(run="r1", chain="live", checkpoint=checkpoint(7)),))
        await commit(store, checkpoint=checkpoint(8))
        assert await store.newest_checkpoint(TENANT, LANE, "r1") == checkpoint(8)


async def test_search_finds_words_of_one_run_and_reads_no_syntax(tmp_path: Path) -> None:
    def row(run: str, position: int, text: str, type_: str = "message") -> SearchRow:
        return SearchRow(run=run, position=position, event_id=f"e{position}", type=type_, text=text)

    async with opened(tmp_path) as store:
        assert await store.searchable_through(TENANT, LANE, "r1") == -1
        rows = (
            row("r1", 1, "The migration of orders failed"),
            row("r1", 2, "orders: invoice INV-2041 created", "tool.returned"),
            row("r1", 2, "a record at the same position"),
            row("r2", 1, "orders of another run"),
        )
        for _ in range(2):
            await commit(store, search=rows)
        assert await store.searchable_through(TENANT, LANE, "r1") == 2

        async def found(query: str, run: str = "r1", **wanted: Any) -> list[Any]:
            return list((await store.search(TENANT, LANE, run, query, **{"limit": 9, **wanted})).hits)

        assert {hit.position for hit in await found("orders")} == {1, 2}
        (hit,) = await found("inv-2041")
        assert (hit.position, hit.event_id, hit.type) == (2, "e2", "tool.returned")
        assert "INV-2041" in hit.snippet
        for query in ('"', "orders NOT failed", 'text:"x', "run1", "*", "orders OR", ")(", "", "a" * 9_000):
            await found(query)
        assert await found("run1") == []
        assert await found("orders", types=["message"], through=1) != []
        assert await found("orders", first=3) == []
        assert len(await found("orders", limit=1)) == 1
        assert (await store.search(TENANT, LANE, "r1", "orders", limit=1)).truncated
        assert await found("orders", run="unknown") == []


async def test_a_forgotten_run_leaves_heads_and_a_tombstone(tmp_path: Path) -> None:
    secret = b'{"text":"the-body-of-a-forgotten-message"}'
    gone, kept = Messages(), Messages("r2")
    grave = TombstoneRow(run="r1", forgotten_at="2026-12-30T00:00:00Z", body=b"tombstone")
    async with opened(tmp_path) as store:
        for _ in range(3):
            await commit(
                store,
                journal=(gone.next(body=secret), *gone.some(2), *kept.some(2)),
                runs=(run_row(finished=True), run_row("r2")),
                items=(
                    ItemRow(run="r1", kind="k", key="a", body=b"1"),
                    ItemRow(run="r2", kind="k", key="a", body=b"1"),
                ),
                search=(
                    SearchRow(
                        run="r1", position=gone.position, event_id="e", type="message", text="forgotten"
                    ),
                ),
            )
        await commit(store, checkpoint=checkpoint(1), open_attempt=attempt(), receipt=receipt())
        for number in (b"1", b"2"):
            await commit(store, packet=PacketRow(run="r1", packet_id="pk", body=number))
        kept = await store.packet(TENANT, LANE, "r1")
        assert kept is not None
        assert kept.body == b"2"
        await commit(store, forget=(grave,), outbox=(outgoing(1),))
        assert await store.tombstones(TENANT, LANE) == [grave]
        heads = await store.tail(TENANT, LANE, "r1", after=0)
        assert [(head.version, head.body) for head in heads] == [(version, b"") for version in range(1, 10)]
        assert await store.verify_chain(TENANT, LANE, "r1") is None
        assert await store.verify_chain(TENANT, LANE, "r2") is None
        (run,) = await store.load_family(TENANT, LANE, "r1")
        assert (run.items, run.head, run.view, run.version, run.finished) == ([], b"", b"", 9, True)
        assert await store.newest_checkpoint(TENANT, LANE, "r1") is None
        assert await store.open_attempts(TENANT, LANE) == []
        assert await store.receipts(TENANT, LANE, "r1") == []
        assert (await store.search(TENANT, LANE, "r1", "forgotten", limit=9)).hits == ()
        assert await store.packet(TENANT, LANE, "r1") is None
        assert len(await store.find_ids(TENANT, LANE, [("r1", "event", heads[0].event_id)])) == 1
        assert (await store.load_family(TENANT, LANE, "r2"))[0].items != []
        with pytest.raises(StorageConflict):
            await commit(store, forget=(TombstoneRow(run="never", forgotten_at="", body=b""),))
        counts = await store.counts()
        assert (counts.tombstones, counts.entries, counts.runs, counts.outbox) == (1, 15, 2, 1)
    assert secret not in (tmp_path / "watchkeeper.db").read_bytes()
