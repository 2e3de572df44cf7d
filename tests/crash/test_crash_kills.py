"""The daemon killed without warning at fifty moments of one replay: nothing is lost, doubled or half done."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest

from sidecar.replay import Turn
from support.daemon import LANE, TENANT, DaemonProcess
from support.evidence import Left, comparable, prove_whole
from support.nats_server import NatsServer
from support.voyage import RUN, at_sea, laid_up, player, published, refolded, voyage_events

pytestmark = pytest.mark.anyio

KILLS = 50
_LIKELY = {"compacting": 0.8, "relaying": 0.2}
"""How often a moment of that kind is taken, as they come."""
SEED = int(os.environ.get("CRASH_SEED", "20261130"))


class Reaper:
    """Kills the daemon at random moments and starts it again: between events, while an attempt is under way,
    while its output leaves, and while it is still starting.
    """

    def __init__(self, daemon: DaemonProcess, seed: int, events: int, kills: int) -> None:
        self._daemon = daemon
        self._chance = random.Random(seed)
        self._marks = sorted(self._chance.sample(range(1, events), kills))
        self._reached = 0
        self._heard: str | None = None
        self._wake = anyio.Event()
        self.done: Counter[str] = Counter()

    def progress(self, turn: Turn) -> None:
        """One more event is published and settled."""
        self._reached = turn.report.events
        self._wake.set()

    def hear(self, message: Any) -> None:
        """The daemon said something."""
        if b'"kind":"compaction_started"' in message.data:
            self._heard = "compacting"
        elif message.subject.endswith((".packet", ".receipt")):
            self._heard = self._heard or "relaying"
        self._wake.set()

    async def reap(self) -> None:
        """Until every kill is done."""
        while self._marks:
            await self._wake.wait()
            self._wake = anyio.Event()
            heard, self._heard = self._heard, None
            if self._reached >= self._marks[0]:
                self._marks.pop(0)
                await self._kill("publishing", 0.03)
            elif heard is not None and self._chance.random() < _LIKELY[heard]:
                # In the place of a later one, so that the number of all stays.
                self._marks.pop(self._chance.randrange(len(self._marks)))
                await self._kill(heard, 0.02 if heard == "compacting" else 0.003)

    async def _kill(self, moment: str, within: float) -> None:
        await anyio.sleep(self._chance.random() * within)
        self._again(moment)
        while self._marks and self._chance.random() < 0.2:
            self._marks.pop(self._chance.randrange(len(self._marks)))
            await anyio.sleep(self._chance.random() * 0.6)
            self._again("starting")

    def _again(self, moment: str) -> None:
        self._daemon.kill9()
        self._daemon.start()
        self.done[moment] += 1


async def test_fifty_kills_in_one_replay_leave_what_an_undisturbed_one_leaves(
    calm: Left, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A question that died with the daemon is asked again sooner.
    monkeypatch.setattr("sidecar.replay._ASK_SECONDS", 0.5)
    print(f"seed {SEED} (CRASH_SEED)")
    messages = voyage_events()
    began = time.monotonic()
    with NatsServer() as server:
        async with at_sea(server, tmp_path / "daemon") as (daemon, link):
            reaper = Reaper(daemon, SEED, len(messages), KILLS)
            await link.subscribe(f"wk.v1.out.{TENANT}.{LANE}.{RUN}.*", reaper.hear)
            replay = player(link, reaper.progress)
            with anyio.fail_after(240):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(reaper.reap)
                    await replay.feed(messages)
                await replay.finish()
            print(
                f"{sum(reaper.done.values())} kills in {time.monotonic() - began:.0f} s: {dict(reaper.done)}"
            )
            left = await laid_up(daemon, link)
        assert reaper.done.total() == KILLS
        print(Counter((item["outcome"], item["reason"]) for item in left.receipts))
        prove_whole(left, published(messages))
        assert left.digest == calm.digest
        assert comparable(left) == comparable(calm)
        anew = await refolded(server, tmp_path / "anew")
        assert anew == {name: left.told[name] for name in anew}


async def test_three_kills_of_the_broker_leave_what_an_undisturbed_run_leaves(
    calm: Left, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.replay._ASK_SECONDS", 0.5)
    messages = voyage_events()
    chance = random.Random(SEED)
    marks = sorted(chance.sample(range(20, len(messages) - 20), 3))
    with NatsServer() as server:
        async with at_sea(server, tmp_path / "daemon") as (daemon, link):
            due = anyio.Event()

            def progress(turn: Turn) -> None:
                if marks and turn.report.events >= marks[0]:
                    marks.pop(0)
                    due.set()

            async def broker_dies() -> None:
                nonlocal due
                for _ in range(3):
                    await due.wait()
                    due = anyio.Event()
                    await anyio.sleep(chance.random() * 0.05)
                    server.kill9()
                    await _noticed(daemon)
                    server.start()

            replay = player(link, progress)
            with anyio.fail_after(240):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(broker_dies)
                    await replay.feed(messages)
                await replay.finish()
            assert daemon.starts == 1
            await daemon.ready()
            left = await laid_up(daemon, link)
        prove_whole(left, published(messages))
        assert left.digest == calm.digest
        assert comparable(left) == comparable(calm)
        anew = await refolded(server, tmp_path / "anew")
        assert anew == {name: left.told[name] for name in anew}


async def _noticed(daemon: DaemonProcess) -> None:
    """Wait until the daemon knows that its broker is gone."""
    with anyio.fail_after(30):
        while await daemon.metric("nats_connected"):
            await anyio.sleep(0.02)
