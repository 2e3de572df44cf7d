"""The command as a person types it: help, configuration, schema, inspection, replay, demo, exit codes."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import anyio
import pytest
from rich.console import Console

from sidecar.cli import CODES
from sidecar.replay import Listener, RunReport
from sidecar.terminal import print_report
from sidecar.transport.jetstream import Link
from tests.support.blackbox import blackbox, event
from tests.support.nats_server import NatsServer

SECONDS = 120


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as started:
        yield started


def command(
    *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``watchkeeper`` in a folder without a configuration, unless one is given."""
    known = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("WATCHKEEPER_") and name not in ("COLUMNS", "FORCE_COLOR")
    }
    return subprocess.run(
        [sys.executable, "-m", "sidecar", *arguments],
        env={**known, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", **(env or {})},
        cwd=cwd or Path("/"),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """The package is found from any working directory."""
    root = str(Path(__file__).resolve().parents[2])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = root if before is None else f"{root}{os.pathsep}{before}"
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.mark.parametrize("name", ["run", "replay", "demo", "check-config", "inspect", "schema"])
def test_each_command_explains_itself(name: str) -> None:
    whole = command("--help")
    assert whole.returncode == 0
    assert name in whole.stdout
    one = command(name, "--help")
    assert one.returncode == 0
    assert "Usage" in one.stdout
    assert one.stderr == ""


@pytest.mark.parametrize(
    "arguments",
    [["sail"], ["replay"], ["replay", "--window", "many", "x"], ["inspect"], ["run", "--log-level", "loud"]],
)
def test_wrong_usage_ends_with_two(arguments: list[str]) -> None:
    done = command(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "Value error" not in done.stderr


def test_the_configuration_is_shown_with_its_sources(tmp_path: Path) -> None:
    file = tmp_path / "watchkeeper.toml"
    file.write_text('tenant = "acme"\n[budget]\ncompact_at = 0.7\n[nats]\nurl = "nats://me:pw@host:4222"\n')
    done = command("check-config", cwd=tmp_path, env={"WATCHKEEPER_MODE": "shadow"})
    assert done.returncode == 0, done.stderr
    assert re.search(r"^tenant = \S*acme\S*\s+\(file .*watchkeeper.toml\)$", done.stdout, re.MULTILINE)
    assert re.search(r"^mode = \S*shadow\S*\s+\(env WATCHKEEPER_MODE\)$", done.stdout, re.MULTILINE)
    assert re.search(r"^budget.critical_at = 0.9\s+\(default\)$", done.stdout, re.MULTILINE)
    assert "pw" not in done.stdout
    told = json.loads(command("check-config", "--json", cwd=tmp_path).stdout)
    assert told["budget.compact_at"]["value"] == "0.7"
    assert told["mode"]["source"] == "default"
    named = command("check-config", "--config", str(file))
    assert named.returncode == 0
    assert "acme" in named.stdout


def test_every_mistake_of_a_configuration_is_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text('mode = "loud"\ncolour = 1\n[budget]\ncompact_at = 2\n[lease]\nseconds = "soon"\n')
    for arguments in (["check-config"], ["run"]):
        done = command(*arguments, "--config", str(file), env={"WATCHKEEPER_TENNANT": "x"})
        assert done.returncode == 2
        for wrong in ("mode", "loud", "colour", "budget.compact_at", "lease.seconds", "WATCHKEEPER_TENNANT"):
            assert wrong in done.stderr, (wrong, done.stderr)
        assert "allowed" in done.stderr
        assert "Traceback" not in done.stderr
        assert all(line.startswith("watchkeeper: ") for line in done.stderr.splitlines()), done.stderr
    missing = command("check-config", "--config", str(tmp_path / "none.toml"))
    assert missing.returncode == 2
    assert "none.toml" in missing.stderr


def test_the_schema_describes_every_message() -> None:
    done = command("schema")
    assert done.returncode == 0
    told = json.dumps(json.loads(done.stdout))
    for name in ("run.started", "resume.packet", "compaction.receipt", "run.notice", "message.rejected"):
        assert name in told
    for name in ("authorization.requested", "run.state", "lane.epoch", "summarize.request"):
        assert name in told


# --- inspect ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored_run(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A data directory a daemon left behind, and a run in it."""
    folder = tmp_path_factory.mktemp("inspected")

    async def live() -> str:
        async with blackbox(server, folder) as box:
            run = await box.start(goal="Goal\x1b[31m\nwith lines", run="inspect-me")
            await box.tell(
                run,
                event("question.opened", question_id="q-1", text="Which zone?"),
                event("operation.declared", operation_id="op-1", kind="x.y", idempotency_key="key-1"),
                event("operation.dispatched", operation_id="op-2"),
            )
            packet = await box.packet(run)
            return str(packet["protected_digest"])

    return folder / "data", anyio.run(live)


def inspect(data: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {"WATCHKEEPER_DATA_DIR": str(data), "WATCHKEEPER_TENANT": "acme", "WATCHKEEPER_LANES": "main"}
    return command("inspect", *arguments, env=env)


def test_a_run_is_shown_for_a_person(stored_run: tuple[Path, str]) -> None:
    data, digest = stored_run
    done = inspect(data, "inspect-me")
    assert done.returncode == 0, done.stderr
    for wanted in ("inspect-me", "position 4", digest, "q-1", "Which zone?", "op-1", "key-1"):
        assert wanted in done.stdout, wanted
    assert "unauthorized_write 1" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_run_is_shown_for_a_program(stored_run: tuple[Path, str]) -> None:
    data, digest = stored_run
    done = inspect(data, "inspect-me", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["tenant"], told["lane"], told["run"]) == ("acme", "main", "inspect-me")
    assert told["protected_digest"] == digest
    assert told["ledger"]["head"]["position"] == 4
    assert told["budget"]["window"] == 100_000
    assert told["checkpoints"] == []
    assert told["receipts"] == []


def test_what_is_not_there_is_said_in_one_line(stored_run: tuple[Path, str], tmp_path: Path) -> None:
    done = inspect(stored_run[0], "nobody")
    assert done.returncode == 2
    assert "nobody" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    nowhere = inspect(tmp_path / "nothing", "nobody")
    assert nowhere.returncode == 2
    assert len(nowhere.stderr.strip().splitlines()) == 1
    assert "Traceback" not in nowhere.stderr
    assert not (tmp_path / "nothing").exists()


# --- exit codes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "nobody"),
        ("audit", "verify", "nobody"),
        ("forget", "nobody"),
        ("forget", "inspect-me"),
        ("restore", "{data}/lock"),
        ("restore", "{data}/none"),
        ("backup", "{data}/lock"),
        ("backup", "{data}/none/copy.db"),
    ],
)
def test_what_cannot_be_done_as_asked_ends_with_two(
    stored_run: tuple[Path, str], arguments: tuple[str, ...]
) -> None:
    data = stored_run[0]
    done = command(*(text.format(data=data) for text in arguments), "--data-dir", str(data))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("watchkeeper: ")


@pytest.mark.parametrize(
    "what", [("inspect", "r"), ("audit", "verify", "--all"), ("forget", "r"), ("backup", "x.db")]
)
def test_a_data_directory_without_a_database_ends_with_two(tmp_path: Path, what: tuple[str, ...]) -> None:
    done = command(*what, "--data-dir", str(tmp_path / "nothing"), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path / 'nothing'}/watchkeeper.db: there is no such database" in done.stderr
    assert "--data-dir" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_port_or_a_broker_that_is_taken_ends_with_two(tmp_path: Path) -> None:
    def run(*more: str, listen: str = "127.0.0.1:0") -> subprocess.CompletedProcess[str]:
        given = {"DATA_DIR": str(tmp_path / "data"), "ADMIN__LISTEN": listen, "LOGS__FORMAT": "json"}
        return command("run", *more, env={f"WATCHKEEPER_{key}": value for key, value in given.items()})

    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run(listen=f"127.0.0.1:{taken.getsockname()[1]}")
    assert done.returncode == 2
    assert "(admin.listen)" in done.stderr
    (tmp_path / "data" / "nats").mkdir(parents=True)
    with (tmp_path / "data" / "nats" / "nats-server.lock").open("w") as held:
        held.write("4711\n")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        done = run("--embedded-nats")
    assert done.returncode == 2
    assert "of the daemon with process id 4711: stop that one first" in done.stderr


def test_health_of_no_daemon_says_what_to_look_at() -> None:
    done = command("health", "ready", env={"WATCHKEEPER_ADMIN__LISTEN": "127.0.0.1:1"})
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("watchkeeper: no daemon answers on 127.0.0.1:1 (Connection refused): ")
    assert "admin.listen" in done.stderr


def test_the_help_tells_the_exit_codes() -> None:
    assert " ".join(CODES.split()) in " ".join(command("--help").stdout.split())


# --- replay and demo ----------------------------------------------------------------------------------------


def test_a_file_that_is_no_transcript_is_refused_by_line(tmp_path: Path) -> None:
    strange = tmp_path / "strange.jsonl"
    strange.write_text('{"hello": "world"}\n')
    done = command("replay", str(strange))
    assert done.returncode == 2
    assert f"{strange}:1:" in done.stderr
    for known in ("claude-code", "codex", "events"):
        assert known in done.stderr
    assert "Traceback" not in done.stderr
    half = tmp_path / "half.jsonl"
    first = '{"v":1,"id":"a","type":"run.started","at":"2026-01-01T00:00:00Z","goal":"g",'
    half.write_text(first + '"model":{"name":"m","context_window":9000}}\nnot json\n{"v":1}\n')
    broken = command("replay", str(half), "--format", "events")
    assert broken.returncode == 2
    assert f"{half}:2" in broken.stderr
    missing = command("replay", str(tmp_path / "none.jsonl"))
    assert missing.returncode == 2
    assert "none.jsonl" in missing.stderr


def test_a_transcript_of_another_tool_is_refused_by_line(corpus: Path) -> None:
    file = corpus / "cline/session/session.json"
    done = command("replay", str(file))
    assert done.returncode == 2
    assert f"{file}:1:" in done.stderr


def test_replay_reports_one_object(tmp_path: Path) -> None:
    sample = Path(__file__).resolve().parents[2] / "sidecar/samples/night_watch.jsonl"
    done = command("replay", str(sample), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert set(told) == {"files", "runs", "daemon"}
    (run,) = told["runs"]
    lines = [json.loads(line) for line in sample.read_text().splitlines() if line.strip()]
    # Messages of the authority are in the file too.
    assert run["events"] == len(lines)
    assert run["tool_calls"] == sum(line.get("type") == "tool.called" for line in lines)
    assert run["usage_reports"] == sum(line.get("type") == "usage.reported" for line in lines)
    assert run["rejected"] == 0
    assert sum(item["outcome"] == "applied" for item in run["compactions"]) >= 2
    assert list(tmp_path.iterdir()) == []


def test_the_demo_ends_with_its_packet_and_a_count(tmp_path: Path) -> None:
    done = command("demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    counted = re.search(r"^(\d+) compactions applied$", done.stdout, re.MULTILINE)
    assert counted is not None
    assert int(counted[1]) >= 2
    text = done.stdout[: counted.start()]
    for heading in ("VERDICT", "GOAL", "CONSTRAINT", "OPERATION", "APPROVAL", "DECISION"):
        assert re.search(rf"^{heading} ", text, re.MULTILINE), heading
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
    sample = Path(__file__).resolve().parents[2] / "sidecar/samples/night_watch.jsonl"
    told = sum(bool(line.strip()) for line in sample.read_text().splitlines())
    assert re.search(
        rf"^\d+ messages in the ledger: {told} of the files, \d+ added on the way;", done.stdout, re.M
    )


def test_why_nothing_was_compacted_is_told() -> None:
    listener = Listener(cast("Link", None), tenant="t", lane="main")
    notices = [
        {"kind": "compaction_deferred", "notice_id": "n1", "reason": "in_flight"},
        {"kind": "compaction_deferred", "notice_id": "n2", "reason": "in_flight"},
        {"kind": "ineffective", "notice_id": "n3", "reason": "fixed_cost"},
        {"kind": "level_changed", "notice_id": "n4", "to": "overflow"},
    ]
    for notice in [*notices, notices[0]]:
        message = SimpleNamespace(subject="wk.v1.out.t.main.r.notice", data=json.dumps(notice).encode())
        listener._heard(message)
    report = RunReport(run="r", events=3)
    listener.fill([report])
    assert report.deferrals == {"in_flight": 2, "fixed_cost": 1}
    out = io.StringIO()
    figures = {"events_total": 4, "intake_lag_events": 0, "outbox_pending": 0}
    print_report(Console(file=out, width=200), [report], figures)
    assert "a call or an operation is under way (in_flight, told 2 times)" in out.getvalue()
    assert "too large for the window alone (fixed_cost, told 1 time)" in out.getvalue()
    assert "4 messages in the ledger: 3 of the files, 1 added on the way;" in out.getvalue()


def test_it_tells_its_version() -> None:
    said = command("--version")
    assert said.returncode == 0
    assert said.stdout == f"watchkeeper {metadata.version('watchkeeper-sidecar')}\n"


# --- running ------------------------------------------------------------------------------------------------


def test_a_broker_that_is_not_there_is_waited_for_and_told(tmp_path: Path) -> None:
    """SIGTERM before start-up is complete is a clean stop."""
    with subprocess.Popen(
        [sys.executable, "-m", "sidecar", "run"],
        env={
            **os.environ,
            "WATCHKEEPER_NATS__URL": "nats://127.0.0.1:1",
            "WATCHKEEPER_DATA_DIR": str(tmp_path / "data"),
            "WATCHKEEPER_ADMIN__LISTEN": "127.0.0.1:0",
            "WATCHKEEPER_LOGS__FORMAT": "json",
        },
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        told = process.stdout.readline()
        process.terminate()
        rest = process.stdout.read()
        code = process.wait(30)
    assert code == 0, told + rest
    assert json.loads(told)
    assert "Traceback" not in rest
