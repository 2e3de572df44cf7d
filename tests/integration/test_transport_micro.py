"""Questions over the wire: answered by their lane, after every reconnect, and found by the usual tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from sidecar.transport.errors import NoResponders, TimedOut
from sidecar.transport.jetstream import Link
from sidecar.transport.micro import AskAnswer, Handler, serve_asks
from support.links import linked
from support.nats_server import NatsServer

pytestmark = pytest.mark.anyio


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as running:
        yield running


async def echo(run: str, verb: str, payload: bytes) -> AskAnswer | None:
    if verb == "status":
        return None
    if verb == "fetch":
        return AskAnswer(b'{"error":{"code":"run_unknown","message":"no"}}', 404, "run_unknown")
    return AskAnswer(f"{run}/{verb}/".encode() + payload)


@asynccontextmanager
async def served(
    server: NatsServer, handler: Handler = echo, **options: Any
) -> AsyncIterator[tuple[Link, Link]]:
    """(the asker's link, the sidecar's link)"""
    async with linked(server.url) as ours, linked(server.url) as asker, anyio.create_task_group() as group:

        async def run(*, task_status: Any) -> None:
            await serve_asks(ours, "t", "l", handler, task_status=task_status, **options)

        await group.start(run)
        # The subscription is at the server once an answer of it comes back.
        await ours.api("INFO")
        yield asker, ours
        group.cancel_scope.cancel()


async def test_answers_errors_and_silence(server: NatsServer) -> None:
    async with served(server) as (asker, _):
        reply = await asker.request("wk.v1.ask.t.l.run-1.packet", b"hello")
        assert (reply.payload, dict(reply.headers)) == (b"run-1/packet/hello", {})
        refused = await asker.request("wk.v1.ask.t.l.run-1.fetch", b"")
        assert refused.headers["Nats-Service-Error-Code"] == "404"
        assert refused.headers["Nats-Service-Error"] == "run_unknown"
        assert json.loads(refused.payload)["error"]["code"] == "run_unknown"
        with pytest.raises(TimedOut):
            await asker.request("wk.v1.ask.t.l.run-1.status", b"", timeout=0.2)


async def test_an_answer_over_the_limit_becomes_an_error(server: NatsServer) -> None:
    async def huge(run: str, verb: str, payload: bytes) -> AskAnswer | None:
        return AskAnswer(b"x" * (2 * 1024 * 1024))

    async with served(server, huge) as (asker, ours):
        reply = await asker.request("wk.v1.ask.t.l.r.packet", b"")
        assert json.loads(reply.payload)["error"]["code"] == "too_large"
        assert reply.headers["Nats-Service-Error-Code"] == "413"
        assert ours.generation == 1


async def test_every_owner_hears_every_question(server: NatsServer) -> None:
    """No queue group: a watcher that stays silent must not swallow the owner's question."""

    async def silent(run: str, verb: str, payload: bytes) -> AskAnswer | None:
        return None

    async with served(server) as (asker, _), served(server, silent):
        for number in range(30):
            reply = await asker.request("wk.v1.ask.t.l.r.packet", str(number).encode())
            assert reply.payload == f"r/packet/{number}".encode()


async def test_answers_again_after_the_broker_was_killed(server: NatsServer) -> None:
    async with served(server) as (asker, ours):
        server.restart()
        with anyio.fail_after(30):
            await ours.wait_connected(1)
            await asker.wait_connected(1)
            while True:
                try:
                    reply = await asker.request("wk.v1.ask.t.l.r.packet", b"", timeout=1)
                    break
                except NoResponders:
                    await anyio.sleep(0.02)
        assert reply.payload == b"r/packet/"


async def test_questions_run_beside_each_other_within_a_bound(server: NatsServer) -> None:
    running = 0
    most = 0
    release = anyio.Event()

    async def slow(run: str, verb: str, payload: bytes) -> AskAnswer | None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            release.set()
        await release.wait()
        running -= 1
        return AskAnswer(payload)

    async with served(server, slow, concurrency=3) as (asker, _):
        answers: list[bytes] = []

        async def ask(number: int) -> None:
            answers.append((await asker.request("wk.v1.ask.t.l.r.packet", b"%d" % number)).payload)

        async with anyio.create_task_group() as group:
            for number in range(12):
                group.start_soon(ask, number)
        assert sorted(answers) == sorted(b"%d" % number for number in range(12))
        assert most == 3


async def test_too_many_questions_are_answered_unavailable(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.transport.micro._QUEUED", 1)
    release = anyio.Event()

    async def slow(run: str, verb: str, payload: bytes) -> AskAnswer | None:
        await release.wait()
        return AskAnswer(b"done")

    async with served(server, slow, concurrency=1) as (asker, _):
        answers: list[bytes] = []

        async def ask() -> None:
            answers.append((await asker.request("wk.v1.ask.t.l.r.packet", b"", timeout=20)).payload)
            if len(answers) == 3:
                release.set()

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(ask)
        assert answers.count(b"done") == 2
        assert sum(b"unavailable" in answer for answer in answers) == 3


async def test_discovery(server: NatsServer) -> None:
    async with served(server) as (asker, _):
        await asker.request("wk.v1.ask.t.l.r.packet", b"")
        await asker.request("wk.v1.ask.t.l.r.fetch", b"")
        ping = json.loads((await asker.request("$SRV.PING", b"")).payload)
        assert ping["type"] == "io.nats.micro.v1.ping_response"
        assert ping["name"] == "watchkeeper"
        assert ping["metadata"] == {"tenant": "t", "lane": "l"}
        info = json.loads((await asker.request("$SRV.INFO.watchkeeper", b"")).payload)
        assert info["endpoints"][0]["subject"] == "wk.v1.ask.t.l.*.*"
        stats = json.loads((await asker.request(f"$SRV.STATS.watchkeeper.{ping['id']}", b"")).payload)
        assert stats["endpoints"][0]["num_requests"] == 2
        assert stats["endpoints"][0]["num_errors"] == 1
        assert stats["started"].endswith("Z")
