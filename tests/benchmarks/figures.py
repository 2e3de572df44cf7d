"""What a row says: samples of one ratio per round, the aim it is held against, and the path it measures.

It measures nothing and prints nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Aim:
    """``at_most`` or ``at_least`` this value."""

    kind: Literal["at_most", "at_least"]
    value: float

    def met(self, value: float) -> bool:
        return value <= self.value if self.kind == "at_most" else value >= self.value

    def __str__(self) -> str:
        return f"{'<=' if self.kind == 'at_most' else '>='} {self.value:g}"


def at_most(value: float) -> Aim:
    return Aim("at_most", value)


def at_least(value: float) -> Aim:
    return Aim("at_least", value)


@dataclass
class Figure:
    """One figure of a row: a sample per round. Without ``aim`` it explains another one."""

    name: str
    samples: list[float]
    aim: Aim | None = None
    unit: str = "x"

    @property
    def median(self) -> float:
        return statistics.median(self.samples) if self.samples else math.nan

    @property
    def met(self) -> bool | None:
        """Whether the median meets the aim; None without one, or without samples."""
        return None if self.aim is None or not self.samples else self.aim.met(self.median)

    def value(self) -> dict[str, Any]:
        low, high = (min(self.samples), max(self.samples)) if self.samples else (math.nan, math.nan)
        return {
            "name": self.name,
            "unit": self.unit,
            "median": _short(self.median),
            "min": _short(low),
            "max": _short(high),
            "rounds": len(self.samples),
            "aim": None if self.aim is None else asdict(self.aim),
            "met": self.met,
            "samples": [_short(sample) for sample in self.samples],
        }


@dataclass
class Row:
    """One row of the table. ``path`` names what is measured and against what; ``missing`` what was not there."""

    number: str
    title: str
    path: str
    figures: list[Figure] = field(default_factory=list)
    sizes: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, samples: Sequence[float], aim: Aim | None = None, unit: str = "x") -> Figure:
        figure = Figure(name, list(samples), aim, unit)
        self.figures.append(figure)
        return figure

    def value(self) -> dict[str, Any]:
        return {
            "row": self.number,
            "title": self.title,
            "path": self.path,
            "sizes": self.sizes,
            "figures": [figure.value() for figure in self.figures],
            "missing": self.missing,
            "notes": self.notes,
        }


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Round by round: never a median over a median of another moment."""
    return [a / b for a, b in zip(above, below, strict=True)]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so many of all are not above; NaN for none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def _short(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.5g}")
