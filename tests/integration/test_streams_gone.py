"""A stream deleted under the running daemon: told, made again, and the work goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
import structlog
import structlog.testing

from sidecar import streams
from sidecar.config import load_config
from sidecar.health import Health
from sidecar.streams import Streams
from sidecar.transport.errors import ApiError, Refused
from sidecar.transport.jetstream import Link
from sidecar.transport.ownership import LaneClaim
from sidecar.transport.topology import missing_streams
from support.blackbox import TENANT, Box, blackbox, event, eventually, new_run
from support.links import linked
from support.nats_server import NatsServer

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as started:
        yield started


@pytest.fixture
async def box(server: NatsServer, tmp_path: Path) -> AsyncIterator[Box]:
    async with blackbox(server, tmp_path, {"lease.seconds": 2.0}) as opened:
        yield opened


@pytest.mark.parametrize("name", ["WK_STATE", "WK_OUT", "WK_IN", "WK_REJECTED"])
async def test_a_deleted_stream_is_told_made_again_and_worked_on(box: Box, name: str) -> None:
    run = await box.start(new_run("gone"))
    await box.status(run)
    with structlog.testing.capture_logs() as logs:
        await box.js.delete_stream(name)

        async def not_ready() -> bool:
            ready = (await box.get("/readyz")).json()
            return name in ready["reasons"].get("streams", "")

        await eventually(not_ready, "readiness to go")

        async def again() -> bool:
            return (await box.get("/readyz")).status_code == 200

        await eventually(again, "readiness to come back")
    assert [line["reason"] for line in logs if line["event"] == "stream gone"] == [
        f"{name} deleted under the running daemon"
    ]
    assert len([line for line in logs if line["event"] == "stream made again: what it held is lost"]) == 1
    # The run is known, and what is new is read, answered and refused as before.
    box.newest.clear()
    assert (await box.status(run))["level"] == "ok"
    other = await box.start(new_run("after"))
    assert (await box.status(other))["position"] >= 1
    refused = await box.send(other, b"no json")
    assert (await box.hear_rejected(other, refused))["code"] == "malformed"
    await box.tell(run, event("message", role="user", content="go on"))
    assert (await box.packet(run))["v"] == 1


async def test_a_stream_that_cannot_be_made_again_keeps_the_daemon_from_being_ready(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = Health(expected=())
    config = load_config(None, {"WATCHKEEPER_LEASE__SECONDS": "1"})

    async def refused(*_: object, **__: object) -> None:
        raise Refused("stream WK_OUT cannot be created: no")

    async with linked(server.url) as link:
        guarded = Streams(config, link, health)
        monkeypatch.setattr(streams, "ensure_streams", refused)
        await _without(link, "WK_OUT")
        with structlog.testing.capture_logs() as logs:
            await _guarded(guarded, lambda: "cannot be made again" in str(health.ready().reasons))
            assert not health.ready().ready
        assert {line["event"] for line in logs} == {"stream gone"}
        monkeypatch.undo()
        await _guarded(guarded, lambda: health.ready().ready)


async def test_an_emptied_state_does_not_make_a_living_owners_lane_free(server: NatsServer) -> None:
    async with linked(server.url) as link:
        await Streams(load_config(None, {}), link, Health()).made(_never())
        owner = LaneClaim(link, TENANT, "emptied", "one", 30.0)
        epoch = await owner.claim()
        await _without(link, "WK_STATE")
        await Streams(load_config(None, {}), link, Health()).made(_never())
        waited: list[str] = []
        seen = LaneClaim(link, TENANT, "emptied", "two", 30.0, on_wait=waited.append)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(seen.claim)
            tasks.start_soon(owner.renew_forever)
            # The owner's next renewal stores its record anew, and the other one sees that it lives.
            owner_fence = owner.fence("state")
            async with owner_fence.lock:
                await owner.recover(owner_fence)
            await anyio.sleep(0.2)
            assert not seen.owned
            assert (owner.owned, owner.epoch) == (True, epoch)
            tasks.cancel_scope.cancel()


def _never() -> anyio.Event:
    return anyio.Event()


async def _without(link: Link, name: str) -> None:
    with suppress(ApiError):
        await link.api(f"STREAM.DELETE.{name}")
    assert name in await missing_streams(link)


async def _guarded(guarded: Streams, until: Callable[[], bool]) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(guarded.guard)
        await eventually(until, "the guard")
        tasks.cancel_scope.cancel()
