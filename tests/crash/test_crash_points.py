"""The daemon dies at each named point of a compaction: afterwards it is the old checkpoint or the new one,
never a mix, and what was committed is published once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from sidecar.transport.jetstream import Link
from storage.store import Store
from support.daemon import LANE, TENANT, DaemonProcess
from support.evidence import Left, comparable, gather, prove_whole
from support.links import linked
from support.nats_server import NatsServer
from support.voyage import RUN, player, published, voyage_events

pytestmark = pytest.mark.anyio

UNCOMMITTED = ("before_summary", "after_summary", "in_commit")
COMMITTED = ("after_commit", "after_publish")


async def died(link: Link, daemon: DaemonProcess, point: str) -> Left:
    """Play until the daemon has killed itself at the point; what is there then."""
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(player(link).feed, voyage_events())
            await daemon.reached()
            code = await daemon.ended()
            tasks.cancel_scope.cancel()
    assert code == -9, daemon.log
    return await gather(link, daemon.data_dir, RUN)


async def packets_waiting(daemon: DaemonProcess) -> list[dict[str, Any]]:
    """Packets of compactions in the outbox of a daemon that does not run."""
    async with await Store.open_to_read(daemon.data_dir) as store:
        rows = await store.outbox(TENANT, LANE, limit=1_000)
    packets = [json.loads(row.payload) for row in rows if row.subject.endswith(".packet")]
    return [packet for packet in packets if packet["reason"] == "compacted"]


async def sail_on(link: Link, daemon: DaemonProcess) -> Left:
    """Start an ordinary daemon on the same disk and play everything, from the first event on; what is left."""
    daemon.start()
    with anyio.fail_after(120):
        replay = player(link)
        await replay.feed(voyage_events())
        await replay.finish()
    left = await gather(link, daemon.data_dir, RUN)
    assert await daemon.stopped() == 0, daemon.log
    return left


@pytest.mark.parametrize("point", UNCOMMITTED)
async def test_killed_before_the_commit_it_has_the_old_checkpoint_and_an_interrupted_attempt(
    point: str, calm: Left, tmp_path: Path
) -> None:
    with NatsServer() as server, DaemonProcess(server.url, tmp_path / "daemon") as daemon:
        daemon.start_doomed(point)
        async with linked(server.url) as link:
            before = await died(link, daemon, point)
            assert before.checkpoints == []
            assert before.told["compaction"]["covers_through"] == 0
            (attempt,) = before.open_attempts
            assert before.receipts == []
            assert before.sent("packet", reason="compacted") == []

            after = await sail_on(link, daemon)

    first, second = after.receipts[:2]
    assert first["attempt_id"] == attempt.attempt_id
    assert (first["outcome"], first["reason"]) == ("failed", "interrupted")
    assert second["attempt_id"] != attempt.attempt_id
    assert (second["outcome"], second["range"]["from"]) == ("applied", 1)
    assert after.checkpoints[0].checkpoint_id == second["checkpoint_id"]
    prove_whole(after, published(voyage_events()))
    assert after.digest == calm.digest
    assert comparable(after) == comparable(calm)


@pytest.mark.parametrize("point", COMMITTED)
async def test_killed_after_the_commit_it_has_the_new_checkpoint_and_sends_its_packet_once(
    point: str, calm: Left, tmp_path: Path
) -> None:
    with NatsServer() as server, DaemonProcess(server.url, tmp_path / "daemon") as daemon:
        daemon.start_doomed(point)
        async with linked(server.url) as link:
            before = await died(link, daemon, point)
            (checkpoint,) = before.checkpoints
            course = before.told["compaction"]
            assert (course["checkpoint_id"], course["covers_through"]) == (
                checkpoint.checkpoint_id,
                checkpoint.covers_through,
            )
            assert before.open_attempts == []
            (receipt,) = before.receipts
            assert (receipt["outcome"], receipt["checkpoint_id"]) == ("applied", checkpoint.checkpoint_id)
            assert before.outbox > 0
            waiting = await packets_waiting(daemon)
            (told,) = waiting
            assert before.sent("packet", reason="compacted") == (
                [told] if point == "after_publish" else []
            )

            after = await sail_on(link, daemon)

    announced = [
        packet
        for packet in after.sent("packet", reason="compacted")
        if packet["checkpoint"]["id"] == checkpoint.checkpoint_id
    ]
    assert announced == waiting
    assert [row.checkpoint_id for row in after.checkpoints][0] == checkpoint.checkpoint_id
    prove_whole(after, published(voyage_events()))
    assert after.digest == calm.digest
    assert comparable(after) == comparable(calm)
