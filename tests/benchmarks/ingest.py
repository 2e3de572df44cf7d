"""Rows 1, 2 and 13: what a durable event costs beside the bare loop and beside the obvious build.

A backlog in one broker is read by each loop in a process of its own, one after the other, in changing order.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from benchmarks.figures import Row, at_least, at_most, ratios
from benchmarks.load import fill
from benchmarks.material import Material
from benchmarks.places import Run, broker, copied, daemon, prepared, pump, turned
from benchmarks.talking import Child, Json
from protocol.codec import decode_event
from sidecar.core.budget import BudgetSettings, observe
from sidecar.core.course import follow
from sidecar.view import View

_WAIT = 300.0
KINDS = ("daemon", "bare", "plain", "needed", "obvious")


async def ingest(run: Run, wanted: set[str]) -> list[Row]:
    """Rows 1, 2, 13."""
    count, runs = run.sizes.ingest, run.sizes.runs
    source = await prepared(run, f"ingest-{count}", lambda folder: _stored(folder, count, runs))
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cpu: dict[str, list[float]] = {kind: [] for kind in KINDS}
    live: dict[str, list[float]] = {"daemon": [], "bare": []}
    for round_ in range(run.rounds):
        folder = run.folder("ingest")
        copied(source / "nats", folder / "nats")
        async with broker(folder) as server:
            for kind in turned(list(KINDS), round_):
                run.say(f"round {round_ + 1} of {run.rounds}: {kind}")
                told = await _drained(kind, server.url, folder, count)
                rates[kind].append(told["events"] / told["seconds"])
                cpu[kind].append(told["cpu"] / told["events"])
        run.drop(folder)
        for kind in turned(["daemon", "bare"], round_):
            run.say(f"round {round_ + 1} of {run.rounds}: {kind}, caught up")
            live[kind].append(await _caught_up(run, kind, source, count))
    sizes = {"events": count, "runs": runs, "bytes each": 1024, "batch": 256}
    costs = _budget_costs(run)
    made = [
        _first(rates, cpu, live, sizes),
        _second(rates, sizes),
        _thirteenth(costs, rates["bare"], cpu["bare"], sizes),
    ]
    return [row for row in made if row.number in wanted]


async def _stored(folder: Path, count: int, runs: int) -> None:
    async with broker(folder) as server:
        fill(server.url, "WK_IN", Material(runs), 0, count)


async def _drained(kind: str, url: str, folder: Path, count: int) -> Json:
    child: Child = daemon(url, folder) if kind == "daemon" else pump(kind, url, folder)
    async with child:
        return await child.ask("wait", sequence=count, seconds=_WAIT)


async def _caught_up(run: Run, kind: str, source: Path, count: int) -> float:
    """Events a second of as many more that come while the process is held still, once it has read the first."""
    folder = run.folder("caught-up")
    copied(source / "nats", folder / "nats")
    async with (
        broker(folder) as server,
        daemon(server.url, folder) if kind == "daemon" else pump(kind, server.url, folder) as child,
    ):
        if kind == "daemon":
            await child.ask("ready", seconds=_WAIT)
        await child.ask("wait", sequence=count, seconds=_WAIT)
        os.kill(child.pid, signal.SIGSTOP)
        try:
            last = fill(server.url, "WK_IN", Material(run.sizes.runs), count, count)
        finally:
            resumed = time.monotonic()
            os.kill(child.pid, signal.SIGCONT)
        told = await child.ask("wait", sequence=last, seconds=_WAIT)
    run.drop(folder)
    return float(count / (told["ended"] - resumed))


def _first(
    rates: dict[str, list[float]], cpu: dict[str, list[float]], live: dict[str, list[float]], sizes: Json
) -> Row:
    row = Row(
        "1",
        "durable ingest against the bare pump",
        "stream to commit, by the daemon's process (decode, dedupe, redaction, ledger, budget, hash chain, "
        "metrics, one transaction, FULL) while it reads a backlog, from the opened consumer to the last commit; "
        "against a pull pump without acknowledgements that decodes and stores rows unique by (run, seq), FULL. Packets "
        "are not made before a backlog is read; `caught up` is as many events more, stored while the process "
        "was held still, with packets made meanwhile, from the moment it goes on",
        sizes=sizes,
    )
    row.add("rate, daemon / bare pump", ratios(rates["daemon"], rates["bare"]), at_least(0.80))
    row.add("rate caught up, daemon / bare pump", ratios(live["daemon"], live["bare"]), at_least(0.80))
    row.add("rate, daemon / bare pump without the unique index", ratios(rates["daemon"], rates["plain"]))
    row.add(
        "rate, bare pump with decoder, digests and secret scan / bare pump",
        ratios(rates["needed"], rates["bare"]),
    )
    row.add("processor time per event, daemon / bare pump", ratios(cpu["daemon"], cpu["bare"]))
    row.add("daemon", rates["daemon"], unit="events/s")
    row.add("bare pump", rates["bare"], unit="events/s")
    return row


def _second(rates: dict[str, list[float]], sizes: Json) -> Row:
    row = Row(
        "2",
        "durable ingest against the obvious build",
        "as row 1; against fetch(256) on a durable consumer, aiosqlite statement by statement, FULL, and an "
        "acknowledgement for each message, the same tables as the bare pump",
        sizes=sizes,
    )
    row.add("rate, daemon / obvious build", ratios(rates["daemon"], rates["obvious"]), at_least(2.0))
    row.add("obvious build", rates["obvious"], unit="events/s")
    return row


def _thirteenth(costs: list[float], rates: list[float], cpu: list[float], sizes: Json) -> Row:
    row = Row(
        "13",
        "budget and estimate as a share of the bare pump's time",
        "core.budget.observe (with the estimate) and core.course.follow for each event, in process, in processor "
        "time, over what one event took the bare pump of row 1",
        sizes=sizes,
    )
    shares = [cost * rate for cost, rate in zip(costs, rates, strict=True)]
    row.add("budget and estimate / bare pump's time per event", shares, at_most(0.10))
    row.add("budget and estimate / bare pump's processor time per event", ratios(costs, cpu))
    row.add("budget and estimate", [cost * 1e6 for cost in costs], unit="us/event")
    return row


def _budget_costs(run: Run) -> list[float]:
    """Seconds an event of the core's work on the figure, for the events of row 1, decoded before."""
    runs, count = run.sizes.runs, min(run.sizes.ingest, 10_000)
    material, settings = Material(runs), BudgetSettings()
    events = [
        (i % runs, i // runs + 1, decode_event(material.payload(i), run=material.run(i), channel="event"))
        for i in range(count)
    ]
    costs = []
    for _ in range(run.rounds):
        views = [View() for _ in range(runs)]
        began = time.process_time()
        for at, position, event in events:
            view = views[at]
            observed = observe(
                view.budget, event, position=position, current=True, late=False, settings=settings
            )
            follow(view.course, view.budget, observed, settings)
        costs.append((time.process_time() - began) / count)
    return costs
