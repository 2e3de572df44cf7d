"""Long histories, made once a run by the daemon's own intake on a real store, without a broker.

As a program it makes or lengthens one: ``python -m benchmarks.histories FOLDER EVENTS RUNS [plain]``, and
prints how long it took and how large it is. Everything a message goes through behind the pump is the daemon's;
only the network is not.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from benchmarks.material import Material
from benchmarks.places import Run, copied
from benchmarks.talking import Child, Json, say
from sidecar.memory import collect_seldom
from support.bench import Bench, bench

BATCH = 256


class Histories:
    """Data directories by (events, runs). ``made`` tells of each how long it took and how large it is."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._limit = anyio.CapacityLimiter(2)
        self._locks: dict[tuple[int, bool], anyio.Lock] = {}
        self.made: dict[tuple[int, int], Json] = {}

    def _at(self, events: int, runs: int, plain: bool) -> Path:
        return self._run.work / f"history-{events}-{runs}{'-plain' * plain}"

    async def get(self, events: int, runs: int, *, plain: bool = False) -> Path:
        """The data directory with that history; ``plain``: without operations, decisions and evidence.

        Whoever writes to it takes ``lent`` instead.
        """
        async with self._locks.setdefault((runs, plain), anyio.Lock()):
            folder = self._at(events, runs, plain)
            if folder.exists():
                return folder
            unfinished = self._run.work / f"unfinished-{events}-{runs}"
            self._run.drop(unfinished)
            shorter = [size for size, of in self.made if of == runs and size < events]
            if shorter and not plain:
                copied(self._at(max(shorter), runs, plain), unfinished)
            async with self._limit:
                self._run.say(f"history of {events} events of {runs} runs")
                given = [str(unfinished), str(events), str(runs), *["plain"] * plain]
                async with Child(
                    "benchmarks.histories", *given, log=self._run.work / "histories.log"
                ) as child:
                    told = await child.line()
            unfinished.rename(folder)
            if not plain:
                self.made[events, runs] = told
            return folder

    async def all(self, wanted: list[tuple[int, int]]) -> None:
        """Make these, two at a time; nothing is measured meanwhile."""
        async with anyio.create_task_group() as tasks:
            # The dearest first, so that nothing long is left for the end.
            for runs in sorted({of for _, of in wanted}, reverse=True):
                tasks.start_soon(self._each, sorted(size for size, of in wanted if of == runs), runs)

    async def _each(self, sizes: list[int], runs: int) -> None:
        for events in sizes:
            await self.get(events, runs)

    @asynccontextmanager
    async def lent(self, events: int, runs: int, *, plain: bool = False) -> AsyncIterator[Path]:
        """A copy to write to, gone afterwards."""
        source = await self.get(events, runs, plain=plain)
        folder = self._run.folder(f"lent-{events}-{runs}")
        copied(source, folder / "data")
        try:
            yield folder / "data"
        finally:
            self._run.drop(folder)


@asynccontextmanager
async def lane(folder: Path, *, blobs: Any = None, **settings: str) -> AsyncIterator[Bench]:
    """The daemon's lane on this data directory, without a broker. ``blobs`` stands for the bucket."""
    async with bench(folder, blobs=blobs, **settings) as made:
        yield made


async def grow(made: Bench, material: Material, through: int) -> None:
    """Go on from the cursor until so many messages are stored."""
    first = made.desk.cursor.stream_seq
    for deliveries in material.batches(first, through - first, BATCH):
        await made.intake.take(deliveries)


def adopt_stream(data: Path, created: str) -> None:
    """Make the stored cursor one of the stream that was created then."""
    with sqlite3.connect(data / "watchkeeper.db") as database:
        database.execute("UPDATE lanes SET stream_created = ?", (created,))
    database.close()


async def _make(folder: Path, events: int, runs: int, items: bool) -> None:
    material = Material(runs, items=items)
    async with lane(folder) as made:
        began = time.perf_counter()
        await grow(made, material, events)
        took = time.perf_counter() - began
        size, raw = made.store.size_bytes, sum(len(material.payload(i)) for i in range(0, events, 100)) * 100
    say({"events": events, "seconds": took, "bytes": size, "raw": raw})


if __name__ == "__main__":
    collect_seldom()
    asyncio.run(_make(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), "plain" not in sys.argv[4:]))
