"""Draws ``deploy/pictures/headroom.svg``: the demo's bars at the moments that matter, as a terminal shows them.

``python tests/support/pictures.py`` replays the bundled sample, keeps what the bars showed where a level or
the checkpoint changed (``headroom.json``), and draws that. The drawing itself is a function of these frames.
"""

from __future__ import annotations

import io
import re
import tempfile
from pathlib import Path
from typing import Final

import anyio
import msgspec
from rich.console import Console
from rich.table import Table
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from sidecar.app import running
from sidecar.config import load_config
from sidecar.embedded_nats import embedded_nats
from sidecar.importers import import_files
from sidecar.rehearsal import private
from sidecar.replay import Replay, Turn
from sidecar.terminal import headroom_bar
from sidecar.transport.jetstream import Link, LinkSettings

ROOT: Final = Path(__file__).resolve().parent.parent.parent
PICTURES: Final = ROOT / "deploy" / "pictures"
SAMPLE: Final = ROOT / "sidecar" / "samples" / "night_watch.jsonl"
WINDOW: Final = 32_000
# Readable on its own dark ground, whatever the page's.
THEME: Final = TerminalTheme(
    (24, 26, 31),
    (220, 223, 228),
    [
        (40, 44, 52),
        (240, 98, 98),
        (126, 200, 120),
        (229, 192, 90),
        (97, 175, 239),
        (198, 120, 221),
        (86, 194, 206),
        (220, 223, 228),
    ],
    [
        (92, 99, 112),
        (255, 120, 120),
        (150, 220, 140),
        (245, 210, 120),
        (120, 190, 250),
        (215, 145, 235),
        (110, 215, 225),
        (255, 255, 255),
    ],
)
LEVEL_COLOURS: Final = {"ok": "green", "checkpoint": "cyan", "compact": "yellow", "critical": "red"}


class Frame(msgspec.Struct, frozen=True):
    """What the bar showed after that many events; ``checkpoint`` is a version, 0 for none."""

    events: int
    used: int
    usable: int
    level: str
    checkpoint: int


def draw(frames: list[Frame]) -> str:
    """The SVG: no font, script or picture from elsewhere."""
    console = Console(
        record=True,
        width=92,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False)
    for title in ("events", "context used", "level", "checkpoint"):
        table.add_column(title, no_wrap=True, min_width=10 if title == "level" else len(title))
    for frame in frames:
        table.add_row(
            f"{frame.events:6}",
            headroom_bar(frame.used, frame.usable, frame.level),
            Text(frame.level, style=LEVEL_COLOURS.get(frame.level, "bold red")),
            f"v{frame.checkpoint}" if frame.checkpoint else "-",
        )
    console.print(Text("$ make demo", style="bold"))
    console.print(table)
    svg = console.export_svg(title="run night-watch, window 32,000 tokens", theme=THEME, unique_id="headroom")
    svg = re.sub(r"@font-face\s*\{.*?\}", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace")
    return re.sub(r"\n\s*\n+", "\n", svg)


async def record() -> list[Frame]:
    """Replay the sample and keep each frame where level or checkpoint changed."""
    frames: list[Frame] = []

    def look(turn: Turn) -> None:
        status = turn.status
        frame = Frame(
            events=turn.report.events,
            used=int(status.budget.get("used", 0)),
            usable=int(status.budget.get("usable", 0)),
            level=status.level,
            checkpoint=status.checkpoint["version"] if status.checkpoint else 0,
        )
        if not frames or (frame.level, frame.checkpoint) != (frames[-1].level, frames[-1].checkpoint):
            frames.append(frame)

    messages = import_files([SAMPLE], format="events", window=WINDOW)
    with tempfile.TemporaryDirectory(prefix="watchkeeper-") as name:
        folder = Path(name)
        async with (
            embedded_nats(folder / "nats") as url,
            running(private(load_config(None, {}), folder, url)),
            anyio.create_task_group() as tasks,
        ):
            link = Link(LinkSettings(url=url, creds=None, name="pictures"), lambda connected, reason: None)
            await tasks.start(link.run)
            player = Replay(link, tenant="default", lane="main", progress=look)
            await player.feed(messages)
            tasks.cancel_scope.cancel()
    return [frame for frame in frames if frame.usable]


if __name__ == "__main__":
    found = anyio.run(record)
    (PICTURES / "headroom.json").write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    (PICTURES / "headroom.svg").write_text(draw(found) + "\n")
