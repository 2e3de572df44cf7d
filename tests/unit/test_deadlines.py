"""What waits for time to pass, and that nothing is kept of what waits no longer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from sidecar.core.state import Call, Head, Ledger
from sidecar.deadlines import Deadlines, _Queue, note_changes
from sidecar.desk import Desk
from sidecar.runs import HotRun
from sidecar.transport.publisher import LanePublisher
from sidecar.view import View


def _deadlines() -> Deadlines:
    config = SimpleNamespace(
        operations=SimpleNamespace(unknown_after_seconds=60.0),
        calls=SimpleNamespace(abandon_after_seconds=3_600.0),
        intake=SimpleNamespace(gap_after_seconds=60.0),
    )
    desk: Any = SimpleNamespace(config=config, caught_up=True, mono=lambda: 5.0, wall=lambda: 7.0)
    return Deadlines(cast(Desk, desk), cast(LanePublisher, None))


def _call(ledger: Ledger, name: str) -> None:
    ledger.put("call", Call(id=name, call_id=name, tool="bash"))


def test_a_call_begins_to_wait_and_ends_it() -> None:
    ledger = Ledger(Head(run="r"))
    hot = HotRun(ledger, View(), b"", "r")
    _call(ledger, "e-1")
    assert list(note_changes(hot, 3.0)) == [("call/e-1", 3.0)]
    assert hot.view.since == {"call/e-1": 3.0}
    ledger.drop("call", "e-1")
    assert list(note_changes(hot, 4.0)) == [("call/e-1", None)]
    assert (hot.view.since, hot.changed, ledger.changed) == ({}, {("call", "e-1")}, set())


def test_a_call_that_came_and_went_unseen_never_waited() -> None:
    ledger = Ledger(Head(run="r"))
    hot = HotRun(ledger, View(), b"", "r")
    _call(ledger, "e-1")
    ledger.drop("call", "e-1")
    assert list(note_changes(hot, 4.0)) == []


def test_what_waits_no_longer_is_let_go_of_long_before_its_time() -> None:
    deadlines = _deadlines()
    deadlines.watch("r", [("call/left", 1.0), ("operation/op", 1.0)])
    for number in range(20_000):
        deadlines.watch("r", [(f"call/e-{number}", 1.0)])
        deadlines.watch("r", [(f"call/e-{number}", None)])
    assert deadlines.held < 600
    assert deadlines.watched() == {("r", "call/left"), ("r", "operation/op")}


def test_what_is_said_anew_is_over_when_it_was_said_last() -> None:
    queue = _Queue()
    queue.put(("r", "call/a"), 3.0)
    queue.put(("r", "call/b"), 4.0)
    queue.put(("r", "call/a"), 9.0)
    assert queue.take(2.0) is None
    assert queue.take(5.0) == ("r", "call/b")
    assert queue.take(8.0) is None
    queue.drop(("r", "call/c"))
    assert queue.take(9.0) == ("r", "call/a")
    assert (queue.over, queue.heap) == ({}, [])
