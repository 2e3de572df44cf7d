"""Whether the daemon stays as it is: agents that talk, are compacted, take packets up and ask, for half an hour.

``make soak``, or ``PYTHONPATH=tests python -m benchmarks.soak --minutes 30 --out FILE``. Sampled every few
seconds: resident memory, what the interpreter and the allocator have handed out, the database and its log, open
files, threads, tasks, hot runs, the outbox. At the end each is judged flat or not, its last quarter against its
second; ``--publish`` keeps the report beside this file, for the page of the results.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nats

from benchmarks.machine import described
from benchmarks.material import LANE, TENANT, Material
from benchmarks.places import broker, daemon
from benchmarks.report import publish_soak
from benchmarks.talking import Child, resident_mib

Json = dict[str, Any]
WINDOW = 24_000
_AGENTS = 8
_TURNS = 150
"""After so many a run is finished and its agent begins another one."""
_AT = "2026-11-30T10:00:00.000Z"
_BOUNDS = (
    ("rss_mib", 1.05, 4.0),
    ("heap_mib", 1.05, 4.0),
    ("blocks", 1.05, 20_000.0),
    ("hot", 1.0, 20.0),
    ("outbox", 1.0, 50.0),
    ("wal_bytes", 1.25, 16 * 1024 * 1024),
    ("files", 1.0, 4.0),
    ("threads", 1.0, 2.0),
    ("tasks", 1.0, 8.0),
)
"""What is judged: by which share, and by how much beside it, the last quarter may be above the second."""


class Agent:
    """One agent, one run after the other: turns, usage as a provider would report it, packets taken up."""

    def __init__(self, client: Any, number: int, rate: float) -> None:
        self._client, self._number, self._pause = client, number, 1 / rate
        self._text = Material(1)
        self._lives = itertools.count(1)
        self.told = self.told_bytes = self.asked = self.taken_up = self.finished = 0

    async def live(self) -> None:
        while True:
            await self._life(f"agent-{self._number}-{next(self._lives)}")
            self.finished += 1

    async def _life(self, run: str) -> None:
        self._run, self._ids, self._context = run, itertools.count(1), 500
        heard = await self._client.subscribe(f"wk.v1.out.{TENANT}.{LANE}.{run}.packet")
        model = {"name": "m-1", "context_window": WINDOW, "max_output_tokens": 1_000}
        await self._tell("run.started", goal="keep the pumps running", model=model)
        for turn in range(_TURNS):
            await self._turn(turn)
            await self._take_up(heard)
            if turn % 10 == 9:
                await self._ask(turn)
        await self._tell("run.finished", outcome="succeeded")
        await heard.unsubscribe()

    async def _tell(self, type_: str, **fields: Any) -> None:
        number = next(self._ids)
        body = {
            "v": 1,
            "id": f"e-{number}",
            "type": type_,
            "at": _AT,
            "session": "s1",
            "seq": number,
            **fields,
        }
        payload = json.dumps(body).encode()
        await self._client.publish(f"wk.v1.in.{TENANT}.{LANE}.{self._run}.event", payload)
        self.told += 1
        self.told_bytes += len(payload)
        if type_ in ("message", "tool.called", "tool.returned"):
            self._context += len(payload) // 5
        await asyncio.sleep(self._pause)

    async def _turn(self, turn: int) -> None:
        call, name = f"c-{turn}", f"m-{turn}"
        await self._tell("message", role="user", content=self._text.words(turn, 200))
        await self._tell(
            "message", role="assistant", message_id=name, content=self._text.words(turn + 3, 600)
        )
        path = {"path": f"/src/part_{turn}.py"}
        await self._tell("tool.called", call_id=call, tool="read_file", arguments=path, message_id=name)
        await self._tell(
            "tool.returned", call_id=call, status="ok", content=self._text.words(turn + 9, 2_000)
        )
        await self._tell("usage.reported", model="m-1", context_tokens=self._context, output_tokens=150)
        if turn % 15 == 14:
            operation = {"operation_id": f"op-{turn}"}
            await self._tell(
                "operation.declared", kind="git.commit", idempotency_key=f"k-{turn}", **operation
            )
            await self._tell("operation.dispatched", **operation)
            await self._tell("operation.settled", state="succeeded", **operation)
            await self._tell("decision.made", decision_id=f"d-{turn}", summary=self._text.words(turn, 80))

    async def _take_up(self, heard: Any) -> None:
        newest: Json | None = None
        while heard.pending_msgs:
            packet = json.loads((await heard.next_msg(timeout=1)).data)
            if packet["reason"] in ("compacted", "trimmed"):
                newest = packet
        if newest is not None:
            self._context = newest["budget"]["used_after"]
            known = {"packet_id": newest["packet_id"], "ledger_version": newest["ledger_version"]}
            await self._tell("run.resumed", **known)
            self.taken_up += 1

    async def _ask(self, turn: int) -> None:
        for verb, body in (
            ("packet", {}),
            ("search", {"query": f"part_{turn - 5}.py", "limit": 5}),
            ("fetch", {"from": 1, "through": 20, "max_tokens": 2_000}),
            ("status", {}),
        ):
            subject = f"wk.v1.ask.{TENANT}.{LANE}.{self._run}.{verb}"
            await self._client.request(subject, json.dumps(body).encode(), timeout=30)
            self.asked += 1


async def sample(child: Child, data: Path, began: float, agents: Sequence[Agent]) -> Json:
    """How the daemon stands now."""
    counts, running = await child.ask("counts"), await child.ask("running")
    files = {name: (data / f"watchkeeper.db{end}") for name, end in (("db", ""), ("wal", "-wal"))}
    sizes = {f"{name}_bytes": path.stat().st_size if path.exists() else 0 for name, path in files.items()}
    process = Path(f"/proc/{child.pid}")
    return {
        "seconds": round(time.monotonic() - began, 1),
        "rss_mib": round(resident_mib(child.pid), 1),
        **sizes,
        "files": len(list((process / "fd").iterdir())),
        "threads": len(list((process / "task").iterdir())),
        "tasks": running["tasks"],
        "hot": running["hot"],
        "blocks": running["blocks"],
        "heap_mib": round(running["heap_bytes"] / 2**20, 1),
        "spare_mib": round(running["spare_bytes"] / 2**20, 1),
        "outbox": counts["outbox"],
        "events": counts["entries"],
        "told": sum(agent.told for agent in agents),
        "told_bytes": sum(agent.told_bytes for agent in agents),
        "asked": sum(agent.asked for agent in agents),
        "taken_up": sum(agent.taken_up for agent in agents),
        "finished": sum(agent.finished for agent in agents),
    }


def judged(samples: Sequence[Json]) -> Json:
    """Of each quantity whether the last quarter is no more than the second, within what is named."""
    quarter = max(1, len(samples) // 4)
    early, late = samples[quarter : 2 * quarter] or samples, samples[-quarter:]

    def of(part: Sequence[Json], key: str) -> float:
        return statistics.median(item[key] for item in part)

    def per_event(part: Sequence[Json]) -> float:
        grown = part[-1]["events"] - part[0]["events"]
        return (part[-1]["db_bytes"] - part[0]["db_bytes"]) / grown if grown else 0.0

    verdicts: Json = {}
    for key, share, more in _BOUNDS:
        before, after = of(early, key), of(late, key)
        verdicts[key] = {"second": before, "last": after, "flat": after <= before * share + more}
    before, after = per_event(early), per_event(late)
    verdicts["db_bytes_per_event"] = {"second": before, "last": after, "flat": after <= before * 1.25 + 64}
    last = samples[-1]
    verdicts["nothing_lost"] = {
        "told": last["told"],
        "stored": last["events"],
        "flat": last["events"] >= last["told"],
    }
    return verdicts


async def soak(minutes: float, out: Path, *, rate: float = 25.0, every: float = 5.0) -> Json:
    """Run it; ``rate`` is messages a second of each agent. The report, which is also written to ``out``."""
    samples: list[Json] = []
    with tempfile.TemporaryDirectory(prefix="wk-soak-") as name:
        folder = Path(name)
        async with broker(folder) as server, daemon(server.url, folder) as child:
            await child.ask("ready", seconds=60)
            client = await nats.connect(server.url, pending_size=16 * 1024 * 1024)
            agents = [Agent(client, number, rate) for number in range(_AGENTS)]
            began = time.monotonic()
            tasks = [asyncio.create_task(agent.live()) for agent in agents]
            while time.monotonic() - began < minutes * 60:
                await asyncio.sleep(min(every, minutes * 15))
                # An agent that failed must not look like a quiet one.
                for task in tasks:
                    if task.done():
                        task.result()
                samples.append(await sample(child, folder / "data", began, agents))
                _save(out, minutes, samples)
                print(json.dumps(samples[-1]), flush=True)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await client.flush()
            deadline = time.monotonic() + 30
            while True:
                # What was sent last is on its way.
                samples[-1] = await sample(child, folder / "data", began, agents)
                if samples[-1]["events"] >= samples[-1]["told"] or time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.1)
            await client.close()
            await child.stop(60)
    return _save(out, minutes, samples)


def _save(out: Path, minutes: float, samples: Sequence[Json]) -> Json:
    report = {
        "command": f"make soak MINUTES={minutes:g}",
        "agents": _AGENTS,
        "window": WINDOW,
        "machine": described(),
        "verdicts": judged(samples),
        "samples": list(samples),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    return report


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.soak")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=25.0, help="messages a second of each agent")
    parser.add_argument("--out", type=Path, default=Path(".benchmarks/soak.json"))
    parser.add_argument("--publish", action="store_true", help="keep the report for the page of the results")
    given = parser.parse_args(arguments)
    report = asyncio.run(soak(given.minutes, given.out, rate=given.rate))
    for name, verdict in report["verdicts"].items():
        print(f"{name}: {'flat' if verdict['flat'] else 'NOT FLAT'} {verdict}")
    if given.publish:
        publish_soak(report)
    return 0 if all(verdict["flat"] for verdict in report["verdicts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
