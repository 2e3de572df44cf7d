"""Every row, in groups that share what they prepare: the one list the runner, the table and the test read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.compacting import compacting
from benchmarks.figures import Row
from benchmarks.footprint import footprint
from benchmarks.growth import growth
from benchmarks.histories import Histories
from benchmarks.ingest import ingest
from benchmarks.latency import latency
from benchmarks.loop_lag import loop_lag
from benchmarks.packets import packets
from benchmarks.peers import peers
from benchmarks.places import Run
from benchmarks.pressure import pressure
from benchmarks.starting import starting


@dataclass(frozen=True)
class Group:
    """Rows measured together. ``measure`` returns those of ``rows`` that are wanted."""

    name: str
    rows: tuple[str, ...]
    measure: Callable[[Run, set[str], Histories], Awaitable[list[Row]]]


def _alone(measure: Callable[[Run, set[str]], Awaitable[list[Row]]]) -> Callable[..., Awaitable[list[Row]]]:
    """A group that needs no history."""
    return lambda run, wanted, _histories: measure(run, wanted)


GROUPS: tuple[Group, ...] = (
    Group("ingest", ("1", "2", "13"), _alone(ingest)),
    Group("latency", ("4", "14"), _alone(latency)),
    Group("footprint", ("10", "12"), _alone(footprint)),
    Group("peers", ("6",), _alone(peers)),
    Group("growth", ("3", "9"), growth),
    Group("starting", ("5", "11"), starting),
    Group("packets", ("8",), packets),
    Group("compacting", ("7",), compacting),
    Group("loop lag", ("15",), loop_lag),
    Group("pressure", ("16",), _alone(pressure)),
)
ROWS: tuple[str, ...] = tuple(sorted((row for group in GROUPS for row in group.rows), key=int))
