"""What `watchkeeper evaluate` and `watchkeeper verify` do between their arguments and their exit code.

Files that are wrong are told in one line, before anything is run; what is shown goes to the console given.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import anyio
import msgspec
from rich.console import Console

from protocol.asks import AuthorizeCode
from protocol.errors import ExitCode
from sidecar.config import Config
from sidecar.evaluation.case import verify_case
from sidecar.evaluation.evaluate import TITLES, Request, evaluate
from sidecar.evaluation.page import render_page
from sidecar.evaluation.scenario import ScenarioError, shipped
from sidecar.evaluation.terminal import print_evaluation, print_verified, shown_progress
from sidecar.importers import ImportFailure
from sidecar.paths import unreadable, unwritable

_SCENARIO = ".toml"


class WrongInput(Exception):
    """What was given cannot be evaluated; the text is one line for a person."""


def run_evaluate(
    config: Config,
    files: Sequence[Path],
    *,
    format: str,
    strategies: Sequence[str],
    with_shipped: bool,
    compactions: int,
    window: int | None,
    as_json: bool,
    html: Path | None,
) -> int:
    """Evaluate and print; the exit code: 1 where Watchkeeper failed. Raises ``WrongInput``."""
    scenarios, transcripts = _sorted(files)
    if with_shipped or not files:
        scenarios = [*sorted(shipped().glob(f"*{_SCENARIO}")), *scenarios]
    for name in strategies:
        if name not in TITLES:
            raise WrongInput(f"--strategy {name!r}; allowed: {', '.join(TITLES)}")
    if "model" in strategies and config.summarizer.kind == "digest":
        raise WrongInput(
            "--strategy model needs summarizer.kind in the configuration; allowed: nats, openai, anthropic"
        )
    if html is not None and (trouble := unwritable(html)):
        raise WrongInput(
            f"--html {html}: cannot be written ({trouble}); allowed: a file in a folder that exists"
        )
    request = Request(
        scenarios=tuple(scenarios),
        transcripts=tuple(transcripts),
        format=format,
        strategies=tuple(strategies),
        compactions=compactions,
        window=window,
    )
    console = Console(highlight=False)
    try:
        with shown_progress(Console(stderr=True)) as progress:
            found = anyio.run(evaluate, request, config, progress)
    except (ScenarioError, ImportFailure) as error:
        raise WrongInput(str(error)) from error
    if html is not None:
        try:
            html.write_text(render_page(found), encoding="utf-8")
        except OSError as error:
            raise WrongInput(f"--html {html}: cannot be written ({error.strerror})") from error
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print_evaluation(console, found)
    return int(ExitCode.FAILURE if found.failures else ExitCode.CLEAN)


def _sorted(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Scenarios and transcripts among the files; a folder stands for the scenarios in it."""
    scenarios: list[Path] = []
    transcripts: list[Path] = []
    for file in files:
        if os.path.isdir(file):
            if not os.access(file, os.R_OK | os.X_OK):
                raise WrongInput(f"{file}: Permission denied: user {os.getuid()} may not look into it")
            found = sorted(file.glob(f"*{_SCENARIO}"))
            if not found:
                raise WrongInput(
                    f"{file}: holds no scenario; allowed: a folder with {_SCENARIO} files, or files"
                )
            scenarios += found
        elif trouble := unreadable(file):
            raise WrongInput(f"{file}: {trouble}; allowed: scenarios ({_SCENARIO}) and transcripts")
        elif file.suffix == _SCENARIO:
            scenarios.append(file)
        else:
            transcripts.append(file)
    return scenarios, transcripts


def run_verify(config: Config, case: Path, *, run: str | None, expect: Sequence[str], as_json: bool) -> int:
    """Restore, ask and print; the exit code: 1 where something is not as expected. Raises ``WrongInput``."""
    if trouble := unreadable(case):
        raise WrongInput(
            f"{case}: {trouble}; allowed: a scenario (.toml), messages (.jsonl), a run's state (.json)"
        )
    expected = _expected(expect)

    async def verify() -> int:
        found = await verify_case(case, config, now=time.time(), run=run, expected=expected)
        if as_json:
            print(msgspec.json.format(msgspec.json.encode(found)).decode())
        else:
            print_verified(Console(highlight=False), found)
        return int(ExitCode.CLEAN if found.passed else ExitCode.FAILURE)

    try:
        return anyio.run(verify)
    except (ScenarioError, ImportFailure) as error:
        raise WrongInput(str(error)) from error


def _expected(told: Sequence[str]) -> Mapping[str, str]:
    codes = get_args(AuthorizeCode)
    found: dict[str, str] = {}
    for item in told:
        name, _, code = item.partition("=")
        if not name or code not in codes:
            raise WrongInput(f"--expect {item!r}; allowed: OPERATION=CODE with a code of {', '.join(codes)}")
        found[name] = code
    return found
