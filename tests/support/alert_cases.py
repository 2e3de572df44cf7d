"""When each alert must fire and when it must not, and what of ``deploy/prometheus`` is printed from the rules.

A case is a set of series at one value a minute, and the minute at which is looked. ``make pages`` writes them as
tests for ``promtool test rules``, one file for each alert, and the rules once more for the Prometheus operator.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

FOLDER: Final = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"
RULES: Final = FOLDER / "watchkeeper.rules.yaml"
OPERATOR: Final = FOLDER / "prometheusrule.yaml"
CASES: Final = FOLDER / "tests"
WHERE: Final = {"instance": "wk-0:9464", "job": "watchkeeper"}


@dataclass(frozen=True)
class Case:
    """``series``: name with labels → values. ``minute``: when is looked. ``labels``: of the alert, beside those
    every sidecar's series have; ``bare``: it has not even these. Without ``fires`` nothing may."""

    series: dict[str, str]
    minute: int
    fires: bool = True
    labels: dict[str, str] = field(default_factory=dict)
    bare: bool = False


def fires(minute: int, series: dict[str, str], **labels: str) -> Case:
    return Case(series, minute, labels=labels)


def quiet(minute: int, series: dict[str, str]) -> Case:
    return Case(series, minute, fires=False)


def _buckets(name: str, **counts: str) -> dict[str, str]:
    """Series of a histogram: ``le_0_5`` → the counts of the bucket up to 0.5."""
    return {
        f'{name}_bucket{{le="{key.removeprefix("le_").replace("_", ".").replace("inf", "+Inf")}"}}': value
        for key, value in counts.items()
    }


COMPACTED: Final = 'compactions_total{outcome="applied",trigger="threshold"}'
FAILED: Final = 'compactions_total{outcome="failed",trigger="threshold"}'
ERROR: Final = "budget_estimate_error_ratio"
FILLING: Final = {"storage_bytes": "0+10000000x60"}

