"""The ``watchkeeper`` command: reads arguments, starts the right part, turns its end into an exit code.

Exit codes: 0 clean, 1 unexpected failure, 2 wrong configuration or usage, 3 a needed service refused us.
No decision about runs is taken here.
"""

from __future__ import annotations

import os
import signal
import sys
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated

import anyio
import msgspec
import typer

from protocol.errors import ExitCode
from protocol.schema import json_schema
from sidecar import logs
from sidecar.config import Config, ConfigError, load_config

app = typer.Typer(
    name="watchkeeper",
    help="Keeps an AI agent's commitments, approvals and side effects across context compaction.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file; default: watchkeeper.toml in the working directory, if there."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


class LogLevel(StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class Format(StrEnum):
    auto = "auto"
    claude_code = "claude-code"
    codex = "codex"
    events = "events"


class Refusal(Exception):
    """One clear line for a person, and the exit code that goes with it."""

    def __init__(self, code: ExitCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def _load(file: Path | None, overrides: dict[str, object] | None = None) -> Config:
    try:
        return load_config(file, os.environ, overrides or {})
    except ConfigError as error:
        raise Refusal(ExitCode.USAGE, str(error)) from error


@app.command()
def run(
    config: ConfigFile = None,
    embedded_nats: Annotated[
        bool, typer.Option("--embedded-nats", help="Start a private nats-server beside the daemon.")
    ] = False,
    log_level: Annotated[LogLevel | None, typer.Option("--log-level", help="How much to log.")] = None,
) -> None:
    """Run the daemon until SIGTERM or SIGINT, then drain."""
    # Until the daemon listens for signals itself there is nothing to drain, and leaving is no failure.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(int(ExitCode.CLEAN)))
    from sidecar.app import serve

    loaded = _load(config, {} if log_level is None else {"logs.level": log_level.value})
    logs.configure(loaded.logs.level, loaded.logs.format)
    raise typer.Exit(anyio.run(serve, loaded, embedded_nats))


@app.command()
def replay(
    files: Annotated[
        list[Path], typer.Argument(help="Transcripts: Claude Code JSONL, Codex rollouts, our events.")
    ],
    format: Annotated[Format, typer.Option("--format", help="What the files are.")] = Format.auto,
    window: Annotated[
        int | None, typer.Option("--window", min=2_000, help="Context window to replay with, in tokens.")
    ] = None,
    as_json: AsJson = False,
    live: Annotated[
        bool, typer.Option("--live", help="Show headroom bars and publish without waiting for compactions.")
    ] = False,
    config: ConfigFile = None,
) -> None:
    """Replay transcripts through a private broker and daemon, and report what was compacted."""
    from sidecar.importers import ImportFailure
    from sidecar.rehearsal import rehearse

    for file in files:
        if not file.is_file():
            what = "is a folder" if file.is_dir() else "no such file"
            raise Refusal(ExitCode.USAGE, f"{file}: {what}; give transcript files to replay")
    loaded = _load(config, {"logs.level": "warning"})
    logs.configure("warning", loaded.logs.format)
    try:
        code = anyio.run(
            lambda: rehearse(
                loaded,
                files,
                format=format.value,
                window=window,
                as_json=as_json,
                bars=live,
                patient=not live,
            )
        )
    except ImportFailure as failure:
        raise Refusal(ExitCode.USAGE, str(failure)) from failure
    raise typer.Exit(code)


@app.command()
def demo(
    window: Annotated[int, typer.Option("--window", min=2_000, help="Context window in tokens.")] = 32_000,
) -> None:
    """Replay the bundled sample run with live headroom bars and show the packet it ends with."""
    from sidecar.rehearsal import rehearse

    loaded = _load(None, {"logs.level": "warning"})
    logs.configure("warning", "console")
    with resources.as_file(resources.files("sidecar") / "samples" / "night_watch.jsonl") as sample:
        code = anyio.run(
            lambda: rehearse(
                loaded, [sample], format="events", window=window, as_json=False, bars=True, patient=True
            )
        )
    typer.echo("\nWhere to look next:")
    typer.echo(
        "  watchkeeper replay YOUR.jsonl --window 60000   a transcript of your own (Claude Code, Codex)"
    )
    typer.echo("  watchkeeper run --embedded-nats                the daemon; then http://127.0.0.1:9464/")
    typer.echo("  README.md                                      guarantees, layers, configuration, metrics")
    raise typer.Exit(code)


@app.command("check-config")
def check_config(config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Read the configuration as the daemon would and print every value with its source."""
    from sidecar.summarizers.choice import build_summarizers

    loaded = _load(config)
    build_summarizers(loaded)
    if as_json:
        rows = {item.key: {"value": item.value, "source": item.source} for item in loaded.describe()}
        typer.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return
    for item in loaded.describe():
        typer.echo(str(item))


@app.command()
def inspect(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run to look at.")],
    config: ConfigFile = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant; default: the configured one.")] = None,
    lane: Annotated[str | None, typer.Option(help="Lane; default: every configured one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a run's ledger, budget, checkpoints and receipts from the data directory."""
    from sidecar.desk import budget_settings
    from sidecar.inspection import inspect_run, render

    loaded = _load(config)
    lanes = [lane] if lane is not None else list(loaded.lanes)
    found = anyio.run(
        inspect_run, loaded.data_dir, tenant or loaded.tenant, lanes, run_id, budget_settings(loaded)
    )
    if found is None:
        where = ", ".join(lanes)
        raise Refusal(ExitCode.USAGE, f"run {run_id}: not in {loaded.data_dir} (lanes looked at: {where})")
    typer.echo(msgspec.json.format(msgspec.json.encode(found)).decode() if as_json else render(found))


@app.command()
def schema() -> None:
    """Print the JSON Schema of every message on the wire."""
    typer.echo(msgspec.json.format(msgspec.json.encode(json_schema())).decode())


def main(arguments: list[str] | None = None) -> None:
    """Entry point; every expected failure is one line on stderr."""
    try:
        app(arguments, standalone_mode=True)
    except SystemExit:
        raise
    except BaseException as error:
        # Not at the top: it knows every part of the daemon, which `--help` need not load.
        from sidecar.failures import explain

        code, line = _refused(error) or explain(error)
        if code is None:
            raise
        print(f"watchkeeper: {line}", file=sys.stderr)
        raise SystemExit(int(code)) from None


def _refused(error: BaseException) -> tuple[ExitCode, str] | None:
    return (error.code, str(error)) if isinstance(error, Refusal) else None
