"""Where the daemon's time goes while it reads a backlog: its own functions by share of the samples of py-spy.

``make profile``, or ``PYTHONPATH=tests python -m benchmarks.profiled --events 60000``. A sample counts for the
innermost function of this project on its stack, whatever library that function calls; so the shares add up, and each
names a place where something can be done. Printed as a table for PROFILE.md; it judges nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.load import fill
from benchmarks.material import Material
from benchmarks.places import broker, daemon

_HERTZ = 400
_FRAME = re.compile(r"^(?P<name>.+) \((?P<file>[^:)]+)(?::\d+)?\)$")
_OWN = re.compile(r"(?:^|/)(?P<place>(?:sidecar|storage|protocol)/.+)$")
_WAIT = 600.0


class Share(NamedTuple):
    """Of all samples of the daemon's process."""

    share: float
    where: str
    below: str
    """What it called most while it was sampled; empty where it worked itself."""


def shares(lines: Iterable[str]) -> tuple[int, list[Share]]:
    """How many samples, and by function how large a part, from the raw form of py-spy (a stack and a count a
    line)."""
    counts: collections.Counter[str] = collections.Counter()
    below: dict[str, collections.Counter[str]] = {}
    total = 0
    for line in lines:
        stack, _, count = line.rstrip().rpartition(" ")
        if not count.isdigit():
            continue
        total += int(count)
        frames = [found for frame in stack.split(";") if (found := _FRAME.match(frame))]
        own = [at for at, frame in enumerate(frames) if _OWN.search(frame["file"])]
        if own:
            frame = frames[own[-1]]
            place = _OWN.search(frame["file"])
            assert place is not None
            where = f"{place['place']} {frame['name']}"
            under = frames[own[-1] + 1 :]
        else:
            where, under = "the event loop and the client library", frames[-1:]
        counts[where] += int(count)
        if under:
            below.setdefault(where, collections.Counter())[under[0]["name"]] += int(count)
    return total, [
        Share(count / total, where, _most(below.get(where), count)) for where, count in counts.most_common()
    ]


def _most(below: collections.Counter[str] | None, count: int) -> str:
    """The call that takes at least a fifth of it."""
    if not below:
        return ""
    name, most = below.most_common(1)[0]
    return name if most >= count / 5 else ""


def table(total: int, found: Sequence[Share], most: int) -> str:
    """As Markdown."""
    lines = ["| share | where | mostly in |", "|---|---|---|"]
    lines += [f"| {item.share:.1%} | `{item.where}` | {item.below} |" for item in found[:most]]
    rest = 1 - sum(item.share for item in found[:most])
    return "\n".join(
        [*lines, f"| {rest:.1%} | {max(0, len(found) - most)} others | |", "", f"{total} samples."]
    )


async def profiled(events: int, runs: int, spy: str, folder: Path) -> tuple[int, list[Share]]:
    """Sample the daemon from its first commit of a backlog to its last."""
    raw = folder / "stacks"
    async with broker(folder) as server:
        fill(server.url, "WK_IN", Material(runs), 0, events)
        async with daemon(server.url, folder) as child:
            await child.ask("wait", sequence=1, seconds=_WAIT)
            command = [spy, "record", "--rate", str(_HERTZ), "--duration", "3600", "--format", "raw",
                       "--nonblocking", "--output", str(raw), "--pid", str(child.pid)]  # fmt: skip
            watcher = await asyncio.create_subprocess_exec(
                *command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            await child.ask("wait", sequence=events, seconds=_WAIT)
            if watcher.returncode is None:
                watcher.send_signal(signal.SIGINT)
            _, said = await watcher.communicate()
            if not raw.exists():
                raise RuntimeError(f"py-spy: {said.decode(errors='replace').strip()}")
    return shares(raw.read_text().splitlines())


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.profiled")
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--most", type=int, default=10)
    given = parser.parse_args(arguments)
    beside = Path(sys.executable).with_name("py-spy")
    spy = str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")
    if spy is None:
        print("py-spy is not installed: pip install py-spy", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="wk-profile-") as folder:
        total, found = asyncio.run(profiled(given.events, given.runs, spy, Path(folder)))
    print(table(total, found, given.most))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
