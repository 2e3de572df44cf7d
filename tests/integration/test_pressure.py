"""A disk ten times slower, a slow broker, far more messages than can be read: nothing is lost, memory stays bounded
and readiness says what is so. A real daemon, broker and disk; no time is asserted.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import nats
import pytest
from nats.aio.client import Client

from storage.data_dir import DATABASE
from support.daemon import DaemonProcess
from support.links import eventually
from support.nats_server import NatsServer
from support.slow_broker import slow_way
from support.slow_disk import slow_disk

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

_RUNS = 20
_LARGE = 16 * 1024
_MOST_GROWTH_MIB = 64.0
"""Less than the messages of the overload take by themselves, and more than what the daemon may keep of them."""


def messages(first: int, count: int, size: int) -> Iterator[tuple[str, bytes]]:
    """Subject and payload of messages ``first`` …, of runs in turn; each run's first one begins it."""
    text = "pump " * (size // 5)
    for i in range(first, first + count):
        body = {"v": 1, "id": f"e-{i}", "at": "2026-11-30T09:12:00Z", "type": "message", "role": "assistant"}
        body |= {"message_id": f"m-{i}", "content": f"{i}: {text}"}
        if i < _RUNS:
            model = {"name": "m-1", "context_window": 200_000_000, "max_output_tokens": 4_000}
            body = {**body, "type": "run.started", "goal": f"keep pump {i} running", "model": model}
        yield f"wk.v1.in.default.main.run-{i % _RUNS}.event", json.dumps(body).encode()


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    client = await nats.connect(url, pending_size=64 * 1024 * 1024)
    try:
        yield client
    finally:
        await client.close()


async def store(url: str, count: int, size: int, *, first: int = 0) -> None:
    """Have the broker store them as fast as it takes them."""
    async with connected(url) as client:
        for number, (subject, payload) in enumerate(messages(first, count, size)):
            await client.publish(subject, payload)
            if number % 200 == 199:
                await client.flush()
        await client.flush()

        async def stored() -> bool:
            info = await client.jetstream().stream_info("WK_IN")
            return info.state.messages >= first + count

        await eventually(stored, f"{first + count} messages in the stream", 60)


def journal(daemon: DaemonProcess) -> int:
    """Messages of the runs that are on the daemon's disk, each counted once."""
    path = daemon.data_dir / DATABASE
    if not path.exists():
        return 0
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=10)) as database:
        with suppress(sqlite3.OperationalError):
            (count,) = database.execute(
                "SELECT count(DISTINCT event_id) FROM heads WHERE event_id LIKE 'e-%'"
            ).fetchone()
            return int(count)
        return 0


def resident_mib(daemon: DaemonProcess) -> float:
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


@dataclass
class Seen:
    """What was seen of the daemon from outside, again and again."""

    most_mib: float = 0.0
    most_behind: float = 0.0
    reasons: set[str] = field(default_factory=set)
    ready_with: list[int] = field(default_factory=list)
    """Messages on the disk just after each answer `ready`."""


@asynccontextmanager
async def watched(daemon: DaemonProcess) -> AsyncIterator[Seen]:
    seen = Seen()

    async def look() -> None:
        while True:
            seen.most_mib = max(seen.most_mib, resident_mib(daemon))
            answer = await daemon.get("/readyz")
            if answer is not None:
                if answer.status_code == 200:
                    seen.ready_with.append(await anyio.to_thread.run_sync(journal, daemon))
                seen.reasons |= set(answer.json()["reasons"])
                seen.most_behind = max(seen.most_behind, await daemon.metric("intake_lag_events"))
            await anyio.sleep(0.02)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look)
        yield seen
        tasks.cancel_scope.cancel()


async def all_stored(daemon: DaemonProcess, count: int) -> None:
    async def whole() -> bool:
        assert daemon.running, daemon.log
        return await anyio.to_thread.run_sync(journal, daemon) == count

    await eventually(whole, f"{count} messages on the disk", 120)


@pytest.fixture
def slow(tmp_path: Path) -> dict[str, str]:
    made = slow_disk(tmp_path, sync_ms=15)
    if made is None:
        pytest.skip("no C compiler here: a slow disk needs a library made for it")
    return made


