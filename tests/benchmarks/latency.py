"""Rows 4 and 14: how long after its publication a message is committed, at a steady rate.

A process of its own publishes by the clock; the moment a message was due is its beginning, so that a sender
held up by a slow reader hides nothing. Daemon and bare pump live on one broker, each with a stream of its own,
and are measured in turn.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import nats

from benchmarks.figures import Row, at_least, at_most, percentile, ratios
from benchmarks.load import Wire, fill
from benchmarks.material import LANE, TENANT, Material
from benchmarks.places import Run, add_stream, broker, daemon, pump, turned
from benchmarks.talking import Child, Json

_BARE = "BARE"
_BARE_SUBJECT = "bare.events.event"
_SEARCHES_A_SECOND = 50
_WAIT = 900.0
_LEAST_MESSAGES = 600
"""Of a round at full size: a 99th percentile of fewer is one message's accident."""


@dataclass
class Target:
    """Who reads, from which stream, and how many messages of the material it was sent."""

    child: Child
    stream: str
    subject: str | None
    sent: int = 0
    latencies: list[float] = field(default_factory=list)


async def latency(run: Run, wanted: set[str]) -> list[Row]:
    """Rows 4, 14."""
    made = []
    if "4" in wanted:
        made.append(await _steady(run))
    if "14" in wanted:
        made.append(await _searched(run))
    return made


@asynccontextmanager
async def _both(run: Run) -> AsyncIterator[tuple[str, dict[str, Target]]]:
    folder = run.folder("latency")
    async with broker(folder) as server:
        await add_stream(server.url, _BARE, "bare.>")
        bare = pump("bare", server.url, folder, stream=_BARE, subject=_BARE_SUBJECT)
        async with daemon(server.url, folder) as keeper, bare:
            await keeper.ask("ready", seconds=60)
            yield (
                server.url,
                {
                    "daemon": Target(keeper, "WK_IN", None),
                    "bare": Target(bare, _BARE, _BARE_SUBJECT),
                },
            )
    run.drop(folder)


async def _steady(run: Run) -> Row:
    sizes = run.sizes
    row = Row(
        "4",
        "publish to commit against the bare pump",
        "from the moment a message was due at the sender to the end of the commit that holds it, daemon caught "
        "up (packets are made) and bare pump on one broker, in turn; the sender is a process of its own that "
        "speaks to the broker over a plain socket",
        sizes={
            "rates": sizes.rates,
            "seconds of a round": f"{sizes.rate_seconds:g}, and {_LEAST_MESSAGES} messages at least",
            "runs": sizes.runs,
            "held": f"{sizes.hold_rate}/s for {sizes.hold_seconds:g} s",
        },
    )
    found: dict[tuple[str, int, float], list[float]] = {}
    async with _both(run) as (url, targets):
        for target in targets.values():
            await _at_rate(url, target, run.sizes.runs, 200.0, 200)
        for round_ in range(run.rounds):
            for rate in sizes.rates:
                for name in turned(list(targets), round_):
                    run.say(f"round {round_ + 1} of {run.rounds}: {name} at {rate}/s")
                    least = _LEAST_MESSAGES if sizes.name == "full" else 50
                    count = max(least, int(rate * sizes.rate_seconds))
                    seen = await _at_rate(url, targets[name], sizes.runs, rate, count)
                    for share in (0.50, 0.99):
                        found.setdefault((name, rate, share), []).append(percentile(seen, share))
    for rate in sizes.rates:
        for share, aim in ((0.50, 1.3), (0.99, 2.0)):
            ours, theirs = found["daemon", rate, share], found["bare", rate, share]
            row.add(f"p{share * 100:.0f} at {rate}/s, daemon / bare pump", ratios(ours, theirs), at_most(aim))
    for rate in sizes.rates:
        for share in (0.50, 0.99):
            for name in ("daemon", "bare"):
                milliseconds = [value * 1e3 for value in found[name, rate, share]]
                row.add(f"p{share * 100:.0f} at {rate}/s, {name}", milliseconds, unit="ms")
    await _held(run, row)
    return row


async def _at_rate(url: str, target: Target, runs: int, rate: float, count: int) -> list[float]:
    """Seconds from due to committed of each of the next ``count`` messages."""
    await target.child.ask("marks")
    wire = Wire(url)
    before = wire.last(target.stream)
    wire.close()
    load = Child(
        "benchmarks.load", url, "--first", str(target.sent), "--count", str(count), "--hz", str(rate),
        "--runs", str(runs), *(["--subject", target.subject] if target.subject else []),
    )  # fmt: skip
    async with load:
        told = await load.line()
    target.sent += count
    await target.child.ask("wait", sequence=before + count, seconds=_WAIT)
    marks = (await target.child.ask("marks"))["marks"]
    return _lags(marks, told["began"], rate, before, count)


