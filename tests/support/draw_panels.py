"""Draws the panels of the dashboards from a real Prometheus, for the README: one picture for each dashboard.

For developers: ``python tests/support/draw_panels.py`` with matplotlib at hand, which nothing else needs. The data
are those of the voyage the tests make (``watched.py``): about a minute, with faults.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import anyio

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import matplotlib  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from support import dashboards  # noqa: E402
from tests.support.watched import Watch, watched_voyage  # noqa: E402

SHOWN: Final = {
    "watchkeeper-runs": (
        *("Unfinished runs by level", "Broken invariants by severity", "Answers to authorize"),
        *("Attempts by their end", "Why attempts failed", "Put off"),
        *("Time of each phase", "Context before and after", "Tokens of summarisers"),
    ),
    "watchkeeper-fleet": (
        *("Events folded", "Messages refused", "Events not read yet"),
        *("Messages waiting to leave", "Packets published", "Questions answered"),
        *("Epoch of each lane", "Connected to the broker", "How late tasks wake"),
    ),
}
"""The panels on each picture; the dashboards have more."""
LEGEND: Final = 6
STEP_SECONDS: Final = 0.5


def _legend(template: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), template)


def _draw(axes: Any, panel: dashboards.Panel, watch: Watch) -> None:
    count = int((watch.ended - watch.began) / STEP_SECONDS) + 1
    times = [number * STEP_SECONDS for number in range(count)]
    absent = 0.0 if panel.stacked else math.nan
    lines: dict[str, list[float]] = {}
    for query, legend in panel.queries:
        asked = dashboards.filled(query.replace("$where", dashboards.WHERE), "5s")
        for labels, points in watch.prometheus.points(asked, watch.began, watch.ended, STEP_SECONDS):
            line = lines.setdefault(_legend(legend, labels), [absent] * count)
            for moment, value in points:
                line[min(count - 1, round((moment - watch.began) / STEP_SECONDS))] = value
    highest = sorted(lines, key=lambda name: -max(value for value in lines[name] if value == value))
    named = [name if number < LEGEND else f"_{name}" for number, name in enumerate(highest)]
    if panel.stacked:
        axes.stackplot(times, *(lines[name] for name in highest), labels=named, alpha=0.75)
    else:
        for name, shown in zip(highest, named, strict=True):
            axes.plot(times, lines[name], label=shown, linewidth=1.4)
    axes.set_title(panel.title, fontsize=9, loc="left", fontweight="bold")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, watch.ended - watch.began)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    # Beside the curves, never over them.
    axes.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, labelspacing=0.2)


def draw(dashboard: dashboards.Dashboard, watch: Watch, path: Path) -> None:
    """One picture with the panels that ``SHOWN`` names."""
    panels = {panel.title: panel for panel in dashboard.panels}
    names = SHOWN[dashboard.uid]
    figure, grid = plt.subplots(len(names) // 3, 3, figsize=(13, 7.4))
    for axes, name in zip(grid.flat, names, strict=True):
        _draw(axes, panels[name], watch)
    for axes in grid[-1]:
        axes.set_xlabel("seconds", fontsize=7)
    figure.suptitle(dashboard.title, fontsize=11, x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(path, dpi=80, pil_kwargs={"optimize": True})
    plt.close(figure)


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="watchkeeper-") as folder:
        async with watched_voyage(Path(folder)) as watch:
            for dashboard in dashboards.DASHBOARDS:
                path = ROOT / "deploy" / "pictures" / f"{dashboard.uid}.png"
                draw(dashboard, watch, path)
                print(f"{path.name}: {path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    anyio.run(main)