async def test_an_overload_on_a_slow_disk_is_read_in_its_time_and_in_bounded_memory(
    tmp_path: Path, slow: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    warm, count = 1_500, 5_000
    with NatsServer() as server, DaemonProcess(server.url, tmp_path / "daemon") as daemon:
        for name, value in slow.items():
            monkeypatch.setenv(name, value)
        daemon.start()
        await daemon.owning()
        # What an idle daemon has not loaded yet, and caches that are bounded, are no part of the question.
        await store(server.url, warm, _LARGE)
        await all_stored(daemon, warm)
        before = resident_mib(daemon)
        async with watched(daemon) as seen:
            await store(server.url, count, _LARGE, first=warm)
            await all_stored(daemon, warm + count)
        assert seen.most_behind > 0, "it never said that it was behind"
        assert seen.most_mib - before < _MOST_GROWTH_MIB < count * _LARGE / 2**20
        assert not daemon.defects()
        assert await daemon.stopped() == 0


async def test_a_backlog_on_a_slow_disk_is_read_before_it_says_ready(
    tmp_path: Path, slow: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 4_000
    with NatsServer() as server, DaemonProcess(server.url, tmp_path / "daemon") as daemon:
        # The streams have to be there for a backlog.
        daemon.start()
        await daemon.owning()
        await daemon.stopped()
        await store(server.url, count, 1_000)
        for name, value in slow.items():
            monkeypatch.setenv(name, value)
        daemon.start()
        async with watched(daemon) as seen:
            await all_stored(daemon, count)
            await daemon.owning(60)
            await eventually(lambda: bool(seen.ready_with), "an answer `ready`")
        assert set(seen.ready_with) == {count}
        assert seen.reasons
        assert await daemon.stopped() == 0


async def test_behind_a_slow_broker_nothing_is_lost_and_ready_means_read(tmp_path: Path) -> None:
    count = 2_000
    async with _behind_slow_way(tmp_path) as (server, daemon):
        await store(server.url, count, 1_000)
        daemon.start()
        async with watched(daemon) as seen:
            await all_stored(daemon, count)
            await daemon.owning(60)
            await eventually(lambda: bool(seen.ready_with), "an answer `ready`")
            before = resident_mib(daemon)
            # Now it reads what comes, and what it says goes the same slow way.
            told = [event | {"id": f"e-late-{n}"} for n, event in enumerate(_late())]
            async with connected(server.url) as client:
                for n, body in enumerate(told):
                    subject = f"wk.v1.in.default.main.run-{n % _RUNS}.event"
                    await client.publish(subject, json.dumps(body).encode())
                await all_stored(daemon, count + len(told))

                async def published() -> bool:
                    streams = client.jetstream()
                    info = await streams.stream_info(
                        "WK_OUT", subjects_filter="wk.v1.out.default.main.*.packet"
                    )
                    return len(info.state.subjects or {}) == _RUNS

                await eventually(published, "a packet of every run behind the slow way", 60)
        assert set(seen.ready_with) <= {*range(count, count + len(told) + 1)}
        assert seen.reasons
        assert seen.most_mib - before < _MOST_GROWTH_MIB
        assert not daemon.defects()
        assert await daemon.stopped() == 0


def _late() -> Iterator[dict[str, object]]:
    for n in range(_RUNS):
        yield {"v": 1, "type": "constraint.set", "at": "2026-11-30T09:13:00Z", "constraint_id": f"c-{n}",
               "text": "never close the lock at low tide", "source": "user"}  # fmt: skip


@asynccontextmanager
async def _behind_slow_way(folder: Path) -> AsyncIterator[tuple[NatsServer, DaemonProcess]]:
    """A broker whose streams are there, and a daemon that reaches it by a slow way only."""
    with NatsServer() as server, DaemonProcess(server.url, folder / "daemon") as daemon:
        daemon.start()
        await daemon.owning()
        await daemon.stopped()
        async with slow_way(server.port, bytes_per_second=1.5e6, delay=0.005) as way:
            daemon.url = f"nats://127.0.0.1:{way.port}"
            yield server, daemon
