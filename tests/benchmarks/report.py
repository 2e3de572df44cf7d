"""The results as a table for a terminal, as a page, and as JSON. Prints and writes; measures nothing.

The page stands on three files beside it: ``results.json`` of the last full run, ``soak.json`` of the last soak, and
``PROFILE.md``, which is written by hand. Only the first two are written by commands.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Json = dict[str, Any]
HERE = Path(__file__).resolve().parent
_MINUTE = 60.0


def write_json(results: Json, path: Path) -> None:
    """The whole of it; the old file stays until the new one is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1) + "\n")
    new.replace(path)


def publish(results: Json, folder: Path = HERE) -> Path:
    """Keep these results and write the page from them; where it is."""
    write_json(results, folder / "results.json")
    return write_page(folder)


def publish_soak(report: Json, folder: Path = HERE) -> None:
    """Keep this soak, a sample a minute, and write the page anew where there are results."""
    kept: list[Json] = []
    for sample in report["samples"]:
        if not kept or sample["seconds"] - kept[-1]["seconds"] >= _MINUTE - 1:
            kept.append(sample)
    if kept and kept[-1] is not report["samples"][-1]:
        kept.append(report["samples"][-1])
    write_json({**report, "samples": kept}, folder / "soak.json")
    if (folder / "results.json").exists():
        write_page(folder)


def write_page(folder: Path = HERE) -> Path:
    """The page of what is kept in the folder."""
    soak = folder / "soak.json"
    text = page(
        json.loads((folder / "results.json").read_text()),
        json.loads(soak.read_text()) if soak.exists() else None,
    )
    (folder / "RESULTS.md").write_text(text)
    return folder / "RESULTS.md"


