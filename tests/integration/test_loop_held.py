"""How much is done on the event loop in one piece: counted in calls, never in time. What grows with a history, or is
large, is done on threads or in portions.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from sidecar.intake import Intake
from support.bench import Bench, bench, event, settled, started

pytestmark = pytest.mark.anyio

_WORDS = "the pump runs and the tide falls; "
_SPARE = 300
"""Calls: a task that is woken a little earlier or later finds more or less to do."""


class Calls:
    """Most calls, of Python and of C, that one callback of the loop made on the loop's thread."""

    most = 0
    where = ""


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    seen, run, count = Calls(), asyncio.Handle._run, 0

    def note(frame: FrameType, what: str, argument: Any) -> None:
        nonlocal count
        if what in ("call", "c_call"):
            count += 1

    def watched(handle: asyncio.Handle) -> None:
        nonlocal count
        count = 0
        sys.setprofile(note)
        try:
            run(handle)
        finally:
            sys.setprofile(None)
            if count > seen.most:
                seen.most, seen.where = count, repr(handle)

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", watched)
        yield seen


async def _history(made: Bench, run: str, exchanges: int) -> None:
    # So large a window that no compaction falls due by itself.
    model = {"name": "m-1", "context_window": 400_000_000, "max_output_tokens": 4_000}
    told = [started(model=model)]
    for n in range(exchanges):
        told.append(event("message", f"q-{n}", role="user", content=f"{n}: go on, {_WORDS}"))
        told.append(
            event("message", f"a-{n}", role="assistant", message_id=f"m-{n}", content=f"{n}: {_WORDS * 40}")
        )
    for start in range(0, len(told), 200):
        await made.tell(run, *told[start : start + 200])


async def _compacted(folder: Path, exchanges: int, monkeypatch: pytest.MonkeyPatch) -> Calls:
    async with bench(folder) as made:
        await _history(made, "r1", exchanges)
        with counted(monkeypatch) as seen:
            answer = await made.ask("r1", "compact")
            assert answer["state"] == "started", answer
            await settled(made)
        assert (await made.ask("r1", "status"))["checkpoint"] is not None
        return seen


async def test_a_compaction_holds_the_loop_no_longer_after_more_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = await _compacted(tmp_path / "short", 300, monkeypatch)
    long = await _compacted(tmp_path / "long", 1_800, monkeypatch)
    assert long.most <= short.most + _SPARE, long.where


async def _crowded(made: Bench, run: str, items: int) -> None:
    """A run with so much that must survive."""
    model = {"name": "m-1", "context_window": 400_000_000, "max_output_tokens": 4_000}
    await made.tell(run, started(model=model))
    for n in range(items):
        match n % 3:
            case 0:
                told = event(
                    "constraint.set", f"c-{n}", constraint_id=f"c-{n}", text=f"{n}: {_WORDS}", source="user"
                )
            case 1:
                told = event("decision.made", f"d-{n}", decision_id=f"d-{n}", summary=f"{n}: {_WORDS}")
            case _:
                told = event("question.opened", f"q-{n}", question_id=f"q-{n}", text=f"{n}: {_WORDS}")
        await made.tell(run, told)


async def test_a_packet_at_its_limit_is_made_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path) as made:
        await _crowded(made, "few", 220)
        await _crowded(made, "many", 660)
        sizes = {}
        for run in ("few", "many"):
            await made.ask(run, "packet")
            with counted(monkeypatch) as seen:
                answer = await made.ask(run, "packet")
            sizes[run] = seen
            assert answer["packet_id"]
        assert sizes["many"].most <= sizes["few"].most + _SPARE, sizes["many"].where


async def test_a_large_event_is_read_and_folded_on_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[bool]] = {"_decode": set(), "_one": set()}
    for name, seen in threads.items():
        _spied(monkeypatch, name, seen)
    size = 2 * 1024 * 1024
    async with bench(tmp_path, INTAKE__MAX_EVENT_BYTES=str(2 * size)) as made:
        await made.tell("r1", started(), event("message", "q-1", role="user", content="go on"))
        assert threads == {"_decode": {True}, "_one": {True}}
        for seen in threads.values():
            seen.clear()
        with counted(monkeypatch) as calls:
            await made.tell(
                "r1",
                event(
                    "tool.returned", "t-1", call_id="c-1", status="ok", content=_WORDS * (size // len(_WORDS))
                ),
            )
        assert threads == {"_decode": {False}, "_one": {False}}
        assert calls.most < 5_000, calls.where


def _spied(monkeypatch: pytest.MonkeyPatch, name: str, on_loop: set[bool]) -> None:
    """Note of each call whether it was on the loop's thread."""
    work: Callable[..., Any] = getattr(Intake, name)

    def spied(self: Intake, *arguments: Any) -> Any:
        on_loop.add(threading.current_thread() is threading.main_thread())
        return work(self, *arguments)

    monkeypatch.setattr(Intake, name, spied)
