"""Every row runs, at sizes that say nothing, and its result has the shape the table needs. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.histories import Histories
from benchmarks.places import Run
from benchmarks.registry import GROUPS, ROWS, Group
from benchmarks.report import page
from benchmarks.runner import chosen
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
        {"rss_mib": 50 + 5 * n, "wal_bytes": 0, "files": 10 + n, "threads": 4, "tasks": 9, "events": 10 * n,
         "told": 10 * n, "db_bytes": 1_000 * n}
        for n in range(40)
    ]  # fmt: skip
    verdicts = judged(samples)
    assert not verdicts["rss_mib"]["flat"]
    assert not verdicts["files"]["flat"]
    assert verdicts["threads"]["flat"]
    assert verdicts["db_bytes_per_event"]["flat"]
    assert verdicts["nothing_lost"]["flat"]


def test_the_published_page_is_that_of_the_published_results() -> None:
    here = Path(__file__).parent
    if not (here / "results.json").exists():
        pytest.skip("no full run was published yet: make bench")
    results = json.loads((here / "results.json").read_text())
    assert (here / "RESULTS.md").read_text() == page(results)