def show(results: Json, console: Console) -> None:
    """Every figure, one line each."""
    table = Table(show_lines=False)
    for name in ("row", "figure", "median", "min – max", "aim", "met"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for row in results["rows"]:
        table.add_section()
        table.add_row(row["row"], f"[bold]{row['title']}[/bold]")
        for figure in row["figures"]:
            table.add_row(
                "",
                figure["name"],
                _value(figure),
                _spread(figure),
                _aim(figure),
                _met(figure, "", "[red]NO[/red]"),
            )
        for text in [*row["missing"], *([f"FAILED: {row['error']}"] if "error" in row else [])]:
            table.add_row("", f"[yellow]{text}[/yellow]")
    console.print(table)


# --- the page -------------------------------------------------------------------------------------------------


def page(results: Json, soak: Json | None = None) -> str:
    """The same as Markdown: what is aimed at and what came of it, then row by row everything that was measured."""
    rows = results["rows"]
    lines = [
        "# What it costs",
        "",
        "Every `x` is a ratio of two things measured in the same run, in turn. The median of the rounds decides, "
        "the range is that of the rounds, not of the single events. Figures with a unit only show what the ratios "
        "were made of, on one machine. What was done about the costs, and where an aim is missed what the limit "
        "is: [PROFILE.md](PROFILE.md). This page and the [figures](results.json) are written by the command; do "
        "not edit them.",
        "",
        *_summary(rows),
        "",
        *_aims(rows),
    ]
    if soak is not None:
        lines += ["", *_soak(soak)]
    lines += ["", "## How it was measured", "", *_measured(results)]
    for row in rows:
        lines += ["", *_row(row)]
    return "\n".join(lines) + "\n"


def _summary(rows: list[Json]) -> list[str]:
    judged = [(row, figure) for row in rows for figure in row["figures"] if figure["met"] is not None]
    missed = [(row, figure) for row, figure in judged if not figure["met"]]
    failed = [row["row"] for row in rows if "error" in row]
    told = [f"{len(judged)} figures have an aim; {len(judged) - len(missed)} meet it."]
    if missed:
        by_row: dict[str, int] = {}
        for row, _ in missed:
            by_row[row["row"]] = by_row.get(row["row"], 0) + 1
        told.append(
            "Missed: "
            + ", ".join(f"row {row} ({count})" for row, count in by_row.items())
            + "; each is bold below."
        )
    if failed:
        told.append(f"Not measured, for an error: row {', '.join(failed)}.")
    return [" ".join(told)]


def _aims(rows: list[Json]) -> list[str]:
    lines = ["| | measure | figure | aim | median | min – max | |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        first = True
        for figure in row["figures"]:
            if figure["aim"] is None:
                continue
            number, title = (f"[{row['row']}](#{_anchor(row)})", row["title"]) if first else ("", "")
            first = False
            lines.append(
                f"| {number} | {title} | {figure['name']} | {_aim(figure)} | {_value(figure)} | {_spread(figure)} "
                f"| {_met(figure, 'met', '**missed**')} |"
            )
        if first:
            what = "not measured" if "error" in row else "no aim"
            lines.append(f"| [{row['row']}](#{_anchor(row)}) | {row['title']} | | | | | {what} |")
    return lines


def _anchor(row: Json) -> str:
    """As the heading of a row becomes a link's target: letters, digits and hyphens of it, in lower case."""
    text = _heading(row).lower().replace(" ", "-")
    return "".join(letter for letter in text if letter.isalnum() or letter in "-_")


def _heading(row: Json) -> str:
    return f"Row {row['row']}: {row['title']}"


def _measured(results: Json) -> list[str]:
    machine = results["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    groups: dict[str, float] = {}
    for row in results["rows"]:
        groups.setdefault(row.get("group", f"row {row['row']}"), row.get("seconds_of_group", 0.0))
    took = ", ".join(f"{name} {seconds / 60:.1f}" for name, seconds in groups.items())
    return [
        "```",
        results["command"],
        "```",
        "",
        '`make bench` is the same with an environment for the peers; one row: `make bench ARGS="--rows 1"`; after '
        "an interruption: `make bench ARGS=--resume`. Daemon, pumps and brokers are processes of their own on this "
        "one machine, and so is the sender.",
        "",
        f"- Machine: {machine['processor']}, {machine['processors']} processors, {machine['memory_gib']} GiB, "
        f"{machine['system']}; disk {machine.get('disk', 'unknown')}; load {machine['load']} at the start",
        f"- Python {machine['python']}, SQLite {machine['sqlite']}, {machine['nats-server']}, {packages}",
        f"- Commit {machine['commit']}; {results['rounds']} rounds; scale {results['scale']}; began "
        f"{results['began']}; {results['seconds'] / 60:.0f} minutes, preparation included (minutes: {took})",
    ]


def _row(row: Json) -> list[str]:
    lines = [f"## {_heading(row)}", "", f"Path: {row['path']}.", ""]
    if row["sizes"]:
        lines += [
            "Sizes: " + ", ".join(f"{name} {_flat(value)}" for name, value in row["sizes"].items()) + ".",
            "",
        ]
    told = [f"Missing: {text}" for text in row["missing"]] + [f"Note: {text}." for text in row["notes"]]
    if "error" in row:
        told.append(f"Failed: {row['error']}")
    for text in told:
        lines += [text, ""]
    if not row["figures"]:
        return lines[:-1]
    lines += ["| figure | median | min – max | rounds | aim | |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {figure['name']} | {_value(figure)} | {_spread(figure)} | {figure['rounds']} | {_aim(figure)} "
        f"| {_met(figure, 'met', '**missed**')} |"
        for figure in row["figures"]
    ]
    return lines


def _soak(soak: Json) -> list[str]:
    last, machine = soak["samples"][-1], soak["machine"]
    lines = [
        "## Half an hour under load",
        "",
        f"{soak['agents']} agents in a window of {soak['window']} tokens talk, use tools, are compacted, take packets "
        "up, ask and search, and begin anew when their run is finished. Judged is the last quarter against the "
        f"second: {last['events']:,} events, {last['finished']} runs finished, {last['taken_up']} packets taken up, "
        f"{last['asked']:,} questions in {last['seconds'] / 60:.0f} minutes; commit {machine['commit']}, "
        f"`{soak['command']}`, [samples](soak.json).",
        "",
        "| quantity | second quarter | last quarter | |",
        "|---|---|---|---|",
    ]
    for name, verdict in soak["verdicts"].items():
        if name == "nothing_lost":
            lines.append(
                f"| events told and stored | {verdict['told']:,} | {verdict['stored']:,} "
                f"| {'none lost' if verdict['flat'] else '**lost**'} |"
            )
        else:
            lines.append(
                f"| {name.replace('_', ' ')} | {_plain(verdict['second'])} | {_plain(verdict['last'])} "
                f"| {'flat' if verdict['flat'] else '**grows**'} |"
            )
    return lines


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:.1f}"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _value(figure: Json) -> str:
    return f"{_number(figure['median'])} {figure['unit']}".strip()


def _spread(figure: Json) -> str:
    return f"{_number(figure['min'])} – {_number(figure['max'])}" if figure["rounds"] > 1 else "once"


def _aim(figure: Json) -> str:
    aim = figure["aim"]
    return "" if aim is None else f"{'≤' if aim['kind'] == 'at_most' else '≥'} {aim['value']:g}"


def _met(figure: Json, yes: str, no: str) -> str:
    return "" if figure["met"] is None else (yes or "yes") if figure["met"] else no


def _flat(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " / ".join(f"{part:,}" if isinstance(part, int) else str(part) for part in value)
    if isinstance(value, dict):
        return "; ".join(f"{name} {part}" for name, part in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)
