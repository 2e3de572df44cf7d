"""A disk that is many times slower, for one process: a library that is preloaded into it. Nothing is simulated
but the time that writes and waits for the disk take.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

TIMES = 10
_SOURCE = Path(__file__).with_suffix(".c")


def slow_disk(folder: Path, *, sync_ms: float = 2.0) -> dict[str, str] | None:
    """Variables under which a process has a disk ten times slower, each wait for it at least ``sync_ms``; None
    where nothing can be compiled. The library is made in ``folder``."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "slow_disk.so"
    made = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(_SOURCE), "-ldl"],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        return None
    return {"LD_PRELOAD": str(library), "WK_SLOW_TIMES": str(TIMES), "WK_SLOW_SYNC_MS": str(sync_ms)}
