"""Events on their way out: the very same bytes until the stream has them, one at a time, in order."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from protocol.client.broker import Denied, NobodyListens, Trouble
from protocol.client.errors import EventTooLarge, Refused
from protocol.client.publishing import Outgoing, Publisher
from support.scripted_broker import ANSWER, ScriptedBroker, body

pytestmark = pytest.mark.anyio


def event(name: str) -> Callable[[], Outgoing]:
    return lambda: Outgoing(name, name.encode())


def stored(seq: int) -> ANSWER:
    return body(stream="WK_IN", seq=seq)


NOT_STORED: dict[str, ANSWER] = {
    "silence": Trouble("no answer within 5 s"),
    "nobody": NobodyListens("nobody listens"),
    "lost": Trouble("connection lost"),
    "duplicate": body(stream="WK_IN", seq=7, duplicate=True),
    "another stream": body(stream="OTHER", seq=7),
    "no sequence": body(stream="WK_IN", seq=0),
    "full": body(error={"code": 503, "err_code": 10077, "description": "maximum bytes exceeded"}),
    "nonsense": body(nothing=1),
}


@pytest.mark.parametrize("trouble", NOT_STORED.values(), ids=NOT_STORED)
async def test_whatever_is_no_acknowledgement_is_sent_again_byte_for_byte(trouble: ANSWER) -> None:
    broker = ScriptedBroker(trouble, stored(8), stored(9))
    publisher = Publisher(broker, "in", bound=4)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(publisher.run)
        with anyio.fail_after(30):
            assert await publisher.send(event("a")) == 8
            assert await publisher.send(event("b")) == 9
        tasks.cancel_scope.cancel()
    assert broker.asked == [("in", b"a"), ("in", b"a"), ("in", b"b")]
    assert publisher.newest == 9


async def test_an_event_that_is_not_through_holds_the_next_one_back() -> None:
    broker = ScriptedBroker(*list(NOT_STORED.values())[:5], *(stored(seq) for seq in range(10, 20)))
    publisher = Publisher(broker, "in", bound=3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(publisher.run)
        with anyio.fail_after(60):
            async with anyio.create_task_group() as telling:
                for name in "abcdefg":
                    telling.start_soon(publisher.send, event(name))
        tasks.cancel_scope.cancel()
    assert b"".join(payload for _, payload in broker.asked) == b"a" * 6 + b"bcdefg"


async def test_a_bounded_number_is_queued_and_what_must_be_said_goes_past_it() -> None:
    broker = ScriptedBroker()
    publisher = Publisher(broker, "in", bound=2)
    made: list[str] = []

    def making(name: str) -> Callable[[], Outgoing]:
        def make() -> Outgoing:
            made.append(name)
            return event(name)()

        return make

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(publisher.run)
        for name in "abcd":
            tasks.start_soon(publisher.send, making(name))
        await anyio.wait_all_tasks_blocked()
        assert made == ["a", "b"]

        async def urgent() -> None:
            await publisher.send(making("settled"), at_once=True)

        tasks.start_soon(urgent)
        await anyio.wait_all_tasks_blocked()
        assert made == ["a", "b", "settled"]
        assert await publisher.drained(0) == ("a", "b", "settled")
        tasks.cancel_scope.cancel()


async def test_what_is_forbidden_ends_publishing() -> None:
    broker = ScriptedBroker(Denied("no permission"))
    publisher = Publisher(broker, "in", bound=2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(publisher.run)
        for _ in range(3):
            with pytest.raises(Refused):
                await publisher.send(event("a"))
        tasks.cancel_scope.cancel()
    assert len(broker.asked) == 1


async def test_what_the_broker_finds_too_large_is_told_and_the_next_one_goes_out() -> None:
    broker = ScriptedBroker(
        body(error={"code": 400, "err_code": 10054, "description": "message size exceeds maximum allowed"}),
        stored(3),
    )
    publisher = Publisher(broker, "in", bound=2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(publisher.run)
        with pytest.raises(EventTooLarge):
            await publisher.send(event("a"))
        assert await publisher.send(event("b")) == 3
        tasks.cancel_scope.cancel()
