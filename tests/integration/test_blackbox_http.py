"""The admin port and the broker's side of a daemon: health, readiness, metrics, streams."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.blackbox import Box, blackbox, event, eventually
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.anyio

METRICS = """
events_total events_rejected_total events_duplicate_total intake_lag_events intake_commit_seconds runs
runs_finished_total context_used_ratio compactions_total compaction_failures_total compaction_seconds
compaction_deferred_total compaction_tokens_before compaction_tokens_after compactions_per_run trims_total
invariant_violations_total packets_published_total packet_tokens resumes_total authorizations_total
duplicate_effects_prevented_total retrievals_total budget_estimate_error_ratio summarizer_requests_total
summarizer_tokens_total summarizer_breaker_open outbox_pending storage_full lanes_owned lane_epoch
nats_connected loop_lag_seconds build_info
"""
"""Of the wire protocol, section 7."""


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as started:
        yield started


@pytest.fixture(scope="module")
async def box(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Box]:
    async with blackbox(server, tmp_path_factory.mktemp("http")) as opened:
        yield opened


async def test_a_running_daemon_is_alive_and_ready(box: Box) -> None:
    assert (await box.get("/healthz")).status_code == 200
    await eventually(lambda: _owned(box), "ownership")
    ready = await box.get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["ready"] is True


async def _owned(box: Box) -> bool:
    owned = await box.metric("lanes_owned") == 1
    return owned and (await box.get("/readyz")).status_code == 200


async def test_every_documented_metric_is_there(box: Box) -> None:
    run = await box.start()
    await box.status(run)
    answer = await box.get("/metrics")
    assert answer.status_code == 200
    families = set(re.findall(r"^# TYPE watchkeeper_(\S+) ", answer.text, re.MULTILINE))
    known = families | {name.removesuffix("_total") for name in families}
    missing = [
        name for name in METRICS.split() if name not in known and name.removesuffix("_total") not in known
    ]
    assert missing == []
    assert await box.metric("lanes_owned") == 1
    assert await box.metric("nats_connected") == 1
    assert await box.metric("lane_epoch", lane="main") == 1
    assert await box.metric("build_info") == 1
    assert await box.metric("storage_full") == 0


async def test_no_metric_names_a_run(box: Box) -> None:
    run = await box.start(run="secret-run-name")
    await box.status(run)
    assert "secret-run-name" not in (await box.get("/metrics")).text


async def test_runs_are_counted_by_level(box: Box) -> None:
    await eventually(lambda: _some(box), "a count of runs")


async def _some(box: Box) -> bool:
    return await box.metric("runs", level="ok") >= 1


async def test_nothing_else_is_served(box: Box) -> None:
    assert (await box.get("/secrets")).status_code == 404
    page = await box.get("/")
    assert page.status_code == 200
    assert "script" not in page.text.lower().replace("description", "")


async def test_the_page_shows_a_hostile_goal_escaped(box: Box) -> None:
    run = await box.start(goal="<script>alert(1)</script>")
    await box.status(run)
    assert "<script>" not in (await box.get("/")).text


STREAMS = {
    "WK_IN": (["wk.v1.in.*.*.*.*"], "new", 0.1, 30 * 86_400),
    "WK_OUT": (None, "old", 3_600.0, None),
    "WK_REJECTED": (["wk.v1.out.*.*.*.rejected"], "old", None, None),
    "WK_STATE": (["wk.v1.state.>"], None, None, 0),
}


@pytest.mark.parametrize("name", STREAMS)
async def test_missing_streams_are_created_as_documented(box: Box, name: str) -> None:
    subjects, discard, window, age = STREAMS[name]
    config = (await box.js.stream_info(name)).config
    if subjects is not None:
        assert config.subjects == subjects
    else:
        assert sorted(config.subjects or []) == [
            f"wk.v1.out.*.*.*.{kind}" for kind in ("epoch", "notice", "packet", "receipt")
        ]
    if discard is not None:
        assert config.discard == discard
    if window is not None:
        assert config.duplicate_window == window
    if age is not None:
        assert (config.max_age or 0) == age
    if name == "WK_STATE":
        assert config.max_msgs_per_subject == 1
    if name == "WK_IN":
        assert config.discard_new_per_subject is True
    if name == "WK_OUT":
        assert config.allow_direct is True
    assert config.storage == "file"
    assert config.retention == "limits"


async def test_a_daemon_beside_the_owner_watches_and_is_ready(
    server: NatsServer, box: Box, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = await box.start()
    async with blackbox(server, tmp_path_factory.mktemp("second")) as second:
        ready = await second.get("/readyz")
        assert ready.status_code == 200
        assert await second.metric("lanes_owned") == 0
        second.newest = box.newest
        assert (await second.status(run))["epoch"] == (await box.status(run))["epoch"] == 1


async def test_a_restart_goes_on_where_it_stopped(
    server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("restart")
    async with blackbox(server, folder, {"tenant": "again"}) as first:
        first.tenant = "again"
        run = await first.start()
        await first.tell(run, event("question.opened", question_id="q", text="?"))
        before = await first.packet(run)
        newest = dict(first.newest)
    async with blackbox(server, folder, {"tenant": "again"}) as second:
        second.tenant, second.newest = "again", newest
        after = await second.packet(run)
        assert after["epoch"] == before["epoch"] + 1
        assert after["ledger_version"] == before["ledger_version"]
        assert after["protected_digest"] == before["protected_digest"]
        assert after["text"] == before["text"]
        await second.tell(run, event("question.answered", question_id="q", answer="!"))
        assert (await second.packet(run))["questions"] == []


async def test_another_machine_answers_as_the_old_one_did(
    server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with blackbox(server, tmp_path_factory.mktemp("one"), {"tenant": "moved"}) as first:
        first.tenant = "moved"
        run = await first.start()
        await first.tell(
            run,
            event("operation.declared", operation_id="op", kind="x", idempotency_key="k"),
            event("question.opened", question_id="q", text="?"),
        )
        assert (await first.authorize(run, "op", "rq"))["code"] == "ok"
        before = await first.packet(run)
        newest = dict(first.newest)
    async with blackbox(server, tmp_path_factory.mktemp("two"), {"tenant": "moved"}) as second:
        second.tenant, second.newest = "moved", newest
        after = await second.packet(run)
        assert after["protected_digest"] == before["protected_digest"]
        assert after["ledger_version"] == before["ledger_version"]
        assert after["text"] == before["text"]
        assert (await second.authorize(run, "op", "rq"))["code"] == "ok"
        assert (await second.authorize(run, "op", "other"))["code"] == "in_flight"
        packet = (await second.hear(run, "packet", reason="takeover"))[0]
        assert packet["protected_digest"] == before["protected_digest"]
        subject = "wk.v1.in.moved.main._lane.record"
        newest_settings = await second.js.get_last_msg("WK_IN", subject)
        assert json.loads(newest_settings.data or b"")["type"] == "settings.applied"
