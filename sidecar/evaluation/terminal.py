"""The report of an evaluation in a terminal: figures of each strategy, shares of facts, what went wrong.

It draws from values it is given and decides nothing. Text of a file is shown escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from sidecar.evaluation.case import Verified
from sidecar.evaluation.evaluate import TITLES
from sidecar.evaluation.evaluate import Progress as Told
from sidecar.evaluation.outcome import Evaluation, FactShares, Figures, mean_tokens, percent

_MOST_FAILURES = 40


@contextmanager
def shown_progress(console: Console) -> Iterator[Told]:
    """A bar while it lasts; a console that is no terminal gets none."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda what, done, total: bar.update(
            task, description=escape(what), completed=done, total=total
        )


def print_evaluation(console: Console, found: Evaluation) -> None:
    if found.figures:
        console.print(_strategies(found))
        console.print(_covers(found.figures))
    if found.facts:
        console.print(_facts(found.facts))
    for line in found.failures[:_MOST_FAILURES]:
        console.print(f"[red]failed[/red] {escape(line)}", soft_wrap=True)
    if len(found.failures) > _MOST_FAILURES:
        console.print(f"[red]… and {len(found.failures) - _MOST_FAILURES} more (--json has all)[/red]")
    if found.figures or found.facts:
        good = "[green]Watchkeeper lost nothing that is protected and allowed nothing that is not.[/green]"
        count = len(found.failures)
        console.print(
            good if not count else f"[red]{count} failure{'' if count == 1 else 's'} of Watchkeeper.[/red]"
        )


def _strategies(found: Evaluation) -> Table:
    table = Table(
        title=f"{len(found.scenarios)} scenarios, compacted up to "
        f"{max((moment.after for moment in found.moments), default=0)} times",
        title_justify="left",
        caption="right: answers. kept: protected items after so many compactions. allowed: what is not allowed.\n"
        "done: an unknown outcome told as done. lost: facts. refused: what is allowed. tokens: of the context.",
        caption_justify="left",
    )
    table.add_column("strategy", no_wrap=True)
    for name in ("right", "kept 1", "kept 5", "kept 10", "allowed", "done", "lost", "refused", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for item in found.figures:
        harm = item.harms
        table.add_row(
            escape(item.title),
            percent(item.passed, item.probes),
            *(_at(item.drift, number) for number in (1, 5, 10)),
            str(harm["disallowed_allowed"]),
            str(harm["unknown_as_success"]),
            str(harm["fact_lost"]),
            str(harm["wrongly_refused"]),
            f"{mean_tokens(item):,}",
            style="bold" if item.watchkeeper else None,
        )
    return table


def _covers(figures: Sequence[Figures]) -> Table:
    table = Table(title="right answers, by what a scenario is about", title_justify="left")
    table.add_column("about", no_wrap=True)
    for item in figures:
        table.add_column(item.strategy, justify="right", no_wrap=True)
    for name in figures[0].by_covers:
        table.add_row(
            name.replace("_", " "), *(percent(*item.by_covers.get(name, (0, 0))) for item in figures)
        )
    return table


def _facts(facts: Sequence[FactShares]) -> Table:
    table = Table(
        title="facts of the covered history, each counted once",
        title_justify="left",
        caption="in context: in packet or tail. by ref: one fetch away. by search: among the first three hits.\n"
        "top 3: among the first three hits of a search, whether it is in the packet or not.",
        caption_justify="left",
    )
    for name in ("strategy", "kind"):
        table.add_column(name, no_wrap=True)
    for name in ("facts", "in context", "by ref", "by search", "lost", "top 3"):
        table.add_column(name, justify="right", no_wrap=True)
    for item in sorted(facts, key=lambda item: list(TITLES).index(item.strategy)):
        table.add_row(
            item.strategy,
            item.kind,
            str(item.facts),
            *(
                percent(value, item.facts)
                for value in (item.in_packet, item.by_ref, item.by_search, item.lost)
            ),
            percent(item.top3, item.facts) if item.top3 >= 0 else "-",
        )
    return table


def print_verified(console: Console, found: Verified) -> None:
    """What is still forbidden in a case, and whether it is what was expected."""
    console.print(f"{escape(found.case)}: run {escape(found.run)}, verdict [bold]{found.verdict}[/bold]")
    for blocker in found.blockers:
        console.print(f"  {escape(blocker)}", soft_wrap=True)
    table = Table(title="what may not be done, and why", title_justify="left")
    for name in ("what", "answer", "why", "until"):
        table.add_column(name)
    for item in found.forbidden:
        table.add_row(escape(item.what), item.code, escape(item.reason), escape(item.clears_when or "-"))
    console.print(table if found.forbidden else "  nothing is forbidden by name")
    for check in found.checks:
        mark = "[green]holds[/green]" if check.passed else "[red]fails[/red]"
        console.print(f"  {mark} {escape(check.name)}: {escape(check.got)}", soft_wrap=True)


def _at(values: Sequence[float | None], number: int) -> str:
    value = values[number] if number < len(values) else None
    return "-" if value is None else ("100 %" if value == 1 else f"{min(99.9, value * 100):.1f} %")
