"""What a lane keeps in memory goes by what waits and by bounds, never by how much there was. Counts, no sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar import memory, observer
from support.bench import Bench, bench, event, settled, started

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


async def test_system_texts_leave_memory_with_their_run(tmp_path: Path) -> None:
    model = {"name": "m-1", "context_window": 400_000_000, "max_output_tokens": 4_000}
    async with bench(tmp_path) as made:
        await made.tell(
            "r1", started(model=model), event("message", "s-1", role="system", content="be brief")
        )
        for n in range(120):
            await made.tell(
                "r1",
                event("message", f"q-{n}", role="user", content=f"{n}: go on"),
                event("message", f"a-{n}", role="assistant", message_id=f"m-{n}", content="it runs; " * 300),
            )
        assert (await made.ask("r1", "compact"))["state"] == "started"
        await settled(made)
        answer = await made.ask("r1", "context", format="openai")
        assert any("be brief" in str(message["content"]) for message in answer["messages"])
        assert made.responder.contexts.held == {"r1"}
        await made.observer.rest()
        assert made.responder.contexts.held == {"r1"}
        made.desk.runs.discard()
        await made.observer.rest()
        assert made.responder.contexts.held == frozenset()


@pytest.mark.parametrize(("spare_mib", "given"), [(1, 0), (64, 1)])
async def test_free_memory_that_is_kept_is_given_back_also_where_no_run_was_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare_mib: int, given: int
) -> None:
    times: list[bool] = []
    monkeypatch.setattr(memory, "allocated", lambda: (0, spare_mib * 1024 * 1024))
    monkeypatch.setattr(observer, "give_back", lambda: times.append(True))
    async with bench(tmp_path) as made:
        await made.observer.rest()
    assert len(times) == given
