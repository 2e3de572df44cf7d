"""The ``watchkeeper`` command: reads arguments, starts the right part, turns its end into an exit code.

No decision about runs is taken here. Exit codes: ``CODES``.
"""

from __future__ import annotations

import os
import shutil
import sys
from enum import StrEnum
from importlib import metadata, resources
from pathlib import Path
from typing import Annotated, Any

import anyio
import msgspec
import typer
import typer.core

from protocol.errors import ExitCode
from protocol.schema import json_schema
from sidecar import logs
from sidecar.config import Config, ConfigError, load_config

CODES = (
    "Exit codes: 0 done; 1 unexpected failure, or a check says no; 2 wrong configuration or usage: nothing was "
    "changed, and it fails again until an argument, a key, a path, its owner or what else runs is another; "
    "3 the broker refuses us."
)


_THEIR_WORDS = "Value error, "


class Commands(typer.core.TyperGroup):
    """The commands. The library that checks values puts its own words before ours: they are left out."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            # A group of errors has a message of its own, which cannot be set.
            said = getattr(error, "message", None)
            if isinstance(said, str) and said.startswith(_THEIR_WORDS):
                error.message = said.removeprefix(_THEIR_WORDS)  # type: ignore[attr-defined]
            raise


app = typer.Typer(
    name="watchkeeper",
    cls=Commands,
    epilog=CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# Whether a path can be read is told by whoever reads it, in our words: hence `readable=False`.
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        readable=False,
        help="TOML file; default: $WATCHKEEPER_CONFIG, else watchkeeper.toml here, if there is one.",
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", readable=False, help="The data directory; default: the configured one."),
]
Tenant = Annotated[
    str | None, typer.Option("--tenant", help="Only this tenant; default: every one there is.")
]
Lane = Annotated[str | None, typer.Option("--lane", help="Only this lane; default: every one there is.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"watchkeeper {metadata.version('watchkeeper-sidecar')}")
        raise typer.Exit


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


class Question(StrEnum):
    alive = "alive"
    ready = "ready"
    started = "started"


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


@app.callback()
def watchkeeper(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and end.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Keeps an AI agent's commitments, approvals and side effects across context compaction."""


@app.command()
def run(
    config: ConfigFile = None,
    embedded_nats: Annotated[
        bool, typer.Option("--embedded-nats", help="Start a private nats-server beside the daemon.")
    ] = False,
    log_level: Annotated[LogLevel | None, typer.Option("--log-level", help="How much to log.")] = None,
) -> None:
    """Run the daemon until SIGTERM or SIGINT, then drain."""
    from sidecar.app import serve

    loaded = _load(config, {} if log_level is None else {"logs.level": log_level.value})
    logs.configure(loaded.logs.level, loaded.logs.format)
    raise typer.Exit(anyio.run(serve, loaded, embedded_nats))


@app.command()
def replay(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE", readable=False, help="Transcripts: Claude Code JSONL, Codex rollouts, our events."
        ),
    ],
    format: Annotated[Format, typer.Option("--format", help="What the files are.")] = Format.auto,
    window: Annotated[
        int | None,
        typer.Option(
            "--window", min=2_000, help="Context window in tokens; default: as recorded, else 200,000."
        ),
    ] = None,
    as_json: AsJson = False,
    live: Annotated[
        bool, typer.Option("--live", help="Show headroom bars and publish without waiting for compactions.")
    ] = False,
    config: ConfigFile = None,
) -> None:
    """Replay transcripts through a private broker and daemon, and report what was compacted."""
    from sidecar.importers import ImportFailure
    from sidecar.paths import unreadable
    from sidecar.rehearsal import rehearse

    for file in files:
        if trouble := unreadable(file):
            raise Refusal(ExitCode.USAGE, f"{file}: {trouble}; give transcript files to replay")
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
    at_hand = shutil.which("watchkeeper") is not None or Path(sys.argv[0]).name != "watchkeeper"
    typed = "watchkeeper" if at_hand else sys.argv[0]
    ways = {
        f"{typed} replay YOUR.jsonl --window 60000": "a transcript of your own (Claude Code, Codex)",
        f"{typed} run --embedded-nats": "the daemon; then http://127.0.0.1:9464/",
        "README.md": "guarantees, layers, configuration, metrics",
    }
    typer.echo("\nWhere to look next:")
    for way, what in ways.items():
        typer.echo(f"  {way:<{len(max(ways, key=len))}}   {what}")
    raise typer.Exit(code)


