"""Whether a file that a command was given can be read or written, before any work is done for it.

It looks and changes nothing: what was free a moment ago may be taken when it is used.
"""

from __future__ import annotations

import os
from pathlib import Path


def unreadable(file: Path) -> str:
    """Why this user cannot read ``file``, in a few words; empty if it can be read."""
    if os.path.isdir(file):
        return "is a folder"
    return _closed(file, os.R_OK, "read") if os.path.exists(file) else _absent(file)


def unwritable(file: Path) -> str:
    """Why this user cannot write ``file``, in a few words; empty if it can, whether it exists or not."""
    if os.path.isdir(file):
        return "is a folder"
    if os.path.exists(file):
        return _closed(file, os.W_OK, "write")
    if not os.path.isdir(file.parent):
        return _absent(file.parent, "there is no such folder")
    return _closed(file.parent, os.W_OK | os.X_OK, "write to that folder")


def _closed(path: Path, mode: int, what: str) -> str:
    return "" if os.access(path, mode) else f"Permission denied: user {os.getuid()} may not {what}"


def _absent(path: Path, missing: str = "no such file") -> str:
    """A path that is not seen is absent, or lies in a folder this user may not look into."""
    for folder in reversed(path.absolute().parents):
        if not os.path.isdir(folder):
            break
        if not os.access(folder, os.X_OK):
            return f"Permission denied: user {os.getuid()} may not look into {folder}"
    return missing
