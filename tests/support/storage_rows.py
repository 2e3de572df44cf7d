"""Rows for storage tests, and a store with its writer running."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from storage import (
    GENESIS,
    AttemptRow,
    CheckpointRow,
    Committed,
    JournalEntry,
    OutboxRow,
    ReceiptRow,
    RunRow,
    Store,
    Unit,
    link,
)
from storage.records import Chain, Channel

TENANT, LANE = "t1", "l1"


@asynccontextmanager
async def opened(folder: Path, **options: Any) -> AsyncIterator[Store]:
    """An open store whose writer runs; closed and drained at the end."""
    async with anyio.create_task_group() as group, await Store.open(folder, **options) as store:
        await group.start(store.run_writer)
        yield store


class Messages:
    """The messages of one run, numbered and chained as a fold would."""

    def __init__(self, run: str = "r1") -> None:
        self.run = run
        self.position = 0
        self.version = 0
        self.chain = GENESIS

    def next(
        self,
        event_id: str | None = None,
        *,
        channel: Channel = "event",
        body: bytes | None = None,
        received: bytes | None = None,
        stream_seq: int | None = None,
    ) -> JournalEntry:
        self.version += 1
        self.position += channel != "record"
        kept = body if body is not None else f'{{"run":"{self.run}","n":{self.version}}}'.encode()
        sha256 = hashlib.sha256(received or kept).digest()
        self.chain = link(self.chain, sha256)
        return JournalEntry(
            run=self.run,
            channel=channel,
            position=self.position,
            version=self.version,
            stream_seq=self.version if stream_seq is None else stream_seq,
            event_id=event_id or f"{channel}-{self.version}",
            type="message",
            sha256=sha256,
            chain=self.chain,
            body=kept,
            redacted=received is not None,
        )

    def some(self, count: int) -> tuple[JournalEntry, ...]:
        return tuple(self._many(count))

    def _many(self, count: int) -> Iterator[JournalEntry]:
        for _ in range(count):
            yield self.next()


def unit(**parts: Any) -> Unit:
    return Unit(**{"tenant": TENANT, "lane": LANE, **parts})


async def commit(store: Store, **parts: Any) -> Committed:
    return await store.commit(unit(**parts))


def run_row(run: str = "r1", *, family: str | None = None, parent: str | None = None, **more: Any) -> RunRow:
    return RunRow(
        **{"run": run, "family": family or run, "parent": parent, "head": b"head", "view": b"view", **more}
    )


def attempt(attempt_id: str = "a1", run: str = "r1") -> AttemptRow:
    return AttemptRow(
        attempt_id=attempt_id,
        run=run,
        trigger="threshold",
        first=1,
        through=10,
        range_digest="sha256:00",
        handoff_position=12,
        ledger_digest="sha256:11",
        started_at="2026-11-30T09:00:00Z",
        body=b"attempt",
    )


def checkpoint(
    version: int, *, run: str = "r1", chain: Chain = "live", name: str = "c", parent: str | None = "-"
) -> CheckpointRow:
    """Checkpoint ``c<version>`` following ``c<version - 1>`` unless told otherwise."""
    own_parent = f"{name}{version - 1}" if version > 1 else None
    return CheckpointRow(
        checkpoint_id=f"{name}{version}",
        run=run,
        chain=chain,
        version=version,
        parent_id=own_parent if parent == "-" else parent,
        covers_through=version * 10,
        event_id=f"event-{version * 10}",
        range_digest="sha256:22",
        created_at="2026-11-30T09:10:00Z",
        body=f"summary {version}".encode(),
    )


def receipt(receipt_id: str = "x1", *, run: str = "r1", attempt_id: str = "a1") -> ReceiptRow:
    return ReceiptRow(
        receipt_id=receipt_id,
        run=run,
        attempt_id=attempt_id,
        outcome="applied",
        body=b"receipt",
        created_at="2026-11-30T09:11:00Z",
    )


def outgoing(number: int, size: int = 8) -> OutboxRow:
    return OutboxRow(
        stream="out", subject=f"wk.v1.out.t1.l1.r1.{number}", msg_id=f"m{number}", payload=b"p" * size
    )
