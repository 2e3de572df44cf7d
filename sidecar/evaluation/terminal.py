"""The report of an evaluation in a terminal: figures of each strategy, shares of facts, what went wrong.

It draws from values it is given and decides nothing. Text of a file is shown escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from sidecar.evaluation.case import Verified
from sidecar.evaluation.evaluate import TITLES
from sidecar.evaluation.evaluate import Progress as Told
from sidecar.evaluation.outcome import Evaluation, FactShares, Figures, mean_tokens, percent

_MOST_FAILURES = 40
_OVER = ("already_succeeded", "already_failed")


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
    names = {item.strategy for item in found.figures} | {item.strategy for item in found.facts}
    console.print("\n".join(f"{name}: {title}" for name, title in TITLES.items() if name in names))
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
    depth = len(found.figures[0].drift) - 1
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=f"{len(found.scenarios)} scenarios; kept: over the {found.figures[0].cohort} with {depth} compactions",
        title_justify="left",
        caption="right: answers. kept: protected items after so many compactions, word for word.\n"
        "allowed: what is not allowed. done: unknown told as done. lost: facts.\n"
        "refused: what is allowed. tokens: of the context.",
        caption_justify="left",
    )
    table.add_column("strategy", no_wrap=True)
    numbers = sorted({(depth + 1) // 2, depth})
    kept = [f"kept {number}" for number in numbers]
    for name in ("right", *kept, "allowed", "done", "lost", "refused", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for item in found.figures:
        harm = item.harms
        table.add_row(
            item.strategy,
            percent(item.passed, item.probes),
            *(_at(item.drift, number) for number in numbers),
            str(harm["disallowed_allowed"]),
            str(harm["unknown_as_success"]),
            str(harm["fact_lost"]),
            str(harm["wrongly_refused"]),
            f"{mean_tokens(item):,}",
            style="bold" if item.watchkeeper else None,
        )
    return table


def _covers(figures: Sequence[Figures]) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title="right answers, by what a scenario is about",
        title_justify="left",
    )
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
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title="facts of the covered history, each counted once",
        title_justify="left",
        caption="context: in packet or tail. ref: one fetch away. search: among the first three hits only.\n"
        "top 3: among the first three hits of a search, wherever else it is.",
        caption_justify="left",
    )
    for name in ("strategy", "kind"):
        table.add_column(name, no_wrap=True)
    for name in ("facts", "context", "ref", "search", "lost", "top 3"):
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
    console.print(
        f"{escape(found.case)}: run {escape(found.run)}, verdict [bold]{found.verdict}[/bold]", soft_wrap=True
    )
    for blocker in found.blockers:
        console.print(f"  {escape(blocker)}", soft_wrap=True)
    console.print("Still forbidden:" if found.forbidden else "Nothing is forbidden by name.")
    over = [item.what.removeprefix("operation ") for item in found.forbidden if item.code in _OVER]
    for item in found.forbidden:
        if item.code not in _OVER:
            until = f", until {escape(item.clears_when)}" if item.clears_when else ""
            console.print(
                f"  {escape(item.what)}: [bold]{item.code}[/bold], {escape(item.reason)}{until}",
                soft_wrap=True,
            )
    if over:
        console.print(
            f"  doing again what is over (succeeded or failed): {escape(', '.join(over))}", soft_wrap=True
        )
    for check in found.checks:
        if not check.passed:
            console.print(f"[red]failed[/red] {escape(check.name)}: got {escape(check.got)}", soft_wrap=True)
    held = sum(check.passed for check in found.checks)
    if found.checks:
        console.print(f"{held} of {len(found.checks)} expectations hold.")


def _at(values: Sequence[float | None], number: int) -> str:
    value = values[number] if number < len(values) else None
    return "-" if value is None else ("100 %" if value == 1 else f"{min(99.9, value * 100):.1f} %")
