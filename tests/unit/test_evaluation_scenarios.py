"""Scenario files: the shipped ones are sound, the documented one is whole, and a wrong one is told in one line."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from sidecar.evaluation.scenario import COVERS, ScenarioError, read_scenario, shipped
from sidecar.evaluation.story import Compact, Tell, acts
from support.sources import ROOT

WHOLE = """
title = "t"
covers = "approval"
[task]
goal = "mend the pump"
[[step]]
id = "first"
user = "Please mend the pump."
[[step]]
compact = 2
[[probe]]
name = "p"
keeps = "Please mend the pump."
"""


def read(folder: Path, text: str) -> list[object]:
    file = folder / "case.toml"
    file.write_text(text)
    scenario = read_scenario(file)
    return [scenario, acts(scenario, file)]


@pytest.mark.parametrize(
    ("instead", "by", "key", "said"),
    [
        ("[task]", "[task", "", "is not TOML"),
        ('title = "t"\n', "", "title", "is missing"),
        ('title = "t"', "title = 3", "title", "expected `str`"),
        ('covers = "approval"', 'covers = "apporval"', "covers", "one of negative_constraint, "),
        ("[task]", "colour = 3\n[task]", "colour", "allowed: title, covers, about"),
        ("[task]", "[sizes]\nwindow = 10\n[task]", "sizes.window", ">= 2000"),
        ("[task]", "[rules]\napproval_kinds = 3\n[task]", "rules.approval_kinds", "expected `array`"),
        ("[task]", "[rules]\napprovals = []\n[task]", "rules.approvals", "allowed: approval_kinds, "),
        ('goal = "mend the pump"', "", "task.goal", "is missing"),
        ("compact = 2", "compact = 2\nuser = 'x'", "step[2]", "exactly one of user, assistant"),
        ("compact = 2", "compacted = 2", "step[2]", "exactly one of user, assistant"),
        ("compact = 2", "compact = 21", "step[2].compact", "<= 20"),
        ("compact = 2", "compact = 2\nstatus = 'ok'", "step[2].status", "allowed: compact, work, tokens"),
        ("compact = 2", "wait = 'soon'", "step[2].wait", "'90s' or '2h'"),
        ("compact = 2", "call = 'x'\nstatus = 'fine'", "step[2].status", "timeout"),
        ("compact = 2", "type = 'run.stopped'", "step[2].type", "one of approval.expired, "),
        ("compact = 2", "type = 'run.paused'", "step[2]", "run.paused: "),
        ("compact = 2", "user = 'x'\nid = 'a b'", "step[2].id", "matching regex"),
        ('name = "p"\n', "", "probe[1].name", "is missing"),
        ("keeps = ", "keep = ", "probe[1]", "exactly one of keeps, state"),
        ("keeps = ", "find = ", "probe[1].expect", "is missing"),
        ('name = "p"', 'name = "p"\nuntil = "last"', "probe[1].until", "the id of a step (first)"),
        ('name = "p"', 'name = "p"\nexpect = "x"', "probe[1].expect", "allowed: keeps, name, run"),
        (
            'keeps = "Please mend the pump."',
            "state = 'op-1'\nis = 'unknown'",
            "probe[1].state",
            "a ref such as",
        ),
        (
            'keeps = "Please mend the pump."',
            "authorize = {kind = 'x'}\nallowed = false",
            "probe[1].authorize",
            "",
        ),
        ("[[probe]]", '[[probe]]\nname = "p"\nkeeps = "x"\n[[probe]]', "probe[2].name", "stands twice"),
    ],
)
def test_a_mistake_is_one_line_with_file_key_and_what_is_allowed(
    tmp_path: Path, instead: str, by: str, key: str, said: str
) -> None:
    assert instead in WHOLE
    with pytest.raises(ScenarioError) as caught:
        read(tmp_path, WHOLE.replace(instead, by, 1))
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"{tmp_path / 'case.toml'}: {key}")
    assert said in text
    assert "allowed: " in text or "not TOML" in text


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="cannot be read"):
        read_scenario(tmp_path / "none.toml")


def test_the_same_scenario_tells_the_same(tmp_path: Path) -> None:
    assert read(tmp_path, WHOLE) == read(tmp_path, WHOLE)


def test_several_compactions_have_work_before_each(tmp_path: Path) -> None:
    _, told = read(tmp_path, WHOLE)
    assert isinstance(told, list)
    places = [index for index, act in enumerate(told) if isinstance(act, Compact)]
    assert len(places) == 2
    assert all(places[0] < index < places[1] for index in range(places[0] + 1, places[1]))
    assert sum(isinstance(act, Tell) for act in told[: places[0]]) > 10


def test_the_shipped_ones_cover_everything() -> None:
    scenarios = [read_scenario(file) for file in sorted(shipped().glob("*.toml"))]
    assert len(scenarios) >= 40
    covered = Counter(scenario.covers for scenario in scenarios)
    assert set(covered) == set(COVERS)
    assert min(covered.values()) >= 2
    assert sum(scenario.compactions >= 10 for scenario in scenarios) >= 10
    assert all(scenario.compactions for scenario in scenarios)
    kinds = Counter(probe.key for scenario in scenarios for probe in scenario.probes)
    assert set(kinds) == {"keeps", "state", "authorize", "may", "verdict", "next", "find", "fetch", "never"}


def test_the_documented_one_is_whole(tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "scenarios.md").read_text()
    found = re.search(r"<!-- scenario example -->\n```toml\n(.*?)```", text, re.DOTALL)
    assert found is not None
    read(tmp_path, found[1])
    for name in COVERS:
        assert f"`{name}`" in text
    assert f"{len(list(shipped().glob('*.toml')))} of them" in text
