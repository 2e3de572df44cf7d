"""What a person sees in the terminal: live headroom bars, and the report after a replay.

It draws from values it is given and decides nothing. Text of a run is shown escaped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sidecar.replay import RunReport, Turn

_COLOURS = {
    "ok": "green",
    "checkpoint": "cyan",
    "compact": "yellow",
    "critical": "red",
    "overflow": "bold white on red",
}
_WHY = {
    "no_boundary": "no event to cut after",
    "in_flight": "a call or an operation is under way",
    "open_gap": "a part of the history is missing",
    "artifact_unsaved": "an artifact is not saved yet",
    "little_new": "too little to cover beside what stays",
    "cool_down": "too soon after the last attempt",
    "breaker": "too many attempts failed",
    "not_applied": "the agent has not taken the last packet up",
    "mode": "the mode allows none",
    "fixed_cost": "what cannot be shortened is too large for the window alone",
    "recent_part": "what must stay word for word is too large for the window",
    "no_gain": "it would not make the context smaller",
}
"""What the reasons of a deferral mean, by code of the wire."""
_WIDTH = 40
_BESIDE_BAR = 64
"""Columns of a line beside its bar. In a narrow terminal first the bar gets shorter, then the run's name."""


def headroom_bar(used: int, usable: int, level: str, width: int = _WIDTH) -> Text:
    """A bar of ``width`` cells: filled part used, colour by level; over the limit it is full."""
    share = 0.0 if usable <= 0 else max(0.0, used / usable)
    filled = min(width, round(share * width))
    bar = Text("█" * filled, style=_COLOURS.get(level, "white"))
    bar.append("░" * (width - filled), style="dim")
    bar.append(f" {share * 100:4.0f} % of {usable:,}", style="dim")
    return bar


class Board:
    """Live bars of the replayed runs. Use as a context manager; ``show`` may be called at any rate."""

    def __init__(self, console: Console, *, enabled: bool) -> None:
        self._turns: dict[str, Turn] = {}
        self._bar = max(10, min(_WIDTH, console.width - _BESIDE_BAR))
        self._console = console
        self._live = Live(console=console, refresh_per_second=12, transient=False) if enabled else None

    def __enter__(self) -> Board:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.update(self._table())
            self._live.stop()
            if not self._console.is_terminal:
                self._console.line()

    def show(self, turn: Turn) -> None:
        self._turns[turn.report.run] = turn
        if self._live is not None:
            self._live.update(self._table())

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, expand=False)
        table.add_column("run", no_wrap=True)
        table.add_column("context used", no_wrap=True, min_width=self._bar + 16)
        for title in ("level", "events", "checkpoint"):
            table.add_column(title, no_wrap=True, min_width=10 if title == "level" else len(title))
        for turn in list(self._turns.values())[-20:]:
            budget = turn.status.budget
            checkpoint = turn.status.checkpoint
            table.add_row(
                escape(turn.report.run[:36]),
                headroom_bar(
                    int(budget.get("used", 0)), int(budget.get("usable", 0)), turn.status.level, self._bar
                ),
                Text(turn.status.level, style=_COLOURS.get(turn.status.level, "white")),
                str(turn.report.events),
                f"v{checkpoint['version']}" if checkpoint is not None else "-",
            )
        return table


def print_report(console: Console, reports: Iterable[RunReport], daemon: dict[str, Any]) -> None:
    """The report of a replay as readable text, the last packet of each run included."""
    applied = told = 0
    for report in reports:
        told += report.events
        lines: list[Any] = [
            Text(
                f"{report.events} events, {report.tool_calls} calls, {report.usage_reports} usage reports, "
                f"levels crossed: {' '.join(report.levels) or 'none'}, trims: {report.trims}, "
                f"rejected: {report.rejected}"
            )
        ]
        if report.violations:
            lines.append(Text("violations: " + ", ".join(f"{k} {n}" for k, n in report.violations.items())))
        if report.deferrals:
            why = "; ".join(
                f"{_WHY.get(reason, reason)} ({reason}, told {count} time{'' if count == 1 else 's'})"
                for reason, count in report.deferrals.items()
            )
            lines.append(Text(f"compactions put off: {why}"))
        if report.compactions:
            lines.append(_compactions(report.compactions))
        applied += sum(1 for compaction in report.compactions if compaction["outcome"] == "applied")
        console.print(Panel(Group(*lines), title=f"run {escape(report.run)}", title_align="left"))
        if report.packet is not None:
            console.print("Resume packet, as the next model turn reads it:", style="bold")
            console.print(Text(report.packet["text"]), soft_wrap=True)
    lag, pending = daemon["intake_lag_events"], daemon["outbox_pending"]
    total = daemon["events_total"]
    console.print(
        f"{total} messages in the ledger: {told} of the files, {max(0, total - told)} added on the way; "
        f"{lag} behind, {pending} unsent"
    )
    console.print(f"{applied} compaction{'' if applied == 1 else 's'} applied", style="bold green")


def _compactions(compactions: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("events", "trigger", "outcome", "tokens before", "after"):
        table.add_column(title)
    for item in compactions:
        table.add_row(
            f"{item['from']}–{item['through']}",
            item["trigger"],
            _end(item),
            f"{item['tokens_before']:,}",
            f"{item['tokens_after']:,}",
        )
    return table


def _end(item: dict[str, Any]) -> str:
    """The outcome, and of an attempt that changed nothing also why."""
    if item["outcome"] in ("applied", "shadow"):
        return str(item["outcome"])
    return f"{item['outcome']}: {', '.join(item['violations']) or item['reason']}"
