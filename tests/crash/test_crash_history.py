"""What the daemon does when disk or stream is not what it left: database gone, stream another one, disk full."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from sidecar.importers import Imported
from sidecar.transport.jetstream import Link
from sidecar.transport.publisher import publish_inbound
from support.daemon import LANE, TENANT, DaemonProcess
from support.evidence import Left, comparable, gather, prove_journal, prove_output, prove_whole, stored
from support.links import eventually, linked
from support.nats_server import NatsServer
from support.voyage import RUN, at_sea, laid_up, player, published, voyage_events

pytestmark = pytest.mark.anyio

SHORT_LEASE = {"LEASE__SECONDS": "1"}


async def publish(link: Link, messages: list[Imported]) -> None:
    """As an agent that waits for nothing."""
    for message in messages:
        subject = f"wk.v1.in.{TENANT}.{LANE}.{message.run}.{message.channel}"
        await publish_inbound(link, subject, message.payload())


async def ask(link: Link, verb: str) -> dict[str, Any]:
    """One question about the run, asked until it is answered."""
    answer: dict[str, Any] = msgspec.json.decode(
        await player(link).ask(RUN, verb, {}, anyio.current_time() + 60)
    )
    return answer


# --- the database ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["SIGTERM", "SIGKILL"])
async def test_a_lost_database_is_rebuilt_from_the_stream(end: str, calm: Left, tmp_path: Path) -> None:
    messages = voyage_events()
    with NatsServer() as server:
        async with at_sea(server, tmp_path / "daemon", SHORT_LEASE) as (daemon, link):
            replay = player(link)
            await replay.feed(messages[:230])
            before = await gather(link, daemon.data_dir, RUN)
            if end == "SIGTERM":
                assert await daemon.stopped() == 0, daemon.log
            else:
                daemon.kill9()
            shutil.rmtree(daemon.data_dir)
            daemon.start()
            await daemon.owning()
            rebuilt = await gather(link, daemon.data_dir, RUN)
            assert rebuilt.ledger == before.ledger
            assert rebuilt.digest == before.digest
            assert rebuilt.told["hash_chain"] == before.told["hash_chain"]
            assert rebuilt.checkpoints[-1].checkpoint_id == before.checkpoints[-1].checkpoint_id
            assert await daemon.metric("ledger_mismatches_total") == 0

            await replay.feed(messages[230:])
            await replay.finish()
            left = await laid_up(daemon, link)
    prove_journal(left, published(messages))
    prove_output(left)
    assert left.checkpoints[-1].version > before.checkpoints[-1].version
    assert left.digest == calm.digest
    assert comparable(left) == comparable(calm)


async def test_a_damaged_database_is_kept_aside_and_rebuilt(tmp_path: Path) -> None:
    messages = voyage_events(150)
    with NatsServer() as server:
        async with at_sea(server, tmp_path / "daemon", SHORT_LEASE) as (daemon, link):
            await player(link).feed(messages)
            before = await gather(link, daemon.data_dir, RUN)
            daemon.kill9()
            database = daemon.data_dir / "watchkeeper.db"
            for side in ("-wal", "-shm"):
                Path(f"{database}{side}").unlink(missing_ok=True)
            with database.open("r+b") as file:
                file.write(b"not a database at all".ljust(4096, b"\0"))
            daemon.start()
            await daemon.owning()
            rebuilt = await gather(link, daemon.data_dir, RUN)
            assert (rebuilt.ledger, rebuilt.digest) == (before.ledger, before.digest)
            assert len(list(daemon.data_dir.glob("watchkeeper.db.damaged-*"))) >= 1


# --- the stream -----------------------------------------------------------------------------------------------


async def recreate(link: Link, stream: str) -> None:
    """The same stream by name and settings, empty and of another incarnation."""
    info = await link.api(f"STREAM.INFO.{stream}")
    await link.api(f"STREAM.DELETE.{stream}")
    await link.api(f"STREAM.CREATE.{stream}", info["config"])


@pytest.mark.parametrize("while_it_runs", [True, False])
async def test_another_stream_of_the_same_name_is_read_from_its_beginning_with_an_alarm(
    while_it_runs: bool, calm: Left, tmp_path: Path
) -> None:
    messages = voyage_events()
    with NatsServer() as server:
        async with at_sea(server, tmp_path / "daemon", SHORT_LEASE) as (daemon, link):
            replay = player(link)
            await replay.feed(messages[:120])
            before = await gather(link, daemon.data_dir, RUN)
            if not while_it_runs:
                assert await daemon.stopped() == 0, daemon.log
            await recreate(link, "WK_IN")
            if not while_it_runs:
                daemon.start()
            # An agent that says everything again: what is known already must change nothing.
            await publish(link, messages[80:100])

            async def alarmed() -> bool:
                return (
                    await daemon.get("/metrics") is not None
                    and await daemon.metric("stream_resets_total") >= 1
                )

            await eventually(alarmed, "the alarm")
            await daemon.owning()

            async def read() -> bool:
                return await daemon.metric("events_duplicate_total") >= 15

            await eventually(read, "the repeated events")
            again = await gather(link, daemon.data_dir, RUN)
            assert again.ledger["items"] == before.ledger["items"]
            assert again.digest == before.digest

            await replay.feed(messages[120:])
            await replay.finish()
            left = await laid_up(daemon, link)
    assert left.broken is None
    assert left.digest == calm.digest
    assert comparable(left)["items"] == comparable(calm)["items"]
    prove_output(left)


async def test_messages_purged_before_they_were_read_are_a_gap_everyone_sees(tmp_path: Path) -> None:
    messages = voyage_events()
    settings = {**SHORT_LEASE, "INTAKE__GAP_AFTER_SECONDS": "1"}
    with NatsServer() as server:
        async with at_sea(server, tmp_path / "daemon", settings) as (daemon, link):
            await player(link).feed(messages[:60])
            assert await daemon.stopped() == 0, daemon.log
            await publish(link, messages[60:80])
            await link.api("STREAM.PURGE.WK_IN")
            daemon.start()
            await daemon.owning()
            await publish(link, messages[80:90])

            async def paused() -> bool:
                packet = await ask(link, "packet")
                return packet["verdict"] == "pause" and any(
                    blocker["code"] == "history_gap" for blocker in packet["blockers"]
                )

            await eventually(paused, "the pause for the gap")

            async def declared() -> bool:
                status = await ask(link, "status")
                return bool(status["gaps"]) and all(gap["state"] == "declared" for gap in status["gaps"])

            await eventually(declared, "the declaration of the gap")
            records = [item.body for item in await stored(link, "WK_IN", f"wk.v1.in.*.*.{RUN}.record")]
            assert "gap.declared" in {record["type"] for record in records}
            assert await daemon.metric("invariant_violations_total", code="history_gap") >= 1
            left = await gather(link, daemon.data_dir, RUN)
            assert left.broken is None
            assert left.sent("notice", kind="history_gap") != []
            assert await daemon.stopped() == 0, daemon.log


# --- the disk -------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of this size; skips where it cannot be had."""
    if os.geteuid() != 0:
        pytest.skip("a file system of limited size needs root")
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def resize(folder: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)


