"""The client while broker and daemon come and go: nothing lost, nothing out of order, nothing allowed in doubt."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import nats
import pytest

from protocol.client import NotAllowed, Permission, Run, Unsent, connect
from support.blackbox import stored
from support.daemon import DaemonProcess
from support.nats_server import NatsServer

pytestmark = pytest.mark.anyio

SETTINGS = {"LEASE__SECONDS": "1"}
MODEL = {"name": "m", "context_window": 100_000}


@asynccontextmanager
async def afloat(folder: Path) -> AsyncIterator[tuple[NatsServer, DaemonProcess]]:
    """A broker and a ready daemon."""
    with NatsServer() as server, DaemonProcess(server.url, folder, SETTINGS) as daemon:
        daemon.start()
        await daemon.owning()
        yield server, daemon


async def told(server: NatsServer, run: str) -> list[dict[str, Any]]:
    """What the stream holds of the agent, each event once, in the order it first came."""
    client = await nats.connect(server.url)
    try:
        lying = await stored(client.jetstream(), "WK_IN", f"wk.v1.in.default.main.{run}.event")
    finally:
        await client.close()
    first: dict[bytes, dict[str, Any]] = {}
    for _, payload, _ in lying:
        first.setdefault(payload, json.loads(payload))
    return list(first.values())


async def test_restarts_of_the_broker_lose_nothing_and_change_no_order(tmp_path: Path) -> None:
    async with afloat(tmp_path) as (server, daemon), connect(server.url, run="r", queue=8) as run:
        await run.run_started(goal="Count.", model=MODEL)
        counted = 0

        async def count() -> None:
            nonlocal counted
            for number in range(120):
                await run.message("user", str(number))
                counted += 1

        with anyio.fail_after(120):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(count)
                for after in (20, 60):
                    while counted < after:
                        await anyio.sleep(0.005)
                    await anyio.to_thread.run_sync(server.restart)
        bodies = await told(server, "r")
        assert [body["seq"] for body in bodies] == list(range(1, 122))
        assert [body["content"] for body in bodies[1:]] == [str(number) for number in range(120)]
        status = await run.status()
        assert (status.position, status.violations, status.gaps) == (121, {}, ())
        assert daemon.defects() == []


async def test_packets_are_heard_again_after_the_broker_was_away(tmp_path: Path) -> None:
    async with afloat(tmp_path) as (server, _), connect(server.url, run="r") as run:
        await run.run_started(goal="Wait.", model=MODEL)
        await run.next_packet()
        await anyio.to_thread.run_sync(server.restart)
        await run.question_opened(question_id="q", text="Heard?")
        with anyio.fail_after(60):
            while [item.id for item in (await run.next_packet()).questions] != ["q"]:
                pass


async def test_of_two_who_ask_one_may(tmp_path: Path) -> None:
    async with afloat(tmp_path) as (server, _), connect(server.url, run="r") as run:
        await run.run_started(goal="Once.", model=MODEL)
        await run.operation_declared(operation_id="op", kind="mail.send", idempotency_key="k")
        answers: list[Permission] = []

        async def ask(asking: Run) -> None:
            answers.append(await asking.authorize("op", after=run.newest))

        async with connect(server.url, run="r") as other, anyio.create_task_group() as tasks:
            for asking in (run, other, run, other):
                tasks.start_soon(ask, asking)
        assert sorted(answer.code for answer in answers) == ["in_flight"] * 3 + ["ok"]
        (granted,) = [answer for answer in answers if answer]
        # The same question again is the same answer, another one is not.
        assert await run.authorize("op", request_id=granted.request_id)
        assert (await run.authorize("op")).code == "in_flight"


async def test_a_daemon_killed_in_between_is_waited_for_and_nothing_is_done_twice(tmp_path: Path) -> None:
    async with afloat(tmp_path) as (server, daemon), connect(server.url, run="r", ask_seconds=60) as run:
        await run.run_started(goal="Once.", model=MODEL)
        done = 0

        async def act(number: int) -> None:
            nonlocal done
            async with run.effect("mail.send", f"mail-{number}"):
                done += 1

        await act(0)
        daemon.kill9()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(act, 1)
            await anyio.sleep(0.2)
            assert done == 1
            daemon.start()
        assert done == 2
        for number in (0, 1):
            with pytest.raises(NotAllowed) as refused:
                await act(number)
            assert refused.value.permission.code == "already_succeeded"
        daemon.kill9()
        with pytest.raises(NotAllowed) as refused:
            async with (
                connect(server.url, run="r", ask_seconds=0.3) as hasty,
                hasty.effect("mail.send", "mail-2"),
            ):
                done += 1
        assert refused.value.permission.code == "unavailable"
        assert done == 2


async def test_what_is_left_unsent_is_named(tmp_path: Path) -> None:
    with NatsServer() as server:

        async def leave() -> None:
            async with (
                connect(server.url, run="r", drain_seconds=0.2) as run,
                anyio.create_task_group() as tasks,
            ):
                # No daemon, so no stream: nobody takes it.
                tasks.start_soon(run.run_resumed)
                await anyio.wait_all_tasks_blocked()
                tasks.cancel_scope.cancel()

        with pytest.raises(Unsent) as left:
            await leave()
        assert len(left.value.event_ids) == 1
