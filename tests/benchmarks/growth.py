"""Rows 3 and 9: what an event costs, and what it takes on disk, once there is much history."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

from benchmarks.figures import Row, at_most, ratios
from benchmarks.histories import BATCH, Histories, grow, lane
from benchmarks.material import Material
from benchmarks.places import Run, turned
from support.bench import Bench


async def growth(run: Run, wanted: set[str], histories: Histories) -> list[Row]:
    """Rows 3, 9."""
    sizes = run.sizes
    await histories.all([(events, runs) for events in sizes.history for runs in sizes.history_runs])
    made = []
    if "3" in wanted:
        made.append(await _cost(run, histories))
    if "9" in wanted:
        made.append(_disk(run, histories))
    return made


async def _cost(run: Run, histories: Histories) -> Row:
    sizes = run.sizes
    row = Row(
        "3",
        "cost per event as history grows",
        "Intake.take to commit, in process on a real store (no broker), with a long history against one of "
        f"{sizes.history_small} events beside it; the histories were stored by the same intake",
        sizes={
            "history": [sizes.history_small, *sizes.history],
            "runs": sizes.history_runs,
            "batch": BATCH,
            "batches a round": sizes.batches,
            "single events a round": sizes.singles,
        },
    )
    for runs in sizes.history_runs:
        costs = await _of_runs(run, histories, runs)
        for way in ("batch", "single"):
            for events in sizes.history:
                row.add(
                    f"{_short(events)} / {_short(sizes.history_small)}, {runs} run{'s' * (runs > 1)}, {way}",
                    ratios(costs[way, events], costs[way, sizes.history_small]),
                    at_most(1.10),
                )
            row.add(
                f"{runs} run{'s' * (runs > 1)}, {way}, at {_short(sizes.history_small)}",
                [cost * 1e6 for cost in costs[way, sizes.history_small]],
                unit="us/event",
            )
    return row


async def _of_runs(run: Run, histories: Histories, runs: int) -> dict[tuple[str, int], list[float]]:
    sizes = run.sizes
    material = Material(runs)
    histories_of = [sizes.history_small, *sizes.history]
    costs: dict[tuple[str, int], list[float]] = {
        (w, e): [] for w in ("batch", "single") for e in histories_of
    }
    async with AsyncExitStack() as stack:
        lanes: dict[int, Bench] = {}
        for events in histories_of:
            if events == sizes.history_small:
                folder = run.folder("small") / "data"
                lanes[events] = await stack.enter_async_context(lane(folder))
                await grow(lanes[events], material, events)
            else:
                folder = await stack.enter_async_context(histories.lent(events, runs))
                lanes[events] = await stack.enter_async_context(lane(folder))
            # Every run hot, every statement prepared.
            await grow(lanes[events], material, lanes[events].desk.cursor.stream_seq + max(runs, 2 * BATCH))
        for round_ in range(run.rounds):
            run.say(f"round {round_ + 1} of {run.rounds}: {runs} runs")
            for events in turned(histories_of, round_):
                made = lanes[events]
                costs["batch", events].append(await _take(made, material, sizes.batches * BATCH, BATCH))
                costs["single", events].append(await _take(made, material, sizes.singles, 1))
    return costs


async def _take(made: Bench, material: Material, count: int, batch: int) -> float:
    """Seconds per event for the next ``count`` events."""
    batches = list(material.batches(made.desk.cursor.stream_seq, count, batch))
    began = time.perf_counter()
    for deliveries in batches:
        await made.intake.take(deliveries)
    return (time.perf_counter() - began) / count


def _disk(run: Run, histories: Histories) -> Row:
    row = Row(
        "9",
        "disk against the raw bytes of the events",
        "size of the database with its log after the histories of row 3 were stored, over the bytes of the "
        "payloads; search rows are made at compaction and are not in it",
        sizes={"history": run.sizes.history, "runs": run.sizes.history_runs},
    )
    for (events, runs), told in sorted(histories.made.items()):
        share = told["bytes"] / told["raw"]
        row.add(f"{_short(events)} events, {runs} run{'s' * (runs > 1)}", [share], at_most(1.6))
    return row


def _short(events: int) -> str:
    for size, letter in ((1_000_000, "M"), (1_000, "k")):
        if events >= size and events % size == 0:
            return f"{events // size}{letter}"
    return str(events)
