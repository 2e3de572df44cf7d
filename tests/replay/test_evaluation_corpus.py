"""Facts of recorded runs after compaction: reachable, and found by search."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import anyio
import pytest

from sidecar.config import load_config
from sidecar.evaluation.evaluate import Request, evaluate
from sidecar.evaluation.facts import facts
from sidecar.evaluation.outcome import Evaluation
from sidecar.evaluation.page import render_page
from support.story import event

FILES = [
    "claude-code-codemie/claude/incremental-simple/turn-2.jsonl",
    "claude-code-codemie/claude/incremental-subagents/turn-2.jsonl",
    "claude-code-codemie/claude/incremental-subagents/turn-2/subagents/agent-a485154.jsonl",
    "claude-code-codemie/session-196820da.jsonl",
    "claude-code-codemie/session-9eda1058.jsonl",
    "codex-codemie/rollout-2026-05-11T11-26-55-019e1625-789d-76c0-80ab-3724b5ddb799.jsonl",
]


@pytest.fixture(scope="module")
def found(corpus: Path) -> Evaluation:
    request = Request(
        transcripts=tuple(corpus / name for name in FILES), strategies=("last", "trim", "rolling", "digest")
    )
    return anyio.run(partial(evaluate, request, load_config(None, {}, {})))


def test_no_fact_is_lost_and_search_finds_them(found: Evaluation) -> None:
    kept = [item for item in found.facts if item.strategy == "digest"]
    assert sum(item.facts for item in kept) > 400
    assert {item.kind for item in kept} == {"path", "id", "figure", "command", "url", "prohibition"}
    for item in kept:
        assert item.in_packet + item.by_ref + item.by_search == item.facts, item.lost_facts
        assert item.top3 >= 0.95 * item.facts


def test_most_paths_are_in_the_packet_or_one_fetch_away(found: Evaluation) -> None:
    (paths,) = (item for item in found.facts if (item.strategy, item.kind) == ("digest", "path"))
    assert paths.in_packet + paths.by_ref >= 0.75 * paths.facts


def test_every_packet_keeps_to_its_budget(found: Evaluation) -> None:
    assert found.failures == ()
    assert all(run.within and run.covered for run in found.transcripts)
    assert sum(run.compactions.made for run in found.transcripts) >= 8


def test_the_report_shows_the_shares_and_loads_nothing(found: Evaluation) -> None:
    page = render_page(found)
    assert page.count("<rect") == 4 * len({item.strategy for item in found.facts})
    assert not re.search(r"https?://|\bsrc=|<script", page)


def test_the_others_cannot_be_asked(found: Evaluation) -> None:
    for item in found.facts:
        if item.strategy != "digest":
            assert (item.by_ref, item.by_search, item.top3) == (0, 0, -1)
            assert item.in_packet < item.facts or item.kind in ("command", "prohibition")


def test_facts_are_taken_by_rule() -> None:
    printed = "all good: 118 passed in the suite\n#4411 9f31c07a4b"
    told = [
        event(
            "message", "e-1", role="user", content="Never touch src/a/b.py. See https://x.example/y, please."
        ),
        event("tool.called", "e-2", call_id="c", tool="bash", arguments={"command": "make test ARGS=1"}),
        event("tool.returned", "e-3", call_id="c", status="ok", content=printed),
    ]
    taken = {(fact.kind, fact.text) for fact in facts(enumerate(told, 1))}
    assert taken == {
        ("prohibition", "Never touch src/a/b.py."),
        ("path", "src/a/b.py"),
        ("url", "https://x.example/y"),
        ("command", "make test ARGS=1"),
        ("figure", "118 passed"),
        ("id", "#4411"),
        ("id", "9f31c07a4b"),
    }


def test_a_figure_that_nothing_tells_apart_is_not_asked_for() -> None:
    told = [
        event(
            "tool.returned",
            f"e-{n}",
            call_id=f"c{n}",
            status="ok",
            content=f"Wall time: {n}.5 seconds in all",
        )
        for n in range(1, 6)
    ]
    assert [fact for fact in facts(enumerate(told, 1)) if fact.kind == "figure"] == []
