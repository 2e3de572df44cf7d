"""Row 8: a fresh packet after much history, and beside the latest state of an agent framework's store."""

from __future__ import annotations

import statistics
import time
from contextlib import AsyncExitStack

from benchmarks.figures import Row, at_least, at_most, percentile, ratios
from benchmarks.histories import Histories, grow, lane
from benchmarks.material import Material
from benchmarks.peers import opened
from benchmarks.places import Run, turned
from support.bench import Bench

_PEER = "langgraph-default"
_GETS = 7


async def packets(run: Run, wanted: set[str], histories: Histories) -> list[Row]:
    """Row 8."""
    sizes = run.sizes
    small, large = sizes.history_small, sizes.history[0]
    steps = 3_000 if 3_000 in sizes.steps else sizes.steps[-1]
    row = Row(
        "8",
        "a fresh packet after much history",
        "ask.packet to its encoded reply, in process (no broker), p99 of the asks of a round; against "
        f"AsyncSqliteSaver.aget_tuple of the newest checkpoint after {steps} steps (median of a round, in "
        "process too)",
        sizes={"history": [small, large], "asks of a round": sizes.packets, "peer's steps": steps},
    )
    tails: dict[str, list[float]] = {"small": [], "large": [], "plain": []}
    middles: dict[str, list[float]] = {"small": [], "large": [], "plain": []}
    gets: list[float] = []
    async with AsyncExitStack() as stack:
        folder = run.folder("packets")
        there = await stack.enter_async_context(opened(run, (_PEER,), folder, row))
        if _PEER in there:
            run.say(f"filling {_PEER} to {steps} steps")
            await there[_PEER].ask("fill", steps=steps)
        lanes: dict[str, Bench] = {}
        lanes["small"] = await stack.enter_async_context(lane(folder / "data"))
        await grow(lanes["small"], Material(1), small)
        for name in ("large", "plain"):
            data = await stack.enter_async_context(histories.lent(large, 1, plain=name == "plain"))
            lanes[name] = await stack.enter_async_context(lane(data))
        for made in lanes.values():
            await _ask(made, 3)
        for round_ in range(run.rounds):
            run.say(f"round {round_ + 1} of {run.rounds}")
            for name in turned(list(tails), round_):
                seconds = await _ask(lanes[name], sizes.packets)
                tails[name].append(percentile(seconds, 0.99))
                middles[name].append(statistics.median(seconds))
            if _PEER in there:
                gets.append(statistics.median((await there[_PEER].ask("get", count=_GETS))["seconds"]))
    run.drop(folder)
    row.add(f"p99, {large} / {small} events", ratios(tails["large"], tails["small"]), at_most(1.2))
    row.add(f"p99, {large} / {small} events, no items in its history", ratios(tails["plain"], tails["small"]))
    if gets:
        row.add(
            f"{_PEER} get at {steps} steps / packet at {large} events",
            ratios(gets, middles["large"]),
            at_least(10),
        )
    row.add(f"p50 at {large} events", [value * 1e3 for value in middles["large"]], unit="ms")
    row.add(f"p50 at {small} events", [value * 1e3 for value in middles["small"]], unit="ms")
    row.add(f"p99 at {large} events", [value * 1e3 for value in tails["large"]], unit="ms")
    return [row]


async def _ask(made: Bench, count: int) -> list[float]:
    run, took = Material(1).run(0), []
    for _ in range(count):
        began = time.perf_counter()
        answer = await made.responder.answer(run, "packet", b"{}")
        took.append(time.perf_counter() - began)
        assert answer is not None
        assert answer.error is None
    return took
