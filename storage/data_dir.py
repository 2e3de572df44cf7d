"""The data directory on disk: its mode, the lock held for life, the database file's names.

Opens no database. Everything here blocks for the time of a few system calls; call it off the event loop.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from storage.errors import AlreadyOpen, NotThere, translate

DATABASE = "watchkeeper.db"
LOCK = "lock"
_SIDE_FILES = ("-wal", "-shm")
_LEFT_WHOLE = b"closed\n"


class DataDir:
    """A data directory this process holds until ``release``."""

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder = folder
        self.database = folder / DATABASE
        self._lock: int | None = lock
        self.limit: int | None = None
        """Bytes the database may have at most; None: as many as there is room for."""
        self.left_whole = False
        """Whether its last holder closed the database, having met no damage."""

    @classmethod
    def take(cls, folder: Path) -> DataDir:
        """Create the directory (0700) and an empty database file (0600) where absent, and lock it.

        Raises AlreadyOpen if another holder has it, StorageFull or StorageIo if the disk refuses.
        """
        database = folder / DATABASE
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                left_whole = _lock(folder, lock)
                # SQLite gives -wal and -shm the mode of the database file, so it must exist with ours first.
                os.close(os.open(database, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
                if database.stat().st_mode & 0o077:
                    database.chmod(0o600)
            except BaseException:
                os.close(lock)
                raise
        except OSError as error:
            raise translate(error, database) from error
        held = cls(folder, lock)
        held.left_whole = left_whole and not any(_size(path) for path in _beside(database))
        return held

    def leave_whole(self) -> None:
        """Tell the next holder that the database is closed; ``release`` is to follow."""
        assert self._lock is not None
        _write(self._lock, _LEFT_WHOLE)

    def release(self) -> None:
        """Give the lock back. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def size_bytes(self) -> int:
        """Bytes of the database and its side files; 0 for what is absent."""
        return sum(_size(path) for path in (self.database, *_beside(self.database)))

    def free_bytes(self) -> int:
        """Bytes by which the database may still grow: free on its file system, or left of ``limit``; 0 where
        that cannot be told."""
        try:
            found = os.statvfs(self.database.parent)
        except OSError:
            return 0
        free = found.f_bavail * found.f_frsize
        return free if self.limit is None else max(0, min(free, self.limit - _size(self.database)))


def require_file(path: Path) -> None:
    """Raise NotThere if ``path`` is no file, NotPermitted if this user may not even look."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise NotThere(f"{path}: there is no such database") from None
    except OSError as error:
        raise translate(error, path) from error
    if not stat.S_ISREG(mode):
        raise NotThere(f"{path}: is no file")


def set_aside(folder: Path) -> Path:
    """Move a damaged database and its side files out of the way, keeping them; the new name is returned.

    Idempotent in effect: the next open starts empty. Raises AlreadyOpen if the directory is held, StorageIo
    if the disk refuses.
    """
    held = DataDir.take(folder)
    try:
        number = 1
        while (target := folder / f"{DATABASE}.damaged-{number}").exists():
            number += 1
        try:
            # Side files first: a log left beside a new database would be replayed into it.
            for path in _beside(held.database):
                with contextlib.suppress(FileNotFoundError):
                    path.rename(target.with_name(target.name + path.name.removeprefix(DATABASE)))
            held.database.rename(target)
            sync_folder(folder)
        except OSError as error:
            raise translate(error, held.database) from error
    finally:
        held.release()
    return target


def _lock(folder: Path, lock: int) -> bool:
    """Take the lock; whether the last holder left the database whole."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip()
        by = f" by process {holder}" if holder else ""
        raise AlreadyOpen(f"data directory {folder} is in use{by}") from None
    left_whole = os.pread(lock, 20, 0) == _LEFT_WHOLE
    _write(lock, f"{os.getpid()}\n".encode("ascii"))
    return left_whole


def _write(lock: int, text: bytes) -> None:
    # The number is for people; on a full disk the lock holds without it.
    with contextlib.suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, text, 0)


def _beside(database: Path) -> Iterator[Path]:
    return (database.with_name(database.name + suffix) for suffix in _SIDE_FILES)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def sync_folder(folder: Path) -> None:
    """Make new and renamed files of a folder survive a power cut. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
