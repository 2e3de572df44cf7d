"""One replay of the sample run against a daemon in another process, and what an undisturbed one leaves.

The window is small, so that there are many compactions to disturb. The driver sees NATS only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec

from sidecar.importers import SAMPLE, Imported, import_files
from sidecar.replay import Replay, Turn
from sidecar.transport.jetstream import Link
from support.daemon import LANE, TENANT, DaemonProcess
from support.evidence import Left, gather
from support.links import linked
from support.nats_server import NatsServer

RUN = "night-watch"
WINDOW = 24_000
BRIEF = 130
"""Messages of a shorter voyage, which has compactions as well."""


def voyage_events(limit: int | None = None) -> list[Imported]:
    """The sample's messages for a window of this size, the first ``limit`` of them."""
    messages = []
    for message in import_files([SAMPLE], format="events"):
        model = message.event.get("model")
        if isinstance(model, dict) and "context_window" in model:
            event = {**message.event, "model": {**model, "context_window": WINDOW}}
            message = msgspec.structs.replace(message, event=event)
        messages.append(message)
    return messages[:limit]


def published(messages: list[Imported]) -> list[tuple[str, str]]:
    """(channel, id) of each, in order."""
    return [(message.channel, str(message.event["id"])) for message in messages]


def player(link: Link, progress: Callable[[Turn], None] = lambda turn: None) -> Replay:
    """A driver that waits after each event until the daemon has settled, however often it dies meanwhile."""
    return Replay(link, tenant=TENANT, lane=LANE, progress=progress, give_up_after=120)


@asynccontextmanager
async def at_sea(
    server: NatsServer, folder: Path, settings: dict[str, str] | None = None
) -> AsyncIterator[tuple[DaemonProcess, Link]]:
    """A daemon that owns its lane, and a link to its broker. Whatever happens, the daemon ends with the block."""
    with DaemonProcess(server.url, folder, settings) as daemon:
        daemon.start()
        await daemon.owning()
        async with linked(server.url) as link:
            yield daemon, link


async def sail(link: Link, messages: list[Imported]) -> Replay:
    """Play them all and wait until everything is settled and sent."""
    replay = player(link)
    with anyio.fail_after(240):
        await replay.feed(messages)
        await replay.finish()
    return replay


async def laid_up(daemon: DaemonProcess, link: Link) -> Left:
    """Drain the daemon, and see what it leaves. In all its life nothing unforeseen may have happened."""
    assert await daemon.stopped() == 0, daemon.log
    assert daemon.defects() == []
    return await gather(link, daemon.data_dir, RUN)


async def calm_voyage(folder: Path, limit: int | None = None) -> Left:
    """What an undisturbed run of the first ``limit`` messages leaves."""
    with NatsServer() as server:
        async with at_sea(server, folder) as (daemon, link):
            await sail(link, voyage_events(limit))
            return await laid_up(daemon, link)


async def refolded(server: NatsServer, folder: Path) -> dict[str, Any]:
    """The run as a daemon on an empty disk folds it from the stream as it is now; nobody else may own the lane."""
    async with at_sea(server, folder, {"MODE": "observe", "LEASE__SECONDS": "1"}) as (daemon, link):
        left = await laid_up(daemon, link)
    return {name: left.told[name] for name in ("ledger", "hash_chain", "protected_digest")}
