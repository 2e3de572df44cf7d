"""Lanes: one owner at a time, whoever races, dies, is slow or finds the streams gone."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest

from protocol import subjects
from protocol.handoff import LaneEpoch
from sidecar.transport.errors import Fenced, Unavailable
from sidecar.transport.jetstream import Link
from sidecar.transport.ownership import LaneClaim
from sidecar.transport.publisher import LanePublisher
from sidecar.transport.topology import ensure_streams
from sidecar.transport.writes import last_message
from support.links import eventually, linked
from support.nats_server import NatsServer

pytestmark = pytest.mark.anyio

LONG = 600.0


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as running:
        yield running


class Clock:
    """A monotonic clock the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def claim_of(link: Link, owner: str, lease: float = LONG, **options: Any) -> LaneClaim:
    return LaneClaim(link, "t", "l", owner, lease, **options)


@asynccontextmanager
async def ready(server: NatsServer) -> AsyncIterator[Link]:
    async with linked(server.url) as link:
        await ensure_streams(link)
        yield link


async def record(link: Link, stream: str, subject: str) -> LaneEpoch:
    found = await last_message(link, stream, subject)
    assert found is not None
    return msgspec.json.decode(found[1], type=LaneEpoch)


async def state_record(link: Link) -> LaneEpoch:
    return await record(link, "WK_STATE", subjects.state_epoch("t", "l"))


async def out_record(link: Link) -> LaneEpoch:
    return await record(link, "WK_OUT", subjects.out_epoch("t", "l"))


async def delete_epoch_record(link: Link, stream: str, subject: str) -> None:
    await link.api(f"STREAM.PURGE.{stream}", {"filter": subject})


async def test_a_free_lane_is_taken_on_both_streams(server: NatsServer) -> None:
    async with ready(server) as link:
        claim = claim_of(link, "a")
        assert not claim.valid()
        assert await claim.claim() == 1
        assert claim.valid()
        for held in (await state_record(link), await out_record(link)):
            assert (held.epoch, held.owner, held.released) == (1, "a", msgspec.UNSET)
        assert (await claim_of(link, "b", previous_owner="a").claim(floor=41)) == 42


async def test_a_released_lane_is_free_at_once(server: NatsServer) -> None:
    async with ready(server) as link:
        first = claim_of(link, "a")
        await first.claim()
        await first.release()
        assert not first.valid()
        assert (await state_record(link)).released is True
        second = claim_of(link, "b")
        assert await second.claim() == 2
        await first.release()
        await second._renew_state()
        assert (await state_record(link)).owner == "b"


async def test_the_dead_predecessor_on_our_disk_does_not_hold_the_lane(server: NatsServer) -> None:
    async with ready(server) as link:
        await claim_of(link, "before").claim()
        assert await claim_of(link, "after", previous_owner="before").claim() == 2


async def test_an_owned_lane_is_watched_and_taken_when_its_record_stands_still(server: NatsServer) -> None:
    async with ready(server) as link:
        owner = claim_of(link, "a", 0.6)
        await owner.claim()
        waits: list[str] = []
        watcher = claim_of(link, "b", 0.6, on_wait=waits.append)
        epochs: list[int] = []

        async def watch() -> None:
            epochs.append(await watcher.claim())

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            renewing = anyio.CancelScope()

            async def renew() -> None:
                with renewing:
                    await owner.renew_forever()

            group.start_soon(renew)
            before = (await last_message(link, "WK_STATE", subjects.state_epoch("t", "l")) or (0, b""))[0]

            async def renewed() -> bool:
                found = await last_message(link, "WK_STATE", subjects.state_epoch("t", "l"))
                assert found is not None
                return found[0] >= before + 5

            await eventually(renewed, "five renewals")
            assert epochs == []
            assert waits == ["a"]
            renewing.cancel()
            await eventually(lambda: epochs == [2], "takeover")
        assert not owner.valid()
        with pytest.raises(Fenced):
            await owner.renew_forever()


async def test_the_lease_is_certain_only_as_long_as_no_watcher_may_take_it(server: NatsServer) -> None:
    async with ready(server) as link:
        clock = Clock()
        claim = claim_of(link, "a", 30.0, monotonic=clock)
        await claim.claim()
        clock.now += 19.9
        assert claim.valid()
        clock.now += 0.2
        assert not claim.valid()


