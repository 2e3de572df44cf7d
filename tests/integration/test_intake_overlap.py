"""Folding goes on while the last transaction is committed: memory is where the disk is, whatever becomes of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from protocol.codec import digest
from sidecar import intake
from sidecar.core.state import ledger_value
from sidecar.transport.pump import Delivery
from storage.errors import StorageFull
from storage.records import Committed, Unit
from support.bench import Bench, bench, event, started
from tests.support.links import eventually

pytestmark = pytest.mark.anyio

RUN = "r1"
ALLOW = {"kind": "deploy", "idempotency_key": "k"}


def arriving(*batches: Sequence[Delivery]) -> Callable[[], Awaitable[Sequence[Delivery]]]:
    """These batches, one after the other, as if each had arrived while the one before was folded."""
    left = list(batches)

    async def more() -> Sequence[Delivery]:
        return left.pop(0) if left else []

    return more


async def read(made: Bench, batches: Sequence[Sequence[Delivery]]) -> None:
    """All of it; where a compaction falls due, reading begins again."""
    left = list(batches)

    async def more() -> Sequence[Delivery]:
        return left.pop(0) if left else []

    while left:
        await made.intake.take(left.pop(0), more)


def conversation(count: int) -> list[dict[str, Any]]:
    """Messages, calls and results, and one operation that is spoken of again and again."""
    told = [started(session="s", seq=1), event("operation.declared", "op", **ALLOW, session="s", seq=2)]
    for number in range(count):
        seq = len(told) + 1
        kind = number % 4
        if kind == 0:
            told.append(
                event("message", f"m{number}", role="user", content=f"go on {number}", session="s", seq=seq)
            )
        elif kind == 1:
            told.append(
                event(
                    "tool.called",
                    f"c{number}",
                    call_id=f"c{number}",
                    tool="t",
                    arguments={},
                    session="s",
                    seq=seq,
                )
            )
        elif kind == 2:
            told.append(
                event(
                    "tool.returned",
                    f"t{number}",
                    call_id=f"c{number - 1}",
                    status="ok",
                    content="done",
                    session="s",
                    seq=seq,
                )
            )
        else:
            told.append(
                event(
                    "operation.settled", "op", state="unknown", detail=f"time {number}", session="s", seq=seq
                )
            )
    return told


def in_batches(made: Bench, told: list[dict[str, Any]], size: int) -> list[list[Delivery]]:
    deliveries = [made.delivery(RUN, message) for message in told]
    return [deliveries[at : at + size] for at in range(0, len(deliveries), size)]


def ledger(made: Bench) -> str:
    return digest(ledger_value(made.desk.runs.ledgers[RUN]))


def version(made: Bench) -> int:
    """What is folded, in memory."""
    return made.desk.runs.ledgers[RUN].head.version if RUN in made.desk.runs.ledgers else 0


async def stored(made: Bench) -> str:
    """The ledger's digest as the disk has it."""
    made.desk.runs.discard()
    await made.desk.runs.load([RUN])
    return ledger(made)


async def told_singly(folder: Path, told: list[dict[str, Any]]) -> str:
    async with bench(folder) as made:
        for message in told:
            await made.tell(RUN, message)
        return ledger(made)


async def test_overlapped_or_singly_the_ledger_is_the_same(tmp_path: Path) -> None:
    told = conversation(60)
    async with bench(tmp_path / "overlapped") as made:
        await read(made, in_batches(made, told, 7))
        assert made.desk.cursor.stream_seq == len(told)
        assert made.desk.metrics.total("events_total") == len(told)
        assert await made.store.verify_chain("acme", "main", RUN) is None
        in_memory = ledger(made)
        assert await stored(made) == in_memory
    assert in_memory == await told_singly(tmp_path / "singly", told)


async def test_what_was_folded_behind_a_commit_that_failed_reaches_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "_MOST_AT_ONCE", 0)
    told = conversation(30)
    async with bench(tmp_path / "failing") as made:
        first, second, *rest = in_batches(made, told, 8)
        real = made.store.commit
        handed_over: list[int] = []

        async def failing(unit: Unit) -> Committed:
            handed_over.append(len(unit.journal))
            if len(handed_over) == 2:
                # The third is folded by now, on what the second would have left.
                await eventually(lambda: version(made) > 16, "folding behind the second")
                raise StorageFull("no byte left")
            return await real(unit)

        made.store.commit = failing
        with pytest.raises(StorageFull):
            await made.intake.take(first, arriving(second, *rest))
        made.store.commit = real
        assert handed_over == [8, 8]
        assert not made.desk.runs.hot
        assert made.desk.cursor.stream_seq == 8
        await made.desk.runs.load([RUN])
        assert made.desk.runs.ledgers[RUN].head.version == 8
        await made.intake.take(second, arriving(*rest))
        assert made.desk.metrics.total("events_duplicate_total") == 0
        in_memory = ledger(made)
        assert await stored(made) == in_memory
    assert in_memory == await told_singly(tmp_path / "singly", told)


