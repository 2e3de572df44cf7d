"""The whole metric surface, name by name, and that it stays bounded."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as parse_text

from sidecar import metric_labels as labels
from sidecar import tracing
from sidecar.metrics import Metrics

C, G, H = "counter", "gauge", "histogram"
SURFACE: dict[str, tuple[str, tuple[str, ...]]] = {
    # Named by the wire protocol: dashboards and alerts stand on these.
    "events_total": (C, ("type",)),
    "events_rejected_total": (C, ("code",)),
    "events_duplicate_total": (C, ()),
    "intake_lag_events": (G, ()),
    "intake_commit_seconds": (H, ()),
    "runs": (G, ("level",)),
    "runs_finished_total": (C, ("compacted", "outcome")),
    "context_used_ratio": (H, ()),
    "compactions_total": (C, ("outcome", "trigger")),
    "compaction_failures_total": (C, ("reason",)),
    "compaction_seconds": (H, ("phase",)),
    "compaction_deferred_total": (C, ("reason",)),
    "compaction_tokens_before": (H, ()),
    "compaction_tokens_after": (H, ()),
    "compactions_per_run": (H, ()),
    "trims_total": (C, ()),
    "invariant_violations_total": (C, ("code",)),
    "packets_published_total": (C, ("verdict",)),
    "packet_tokens": (H, ()),
    "resumes_total": (C, ("outcome",)),
    "authorizations_total": (C, ("code",)),
    "duplicate_effects_prevented_total": (C, ()),
    "retrievals_total": (C, ("status", "verb")),
    "budget_estimate_error_ratio": (H, ()),
    "summarizer_requests_total": (C, ("outcome", "summarizer")),
    "summarizer_tokens_total": (C, ("direction", "summarizer")),
    "summarizer_late_replies_total": (C, ("summarizer",)),
    "summarizer_breaker_open": (G, ("summarizer",)),
    "outbox_pending": (G, ()),
    "storage_full": (G, ()),
    "lanes_owned": (G, ()),
    "lane_epoch": (G, ("lane",)),
    "nats_connected": (G, ()),
    "loop_lag_seconds": (H, ()),
    "build_info": (G, ("python", "sqlite", "version")),
    # Ours besides.
    "unforeseen_errors_total": (C, ("part",)),
    "redactions_total": (C, ("kind",)),
    "rejections_suppressed_total": (C, ()),
    "consumer_restarts_total": (C, ()),
    "stream_resets_total": (C, ()),
    "runs_forgotten_total": (C, ()),
    "estimate_samples_ignored_total": (C, ()),
    "not_applied_total": (C, ()),
    "choices_total": (C, ("choice",)),
    "ask_seconds": (H, ("verb",)),
    "ask_errors_total": (C, ("code",)),
    "storage_bytes": (G, ()),
    "storage_free_bytes": (G, ()),
    "storage_errors_total": (C, ("kind",)),
    "lanes_lost_total": (C, ()),
    "takeover_seconds": (H, ()),
    "ledger_mismatches_total": (C, ()),
    "nats_reconnects_total": (C, ()),
}


def reader(metrics: Metrics) -> Callable[..., float | None]:
    def now(name: str, **of: str) -> float | None:
        return metrics.registry.get_sample_value(f"watchkeeper_{name}", of)

    return now


def scrape(metrics: Metrics) -> dict[str, tuple[str, tuple[str, ...]]]:
    _, body = metrics.render("")
    found = {}
    for family in parse_text(body.decode()):
        name = family.name + ("_total" if family.type == "counter" else "")
        found[name.removeprefix("watchkeeper_")] = (
            family.type,
            tuple(sorted({key for sample in family.samples for key in sample.labels} - {"le"})),
        )
    return found


def test_the_surface_is_exactly_this_from_the_first_scrape() -> None:
    assert scrape(Metrics(lanes=["main"])) == SURFACE


def test_every_label_value_is_there_before_anything_happened() -> None:
    values: dict[str, set[str]] = {}
    for family in Metrics(lanes=["main"]).registry.collect():
        for sample in family.samples:
            for key, value in sample.labels.items():
                values.setdefault(f"{family.name.removeprefix('watchkeeper_')}.{key}", set()).add(value)
    assert values["events.type"] == set(labels.EVENT_TYPES)
    assert {"message", "operation.declared", "gap.declared"} <= values["events.type"]
    assert values["events_rejected.code"] == set(labels.REJECTION_CODES)
    assert values["invariant_violations.code"] == set(labels.VIOLATION_CODES)
    assert values["authorizations.code"] == set(labels.AUTHORIZE_CODES)
    assert values["runs.level"] == set(labels.LEVELS)
    assert values["compactions.trigger"] == set(labels.TRIGGERS)
    assert values["lane_epoch.lane"] == {"main"}


def test_nothing_that_others_send_becomes_a_label() -> None:
    metrics = Metrics()
    before = len(metrics.render("")[1].splitlines())
    for number in range(50):
        metrics.folded(f"made.up.{number}")
        metrics.compacted(f"x{number}", "threshold")
        metrics.asked(f"verb{number}", 0.1)
        metrics.breaker("main", f"kind{number}", 1)
    after = len(metrics.render("")[1].splitlines())
    assert after == before + 2
    assert metrics.registry.get_sample_value("watchkeeper_events_total", {"type": "other"}) == 50


def test_no_series_tells_when_it_was_created() -> None:
    metrics = Metrics(lanes=["main"])
    for accept in ("", "application/openmetrics-text"):
        assert b"_created" not in metrics.render(accept)[1]


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain;version=0.0.4", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8,text/plain;q=0.5", True),
        ("application/openmetrics-text;version=0.0.1,text/plain;version=0.0.4", False),
        ("application/openmetrics-text;version=x;;,,", False),
        ("text/plain;version=abc", False),
    ],
)
def test_the_accept_header_chooses_the_format_and_cannot_break_it(accept: str, openmetrics: bool) -> None:
    content_type, body = Metrics().render(accept)
    assert content_type.startswith("application/openmetrics-text") is openmetrics
    assert body.endswith(b"# EOF\n") is openmetrics
    if openmetrics:
        assert list(text_string_to_metric_families(body.decode()))


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-"


@pytest.mark.parametrize(
    ("traceparent", "told"),
    [(TRACE + "01", True), (TRACE + "00", False), (None, False), ("00-no-trace-01", False), ("", False)],
)
def test_an_observation_names_its_trace_if_that_was_sampled(traceparent: str | None, told: bool) -> None:
    metrics = Metrics()
    metrics.committed(0.003, traceparent)
    metrics.usage(0.5, 0.1, traceparent)
    metrics.phase_took("publish", 0.2, traceparent)
    with tracing.carrying(traceparent), metrics.phase("commit"):
        pass
    body = metrics.render("application/openmetrics-text")[1].decode()
    named = [line for line in body.splitlines() if "# {" in line]
    assert len(named) == (5 if told else 0)
    assert all('# {trace_id="4bf92f3577b34da6a3ce929d0e0e4736"}' in line for line in named)
    assert list(text_string_to_metric_families(body))
    assert "trace_id" not in metrics.render("")[1].decode()


def test_gauges_over_lanes_are_sums_and_a_lost_lane_leaves_nothing() -> None:
    metrics = Metrics(lanes=["a"])
    metrics.outbox("a", 2)
    metrics.outbox("b", 3)
    metrics.lag("b", 7)
    metrics.levels("a", {"ok": 1, "critical": 1})
    metrics.levels("b", {"ok": 4})
    metrics.lane_owned("a", 5)
    metrics.lane_owned("b", 9)
    now = reader(metrics)
    assert (now("outbox_pending"), now("intake_lag_events"), now("runs", level="ok")) == (5, 7, 5)
    assert (now("lanes_owned"), now("lane_epoch", lane="b")) == (2, 9)
    metrics.lane_owned("b", None)
    metrics.lane_owned("b", None)
    metrics.lane_owned("a", None)
    assert (now("outbox_pending"), now("intake_lag_events"), now("runs", level="critical")) == (0, 0, 0)
    assert (now("lanes_owned"), now("lane_epoch", lane="a"), now("lane_epoch", lane="b")) == (0, 0, None)


def test_each_verb_moves_its_series() -> None:
    metrics = Metrics()
    now = reader(metrics)
    metrics.folded("message")
    metrics.rejected("malformed")
    metrics.rejected("malformed", published=False)
    metrics.duplicate()
    metrics.committed(0.01)
    metrics.consumer_restarted()
    metrics.stream_reborn()
    metrics.finished("succeeded", 2)
    metrics.finished("failed", 0)
    metrics.usage(0.7, -0.1)
    metrics.usage(0.8)
    metrics.usage_ignored()
    metrics.violation("stale", 2)
    metrics.forgotten(3)
    metrics.compacted("applied", "critical", 90_000, 12_000)
    metrics.failed("timeout")
    with metrics.phase("commit"):
        pass
    metrics.deferred("in_flight")
    metrics.trimmed()
    metrics.not_taken_up()
    metrics.chose("reduced")
    metrics.summarized("nats", "ok")
    metrics.summary_late("nats")
    metrics.summary_cost("nats", 1000, 50)
    metrics.breaker("main", "nats", 1)
    metrics.packet("continue", 3000)
    metrics.resumed("stale_packet")
    metrics.authorized("already_succeeded")
    metrics.authorized("already_succeeded", act=False)
    metrics.authorized("ok")
    metrics.retrieved("fetch", "gone", 4)
    metrics.asked("packet", 0.2)
    metrics.asked("fetch", 0.2, "behind")
    metrics.storage_full(True)
    metrics.storage_size(4096)
    metrics.storage_free(8192)
    metrics.storage_failed("busy")
    metrics.lane_flap("main")
    metrics.took_over(1.5)
    metrics.ledger_mismatch()
    metrics.connected(False)
    metrics.connected(True)
    metrics.connected(True)
    metrics.connected(False)
    metrics.connected(True)
    metrics.loop_lag(0.002)
    expected: list[tuple[float, str, dict[str, str]]] = [
        (1, "events_total", {"type": "message"}),
        (2, "events_rejected_total", {"code": "malformed"}),
        (1, "rejections_suppressed_total", {}),
        (1, "events_duplicate_total", {}),
        (1, "intake_commit_seconds_count", {}),
        (1, "consumer_restarts_total", {}),
        (1, "stream_resets_total", {}),
        (1, "runs_finished_total", {"outcome": "succeeded", "compacted": "true"}),
        (1, "runs_finished_total", {"outcome": "failed", "compacted": "false"}),
        (2, "compactions_per_run_count", {}),
        (2, "context_used_ratio_count", {}),
        (1, "budget_estimate_error_ratio_count", {}),
        (0.1, "budget_estimate_error_ratio_sum", {}),
        (1, "estimate_samples_ignored_total", {}),
        (2, "invariant_violations_total", {"code": "stale"}),
        (3, "runs_forgotten_total", {}),
        (1, "compactions_total", {"outcome": "applied", "trigger": "critical"}),
        (90_000, "compaction_tokens_before_sum", {}),
        (12_000, "compaction_tokens_after_sum", {}),
        (1, "compaction_failures_total", {"reason": "timeout"}),
        (1, "compaction_seconds_count", {"phase": "commit"}),
        (1, "compaction_deferred_total", {"reason": "in_flight"}),
        (1, "trims_total", {}),
        (1, "not_applied_total", {}),
        (1, "choices_total", {"choice": "reduced"}),
        (1, "summarizer_requests_total", {"summarizer": "nats", "outcome": "ok"}),
        (1000, "summarizer_tokens_total", {"summarizer": "nats", "direction": "in"}),
        (50, "summarizer_tokens_total", {"summarizer": "nats", "direction": "out"}),
        (1, "summarizer_late_replies_total", {"summarizer": "nats"}),
        (1, "summarizer_breaker_open", {"summarizer": "nats"}),
        (1, "packets_published_total", {"verdict": "continue"}),
        (3000, "packet_tokens_sum", {}),
        (1, "resumes_total", {"outcome": "stale_packet"}),
        (2, "authorizations_total", {"code": "already_succeeded"}),
        (1, "authorizations_total", {"code": "ok"}),
        (1, "duplicate_effects_prevented_total", {}),
        (4, "retrievals_total", {"verb": "fetch", "status": "gone"}),
        (1, "ask_seconds_count", {"verb": "packet"}),
        (1, "ask_errors_total", {"code": "behind"}),
        (1, "storage_full", {}),
        (4096, "storage_bytes", {}),
        (8192, "storage_free_bytes", {}),
        (1, "storage_errors_total", {"kind": "busy"}),
        (1, "lanes_lost_total", {}),
        (1, "takeover_seconds_count", {}),
        (1, "ledger_mismatches_total", {}),
        (1, "nats_connected", {}),
        (1, "nats_reconnects_total", {}),
        (1, "loop_lag_seconds_count", {}),
    ]
    assert [(now(name, **of), name, of) for _, name, of in expected] == expected


def test_two_sets_do_not_share_anything() -> None:
    one, two = Metrics(), Metrics()
    one.trimmed()
    assert two.registry.get_sample_value("watchkeeper_trims_total") == 0


def test_a_linter_has_nothing_to_say() -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed: the exposition is not linted")
    body = Metrics(lanes=["main"]).render("")[1]
    result = subprocess.run([tool, "check", "metrics"], input=body, capture_output=True, timeout=60)
    assert (result.returncode, result.stderr.decode()) == (0, "")
