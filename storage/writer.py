"""The one task that writes: it takes queued work, commits many pieces in one transaction, answers each.

Whoever hands work over may be cancelled; the work then still commits or not, as a whole. The writer itself is
never cancelled in the middle of a commit. No transaction outlives its hop on the connection's thread.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import TaskStatus

from storage.connection import Connection
from storage.errors import (
    StorageBusy,
    StorageClosed,
    StorageConflict,
    StorageError,
    StorageFull,
    translate,
)
from storage.identity import Identity
from storage.segments import Compaction
from storage.transaction import Transaction

T = TypeVar("T")

GROUP_UNITS: Final = 256
GROUP_WEIGHT: Final = 8 * 1024 * 1024
"""Bytes of payload after which a group is closed; one unit may be larger by itself."""
CHECKPOINT_WEIGHT: Final = 4 * 1024 * 1024
"""Bytes of payload after which the log is copied into the database file, between two commits."""
BEAT_SECONDS: Final = 5.0


class Job(Generic[T]):
    """One piece of work: a function over the transaction, and its outcome once ``done``."""

    def __init__(self, work: Callable[[Transaction], T], weight: int) -> None:
        self.work = work
        self.weight = weight
        self.done = anyio.Event()
        self.result: T | None = None
        self.error: StorageError | None = None

    async def outcome(self) -> T:
        """Wait for the commit and give what the work returned. Raises what it raised."""
        await self.done.wait()
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[return-value]  # set together with done, where there is no error


class Writer:
    """Owns the writing connection. ``run`` must be running for anything to be committed."""

    def __init__(
        self,
        connection: Connection,
        path: Path,
        identity: Identity,
        compaction: Compaction,
        beat: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._path = path
        self._identity = identity
        self._compaction = compaction
        self._beat = beat
        self._queue: deque[Job[Any]] = deque()
        self._wake = anyio.Event()
        self._stopping = False
        self._ended = anyio.Event()
        self._running = False
        self._unchecked = 0
        self._due = False
        self.full = False
        self.empty_log = False
        """Set to have the log emptied after the next commit."""

    async def submit(self, work: Callable[[Transaction], T], weight: int) -> T:
        """Hand ``work`` over and wait for its commit. ``weight``: about how many bytes it writes.

        Raises what the work raised (nothing of it is stored then), StorageClosed if it was never begun.
        """
        return await self.enqueue(work, weight).outcome()

    def enqueue(self, work: Callable[[Transaction], T], weight: int) -> Job[T]:
        """As ``submit``, without waiting: the job's ``outcome`` says what became of it."""
        if self._stopping:
            raise StorageClosed("the store is closing")
        job = Job(work, weight)
        self._queue.append(job)
        self._wake.set()
        return job

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Commit what is handed over until ``stop`` or cancellation. Runs once.

        Stopped: everything queued is committed first. Cancelled: the group under way is, the rest is answered
        StorageClosed.
        """
        self._running = True
        task_status.started()
        try:
            while self._queue or not self._stopping:
                self._beat()
                if not self._queue:
                    with anyio.move_on_after(BEAT_SECONDS):
                        await self._wake.wait()
                    self._wake = anyio.Event()
                    continue
                await anyio.lowlevel.checkpoint()
                with anyio.CancelScope(shield=True):
                    await self._group(self._take())
                    await self._maintain()
        finally:
            self._stopping = True
            for job in self._queue:
                self._answer(job, error=StorageClosed("the writer ended before this was begun"))
            self._queue.clear()
            self._ended.set()

    async def stop(self) -> None:
        """Take nothing new, wait until the queue is committed. Idempotent."""
        self._stopping = True
        self._wake.set()
        if self._running:
            await self._ended.wait()
        for job in self._queue:
            self._answer(job, error=StorageClosed("the writer never ran"))
        self._queue.clear()

    def _take(self) -> list[Job[Any]]:
        group = [self._queue.popleft()]
        weight = group[0].weight
        while self._queue and len(group) < GROUP_UNITS and weight + self._queue[0].weight <= GROUP_WEIGHT:
            group.append(self._queue.popleft())
            weight += group[-1].weight
        return group

    async def _group(self, group: Sequence[Job[Any]]) -> None:
        try:
            messages = await self._connection.run(self._commit, group)
        except StorageError as error:
            self.full = self.full or isinstance(error, StorageFull)
            for job in group:
                # One instance each: an exception raised by several tasks collects all their tracebacks.
                mine = type(error)(*error.args)
                mine.__cause__ = error
                self._answer(job, error=mine)
        except BaseException:
            for job in group:
                self._answer(job, error=StorageError("the writer failed"))
            raise
        else:
            self.full = False
            self._unchecked += sum(job.weight for job in group)
            self._due = self._compaction.committed(messages)
            for job in group:
                job.done.set()

    def _commit(self, connection: sqlite3.Connection, group: Sequence[Job[Any]]) -> int:
        """On the thread: one transaction, a savepoint per job. Returns the messages stored."""
        try:
            connection.execute("BEGIN IMMEDIATE")
            tx = Transaction(connection)
            for job in group:
                self._attempt(tx, job)
            connection.execute("COMMIT")
        finally:
            # SQLite rolls back by itself on a full disk, and only then.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        # Here and not in the task: whatever becomes of the task, memory follows the commit.
        self._identity.add(tx.keys)
        return len(tx.keys)

    def _attempt(self, tx: Transaction, job: Job[Any]) -> None:
        mark = tx.mark()
        tx.connection.execute("SAVEPOINT unit")
        try:
            job.result = job.work(tx)
        except (StorageError, sqlite3.Error, ValueError, OverflowError) as error:
            mine = _own(error, self._path)
            if mine.answer != "reject" or not tx.connection.in_transaction:
                # The disk, not this unit, is at fault: nothing of the group can be kept.
                raise mine from error
            job.error = mine
            tx.connection.execute("ROLLBACK TO unit")
            tx.rewind(mark)
        tx.connection.execute("RELEASE unit")

    async def _maintain(self) -> None:
        try:
            if self._due:
                self._due = False
                await self._connection.run(self._compaction.step)
            if self.empty_log:
                self.empty_log = False
                await self._connection.run(_empty_log)
            if self._unchecked >= CHECKPOINT_WEIGHT:
                self._unchecked = 0
                await self._connection.run(_checkpoint_log)
        except StorageFull:
            # Only put off, as below; the next commit says what the disk is like.
            self.full = True
        except StorageBusy:
            pass

    @staticmethod
    def _answer(job: Job[Any], *, error: StorageError) -> None:
        job.error = error
        job.done.set()


def _own(error: Exception, path: Path) -> StorageError:
    match error:
        case StorageError():
            return error
        case sqlite3.Error():
            return translate(error, path)
        case _:
            # A value SQLite has no form for: a lone surrogate, a number beyond 64 bits.
            return StorageConflict(f"{path}: {type(error).__name__} in a row")


def _empty_log(connection: sqlite3.Connection) -> None:
    # Readers are short; one that is not puts it off until the log is copied the next time.
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()


def _checkpoint_log(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