async def test_a_watcher_does_not_count_time_the_broker_was_away(server: NatsServer) -> None:
    async with ready(server) as link:
        await claim_of(link, "a").claim()
        clock = Clock()
        watcher = claim_of(link, "b", 0.3, monotonic=clock)
        looks: list[float] = []
        seen = watcher._is_free

        def look(held: Any) -> bool:
            looks.append(clock.now)
            return seen(held)

        watcher._is_free = look  # type: ignore[method-assign]
        taken: list[int] = []

        async def watch() -> None:
            taken.append(await watcher.claim())

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            await eventually(lambda: bool(looks), "first look")
            server.kill9()
            clock.now += 100
            server.start()
            with anyio.fail_after(30):
                await link.wait_connected(1)
            await eventually(lambda: looks.count(1100.0) >= 3, "looks after the outage")
            assert taken == []
            clock.now += 0.5
            await eventually(lambda: taken == [2], "takeover")
            group.cancel_scope.cancel()


async def test_two_racing_owners_never_share_an_epoch(server: NatsServer) -> None:
    """Each takes the lane from the other as fast as it can; nothing of an old epoch follows a newer one."""
    async with ready(server) as first, linked(server.url) as second:
        epochs: list[int] = []
        stored: list[tuple[int, str]] = []

        async def seize(link: Link, name: str, other: str) -> None:
            for round_ in range(25):
                claim = claim_of(link, f"{name}{round_}")
                # Every owner of the other side counts as dead: the lane is always free.
                claim._is_free = lambda record: True  # type: ignore[method-assign]
                epoch = await claim.claim()
                epochs.append(epoch)
                publisher = LanePublisher(link, "t", "l", claim)
                try:
                    for number in range(4):
                        message = f"{epoch}-{name}-{number}"
                        await publisher.publish(
                            "out", subjects.outbound("t", "l", "r", "notice"), message.encode(), message
                        )
                        stored.append((epoch, message))
                except Fenced:
                    continue

        async with anyio.create_task_group() as group:
            group.start_soon(seize, first, "a", "b")
            group.start_soon(seize, second, "b", "a")
        assert len(set(epochs)) == len(epochs) == 50
        seen: list[int] = []
        messages: list[str] = []
        last = (await first.api("STREAM.INFO.WK_OUT"))["state"]["last_seq"]
        for sequence in range(1, last + 1):
            message = (await first.api("STREAM.MSG.GET.WK_OUT", {"seq": sequence}))["message"]
            body = base64.b64decode(message["data"])
            if message["subject"].endswith(".epoch"):
                seen.append(msgspec.json.decode(body, type=LaneEpoch).epoch)
            else:
                messages.append(body.decode())
                assert int(messages[-1].split("-")[0]) == seen[-1]
        assert seen == sorted(seen)
        assert len(messages) == len(set(messages))
        assert {message for _, message in stored} <= set(messages)


async def test_a_lost_acknowledgement_of_a_renewal_is_adopted(server: NatsServer) -> None:
    async with ready(server) as link:
        claim = claim_of(link, "a", 0.3)
        await claim.claim()
        assert claim.fence("state").seq is not None
        for fence in (claim.fence("state"), claim.fence("out")):
            # As if a renewal had been stored and its answer lost.
            await claim._write(fence, fence.seq or 0)
            fence.seq = (fence.seq or 0) - 1
        async with anyio.create_task_group() as group:
            group.start_soon(claim.renew_forever)
            before = claim._renewed
            await eventually(lambda: claim._renewed > before, "renewal")
            group.cancel_scope.cancel()
        assert (await state_record(link)).owner == "a"


async def test_streams_made_again_are_claimed_again_with_the_same_epoch(server: NatsServer) -> None:
    async with ready(server) as link:
        claim = claim_of(link, "a", 0.3)
        await claim.claim(floor=6)
        async with anyio.create_task_group() as group:
            group.start_soon(claim.renew_forever)
            for stream in ("WK_OUT", "WK_STATE"):
                await link.api(f"STREAM.DELETE.{stream}")
            await ensure_streams(link)

            async def back() -> bool:
                try:
                    return (await state_record(link)).epoch == 7 and (await out_record(link)).epoch == 7
                except AssertionError:
                    return False

            await eventually(back, "epoch records in the new streams")
            group.cancel_scope.cancel()
        assert claim.epoch == 7


