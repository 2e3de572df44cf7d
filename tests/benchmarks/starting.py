"""Rows 5 and 11: from the start of the process to the work being done, with a backlog and with much on disk."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.figures import Row, at_most, ratios
from benchmarks.histories import Histories, adopt_stream
from benchmarks.load import fill
from benchmarks.material import Material
from benchmarks.places import Run, begin_stream_at, broker, copied, daemon, prepared, pump, turned

_BEFORE = 1_000
_WAIT = 300.0


async def starting(run: Run, wanted: set[str], histories: Histories) -> list[Row]:
    """Rows 5, 11."""
    made = []
    if "5" in wanted:
        made.append(await _backlog(run))
    if "11" in wanted:
        made.append(await _first_event(run, histories))
    return made


async def _backlog(run: Run) -> Row:
    backlog, runs = run.sizes.backlog, run.sizes.runs
    row = Row(
        "5",
        "a backlog after a restart against the bare pump",
        "from the start of the process to the commit of the backlog's last message: the daemon, which was "
        f"stopped after {_BEFORE} messages, on its disk; against the bare pump of row 1 from message "
        f"{_BEFORE + 1} on, on the same broker",
        sizes={"backlog": backlog, "runs": runs},
    )
    source = await prepared(run, f"backlog-{backlog}", lambda folder: _stopped(folder, backlog, runs))
    whole: dict[str, list[float]] = {"daemon": [], "bare": []}
    reading: dict[str, list[float]] = {"daemon": [], "bare": []}
    for round_ in range(run.rounds):
        folder = run.folder("backlog")
        for part in ("nats", "data"):
            copied(source / part, folder / part)
        async with broker(folder) as server:
            for kind in turned(["daemon", "bare"], round_):
                run.say(f"round {round_ + 1} of {run.rounds}: {kind}")
                child = (
                    daemon(server.url, folder)
                    if kind == "daemon"
                    else pump("bare", server.url, folder, start=str(_BEFORE + 1))
                )
                async with child:
                    # After the daemon's own first message its sequences are one further.
                    told = await child.ask("wait", sequence=_BEFORE + 1 + backlog, seconds=_WAIT)
                whole[kind].append(told["ended"] - child.began)
                reading[kind].append(told["seconds"] / told["events"])
        run.drop(folder)
    row.add("start to last commit, daemon / bare pump", ratios(whole["daemon"], whole["bare"]), at_most(1.25))
    row.add("first to last commit, daemon / bare pump", ratios(reading["daemon"], reading["bare"]))
    row.add("start to last commit, daemon", whole["daemon"], unit="s")
    row.add("start to last commit, bare pump", whole["bare"], unit="s")
    return row


async def _stopped(folder: Path, backlog: int, runs: int) -> None:
    """A lane that was served, released and then written to."""
    material = Material(runs)
    async with broker(folder) as server:
        async with daemon(server.url, folder) as child:
            # First the daemon, so that its one record lies before the messages.
            await child.ask("ready", seconds=60)
            fill(server.url, "WK_IN", material, 0, _BEFORE)
            await child.ask("wait", sequence=_BEFORE + 1, seconds=60)
            await child.stop()
        last = fill(server.url, "WK_IN", material, _BEFORE, backlog)
        if last != _BEFORE + 1 + backlog:
            raise RuntimeError(f"the stream is at {last}")


async def _first_event(run: Run, histories: Histories) -> Row:
    events, runs = run.sizes.history[-1], run.sizes.runs
    row = Row(
        "11",
        "start to the first event committed, with much on disk",
        "from the start of the process to the commit of a message that waits in the stream, by the daemon's "
        "process on a data directory that holds the history, against one that holds nothing; stopped cleanly "
        "between",
        sizes={"history": events, "runs": runs},
    )
    took: dict[str, list[float]] = {"much": [], "none": []}
    folders = {"much": run.folder("start-much"), "none": run.folder("start-none")}
    shutil.copytree(await histories.get(events, runs), folders["much"] / "data")
    async with broker(folders["much"]) as much, broker(folders["none"]) as none:
        adopt_stream(folders["much"] / "data", await begin_stream_at(much.url, events + 1))
        urls, material = {"much": much.url, "none": none.url}, Material(runs)
        sent = {"much": events, "none": 0}
        for kind, url in urls.items():
            async with daemon(url, folders[kind]) as child:
                await child.ask("ready", seconds=_WAIT)
                await child.stop()
        for round_ in range(run.rounds):
            for kind in turned(["much", "none"], round_):
                run.say(f"round {round_ + 1} of {run.rounds}: {kind}")
                last = fill(urls[kind], "WK_IN", material, sent[kind], 1)
                sent[kind] += 1
                async with daemon(urls[kind], folders[kind]) as child:
                    told = await child.ask("wait", sequence=last, seconds=_WAIT)
                    took[kind].append(told["ended"] - child.began)
                    await child.ask("ready", seconds=_WAIT)
                    await child.stop()
    for folder in folders.values():
        run.drop(folder)
    row.add("start to first commit, much / none", ratios(took["much"], took["none"]), at_most(1.2))
    row.add("start to first commit, much", took["much"], unit="s")
    row.add("start to first commit, none", took["none"], unit="s")
    return row
