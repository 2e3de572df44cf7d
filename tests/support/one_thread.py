"""A daemon's parts on one thread and a clock that jumps: what threads and time would do, done at once.

The database is the real one and every statement is executed; only the thread it would run on is the event
loop's. In its place each hop gives way a few times, by a seed: other tasks run in between as they would beside
a thread, and the same seed gives the same course. When nothing is left to do, the clock is put forward to the
next timer, so that nobody waits. What is digested twice is digested once.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import sqlite3
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import aiosqlite
import anyio
import anyio.to_thread
import pytest
import structlog

from protocol import codec

_MOST_TURNS = 3
_REMEMBERED = 4_096

_canonical = codec.canonical
_forms: dict[bytes, bytes] = {}


class _Jump(selectors.DefaultSelector):  # type: ignore[valid-type, misc]
    """Never waits; what it would have waited for is added to the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        # There are no sockets to look at, and no other thread that would call.
        if timeout is None:
            raise RuntimeError("every task waits for another, and no timer runs")
        self.now += timeout
        return []


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose time is what its timers say."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


class _Inline:
    """In the place of the driver's connection: work is done where it is asked for."""

    def __init__(self, raw: sqlite3.Connection, turns: random.Random) -> None:
        self._conn = raw
        self._turns = turns
        self._tx = self
        """What is posted comes here as well."""

    def put_nowait(self, asked: tuple[None, Callable[[], None]]) -> None:
        """Do it some turns from now; it answers by itself."""
        self._in_turn(int(self._turns.random() * _MOST_TURNS), asked[1])

    def _in_turn(self, turns: int, work: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        if turns:
            loop.call_soon(self._in_turn, turns - 1, work)
        else:
            loop.call_soon(work)

    def __await__(self) -> Generator[Any, None, _Inline]:
        """It is connected from the beginning."""
        yield from ()
        return self

    async def _execute(self, work: Callable[[], Any]) -> Any:
        await _give_way(self._turns)
        try:
            return work()
        finally:
            await _give_way(self._turns)

    async def close(self) -> None:
        self._conn.close()


async def _give_way(turns: random.Random) -> None:
    for _ in range(int(turns.random() * _MOST_TURNS)):
        await asyncio.sleep(0)


def _remembered(value: Any) -> bytes:
    told = codec.encode(value)
    form = _forms.get(told)
    if form is None:
        if len(_forms) >= _REMEMBERED:
            _forms.clear()
        form = _forms[told] = _canonical(value)
    return form


@contextmanager
def one_thread(seed: int) -> Iterator[None]:
    """Until the end of the block every database opened, and every piece of work sent to a thread, runs so."""
    turns = random.Random(seed)

    def connect(name: str, **options: Any) -> _Inline:
        return _Inline(sqlite3.connect(name, **options), turns)

    async def inline(work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        await _give_way(turns)
        return work(*args)

    with pytest.MonkeyPatch.context() as patch, structlog.testing.capture_logs():
        patch.setattr(aiosqlite, "connect", connect)
        patch.setattr(anyio.to_thread, "run_sync", inline)
        patch.setattr(codec, "canonical", _remembered)
        yield


def run(work: Callable[..., Awaitable[Any]], *args: Any, seed: int = 0) -> Any:
    """As ``anyio.run``, on one thread, with the turns of this seed."""
    with one_thread(seed):
        return anyio.run(work, *args, backend_options={"loop_factory": _Loop})