def _lags(
    marks: Sequence[Sequence[float]], began: float, rate: float, before: int, count: int
) -> list[float]:
    """By the commits' moments and sequences: how long after it was due each message was committed."""
    lags: list[float] = []
    for moment, sequence in marks:
        through = min(count, int(sequence) - before)
        lags.extend(moment - (began + i / rate) for i in range(len(lags), through))
    return lags


async def _held(run: Run, row: Row) -> None:
    """A high rate held: everything arrives, and nothing piles up."""
    sizes = run.sizes
    folder = run.folder("held")
    count = int(sizes.hold_rate * sizes.hold_seconds)
    run.say(f"{sizes.hold_rate}/s for {sizes.hold_seconds:g} s")
    async with broker(folder) as server, daemon(server.url, folder) as keeper:
        await keeper.ask("ready", seconds=60)
        target = Target(keeper, "WK_IN", None)
        lags = await _at_rate(server.url, target, sizes.runs, float(sizes.hold_rate), count)
        counts = await keeper.ask("counts")
        cost = await keeper.ask("cost")
    run.drop(folder)
    tenth = max(1, count // 10)
    row.add(
        f"messages lost at {sizes.hold_rate}/s", [float(count - counts["entries"])], at_most(0), "messages"
    )
    row.add("the last message's way, held", [lags[-1]], at_most(1.0), "s")
    row.add("p99 of the last tenth, held", [percentile(lags[-tenth:], 0.99) * 1e3], unit="ms")
    row.add("longest way, held", [max(lags) * 1e3], unit="ms")
    row.add("largest memory of the daemon, held", [cost["peak_mib"]], unit="MiB")


# --- with questions ---------------------------------------------------------------------------------------


async def _searched(run: Run) -> Row:
    sizes = run.sizes
    rate, history = 500, min(20_000, sizes.history[0])
    count = max(50, int(rate * sizes.search_seconds))
    row = Row(
        "14",
        "intake while evidence is searched",
        f"as row 4 at {rate}/s, with {_SEARCHES_A_SECOND} ask.search a second over the broker (one run of "
        "the history, words that occur everywhere and words that do not) against none",
        sizes={"history": history, "events a round": count, "searches a second": _SEARCHES_A_SECOND},
    )
    quiet: dict[float, list[float]] = {0.5: [], 0.99: []}
    busy: dict[float, list[float]] = {0.5: [], 0.99: []}
    answered: list[float] = []
    folder = run.folder("searched")
    async with broker(folder) as server:
        fill(server.url, "WK_IN", Material(sizes.runs), 0, history)
        async with daemon(server.url, folder) as keeper:
            await keeper.ask("ready", seconds=120)
            target = Target(keeper, "WK_IN", None, sent=history)
            await _at_rate(server.url, target, sizes.runs, rate, 100)
            for round_ in range(run.rounds):
                for searched in turned([False, True], round_):
                    run.say(f"round {round_ + 1} of {run.rounds}: {'searched' if searched else 'quiet'}")
                    async with _searching(server.url, searched, answered):
                        seen = await _at_rate(server.url, target, sizes.runs, rate, count)
                    for share, into in (busy if searched else quiet).items():
                        into.append(percentile(seen, share))
    run.drop(folder)
    row.add("p99 of intake, searched / not", ratios(busy[0.99], quiet[0.99]))
    row.add("p50 of intake, searched / not", ratios(busy[0.5], quiet[0.5]))
    row.add("p99 of intake, searched", [value * 1e3 for value in busy[0.99]], unit="ms")
    row.add("p50 of an answer", [percentile(answered, 0.5) * 1e3], unit="ms")
    row.add("p99 of an answer", [percentile(answered, 0.99) * 1e3], unit="ms")
    row.add("answers", [float(len(answered))], at_least(1), "answers")
    return row


@asynccontextmanager
async def _searching(url: str, searched: bool, answered: list[float]) -> AsyncIterator[None]:
    if not searched:
        yield
        return
    client = await nats.connect(url)
    material = Material(50)
    queries = ("harbour pump", "retry limit memory", "part_3.py", '"go on with part 19"', "nowhere")

    async def one(number: int) -> None:
        subject = f"wk.v1.ask.{TENANT}.{LANE}.{material.run(number % 5)}.search"
        began = anyio.current_time()
        body: Json = {"query": queries[number % len(queries)], "limit": 10}
        await client.request(subject, json.dumps(body).encode(), timeout=30)
        answered.append(anyio.current_time() - began)

    async def steadily() -> None:
        number = 0
        begun = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            while True:
                tasks.start_soon(one, number)
                number += 1
                await anyio.sleep(max(0.0, begun + number / _SEARCHES_A_SECOND - anyio.current_time()))

    task = asyncio.create_task(steadily())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        await client.close()
