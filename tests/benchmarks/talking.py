"""A child process that is told what to do, one JSON line at a time, and answers each with one line.

The parent's side is ``Child``, the child's ``serve``. Clocks are comparable: both read the system's monotonic
clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

Json = dict[str, Any]
TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
_LINE = 64 * 1024 * 1024


def environment() -> dict[str, str]:
    """The parent's, with this package to be found and no setting of the person who measures.

    Modules are compiled once, as those of an installed package and of the image are.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WATCHKEEPER_")}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    path = os.pathsep.join([str(TESTS), str(ROOT)])
    return {**kept, "PYTHONPATH": path, "PYTHONPYCACHEPREFIX": _bytecode().name}


@cache
def _bytecode() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="wk-bench-bytecode-")


class Child:
    """``python -m module arguments``. ``began`` is the moment before it was started."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        python: Path | None = None,
        script: Path | None = None,
        log: Path | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        what = ["-m", module] if script is None else [str(script)]
        self._command = [str(python or sys.executable), *what, *arguments]
        self._log = log
        self._extra = dict(extra or {})
        self._process: asyncio.subprocess.Process | None = None
        self._asking = asyncio.Lock()
        self.began = 0.0

    async def __aenter__(self) -> Child:
        with contextlib.ExitStack() as stack:
            noise = subprocess.DEVNULL if self._log is None else stack.enter_context(self._log.open("wb"))
            self.began = time.monotonic()
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=noise,
                env={**environment(), **self._extra},
                limit=_LINE,
            )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def ask(self, do: str, **more: Any) -> Json:
        """Tell it to do something and wait for its answer. Raises RuntimeError if it ends instead."""
        assert self._process is not None
        assert self._process.stdin is not None
        async with self._asking:
            self._process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
            await self._process.stdin.drain()
            return await self.line()

    async def line(self) -> Json:
        """The next line it prints."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            said = "" if self._log is None else self._log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"{' '.join(self._command)} ended with {await self._process.wait()}\n{said}")
        answer: Json = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{' '.join(self._command)}: {answer['error']}")
        return answer

    async def stop(self, seconds: float = 30.0) -> int:
        """Tell it to end by SIGTERM; its exit code."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self._process.wait(), seconds)

    async def kill(self) -> None:
        """End it at once."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


async def serve(act: Callable[[Json], Awaitable[Json]]) -> None:
    """In the child: answer each line of standard input by what ``act`` returns, until it ends."""
    reader = asyncio.StreamReader(limit=_LINE)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        say(await act(json.loads(line)))


def say(value: Json) -> None:
    """One line for the parent."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def cpu_seconds() -> float:
    """What this process has used of the processors so far."""
    return time.process_time()


def resident_mib(pid: int | str = "self") -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


class Marks:
    """When how far was committed: (monotonic time, stream sequence), in order."""

    def __init__(self) -> None:
        self.taken: list[tuple[float, int]] = []
        self.first: tuple[float, int, float] | None = None
        """Time, sequence and processor seconds of the first mark."""
        self._moved = asyncio.Event()

    def mark(self, sequence: int) -> None:
        now = time.monotonic()
        self.taken.append((now, sequence))
        if self.first is None:
            self.first = (now, sequence, cpu_seconds())
        self._moved.set()

    async def wait(self, sequence: int, seconds: float) -> Json:
        """Until this sequence is committed: since the first mark, how many, how long, at what cost."""
        async with asyncio.timeout(seconds):
            while not self.taken or self.taken[-1][1] < sequence:
                self._moved.clear()
                await self._moved.wait()
        assert self.first is not None
        ended, last = next(mark for mark in self.taken if mark[1] >= sequence)
        began, first, cpu = self.first
        return {
            "events": last - first,
            "seconds": ended - began,
            "cpu": cpu_seconds() - cpu,
            "began": began,
            "ended": ended,
        }

    def drain(self) -> Json:
        """What was marked since the last time."""
        taken, self.taken = self.taken, self.taken[-1:]
        return {"marks": taken}
