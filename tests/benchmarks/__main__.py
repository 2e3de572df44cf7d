"""``python -m tests.benchmarks``: measure, show a table, keep the results.

Exit code 0 when every row was measured, 1 when one failed; with ``--strict`` also when an aim was missed. The
page beside this file is written by a full run of all rows only, or by ``--publish``.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

HERE = Path(__file__).resolve().parent
# `python -m tests.benchmarks` starts at the root of the repository; the tests' own packages lie one further.
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

import structlog  # noqa: E402
import typer  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.status import Status  # noqa: E402

from benchmarks.registry import GROUPS  # noqa: E402
from benchmarks.report import publish as publish_results  # noqa: E402
from benchmarks.report import show  # noqa: E402
from benchmarks.runner import Mixed, Wanted, chosen, measure, whole  # noqa: E402
from benchmarks.sizes import SCALES  # noqa: E402
from sidecar.memory import collect_seldom  # noqa: E402

console = Console(width=None if sys.stdout.isatty() else 150)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    rows: Annotated[str | None, typer.Option(help="Rows, comma-separated; all without it.")] = None,
    scale: Annotated[str, typer.Option(help="full, or small: only to see that it runs.")] = "full",
    rounds: Annotated[int | None, typer.Option(help="Rounds of each row.", min=1)] = None,
    peers: Annotated[Path | None, typer.Option(help="The Python that has the peers installed.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path(".benchmarks"),
    scratch: Annotated[
        Path | None, typer.Option(help="Folder to measure in; some 10 GiB at full size.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Keep the rows an interrupted run has measured.")] = False,
    publish: Annotated[bool, typer.Option(help="Write the page even if rows are missing.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit 1 when an aim was missed.")] = False,
    listed: Annotated[
        bool, typer.Option("--list", help="Name the groups and their rows, measure nothing.")
    ] = False,
) -> None:
    """Measure the rows and show every figure beside its aim."""
    if listed:
        for group in GROUPS:
            console.print(f"{group.name}: rows {', '.join(group.rows)}")
        raise typer.Exit
    if scale not in SCALES:
        raise typer.BadParameter(f"{scale} is none of {', '.join(SCALES)}")
    try:
        named = chosen(rows)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    sizes = SCALES[scale]
    wanted = Wanted(
        rows=named,
        sizes=sizes,
        rounds=rounds or sizes.rounds,
        peers=peers or Path(sys.executable),
        kept=out / "results.json",
        command=" ".join(["python -m tests.benchmarks", *sys.argv[1:]]),
        resume=resume,
        scratch=scratch,
    )
    with console.status("benchmarks") as status:
        # As the daemon does once it is loaded: what is measured in this process is measured under its settings.
        collect_seldom()
        try:
            results = asyncio.run(measure(wanted, _teller(status)))
        except Mixed as error:
            raise typer.BadParameter(str(error)) from error
    show(results, console)
    console.print(f"kept in {wanted.kept}")
    if whole(results) or publish:
        console.print(f"published in {publish_results(results)}")
    failed = [row["row"] for row in results["rows"] if "error" in row]
    missed = [
        row["row"] for row in results["rows"] if any(figure["met"] is False for figure in row["figures"])
    ]
    if failed:
        console.print(f"[red]failed: row {', '.join(failed)}[/red]")
    if missed:
        console.print(f"[yellow]aims missed in row {', '.join(missed)}[/yellow]")
    raise typer.Exit(1 if failed or (strict and missed) else 0)


def _teller(status: Status):  # type: ignore[no-untyped-def]  # a closure over two types of two libraries
    last = ""

    def say(group: str, what: str) -> None:
        nonlocal last
        status.update(f"{group}: {what}")
        if group != last:
            last = group
            console.print(f"[dim]{group}[/dim]")

    return say


if __name__ == "__main__":
    app()
