"""Runs the rows one group after the other, keeps what is done, and goes on where an interrupted run stopped.

A group that fails is told with its error and takes no other down.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.histories import Histories
from benchmarks.machine import commit, described, load
from benchmarks.places import Run
from benchmarks.registry import GROUPS, ROWS, Group
from benchmarks.report import write_json
from benchmarks.sizes import FULL, Sizes

Json = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """What one call is to do. ``kept`` is the file every finished row is written to at once."""

    rows: tuple[str, ...]
    sizes: Sizes
    rounds: int
    peers: Path
    kept: Path
    command: str
    resume: bool = False
    scratch: Path | None = None


def chosen(text: str | None) -> tuple[str, ...]:
    """Rows by a comma-separated list; all without one. Raises ValueError naming what is no row."""
    if not text:
        return ROWS
    named = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [part for part in named if part not in ROWS]
    if unknown:
        raise ValueError(f"no such row: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    return named


async def measure(wanted: Wanted, say: Callable[[str, str], None]) -> Json:
    """Measure the rows; the results, which are written after each group. ``say`` is told (group, what).

    Raises Mixed where an interrupted run is to be gone on with that was of another commit or size.
    """
    results = _begun(wanted)
    done = {row["row"] for row in results["rows"] if "error" not in row}
    began = time.monotonic() - results["seconds"]
    work = Path(tempfile.mkdtemp(prefix="wk-bench-", dir=wanted.scratch))
    try:
        sizes = replace(wanted.sizes, rounds=wanted.rounds)
        run = Run(sizes, wanted.rounds, work, wanted.peers, lambda what: say("", what))
        histories = Histories(run)
        for group in GROUPS:
            rows = {row for row in group.rows if row in wanted.rows and row not in done}
            if rows:
                run.say = _named(say, group)
                made = await _group(group, rows, run, histories)
                results["rows"] = sorted(
                    [row for row in results["rows"] if row["row"] not in rows] + made,
                    key=lambda row: int(row["row"]),
                )
                results["seconds"] = round(time.monotonic() - began, 1)
                write_json(results, wanted.kept)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return results


def _named(say: Callable[[str, str], None], group: Group) -> Callable[[str], None]:
    return lambda what: say(f"{group.name} (row {', '.join(group.rows)})", what)


async def _group(group: Group, rows: set[str], run: Run, histories: Histories) -> list[Json]:
    run.say("begins")
    began, busy = time.monotonic(), load()
    try:
        made = await group.measure(run, rows, histories)
    except Exception as error:
        # The other groups' figures are worth having; the error is part of the result, and of the exit code.
        traceback.print_exc()
        told = f"{type(error).__name__}: {error}"
        return [
            {"row": row, "title": group.name, "path": "", "sizes": {}, "figures": [], "missing": [], "notes": [],
             "error": told[:2_000], "group": group.name, "seconds_of_group": round(time.monotonic() - began, 1)}
            for row in sorted(rows)
        ]  # fmt: skip
    seconds = round(time.monotonic() - began, 1)
    return [{**row.value(), "group": group.name, "seconds_of_group": seconds, "load": busy} for row in made]


class Mixed(ValueError):
    """What was measured before is of another kind: rows of both must not stand on one page."""


def _begun(wanted: Wanted) -> Json:
    if wanted.resume and wanted.kept.exists():
        before: Json = json.loads(wanted.kept.read_text())
        for name, then, now in (
            ("scale", before["scale"], wanted.sizes.name),
            ("rounds", before["rounds"], wanted.rounds),
            ("commit", before["machine"]["commit"], commit()),
        ):
            if then != now:
                raise Mixed(f"{wanted.kept} is of {name} {then}, not {now}: measure anew, without --resume")
        return before
    return {
        "command": wanted.command,
        "scale": wanted.sizes.name,
        "rounds": wanted.rounds,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": 0.0,
        "machine": described(wanted.scratch),
        "rows": [],
    }


def whole(results: Json) -> bool:
    """Whether these are results of every row at full size and in enough rounds, as the published page needs them."""
    there = {row["row"] for row in results["rows"] if "error" not in row}
    return results["scale"] == "full" and results["rounds"] >= FULL.rounds and set(ROWS) <= there
