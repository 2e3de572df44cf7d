"""Brokers and data directories to measure in, each on a folder of its own, copied from one that was prepared.

A broker that a daemon has served once is no fresh one: its lane has had an owner. So what is needed again is
stopped, copied and started.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from benchmarks.material import LANE, TENANT
from benchmarks.sizes import Sizes
from benchmarks.talking import Child
from protocol import subjects
from sidecar.transport.topology import ensure_streams
from support.links import linked
from support.nats_server import NatsServer


@dataclass
class Run:
    """One run of the benchmarks: what all rows share."""

    sizes: Sizes
    rounds: int
    work: Path
    peers: Path
    """The interpreter that has the peers installed."""
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._made = 0
        self.work.mkdir(parents=True, exist_ok=True)

    def folder(self, name: str) -> Path:
        """A new folder."""
        self._made += 1
        made = self.work / f"{self._made:03d}-{name}"
        made.mkdir(parents=True)
        return made

    def drop(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def broker(folder: Path, config: str = "") -> AsyncIterator[NatsServer]:
    """A nats-server on ``folder/nats``; the streams are there."""
    store = folder / "nats"
    store.mkdir(parents=True, exist_ok=True)
    server = NatsServer(store=store, config=config)
    await anyio.to_thread.run_sync(server.start)
    try:
        async with linked(server.url) as link:
            await ensure_streams(link)
        yield server
    finally:
        await anyio.to_thread.run_sync(server.stop)


async def begin_stream_at(url: str, first: int) -> str:
    """Make the inbound stream anew so that its first message has this sequence; when it was created, as the
    broker says it."""
    async with linked(url) as link:
        config: dict[str, Any] = (await link.api(f"STREAM.INFO.{subjects.STREAM_IN}"))["config"]
        await link.api(f"STREAM.DELETE.{subjects.STREAM_IN}")
        made = await link.api(f"STREAM.CREATE.{subjects.STREAM_IN}", {**config, "first_seq": first})
        return str(made["created"])


async def add_stream(url: str, name: str, subject: str) -> None:
    """One more stream on file, of the inbound stream's kind."""
    async with linked(url) as link:
        await link.api(
            f"STREAM.CREATE.{name}",
            {
                "name": name,
                "subjects": [subject],
                "retention": "limits",
                "storage": "file",
                "num_replicas": 1,
            },
        )


def daemon(url: str, folder: Path, *, under: Mapping[str, str] | None = None, **settings: str) -> Child:
    """The daemon's child on ``folder/data``; settings are variables without their prefix, ``under`` such of the
    system."""
    folder.mkdir(parents=True, exist_ok=True)
    given = {
        "NATS__URL": url,
        "TENANT": TENANT,
        "LANES": LANE,
        "DATA_DIR": str(folder / "data"),
        "ADMIN__LISTEN": "127.0.0.1:0",
        "LOGS__LEVEL": "warning",
        "LOGS__FORMAT": "json",
        **settings,
    }
    extra = {f"WATCHKEEPER_{key}": value for key, value in given.items()} | dict(under or {})
    return Child("benchmarks.daemon_child", log=folder / "daemon.log", extra=extra)


def pump(kind: str, url: str, folder: Path, **more: str) -> Child:
    """One of the loops of ``pump_child``."""
    folder.mkdir(parents=True, exist_ok=True)
    named = [part for name, value in more.items() for part in (f"--{name}", value)]
    return Child("benchmarks.pump_child", kind, url, str(folder / kind), *named, log=folder / f"{kind}.log")


def copied(source: Path, target: Path) -> Path:
    """A copy that shares what the file system lets it share."""
    subprocess.run(["cp", "-r", "--reflink=auto", str(source), str(target)], check=True)
    return target


async def prepared(run: Run, name: str, make: Callable[[Path], Awaitable[None]]) -> Path:
    """The folder that ``make`` has filled, made once a run."""
    folder = run.work / f"prepared-{name}"
    if not folder.exists():
        unfinished = run.work / f"unfinished-{name}"
        run.drop(unfinished)
        unfinished.mkdir(parents=True)
        await make(unfinished)
        unfinished.rename(folder)
    return folder


def turned(things: list[Any], round_: int) -> list[Any]:
    """The same list, begun elsewhere each round, so that no one is always the first."""
    at = round_ % len(things)
    return things[at:] + things[:at]
