"""Row 15: how long the event loop is held: by a large event, the compaction of a very long run, a large packet.

Each callback of the daemon's event loop is timed by the processor time of the loop's thread, so that neither
other threads nor the machine count. Beside it a probe asks to be woken every millisecond and notes how much
later it was, whatever the cause.
"""

from __future__ import annotations

import asyncio
import json

import nats

from benchmarks.figures import Row, at_most, percentile
from benchmarks.histories import Histories, adopt_stream
from benchmarks.load import Wire, frame
from benchmarks.material import LANE, TENANT, Material
from benchmarks.places import Run, begin_stream_at, broker, copied, daemon
from benchmarks.talking import Child, Json

_MOST_MS = 20.0
_ITEMS = 400
"""Constraints, decisions and questions of the run whose packet is at its limit."""
_WAIT = 900.0


async def loop_lag(run: Run, wanted: set[str], histories: Histories) -> list[Row]:
    """Row 15."""
    sizes = run.sizes
    row = Row(
        "15",
        "the event loop while something large happens",
        "the longest synchronous work on the loop of the daemon's process (processor time of one callback), and "
        "how late a 1 ms timer there is, over the broker: while it is idle, while large events come, while a "
        "run's whole history is compacted, while packets at their limit are asked for",
        sizes={
            "large event": sizes.large_event,
            "long run": sizes.long_run,
            "items of the large packet": _ITEMS,
        },
    )
    await _large_events(run, row)
    await _long_run(run, row, histories)
    row.notes.append(
        "a timer is late for the sake of threads as well: one keeps the interpreter for 5 ms at a time"
    )
    return [row]


def _add(row: Row, name: str, *told: Json) -> None:
    """What was told, once a round; one with less than a millisecond in a piece tells of none."""
    longest = [max(part["held"], default=0.0) * 1e3 for part in told]
    row.add(f"longest work {name}", longest, at_most(_MOST_MS), "ms")
    worst = told[longest.index(max(longest))]["worst"]
    if worst:
        row.notes.append(f"longest work {name}: just before {worst}")
    late = [part["late"] for part in told]
    row.add(f"timer's lateness {name}, p99", [percentile(part, 0.99) * 1e3 for part in late], unit="ms")
    row.add(f"timer's lateness {name}, longest", [max(part, default=0.0) * 1e3 for part in late], unit="ms")


async def _probed(child: Child) -> Json:
    return await child.ask("late")


async def _large_events(run: Run, row: Row) -> None:
    size = run.sizes.large_event
    room = size + 1024 * 1024
    folder = run.folder("large")
    settings = {"INTAKE__MAX_EVENT_BYTES": str(room)}
    async with (
        broker(folder, f"max_payload: {room}\n") as server,
        daemon(server.url, folder, **settings) as child,
    ):
        await child.ask("ready", seconds=60)
        await child.ask("probe")
        run.say("idle")
        await asyncio.sleep(2.0 if run.sizes.name == "full" else 0.1)
        _add(row, "while idle", await _probed(child))
        wire = Wire(server.url)
        material = Material(1)
        wire.send(frame(material.subject(0), material.payload(0)))
        told: list[Json] = []
        for round_ in range(run.rounds):
            run.say(f"an event of {size} bytes, {round_ + 1} of {run.rounds}")
            await child.ask("probe")
            body = {"v": 1, "id": f"large-{round_}", "type": "tool.returned", "at": "2026-11-30T10:00:00Z"}
            body |= {"call_id": f"large-{round_}", "status": "ok", "content": material.words(round_, 10_000)}
            body["content"] *= size // 10_000
            wire.send(frame(material.subject(0), json.dumps(body).encode()))
            wire.flush()
            await child.ask("wait", sequence=wire.last("WK_IN"), seconds=60)
            await asyncio.sleep(0.2)
            told.append(await _probed(child))
        _add(row, f"at an event of {size / 1_048_576:g} MiB", *told)
        await _large_packet(run, row, child, server.url, wire)
        wire.close()
    run.drop(folder)


async def _large_packet(run: Run, row: Row, child: Child, url: str, wire: Wire) -> None:
    """A run whose protected part is about as large as a packet may be."""
    subject = f"wk.v1.in.{TENANT}.{LANE}.crowded.event"
    material = Material(1)
    first = json.loads(material.payload(0))
    told: list[Json] = [first | {"id": "crowded-0", "seq": 1}]
    for n in range(_ITEMS):
        kind = ("constraint.set", "decision.made", "question.opened")[n % 3]
        body: Json = {"v": 1, "id": f"crowded-{n + 1}", "type": kind, "at": "2026-11-30T10:00:00Z"}
        match kind:
            case "constraint.set":
                body |= {"constraint_id": f"c-{n + 10}", "text": material.words(n, 60), "source": "user"}
            case "decision.made":
                body |= {"decision_id": f"d-{n}", "summary": material.words(n, 60)}
            case _:
                body |= {"question_id": f"q-{n}", "text": material.words(n, 60)}
        told.append(body | {"session": "s1", "seq": n + 2})
    wire.send(b"".join(frame(subject, json.dumps(body).encode()) for body in told))
    wire.flush()
    await child.ask("wait", sequence=wire.last("WK_IN"), seconds=60)
    client = await nats.connect(url, max_reconnect_attempts=0)
    size, looked = 0, []
    for round_ in range(run.rounds):
        run.say(f"packets at their limit, {round_ + 1} of {run.rounds}")
        await child.ask("probe")
        for _ in range(4):
            answer = await client.request(f"wk.v1.ask.{TENANT}.{LANE}.crowded.packet", b"{}", timeout=30)
            size = len(answer.data)
        looked.append(await _probed(child))
    row.sizes["bytes of the large packet"] = size
    _add(row, "while large packets are asked for", *looked)
    await client.close()


async def _long_run(run: Run, row: Row, histories: Histories) -> None:
    """A run that was never compacted is, all at once."""
    events = run.sizes.long_run
    folder = run.folder("long")
    copied(await histories.get(events, 1), folder / "data")
    async with broker(folder) as server:
        adopt_stream(folder / "data", await begin_stream_at(server.url, events + 1))
        async with daemon(server.url, folder) as child:
            await child.ask("ready", seconds=_WAIT)
            client = await nats.connect(server.url)
            run.say(f"compaction of {events} messages")
            await child.ask("probe")
            took = await _compacted(client, Material(1).run(0))
            late = await _probed(child)
            cost = await child.ask("cost")
            await client.close()
    run.drop(folder)
    _add(row, f"while {events} messages are compacted", late)
    row.add(f"that compaction of {events} messages", [took], unit="s")
    row.add("largest memory of the daemon meanwhile", [cost["peak_mib"]], unit="MiB")


async def _compacted(client: nats.aio.client.Client, run: str) -> float:
    """Ask for a compaction over the broker; seconds until its receipt was published."""
    box = await client.subscribe(f"wk.v1.out.{TENANT}.{LANE}.{run}.receipt")
    began = asyncio.get_running_loop().time()
    answer = await client.request(f"wk.v1.ask.{TENANT}.{LANE}.{run}.compact", b"{}", timeout=_WAIT)
    told = json.loads(answer.data)
    if told.get("state") != "started":
        raise RuntimeError(f"no compaction of {run}: {told}")
    receipt = json.loads((await box.next_msg(timeout=_WAIT)).data)
    if receipt["outcome"] != "applied":
        raise RuntimeError(f"the compaction of {run} ended {receipt['outcome']}: {receipt['reason']}")
    return asyncio.get_running_loop().time() - began
