"""A copy of the database in one file, taken beside whoever writes, and put back where there is none.

A copy is one read transaction: it holds exactly what was committed at one moment. It holds what was forgotten
since as well; keep copies no longer than what they hold may be kept.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import anyio.to_thread

from storage import schema
from storage.connection import Connection, open_reader
from storage.data_dir import DATABASE, DataDir, sync_folder
from storage.errors import (
    AlreadyThere,
    DamagedCopy,
    NotOurs,
    StorageCorrupt,
    StorageError,
    StorageIo,
    translate,
)


def copy(connection: sqlite3.Connection, target: Path) -> int:
    """Copy the database of ``connection`` into the new file ``target`` (0600); its size in bytes.

    The file appears whole or not at all. Raises AlreadyThere if it exists, StorageFull or StorageIo if the
    disk refuses, the driver's error if the database cannot be read.
    """
    part = target.with_name(f"{target.name}.part")
    try:
        if target.exists():
            raise AlreadyThere(f"{target} exists and is not overwritten")
        os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
        try:
            out = sqlite3.connect(part, isolation_level=None)
            try:
                connection.backup(out)
                # One file, nothing beside it: the log mode of the original needs more.
                out.execute("PRAGMA journal_mode=DELETE")
            finally:
                out.close()
            handle = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
            # Not a rename, which would overwrite what came meanwhile.
            os.link(part, target)
        finally:
            part.unlink(missing_ok=True)
        sync_folder(target.parent)
        return target.stat().st_size
    except FileExistsError:
        raise AlreadyThere(f"{target} exists and is not overwritten") from None
    except OSError as error:
        refused = translate(error, target)
        if isinstance(refused, StorageIo):
            # An original that cannot be read is an error of the driver: here it is the file to be written.
            refused.hint = "name a file in a folder that exists and that this user may write to"
        raise refused from error


async def restore(source: Path, data_dir: Path) -> int:
    """Make ``source``, a copy, the database of a data directory that has none; its schema version.

    Raises AlreadyThere if there is a database already, AlreadyOpen, StorageIo if there is no copy,
    StorageCorrupt, NotOurs, SchemaTooNew; nothing of the directory is changed then.
    """
    reader = await _opened(source)
    try:
        try:
            found = await reader.run(_check, source)
        except StorageCorrupt as error:
            raise DamagedCopy(*error.args) from error
        except (NotOurs, StorageIo) as error:
            error.hint = DamagedCopy.hint
            raise
        held = await anyio.to_thread.run_sync(DataDir.take, data_dir)
        try:
            if held.size_bytes():
                raise AlreadyThere(f"{held.database} holds a database and is not overwritten")
            # The lock's holder has just made it, empty.
            held.database.unlink()
            await reader.run(copy, data_dir / DATABASE)
        finally:
            held.release()
    finally:
        await reader.close()
    return found


async def _opened(source: Path) -> Connection:
    try:
        return await open_reader(source, busy_timeout_ms=5000)
    except StorageCorrupt as error:
        raise DamagedCopy(*error.args) from error
    except StorageError as error:
        error.hint = DamagedCopy.hint
        raise


def _check(connection: sqlite3.Connection, path: Path) -> int:
    found = schema.version(connection, path)
    (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if verdict != "ok":
        raise StorageCorrupt(f"{path}: {verdict}")
    return found
