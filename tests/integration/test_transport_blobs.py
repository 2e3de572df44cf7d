"""Large values, and what a stream holds of a lane."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protocol import subjects
from sidecar.transport.blobs import Blobs
from sidecar.transport.errors import Unavailable
from sidecar.transport.inventory import purge, subjects_held
from sidecar.transport.topology import ensure_streams
from support.links import linked
from support.nats_server import NatsServer

pytestmark = pytest.mark.anyio


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as running:
        yield running


async def test_values_larger_than_a_message_are_kept_replaced_and_deleted(server: NatsServer) -> None:
    async with linked(server.url) as link:
        blobs = Blobs(link)
        assert await blobs.get("t/l/r") is None
        for payload in (b"x" * 3_000_000, b"y" * 2_000_001):
            await blobs.put("t/l/r", payload)
            assert await blobs.get("t/l/r") == payload
        await blobs.delete("t/l/r")
        await blobs.delete("t/l/r")
        assert await blobs.get("t/l/r") is None
        server.kill9()
        with pytest.raises(Unavailable):
            await blobs.get("t/l/r")


async def test_subjects_of_a_lane_and_forgetting_a_run(server: NatsServer) -> None:
    async with linked(server.url) as link:
        await ensure_streams(link)
        for run in ("r1", "r2"):
            for _ in range(3):
                await link.request(subjects.inbound("t", "l", run, "event"), b"{}")
        await link.request(subjects.inbound("t", "other", "r9", "event"), b"{}")
        lane = subjects.inbound_filter("t", "l")
        assert await subjects_held(link, "WK_IN", lane) == {
            "wk.v1.in.t.l.r1.event": 3,
            "wk.v1.in.t.l.r2.event": 3,
        }
        assert await purge(link, "WK_IN", subjects.run_inbound_filter("t", "l", "r1")) == 3
        assert await purge(link, "WK_IN", subjects.run_inbound_filter("t", "l", "r1")) == 0
        assert list(await subjects_held(link, "WK_IN", lane)) == ["wk.v1.in.t.l.r2.event"]
        with pytest.raises(Unavailable):
            await subjects_held(link, "NONE", lane)
