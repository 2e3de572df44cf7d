"""The daemon dies at each named point of a compaction: afterwards it is the old checkpoint or the new one,
never a mix, and what was committed is published once.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from sidecar.transport.jetstream import Link
from storage.store import Store
from support.daemon import LANE, TENANT, DaemonProcess
from support.evidence import (
    Left,
    comparable,
    gather,
    prove_coverage,
    prove_journal,
    prove_output,
    prove_whole,
)
from support.links import linked
from support.nats_server import NatsServer
from support.voyage import BRIEF, RUN, laid_up, player, published, voyage_events

pytestmark = pytest.mark.anyio

UNCOMMITTED = ("before_summary", "after_summary", "in_commit")
COMMITTED = ("after_commit", "after_publish")


@asynccontextmanager
async def dying_at(point: str, server: NatsServer, folder: Path) -> AsyncIterator[tuple[Left, Voyage]]:
    """What a daemon that killed itself at the point has left, while the agent's side of the replay waits."""
    with DaemonProcess(server.url, folder, {"LEASE__SECONDS": "2"}) as daemon:
        daemon.start_doomed(point)
        async with linked(server.url) as link:
            voyage = Voyage(daemon, link)
            with anyio.fail_after(200):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(voyage.feed)
                    await daemon.reached()
                    assert await daemon.ended() == -9, daemon.log
                    yield await gather(link, daemon.data_dir, RUN), voyage
                    tasks.cancel_scope.cancel()


class Voyage:
    """The replay's side: it goes on as soon as there is a daemon again."""

    def __init__(self, daemon: DaemonProcess, link: Link) -> None:
        self.daemon = daemon
        self._link = link
        self._replay = player(link)
        self._over = anyio.Event()

    async def feed(self) -> None:
        await self._replay.feed(voyage_events(BRIEF))
        self._over.set()

    async def sail_on(self) -> Left:
        """Start an ordinary daemon on the same disk, play to the end, stop it; what is left."""
        self.daemon.start()
        await self._over.wait()
        await self._replay.finish()
        left = await laid_up(self.daemon, self._link)
        return left


async def packets_waiting(daemon: DaemonProcess) -> list[dict[str, Any]]:
    """Packets of compactions in the outbox of a daemon that does not run."""
    async with await Store.open_to_read(daemon.data_dir) as store:
        rows = await store.outbox(TENANT, LANE, limit=1_000)
    packets = [json.loads(row.payload) for row in rows if row.subject.endswith(".packet")]
    return [packet for packet in packets if packet["reason"] == "compacted"]


@pytest.mark.parametrize("point", UNCOMMITTED)
async def test_killed_before_the_commit_it_has_the_old_checkpoint_and_an_interrupted_attempt(
    point: str, brief: Left, tmp_path: Path
) -> None:
    with NatsServer() as server:
        async with dying_at(point, server, tmp_path) as (before, voyage):
            assert before.checkpoints == []
            assert before.told["compaction"]["covers_through"] == 0
            (attempt,) = before.open_attempts
            assert before.receipts == []
            assert before.sent("packet", reason="compacted") == []
            after = await voyage.sail_on()

    first, second = after.receipts[:2]
    assert first["attempt_id"] == attempt.attempt_id
    assert (first["outcome"], first["reason"]) == ("failed", "interrupted")
    assert second["attempt_id"] != attempt.attempt_id
    assert (second["outcome"], second["range"]["from"]) == ("applied", 1)
    assert after.checkpoints[0].checkpoint_id == second["checkpoint_id"]
    prove_whole(after, published(voyage_events(BRIEF)))
    assert after.digest == brief.digest
    assert comparable(after) == comparable(brief)


@pytest.mark.parametrize("point", COMMITTED)
async def test_killed_after_the_commit_it_has_the_new_checkpoint_and_sends_its_packet_once(
    point: str, brief: Left, tmp_path: Path
) -> None:
    with NatsServer() as server:
        async with dying_at(point, server, tmp_path) as (before, voyage):
            (checkpoint,) = before.checkpoints
            course = before.told["compaction"]
            assert course["checkpoint_id"] == checkpoint.checkpoint_id
            assert course["covers_through"] == checkpoint.covers_through
            assert before.open_attempts == []
            (receipt,) = before.receipts
            assert (receipt["outcome"], receipt["checkpoint_id"]) == ("applied", checkpoint.checkpoint_id)
            (waiting,) = await packets_waiting(voyage.daemon)
            sent = before.sent("packet", reason="compacted")
            assert sent == ([waiting] if point == "after_publish" else [])
            after = await voyage.sail_on()

    announced = [
        packet
        for packet in after.sent("packet", reason="compacted")
        if packet["checkpoint"]["id"] == checkpoint.checkpoint_id
    ]
    assert announced == [waiting]
    assert after.checkpoints[0].checkpoint_id == checkpoint.checkpoint_id
    prove_whole(after, published(voyage_events(BRIEF)))
    assert after.digest == brief.digest
    assert comparable(after) == comparable(brief)


async def test_with_its_disk_gone_too_the_next_attempt_still_has_an_id_of_its_own(
    brief: Left, tmp_path: Path
) -> None:
    with NatsServer() as server:
        async with dying_at("before_summary", server, tmp_path) as (before, voyage):
            (attempt,) = before.open_attempts
            shutil.rmtree(voyage.daemon.data_dir)
            after = await voyage.sail_on()
    assert attempt.attempt_id not in {receipt["attempt_id"] for receipt in after.receipts}
    assert after.receipts[0]["outcome"] == "applied"
    prove_journal(after, published(voyage_events(BRIEF)))
    prove_coverage(after)
    prove_output(after)
    assert comparable(after) == comparable(brief)
