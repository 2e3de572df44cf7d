"""Rows 3 and 9: what an event costs, and what it takes on disk, once there is much history."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

from benchmarks.figures import Row, at_most, ratios
from benchmarks.histories import BATCH, Histories, grow, lane
from benchmarks.material import Material
from benchmarks.places import Run, turned
from sidecar.indexing import Indexing
from support.bench import Bench

_SINGLES_AT_ONCE = 10


async def growth(run: Run, wanted: set[str], histories: Histories) -> list[Row]:
    """Rows 3, 9."""
    sizes = run.sizes
    await histories.all([(events, runs) for events in sizes.history for runs in sizes.history_runs])
    made = []
    if "3" in wanted:
        made.append(await _cost(run, histories))
    if "9" in wanted:
        made.append(await _disk(run, histories))
    return made


async def _cost(run: Run, histories: Histories) -> Row:
    sizes = run.sizes
    row = Row(
        "3",
        "cost per event as history grows",
        "Intake.take to commit, in process on a real store (no broker), with a long history against one of "
        f"{sizes.history_small} events beside it, which is made anew for each round; batch by batch in turn, so "
        "that a busy moment meets all of them. The histories were stored by the same intake; every run that is "
        "measured is in memory before",
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
        for events in sizes.history:
            folder = await stack.enter_async_context(histories.lent(events, runs))
            lanes[events] = await stack.enter_async_context(lane(folder))
            await _warmed(lanes[events], material, runs)
        for round_ in range(run.rounds):
            run.say(f"round {round_ + 1} of {run.rounds}: {runs} runs")
            folder = run.folder("small")
            async with lane(folder / "data") as small:
                # Made anew: what the rounds before have added would make it a longer history each time.
                lanes[sizes.history_small] = small
                await grow(small, material, sizes.history_small)
                await _warmed(small, material, runs)
                for way, pieces, piece, batch in (
                    ("batch", sizes.batches, BATCH, BATCH),
                    ("single", -(-sizes.singles // _SINGLES_AT_ONCE), _SINGLES_AT_ONCE, 1),
                ):
                    spent = dict.fromkeys(histories_of, 0.0)
                    for turn in range(pieces):
                        for events in turned(histories_of, round_ + turn):
                            spent[events] += await _take(lanes[events], material, piece, batch)
                    for events in histories_of:
                        costs[way, events].append(spent[events] / (pieces * piece))
            run.drop(folder)
    return costs


async def _warmed(made: Bench, material: Material, runs: int) -> None:
    """Every run hot, every statement prepared."""
    await grow(made, material, made.desk.cursor.stream_seq + max(runs, 2 * BATCH))


async def _take(made: Bench, material: Material, count: int, batch: int) -> float:
    """Seconds for the next ``count`` events."""
    batches = list(material.batches(made.desk.cursor.stream_seq, count, batch))
    began = time.perf_counter()
    for deliveries in batches:
        await made.intake.take(deliveries)
    return time.perf_counter() - began


async def _disk(run: Run, histories: Histories) -> Row:
    sizes = run.sizes
    row = Row(
        "9",
        "disk against the raw bytes of the events",
        "size of the database with its log after the histories of row 3 were stored, over the bytes of the "
        "payloads; then of the shortest of one run once all of it is searchable, as after a compaction that "
        "covers everything (a second copy of the text, and its index)",
        sizes={"history": run.sizes.history, "runs": run.sizes.history_runs},
    )
    for (events, runs), told in sorted(histories.made.items()):
        share = told["bytes"] / told["raw"]
        row.add(f"{_short(events)} events, {runs} run{'s' * (runs > 1)}", [share], at_most(1.6))
    events = sizes.history[0]
    run.say(f"search rows of {events} events")
    async with histories.lent(events, 1) as folder, lane(folder) as made:
        await Indexing(made.desk).catch_up(Material(1).run(0), events)
        share = made.store.size_bytes / histories.made[events, 1]["raw"]
    row.add(f"{_short(events)} events, 1 run, all of it searchable", [share], at_most(1.6))
    return row


def _short(events: int) -> str:
    for size, letter in ((1_000_000, "M"), (1_000, "k")):
        if events >= size and events % size == 0:
            return f"{events // size}{letter}"
    return str(events)
