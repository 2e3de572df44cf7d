"""Every row runs, at sizes that say nothing, and its result has the shape the table needs. No time is asserted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import runner
from benchmarks.figures import Row, at_most
from benchmarks.histories import Histories
from benchmarks.machine import described
from benchmarks.places import Run
from benchmarks.profiled import Share, shares, table
from benchmarks.registry import GROUPS, ROWS, Group
from benchmarks.report import page, publish, publish_soak, write_page
from benchmarks.runner import Mixed, Wanted, chosen, measure, whole
from benchmarks.sizes import SMALL
from benchmarks.soak import judged, soak

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Histories]:
    run = Run(
        SMALL, SMALL.rounds, tmp_path_factory.mktemp("bench"), Path("no-such-python"), lambda what: None
    )
    return run, Histories(run)


@pytest.mark.parametrize(
    "group",
    [group for group in GROUPS if group.name != "peers"],
    ids=lambda group: group.name.replace(" ", "-"),
)
async def test_a_group_of_rows_runs(group: Group, shared: tuple[Run, Histories]) -> None:
    run, histories = shared
    rows = await group.measure(run, set(group.rows), histories)
    assert sorted(row.number for row in rows) == sorted(group.rows)
    for row in rows:
        value = json.loads(json.dumps(row.value()))
        assert value["path"]
        assert value["title"]
        assert value["figures"]
        for figure in value["figures"]:
            assert figure["rounds"] == len(figure["samples"]) >= 1
            assert figure["min"] <= figure["median"] <= figure["max"]
            assert (figure["met"] is None) == (figure["aim"] is None)
    lost = [figure for row in rows for figure in row.figures if "lost" in figure.name]
    assert all(figure.median == 0 for figure in lost)


async def test_a_peer_that_is_not_there_is_missing_and_nothing_fails(shared: tuple[Run, Histories]) -> None:
    (group,) = (group for group in GROUPS if group.name == "peers")
    (row,) = await group.measure(shared[0], {"6"}, shared[1])
    assert len(row.missing) == 7
    assert all(figure.name.startswith("ours") for figure in row.figures)


def test_rows_are_numbered_once_and_chosen_by_number() -> None:
    assert len(ROWS) == len(set(ROWS))
    assert chosen(None) == ROWS
    assert chosen("1, 6") == ("1", "6")
    with pytest.raises(ValueError, match="99"):
        chosen("1,99")


async def test_the_soak_samples_judges_and_loses_nothing(tmp_path: Path) -> None:
    report = await soak(0.05, tmp_path / "soak.json", rate=100.0, every=0.5)
    assert report == json.loads((tmp_path / "soak.json").read_text())
    assert report["verdicts"]["nothing_lost"]["flat"]
    assert {"rss_mib", "wal_bytes", "files", "tasks", "db_bytes_per_event"} <= set(report["verdicts"])
    assert report["samples"][-1]["told"] > 0


def test_growth_is_not_judged_flat() -> None:
    samples = [
        {"rss_mib": 50 + 5 * n, "heap_mib": 30, "blocks": 10_000 * n, "hot": 50, "outbox": 1, "wal_bytes": 0,
         "files": 10 + n, "threads": 4, "tasks": 9, "events": 10 * n, "told": 10 * n, "db_bytes": 1_000 * n}
        for n in range(40)
    ]  # fmt: skip
    verdicts = judged(samples)
    assert not verdicts["rss_mib"]["flat"]
    assert not verdicts["files"]["flat"]
    assert not verdicts["blocks"]["flat"]
    assert verdicts["heap_mib"]["flat"]
    assert verdicts["threads"]["flat"]
    assert verdicts["db_bytes_per_event"]["flat"]
    assert verdicts["nothing_lost"]["flat"]


def test_the_published_page_is_that_of_the_published_results(tmp_path: Path) -> None:
    here = Path(__file__).parent
    if not (here / "results.json").exists():
        pytest.skip("no full run was published yet: make bench")
    for name in ("results.json", "soak.json"):
        if (here / name).exists():
            shutil.copy(here / name, tmp_path / name)
    assert (here / "RESULTS.md").read_text() == write_page(tmp_path).read_text()


def _wanted(kept: Path, **more: Any) -> Wanted:
    return Wanted(
        **{
            "rows": ("1", "2", "3"),
            "sizes": SMALL,
            "rounds": 1,
            "peers": Path("no-such-python"),
            "kept": kept,
            "command": "python -m tests.benchmarks",
            "scratch": kept.parent,
            **more,
        }
    )


async def test_an_interrupted_run_is_gone_on_with_and_a_failed_row_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    trouble: list[BaseException] = [ValueError("no luck"), KeyboardInterrupt()]

    def group(name: str, *rows: str, fails: bool = False) -> Group:
        async def work(run: Run, wanted: set[str], histories: Histories) -> list[Row]:
            if fails and trouble:
                raise trouble.pop(0)
            measured.extend(sorted(wanted))
            made = []
            for number in sorted(wanted):
                made.append(Row(number, "a title", "a path"))
                made[-1].add("a figure", [1.0, 2.0], at_most(1.2))
            return made

        return Group(name, rows, work)

    monkeypatch.setattr(
        runner,
        "GROUPS",
        (group("a", "1"), group("b", "2", fails=True), group("c", "3", fails=True)),
    )
    kept = tmp_path / "results.json"
    with pytest.raises(KeyboardInterrupt):
        await measure(_wanted(kept), lambda group, what: None)
    assert measured == ["1"]
    assert [row["row"] for row in json.loads(kept.read_text())["rows"] if "error" in row] == ["2"]
    results = await measure(_wanted(kept, resume=True), lambda group, what: None)
    assert measured == ["1", "2", "3"]
    assert [row["row"] for row in results["rows"]] == ["1", "2", "3"]
    assert not [row for row in results["rows"] if "error" in row]
    assert not list(tmp_path.glob("wk-bench-*"))
    assert not whole(results)
    assert whole({"scale": "full", "rounds": 5, "rows": [{"row": row} for row in ROWS]})
    assert not whole({"scale": "full", "rounds": 3, "rows": [{"row": row} for row in ROWS]})
    with pytest.raises(Mixed, match="rounds 1, not 2"):
        await measure(_wanted(kept, resume=True, rounds=2), lambda group, what: None)


def test_the_page_begins_with_every_aim_and_says_what_was_missed(tmp_path: Path) -> None:
    rows = [
        Row("1", "a first title", "a path"),
        Row("2", "another one", "a path", missing=["peer: not there"]),
    ]
    rows[0].add("a ratio", [1.0, 1.1, 5.0], at_most(1.2))
    rows[0].add("what it is made of", [3.0], unit="ms")
    rows[1].add("another ratio", [2.0, 3.0, 4.0], at_most(1.2))
    results = {
        "command": "python -m tests.benchmarks",
        "scale": "full",
        "rounds": 3,
        "began": "2026-11-30T09:00:00+00:00",
        "seconds": 60.0,
        "machine": described(tmp_path),
        "rows": [row.value() for row in rows],
    }
    text = publish(results, tmp_path).read_text()
    assert text == page(results)
    head, _, rest = text.partition("## How it was measured")
    assert "2 figures have an aim; 1 meet it. Missed: row 2 (1)" in head
    assert "| [1](#row-1-a-first-title) | a first title | a ratio | ≤ 1.2 | 1.1 x | 1 – 5 | met |" in head
    assert "**missed**" in head
    assert "what it is made of" not in head
    assert "what it is made of | 3 ms | once" in rest
    assert "Missing: peer: not there" in rest
    assert results["command"] in rest
    sample = {"seconds": 0.0, "events": 7, "finished": 1, "taken_up": 2, "asked": 3}
    soak = {
        "agents": 8,
        "window": 24_000,
        "command": "make soak MINUTES=30",
        "machine": results["machine"],
        "samples": [{**sample, "seconds": 5.0 * n} for n in range(37)],
        "verdicts": {
            "rss_mib": {"second": 80.0, "last": 120.5, "flat": False},
            "nothing_lost": {"told": 7, "stored": 7, "flat": True},
        },
    }
    publish_soak(soak, tmp_path)
    kept = json.loads((tmp_path / "soak.json").read_text())
    assert [item["seconds"] for item in kept["samples"]] == [0.0, 60.0, 120.0, 180.0]
    text = (tmp_path / "RESULTS.md").read_text()
    assert text == page(results, kept)
    assert "| rss mib | 80 | 120.5 | **grows** |" in text
    assert "| events told and stored | 7 | 7 | none lost |" in text


def test_a_sample_counts_for_the_innermost_function_of_ours() -> None:
    total, found = shares(
        [
            "main (benchmarks/daemon_child.py:9);take (/x/sidecar/intake.py:70);decode (/x/protocol/codec.py:5) 6",
            "main (benchmarks/daemon_child.py:9);take (/x/sidecar/intake.py:71);select (selectors.py:4) 3",
            "main (benchmarks/daemon_child.py:9);select (selectors.py:4) 1",
            "not a stack",
        ]
    )
    assert total == 10
    assert found == [
        Share(0.6, "protocol/codec.py decode", ""),
        Share(0.3, "sidecar/intake.py take", "select"),
        Share(0.1, "the event loop and the client library", "select"),
    ]
    text = table(total, found, 2)
    assert "| 60.0% | `protocol/codec.py decode` |  |" in text
    assert "| 10.0% | 1 others | |" in text
