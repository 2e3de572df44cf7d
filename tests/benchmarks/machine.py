"""What the figures were measured on: processors, memory, versions, and how busy it was."""

from __future__ import annotations

import os
import platform
import sqlite3
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from support.nats_server import default_binary

_PACKAGES = ("nats-py", "aiosqlite", "msgspec", "anyio")
_ROOT = Path(__file__).resolve().parent.parent.parent


def described() -> dict[str, Any]:
    """One machine at one moment."""
    return {
        "processor": _processor(),
        "processors": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "nats-server": _said(str(default_binary()), "--version"),
        "packages": {name: metadata.version(name) for name in _PACKAGES},
        "commit": _said("git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12"),
        "load": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _said(*command: str) -> str:
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return "unknown"
    return told or "unknown"