async def test_a_full_out_stream_does_not_cost_the_lane(server: NatsServer) -> None:
    async with linked(server.url) as link:
        full = {"name": "WK_OUT", "subjects": list(subjects.OUT_SUBJECTS), "discard": "new", "max_msgs": 1}
        await link.api("STREAM.CREATE.WK_OUT", full)
        await ensure_streams(link)
        await link.request(subjects.outbound("t", "l", "r", "notice"), b"the one that fits")
        claim = claim_of(link, "a", 0.3)
        assert await claim.claim() == 1
        assert claim.out_blocked
        async with anyio.create_task_group() as group:
            group.start_soon(claim.renew_forever)
            before = claim._renewed
            await eventually(lambda: claim._renewed > before, "renewal on state")
            assert claim.out_blocked
            await link.api("STREAM.UPDATE.WK_OUT", {**full, "max_msgs": 1000})
            await eventually(lambda: not claim.out_blocked, "room in the out stream")
            group.cancel_scope.cancel()
        assert (await out_record(link)).owner == "a"


async def test_a_full_state_stream_takes_the_renewals_or_ends_the_lease(server: NatsServer) -> None:
    """Newer servers replace a message in a full stream, older ones refuse; the lease must never be wrong."""
    async with linked(server.url) as link:
        full = {
            "name": "WK_STATE",
            "subjects": ["wk.v1.state.>"],
            "discard": "new",
            "max_msgs_per_subject": 1,
            "max_bytes": 3000,
        }
        await link.api("STREAM.CREATE.WK_STATE", full)
        await ensure_streams(link)
        claim = claim_of(link, "a", 0.3)
        await claim.claim()
        for run in range(40):
            await link.request(subjects.state("t", "l", f"r{run}"), b"x" * 200)
        async with anyio.create_task_group() as group:
            group.start_soon(claim.renew_forever)
            before = claim._renewed
            await eventually(lambda: claim._renewed > before or not claim.valid(), "renewal or doubt")
            group.cancel_scope.cancel()


async def test_broker_killed_while_renewing_and_while_claiming(server: NatsServer) -> None:
    async with ready(server) as link:
        claim = claim_of(link, "a", 1.0)
        server.kill9()
        async with anyio.create_task_group() as group:

            async def start() -> None:
                await eventually(lambda: not link.connected, "loss")
                server.start(wait=False)

            group.start_soon(start)
            assert await claim.claim() >= 1
        async with anyio.create_task_group() as group:
            group.start_soon(claim.renew_forever)
            server.kill9()
            await eventually(lambda: not claim.valid(), "doubt about the lease")
            server.start()
            await eventually(claim.valid, "a certain lease")
            group.cancel_scope.cancel()
        assert claim.owned


async def test_old_renewals_are_dropped_from_the_out_stream(server: NatsServer) -> None:
    async with ready(server) as link:
        claim = claim_of(link, "a")
        await claim.claim()
        for _ in range(5):
            await claim._renew_out()
        await claim._drop_old_records()
        assert (await link.api("STREAM.INFO.WK_OUT"))["state"]["messages"] == 1
        publisher = LanePublisher(link, "t", "l", claim)
        await publisher.publish("out", subjects.outbound("t", "l", "r", "notice"), b"x", "one")


async def test_an_unreadable_record_does_not_hold_a_lane_for_ever(server: NatsServer) -> None:
    async with ready(server) as link:
        await link.request(subjects.state_epoch("t", "l"), b"not ours")
        assert await claim_of(link, "a", 0.2).claim() == 1


async def test_claiming_can_be_cancelled(server: NatsServer) -> None:
    async with ready(server) as link:
        await claim_of(link, "a").claim()
        with anyio.move_on_after(0.1) as scope:
            await claim_of(link, "b").claim()
        assert scope.cancelled_caught
        assert (await state_record(link)).owner == "a"


async def test_release_without_a_broker_ends(server: NatsServer) -> None:
    async with ready(server) as link:
        claim = claim_of(link, "a", 0.3)
        await claim.claim()
        server.kill9()
        with anyio.fail_after(30):
            await claim.release()
        with pytest.raises(Unavailable):
            link.session()
