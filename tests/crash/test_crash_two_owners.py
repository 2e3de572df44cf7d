"""Two daemons on one lane by mistake: one owner at a time, and a former owner is heard no more."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from sidecar.transport.jetstream import Link
from support.daemon import LANE, TENANT, DaemonProcess
from support.evidence import (
    Left,
    Stored,
    comparable,
    prove_journal,
    prove_output,
    stored,
)
from support.links import eventually, linked
from support.nats_server import NatsServer
from support.voyage import RUN, laid_up, player, published, refolded, voyage_events

pytestmark = pytest.mark.anyio

SETTINGS = {"LEASE__SECONDS": "1"}


@asynccontextmanager
async def two(server: NatsServer, folder: Path) -> AsyncIterator[tuple[DaemonProcess, DaemonProcess, Link]]:
    """The owner, one that stands by, each with its own disk, and a link."""
    with (
        DaemonProcess(server.url, folder / "first", SETTINGS) as first,
        DaemonProcess(server.url, folder / "second", SETTINGS) as second,
    ):
        first.start()
        await first.owning()
        second.start()
        await second.ready()
        async with linked(server.url) as link:
            yield first, second, link


async def prove_fenced(link: Link) -> None:
    """Once a later owner has written to the lane's output, no former one has."""
    output = await stored(link, "WK_OUT", f"wk.v1.out.{TENANT}.{LANE}.>")
    epochs = [item.body["epoch"] for item in output]
    assert epochs == sorted(epochs)


async def newest_record(link: Link) -> Stored:
    return (await stored(link, "WK_STATE", f"wk.v1.state.{TENANT}.{LANE}._lane"))[-1]


async def test_the_second_takes_over_when_the_owner_is_killed(calm: Left, tmp_path: Path) -> None:
    messages = voyage_events()
    with NatsServer() as server:
        async with two(server, tmp_path) as (first, second, link):
            replay = player(link)
            with anyio.fail_after(200):
                await replay.feed(messages[:140])
                assert (await first.metric("lanes_owned"), await second.metric("lanes_owned")) == (1, 0)
                first.kill9()
                await second.owning()
                await replay.feed(messages[140:200])
                # The first one comes back to a lane that is another's now.
                first.start()
                await first.ready()
                assert (await first.metric("lanes_owned"), await second.metric("lanes_owned")) == (0, 1)
                await replay.feed(messages[200:260])
                # And takes it again, over the disk it left in the middle of the run.
                second.kill9()
                await first.owning()
                await replay.feed(messages[260:])
                await replay.finish()
            assert await first.metric("ledger_mismatches_total") == 0
            left = await laid_up(first, link)
            await prove_fenced(link)
        prove_journal(left, published(messages))
        prove_output(left)
        assert (left.outbox, left.open_attempts) == (0, [])
        assert left.digest == calm.digest
        assert comparable(left) == comparable(calm)
        anew = await refolded(server, tmp_path / "anew")
        assert anew == {name: left.told[name] for name in anew}


async def test_an_owner_that_slept_past_its_lease_says_nothing_more(calm: Left, tmp_path: Path) -> None:
    messages = voyage_events()
    with NatsServer() as server:
        async with two(server, tmp_path) as (first, second, link):
            replay = player(link)
            with anyio.fail_after(200):
                await replay.feed(messages[:150])
                first.freeze()
                await second.owning()
                epoch = (await newest_record(link)).body["epoch"]
                answers = Answers(link)
                await answers.listen()
                # Questions that both will see: the sleeper when it wakes.
                await answers.ask(20)
                await replay.feed(messages[150:200])
                first.resume()
                await eventually(lambda: bool(first.said("lane lost")), "the loss of the lane")
                await eventually(lambda: answers.told.total() >= 20, "the answers")
                await replay.feed(messages[200:])
                await replay.finish()
            assert (await first.metric("lanes_owned"), await second.metric("lanes_owned")) == (0, 1)
            assert (await newest_record(link)).body["epoch"] == epoch
            assert answers.epochs == {epoch}
            assert [name for name, count in answers.told.items() if count > 1] == []
            await prove_fenced(link)
            assert await first.stopped() == 0, first.log
            left = await laid_up(second, link)
        prove_journal(left, published(messages))
        prove_output(left)
        assert left.digest == calm.digest
        assert comparable(left) == comparable(calm)


class Answers:
    """Every reply to the same questions, whoever gives it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.told: Counter[str] = Counter()
        self.epochs: set[int] = set()

    async def listen(self) -> None:
        await self._link.subscribe("answers.>", self._hear)

    def _hear(self, message: Any) -> None:
        body = json.loads(message.data)
        self.told[message.subject] += 1
        self.epochs.add(body.get("epoch", -1))

    async def ask(self, number: int) -> None:
        for count in range(number):
            subject = f"wk.v1.ask.{TENANT}.{LANE}.{RUN}.status"
            await self._link.publish(subject, b"{}", reply=f"answers.{count}")


async def test_a_lane_moves_back_and_forth_and_has_one_owner_each_time(tmp_path: Path) -> None:
    messages = voyage_events(40)
    with NatsServer() as server:
        async with two(server, tmp_path) as (first, second, link):
            replay = player(link)
            owner, other = first, second
            with anyio.fail_after(200):
                for turn in range(4):
                    await replay.feed(messages[turn * 10 : turn * 10 + 10])
                    assert await owner.stopped() == 0, owner.log
                    await other.owning()
                    owner.start()
                    await owner.ready()
                    assert await owner.metric("lanes_owned") == 0
                    owner, other = other, owner
                await replay.finish()
            assert await other.stopped() == 0, other.log
            left = await laid_up(owner, link)
            await prove_fenced(link)
    prove_journal(left, published(messages))
    prove_output(left)
