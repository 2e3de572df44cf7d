"""How much each row measures: ``full`` for the table, ``small`` to see that it runs.

Small figures mean nothing: too short, and most sizes an aim speaks of are not reached.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Numbers of events unless the name says otherwise."""

    name: str
    rounds: int
    ingest: int
    runs: int
    history_small: int
    history: tuple[int, ...]
    """The larger histories, ascending; the first is the one that rows about a single size take."""
    history_runs: tuple[int, ...]
    batches: int
    """Batches of 256 a round of the history row."""
    singles: int
    rates: tuple[int, ...]
    rate_seconds: float
    hold_rate: int
    hold_seconds: float
    backlog: int
    steps: tuple[int, ...]
    step_window: int
    new_material: int
    """Turns told between two compactions."""
    packets: int
    """Asks of a round."""
    idle_runs: int
    scrapes: int
    search_seconds: float
    large_event: int
    """Bytes."""
    long_run: int
    """Messages of the run that is compacted while the event loop is watched."""
    pressure_seconds: float


FULL = Sizes(
    name="full",
    rounds=5,
    ingest=20_000,
    runs=50,
    history_small=1_000,
    history=(100_000, 1_000_000),
    history_runs=(1, 50, 1_000),
    batches=12,
    singles=120,
    rates=(100, 1_000, 5_000),
    rate_seconds=3.0,
    hold_rate=10_000,
    hold_seconds=60.0,
    backlog=100_000,
    steps=(100, 1_000, 3_000, 10_000),
    step_window=12,
    new_material=90,
    packets=400,
    idle_runs=10_000,
    scrapes=30,
    search_seconds=4.0,
    large_event=10 * 1024 * 1024,
    long_run=1_000_000,
    pressure_seconds=12.0,
)

SMALL = Sizes(
    name="small",
    rounds=1,
    ingest=600,
    runs=5,
    history_small=400,
    history=(800, 1_600),
    history_runs=(1, 5),
    batches=1,
    singles=5,
    rates=(200,),
    rate_seconds=0.3,
    hold_rate=500,
    hold_seconds=0.5,
    backlog=800,
    steps=(20, 60),
    step_window=3,
    new_material=90,
    packets=10,
    idle_runs=60,
    scrapes=3,
    search_seconds=0.4,
    large_event=256 * 1024,
    long_run=900,
    pressure_seconds=0.6,
)

SCALES = {sizes.name: sizes for sizes in (FULL, SMALL)}
