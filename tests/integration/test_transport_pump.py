"""Reading in order through every break: broker, consumer, stream gone, JetStream slow, client closed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from sidecar.transport.errors import ApiError, Refused, Unavailable
from sidecar.transport.jetstream import Link
from sidecar.transport.pump import Delivery, Pump
from support.links import eventually, linked
from support.nats_server import NatsServer

pytestmark = pytest.mark.anyio

FILTER = "ev.a.>"


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as running:
        yield running


async def make_stream(link: Link) -> None:
    await link.api("STREAM.CREATE.EV", {"name": "EV", "subjects": ["ev.>"], "storage": "file"})


async def put(link: Link, first: int, count: int, subject: str = "ev.a.r") -> None:
    """Store messages first … first + count - 1, one after the other, each once."""
    for number in range(first, first + count):
        while True:
            try:
                await link.request(
                    subject, str(number).encode(), headers={"Nats-Msg-Id": f"{subject}{number}"}
                )
                break
            except Unavailable:
                await anyio.sleep(0.05)


@asynccontextmanager
async def pumping(link: Link, start: int = 1, **options: Any) -> AsyncIterator[Pump]:
    pump = Pump(link, "EV", FILTER, **options)
    await pump.open(start)
    try:
        yield pump
    finally:
        await pump.close()


async def read(pump: Pump, count: int) -> list[Delivery]:
    """Exactly ``count`` deliveries, without opening anew."""
    got: list[Delivery] = []
    with anyio.fail_after(30):
        while len(got) < count:
            got += await pump.next(count - len(got), 1.0)
    return got


class Reader:
    """What a sidecar does: keeps a cursor and opens at cursor + 1 after each trouble."""

    def __init__(self, link: Link) -> None:
        self.pump = Pump(link, "EV", FILTER, batch=16)
        self.cursor = 0
        self.seen: list[int] = []
        self.reopened = 0

    async def run(self) -> None:
        opened = False
        while True:
            try:
                if not opened:
                    await self.pump.open(self.cursor + 1)
                    opened = True
                    self.reopened += 1
                for delivery in await self.pump.next(16, 1.0):
                    assert delivery.stream_seq > self.cursor
                    self.cursor = delivery.stream_seq
                    self.seen.append(int(delivery.payload))
            except Unavailable:
                opened = False
                await anyio.sleep(0.05)

    async def until(self, last: int) -> None:
        await eventually(lambda: bool(self.seen) and self.seen[-1] == last, f"message {last}")
        assert self.seen == list(range(1, last + 1))


async def trouble(pump: Pump) -> str:
    """Read until the pump gives up, and say why it did."""
    with anyio.fail_after(30):
        while True:
            try:
                await pump.next(10, 1.0)
            except Unavailable as error:
                return error.reason


async def test_delivers_what_the_stream_holds(server: NatsServer) -> None:
    async with linked(server.url) as link:
        await make_stream(link)
        await put(link, 1, 3)
        await put(link, 1, 1, subject="ev.b.other")
        await link.request(
            "ev.a.s", b"", headers={"Status": "409", "Description": "Consumer Deleted", "X": "y"}
        )
        pump = Pump(link, "EV", FILTER)
        facts = await pump.open(1)
        assert (facts.first_seq, facts.last_seq, facts.messages) == (1, 5, 5)
        assert facts.created.startswith("2")
        got = await read(pump, 4)
        assert [item.stream_seq for item in got] == [1, 2, 3, 5]
        assert [item.payload for item in got] == [b"1", b"2", b"3", b""]
        assert [item.pending for item in got] == [3, 2, 1, 0]
        assert got[0].subject == "ev.a.r"
        # A header that looks like a status of the server is just a header of the message.
        assert got[3].headers is not None
        assert got[3].headers["X"] == "y"
        assert got[0].stamp <= got[3].stamp
        assert await pump.next(10, 0.05) == []
        assert await pump.settled_through() == 5
        assert (await pump.facts()).last_seq == 5
        await pump.close()


async def test_starts_at_the_sequence_asked_for(server: NatsServer) -> None:
    async with linked(server.url) as link:
        await make_stream(link)
        await put(link, 1, 5)
        async with pumping(link, 4) as pump:
            assert [item.stream_seq for item in await read(pump, 2)] == [4, 5]
        pump = Pump(link, "EV", FILTER)
        assert (await pump.open(8)).last_seq == 5
        await put(link, 6, 3)
        assert [item.stream_seq for item in await read(pump, 1)] == [8]
        await pump.close()


async def test_an_idle_reader_follows_the_end_of_the_stream(server: NatsServer) -> None:
    async with linked(server.url) as link:
        await make_stream(link)
        await put(link, 1, 3, subject="ev.b.other")
        async with pumping(link) as pump:
            assert await pump.settled_through() == 0

            async def at_three() -> bool:
                assert await pump.next(10, 0.1) == []
                return await pump.settled_through() == 3

            await eventually(at_three, "the heartbeat that says how far the consumer looked")
            await put(link, 1, 2)
            await eventually(lambda: len(pump._incarnation._box) == 2, "two messages")  # type: ignore[union-attr]
            assert await pump.settled_through() is None
            await read(pump, 2)
            assert await pump.settled_through() == 5
        assert await pump.settled_through() is None


async def test_what_comes_for_others_later_moves_the_end_as_well(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.transport.pump._EXPIRES", 1.5)
    monkeypatch.setattr("sidecar.transport.pump._HEARTBEAT", 0.3)
    async with linked(server.url) as link:
        await make_stream(link)
        await put(link, 1, 2)
        async with pumping(link) as pump:
            await read(pump, 2)
            await put(link, 1, 3, subject="ev.b.other")

            async def at_five() -> bool:
                assert await pump.next(10, 0.1) == []
                return await pump.settled_through() == 5

            await eventually(at_five, "the next look of the consumer")


async def test_next_takes_no_more_than_asked_and_cancelling_loses_nothing(server: NatsServer) -> None:
    async with linked(server.url) as link:
        await make_stream(link)
        await put(link, 1, 200)
        async with pumping(link, batch=8) as pump:
            got: list[int] = []
            while len(got) < 200:
                with anyio.move_on_after(0.0001):
                    items = await pump.next(3, 1.0)
                    assert len(items) <= 3
                    got += [int(item.payload) for item in items]
            assert got == list(range(1, 201))


async def test_what_waits_is_bounded_by_the_requests_ahead(server: NatsServer) -> None:
    async with linked(server.url) as link:
        await make_stream(link)
        await put(link, 1, 60)
        async with pumping(link, batch=10) as pump:
            box = pump._incarnation._box  # type: ignore[union-attr]
            await eventually(lambda: len(box) == 20, "full box")
            await put(link, 61, 5)
            assert len(box) == 20
            assert [int(item.payload) for item in await read(pump, 65)] == list(range(1, 66))


async def test_messages_larger_than_a_request_may_bring_together(server: NatsServer) -> None:
    async with linked(server.url) as link:
        await make_stream(link)
        for _ in range(40):
            await link.request("ev.a.r", b"x" * 1_000_000)
        async with pumping(link, batch=256) as pump:
            assert [item.stream_seq for item in await read(pump, 40)] == list(range(1, 41))


async def test_broker_killed_thrice(server: NatsServer) -> None:
    async with linked(server.url) as link:
        await make_stream(link)
        reader = Reader(link)
        async with anyio.create_task_group() as group:
            group.start_soon(reader.run)
            for round_ in range(3):
                await put(link, 1 + round_ * 50, 25)
                server.restart(wait=False)
                await put(link, 26 + round_ * 50, 25)
            await reader.until(150)
            group.cancel_scope.cancel()
        await reader.pump.close()
        assert reader.reopened >= 3


async def delete_consumers(link: Link) -> None:
    names = (await link.api("CONSUMER.NAMES.EV"))["consumers"]
    for name in names:
        await link.api(f"CONSUMER.DELETE.EV.{name}")


async def test_consumer_deleted_while_waiting(server: NatsServer) -> None:
    async with linked(server.url) as link:
        await make_stream(link)
        reader = Reader(link)
        async with anyio.create_task_group() as group:
            group.start_soon(reader.run)
            await put(link, 1, 5)
            await reader.until(5)
            await delete_consumers(link)
            await put(link, 6, 5)
            await reader.until(10)
            group.cancel_scope.cancel()
        await reader.pump.close()
        assert reader.reopened == 2


async def test_consumer_deleted_while_nobody_reads(server: NatsServer) -> None:
    async with linked(server.url) as link:
        await make_stream(link)
        await put(link, 1, 30)
        async with pumping(link, batch=4) as pump:
            box = pump._incarnation._box  # type: ignore[union-attr]
            await eventually(lambda: len(box) == 8, "full box")
            await delete_consumers(link)
            assert len(await read(pump, 8)) == 8
            assert "503" in await trouble(pump)
            await pump.open(9)
            assert [int(item.payload) for item in await read(pump, 22)] == list(range(9, 31))


async def test_stream_deleted_and_made_again(server: NatsServer) -> None:
    async with linked(server.url) as link:
        await make_stream(link)
        await put(link, 1, 5)
        pump = Pump(link, "EV", FILTER)
        before = await pump.open(1)
        await read(pump, 5)
        await link.api("STREAM.DELETE.EV")
        await trouble(pump)
        with pytest.raises(Unavailable):
            await pump.open(6)
        with pytest.raises(Unavailable):
            await pump.facts()
        with pytest.raises(Unavailable):
            await pump.next(1, 0.1)
        await make_stream(link)
        after = await pump.open(6)
        assert after.created != before.created
        assert after.last_seq == 0
        await pump.open(1)
        await put(link, 1, 2, subject="ev.a.new")
        assert [item.stream_seq for item in await read(pump, 2)] == [1, 2]
        await pump.close()


async def test_client_closed_for_good_while_reading(server: NatsServer) -> None:
    async with linked(server.url) as link:
        await make_stream(link)
        reader = Reader(link)
        async with anyio.create_task_group() as group:
            group.start_soon(reader.run)
            await put(link, 1, 5)
            await reader.until(5)
            raw = link.session()._client
            await raw.publish("any", b"x" * raw.max_payload, headers={"A": "b"})
            with anyio.fail_after(30):
                await link.wait_connected(1)
            await put(link, 6, 5)
            await reader.until(10)
            group.cancel_scope.cancel()
        await reader.pump.close()


async def test_half_open_connection_while_reading(server: NatsServer) -> None:
    async with linked(server.url, ping_interval=600.0) as link:
        await make_stream(link)
        async with pumping(link) as pump:
            server.freeze()
            assert "heartbeats" in await trouble(pump)
            server.resume()


async def test_jetstream_slow_to_come_back(server: NatsServer) -> None:
    """The broker is there before its JetStream is: played by one that has none, on the same port."""
    async with linked(server.url) as link:
        await make_stream(link)
        reader = Reader(link)
        async with anyio.create_task_group() as group:
            group.start_soon(reader.run)
            await put(link, 1, 5)
            await reader.until(5)
            server.kill9()
            with NatsServer(port=server.port, jetstream=False):
                await eventually(lambda: "JetStream is off" in link.reason, "refusal by the bare broker")
            server.start()
            await put(link, 6, 5)
            await reader.until(10)
            group.cancel_scope.cancel()
        await reader.pump.close()


async def test_a_lost_delivery_is_noticed(server: NatsServer) -> None:
    async with linked(server.url) as link:
        await make_stream(link)
        await put(link, 1, 3)
        async with pumping(link) as pump:
            pump._incarnation._expected = 2  # type: ignore[union-attr]
            assert "consumer sequence 1 instead of 2" in await trouble(pump)
        async with pumping(link, 900) as pump:
            pump._incarnation._expected = 0  # type: ignore[union-attr]
            assert "never arrived" in await trouble(pump)


async def test_old_deliveries_never_reach_a_new_incarnation(server: NatsServer) -> None:
    async with linked(server.url) as link:
        await make_stream(link)
        await put(link, 1, 100)
        pump = Pump(link, "EV", FILTER, batch=16)
        for start in (1, 50, 10, 90, 30):
            await pump.open(start)
            assert [item.stream_seq for item in await read(pump, 5)] == list(range(start, start + 5))
        await pump.close()

        async def one_left() -> bool:
            return (await link.api("STREAM.INFO.EV"))["state"]["consumer_count"] == 0

        await eventually(one_left, "end of the old consumers")


async def test_missing_stream_is_unavailable(server: NatsServer) -> None:
    async with linked(server.url) as link:
        with pytest.raises(Unavailable, match="stream not found"):
            await Pump(link, "EV", FILTER).open(1)
        with pytest.raises(Unavailable, match="not open"):
            await Pump(link, "EV", FILTER).next(1, 0.1)


def test_no_error_of_the_client_is_an_error_of_ours() -> None:
    assert not issubclass(ApiError, Unavailable)
    assert not issubclass(Refused, Unavailable)
