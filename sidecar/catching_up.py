"""What follows for all of a lane's runs from having read the stream to its end, or from a loss in it.

However many runs there are, they are looked at one by one on their rows: only what waits, was lost or is newest
comes into memory. It folds nothing.
"""

from __future__ import annotations

from collections import Counter, deque

import structlog

from sidecar.deadlines import Deadlines
from sidecar.desk import Desk
from sidecar.packets import Packets
from sidecar.runs import KEPT
from sidecar.view import Standing, decode_standing
from storage.records import RunSummary

log = structlog.get_logger(__name__)


async def stream_gap(desk: Desk, first: int, through: int) -> None:
    """Messages of the stream are gone: every unfinished run has to be proven whole."""
    log.error("messages of the stream are gone", lane=desk.lane, first=first, through=through)
    for run in await desk.store.each_run(desk.tenant, desk.lane, lambda row: row.run, finished=False):
        async with desk.changing():
            await desk.runs.load([run])
            hot = desk.runs.hot[run]
            hot.view.unproven_before = through + 1
            await desk.commit(touched=[run])


async def caught_up(desk: Desk, packets: Packets, deadlines: Deadlines) -> None:
    """Everything there was is read: runs not proven whole after a loss get their gap declared.

    Of the others only the newest and those that wait for time to pass are brought into memory.
    """
    levels: Counter[str] = Counter()
    newest: deque[str] = deque(maxlen=KEPT)

    def look(row: RunSummary) -> tuple[str, Standing] | None:
        standing = decode_standing(row.view)
        levels[standing.budget.level] += 1
        newest.append(row.run)
        wanted = standing.waits or standing.unproven_before or desk.taken_over
        return (row.run, standing) if wanted else None

    async with desk.changing():
        found = await desk.store.each_run(desk.tenant, desk.lane, look, finished=False)
        desk.runs.recount(levels)
        await desk.runs.load(newest)
    for run, standing in found:
        if standing.waits:
            async with desk.changing():
                await desk.runs.load([run])
        if standing.unproven_before:
            await deadlines.declare_stream_gap(run, standing.unproven_before)
        if desk.taken_over:
            packets.mark(run, "takeover")
