"""A transcript replayed against a daemon of its own, with everything that went in and came out at hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

from sidecar.importers import Imported, import_files
from sidecar.replay import Listener, Replay, RunReport
from sidecar.transport.jetstream import Link, LinkSettings
from tests.support.blackbox import LANE, TENANT, Heard, Json, blackbox, stored
from tests.support.nats_server import NatsServer


@dataclass
class Replayed:
    """``history`` is what the stream holds of each run, event and authority channel, in position order."""

    messages: list[Imported]
    reports: list[RunReport]
    history: dict[str, list[Json]]
    heard: list[Heard]

    def receipts(self, run: str) -> list[Json]:
        return [item.body for item in self.heard if item.run == run and item.kind == "receipt"]

    def coverage(self) -> dict[str, list[tuple[int, int, str]]]:
        """Every attempt of each run: from, through, outcome."""
        return {
            report.run: [
                (item["range"]["from"], item["range"]["through"], item["outcome"])
                for item in self.receipts(report.run)
            ]
            for report in self.reports
        }


async def replayed(folder: Path, files: Sequence[Path], window: int | None) -> Replayed:
    """Replay patiently, as ``watchkeeper replay`` does, with a broker and a daemon of its own."""
    with NatsServer() as server:
        return await _replayed(server, folder, files, window)


async def _replayed(server: NatsServer, folder: Path, files: Sequence[Path], window: int | None) -> Replayed:
    async with blackbox(server, folder) as box, anyio.create_task_group() as tasks:
        link = Link(LinkSettings(url=box.url, creds=None, name="replay"), lambda connected, reason: None)
        await tasks.start(link.run)
        listener = Listener(link, tenant=TENANT, lane=LANE)
        await listener.listen()
        player = Replay(link, tenant=TENANT, lane=LANE)
        messages = list(import_files(files, window=window))
        await player.feed(messages)
        reports = await player.finish()
        listener.fill(reports)
        history: dict[str, list[Json]] = {report.run: [] for report in reports}
        for report in reports:
            found = [
                (sequence, json.loads(data))
                for channel in ("event", "authority")
                for sequence, data, _ in await stored(
                    box.js, "WK_IN", f"wk.v1.in.{TENANT}.{LANE}.{report.run}.{channel}"
                )
            ]
            history[report.run] = [body for _, body in sorted(found, key=lambda item: item[0])]
        tasks.cancel_scope.cancel()
    return Replayed(messages, reports, history, list(box.heard))
