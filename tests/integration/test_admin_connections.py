"""The admin port beside connections that ask nothing: silent, half open, dripping, not reading. Probes go through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx
import pytest

from sidecar import admin
from sidecar.health import Health
from sidecar.metrics import Metrics

pytestmark = pytest.mark.anyio

Open = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def served() -> AsyncIterator[tuple[str, int]]:
    app = admin.build(Health(), Metrics(lanes=["main"]), list)
    async with anyio.create_task_group() as tasks:
        address: str = await tasks.start(admin.serve, app, "127.0.0.1:0")
        host, _, port = address.rpartition(":")
        yield host, int(port)
        tasks.cancel_scope.cancel()


async def probe(at: tuple[str, int]) -> int:
    async with httpx.AsyncClient(base_url=f"http://{at[0]}:{at[1]}", timeout=30) as client:
        return (await client.get("/healthz")).status_code


async def closed(connection: Open) -> bytes:
    """What still comes, once the other end has closed."""
    reader, writer = connection
    with anyio.fail_after(60):
        try:
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


async def test_the_probes_answer_beside_any_number_of_idle_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admin, "_MOST_CONNECTIONS", 20)
    monkeypatch.setattr(admin, "_MOST_REQUESTS", 40)
    async with served() as at:
        held: list[Open] = []
        for number in range(60):
            held.append(await asyncio.open_connection(*at))
            if number % 2:
                held[-1][1].write(b"GET /met")
            if not number % 20:
                assert await probe(at) == 200
        assert await probe(at) == 200
        # The eldest had to go, the newest are still there.
        assert await closed(held[0]) == b""
        held[-1][1].write(b"rics HTTP/1.1\r\nHost: x\r\n\r\n")
        with anyio.fail_after(60):
            assert (await held[-1][0].readline()).startswith(b"HTTP/1.1 200")
        for _, writer in held:
            writer.close()


async def test_a_connection_without_a_whole_request_in_time_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admin, "_HEAD_SECONDS", 0.3)
    async with served() as at:
        silent = await asyncio.open_connection(*at)
        half = await asyncio.open_connection(*at)
        half[1].write(b"GET /healthz HTTP/1.1\r\nHost: ")
        dripping = await asyncio.open_connection(*at)
        served_once = await asyncio.open_connection(*at)
        served_once[1].write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")

        async def drip() -> None:
            dripping[1].write(b"GET /healthz HTTP/1.1\r\nX: ")
            while True:
                dripping[1].write(b"y")
                await anyio.sleep(0.02)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drip)
            assert await closed(dripping) == b""
            tasks.cancel_scope.cancel()
        assert await closed(silent) == b""
        assert await closed(half) == b""
        # Between two requests it is the same.
        assert b"alive" in await closed(served_once)
        assert await probe(at) == 200


async def test_who_asks_on_is_served_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "_ANSWER_SECONDS", 30.0)
    async with served() as at, httpx.AsyncClient(base_url=f"http://{at[0]}:{at[1]}", timeout=30) as client:
        for _ in range(20):
            assert (await client.get("/startupz")).status_code == 503
            assert (await client.get("/metrics")).status_code == 200