ALERTS: Final[dict[str, list[Case]]] = {
    "Down": [
        fires(4, {"up": "1 0x10"}),
        Case({}, 4, bare=True),
        quiet(2, {"up": "1 0 0 1x10"}),
        quiet(8, {"up": "1x10", 'up{instance="elsewhere:80",job="shop"}': "0x10"}),
    ],
    "LaneUnowned": [
        Case(
            {'lane_epoch{lane="main"}': "0x10"}, 4, labels={"lane": "main", "job": "watchkeeper"}, bare=True
        ),
        quiet(4, {'lane_epoch{lane="main"}': "0x10", 'lane_epoch{instance="wk-1:9464",lane="main"}': "7x10"}),
        quiet(2, {'lane_epoch{lane="main"}': "3 0 0 4x10"}),
    ],
    "LaneFlapping": [
        fires(5, {"lanes_lost_total": "0 1 2 3x20"}),
        quiet(10, {"lanes_lost_total": "0 1x20"}),
    ],
    "NatsDisconnected": [
        fires(3, {"nats_connected": "1 0x10"}),
        quiet(1, {"nats_connected": "1 0 1x10"}),
    ],
    "IntakeLag": [
        fires(11, {"intake_lag_events": "5x20"}),
        quiet(11, {"intake_lag_events": "900 700 500 300 100 0 5x20"}),
    ],
    "OutboxStuck": [
        fires(11, {"outbox_pending": "3x20"}),
        quiet(11, {"outbox_pending": "3 9 3 4 1 0 5x20"}),
    ],
    "StorageFilling": [
        fires(40, {**FILLING, "storage_free_bytes": "10000000000x60"}),
        fires(40, {"storage_bytes": "900000000x60", "storage_free_bytes": "50000000x60"}),
        quiet(40, {**FILLING, "storage_free_bytes": "900000000000x60"}),
        quiet(40, {"storage_bytes": "0x60", "storage_free_bytes": "0x60"}),
    ],
    "StorageFull": [
        fires(3, {"storage_full": "0 1x10"}),
        quiet(1, {"storage_full": "0 1 0x10"}),
    ],
    "StorageErrors": [
        fires(
            4, {'storage_errors_total{kind="io"}': "0 0 1x10", 'storage_errors_total{kind="busy"}': "0x10"}
        ),
        quiet(
            4, {'storage_errors_total{kind="io"}': "0x10", 'storage_errors_total{kind="busy"}': "0 0 5x10"}
        ),
    ],
    "StreamReset": [
        fires(3, {"stream_resets_total": "0 1x10"}),
        quiet(5, {"stream_resets_total": "1x10"}),
    ],
    "LoopLag": [
        fires(12, _buckets("loop_lag_seconds", le_0_5="0+10x20", le_1_0="0+60x20", le_inf="0+60x20")),
        quiet(12, _buckets("loop_lag_seconds", le_0_01="0+60x20", le_0_5="0+60x20", le_inf="0+60x20")),
    ],
    "Defect": [
        fires(3, {'unforeseen_errors_total{part="lane"}': "0 1x10"}),
        fires(3, {"ledger_mismatches_total": "0 1x10"}),
        quiet(3, {'unforeseen_errors_total{part="lane"}': "0x10", "ledger_mismatches_total": "0x10"}),
    ],
    "NothingCompacts": [
        fires(
            16,
            {
                'runs{level="critical"}': "1x40",
                'runs{level="ok"}': "9x40",
                COMPACTED: "0x40",
                "trims_total": "0x40",
            },
        ),
        quiet(16, {'runs{level="critical"}': "1x40", COMPACTED: "0+1x40", "trims_total": "0x40"}),
        quiet(16, {'runs{level="overflow"}': "1x40", COMPACTED: "0x40", "trims_total": "0+1x40"}),
        quiet(16, {'runs{level="compact"}': "1x40", COMPACTED: "0x40", "trims_total": "0x40"}),
    ],
    "CompactionsFail": [
        fires(15, {FAILED: "0+1x40", COMPACTED: "0x40"}),
        quiet(15, {FAILED: "0+1x40", COMPACTED: "0+4x40"}),
        quiet(15, {FAILED: "0 1x40", COMPACTED: "0x40"}),
    ],
    "BreakerOpen": [
        fires(6, {'summarizer_breaker_open{summarizer="nats"}': "2x20"}, summarizer="nats"),
        quiet(6, {'summarizer_breaker_open{summarizer="nats"}': "2 2 0x20"}),
    ],
    "EstimateError": [
        fires(
            25,
            {
                **_buckets(ERROR, le_0_3="0+1x60", le_0_5="0+9x60", le_inf="0+9x60"),
                f"{ERROR}_count": "0+9x60",
            },
        ),
        quiet(
            25,
            {
                **_buckets(ERROR, le_0_1="0+9x60", le_0_3="0+9x60", le_inf="0+9x60"),
                f"{ERROR}_count": "0+9x60",
            },
        ),
        quiet(25, {**_buckets(ERROR, le_0_3="0 1x60", le_inf="0 9x60"), f"{ERROR}_count": "0 9x60"}),
    ],
    "NoPacketsResumed": [
        fires(35, {COMPACTED: "0+1x90", 'resumes_total{outcome="ok"}': "0x90"}),
        quiet(35, {COMPACTED: "0+1x90", 'resumes_total{outcome="ok"}': "0+1x90"}),
        quiet(35, {COMPACTED: "0x90", 'resumes_total{outcome="ok"}': "0x90"}),
    ],
    "ProtectedTooLarge": [
        fires(3, {'choices_total{choice="pause"}': "0 1x20"}, choice="pause"),
        quiet(3, {'choices_total{choice="pause"}': "0x20", 'choices_total{choice="reduced"}': "0 1x20"}),
    ],
    "CriticalViolations": [
        fires(4, {'invariant_violations_total{code="unauthorized_write"}': "0 0 1x10"}),
        quiet(4, {'invariant_violations_total{code="late_event"}': "0 0 1x10"}),
    ],
    "MajorViolations": [
        fires(12, {'invariant_violations_total{code="illegal_transition"}': "0+2x30"}),
        quiet(12, {'invariant_violations_total{code="illegal_transition"}': "0 1x30"}),
        quiet(12, {'invariant_violations_total{code="late_event"}': "0+2x30"}),
    ],
    "MinorViolations": [
        fires(20, {'invariant_violations_total{code="late_event"}': "0+20x30"}),
        quiet(20, {'invariant_violations_total{code="late_event"}': "0+1x30"}),
    ],
    "HistoryGap": [
        fires(3, {'invariant_violations_total{code="history_gap"}': "0 1x20"}, code="history_gap"),
        quiet(3, {'invariant_violations_total{code="late_event"}': "0 1x20"}),
    ],
    "DuplicateEffectsPrevented": [
        fires(3, {"duplicate_effects_prevented_total": "0 1x20"}),
        quiet(3, {"duplicate_effects_prevented_total": "3x20"}),
    ],
    "MessagesRejected": [
        fires(15, {'events_rejected_total{code="malformed"}': "0+3x30"}, code="malformed"),
        quiet(15, {'events_rejected_total{code="malformed"}': "0 1 2x30"}),
    ],
}


