"""The aims, on the shipped scenarios: what Watchkeeper keeps, allows and finds after up to ten compactions."""

from __future__ import annotations

import re
from functools import partial
from itertools import groupby

import anyio
import pytest

from sidecar.config import load_config
from sidecar.evaluation.evaluate import Request, evaluate
from sidecar.evaluation.outcome import Evaluation, Figures
from sidecar.evaluation.page import render_page
from sidecar.evaluation.scenario import read_scenario, shipped
from tests.support.provider_server import provider

FILES = tuple(sorted(shipped().glob("*.toml")))


def run(request: Request) -> Evaluation:
    return anyio.run(partial(evaluate, request, load_config(None, {}, {})))


@pytest.fixture(scope="module")
def found() -> Evaluation:
    """Every scenario through everything that needs no model, but for the careless one."""
    return run(Request(scenarios=FILES, strategies=("none", "last", "trim", "rolling", "digest")))


@pytest.fixture(scope="module")
def rash() -> Evaluation:
    """One scenario of each kind through Watchkeeper with a summariser that makes mistakes."""
    pairs = [(read_scenario(file).covers, file) for file in FILES]
    first = tuple(next(group)[1] for _, group in groupby(sorted(pairs), key=lambda pair: pair[0]))
    return run(Request(scenarios=first, strategies=("scripted",)))


def of(found: Evaluation, strategy: str) -> Figures:
    return next(item for item in found.figures if item.strategy == strategy)


def test_nothing_protected_is_lost_after_ten_compactions(found: Evaluation) -> None:
    figures = of(found, "digest")
    assert found.failures == ()
    assert figures.kept == figures.protected > 500
    assert len(figures.drift) == 11
    assert figures.cohort >= 5
    assert set(figures.drift) == {1.0}


def test_nothing_is_allowed_that_is_not_and_no_outcome_is_made_up(found: Evaluation) -> None:
    figures = of(found, "digest")
    assert set(figures.harms.values()) == {0}
    assert figures.passed == figures.probes > 500


def test_every_fact_is_found(found: Evaluation) -> None:
    passed, asked = of(found, "digest").by_kind["retrieval"]
    assert passed == asked > 50


def test_every_compaction_was_made_and_every_packet_keeps_to_its_budget(found: Evaluation) -> None:
    figures = of(found, "digest")
    assert figures.compactions.made == figures.compactions.wanted > 200
    assert figures.outside == 0


def test_a_careless_summariser_changes_nothing_of_it(rash: Evaluation) -> None:
    figures = of(rash, "scripted")
    assert rash.failures == ()
    assert figures.passed == figures.probes
    assert figures.kept == figures.protected
    assert figures.compactions.refused > 5
    assert figures.compactions.made == figures.compactions.wanted


def test_the_others_lose_what_the_rules_say_they_lose(found: Evaluation) -> None:
    """The probes tell strategies apart: with everything in the context all is right, with less of it less."""
    assert of(found, "none").passed == of(found, "none").probes
    assert of(found, "trim").harms["fact_lost"] > 0
    for name in ("last", "rolling"):
        figures = of(found, name)
        assert figures.harms["disallowed_allowed"] > 0
        assert figures.harms["protected_lost"] > 0
        assert figures.drift[-1] is not None
        assert figures.drift[-1] < 1


def test_the_report_is_one_file_that_loads_nothing(found: Evaluation) -> None:
    page = render_page(found)
    assert page == render_page(found)
    assert not re.search(r"https?://|\bsrc=|\bhref=|@import|url\(|<script|<link|<iframe", page)
    assert page.count("<polyline") == 3 * len(found.figures)
    assert page.count("<svg") == page.count("</svg>") > 3
    for name in ("Watchkeeper, digest", "rolling summary", "many compactions"):
        assert name in page


@pytest.mark.anyio
async def test_a_configured_model_is_a_strategy_too() -> None:
    pytest.importorskip("openai")
    async with provider() as server:
        settings = {
            "summarizer.kind": "openai",
            "summarizer.model": "m-1",
            "summarizer.base_url": server.base_url("openai"),
            "summarizer.api_key": "sk-test-5b1e0c8d7f",
        }
        request = Request(
            scenarios=(shipped() / "open_question_blocker.toml",), strategies=("model", "digest")
        )
        found = await evaluate(request, load_config(None, {}, settings))
    assert [item.strategy for item in found.figures] == ["digest", "model"]
    assert found.failures == ()
    assert of(found, "model").compactions.made == of(found, "model").compactions.wanted == len(server.calls)
