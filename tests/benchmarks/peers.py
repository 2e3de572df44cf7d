"""Row 6: one durable step beside the stores that agent frameworks bring along, at growing history.

All in process, no broker on any side. Each peer lives in a child of its own under the interpreter that has it;
a peer that is not installed is named as missing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import anyio

from benchmarks.figures import Aim, Row, at_least, ratios
from benchmarks.histories import grow, lane
from benchmarks.material import Material
from benchmarks.places import Run, turned
from benchmarks.talking import Child, Json
from support.bench import Bench

PEERS = (
    "langgraph-default",
    "langgraph-delta",
    "SQLiteSession",
    "AsyncSQLiteSession",
    "AdvancedSQLiteSession",
    "SqliteSessionService",
    "DatabaseSessionService",
)


def peer(run: Run, kind: str, folder: Path) -> Child:
    return Child(
        "",
        kind,
        str(folder),
        python=run.peers,
        script=Path(__file__).with_name("peer_child.py"),
        log=folder / f"{kind}.log",
        extra={"PYTHONPATH": "", "LANGSMITH_TRACING": "false"},
    )


@asynccontextmanager
async def opened(run: Run, kinds: tuple[str, ...], folder: Path, row: Row) -> AsyncIterator[dict[str, Child]]:
    """The peers that are there; the others are named in the row."""
    async with AsyncExitStack() as stack:
        there: dict[str, Child] = {}
        versions: Json = {}
        for kind in kinds:
            try:
                child = await stack.enter_async_context(peer(run, kind, folder))
                told = await child.line()
            except (RuntimeError, OSError) as error:
                told = {"missing": str(error).strip().splitlines()[-1]}
            if "missing" in told:
                row.missing.append(f"{kind}: {told['missing']}")
            else:
                there[kind], versions[kind] = child, told["version"]
                row.sizes["peers run under"] = told["under"]
        row.sizes["versions"] = versions
        yield there


async def peers(run: Run, wanted: set[str]) -> list[Row]:
    """Row 6."""
    sizes = run.sizes
    row = Row(
        "6",
        "one durable step against frameworks' own stores",
        "Intake.take of one event to commit, FULL, in process on a real store (no broker), against one step of "
        "each peer in process on its own SQLite file with its own settings. langgraph-default: "
        "AsyncSqliteSaver.aput of a checkpoint that holds the whole list; langgraph-delta: aput_writes of the new "
        "message and aput of a checkpoint without the list, what its delta channel writes at least; sessions: "
        "add_items of one item; ADK: append_event. A peer keeps a list, not a ledger: this compares what a step "
        "costs, not what it gives",
        sizes={"steps": sizes.steps, "steps of a round": sizes.step_window, "bytes each": 1024},
    )
    folder = run.folder("peers")
    found: dict[tuple[str, int], list[float]] = {}
    material = Material(1)
    async with lane(folder / "data") as ours, opened(run, PEERS, folder, row) as there:
        for steps in sizes.steps:
            run.say(f"filling to {steps} steps")
            await grow(ours, material, steps)
            # Beside each other: nothing is measured meanwhile, and some can only be filled step by step.
            async with anyio.create_task_group() as tasks:
                for child in there.values():
                    tasks.start_soon(partial(child.ask, "fill", steps=steps))
            for round_ in range(run.rounds):
                run.say(f"step {steps}, round {round_ + 1} of {run.rounds}")
                for kind in turned(["ours", *there], round_):
                    seconds = (
                        await _ours(ours, material, sizes.step_window)
                        if kind == "ours"
                        else (await there[kind].ask("steps", count=sizes.step_window))["seconds"]
                    )
                    found.setdefault((kind, steps), []).append(statistics.median(seconds))
    run.drop(folder)
    for (kind, steps), costs in found.items():
        if kind != "ours":
            row.add(f"{kind} / ours, step {steps}", ratios(costs, found["ours", steps]), _aim(kind, steps))
    for steps in sizes.steps:
        row.add(f"ours, step {steps}", [1 / cost for cost in found["ours", steps]], unit="steps/s")
    return [row]


def _aim(kind: str, steps: int) -> Aim | None:
    match kind:
        case "langgraph-default":
            return {1_000: at_least(20), 3_000: at_least(60)}.get(steps)
        case "langgraph-delta":
            return at_least(2)
        case "SQLiteSession":
            return at_least(1.1)
        case "SqliteSessionService" | "DatabaseSessionService":
            return at_least(5)
    return None


async def _ours(made: Bench, material: Material, count: int) -> list[float]:
    took = []
    for delivery in material.deliveries(made.desk.cursor.stream_seq, count):
        began = time.perf_counter()
        await made.intake.take([delivery])
        took.append(time.perf_counter() - began)
    return took
