"""Row 7: a compaction of the same new material after a short and after a long history, and what it costs intake."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio

from benchmarks.conversation import Conversation
from benchmarks.figures import Row, at_least, at_most, ratios
from benchmarks.histories import BATCH, Histories, grow, lane
from benchmarks.material import Material
from benchmarks.places import Run, turned
from sidecar.relay import Relay
from support.bench import Bench, settled

_QUIET_SECONDS = 0.5
_NEVER_REBUILT = {"SUMMARIZER__REBUILD_EVERY": "0"}


class Outlet:
    """Where the publisher and the bucket stand: notes when a packet that shortened the context was handed over.

    What the broker would keep of the states is kept.
    """

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self._last: dict[str, bytes] = {}
        self._objects: dict[str, bytes] = {}

    async def publish(
        self, stream: str, subject: str, payload: bytes, msg_id: str, headers: Any = None
    ) -> None:
        await anyio.lowlevel.checkpoint()
        if stream == "state":
            self._last[subject] = payload
        elif subject.endswith(".packet") and b'"reason":"compacted"' in payload:
            self.left.set()

    async def get_last(self, subject: str) -> tuple[int, bytes] | None:
        await anyio.lowlevel.checkpoint()
        return (1, self._last[subject]) if subject in self._last else None

    async def put(self, name: str, payload: bytes) -> None:
        await anyio.lowlevel.checkpoint()
        self._objects[name] = payload

    async def delete(self, name: str) -> None:
        await anyio.lowlevel.checkpoint()
        self._objects.pop(name, None)

    async def publish_rejected(self, subject: str, payload: bytes, msg_id: str) -> None:
        await anyio.lowlevel.checkpoint()


class Compacted:
    """One lane with one long run, whose covered history grows by the same turns each time."""

    def __init__(self, made: Bench, outlet: Outlet, run: str, turns: int) -> None:
        self.made, self.outlet, self.turns = made, outlet, turns
        self.talk = Conversation(made, run)

    async def more(self) -> None:
        """What will be compacted next."""
        await self.talk.tell(*self.talk.turns(self.turns))

    async def compact(self) -> float:
        """Ask for a compaction; seconds until its packet was handed to the publisher, receipt committed."""
        self.outlet.left.clear()
        began = time.perf_counter()
        answer = await self.made.ask(self.talk.run, "compact", reason="measured")
        if answer.get("state") != "started":
            raise RuntimeError(f"no compaction of {self.talk.run}: {answer}")
        async with asyncio.timeout(600):
            await self.outlet.left.wait()
        took = time.perf_counter() - began
        await settled(self.made)
        await self.talk.take_up()
        return took


@asynccontextmanager
async def compacted_lane(
    folder: Any, run: str, turns: int, history: Material, events: int
) -> AsyncIterator[Compacted]:
    """A lane with that history, its relay running; the history is not covered yet."""
    outlet: Any = Outlet()
    async with lane(folder, blobs=outlet, **_NEVER_REBUILT) as made:
        if made.desk.cursor.stream_seq < events:
            await grow(made, history, events)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Relay(made.desk, outlet, outlet, made.states.apart).run)
            tasks.start_soon(made.states.run)
            try:
                yield Compacted(made, outlet, run, turns)
            finally:
                tasks.cancel_scope.cancel()


async def compacting(run: Run, wanted: set[str], histories: Histories) -> list[Row]:
    """Row 7."""
    sizes = run.sizes
    small, large, turns = sizes.history_small, sizes.history[0], sizes.new_material
    row = Row(
        "7",
        "a whole compaction after much history",
        "ask.compact to the packet handed to the publisher (prepare, plan, digest, validate, commit, outbox; "
        "summarizer digest, no rebuilt layer), in process on a real store, one run whose history is covered but "
        f"for {turns} new turns; intake meanwhile: Intake.take of {sizes.runs} other runs of the same lane in the "
        "time of such a compaction against the time before it",
        sizes={"history": [small, large], "new turns": turns, "messages of a turn": 4},
    )
    took: dict[str, list[float]] = {"small": [], "large": [], "plain": []}
    first: dict[str, list[float]] = {"small": [], "large": [], "plain": []}
    meanwhile: list[float] = []
    async with AsyncExitStack() as stack:
        lanes: dict[str, Compacted] = {}
        for name in took:
            plain = name == "plain"
            if name == "small":
                folder = run.folder("compacted") / "data"
            else:
                folder = await stack.enter_async_context(histories.lent(large, 1, plain=plain))
            material = Material(1, items=not plain)
            lanes[name] = await stack.enter_async_context(
                compacted_lane(folder, material.run(0), turns, material, small if name == "small" else large)
            )
            run.say(f"first compaction: {name}")
            first[name].append(await lanes[name].compact())
        others = Material(sizes.runs, prefix="other")
        told = 0
        for round_ in range(run.rounds):
            for name in turned(list(took), round_):
                run.say(f"round {round_ + 1} of {run.rounds}: {name}")
                await lanes[name].more()
                took[name].append(await lanes[name].compact())
            run.say(f"round {round_ + 1} of {run.rounds}: intake meanwhile")
            await lanes["large"].more()
            share, told = await _meanwhile(lanes["large"], others, told)
            meanwhile.append(share)
    row.add(f"{large} / {small} events", ratios(took["large"], took["small"]), at_most(1.2))
    row.add(f"{large} / {small} events, no items in either's history", ratios(took["plain"], took["small"]))
    row.add("intake meanwhile / before", meanwhile, at_least(0.7))
    row.add(f"at {large} events", [value * 1e3 for value in took["large"]], unit="ms")
    row.add(f"at {small} events", [value * 1e3 for value in took["small"]], unit="ms")
    row.add(f"the first one of {large} events, everything at once", first["large"], unit="s")
    return [row]


async def _meanwhile(it: Compacted, others: Material, told: int) -> tuple[float, int]:
    """Rate of intake in the time of a compaction over the rate before it; how many were told so far."""
    made = it.made
    done = anyio.Event()

    async def feed(until: anyio.Event | None, seconds: float) -> float:
        nonlocal told
        count, spent, began = 0, 0.0, time.perf_counter()
        while time.perf_counter() - began < seconds and not (until is not None and until.is_set()):
            deliveries = others.deliveries(told, BATCH, made.desk.cursor.stream_seq + 1)
            at = time.perf_counter()
            await made.intake.take(deliveries)
            spent += time.perf_counter() - at
            told += BATCH
            count += BATCH
            await asyncio.sleep(0)
        return count / spent

    await feed(None, _QUIET_SECONDS / 4)
    before = await feed(None, _QUIET_SECONDS)
    async with anyio.create_task_group() as tasks:

        async def compact() -> None:
            await it.compact()
            done.set()

        tasks.start_soon(compact)
        while not made.compactor.running:
            await asyncio.sleep(0)
        during = await feed(done, 60.0)
    return during / before, told
