"""Alerts and dashboards: each has what it needs, names only what the daemon shows, and is what it is printed from."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidecar.metric_labels import SEVERITIES, VIOLATION_CODES
from sidecar.metric_surface import PREFIX, SURFACE
from support import alert_cases, dashboards

DEPLOY = alert_cases.FOLDER.parent
ALERTS = alert_cases.alerts()
RECORDED = {rule["record"] for rule in alert_cases.rules() if "record" in rule}
EXPRESSIONS = [
    *((rule.get("alert") or rule["record"], rule["expr"]) for rule in alert_cases.rules()),
    *((where, dashboards.filled(query, "1m")) for where, query in dashboards.queries()),
]
FOREIGN_LABELS = {"job", "instance", "namespace", "le", "severity"}
OTHERS = {"up", "ALERTS"}
PRINTED = {**alert_cases.printed(), **dashboards.printed()}

SERIES = re.compile(r"\b(up|ALERTS|watchkeeper[_:][\w:]*)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|without) \(([^)]*)\)")


def promtool(*arguments: str | Path) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    done = subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def declared(name: str) -> tuple[set[str], dict[str, set[str]]]:
    """The labels a series has, and the values those have that are known from the start."""
    plain = name.removeprefix(PREFIX)
    if plain == "build_info":
        return {"version", "python", "sqlite"}, {}
    found = SURFACE.get(plain)
    if found is None or found.kind == "histogram":
        base = re.sub(r"_(bucket|sum|count)$", "", plain)
        assert base != plain, f"{name}: of a histogram only its buckets, sum and count are series"
        found = SURFACE[base]
        assert found.kind == "histogram"
    values = {label: {child[place] for child in found.children} for place, label in enumerate(found.names)}
    return set(found.names), values if found.children else {}


# --- what is printed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PRINTED, ids=lambda path: path.name)
def test_a_printed_file_is_what_it_is_printed_from(path: Path) -> None:
    assert path.read_text() == PRINTED[path], "run: make pages"


def test_no_printed_file_is_left_over() -> None:
    folders = (alert_cases.CASES, dashboards.FOLDER / "dashboards")
    assert {path for folder in folders for path in folder.iterdir()} == set(PRINTED) - {alert_cases.OPERATOR}


def test_the_operator_gets_the_same_rules() -> None:
    resource = yaml.safe_load(alert_cases.OPERATOR.read_text())
    assert resource["kind"] == "PrometheusRule"
    assert resource["spec"] == yaml.safe_load(alert_cases.RULES.read_text())


# --- alerts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_it_means_and_where_to_read_on(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url"}
    assert all(note.endswith(".") for note in (notes["summary"], notes["description"]) if "{{" not in note)
    assert notes["runbook_url"] == f"deploy/README.md#watchkeeper{name.lower()}"


def test_every_alert_has_its_section_in_the_runbook_and_no_other() -> None:
    text = (DEPLOY / "README.md").read_text().partition("\n## Alerts\n")[2].partition("\n## ")[0]
    sections = dict(re.findall(r"^### Watchkeeper(\w+)\n(.*?)(?=^### |\Z)", text, re.MULTILINE | re.DOTALL))
    assert list(sections) == list(ALERTS), "in the order of the rules"
    for name, body in sections.items():
        assert [line.split(":")[0] for line in body.strip().splitlines()] == [
            "- **Means**",
            "- **Users see**",
            "- **Do**",
        ], name


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    found = {name: {case.fires for case in cases} for name, cases in alert_cases.ALERTS.items()}
    assert set(found) == set(ALERTS)
    assert all(both == {True, False} for both in found.values()), found


def test_every_violation_is_graded() -> None:
    graded = {
        rule["labels"]["severity"]: set(re.findall(r'code=~"([^"]*)"', rule["expr"])[0].split("|"))
        for rule in alert_cases.rules()
        if rule.get("record") == "watchkeeper:invariant_violations:increase10m"
    }
    assert set(SEVERITIES) == set(VIOLATION_CODES)
    assert graded == {
        severity: {code for code in VIOLATION_CODES if SEVERITIES[code] == severity}
        for severity in ("critical", "major", "minor")
    }


def test_the_tool_accepts_rules_and_configuration() -> None:
    promtool("check", "rules", alert_cases.RULES)
    promtool("check", "config", alert_cases.FOLDER / "prometheus.yml")


def test_alerts_fire_where_they_must_and_nowhere_else() -> None:
    promtool("test", "rules", *sorted(alert_cases.CASES.glob("*.yaml")))


# --- names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])
def test_a_query_names_only_what_there_is(where: str, expression: str) -> None:
    found = SERIES.findall(expression)
    assert found
    labels = set(FOREIGN_LABELS)
    for name, matchers in found:
        if name in OTHERS:
            continue
        if ":" in name:
            assert name in RECORDED
            continue
        names, values = declared(name)
        labels |= names
        for label, operator, value in MATCHER.findall(matchers):
            assert label in names | FOREIGN_LABELS, (name, label)
            if label in values:
                wanted = value.split("|") if operator in ("=~", "!~") else [value]
                assert set(wanted) - {".*", "other"} <= values[label], (name, label, value)
    for grouping in GROUPING.findall(expression):
        assert {label.strip() for label in grouping.split(",")} <= labels, grouping


def test_every_metric_is_shown_somewhere() -> None:
    shown = {name for _, expression in EXPRESSIONS for name, _ in SERIES.findall(expression)}
    plain = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown} | shown
    assert {f"{PREFIX}{name}" for name in SURFACE} <= plain


# --- dashboards -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", dashboards.DASHBOARDS, ids=lambda of: of.uid)
def test_a_dashboard_can_be_provisioned_anywhere(of: dashboards.Dashboard) -> None:
    page = json.loads((dashboards.FOLDER / "dashboards" / f"{of.uid}.json").read_text())
    assert page["uid"] == of.uid
    assert not list(_keys(page, "id"))
    assert set(map(json.dumps, _keys(page, "datasource"))) == {
        json.dumps({"type": "prometheus", "uid": "${datasource}"})
    }
    assert page["templating"]["list"][0]["type"] == "datasource"
    assert len({panel["title"] for panel in page["panels"]}) == len(page["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in page["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells


def _keys(value: Any, key: str) -> list[Any]:
    """Every value under that key, at any depth."""
    if isinstance(value, dict):
        below = [found for inner in value.values() for found in _keys(inner, key)]
        return below + ([value[key]] if key in value else [])
    if isinstance(value, list):
        return [found for inner in value for found in _keys(inner, key)]
    return []


@pytest.mark.parametrize(
    ("folder", "kinds"),
    [("prometheus", ["PrometheusRule"]), ("grafana", ["ConfigMap"])],
)
def test_kustomize_builds_what_a_cluster_gets(folder: str, kinds: list[str]) -> None:
    tool = shutil.which("kubectl") or shutil.which("kustomize")
    if tool is None:
        pytest.skip("neither kubectl nor kustomize is installed")
    verb = "kustomize" if tool.endswith("kubectl") else "build"
    built = subprocess.run([tool, verb, str(DEPLOY / folder)], capture_output=True, text=True, timeout=60)
    assert built.returncode == 0, built.stderr
    resources = list(yaml.safe_load_all(built.stdout))
    assert [resource["kind"] for resource in resources] == kinds
    for resource in resources:
        if resource["kind"] == "ConfigMap":
            assert resource["metadata"]["labels"]["grafana_dashboard"] == "1"
            assert set(resource["data"]) == {f"{one.uid}.json" for one in dashboards.DASHBOARDS}
