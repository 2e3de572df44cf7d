"""Replay: what comes twice, in other batches, after a crash or days later changes nothing.

That nothing out of order makes anything more allowed is a law of the ledger alone (``test_ledger_laws``).
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.state import Lane
from sidecar.desk import fold_settings_of
from sidecar.transport.pump import Delivery
from storage.records import Cursor
from support import one_thread
from support.harness import CREATED, Harness, Killed, Life, workplace
from support.laws import law
from support.tellings import Deal, words
from support.truth import Truth
from support.voyages import METRICS, SEEDS, Piece, Voyage, pair


def _pieces(drawn: list[int]) -> list[Piece]:
    """Without what contradicts an earlier message: that is a violation, however often it comes."""
    return [piece for word in drawn for piece in pair(word) if piece[0] != "other"]


@law()
@given(words(1, 3).map(_pieces), SEEDS, st.integers(0, 2**24 - 1))
def test_what_comes_again_at_once_or_days_later_changes_nothing(
    pieces: list[Piece], seed: int, course: int
) -> None:
    """Some of it twice in a row, a crash between two batches, then all of it once more: in order, in any order,
    or as a stream made anew that is read from its beginning."""
    with workplace(prepared=True) as folder:
        voyage = Voyage(Harness(folder, metrics=METRICS))
        voyage.begin()
        for piece in pieces:
            voyage.piece(piece)
        _told_twice(voyage.harness, Random(seed))
        _Replay(voyage.harness, Deal(course), Random(seed)).run(seed)


def _told_twice(harness: Harness, random: Random) -> None:
    """The broker stored some messages twice, next to each other or some way on."""
    for _ in range(random.randrange(4)):
        item = random.choice(harness.broker.stream[1:])
        *_, run, channel = item.subject.split(".")
        harness.broker.put(run, channel, item.payload)


_DAYS = 3 * 86_400.0
_BATCHES = (1, 2, 5, 13, 256)


class _Replay:
    def __init__(self, harness: Harness, deal: Deal, random: Random) -> None:
        self.harness = harness
        self.random = random
        self.how = deal.pick(("in order", "in any order", "made anew"))
        self.crash = deal.pick((False, False, True))
        self.compacted = deal.pick((False, False, False, True))

    def run(self, seed: int) -> None:
        plain, accepted = self._plainly()
        if self.crash:
            one_thread.run(self._dies_half_way, seed=seed)
        if self.how != "made anew":
            one_thread.run(self._in_one_life, plain, accepted, seed=seed)
            return
        assert one_thread.run(self._first, plain, seed=seed) == plain
        self.harness.wait(_DAYS)
        assert one_thread.run(self._anew, plain, accepted, seed=seed) == plain

    async def _dies_half_way(self) -> None:
        try:
            async with self.harness.alive() as life:
                for _ in range(3):
                    await life.read(self.random.choice(_BATCHES))
                life.kill()
        except* Killed:
            pass

    async def _in_one_life(self, plain: Any, accepted: list[Delivery]) -> None:
        async with self.harness.alive() as life:
            assert await self._read_first(life, plain) == plain
            self.harness.wait(_DAYS)
            if self.how == "in any order":
                self.random.shuffle(accepted)
            for item in accepted:
                *_, run, channel = item.subject.split(".")
                self.harness.broker.put(run, channel, item.payload)
            await self._read(life)
            assert await _everything(life, plain) == plain

    async def _read(self, life: Life) -> None:
        while life.unread:
            await life.read(self.random.choice(_BATCHES))
        await life.read_all()

    async def _first(self, plain: Any) -> Any:
        async with self.harness.alive() as life:
            return await self._read_first(life, plain)

    async def _read_first(self, life: Life, plain: Any) -> Any:
        await self._read(life)
        if self.compacted:
            await life.compact()
        return await _everything(life, plain)

    async def _anew(self, plain: Any, accepted: list[Delivery]) -> Any:
        """The stream was made anew, of what counts, and is read from its beginning."""
        harness = self.harness
        settings = harness.broker.stream[:1]
        harness.broker.stream[:] = [
            msgspec.structs.replace(item, stream_seq=seq)
            for seq, item in enumerate([*settings, *accepted], 1)
        ]
        async with harness.alive() as life:
            await life.desk.commit(cursor=Cursor(0, CREATED.replace("11-30", "12-03")))
            await self._read(life)
            return await _everything(life, plain)

    def _plainly(self) -> tuple[Any, list[Delivery]]:
        """What every message told once and nothing else makes of it, and those that count. What is refused
        is refused again, and counted, as often as it comes."""
        truth = Truth(Lane(settings=fold_settings_of(self.harness.config)))
        accepted: list[Delivery] = []
        seen: set[tuple[str, bytes]] = set()
        for item in self.harness.broker.stream:
            if (item.subject, item.payload) in seen:
                continue
            folded = len(truth.order)
            truth.take([item])
            if len(truth.order) > folded:
                seen.add((item.subject, item.payload))
                accepted.append(item)
        values = truth.values()
        said = [(run, values[run], truth.looks(run), truth.protected_digest(run)) for run in sorted(values)]
        return said, accepted


async def _everything(life: Life, plain: Any) -> Any:
    return [
        (run, await life.value(run), await life.looks(run), (await life.packet(run))["protected_digest"])
        for run, *_ in plain
    ]
