"""What a lane keeps in memory goes by what waits and by bounds, never by how much there was. Counts, no sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar import observer
from support.bench import Bench, bench, event, started

pytestmark = pytest.mark.anyio

_CALLS = 1_200


async def _called_and_returned(made: Bench, run: str, first: int, count: int) -> None:
    told = []
    for n in range(first, first + count):
        told.append(event("tool.called", f"e-{n}", call_id=f"c-{n}", tool="read_file", arguments={}))
        told.append(event("tool.returned", f"r-{n}", call_id=f"c-{n}", status="ok", content="done"))
    for start in range(0, len(told), 100):
        await made.tell(run, *told[start : start + 100])


async def test_a_call_that_has_returned_is_watched_no_more(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        await made.tell("r1", started())
        await _called_and_returned(made, "r1", 0, 1)
        few = made.deadlines.held
        await _called_and_returned(made, "r1", 1, _CALLS)
        assert made.deadlines.held <= few + 300
        assert not made.deadlines.watched()


async def test_what_still_waits_is_watched_however_much_has_ended(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        await made.tell("r1", started())
        await made.tell(
            "r1", event("tool.called", "e-open", call_id="c-open", tool="read_file", arguments={})
        )
        await _called_and_returned(made, "r1", 0, _CALLS)
        assert made.deadlines.watched() == {("r1", "call/e-open")}


@pytest.mark.parametrize(("spare_mib", "given"), [(1, 0), (64, 1)])
async def test_free_memory_that_is_kept_is_given_back_also_where_no_run_was_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare_mib: int, given: int
) -> None:
    times: list[bool] = []
    monkeypatch.setattr(observer, "allocated", lambda: (0, spare_mib * 1024 * 1024))
    monkeypatch.setattr(observer, "give_back", lambda: times.append(True))
    async with bench(tmp_path) as made:
        await made.observer.rest()
    assert len(times) == given
