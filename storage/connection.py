"""The only place that opens the database driver.

Every use of a connection is one whole function on the connection's own thread. A multi-statement
transaction awaited statement by statement stays open when its awaiting task is cancelled, and blocks every
other writer; a function on the thread begins and ends its transaction whatever happens to who awaits it, and
costs one hop instead of four. The driver's public calls offer no such thing, hence its ``_execute`` and ``_tx``.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar, cast

import aiosqlite
import anyio
import anyio.to_thread

from storage.data_dir import require_file
from storage.errors import StorageClosed, StorageCorrupt, StorageError, translate
from storage.schema import PAGE_BYTES

P = ParamSpec("P")
T = TypeVar("T")

JOURNAL_LIMIT_BYTES = 64 * 1024 * 1024
BACKSTOP_BYTES = 32 * 1024 * 1024
"""The writer checkpoints by itself between commits, long before so much lies in the log."""


class Connection:
    """A database connection with a thread of its own. Made by ``open_writer`` and ``open_reader``."""

    def __init__(self, raw: aiosqlite.Connection, path: Path) -> None:
        self._raw = raw
        self._path = path
        self._closed = False
        self.damaged = False
        """Whether damage was met."""

    async def run(
        self, work: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run ``work(connection, …)`` on the thread and return its result.

        Work already handed over runs to its end even if the caller is cancelled. Raises StorageError for
        every error of the driver, StorageClosed after ``close``.
        """

        if self._closed:
            raise StorageClosed(f"{self._path} is closed")

        def hop() -> T:
            # Only this name reaches the driver's debug log, never a row.
            return work(self._raw._conn, *args, **kwargs)

        try:
            return cast(T, await self._raw._execute(hop))  # type: ignore[no-untyped-call]
        except StorageCorrupt:
            self.damaged = True
            raise
        except sqlite3.Error as error:
            told = translate(error, self._path)
            self.damaged = self.damaged or isinstance(told, StorageCorrupt)
            raise told from error

    def interrupt(self) -> None:
        """Have the statement under way end at once, with an error of the driver; from any thread."""
        self._raw._conn.interrupt()

    def post(
        self,
        work: Callable[[sqlite3.Connection], T],
        then: Callable[[T | None, BaseException | None], None],
    ) -> None:
        """Run ``work(connection)`` on the thread, then ``then(result, error)`` on the loop that called this.

        For what nobody awaits: it saves the two turns of the loop that awaiting takes. The error is a StorageError
        for every error of the driver. Raises StorageClosed after ``close``.
        """
        if self._closed:
            raise StorageClosed(f"{self._path} is closed")
        loop = asyncio.get_running_loop()

        def hop() -> None:
            try:
                result = work(self._raw._conn)
            except sqlite3.Error as error:
                told = translate(error, self._path)
                told.__cause__ = error
                self.damaged = self.damaged or isinstance(told, StorageCorrupt)
                loop.call_soon_threadsafe(then, None, told)
            except BaseException as error:
                self.damaged = self.damaged or isinstance(error, StorageCorrupt)
                loop.call_soon_threadsafe(then, None, error)
                # The driver's thread notes it and lives on.
                raise
            else:
                loop.call_soon_threadsafe(then, result, None)

        self._raw._tx.put_nowait((None, hop))

    async def close(self) -> None:
        """Close after the work handed over so far; never left half way by a cancellation. Idempotent."""
        self._closed = True
        with anyio.CancelScope(shield=True):
            try:
                await self._raw.close()
            except sqlite3.Error as error:
                raise translate(error, self._path) from error


async def open_writer(path: Path, *, max_bytes: int | None, busy_timeout_ms: int) -> Connection:
    """The one connection that writes and checkpoints: SQLite before 3.51.3 may damage the file when two do.

    A new file gets pages of ``schema.PAGE_BYTES``, an older one keeps its own. ``max_bytes`` bounds the file.
    Raises StorageError.
    """
    connection = await _connect(path, "rw")
    try:
        await connection.run(_set_up_writer, max_bytes, busy_timeout_ms)
    except BaseException:
        await connection.close()
        raise
    return connection


async def open_reader(path: Path, *, busy_timeout_ms: int) -> Connection:
    """A read-only connection to a database that a writer has set up. Raises StorageError."""
    await anyio.to_thread.run_sync(require_file, path)
    connection = await _connect(path, "ro")
    try:
        await connection.run(_set_up_reader, busy_timeout_ms)
    except BaseException:
        await connection.close()
        raise
    return connection


async def _connect(path: Path, mode: str) -> Connection:
    # A cancelled connect leaks the driver's thread, which then keeps the process from exiting.
    with anyio.CancelScope(shield=True):
        raw = aiosqlite.connect(_uri(path, mode), uri=True, isolation_level=None, cached_statements=256)
        try:
            await raw
        except sqlite3.Error as error:
            # Told to end, its thread answers this loop once more: it must not find the loop closed.
            await anyio.to_thread.run_sync(raw._thread.join)
            raise translate(error, path) from error
    return Connection(raw, path)


def _set_up_writer(connection: sqlite3.Connection, max_bytes: int | None, busy_timeout_ms: int) -> None:
    _set_up_any(connection, busy_timeout_ms)
    # Before the log mode, which writes a new file's first page.
    connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
    (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
    if mode != "wal":
        raise StorageError(f"the file system of the data directory has no write-ahead log (mode {mode})")
    # An acknowledged commit survives a power cut; the stream would not deliver it again by itself.
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute(f"PRAGMA journal_size_limit={JOURNAL_LIMIT_BYTES}")
    (page,) = connection.execute("PRAGMA page_size").fetchone()
    connection.execute(f"PRAGMA wal_autocheckpoint={BACKSTOP_BYTES // page}")
    connection.execute("PRAGMA cache_size=-16384")
    # With FAST a freed page keeps what stood on it until it is used again: what left in messages, above all.
    connection.execute("PRAGMA secure_delete=ON")
    if max_bytes is not None:
        connection.execute(f"PRAGMA max_page_count={max_bytes // page}")


def _set_up_reader(connection: sqlite3.Connection, busy_timeout_ms: int) -> None:
    _set_up_any(connection, busy_timeout_ms)
    connection.execute("PRAGMA query_only=ON")


def _set_up_any(connection: sqlite3.Connection, busy_timeout_ms: int) -> None:
    connection.execute(f"PRAGMA busy_timeout={busy_timeout_ms}")
    # Without it INSERT OR REPLACE walks past the triggers that keep the journal append-only.
    connection.execute("PRAGMA recursive_triggers=ON")
    connection.execute("PRAGMA temp_store=MEMORY")


def _uri(path: Path, mode: str) -> str:
    return f"{path.absolute().as_uri()}?mode={mode}"
