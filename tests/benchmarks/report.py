"""The results as a table for a terminal, as a page, and as JSON. Prints and writes; measures nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Json = dict[str, Any]


def write_json(results: Json, path: Path) -> None:
    """The whole of it; the old file stays until the new one is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1) + "\n")
    new.replace(path)


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


def page(results: Json) -> str:
    """The same as Markdown, with the path each row measures, the machine, and the command."""
    machine = results["machine"]
    lines = [
        "# Benchmark results",
        "",
        "Written by the command; do not edit. Every `x` is a ratio of two things measured in the same run, in "
        "turn; the median of all rounds decides. Absolute figures only show what the ratios were made of.",
        "",
        f"    {results['command']}",
        "",
        f"- Machine: {machine['processor']}, {machine['processors']} processors, {machine['memory_gib']} GiB; "
        f"{machine['system']}; load {machine['load']} at the start",
        f"- Python {machine['python']}, SQLite {machine['sqlite']}, {machine['nats-server']}, "
        + ", ".join(f"{name} {version}" for name, version in machine["packages"].items()),
        f"- Commit {machine['commit']}; {results['rounds']} rounds, scale {results['scale']}; "
        f"{results['began']}, {results['seconds'] / 60:.0f} minutes",
        "",
        "## Aims",
        "",
        "| row | figure | median | min – max | aim | met |",
        "|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        lines += [_line(row, figure) for figure in row["figures"] if figure["aim"] is not None]
    for row in results["rows"]:
        lines += ["", f"## {row['row']}: {row['title']}", "", f"Measures: {row['path']}.", ""]
        lines += [
            f"Sizes: {', '.join(f'{name} {_flat(value)}' for name, value in row['sizes'].items())}.",
            "",
        ]
        lines += [f"Missing: {text}" for text in row["missing"]] + [f"Note: {text}." for text in row["notes"]]
        if "error" in row:
            lines += [f"Failed: {row['error']}"]
        lines += ["", "| figure | median | min – max | rounds | aim | met |", "|---|---|---|---|---|---|"]
        lines += [
            f"| {figure['name']} | {_value(figure)} | {_spread(figure)} | {figure['rounds']} | {_aim(figure)} "
            f"| {_met(figure, 'yes', '**no**')} |"
            for figure in row["figures"]
        ]
    return "\n".join(lines) + "\n"


def _line(row: Json, figure: Json) -> str:
    return (
        f"| {row['row']} | {figure['name']} | {_value(figure)} | {_spread(figure)} | {_aim(figure)} "
        f"| {_met(figure, 'yes', '**no**')} |"
    )


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _value(figure: Json) -> str:
    return f"{_number(figure['median'])} {figure['unit']}".strip()


def _spread(figure: Json) -> str:
    return f"{_number(figure['min'])} – {_number(figure['max'])}" if figure["rounds"] > 1 else ""


def _aim(figure: Json) -> str:
    aim = figure["aim"]
    return "" if aim is None else f"{'≤' if aim['kind'] == 'at_most' else '≥'} {aim['value']:g}"


def _met(figure: Json, yes: str, no: str) -> str:
    return "" if figure["met"] is None else (yes or "yes") if figure["met"] else no


def _flat(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " / ".join(str(part) for part in value)
    if isinstance(value, dict):
        return "; ".join(f"{name} {part}" for name, part in value.items())
    return str(value)