def rules() -> list[dict[str, Any]]:
    """Every rule as it stands in the file."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    """Name without its prefix → the alert."""
    return {rule["alert"].removeprefix("Watchkeeper"): rule for rule in rules() if "alert" in rule}


def operator() -> str:
    """The rules as a resource of the Prometheus operator: the same text, further in."""
    head = (
        "# Printed from watchkeeper.rules.yaml: make pages.\n"
        "apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\n"
        "metadata:\n  name: watchkeeper\n  labels:\n"
        "    # Must match the ruleSelector of your Prometheus.\n    release: prometheus\n"
        "spec:\n"
    )
    text = RULES.read_text()
    return head + textwrap.indent(text[text.index("groups:") :], "  ")


def _series(name: str) -> str:
    """The full name of a series with the labels every sidecar's have."""
    plain, _, given = name.removesuffix("}").partition("{")
    labels = dict(re.findall(r'(\w+)="([^"]*)"', given))
    named = {**WHERE, **labels}
    inner = ",".join(f'{key}="{value}"' for key, value in sorted(named.items()))
    return f"{'' if plain == 'up' else 'watchkeeper_'}{plain}{{{inner}}}"


def _filled(text: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels.get(found[1], ""), text)


def cases(alert: str) -> str:
    """The file for ``promtool test rules`` about one alert."""
    rule = alerts()[alert]
    tests = []
    for case in ALERTS[alert]:
        expected = []
        if case.fires:
            labels = {**({} if case.bare else WHERE), **case.labels, **rule["labels"]}
            filled = {name: _filled(text, labels) for name, text in rule["annotations"].items()}
            expected = [{"exp_labels": labels, "exp_annotations": filled}]
        check = {"eval_time": f"{case.minute}m", "alertname": rule["alert"], "exp_alerts": expected}
        series = [{"series": _series(name), "values": values} for name, values in case.series.items()]
        tests.append(
            {
                "name": f"{alert} {'fires' if case.fires else 'is quiet'}",
                "interval": "1m",
                "input_series": series,
                "alert_rule_test": [check],
            }
        )
    body = {"rule_files": [f"../{RULES.name}"], "evaluation_interval": "1m", "tests": tests}
    return "# Printed from tests/support/alert_cases.py: make pages.\n" + yaml.safe_dump(
        body, sort_keys=False, width=110, allow_unicode=True
    )


def printed() -> dict[Path, str]:
    """Every file that is printed → what it must hold."""
    return {OPERATOR: operator(), **{CASES / f"{name}.yaml": cases(name) for name in ALERTS}}


def write() -> None:
    """Write them anew, and remove cases of alerts that are gone."""
    CASES.mkdir(exist_ok=True)
    for path in CASES.glob("*.yaml"):
        path.unlink()
    for path, text in printed().items():
        path.write_text(text)
