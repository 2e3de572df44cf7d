"""The schema's version: whose file it is, whether it is whole, and bringing it up to date.

Migrations are ordered SQL files; each runs in one transaction with the version it reaches. They are never
changed once released.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct

from storage.errors import NotOurs, SchemaTooNew, StorageCorrupt

APPLICATION_ID: Final = 0x57_4B_50_52  # "WKPR"
CHECKED_BYTES: Final = 1024 * 1024 * 1024
CHECKED_FIRST_BYTES: Final = 32 * 1024 * 1024
"""A file up to this size is read through before it is used, in about 50 ms."""
PAGE_BYTES: Final = 8192
"""Of a new database. Bodies of about 1 KiB leave a quarter of a page of 4 KiB empty, an eighth of one of 8 KiB; 16 KiB
would save 5 % more of the disk, but single commits write whole pages to the log. A database keeps the size it was
made with."""


class Migration(Struct, frozen=True):
    version: int
    name: str
    sql: str


def migrations() -> tuple[Migration, ...]:
    """The migrations this program knows, by version: 1, 2, 3 … without holes."""
    found = []
    for file in resources.files("storage").joinpath("migrations").iterdir():
        if file.name.endswith(".sql"):
            number, _, name = file.name.removesuffix(".sql").partition("_")
            found.append(Migration(int(number), name, file.read_text(encoding="utf-8")))
    return tuple(sorted(found, key=lambda migration: migration.version))


def check(connection: sqlite3.Connection, path: Path, left_whole: bool) -> Literal["ok", "later", "skipped"]:
    """Look for damage, which takes 2 s a GiB and more where the file has to come from the disk first.

    Files over 1 GiB are skipped. ``later``: the one who wrote this one last closed it (``left_whole``), so that
    whoever opens it need not wait; ``read_through`` is to follow. Raises StorageCorrupt.
    """
    size = path.stat().st_size
    if size > CHECKED_BYTES:
        return "skipped"
    if left_whole and size > CHECKED_FIRST_BYTES:
        return "later"
    read_through(connection, path)
    return "ok"


def read_through(connection: sqlite3.Connection, path: Path) -> None:
    """Raises StorageCorrupt. A page lost from the log is not seen here: the hash chain shows it."""
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise StorageCorrupt(f"{path}: {verdict}")


def migrate(connection: sqlite3.Connection, path: Path, known: Sequence[Migration]) -> tuple[int, int]:
    """Bring the file to the newest of ``known``; returns the versions before and after. Idempotent.

    Raises SchemaTooNew, NotOurs, or the driver's error; the version reached so far stands then.
    """
    (owner,) = connection.execute("PRAGMA application_id").fetchone()
    (before,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if owner != APPLICATION_ID and (owner or before or tables):
        raise NotOurs(f"{path} is a database of another program (application id {owner})")
    newest = known[-1].version if known else 0
    if before > newest:
        raise SchemaTooNew(f"{path} has schema {before}, this version knows up to {newest}")
    for migration in known:
        if migration.version > before:
            _apply(connection, migration)
    return before, newest


def version(connection: sqlite3.Connection, path: Path) -> int:
    """The schema version of a file that is only read. Raises NotOurs, SchemaTooNew."""
    (owner,) = connection.execute("PRAGMA application_id").fetchone()
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if owner != APPLICATION_ID:
        raise NotOurs(f"{path} is no database of this program (application id {owner})")
    newest = migrations()[-1].version
    if found > newest:
        raise SchemaTooNew(f"{path} has schema {found}, this version knows up to {newest}")
    return int(found)


def _apply(connection: sqlite3.Connection, migration: Migration) -> None:
    try:
        connection.executescript(
            f"BEGIN IMMEDIATE;\n{migration.sql}\n"
            f"PRAGMA application_id={APPLICATION_ID};\nPRAGMA user_version={migration.version};\nCOMMIT;"
        )
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
