"""Row 16: a slow disk, a slow broker and far too many messages. Nothing may be lost, memory stays bounded, and
readiness says what is so.

The disk is slow because a library preloaded into the daemon lets every write and every wait for the disk take ten
times as long; then somebody else holds the database's write lock for longer than the daemon waits for it. The
broker is slow because a way to it lets so many bytes pass a second, each piece late.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
import httpx

from benchmarks.figures import Row, at_least, at_most
from benchmarks.load import Wire, fill, frames
from benchmarks.material import Material
from benchmarks.places import Run, broker, daemon
from benchmarks.talking import Child
from support.slow_broker import slow_way
from support.slow_disk import TIMES, slow_disk

_RATE = 1_000
_MOST_GROWTH_MIB = 96.0
_LOCKED_SECONDS = 90.0
"""At most: longer than two writes of the daemon wait for the lock one after the other, on a busy machine too."""
_DELAY_SECONDS = 0.04
_BYTES_PER_SECOND = 4e6
_WAIT = 600.0


@dataclass
class Seen:
    """What was seen of the daemon from outside, a few times a second."""

    resident: list[float] = field(default_factory=list)
    ready: list[tuple[float, bool, str]] = field(default_factory=list)
    lag: list[float] = field(default_factory=list)


async def pressure(run: Run, wanted: set[str]) -> list[Row]:
    """Row 16."""
    seconds = run.sizes.pressure_seconds
    row = Row(
        "16",
        "under pressure",
        "the daemon's process, over the broker: messages lost (journal against what was sent), resident memory "
        "over what it was before, answers of /readyz meanwhile; once each. The same as tests: "
        "tests/integration/test_pressure.py",
        sizes={
            "seconds": seconds,
            "rate": _RATE,
            "disk": f"{TIMES} times slower",
            "broker's delay": _DELAY_SECONDS,
            "broker's bytes a second": int(_BYTES_PER_SECOND),
        },
    )
    await _slow_disk(run, row, seconds)
    await _slow_broker(run, row, seconds)
    await _overload(run, row, seconds)
    return [row]


@asynccontextmanager
async def _watched(child: Child, address: str) -> AsyncIterator[Seen]:
    seen = Seen()

    async def look() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            while True:
                seen.resident.append((await child.ask("cost"))["rss_mib"])
                with suppress(httpx.TransportError):
                    answer = await client.get(f"http://{address}/readyz")
                    reasons = " ".join(answer.json().get("reasons", {}))
                    seen.ready.append((time.monotonic(), answer.status_code == 200, reasons))
                    text = (await client.get(f"http://{address}/metrics")).text
                    found = [
                        line
                        for line in text.splitlines()
                        if line.startswith("watchkeeper_intake_lag_events ")
                    ]
                    seen.lag += [float(line.split()[1]) for line in found]
                await asyncio.sleep(0.2)

    task = asyncio.create_task(look())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()


async def _steadily(url: str, material: Material, rate: int, seconds: float) -> int:
    """Send at a rate from this process; how many."""
    wire, count = Wire(url), max(1, int(rate * seconds))
    prepared = frames(material, 0, count)
    began, sent = time.monotonic(), 0
    while sent < count:
        due = min(count, int((time.monotonic() - began) * rate) + 1)
        if due > sent:
            wire.send(b"".join(prepared[sent:due]))
            sent = due
        await asyncio.sleep(0.005)
    wire.flush()
    wire.close()
    return count


async def _end(child: Child, seen: Seen, row: Row, name: str, count: int, before: float, url: str) -> None:
    wire = Wire(url)
    last = wire.last("WK_IN")
    wire.close()
    began = time.monotonic()
    while (await child.ask("counts"))["cursor"] < last and time.monotonic() - began < _WAIT:
        await asyncio.sleep(0.05)
    counts = await child.ask("counts")
    row.add(f"{name}: messages lost", [float(count - counts["entries"])], at_most(0), "messages")
    grown = max([*seen.resident, before]) - before
    row.add(f"{name}: memory over before", [grown], at_most(_MOST_GROWTH_MIB), "MiB")
    row.add(f"{name}: to the last commit after the last message", [time.monotonic() - began], unit="s")
    row.add(f"{name}: furthest behind, as the daemon says it", [max(seen.lag, default=0.0)], unit="events")
    ready = [answer for _, answer, _ in seen.ready]
    row.add(f"{name}: answers `ready` of all", [sum(ready) / max(1, len(ready))])


async def _slow_disk(run: Run, row: Row, seconds: float) -> None:
    folder = run.folder("slow-disk")
    full = run.sizes.name == "full"
    slowed = slow_disk(folder)
    if slowed is None:
        row.missing.append("slow disk: there is no C compiler to make the library with")
    async with broker(folder) as server, daemon(server.url, folder, under=slowed) as child:
        address = (await child.ask("ready", seconds=60))["address"]
        before = (await child.ask("cost"))["rss_mib"]
        run.say("the disk is slow")
        async with _watched(child, address) as seen:
            count = await _steadily(server.url, Material(run.sizes.runs), _RATE, seconds)
            told = ""
            if full:
                run.say("and the lock is held for longer than the daemon waits")
                begun, enough = time.monotonic(), threading.Event()
                held = asyncio.create_task(anyio.to_thread.run_sync(_hold, folder / "data", enough))
                await asyncio.sleep(0.5)
                late = Material(run.sizes.runs, prefix="late")
                await anyio.to_thread.run_sync(fill, server.url, "WK_IN", late, 0, 100)
                count += 100
                while "storage" not in told and not held.done():
                    await asyncio.sleep(0.2)
                    told = " ".join(reason for at, ready, reason in seen.ready if at > begun and not ready)
                enough.set()
                await held
        await _end(child, seen, row, "slow disk", count, before, server.url)
        if full:
            name = "slow disk: not ready for its sake once the wait is over (1 = yes)"
            row.add(name, [float("storage" in told)], at_least(1), "")
    run.drop(folder)


def _hold(data: Path, enough: threading.Event) -> None:
    """Hold the write lock until it is enough."""
    database = sqlite3.connect(data / "watchkeeper.db", isolation_level=None, timeout=30)
    try:
        database.execute("BEGIN IMMEDIATE")
        enough.wait(_LOCKED_SECONDS)
        database.execute("ROLLBACK")
    finally:
        database.close()


async def _slow_broker(run: Run, row: Row, seconds: float) -> None:
    folder = run.folder("slow-broker")
    async with (
        broker(folder) as server,
        slow_way(server.port, bytes_per_second=_BYTES_PER_SECOND, delay=_DELAY_SECONDS) as way,
        daemon(f"nats://127.0.0.1:{way.port}", folder) as child,
    ):
        address = (await child.ask("ready", seconds=60))["address"]
        before = (await child.ask("cost"))["rss_mib"]
        run.say("the broker is slow")
        async with _watched(child, address) as seen:
            count = await _steadily(server.url, Material(run.sizes.runs), _RATE, seconds)
        await _end(child, seen, row, "slow broker", count, before, server.url)
    run.drop(folder)


async def _overload(run: Run, row: Row, seconds: float) -> None:
    """As many messages as the broker takes, for a while: ten times what the daemon reads, and more."""
    folder = run.folder("overload")
    chunk = 20_000 if run.sizes.name == "full" else 300
    material = Material(run.sizes.runs)
    async with broker(folder) as server, daemon(server.url, folder) as child:
        address = (await child.ask("ready", seconds=60))["address"]
        before = (await child.ask("cost"))["rss_mib"]
        run.say("more messages than can be read")
        async with _watched(child, address) as seen:
            count, spent, began = 0, 0.0, time.monotonic()
            while time.monotonic() - began < seconds / 2:
                prepared = await anyio.to_thread.run_sync(frames, material, count, chunk)
                at = time.monotonic()
                await anyio.to_thread.run_sync(_burst, server.url, prepared)
                spent += time.monotonic() - at
                count += chunk
            stored = await child.ask("counts")
            offered, read = count / spent, stored["entries"] / (time.monotonic() - began)
            await _end(child, seen, row, "overload", count, before, server.url)
        row.add("overload: messages in a burst / read, per second", [offered / max(1.0, read)])
        row.sizes["overload"] = count
    run.drop(folder)


def _burst(url: str, prepared: list[bytes]) -> None:
    wire = Wire(url)
    expected = wire.last("WK_IN") + len(prepared)
    for start in range(0, len(prepared), 2_000):
        wire.send(b"".join(prepared[start : start + 2_000]))
        wire.flush()
    # Whatever the broker refused would be lost by us, not by the daemon.
    deadline = time.monotonic() + 30
    while wire.last("WK_IN") < expected:
        if time.monotonic() > deadline:
            raise RuntimeError("the broker did not store the burst")
        time.sleep(0.005)
    wire.close()
