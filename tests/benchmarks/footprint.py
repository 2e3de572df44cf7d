"""Rows 10 and 12: memory of many idle runs, and what a scrape costs beside them. ``watchkeeper run`` itself."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import anyio
import httpx

from benchmarks.figures import Row, at_most, ratios
from benchmarks.load import fill
from benchmarks.material import LANE, TENANT, Material
from benchmarks.places import Run, broker, copied, daemon, prepared, turned
from benchmarks.talking import resident_mib
from support.daemon import DaemonProcess

_EACH = 2
"""Messages of a run that is idle then."""
_SETTLE_SECONDS = 3.0
_FEW = 10
_HOT_RUNS = 2_000


async def footprint(run: Run, wanted: set[str]) -> list[Row]:
    """Rows 10, 12."""
    many = run.sizes.idle_runs
    sources = {
        name: await prepared(run, f"idle-{count}", lambda folder, count=count: _told(folder, count))
        for name, count in (("none", 0), ("few", _FEW), ("many", many))
    }
    made = []
    if "10" in wanted:
        made.append(await _memory(run, sources, many))
    if "12" in wanted:
        made.append(await _scrapes(run, sources, many))
    return made


async def _told(folder: Path, runs: int) -> None:
    """A lane that has read so many runs, stopped."""
    async with broker(folder) as server:
        last = fill(server.url, "WK_IN", Material(runs), 0, _EACH * runs) if runs else 0
        async with daemon(server.url, folder) as child:
            await child.ask("ready", seconds=300)
            if last:
                await child.ask("wait", sequence=last, seconds=300)
            await child.stop(60)


def _process(url: str, folder: Path) -> DaemonProcess:
    return DaemonProcess(url, folder, {"TENANT": TENANT, "LANES": LANE, "LOGS__LEVEL": "info"})


async def _memory(run: Run, sources: dict[str, Path], many: int) -> Row:
    row = Row(
        "10",
        "memory",
        "resident memory of `watchkeeper run` some seconds after it is ready: on an empty data directory, and on "
        "one with idle runs; hot runs: of the daemon's process right after it has read so many runs",
        sizes={"idle runs": many, "messages of each": _EACH},
    )
    resident: dict[str, list[float]] = {"none": [], "many": []}
    for round_ in range(run.rounds):
        for name in turned(["none", "many"], round_):
            run.say(f"round {round_ + 1} of {run.rounds}: {name}")
            folder = run.folder("memory")
            copied(sources[name] / "nats", folder / "nats")
            copied(sources[name] / "data", folder / "data")
            async with broker(folder) as server:
                with _process(server.url, folder) as process:
                    process.start()
                    await process.ready(300)
                    await anyio.sleep(_SETTLE_SECONDS if run.sizes.name == "full" else 0)
                    resident[name].append(resident_mib(process.pid))
                    await process.stopped()
            run.drop(folder)
    grown = [a - b for a, b in zip(resident["many"], resident["none"], strict=True)]
    row.add(f"{many} idle runs over none, after a start", grown, at_most(5.0), "MiB")
    row.add("idle daemon", resident["none"], at_most(60.0), "MiB")
    await _hot(run, row, many)
    return row


async def _hot(run: Run, row: Row, many: int) -> None:
    """Runs are told of one after the other; how many stay in memory, and what of it."""
    folder = run.folder("hot")
    material = Material(3 * many)
    async with broker(folder) as server, daemon(server.url, folder) as child:
        await child.ask("ready", seconds=60)
        idle = (await child.ask("cost"))["rss_mib"]
        sizes = []
        for third in range(3):
            run.say(f"{(third + 1) * many} runs told of")
            last = fill(server.url, "WK_IN", material, third * many, many)
            await child.ask("wait", sequence=last, seconds=300)
            await anyio.sleep(_SETTLE_SECONDS if run.sizes.name == "full" else 0)
            sizes.append((await child.ask("cost"))["rss_mib"])
        counts = await child.ask("counts")
    run.drop(folder)
    row.add(f"hot runs after {counts['runs']} runs", [float(counts["hot"])], at_most(_HOT_RUNS), "runs")
    row.add(f"{many} runs just told of, over an idle daemon", [sizes[0] - idle], unit="MiB")
    row.add(f"memory at {3 * many} runs / at {many} runs just told of", [sizes[2] / sizes[0]])


async def _scrapes(run: Run, sources: dict[str, Path], many: int) -> Row:
    row = Row(
        "12",
        "a scrape beside many runs",
        "GET /metrics over HTTP to `watchkeeper run`, median of the scrapes of a round, two daemons scraped in "
        "turn",
        sizes={"runs": [_FEW, many], "scrapes of a round": run.sizes.scrapes},
    )
    took: dict[str, list[float]] = {"few": [], "many": []}
    folders = {name: run.folder(f"scraped-{name}") for name in took}
    for name, folder in folders.items():
        for part in ("nats", "data"):
            copied(sources[name] / part, folder / part)
    async with (
        broker(folders["few"]) as few,
        broker(folders["many"]) as much,
        httpx.AsyncClient(trust_env=False, timeout=30) as client,
    ):
        with _process(few.url, folders["few"]) as one, _process(much.url, folders["many"]) as other:
            processes = {"few": one, "many": other}
            for process in processes.values():
                process.start()
                await process.ready(300)
            for round_ in range(run.rounds):
                run.say(f"round {round_ + 1} of {run.rounds}")
                for name in turned(list(took), round_):
                    took[name].append(await _scrape(client, str(processes[name].admin), run.sizes.scrapes))
            for process in processes.values():
                await process.stopped()
    for folder in folders.values():
        run.drop(folder)
    row.add(f"{many} runs / {_FEW} runs", ratios(took["many"], took["few"]), at_most(1.1))
    row.add(f"with {many} runs", [value * 1e3 for value in took["many"]], unit="ms")
    return row


async def _scrape(client: httpx.AsyncClient, address: str, count: int) -> float:
    took = []
    for _ in range(count):
        began = time.perf_counter()
        answer = await client.get(f"http://{address}/metrics")
        took.append(time.perf_counter() - began)
        answer.raise_for_status()
    return statistics.median(took)
