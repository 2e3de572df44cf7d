"""Three brokers with three copies: failing over, and the fence while leaders move and nodes die."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import anyio
import pytest

from protocol import subjects
from sidecar.transport.errors import ApiError, Fenced, Unavailable
from sidecar.transport.jetstream import Link
from sidecar.transport.ownership import LaneClaim
from sidecar.transport.publisher import LanePublisher
from sidecar.transport.pump import Pump
from sidecar.transport.topology import ensure_streams
from support.links import eventually, linked
from support.nats_server import NatsServer, free_port

pytestmark = pytest.mark.anyio

NOTICE = subjects.outbound("t", "l", "r", "notice")


@pytest.fixture
def cluster() -> Iterator[list[NatsServer]]:
    routes = [free_port() for _ in range(3)]
    urls = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
    with ExitStack() as stack:
        servers = [
            NatsServer(
                config=f"server_name: n{number}\n"
                f'cluster {{ name: c, listen: "127.0.0.1:{port}", routes: [{urls}] }}\n'
            )
            for number, port in enumerate(routes)
        ]
        for server in servers:
            stack.callback(server.cleanup)
            server.start(wait=False)
        for server in servers:
            server.wait_ready()
        yield servers


async def out_messages(link: Link) -> list[str]:
    found: list[str] = []
    for sequence in range(1, (await link.api("STREAM.INFO.WK_OUT"))["state"]["last_seq"] + 1):
        try:
            message = (await link.api("STREAM.MSG.GET.WK_OUT", {"seq": sequence}))["message"]
        except ApiError:
            continue
        if message["subject"] == NOTICE:
            found.append(base64.b64decode(message["data"]).decode())
    return found


async def test_nothing_is_lost_doubled_or_stale_while_nodes_die(cluster: list[NatsServer]) -> None:
    """One URL only: the other nodes are learnt. The node we are on dies, then a leader steps down."""
    async with linked(cluster[0].url, ping_interval=5.0) as link:
        await ensure_streams(link, replicas=3, patience=60)
        claim = LaneClaim(link, "t", "l", "a", 3.0)
        await claim.claim()
        publisher = LanePublisher(link, "t", "l", claim)
        count = 300
        sent = 0

        async def write() -> None:
            nonlocal sent
            for number in range(count):
                await publisher.publish("out", NOTICE, str(number).encode(), f"m-{number}")
                sent = number + 1

        async with anyio.create_task_group() as renewing:
            renewing.start_soon(claim.renew_forever)
            async with anyio.create_task_group() as group:
                group.start_soon(write)
                await eventually(lambda: sent >= 100, "100 messages")
                cluster[0].kill9()
                with anyio.fail_after(60):
                    await link.wait_connected(1)
                await eventually(lambda: sent >= 200, "200 messages", 60)
                cluster[0].start(wait=False)
                with suppress(ApiError, Unavailable):
                    await link.api("STREAM.LEADER.STEPDOWN.WK_OUT")
            renewing.cancel_scope.cancel()
        await eventually(lambda: link.connected, "connection")
        assert await out_messages(link) == [str(number) for number in range(count)]


async def test_a_seized_lane_and_a_read_through_a_failover(cluster: list[NatsServer]) -> None:
    url = ",".join(server.url for server in cluster)
    async with linked(url, ping_interval=5.0) as link, linked(cluster[1].url, ping_interval=5.0) as other:
        await ensure_streams(link, replicas=3, patience=60)
        stored: dict[str, list[str]] = {"a": [], "b": []}

        async def seize(mine: Link, name: str) -> None:
            for round_ in range(8):
                claim = LaneClaim(mine, "t", "l", f"{name}{round_}", 60.0)
                claim._is_free = lambda record: True  # type: ignore[method-assign]
                epoch = await claim.claim()
                publisher = LanePublisher(mine, "t", "l", claim)
                try:
                    for number in range(3):
                        text = f"{epoch:05d}-{name}-{number}"
                        await publisher.publish("out", NOTICE, text.encode(), text)
                        stored[name].append(text)
                except Fenced:
                    continue

        async with anyio.create_task_group() as group:
            group.start_soon(seize, link, "a")
            group.start_soon(seize, other, "b")
        messages = await out_messages(link)
        epochs = [text.split("-")[0] for text in messages]
        assert epochs == sorted(epochs)
        assert set(stored["a"] + stored["b"]) <= set(messages)

        pump = Pump(link, "WK_OUT", NOTICE, batch=8)
        seen: list[str] = []
        cursor = 0
        opened = killed = False
        with anyio.fail_after(90):
            while len(seen) < len(messages):
                try:
                    if not opened:
                        await pump.open(cursor + 1)
                        opened = True
                    for delivery in await pump.next(4, 1.0):
                        assert delivery.stream_seq > cursor
                        cursor = delivery.stream_seq
                        seen.append(delivery.payload.decode())
                    if not killed:
                        cluster[0].kill9()
                        killed = True
                except Unavailable:
                    opened = False
                    await anyio.sleep(0.1)
        await pump.close()
        assert seen == messages
