"""The law everything serves: ledger, answers and the protected part are functions of the stream alone.

Whatever is read in whatever batches, compacted by whatever summariser, killed at whatever commit and delivered
again: nothing of it may show. ``support.laws`` says how many examples there are and how to have more.
"""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import one_thread
from support.harness import Harness, Killed, workplace
from support.laws import law
from support.voyages import METRICS, PIECES, SEEDS, STEPS, Voyage, legs


@law()
@given(STEPS, SEEDS)
def test_nothing_that_happens_to_the_daemon_shows_in_what_it_says(steps: Any, seed: int) -> None:
    """After each step: ledger, answers, packets; at the end: coverage, pairs, and all that was sent."""
    with workplace(prepared=True) as folder:
        voyage = Voyage(Harness(folder, metrics=METRICS))
        voyage.begin()
        one_thread.run(voyage.sail, steps, seed=seed)


@law(100)
@given(legs(3, 5))
def test_nor_beside_one_that_nothing_ever_happens_to(steps: Any) -> None:
    """The same with the driver's threads and a real clock, and a daemon beside it that only reads."""
    with workplace() as folder, workplace() as other:
        voyage = Voyage(Harness(folder))
        voyage.begin()
        anyio.run(voyage.sail, steps)
        anyio.run(_undisturbed, voyage, Harness(other, {"mode": "observe"}))


async def _undisturbed(voyage: Voyage, harness: Harness) -> None:
    """One that never compacts and never dies reads the same stream at once and says the same."""
    harness.broker.stream[:] = voyage.harness.broker.stream
    async with harness.alive() as life:
        await life.read_all()
        voyage.follow(life)
        for run, value in voyage.truth.values().items():
            assert await life.value(run) == value
            assert await life.looks(run) == voyage.truth.looks(run)
            packet = await life.packet(run)
            assert packet["protected_digest"] == voyage.truth.protected_digest(run)
            assert packet["checkpoint"] is None


@law(8)
@given(PIECES, st.integers(0, 12), st.sampled_from(["before", "after", "refused"]), st.booleans(), SEEDS)
def test_any_commit_of_a_compaction_may_be_the_last(
    pieces: Any, after: int, kind: str, asked: bool, seed: int
) -> None:
    """Old checkpoint and old boundary, or new checkpoint and new boundary; and the next attempt succeeds."""
    with workplace(prepared=True) as folder:
        voyage = Voyage(Harness(folder, metrics=METRICS))
        voyage.begin()
        for piece in pieces:
            voyage.piece(piece)
        voyage.harness.tell("boundary.marked", kind="turn_ended")
        steps = [
            ("read_all", 256),
            ("taken_up", "r"),
            ("read_all", 256),
            ("fault", kind, after),
            ("compact", "r", "good"),
            ("wait", 400.0),
            ("compact", "r", "good") if asked else ("crash",),
            ("publish", "r"),
        ]
        one_thread.run(voyage.sail, steps, seed=seed)


@pytest.mark.parametrize("runner", [anyio.run, one_thread.run])
def test_the_kill_of_the_harness_is_a_kill(runner: Any) -> None:
    """The laws above prove nothing if a dead daemon still stores."""
    with workplace() as folder:
        harness = Harness(folder)
        harness.start()

        async def die() -> None:
            async with harness.alive() as life:
                life.dead = True
                await life.read()

        async def look() -> None:
            async with harness.alive() as life:
                assert life.desk.cursor.stream_seq == 0

        with pytest.raises(BaseExceptionGroup) as died:
            runner(die)
        assert died.value.subgroup(Killed) is not None
        runner(look)
