"""A way to a broker that takes its time: so many bytes a second pass in each direction, or none while it is held.

It changes and loses nothing; what waits in it is bounded, so that both ends feel it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
from anyio.abc import ByteStream, SocketAttribute

_PIECE = 16_384


class SlowWay:
    """``port`` is where to connect to instead of the broker."""

    def __init__(self, there: int, bytes_per_second: float, delay: float) -> None:
        self._there = there
        self._seconds_per_byte = 1 / bytes_per_second
        self._delay = delay
        self._free = anyio.Event()
        self._free.set()
        self.port = 0

    def hold(self) -> None:
        """Let nothing pass until ``release``; the connections stay."""
        self._free = anyio.Event()

    def release(self) -> None:
        self._free.set()

    async def serve(self, here: ByteStream) -> None:
        """One connection, until either end closes it."""
        async with (
            here,
            await anyio.connect_tcp("127.0.0.1", self._there) as there,
            anyio.create_task_group() as tasks,
        ):

            async def carry(source: ByteStream, sink: ByteStream) -> None:
                with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                    while True:
                        piece = await source.receive(_PIECE)
                        await anyio.sleep(self._delay + len(piece) * self._seconds_per_byte)
                        await self._free.wait()
                        await sink.send(piece)
                tasks.cancel_scope.cancel()

            tasks.start_soon(carry, here, there)
            tasks.start_soon(carry, there, here)


@asynccontextmanager
async def slow_way(port: int, *, bytes_per_second: float = 1e9, delay: float = 0.0) -> AsyncIterator[SlowWay]:
    """To the broker on ``port``; every piece comes ``delay`` seconds later."""
    way = SlowWay(port, bytes_per_second, delay)
    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as tasks,
    ):
        way.port = listener.extra(SocketAttribute.local_port)
        tasks.start_soon(listener.serve, way.serve)
        yield way
        tasks.cancel_scope.cancel()