@app.command("check-config")
def check_config(config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Read the configuration as the daemon would and print every value with its source."""
    from sidecar.summarizers.choice import check_summarizers

    loaded = _load(config)
    check_summarizers(loaded)
    if as_json:
        rows = {item.key: {"value": item.value, "source": item.source} for item in loaded.describe()}
        typer.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return
    for item in loaded.describe():
        typer.echo(str(item))


@app.command()
def health(
    question: Annotated[Question, typer.Argument(metavar="alive|ready|started")] = Question.alive,
    config: ConfigFile = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds to wait for the answer.")
    ] = 5.0,
) -> None:
    """Ask the daemon of this configuration whether it is alive, ready or started.

    Exit code 0 for yes and 1 for no or no answer, so that a probe can run it.
    """
    from sidecar import probe

    try:
        answer = probe.ask(_load(config).admin.listen, question.value, timeout)
    except probe.NoAnswer as away:
        raise Refusal(ExitCode.FAILURE, str(away)) from away
    except ValueError as error:
        raise Refusal(ExitCode.USAGE, str(error)) from error
    typer.echo(answer.text)
    if not answer.fine:
        raise typer.Exit(int(ExitCode.FAILURE))


@app.command()
def inspect(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run to look at.")],
    data_dir: DataDir = None,
    config: ConfigFile = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant; default: the configured one.")] = None,
    lane: Annotated[str | None, typer.Option(help="Lane; default: every configured one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a run's ledger, budget, checkpoints and receipts from the data directory."""
    from sidecar.desk import budget_settings
    from sidecar.inspection import inspect_run, render

    loaded = _load(config)
    folder = data_dir or loaded.data_dir
    lanes = [lane] if lane is not None else list(loaded.lane_names)
    found = anyio.run(inspect_run, folder, tenant or loaded.tenant, lanes, run_id, budget_settings(loaded))
    if found is None:
        where = ", ".join(lanes)
        raise Refusal(ExitCode.USAGE, f"run {run_id}: not in {folder} (lanes looked at: {where})")
    typer.echo(msgspec.json.format(msgspec.json.encode(found)).decode() if as_json else render(found))


audit = typer.Typer(
    help="Prove that what is stored is what was read: the hash chain of each run.", no_args_is_help=True
)
app.add_typer(audit, name="audit")


@audit.command()
def verify(
    run_id: Annotated[str | None, typer.Argument(metavar="RUN", help="The run to verify.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Verify every run there is.")] = False,
    data_dir: DataDir = None,
    tenant: Tenant = None,
    lane: Lane = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Recompute the hash chain from the stored messages; name the first link that does not hold.

    Reads only and takes no lock, so it works beside a running daemon.
    Of a forgotten run the heads are left, and they are verified.
    Exit code 1 if a chain is broken.
    """
    from sidecar import upkeep

    if (run_id is None) != every:
        raise Refusal(ExitCode.USAGE, "give a run, or --all for every run")
    folder = data_dir or _load(config).data_dir
    found = anyio.run(upkeep.verify, folder, run_id, tenant, lane)
    if run_id is not None and not found:
        raise Refusal(ExitCode.USAGE, f"run {run_id}: not in {folder}")
    broken = sum(item.broken is not None for item in found)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode({"runs": found, "broken": broken})).decode())
    else:
        for item in found:
            typer.echo(str(item))
        typer.echo(f"{len(found)} run{'' if len(found) == 1 else 's'} verified, {broken} broken")
    if broken:
        raise typer.Exit(int(ExitCode.FAILURE))


@app.command()
def forget(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="A finished run.")],
    data_dir: DataDir = None,
    tenant: Tenant = None,
    lane: Lane = None,
    config: ConfigFile = None,
) -> None:
    """Forget a finished run and its family: every word goes, the chain of digests stays.

    Stop the daemon first: it owns the data directory.
    Started again, it takes the run's messages out of the streams too. This cannot be undone.
    A running daemon forgets by itself, by the table retention of the configuration.
    """
    from sidecar import upkeep

    folder = data_dir or _load(config).data_dir
    try:
        gone = anyio.run(upkeep.forget, folder, run_id, tenant, lane)
    except upkeep.NotForgotten as reason:
        raise Refusal(ExitCode.USAGE, f"run {run_id} is not forgotten: {reason}") from reason
    typer.echo(f"forgotten: {', '.join(gone)}")
    typer.echo("Start the daemon to take their messages out of the streams as well.")


@app.command()
def backup(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", readable=False, help="The file to write; it must not exist.")
    ],
    data_dir: DataDir = None,
    config: ConfigFile = None,
) -> None:
    """Copy the database into one file, while the daemon runs or not; the copy is of one moment.

    It holds all that was said, and what is forgotten later. The streams of the broker are not in it.
    """
    from sidecar import upkeep

    size = anyio.run(upkeep.back_up, data_dir or _load(config).data_dir, file)
    typer.echo(f"{file}: {size:,} bytes")


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", readable=False, help="A file that backup wrote.")],
    data_dir: DataDir = None,
    config: ConfigFile = None,
) -> None:
    """Make a backup the database of a data directory that has none; nothing is overwritten.

    The daemon started on it reads on where the backup was made, from the streams.
    """
    from sidecar import upkeep

    folder = data_dir or _load(config).data_dir
    version = anyio.run(upkeep.put_back, file, folder)
    typer.echo(f"{folder}: restored from {file} (schema {version})")


@app.command()
def evaluate(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE",
            readable=False,
            help="Scenarios (.toml, or a folder of them) and transcripts; default: the shipped ones.",
        ),
    ] = None,
    shipped: Annotated[bool, typer.Option("--shipped", help="The shipped scenarios as well.")] = False,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this one, may be repeated: none, last, trim, rolling, digest, scripted, model."
        ),
    ] = None,
    compactions: Annotated[
        int, typer.Option(min=1, max=50, help="How often each transcript is shortened.")
    ] = 5,
    window: Annotated[
        int | None, typer.Option("--window", min=2_000, help="Context window of transcripts in tokens.")
    ] = None,
    format: Annotated[Format, typer.Option("--format", help="What the transcripts are.")] = Format.auto,
    as_json: AsJson = False,
    html: Annotated[
        Path | None, typer.Option("--html", readable=False, help="Write a report with charts here.")
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Compare what strategies of shortening a history leave to go on with, by questions with known answers.

    Exit code 1 if Watchkeeper loses something protected, allows something that is not allowed, or answers a
    probe wrong; 2 for a wrong scenario or transcript.
    """
    from sidecar.evaluation import command

    loaded = _load(config, {"logs.level": "error"})
    logs.configure("error", loaded.logs.format)
    try:
        code = command.run_evaluate(
            loaded,
            files or [],
            format=format.value,
            strategies=strategy or [],
            with_shipped=shipped,
            compactions=compactions,
            window=window,
            as_json=as_json,
            html=html,
        )
    except command.WrongInput as wrong:
        raise Refusal(ExitCode.USAGE, str(wrong)) from wrong
    raise typer.Exit(code)


@app.command("verify")
def verify_case(
    case: Annotated[
        Path,
        typer.Argument(
            metavar="CASE",
            readable=False,
            help="A scenario, a run's messages (.jsonl), or its state (.json).",
        ),
    ],
    expect: Annotated[
        list[str] | None, typer.Option(help="OPERATION=CODE that authorize must answer; may be repeated.")
    ] = None,
    run_id: Annotated[
        str | None, typer.Option("--run", help="The run to look at; default: the first.")
    ] = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> None:
    """Restore one saved case and list what is still forbidden in it, and why.

    Exit code 1 if a probe of the case or an --expect fails, 2 for a wrong case.
    """
    from sidecar.evaluation import command

    loaded = _load(config, {"logs.level": "error"})
    logs.configure("error", loaded.logs.format)
    try:
        code = command.run_verify(loaded, case, run=run_id, expect=expect or [], as_json=as_json)
    except command.WrongInput as wrong:
        raise Refusal(ExitCode.USAGE, str(wrong)) from wrong
    raise typer.Exit(code)


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
        for part in line.splitlines():
            print(f"watchkeeper: {part}", file=sys.stderr)
        raise SystemExit(int(code)) from None


def _refused(error: BaseException) -> tuple[ExitCode, str] | None:
    return (error.code, str(error)) if isinstance(error, Refusal) else None
