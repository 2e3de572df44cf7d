"""What the figures were measured on: processors, memory, disk, versions, and how busy it was."""

from __future__ import annotations

import os
import platform
import sqlite3
import statistics
import subprocess
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from support.nats_server import default_binary

_PACKAGES = ("nats-py", "aiosqlite", "msgspec", "anyio", "google-re2", "prometheus-client")
_ROOT = Path(__file__).resolve().parent.parent.parent
_WRITES = 40


def described(scratch: Path | None = None) -> dict[str, Any]:
    """One machine at one moment; ``scratch``: where it is measured."""
    return {
        "processor": _processor(),
        "processors": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "disk": _disk(scratch or Path(tempfile.gettempdir())),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "nats-server": _said(str(default_binary()), "--version"),
        "packages": {name: metadata.version(name) for name in _PACKAGES},
        "commit": commit(),
        "load": load(),
    }


def commit() -> str:
    """What is checked out, ``-dirty`` where it was changed since."""
    return _said("git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12")


def load() -> float:
    """Of the last minute."""
    return round(os.getloadavg()[0], 2)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _disk(folder: Path) -> str:
    """The file system, and what a small write takes there until the disk has it."""
    kind = _said("stat", "-f", "-c", "%T", str(folder))
    took = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(_WRITES):
            file.write(bytes(4096))
            file.flush()
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - began)
    return f"{kind}, {statistics.median(took) * 1e3:.2f} ms until 4 KiB are on it"


def _said(*command: str) -> str:
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return "unknown"
    return told or "unknown"
