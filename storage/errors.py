"""The errors of storage: each says what to do now. Driver errors end here and never leave the package.

``answer``: ``retry`` the same call may succeed later; ``reject`` this unit can never be committed as it is;
``stop`` this process cannot go on with this store; ``page`` a person has to act, afterwards it may succeed.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path
from typing import ClassVar, Literal

Answer = Literal["retry", "reject", "stop", "page"]

SCARCE_BYTES = 256 * 1024
"""Below this much free space an I/O error of SQLite is told as a full disk: growing the shared-memory file
or the log fails with several other codes then."""


class StorageError(Exception):
    """What went wrong with the store, ``answer`` (see the module) and a ``hint`` for the operator."""

    answer: ClassVar[Answer] = "stop"
    hint: ClassVar[str] = "see the log of this process; the streams hold what the store lacks"

    def __str__(self) -> str:
        return f"{super().__str__()} ({self.hint})"


class Stale(StorageError):
    """The world moved on: the parent is not the newest checkpoint, or the attempt is not open."""

    answer = "reject"
    hint = "read the newest checkpoint and decide again"


class OutOfOrder(StorageError):
    """A journal entry does not follow the run's newest entry."""

    answer = "reject"
    hint = "discard the folded copy and read the run again"


class StorageConflict(StorageError):
    """A row breaks a constraint of the schema (an id twice, a value out of bounds)."""

    answer = "reject"
    hint = "the unit was not committed; nothing else was touched"


class AlreadyThere(StorageConflict):
    """A file that would have to be overwritten."""

    hint = "name another file, or an empty data directory; nothing was changed"


class StorageBusy(StorageError):
    """Another process held the write lock longer than the time-out."""

    answer = "retry"
    hint = "no other program should write to the data directory; nothing was committed"


class StorageFull(StorageError):
    """No space left. Nothing was committed and nothing deleted; reads go on."""

    answer = "page"
    hint = "give the data directory more space (deleting rows cannot help); work goes on by itself then"


class StorageCorrupt(StorageError):
    """The database file is damaged."""

    answer = "stop"
    hint = "move the file aside and rebuild from the streams"


class StorageIo(StorageError):
    """The disk or its permissions refuse."""

    answer = "page"
    hint = "check disk, mount and permissions of the data directory"


class NotOurs(StorageError):
    """The file is a database of another program."""

    hint = "choose another data directory"


class SchemaTooNew(StorageError):
    """A newer version of this program wrote the file."""

    hint = "run the newer version, or choose an empty data directory: the streams fill it"


class AlreadyOpen(StorageError):
    """Another process has the data directory."""

    hint = "one process owns a data directory; give each its own"


class StorageClosed(StorageError):
    """The store was closed before the work was begun; nothing of it was committed."""

    hint = "the process is stopping"


_BY_NAME: dict[str, type[StorageError]] = {
    "SQLITE_FULL": StorageFull,
    "SQLITE_CORRUPT": StorageCorrupt,
    "SQLITE_NOTADB": StorageCorrupt,
    "SQLITE_BUSY": StorageBusy,
    "SQLITE_LOCKED": StorageBusy,
    "SQLITE_CONSTRAINT": StorageConflict,
    "SQLITE_TOOBIG": StorageConflict,
    "SQLITE_MISMATCH": StorageConflict,
    "SQLITE_IOERR": StorageIo,
    "SQLITE_CANTOPEN": StorageIo,
    "SQLITE_READONLY": StorageIo,
    "SQLITE_PERM": StorageIo,
    "SQLITE_AUTH": StorageIo,
}
_FULL_IN_DISGUISE = ("SQLITE_IOERR", "SQLITE_CANTOPEN")


def translate(error: sqlite3.Error | OSError, path: Path) -> StorageError:
    """The error of ours for a driver's or the system's; ``path`` is the database file it speaks of.

    Never raises. The text names the code and the file, never a value of a row.
    """
    if isinstance(error, OSError):
        kind: type[StorageError] = StorageFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageIo
        return kind(f"{path}: {error.strerror or type(error).__name__}")
    name: str | None = getattr(error, "sqlite_errorname", None)
    if name is None:
        # Raised by the driver before SQLite saw the statement: a value it cannot bind, a wrong count.
        return StorageConflict(f"{path}: {error}")
    for prefix, named in _BY_NAME.items():
        if name == prefix or name.startswith(f"{prefix}_"):
            disguised = prefix in _FULL_IN_DISGUISE and _no_space(path.parent)
            return (StorageFull if disguised else named)(f"{path}: {error} [{name}]")
    return StorageError(f"{path}: {error} [{name}]")


def _no_space(folder: Path) -> bool:
    try:
        room = os.statvfs(folder)
    except OSError:
        return False
    return room.f_bavail * room.f_frsize < SCARCE_BYTES