async def test_one_transaction_takes_in_what_arrives_while_the_last_is_on_its_way(tmp_path: Path) -> None:
    told = conversation(60)
    async with bench(tmp_path / "together") as made:
        first, *rest = in_batches(made, told, 8)
        real = made.store.commit
        handed_over: list[int] = []

        async def slow(unit: Unit) -> Committed:
            handed_over.append(len(unit.journal))
            if len(handed_over) == 1:
                await eventually(lambda: version(made) == len(told), "folding of all the rest")
            return await real(unit)

        made.store.commit = slow
        await made.intake.take(first, arriving(*rest))
        made.store.commit = real
        assert handed_over == [8, len(told) - 8]
        assert made.desk.cursor.stream_seq == len(told)
        assert await made.store.verify_chain("acme", "main", RUN) is None
        in_memory = ledger(made)
        assert await stored(made) == in_memory
    assert in_memory == await told_singly(tmp_path / "singly", told)


async def test_what_gathered_behind_a_commit_that_failed_reaches_no_disk(tmp_path: Path) -> None:
    told = conversation(30)
    async with bench(tmp_path / "failing") as made:
        first, *rest = in_batches(made, told, 8)
        real = made.store.commit

        async def failing(unit: Unit) -> Committed:
            await eventually(lambda: version(made) == len(told), "folding of all the rest")
            raise StorageFull("no byte left")

        made.store.commit = failing
        with pytest.raises(StorageFull):
            await made.intake.take(first, arriving(*rest))
        made.store.commit = real
        assert not made.desk.runs.hot
        assert made.desk.cursor.stream_seq == 0
        await made.intake.take(first, arriving(*rest))
        assert made.desk.metrics.total("events_duplicate_total") == 0
        assert await stored(made) == await told_singly(tmp_path / "singly", told)


async def test_cancelled_while_one_is_committed_and_the_next_is_folded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "_MOST_AT_ONCE", 0)
    told = conversation(30)
    async with bench(tmp_path) as made:
        first, second, *rest = in_batches(made, told, 8)
        real, go_on = made.store.commit, anyio.Event()

        async def slow(unit: Unit) -> Committed:
            await go_on.wait()
            return await real(unit)

        made.store.commit = slow
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.intake.take, first, arriving(second, *rest))
            await eventually(lambda: version(made) == 16, "folding of the second")
            tasks.cancel_scope.cancel()
            go_on.set()
        made.store.commit = real
        assert not made.desk.runs.hot
        assert made.desk.cursor == await made.store.cursor("acme", "main")
        left = [item for batch in (first, second, *rest) for item in batch]
        await made.intake.take(left[made.desk.cursor.stream_seq :])
        assert made.desk.metrics.total("events_duplicate_total") == 0
        assert version(made) == len(told)
        assert await made.store.verify_chain("acme", "main", RUN) is None


@pytest.mark.parametrize("gathered", [False, True])
async def test_what_is_on_its_way_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gathered: bool
) -> None:
    """Repetitions of what the last batch said, and other words under an id of it."""
    settled = event("operation.settled", "op", state="unknown", detail="one")
    again = event("operation.settled", "op", state="unknown", detail="two")
    hello = event("message", "m", role="user", content="hello")
    other = event("message", "m", role="user", content="something else")
    declared = event("operation.declared", "op", **ALLOW)
    async with bench(tmp_path) as made:
        batches = [
            [made.delivery(RUN, message) for message in batch]
            for batch in (
                [started(), declared, settled, hello],
                [hello, again, settled],
                [other, again, settled],
            )
        ]
        real = made.store.commit

        async def slow(unit: Unit) -> Committed:
            if gathered and unit.cursor is not None and unit.cursor.stream_seq == 4:
                await eventually(lambda: version(made) == 5, "folding of the next")
            return await real(unit)

        made.store.commit = slow
        if not gathered:
            monkeypatch.setattr(intake, "_MOST_AT_ONCE", 0)
        await read(made, batches)
        total = made.desk.metrics.total
        assert total("events_duplicate_total") == 4
        assert total("events_rejected_total") == 1
        head = made.desk.runs.ledgers[RUN].head
        assert (head.version, head.violations["duplicate_conflict"]) == (5, 1)
        # And known they stay, as the disk has them.
        made.desk.runs.discard()
        await made.tell(RUN, settled, again, hello)
        assert total("events_duplicate_total") == 7
        assert made.desk.runs.ledgers[RUN].head.version == 5


async def test_large_and_small_messages_are_folded_in_order(tmp_path: Path) -> None:
    long = "a word or two of it, password=abc123xyz; " * 4_000
    told = [started()]
    for number in range(6):
        told.append(event("message", f"s{number}", role="user", content="short"))
        told.append(event("message", f"l{number}", role="user", content=long))
    async with bench(tmp_path) as made:
        await read(made, in_batches(made, told, 5))
        entries = await made.store.tail("acme", "main", RUN, after=0)
        assert [entry.event_id for entry in entries] == [message["id"] for message in told]
        assert [entry.redacted for entry in entries] == [message["id"].startswith("l") for message in told]
        assert not any(b"abc123xyz" in entry.body for entry in entries)
