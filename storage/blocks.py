"""Many rows in one statement.

Whenever SQLite has been stepped, the thread waits to get the interpreter back from the loop, which takes far longer
than a row does while the loop has work. So what is written row by row costs the loop's pace, not the disk's.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, Final

_ROWS: Final = (512, 64, 8, 1)
"""Rows of one statement: SQLite takes 32,766 values."""

Blocks = tuple[tuple[int, str], ...]


def blocks(statement: str, columns: int) -> Blocks:
    """The statement for many rows and for few: how many values each takes, and its text. ``{}`` stands for the
    rows."""
    row = f"({', '.join('?' * columns)})"
    return tuple((rows * columns, statement.format(", ".join([row] * rows))) for rows in _ROWS)


def write_blocks(connection: sqlite3.Connection, statements: Blocks, values: Sequence[Any]) -> None:
    """Write the rows whose values these are, one behind the other, in their order."""
    at = 0
    for size, statement in statements:
        while at + size <= len(values):
            connection.execute(statement, values[at : at + size])
            at += size
