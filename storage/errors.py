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
    hint: str = "see the log of this process; the streams hold what the store lacks"

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


class DamagedCopy(StorageCorrupt):
    """The file to restore from is no whole copy of a database."""

    hint = "give a file that backup wrote; nothing was changed"


class StorageIo(StorageError):
    """The disk or its permissions refuse."""

    answer = "page"
    hint = "check disk, mount and permissions of the data directory"


class NotThere(StorageIo):
    """A file or folder that should exist does not."""

    hint = "check the path; the data directory is --data-dir, or data_dir of the configuration"


class NotPermitted(StorageIo):
    """The system forbids this user a file or folder."""

    hint = "run it as the user the data directory belongs to, or change whose it is"


class NotOurs(StorageError):
    """The file is a database of another program."""

    hint = "choose another data directory"


class SchemaTooNew(StorageError):
    """A newer version of this program wrote the file."""

    hint = "run the newer version, or choose an empty data directory: the streams fill it"


class AlreadyOpen(StorageError):
    """Another process has the data directory."""

    hint = "stop that process first; two daemons beside each other need a data directory each"


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
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_BY_NUMBER: dict[int, type[StorageError]] = {
    errno.ENOSPC: StorageFull,
    errno.EDQUOT: StorageFull,
    errno.ENOENT: NotThere,
    errno.ENOTDIR: NotThere,
    errno.EISDIR: NotThere,
}
_FULL_IN_DISGUISE = ("SQLITE_IOERR", "SQLITE_CANTOPEN")


def translate(error: sqlite3.Error | OSError, path: Path) -> StorageError:
    """The error of ours for a driver's or the system's; ``path`` is the database file it speaks of.

    Never raises. The text names the code and the file, never a value of a row.
    """
    if isinstance(error, OSError):
        if error.errno in _FORBIDDEN:
            # The folder above may be what forbids it: the system names the one it stopped at.
            at = error.filename if isinstance(error.filename, str | os.PathLike) else path
            return not_permitted(Path(at), error)
        kind: type[StorageError] = _BY_NUMBER.get(error.errno or 0, StorageIo)
        return kind(f"{path}: {error.strerror or type(error).__name__}")
    name: str | None = getattr(error, "sqlite_errorname", None)
    if name is None:
        # Raised by the driver before SQLite saw the statement: a value it cannot bind, a wrong count.
        return StorageConflict(f"{path}: {error}")
    for prefix, named in _BY_NAME.items():
        if name == prefix or name.startswith(f"{prefix}_"):
            if prefix in _FULL_IN_DISGUISE and _no_space(path.parent):
                named = StorageFull
            elif issubclass(named, StorageIo) and (refused := _forbidden(path)):
                return NotPermitted(f"{refused} [{name}]")
            return named(f"{path}: {error} [{name}]")
    return StorageError(f"{path}: {error} [{name}]")


def not_permitted(path: Path, error: OSError) -> NotPermitted:
    """The error for a file or folder that the system forbids: names path, what it says, and whom it forbids."""
    return NotPermitted(f"{path}: {error.strerror or 'Permission denied'} for user {os.getuid()}")


def _forbidden(path: Path) -> str:
    """What this user may not do with a database that exists, or an empty text."""
    user = os.getuid()
    if not os.path.exists(path):
        return ""
    if not os.access(path, os.R_OK):
        return f"{path}: Permission denied for user {user}"
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"{path.parent}: user {user} may not write there, which reading the database beside its owner needs"
    if not os.access(path, os.W_OK):
        return f"{path}: user {user} may not write it"
    return ""


def _no_space(folder: Path) -> bool:
    try:
        room = os.statvfs(folder)
    except OSError:
        return False
    return room.f_bavail * room.f_frsize < SCARCE_BYTES
