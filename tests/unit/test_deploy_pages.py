"""The runbook: what it names exists, what it shows is accepted, and its figures are those of the manifests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sidecar.cli import app
from sidecar.config import load_config
from sidecar.config_shape import KEYS, TABLES
from sidecar.metric_surface import SURFACE
from support.pages import ROOT

RUNBOOK = ROOT / "deploy" / "README.md"
TEXT = RUNBOOK.read_text()
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").rglob("*.*"))
CHAPTERS = (
    "What it needs", "The image", "Kubernetes", "How large", "Turning it on", "Who may say what",
    "TLS and rotation", "Probes and signals", "Upgrade and roll-back", "Backup and restore", "What fails", "Alerts",
)  # fmt: skip


def prose() -> str:
    return re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)


def test_it_has_every_chapter_and_leads_to_each() -> None:
    titles = re.findall(r"^## (.+)$", prose(), re.MULTILINE)
    assert set(CHAPTERS) <= set(titles)
    for title in titles:
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        assert f"(#{anchor})" in TEXT, title


def test_the_commands_it_names_exist() -> None:
    known = {command.name or command.callback.__name__ for command in app.registered_commands}  # type: ignore[union-attr]
    known |= {group.name for group in app.registered_groups if group.name}
    named = set(re.findall(r"`(?:watchkeeper|[^`]*-- watchkeeper) ([a-z-]+)", TEXT))
    assert named
    assert named <= known


def test_the_variables_and_keys_it_names_exist() -> None:
    variables = {f"WATCHKEEPER_{key.upper().replace('.', '__')}" for key in KEYS}
    assert set(re.findall(r"\bWATCHKEEPER_[A-Z_]+\b", TEXT)) <= variables
    keys = {
        key for key in re.findall(r"`([a-z]+\.[a-z_*]+)(?=[` ])", prose()) if key.partition(".")[0] in TABLES
    }
    files = {path.name for path in (ROOT / "deploy").rglob("*")}
    unknown = {
        key for key in keys - files if not any(re.fullmatch(key.replace("*", ".*"), name) for name in KEYS)
    }
    assert unknown == set()


def test_the_metrics_it_names_exist() -> None:
    named = set(re.findall(r"`(?:watchkeeper_)?([a-z_]+_(?:total|ratio|seconds|bytes))\b", prose()))
    assert named
    of_streams = {"max_bytes"}
    assert {name for name in named - of_streams if name not in SURFACE} == set()


def test_the_alerts_it_names_are_explained() -> None:
    explained = set(re.findall(r"^### (\w+)$", TEXT, re.MULTILINE))
    assert set(re.findall(r"\bWatchkeeper[A-Z]\w+", TEXT)) <= explained


def test_its_example_of_rules_is_accepted(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    path = tmp_path / "watchkeeper.toml"
    path.write_text(example)
    config = load_config(path, {})
    assert config.mode_for({"team": "billing"}) == ("live", False)
    assert config.mode_for({}) == ("observe", False)


@pytest.mark.parametrize(
    "figure", ["62 MiB", "126 millicores", "2,600", "102 MiB", "780 millicores", "43,000", "261 MiB"]
)
def test_what_the_manifests_say_was_measured_stands_in_the_runbook(figure: str) -> None:
    held = [
        path for path in MANIFESTS if path.is_file() and figure in path.read_text().replace("and 780", "780")
    ]
    assert held
    assert figure in TEXT


def test_no_file_of_the_deployment_names_a_registry() -> None:
    places = [path for path in (ROOT / "deploy").rglob("*") if path.suffix in {".yaml", ".toml", ".sh", ""}]
    hosts = re.compile(r"\b(?:docker|quay|ghcr|gcr|registry\.k8s)\.(?:io|com|dev)\b")
    assert [path.name for path in places if path.is_file() and hosts.search(path.read_text())] == []
