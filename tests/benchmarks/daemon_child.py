"""The whole daemon in a process of its own, as ``watchkeeper run`` composes it, with marks at its commits.

Nothing of the daemon is replaced. Each commit that moves the cursor is noted once it is over; a probe of the
event loop runs only when it is asked for. Settings come from the environment, as always.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import time
from typing import Any

import anyio

from benchmarks.talking import Json, Marks, cpu_seconds, resident_mib, say, serve
from sidecar import logs, memory
from sidecar.app import Daemon
from sidecar.config import load_config
from sidecar.desk import Desk
from sidecar.memory import collect_seldom
from storage.records import Cursor

_PROBE_SECONDS = 0.001


class Watch:
    """What is told of one daemon."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.marks = Marks()
        self.late: list[float] = []
        """How much later than asked the loop woke the probe, seconds."""
        self.held: list[float] = []
        """Processor seconds of the loop's thread that one callback took, where it was a millisecond or more."""
        self.worst = ""
        """Where the task of the longest one went on waiting, or what it was."""
        self._probe: asyncio.Task[None] | None = None
        self._seen: Desk | None = None

    @property
    def desk(self) -> Desk | None:
        return self.daemon.lanes[0].desk if self.daemon.lanes else None

    async def follow(self) -> None:
        """Mark the commits of the lane's desk, and of the one after it."""
        while True:
            desk = self.desk
            if desk is not None and desk is not self._seen:
                self._seen = desk
                self._mark(desk)
            await anyio.sleep(0.001 if desk is None else 0.2)

    def _mark(self, desk: Desk) -> None:
        commit = desk.commit

        async def marked(*, cursor: Cursor | None = None, **more: Any) -> None:
            await commit(cursor=cursor, **more)
            if cursor is not None:
                self.marks.mark(cursor.stream_seq)

        desk.commit = marked  # type: ignore[method-assign,assignment]

    async def act(self, message: Json) -> Json:
        match message["do"]:
            case "wait":
                return await self.marks.wait(message["sequence"], message["seconds"])
            case "marks":
                return self.marks.drain()
            case "ready":
                return await self._ready(message["seconds"])
            case "cost":
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                return {"cpu": cpu_seconds(), "rss_mib": resident_mib(), "peak_mib": peak}
            case "counts":
                return await self._counts()
            case "probe":
                if self._probe is None:
                    self._probe = asyncio.create_task(self._look())
                    self._time_callbacks()
                self.late, self.held, self.worst = [], [], ""
                return {}
            case "late":
                return {"late": self.late, "held": self.held, "worst": self.worst}
            case "running":
                return self._running()
        raise ValueError(message["do"])

    async def _ready(self, seconds: float) -> Json:
        async with asyncio.timeout(seconds):
            while self.desk is None or not (self.desk.caught_up and self.daemon.health.ready().ready):
                await anyio.sleep(0.01)
        return {"address": self.daemon.listening, "cursor": self.desk.cursor.stream_seq}

    async def _counts(self) -> Json:
        assert self.desk is not None
        found = await self.desk.store.counts()
        return {
            "entries": found.entries,
            "runs": found.runs,
            "hot": len(self.desk.runs.hot),
            "outbox": found.outbox,
            "cursor": self.desk.cursor.stream_seq,
            "bytes": self.desk.store.size_bytes,
        }

    def _running(self) -> Json:
        """What there is of everything that could grow. Blocks: objects of the interpreter, whatever the system
        holds for them; heap: bytes the C library's allocator has handed out, the database's caches among them;
        spare: what it keeps although it is free."""
        # Nobody waits for these here.
        self.marks.drain()
        lane, (handed_out, spare) = self.desk, memory.allocated()
        return {
            "hot": 0 if lane is None else len(lane.runs.hot),
            "tasks": len(asyncio.all_tasks()),
            "blocks": sys.getallocatedblocks(),
            "heap_bytes": handed_out,
            "spare_bytes": spare,
        }

    def _time_callbacks(self) -> None:
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            began = time.thread_time()
            try:
                run(handle)
            finally:
                took = time.thread_time() - began
                if took >= 0.001:
                    if took > max(self.held, default=0.0):
                        self.worst = _after(handle)
                    self.held.append(took)

        asyncio.Handle._run = timed  # type: ignore[method-assign]

    async def _look(self) -> None:
        while True:
            due = time.monotonic() + _PROBE_SECONDS
            await asyncio.sleep(_PROBE_SECONDS)
            self.late.append(max(0.0, time.monotonic() - due))


def _after(handle: Any) -> str:
    """Where the task that a callback went on with waits now: the innermost line of the daemon's own."""
    task = getattr(handle._callback, "__self__", None)
    coroutine: Any = task.get_coro() if isinstance(task, asyncio.Task) else None
    found = repr(handle._callback)[:80]
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        file = frame.f_code.co_filename
        if any(f"/{package}/" in file for package in ("sidecar", "storage", "nats")):
            found = f"{'/'.join(file.split('/')[-2:])}:{frame.f_lineno}"
        coroutine = coroutine.cr_await
    return found


async def main() -> None:
    config = load_config(None, os.environ, {})
    logs.configure(config.logs.level, config.logs.format)
    daemon = Daemon(config)
    # As the command does.
    collect_seldom()
    watch = Watch(daemon)
    work = asyncio.create_task(daemon.run())
    follow = asyncio.create_task(watch.follow())
    asked = asyncio.create_task(serve(watch.act))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, daemon.stop.set)
    done, _ = await asyncio.wait([work, asked], return_when=asyncio.FIRST_COMPLETED)
    if asked in done and (error := asked.exception()) is not None:
        say({"error": repr(error)})
    follow.cancel()
    daemon.stop.set()
    await work
    asked.cancel()


if __name__ == "__main__":
    asyncio.run(main())
    sys.exit(0)
