"""What a real Prometheus with the shipped rules saw of a voyage under load and faults, and what dashboards ask of it.

One voyage for all tests here (``support.watched``).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator
from functools import partial

import anyio
import anyio.to_thread
import pytest

from sidecar.metric_surface import PREFIX, SURFACE
from support import alert_cases, dashboards
from tests.support.watched import Watch, watched_voyage
from tests.support.watched_load import SAMPLED, UNSAMPLED

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

MUST_FIRE = {
    *(("CompactionsFail", "main"), ("BreakerOpen", "main"), ("ProtectedTooLarge", "main")),
    *(("CriticalViolations", "main"), ("MajorViolations", "main"), ("HistoryGap", "main")),
    *(("DuplicateEffectsPrevented", "main"), ("MessagesRejected", "main"), ("OutboxStuck", "main")),
    *(("NatsDisconnected", "main"), ("NatsDisconnected", "calm"), ("Down", "main")),
    *(("NothingCompacts", "calm"), ("LaneFlapping", "pair"), ("LaneUnowned", "")),
}
"""Alert and sidecar; ``pair`` is either of the two that share a lane."""
MUST_NOT = {"StorageFull", "StorageErrors", "StreamReset", "Defect", "EstimateError"}
MUST_NOT_AT_CALM = set(alert_cases.ALERTS) - {
    "NothingCompacts",
    "NatsDisconnected",
    "OutboxStuck",
}
MAY_BY_THE_MACHINE = {"LoopLag", "IntakeLag", "Down", "StorageFilling"}
"""A busy machine may be short of time, or of disk for a load 60 times as fast, and is then told so."""

UNMOVED = {
    "intake_lag_events": "of a moment: whether a scrape meets a lane that is behind is chance",
    "storage_full": "needs a full disk: tests/crash/test_crash_faults.py",
    "storage_errors_total": "needs a failing disk: tests/integration/test_storage_faults.py",
    "stream_resets_total": "needs the stream to be deleted: tests/integration/test_blackbox_stream.py",
    "ledger_mismatches_total": "must stay 0; counted in tests/crash/test_crash_history.py",
    "unforeseen_errors_total": "must stay 0; counted in tests/crash/test_crash_faults.py",
    "redactions_total{custom}": "a pattern of the configuration: tests/integration/test_redaction_daemon.py",
    "redactions_total{discord_token}": "one form among many: tests/unit/test_redaction.py",
    "redactions_total{twilio_key}": "one form among many: tests/unit/test_redaction.py",
    "redactions_total{url_token}": "one form among many: tests/unit/test_redaction.py",
    "compactions_total{skipped}": "reserved by the wire protocol; no attempt ends so",
    "compaction_failures_total{storage}": "needs a refusing disk: tests/crash/test_crash_faults.py",
    "retrievals_total{fetch,digest_mismatch}": "needs a damaged disk: tests/integration/test_retrieval.py",
    "ask_errors_total{unavailable}": "a matter of moments: tests/integration/test_blackbox_races.py",
    "summarizer_requests_total{openai}": "another kind in the configuration: tests/integration/test_summarizer_http.py",
    "summarizer_requests_total{anthropic}": "as above",
    "summarizer_requests_total{interrupted}": "an interrupted request has no end to be counted by",
    "summarizer_requests_total{storage}": "storage is no business of a summariser",
    "summarizer_tokens_total{openai}": "as above",
    "summarizer_tokens_total{anthropic}": "as above",
    "summarizer_tokens_total{digest}": "it costs none",
    "summarizer_late_replies_total{digest}": "it answers at once",
    "summarizer_late_replies_total{openai}": "its requests are cancelled with their time",
    "summarizer_late_replies_total{anthropic}": "as above",
    "summarizer_breaker_open{digest}": "it does not fail",
    "summarizer_breaker_open{openai}": "another kind in the configuration",
    "summarizer_breaker_open{anthropic}": "as above",
}
"""Metric, or metric and label values, that this load does not move, and why."""


@pytest.fixture(scope="module")
async def watch(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Watch]:
    async with watched_voyage(tmp_path_factory.mktemp("watched")) as watched:
        yield watched


# --- alerts ---------------------------------------------------------------------------------------------------


async def test_the_alerts_that_must_fire_do(watch: Watch) -> None:
    seen = {(alert, "pair" if alert == "LaneFlapping" else instance) for alert, instance in watch.fired}
    assert MUST_FIRE - seen == set()


async def test_the_others_do_not(watch: Watch) -> None:
    assert {alert for alert, _ in watch.fired} & MUST_NOT == set()
    calm = {alert for alert, instance in watch.fired if instance == "calm"}
    assert calm & (MUST_NOT_AT_CALM - MAY_BY_THE_MACHINE) == set()
    assert ("LaneFlapping", "main") not in watch.fired
    assert ("NoPacketsResumed", "main") not in watch.fired


async def test_no_rule_is_in_error(watch: Watch) -> None:
    groups = watch.prometheus.get("rules")["groups"]
    assert [
        (rule["name"], rule.get("lastError"))
        for group in groups
        for rule in group["rules"]
        if rule["health"] != "ok"
    ] == []
    found = {rule["name"] for group in groups for rule in group["rules"]}
    assert found == {rule.get("alert") or rule["record"] for rule in alert_cases.rules()}


# --- dashboards -----------------------------------------------------------------------------------------------

QUERIES = dashboards.queries()


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=[where for where, _ in QUERIES])
async def test_a_panel_shows_something(watch: Watch, where: str, query: str) -> None:
    assert watch.prometheus.points(dashboards.filled(query, "5s"), watch.began, watch.ended), where


# --- metrics --------------------------------------------------------------------------------------------------


async def test_every_series_moves_or_is_known_not_to(watch: Watch) -> None:
    """Counted over the whole voyage and all sidecars; of metrics with two labels each value of either."""
    span = f"{watch.ended - watch.began + 5:.0f}s"
    still: list[str] = []
    for name, declared in SURFACE.items():
        shown = f"{PREFIX}{name}" + ("_count" if declared.kind == "histogram" else "")
        found = watch.prometheus.series(f"max_over_time({shown}[{span}])")
        moved = [labels for labels, value in found if value]
        if not declared.children or name == "lane_epoch":
            still += [] if moved else [name]
        elif name == "retrievals_total" or len(declared.names) == 1:
            still += [
                f"{name}{{{','.join(values)}}}"
                for values in declared.children
                if not any(
                    all(labels[key] == value for key, value in zip(declared.names, values, strict=True))
                    for labels in moved
                )
            ]
        else:
            for place, key in enumerate(declared.names):
                wanted = dict.fromkeys(values[place] for values in declared.children)
                still += [
                    f"{name}{{{value}}}" for value in wanted if value not in {labels[key] for labels in moved}
                ]
    known = {name for name in still if name in UNMOVED or name.partition("{")[0] in UNMOVED}
    assert sorted(set(still) - known) == []
    needless = {
        name for name in UNMOVED if not any(one == name or one.partition("{")[0] == name for one in still)
    }
    assert needless <= {"ask_errors_total{unavailable}", "intake_lag_events"}, (
        "it moves: no reason why not is needed"
    )


async def test_the_number_of_series_does_not_depend_on_the_runs(watch: Watch) -> None:
    query = f'count({{__name__=~"{PREFIX}.+",instance="main"}})'
    ((_, points),) = watch.prometheus.points(query, watch.began, watch.ended)
    assert len({number for _, number in points}) == 1
    told = watch.prometheus.series(f'sum(max_over_time({PREFIX}runs{{instance="main"}}[5m]))')
    assert told[0][1] > 50


@pytest.mark.parametrize("name", ["intake_commit_seconds", "compaction_seconds", "context_used_ratio"])
async def test_an_observation_leads_to_its_trace(watch: Watch, name: str) -> None:
    found = watch.prometheus.exemplars(f"{PREFIX}{name}_bucket", watch.began - 5, watch.ended + 5)
    traces = {exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]}
    assert SAMPLED[3:35] in traces
    assert UNSAMPLED[3:35] not in traces


async def test_a_linter_has_nothing_to_say_about_a_daemon_under_load(watch: Watch) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    check = partial(subprocess.run, [tool, "check", "metrics"], input=watch.exposition.encode(), timeout=60)
    done = await anyio.to_thread.run_sync(partial(check, capture_output=True))
    assert (done.returncode, done.stderr.decode()) == (0, "")
