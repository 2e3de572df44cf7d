"""A replay from start to end: private broker, private daemon, the transcripts, the report.

Used by ``watchkeeper replay`` and ``watchkeeper demo``. Everything lives in a temporary folder and on
free loopback ports; nothing of a real installation is touched.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import msgspec
from rich.console import Console

from protocol.errors import ExitCode
from sidecar.app import Daemon, running
from sidecar.config import Config
from sidecar.embedded_nats import embedded_nats
from sidecar.importers import Imported, import_files
from sidecar.replay import Listener, Replay, RunReport
from sidecar.terminal import Board, print_report
from sidecar.transport.jetstream import Link, LinkSettings

_LAST_WORDS_SECONDS = 10.0


async def rehearse(
    config: Config,
    files: Sequence[Path],
    *,
    format: str,
    window: int | None,
    as_json: bool,
    bars: bool,
    patient: bool,
) -> int:
    """Replay the files and print the report; returns the exit code."""
    console = Console(file=sys.stderr if as_json else sys.stdout, highlight=False)
    messages = [_in_window(item, window) for item in import_files(files, format=format, window=window)]
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="watchkeeper-")))
        url = await stack.enter_async_context(embedded_nats(folder / "nats"))
        daemon = await stack.enter_async_context(running(private(config, folder, url)))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        link = Link(
            LinkSettings(url=url, creds=None, name="watchkeeper-replay"), lambda connected, reason: None
        )
        await tasks.start(link.run)
        tenant, lane = daemon.config.tenant, daemon.config.lanes[0]
        listener = Listener(link, tenant=tenant, lane=lane)
        await listener.listen()
        with Board(console, enabled=bars and not as_json) as board:
            player = Replay(link, tenant=tenant, lane=lane, patient=patient, progress=board.show)
            await player.feed(messages)
            reports = await player.finish()
            for turn in player.turns.values():
                board.show(turn)
        listener.fill(reports)
        figures = await daemon_figures(daemon)
        tasks.cancel_scope.cancel()
    if as_json:
        print(as_object(files, reports, figures))
    else:
        print_report(console, reports, figures)
    return int(ExitCode.CLEAN)


def _in_window(message: Imported, window: int | None) -> Imported:
    """The message with the window asked for, where it names a model; anything malformed stays as it is."""
    model = message.event.get("model")
    if window is None or not isinstance(model, dict) or "context_window" not in model:
        return message
    event = {**message.event, "model": {**model, "context_window": window}}
    return msgspec.structs.replace(message, event=event)


def private(config: Config, folder: Path, url: str) -> Config:
    """The configuration, pointed at a private broker, data directory and admin port; one lane."""
    replace = msgspec.structs.replace
    return replace(
        config,
        data_dir=folder / "data",
        lanes=("main",),
        lanes_auto=None,
        mode="live",
        nats=replace(config.nats, url=url, creds=None),
        admin=replace(config.admin, listen="127.0.0.1:0"),
    )


async def daemon_figures(daemon: Daemon) -> dict[str, Any]:
    """What the daemon as a whole counted, from its own metrics; a packet may still be on its way out."""
    with anyio.move_on_after(_LAST_WORDS_SECONDS):
        while daemon.metrics.total("outbox_pending"):  # noqa: ASYNC110
            await anyio.sleep(0.01)
    return {
        "events_total": int(daemon.metrics.total("events_total")),
        "intake_lag_events": int(daemon.metrics.total("intake_lag_events")),
        "outbox_pending": int(daemon.metrics.total("outbox_pending")),
    }


def as_object(files: Sequence[Path], reports: Sequence[RunReport], figures: dict[str, Any]) -> str:
    """The report as the one JSON object of ``replay --json``."""
    value = {"files": [str(file) for file in files], "runs": reports, "daemon": figures}
    return msgspec.json.format(msgspec.json.encode(value)).decode()
