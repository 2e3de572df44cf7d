"""Writing for a lane: fenced, once in effect, in order, through every kind of trouble."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import anyio
import pytest

from protocol import subjects
from sidecar.transport.errors import ApiError, Conflict, Fenced, StreamFull, TooLarge, Unavailable
from sidecar.transport.jetstream import Link
from sidecar.transport.ownership import LaneClaim
from sidecar.transport.publisher import LanePublisher, publish_inbound
from sidecar.transport.topology import ensure_streams
from sidecar.transport.writes import store, stream_of
from support.links import eventually, linked
from support.nats_server import NatsServer

pytestmark = pytest.mark.anyio

NOTICE = subjects.outbound("t", "l", "r", "notice")
STATE = subjects.state("t", "l", "r")
RECORD = subjects.inbound("t", "l", "r", "record")


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as running:
        yield running


class Lane:
    def __init__(self, link: Link, owner: str, lease: float = 600.0, previous: str | None = None) -> None:
        self.link = link
        self.claim = LaneClaim(link, "t", "l", owner, lease, previous_owner=previous)
        self.publisher = LanePublisher(link, "t", "l", self.claim)


@asynccontextmanager
async def owned(server: NatsServer, lease: float = 600.0) -> AsyncIterator[Lane]:
    async with linked(server.url) as link:
        await ensure_streams(link)
        lane = Lane(link, "a", lease)
        await lane.claim.claim()
        yield lane


async def held(link: Link, stream: str, subject: str) -> list[bytes]:
    """Every message of the subject in the stream, in order."""
    found: list[bytes] = []
    for sequence in range(1, (await link.api(f"STREAM.INFO.{stream}"))["state"]["last_seq"] + 1):
        try:
            message = (await link.api(f"STREAM.MSG.GET.{stream}", {"seq": sequence}))["message"]
        except ApiError:
            continue
        if message["subject"] == subject:
            found.append(base64.b64decode(message["data"]))
    return found


async def test_the_same_id_is_stored_once(server: NatsServer) -> None:
    async with owned(server) as lane:
        for _ in range(3):
            await lane.publisher.publish("out", NOTICE, b"one", "id-1")
        await lane.claim._renew_out()
        await lane.publisher.publish("out", NOTICE, b"one", "id-1")
        await lane.publisher.publish("out", NOTICE, b"two", "id-2")
        assert await held(lane.link, "WK_OUT", NOTICE) == [b"one", b"two"]
        await lane.publisher.publish("state", STATE, b"s1", "s-1")
        await lane.publisher.publish("state", STATE, b"s2", "s-2")
        found = await lane.publisher.get_last(STATE)
        assert found is not None
        assert found[1] == b"s2"


async def test_a_former_owner_can_store_nothing(server: NatsServer) -> None:
    async with owned(server) as former, linked(server.url) as other:
        await former.publisher.publish("out", NOTICE, b"mine", "id-1")
        successor = Lane(other, "b", previous="a")
        await successor.claim.claim()
        assert former.claim.valid()
        with pytest.raises(Fenced):
            await former.publisher.publish("out", NOTICE, b"late", "id-2")
        assert not former.claim.valid()
        with pytest.raises(Fenced):
            await former.publisher.publish("state", STATE, b"late", "id-3")
        await successor.publisher.publish("out", NOTICE, b"theirs", "id-4")
        assert await held(other, "WK_OUT", NOTICE) == [b"mine", b"theirs"]
        assert await successor.publisher.get_last(STATE) is None


async def test_a_former_owner_is_stopped_on_state_as_well(server: NatsServer) -> None:
    async with owned(server) as former, linked(server.url) as other:
        await Lane(other, "b", previous="a").claim.claim()
        with pytest.raises(Fenced):
            await former.publisher.publish("state", STATE, b"late", "id-1")


async def test_without_a_claim_nothing_is_sent(server: NatsServer) -> None:
    async with owned(server) as lane:
        await lane.claim.release()
        with pytest.raises(Fenced):
            await lane.publisher.publish("out", NOTICE, b"x", "id")
        with pytest.raises(Fenced):
            await Lane(lane.link, "never").publisher.publish("out", NOTICE, b"x", "id")


async def test_a_sequence_that_is_not_ours_is_read_again_and_adopted(server: NatsServer) -> None:
    """10071 with our own record there: a renewal was stored and its answer lost."""
    async with owned(server) as lane:
        fence = lane.claim.fence("out")
        assert fence.seq is not None
        right = fence.seq
        fence.seq = right + 1000
        await lane.publisher.publish("out", NOTICE, b"x", "id-1")
        assert fence.seq == right


async def test_a_record_that_is_gone_is_made_again(server: NatsServer) -> None:
    async with owned(server) as lane:
        for stream, fence in (("WK_OUT", lane.claim.fence("out")), ("WK_STATE", lane.claim.fence("state"))):
            await lane.link.api(f"STREAM.PURGE.{stream}", {"filter": fence.subject})
        await lane.publisher.publish("out", NOTICE, b"x", "id-1")
        await lane.publisher.publish("state", STATE, b"y", "id-2")
        assert len(await held(lane.link, "WK_OUT", lane.claim.fence("out").subject)) == 1


async def test_contention_is_tried_again(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """10164: a single server hardly gives it, so the first two answers are put in its place."""
    answers = [Conflict(True), Conflict(True)]

    async def contended(*args: object, **options: object) -> int:
        if answers:
            raise answers.pop()
        return await store(*args, **options)  # type: ignore[arg-type]

    async with owned(server) as lane:
        monkeypatch.setattr("sidecar.transport.publisher.store", contended)
        before = lane.claim.fence("out").seq
        await lane.publisher.publish("out", NOTICE, b"x", "id-1")
        assert lane.claim.fence("out").seq == before
        assert await held(lane.link, "WK_OUT", NOTICE) == [b"x"]


async def test_many_writers_beside_renewals(server: NatsServer) -> None:
    async with owned(server, lease=0.15) as lane:
        async with anyio.create_task_group() as renewing:
            renewing.start_soon(lane.claim.renew_forever)

            async def write(name: int) -> None:
                for number in range(40):
                    await lane.publisher.publish(
                        "out", NOTICE, f"{name}.{number}".encode(), f"{name}.{number}"
                    )

            async with anyio.create_task_group() as group:
                for name in range(4):
                    group.start_soon(write, name)
            renewing.cancel_scope.cancel()
        found = await held(lane.link, "WK_OUT", NOTICE)
        assert sorted(found) == sorted(f"{a}.{b}".encode() for a in range(4) for b in range(40))


async def test_broker_killed_thrice_every_message_once_and_in_order(server: NatsServer) -> None:
    count = 400
    async with owned(server, lease=1.0) as lane:
        sent = 0

        async def write() -> None:
            nonlocal sent
            for number in range(count):
                await lane.publisher.publish("out", NOTICE, str(number).encode(), f"m-{number}")
                await lane.publisher.publish("state", STATE, str(number).encode(), f"s-{number}")
                sent = number + 1

        async with anyio.create_task_group() as group:
            group.start_soon(lane.claim.renew_forever)
            async with anyio.create_task_group() as writing:
                writing.start_soon(write)
                for kill in (100, 200, 300):
                    await eventually(lambda kill=kill: sent >= kill, f"{kill} messages")  # type: ignore[misc]
                    server.restart(wait=False)
            group.cancel_scope.cancel()
        assert await held(lane.link, "WK_OUT", NOTICE) == [str(number).encode() for number in range(count)]
        found = await lane.publisher.get_last(STATE)
        assert found is not None
        assert found[1] == str(count - 1).encode()


async def test_a_full_stream_says_so_and_takes_the_message_later(server: NatsServer) -> None:
    async with linked(server.url) as link:
        small = {"name": "WK_OUT", "subjects": list(subjects.OUT_SUBJECTS), "discard": "new", "max_msgs": 2}
        await link.api("STREAM.CREATE.WK_OUT", small)
        await ensure_streams(link)
        lane = Lane(link, "a")
        await lane.claim.claim()
        await lane.publisher.publish("out", NOTICE, b"1", "id-1")
        with pytest.raises(StreamFull, match="WK_OUT"):
            await lane.publisher.publish("out", NOTICE, b"2", "id-2")
        await link.api("STREAM.UPDATE.WK_OUT", {**small, "max_msgs": 10})
        await lane.publisher.publish("out", NOTICE, b"2", "id-2")
        assert await held(link, "WK_OUT", NOTICE) == [b"1", b"2"]


async def test_what_is_too_large_is_not_sent(server: NatsServer) -> None:
    async with owned(server) as lane:
        with pytest.raises(TooLarge):
            await lane.publisher.publish("out", NOTICE, b"x" * (lane.link.max_payload - 300), "id")
        with pytest.raises(TooLarge):
            await lane.publisher.publish_rejected(
                "wk.v1.out.t.l._.rejected", b"x" * lane.link.max_payload, "i"
            )
        with pytest.raises(TooLarge):
            await lane.publisher.publish_record(RECORD, b"x" * lane.link.max_payload)
        assert lane.link.generation == 1


async def test_a_stream_with_a_smaller_limit_says_too_large(server: NatsServer) -> None:
    async with linked(server.url) as link:
        config = {"name": "WK_OUT", "subjects": list(subjects.OUT_SUBJECTS), "max_msg_size": 1000}
        await link.api("STREAM.CREATE.WK_OUT", config)
        await ensure_streams(link)
        lane = Lane(link, "a")
        await lane.claim.claim()
        with pytest.raises(TooLarge):
            await lane.publisher.publish("out", NOTICE, b"x" * 2000, "id")


async def test_rejections_are_stored_once_and_need_no_claim(server: NatsServer) -> None:
    async with owned(server) as lane:
        subject = subjects.outbound("t", "l", "_", "rejected")
        stranger = Lane(lane.link, "never")
        for _ in range(2):
            await stranger.publisher.publish_rejected(subject, b"{}", "r-1")
        assert await held(lane.link, "WK_REJECTED", subject) == [b"{}"]


async def test_records_go_in_without_an_id_others_could_use_up(server: NatsServer) -> None:
    async with owned(server) as lane:
        assert await lane.publisher.get_first(RECORD) is None
        assert await lane.publisher.publish_record(RECORD, b"1") == 1
        assert await lane.publisher.publish_record(RECORD, b"1") == 2
        assert await lane.publisher.publish_record(RECORD, b"3") == 3
        assert await lane.publisher.get_first(RECORD) == (1, b"1")
        assert await lane.publisher.get_last(RECORD) == (3, b"3")
        message = (await lane.link.api("STREAM.MSG.GET.WK_IN", {"seq": 1}))["message"]
        assert b"Nats-Msg-Id" not in base64.b64decode(message["hdrs"])
        server.kill9()
        with pytest.raises(Unavailable):
            await lane.publisher.publish_record(RECORD, b"4")
        with pytest.raises(Unavailable):
            await lane.publisher.get_last(RECORD)


async def test_a_full_input_stream_says_so(server: NatsServer) -> None:
    async with linked(server.url) as link:
        config = {"name": "WK_IN", "subjects": list(subjects.IN_SUBJECTS), "discard": "new", "max_msgs": 1}
        await link.api("STREAM.CREATE.WK_IN", config)
        await ensure_streams(link)
        assert await publish_inbound(link, RECORD, b"1") == 1
        with pytest.raises(StreamFull):
            await publish_inbound(link, RECORD, b"2", give_up_after=0.05)


async def test_publishing_can_be_cancelled_and_goes_on(server: NatsServer) -> None:
    async with owned(server) as lane:
        server.freeze()
        with anyio.move_on_after(0.2) as scope:
            await lane.publisher.publish("out", NOTICE, b"x", "id-1")
        assert scope.cancelled_caught
        server.resume()
        await lane.publisher.publish("out", NOTICE, b"x", "id-1")
        await lane.publisher.publish("out", NOTICE, b"y", "id-2")
        assert await held(lane.link, "WK_OUT", NOTICE) == [b"x", b"y"]


async def test_permission_taken_away_later_delays_and_loses_nothing() -> None:
    user = '{ user: "u", password: "p", permissions: { publish: %s, subscribe: ">" } }'
    config = f"authorization {{ users = [ {user} ] }}"
    with NatsServer(config=config % '">"') as server:
        async with linked(server.url_for("u", "p")) as link:
            await ensure_streams(link)
            lane = Lane(link, "a")
            await lane.claim.claim()
            server.write_config(config % '{ allow: ">", deny: "wk.v1.out.>" }')
            server.reload()
            done = anyio.Event()

            async def write() -> None:
                await lane.publisher.publish("out", NOTICE, b"x", "id-1")
                done.set()

            async with anyio.create_task_group() as group:
                group.start_soon(write)
                with anyio.move_on_after(0.3):
                    await done.wait()
                assert not done.is_set()
                server.write_config(config % '">"')
                server.reload()
            assert await held(link, "WK_OUT", NOTICE) == [b"x"]


def test_every_subject_has_its_stream() -> None:
    assert stream_of(NOTICE) == "WK_OUT"
    assert stream_of(STATE) == "WK_STATE"
    assert stream_of(RECORD) == "WK_IN"
    assert stream_of("wk.v1.out.t.l._.rejected") == "WK_REJECTED"
    for foreign in ("wk.v1.ask.t.l.r.packet", "other", "wk.v1"):
        with pytest.raises(ValueError, match="no stream"):
            stream_of(foreign)
