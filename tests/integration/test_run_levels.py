"""How many runs are at which level: those that left memory count as well, and nothing is counted over for it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from sidecar.view import decode_level, decode_view
from support.harness import LANE, TENANT, Fault, Harness, Life

pytestmark = pytest.mark.anyio

HOT = 3


async def _counts(life: Life) -> tuple[dict[str, int], dict[str, int]]:
    """By level: as counted along the way, and as everything stored says."""
    rows = await life.store.runs(TENANT, LANE, finished=False)
    stored = Counter(decode_view(row.view).budget.level for row in rows)
    return {level: number for level, number in life.desk.runs.levels.items() if number}, dict(stored)


def _fill(harness: Harness, run: str, tokens: int) -> None:
    harness.start(run)
    harness.turn(200, run=run)
    harness.tell("usage.reported", run=run, model="m", context_tokens=tokens, output_tokens=1)


async def test_runs_that_left_memory_are_counted_with_the_others(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"mode": "observe"})
    async with harness.alive() as life:
        life.desk.runs._capacity = HOT
        for number in range(12):
            _fill(harness, f"r{number}", 1_000 + 3_000 * number)
            await life.read_all()
        assert len(life.desk.runs.hot) <= HOT
        counted, stored = await _counts(life)
        assert counted == stored
        assert sum(counted.values()) == 12
        assert len(counted) > 3
        # One from the cold ones ends, one gets emptier, one is opened again.
        harness.tell("run.finished", run="r0", outcome="failed")
        harness.tell("run.finished", run="r11", outcome="failed")
        harness.tell("usage.reported", run="r10", model="m", context_tokens=500, output_tokens=1)
        harness.authority("run.resumed", run="r11")
        await life.read_all()
        counted, stored = await _counts(life)
        assert counted == stored
        assert sum(counted.values()) == 11


async def test_a_commit_that_fails_counts_nothing_twice(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"mode": "observe"})
    async with harness.alive() as life:
        _fill(harness, "r", 30_000)
        harness.fault = Fault("refused")
        await life.read()
        assert life.refused == 1
        assert not any(life.desk.runs.levels.values())
        await life.read_all()
        counted, stored = await _counts(life)
        assert counted == stored
        assert sum(counted.values()) == 1


async def test_a_new_start_counts_what_is_stored(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"mode": "observe"})
    async with harness.alive() as life:
        for number in range(5):
            _fill(harness, f"r{number}", 1_000 + 8_000 * number)
        harness.start("done")
        harness.tell("run.finished", run="done", outcome="failed")
        await life.read_all()
    async with harness.alive() as life:
        await life.parts.observer.caught_up()
        counted, stored = await _counts(life)
        assert counted == stored
        assert sum(counted.values()) == 5
        await life.parts.observer.look_again()
        shown = {
            level: harness.metrics.registry.get_sample_value("watchkeeper_runs", {"level": level})
            for level in counted
        }
        assert shown == counted


def test_a_level_is_read_without_the_rest_of_a_view() -> None:
    assert decode_level(b"") == "ok"
    assert decode_level(b"\xc1 broken") == "ok"
    assert decode_level(b"\x80") == "ok"
