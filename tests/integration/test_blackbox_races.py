"""Two askers at the same instant, on connections of their own: one operation is allowed to exactly one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from functools import partial

import anyio
import pytest
from nats.aio.client import Client

from tests.support.blackbox import Box, Json, blackbox, event
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.anyio

RUNS = 20
OPERATIONS = 50
"""Of each run: a thousand in all."""
AT_ONCE = 4
"""Races of one run under way together."""
SHA = "sha256:" + "ab" * 32


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as started:
        yield started


@pytest.fixture(scope="module")
async def box(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Box]:
    settings = {"authority.approval_kinds": ["db.*"]}
    async with blackbox(server, tmp_path_factory.mktemp("races"), settings) as opened:
        yield opened


@pytest.fixture
async def askers(box: Box) -> AsyncIterator[tuple[Client, Client]]:
    async with AsyncExitStack() as stack:
        first, second = await box.connect(), await box.connect()
        stack.push_async_callback(first.close)
        stack.push_async_callback(second.close)
        yield first, second


async def publish(box: Box, run: str, *messages: tuple[Json, str]) -> None:
    """Without waiting for each: all but the last are stored before the last."""
    for message, channel in messages[:-1]:
        await box.client.publish(
            f"wk.v1.in.{box.tenant}.{box.lane}.{run}.{channel}", json.dumps(message).encode()
        )
    await box.send(run, *messages[-1])


def declared(number: int, *, approved: bool) -> list[tuple[Json, str]]:
    """An operation; with an approval for one use of it, where it is of a kind that needs one."""
    name = f"op-{number}"
    if not approved:
        return [(event("operation.declared", operation_id=name, kind="x", idempotency_key=name), "event")]
    what: Json = {"approval_id": f"ap-{number}", "action": "db.x", "payload_digest": SHA}
    return [
        (
            event(
                "operation.declared",
                operation_id=name,
                kind="db.x",
                idempotency_key=name,
                payload_digest=SHA,
            ),
            "event",
        ),
        (event("approval.requested", operation_id=name, **what), "event"),
        (event("approval.resolved", outcome="granted", by="ann", **what), "authority"),
    ]


async def race(box: Box, run: str, named: list[tuple[Client, str]]) -> list[Json]:
    """Everybody asks for the operation named, each with a request of its own; the answers, in their order."""
    answers: list[Json] = [{} for _ in named]

    async def ask(place: int, client: Client, operation: str) -> None:
        answer = await box.ask(
            run, "authorize", client, operation_id=operation, request_id=f"{operation}-{place}"
        )
        assert answer.status is None, answer
        answers[place] = answer.body

    async with anyio.create_task_group() as tasks:
        for place, (client, operation) in enumerate(named):
            tasks.start_soon(ask, place, client, operation)
    return answers


async def test_of_two_askers_at_once_exactly_one_may_a_thousand_times(
    box: Box, askers: tuple[Client, Client]
) -> None:
    won: Counter[int] = Counter()

    async def one(run: str, number: int) -> None:
        name = f"op-{number}"
        # Who asks first takes turns, so that the order of sending decides nothing.
        order = askers if number % 2 else askers[::-1]
        answers = await race(box, run, [(client, name) for client in order])
        told = sorted(answer["code"] for answer in answers)
        assert told == ["in_flight", "ok"], answers
        assert [answer["allowed"] for answer in answers] == [answer["code"] == "ok" for answer in answers]
        assert [answer["reserved"] for answer in answers] == [answer["allowed"] for answer in answers]
        won[[answer["allowed"] for answer in answers].index(True)] += 1

    async def of_run(place: int) -> None:
        run = await box.start()
        approved = place % 2 == 0
        told = [message for number in range(OPERATIONS) for message in declared(number, approved=approved)]
        await publish(box, run, *told)
        for first in range(0, OPERATIONS, AT_ONCE):
            async with anyio.create_task_group() as tasks:
                for number in range(first, min(first + AT_ONCE, OPERATIONS)):
                    tasks.start_soon(one, run, number)
        packet = await box.packet(run)
        assert {item["state"] for item in packet["operations"]} == {"pending"}
        assert len(packet["operations"]) == OPERATIONS
        assert packet["approvals"] == []
        assert (await box.status(run))["violations"].keys() <= {"repeated_operation"}

    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            for place in range(RUNS):
                tasks.start_soon(of_run, place)
    assert won.total() == RUNS * OPERATIONS


async def test_of_two_operations_with_one_key_asked_for_at_once_exactly_one_may(
    box: Box, askers: tuple[Client, Client]
) -> None:
    run = await box.start()
    told = [
        (
            event("operation.declared", operation_id=f"op-{number}-{side}", kind="x", idempotency_key=key),
            "event",
        )
        for number in range(100)
        for key in (f"key-{number}",)
        for side in "ab"
    ]
    await publish(box, run, *told)

    async def one(number: int) -> None:
        named = [(askers[0], f"op-{number}-a"), (askers[1], f"op-{number}-b")]
        answers = await race(box, run, named if number % 2 else named[::-1])
        assert sorted(answer["code"] for answer in answers) == ["in_flight", "ok"], answers

    for first in range(0, 100, AT_ONCE):
        async with anyio.create_task_group() as tasks:
            for number in range(first, first + AT_ONCE):
                tasks.start_soon(one, number)


async def test_of_two_operations_under_one_approval_asked_for_at_once_exactly_one_may(
    box: Box, askers: tuple[Client, Client]
) -> None:
    run = await box.start()
    for number in range(50):
        what: Json = {"approval_id": f"ap-{number}", "action": "db.x", "payload_digest": SHA}
        operations = [
            event(
                "operation.declared",
                operation_id=f"op-{number}-{side}",
                kind="db.x",
                idempotency_key=f"{number}-{side}",
                payload_digest=SHA,
                approval_id=f"ap-{number}",
            )
            for side in "ab"
        ]
        granted = event("approval.resolved", outcome="granted", by="ann", **what)
        told = [(message, "event") for message in (event("approval.requested", **what), *operations)]
        await publish(box, run, *told, (granted, "authority"))

    async def one(number: int) -> None:
        named = [(askers[0], f"op-{number}-a"), (askers[1], f"op-{number}-b")]
        answers = await race(box, run, named if number % 2 else named[::-1])
        assert sorted(answer["code"] for answer in answers) == ["approval_consumed", "ok"], answers

    async with anyio.create_task_group() as tasks:
        for number in range(50):
            tasks.start_soon(partial(one, number))