async def test_a_full_disk_stops_the_work_and_loses_nothing(calm: Left, tmp_path: Path) -> None:
    messages = voyage_events()
    with small_disk(tmp_path / "disk", "1500k") as disk, NatsServer() as server:
        async with at_sea(server, tmp_path / "daemon", {"DATA_DIR": str(disk / "data")}) as (daemon, link):
            daemon.data_dir = disk / "data"
            replay = player(link)
            with anyio.fail_after(200):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(replay.feed, messages)
                    reason = await daemon.unready(f"storage {LANE}")
                    assert "space" in reason or "full" in reason
                    assert await daemon.metric("storage_full") == 1
                    alive = await daemon.get("/healthz")
                    assert alive is not None
                    assert alive.status_code == 200
                    held = await gather(link, daemon.data_dir, RUN)
                    assert 0 < len(held.journal) < len(messages)
                    assert held.broken is None
                    resize(disk, "64m")
                await replay.finish()
            await daemon.ready()
            assert daemon.starts == 1
            assert await daemon.metric("storage_full") == 0
            left = await laid_up(daemon, link)
    assert [entry.chain for entry in left.journal[: len(held.journal)]] == [
        entry.chain for entry in held.journal
    ]
    prove_whole(left, published(messages))
    assert left.digest == calm.digest
    assert comparable(left) == comparable(calm)


async def test_a_disk_full_at_the_start_is_waited_for(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk, NatsServer() as server:
        filler = disk / "filler"
        with suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
        with DaemonProcess(server.url, tmp_path / "daemon", {"DATA_DIR": str(disk / "data")}) as daemon:
            daemon.start()
            await daemon.unready("storage")
            resize(disk, "64m")
            await daemon.owning()
            assert daemon.starts == 1
            assert filler.exists()
            async with linked(server.url) as link:
                await player(link).feed(voyage_events(20))
            assert await daemon.stopped() == 0, daemon.log
