"""`watchkeeper evaluate` and `watchkeeper verify` as a person or a CI job types them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sidecar.config import load_config
from sidecar.evaluation.bench import bench
from sidecar.evaluation.keeper import Keeper
from sidecar.evaluation.scenario import shipped
from sidecar.evaluation.transcripts import read_transcripts
from sidecar.importers import SAMPLE
from sidecar.states import state_row
from sidecar.summarizers.digest import DigestSummarizer
from support.sources import ROOT

SECONDS = 180
CASE = shipped() / "approval_pending.toml"


def command(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("WATCHKEEPER_")}
    return subprocess.run(
        [sys.executable, "-m", "sidecar", *map(str, arguments)],
        env={**known, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "PYTHONPATH": str(ROOT)},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def test_one_scenario_is_compared_and_told(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    ended = command("evaluate", CASE, "--html", page, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    for line in ("digest: Watchkeeper, digest", "kept 10", "approval", "lost nothing that is protected"):
        assert line in ended.stdout
    rows = {line.split()[0]: line.split()[1:] for line in ended.stdout.splitlines() if line.strip()}
    assert rows["digest"][0] == "100"
    assert rows["last"][0] != "100"
    assert not re.search(r"https?://|<script|\bsrc=", page.read_text())


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    chosen = ("--strategy", "rolling", "--strategy", "digest", "--strategy", "scripted")
    ask = ("evaluate", CASE, SAMPLE, "--json", "--compactions", "2", *chosen)
    first, second = command(*ask, cwd=tmp_path), command(*ask, cwd=tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout == second.stdout
    told = json.loads(first.stdout)
    assert told["scenarios"] == ["approval_pending"]
    assert [run["run"] for run in told["transcripts"]] == ["night-watch"]
    assert told["transcripts"][0]["covered"] > 100
    digest = [item for item in told["facts"] if item["strategy"] == "digest"]
    assert sum(item["facts"] for item in digest) > 100
    assert sum(item["lost"] for item in digest) == 0
    assert [item["strategy"] for item in told["figures"]] == ["rolling", "digest", "scripted"]
    assert told["failures"] == []


def test_what_is_wrong_fails_the_job(tmp_path: Path) -> None:
    text = CASE.read_text().replace('code = "approval_pending"', 'code = "approval_denied"')
    (tmp_path / "mine.toml").write_text(text)
    ended = command("evaluate", tmp_path, "--strategy", "digest", cwd=tmp_path)
    assert ended.returncode == 1
    assert (
        "failed digest: mine, after 1 compaction: the deployment is refused: got approval_pending"
        in " ".join(ended.stdout.split())
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("evaluate", "none.toml"), "none.toml: no such file; allowed: scenarios (.toml) and transcripts"),
        (("evaluate", "empty"), "empty: holds no scenario; allowed: "),
        (
            ("evaluate", CASE, "--strategy", "best"),
            "--strategy 'best'; allowed: none, last, trim, rolling, digest",
        ),
        (("evaluate", CASE, "--strategy", "model"), "needs summarizer.kind in the configuration"),
        (("evaluate", CASE, "--html", "no/such/x.html"), "--html no/such/x.html: cannot be written"),
        (("evaluate", CASE, "--html", "empty"), "--html empty: cannot be written (is a folder)"),
        (("evaluate", "odd.txt"), "odd.txt:1: "),
        (("evaluate", "odd.toml"), "odd.toml: colour: unknown key; allowed: title, covers"),
        (("verify", "none.toml"), "none.toml: no such file"),
        (("verify", "odd.toml"), "odd.toml: colour: unknown key"),
        (("verify", "odd.json"), "odd.json: is no run's state"),
        (("verify", CASE, "--expect", "op-deploy=perhaps"), "allowed: OPERATION=CODE with a code of"),
        (("verify", CASE, "--run", "other"), "run 'other' is not told of"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_two(
    tmp_path: Path, arguments: tuple[str | Path, ...], said: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd.txt").write_text("no transcript\n")
    (tmp_path / "odd.json").write_text("{}")
    (tmp_path / "odd.toml").write_text("colour = 'red'\n")
    ended = command(*arguments, cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert said in ended.stderr
    assert ended.stdout == ""


def test_a_case_is_restored_and_what_is_forbidden_is_listed(tmp_path: Path) -> None:
    ended = command("verify", CASE, "--expect", "op-deploy=approval_pending", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "verdict await_approval" in ended.stdout
    assert "operation op-deploy: approval_pending, its approval is not resolved" in ended.stdout
    assert "kind deploy.prod: approval_missing" in ended.stdout
    ended = command("verify", CASE, "--expect", "op-deploy=ok", "--json", cwd=tmp_path)
    assert ended.returncode == 1
    told = json.loads(ended.stdout)
    assert [check["name"] for check in told["checks"] if not check["passed"]] == [
        "operation op-deploy is answered ok"
    ]


def test_messages_and_a_state_are_cases_too(tmp_path: Path, anyio_backend: str) -> None:
    import anyio

    messages = command(
        "verify", SAMPLE, "--expect", "op-deploy-read=approval_pending", "--json", cwd=tmp_path
    )
    assert messages.returncode == 0
    told_as_text = command("verify", SAMPLE, cwd=tmp_path).stdout
    assert re.search(r"^  doing again what is over \(succeeded or failed\): op-", told_as_text, re.MULTILINE)
    (tmp_path / "state.json").write_bytes(anyio.run(_state))
    state = command(
        "verify", "state.json", "--expect", "op-deploy-read=approval_pending", "--json", cwd=tmp_path
    )
    assert (state.returncode, state.stderr) == (0, "")
    told: list[dict[str, Any]] = [json.loads(messages.stdout), json.loads(state.stdout)]
    assert told[0]["verdict"] == told[1]["verdict"] == "await_approval"
    assert told[0]["run"] == told[1]["run"] == "night-watch"
    assert {item["what"] for item in told[0]["forbidden"]} <= {item["what"] for item in told[1]["forbidden"]}


async def _state() -> bytes:
    """The sample's state, as the daemon writes it for another owner."""
    async with bench(load_config(None, {}, {}), (DigestSummarizer(), None)) as lane:
        await Keeper(lane, "digest", 8_000).tell(read_transcripts([SAMPLE]))
        await lane.desk.runs.load(["night-watch"])
        row = state_row(lane.desk, lane.desk.runs.hot["night-watch"], None)
        assert row is not None
        return bytes(msgspec.Raw(row.payload))
