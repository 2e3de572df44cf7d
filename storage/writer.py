"""The one that writes: it takes queued work, commits many pieces in one transaction, answers each.

What is handed over while nothing is on its way goes to the connection's thread at once, from the caller's own
turn; what comes meanwhile is the next group. No task stands between: each would cost a turn of the loop there
and one back, longer than SQLite takes. Whoever hands work over may be cancelled; the work then still commits or
not, as a whole. No transaction outlives its hop on the thread.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import anyio
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
from storage.transaction import Places, Transaction

T = TypeVar("T")

GROUP_UNITS: Final = 256
GROUP_WEIGHT: Final = 8 * 1024 * 1024
"""Bytes of payload after which a group is closed; one unit may be larger by itself."""
CHECKPOINT_WEIGHT: Final = 4 * 1024 * 1024
"""Bytes written after which the log is copied into the database file, between two commits. The log is begun
anew then: a file that is written over needs no change of its size on disk, which takes as long as the rest."""
COMMIT_WEIGHT: Final = 8 * 1024
"""What a commit writes beside what is in it: the log holds whole pages. Less than it is, so that the copying, which
the next commit waits for, stays seldom."""
BEAT_SECONDS: Final = 5.0


class Job(Generic[T]):
    """One piece of work: a function over the transaction, and its outcome once ``done``."""

    __slots__ = ("done", "error", "result", "weight", "work")

    def __init__(self, work: Callable[[Transaction], T], weight: int) -> None:
        self.work = work
        self.weight = weight
        self.done = asyncio.Event()
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
        self._stopping = False
        self._ended = anyio.Event()
        self._begun = False
        """``run`` was called; until ``_ended`` there may be something on the thread, whatever else."""
        self._running = False
        self._busy = False
        """Something is on the connection's thread; its end begins the next."""
        self._rested = asyncio.Event()
        """Nothing is on the thread, and whoever waits for that is to look."""
        self._failed: BaseException | None = None
        self._places: Places | None = None
        """What the newest transaction knew, as long as it was committed. The thread's."""
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
        """As ``submit``, without waiting: the job's ``outcome`` says what became of it.

        It is on its way when this returns, or queued behind what is: the next group is all that has come meanwhile.
        """
        if self._stopping:
            raise StorageClosed("the store is closing")
        job = Job(work, weight)
        self._queue.append(job)
        if self._running and not self._busy:
            self._begin()
        return job

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Have what is handed over committed until ``stop`` or cancellation. Runs once.

        Stopped: everything queued is committed first. Cancelled: the group under way is, the rest is answered
        StorageClosed.
        """
        self._begun = self._running = True
        task_status.started()
        try:
            if self._queue:
                self._begin()
            while self._failed is None and (self._busy or self._queue or not self._stopping):
                if not self._busy:
                    self._beat()
                self._rested.clear()
                with anyio.move_on_after(BEAT_SECONDS):
                    await self._rested.wait()
        finally:
            self._running, self._stopping = False, True
            with anyio.CancelScope(shield=True):
                while self._busy:
                    self._rested.clear()
                    await self._rested.wait()
            for job in self._queue:
                self._answer(job, error=StorageClosed("the writer ended before this was begun"))
            self._queue.clear()
            self._ended.set()
        if self._failed is not None:
            raise self._failed

    async def stop(self) -> None:
        """Take nothing new, wait until the queue is committed. Idempotent."""
        self._stopping = True
        self._rested.set()
        if self._begun:
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

    def _begin(self) -> None:
        """The next group goes to the thread; from there ``_landed`` takes over, on the loop again."""
        group = self._take()
        self._busy = True
        self._connection.post(partial(self._commit, group=group), partial(self._landed, group))

    def _go_on(self) -> None:
        """The thread has nothing to do: what the log and the identities are due, then the next group."""
        self._busy = False
        if self._running and (upkeep := self._upkeep()) is not None:
            self._busy = True
            self._connection.post(upkeep, self._kept)
        elif self._queue and self._running:
            self._begin()
        elif self._stopping:
            self._rested.set()

    def _landed(self, group: Sequence[Job[Any]], messages: int | None, error: BaseException | None) -> None:
        self._beat()
        if messages is not None:
            self.full = False
            self._unchecked += sum((job.weight for job in group), COMMIT_WEIGHT)
            self._due = self._compaction.committed(messages)
            for job in group:
                job.done.set()
        elif isinstance(error, StorageError):
            self.full = self.full or isinstance(error, StorageFull)
            for job in group:
                # One instance each: an exception raised by several tasks collects all their tracebacks.
                mine = type(error)(*error.args)
                mine.__cause__ = error
                self._answer(job, error=mine)
        else:
            for job in group:
                self._answer(job, error=StorageError("the writer failed"))
            self._fail(error)
        self._go_on()

    def _kept(self, _: None, error: BaseException | None) -> None:
        if isinstance(error, StorageFull):
            # Only put off, as where it is busy; the next commit says what the disk is like.
            self.full = True
        elif error is not None and not isinstance(error, StorageBusy):
            self._fail(error)
        self._go_on()

    def _fail(self, error: BaseException | None) -> None:
        """Have ``run`` end with this."""
        self._failed, self._running = error, False
        self._rested.set()

    def _commit(self, connection: sqlite3.Connection, group: Sequence[Job[Any]]) -> int:
        """On the thread: one transaction, a savepoint per job where there are several. Returns the messages
        stored."""
        places, self._places = self._places, None
        try:
            connection.execute("BEGIN IMMEDIATE")
            tx = Transaction(connection, places)
            if len(group) == 1:
                kept = self._alone(tx, group[0])
            else:
                kept = True
                for job in group:
                    self._attempt(tx, job)
            connection.execute("COMMIT" if kept else "ROLLBACK")
        finally:
            # SQLite rolls back by itself on a full disk, and only then.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        self._places = tx.places
        # Here and not in the task: whatever becomes of the task, memory follows the commit.
        self._identity.add(tx.keys)
        return len(tx.keys)

    def _alone(self, tx: Transaction, job: Job[Any]) -> bool:
        """Do the only job of a transaction; False: it is refused, and with it all there is."""
        mark = tx.mark()
        try:
            job.result = job.work(tx)
        except (StorageError, sqlite3.Error, ValueError, OverflowError) as error:
            job.error = self._refusal(tx, error)
            tx.rewind(mark)
            return False
        return True

    def _attempt(self, tx: Transaction, job: Job[Any]) -> None:
        mark = tx.mark()
        tx.connection.execute("SAVEPOINT unit")
        try:
            job.result = job.work(tx)
        except (StorageError, sqlite3.Error, ValueError, OverflowError) as error:
            job.error = self._refusal(tx, error)
            tx.connection.execute("ROLLBACK TO unit")
            tx.rewind(mark)
        tx.connection.execute("RELEASE unit")

    def _refusal(self, tx: Transaction, error: Exception) -> StorageError:
        """What this unit alone is refused with. Raises where the disk, not the unit, is at fault: nothing of the
        group can be kept then."""
        mine = _own(error, self._path)
        if mine.answer != "reject" or not tx.connection.in_transaction:
            raise mine from error
        return mine

    def _upkeep(self) -> Callable[[sqlite3.Connection], None] | None:
        """What is due between two groups, one piece at a time."""
        if self._due:
            self._due = False
            return self._compaction.step
        if self.empty_log:
            self.empty_log = False
            return _empty_log
        if self._unchecked >= CHECKPOINT_WEIGHT:
            self._unchecked = 0
            return _checkpoint_log
        return None

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
