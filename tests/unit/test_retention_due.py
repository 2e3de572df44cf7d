"""What is due to be forgotten: whole families, each run past the time of how it ended."""

from __future__ import annotations

import msgspec
import pytest

from sidecar.config import load_config
from sidecar.retention import NotForgotten, due, graves, periods
from sidecar.view import View, encode_view
from storage.records import RunSummary, StoredRun

DAY = 86_400.0
NOW = 1_000 * DAY
KEPT = {"succeeded": 10 * DAY, "failed": 20 * DAY}


def run(
    name: str, family: str = "", *, ended: str = "succeeded", days_ago: float = 11, finished: bool = True
) -> RunSummary:
    view = View(ended=ended, ended_at=NOW - days_ago * DAY)
    return RunSummary(
        run=name, family=family or name, parent=None, view=encode_view(view), finished=finished, version=1, position=1
    )  # fmt: skip


def test_a_run_is_due_once_its_time_is_over_and_not_before() -> None:
    assert due([run("a", days_ago=10), run("b", days_ago=9.99)], KEPT, NOW) == ["a"]
    assert due([run("a", ended="failed", days_ago=19), run("b", ended="failed", days_ago=21)], KEPT, NOW) == [
        "b"
    ]
    assert due([run("a", ended="cancelled", days_ago=900)], KEPT, NOW) == []


def test_a_family_goes_as_a_whole_or_not_at_all() -> None:
    old = run("root")
    assert due([old, run("child", "root")], KEPT, NOW) == ["root"]
    assert due([old, run("child", "root", days_ago=1)], KEPT, NOW) == []
    assert due([old, run("child", "root", ended="failed", days_ago=15)], KEPT, NOW) == []
    assert due([old, run("child", "root", ended="cancelled")], KEPT, NOW) == []
    assert due([old, run("child", "root", finished=False)], KEPT, NOW) == []
    assert due([run("child", "root", finished=False), old], KEPT, NOW) == []


def test_a_run_without_a_dated_end_and_a_forgotten_one_are_not_due() -> None:
    undated = run("a")
    undated = msgspec.structs.replace(undated, view=encode_view(View(ended="succeeded")))
    broken = msgspec.structs.replace(run("b"), view=b"\xc1")
    forgotten = msgspec.structs.replace(run("c"), view=b"")
    assert due([undated, broken, forgotten], KEPT, NOW) == []


def test_what_is_kept_for_ever_has_no_period() -> None:
    assert periods(load_config(None, {})) == {}
    given = {"retention.failed_days": 2, "retention.succeeded_days": 0.5}
    assert periods(load_config(None, {}, given)) == {"failed": 2 * DAY, "succeeded": DAY / 2}


def stored(name: str, *, finished: bool = True, head: bytes = b"h") -> StoredRun:
    return StoredRun(
        run=name, family="root", parent=None, finished=finished, head=head, view=encode_view(View(ended="failed")),
        chain=bytes(32), version=7, position=5, last_entry=7, items=[],
    )  # fmt: skip


def test_a_tombstone_holds_figures_and_no_words() -> None:
    attempts = {"root": (("at-1", "applied"),)}
    first, second = graves([stored("root"), stored("child")], "command", "2026-11-30T09:00:00Z", attempts)
    assert (first.run, second.run) == ("root", "child")
    assert msgspec.json.decode(first.body) == {
        "reason": "command", "outcome": "failed", "version": 7, "position": 5,
        "hash_chain": "sha256:" + "00" * 32, "attempts": [["at-1", "applied"]], "told": False,
    }  # fmt: skip


def test_what_is_not_finished_or_gone_already_is_not_forgotten() -> None:
    with pytest.raises(NotForgotten, match="not finished: child"):
        graves([stored("root"), stored("child", finished=False)], "command", "now", {})
    with pytest.raises(NotForgotten, match="already"):
        graves([stored("root", head=b"")], "command", "now", {})
