"""The store: the one door to everything durable. Bytes and scalars in, bytes and scalars out.

One process owns a data directory. All writing goes through one task that the caller runs (``run_writer``);
reads are short, on connections of their own, and see only what was committed. It knows no event types, no
clock, no broker.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Concatenate, Final, ParamSpec, Self, TypeVar, overload

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus

from storage import (
    audit,
    backup,
    checkpoints,
    evidence,
    journal,
    ledgers,
    outbox,
    retention,
    schema,
    search,
    segments,
    units,
)
from storage.connection import Connection, open_reader, open_writer
from storage.data_dir import DATABASE, DataDir
from storage.errors import StorageClosed, StorageCorrupt, StorageError
from storage.evidence import StoredMessage
from storage.identity import Identity, IdKey, identity_key, identity_keys
from storage.records import (
    AttemptRow,
    BrokenLink,
    Chain,
    Channel,
    CheckpointRow,
    Committed,
    Counts,
    Cursor,
    JournalEntry,
    PacketRow,
    ReceiptRow,
    RunSummary,
    SearchRow,
    StoredId,
    StoredItem,
    StoredOutbox,
    StoredRun,
    StoreInfo,
    TombstoneRow,
    Unit,
)
from storage.search import SearchFound, Wanted
from storage.transaction import lane_number
from storage.writer import Job, Writer

P = ParamSpec("P")
T = TypeVar("T")

READERS: Final = 2
_READ_THROUGH_AFTER: Final = 10.0
"""Seconds after which a file that was left whole is looked through for damage: the start has the disk first."""


class Store:
    """An open data directory. Made by ``open``; ``async with await Store.open(path) as store``.

    Every method may raise StorageError. Every read is one read transaction. Cancelling a read has no effect;
    cancelling a write leaves it to be committed as a whole, or not.
    """

    def __init__(
        self,
        held: DataDir | None,
        info: StoreInfo,
        identity: Identity,
        writer: Writer,
        readers: list[Connection],
        closing: AsyncExitStack,
        opened: list[Connection],
    ) -> None:
        self.info = info
        self._held = held
        self._identity = identity
        self._writer = writer
        self._readers = readers
        self._free = anyio.Semaphore(len(readers))
        self._closing = closing
        self._opened = opened
        """Those that are asked at the end whether they met damage."""
        self._closed = False

    @classmethod
    async def open(
        cls,
        data_dir: Path,
        *,
        max_bytes: int | None = None,
        on_beat: Callable[[], None] = lambda: None,
        busy_timeout_ms: int = 5000,
        migrations: Sequence[schema.Migration] | None = None,
        seal_keys: int = segments.SEAL_KEYS,
    ) -> Self:
        """Lock the directory, check and migrate the database, load what stays in memory.

        ``max_bytes`` bounds the database file; ``on_beat`` is called by the writer at each
        turn, at least every few seconds. The other arguments are for tests.

        Raises AlreadyOpen, StorageCorrupt (see ``set_aside``), SchemaTooNew, NotOurs, StorageFull, StorageIo;
        nothing stays open then.
        """
        async with AsyncExitStack() as stack:
            # Cancelled after the lock was taken, nobody would know to give it back.
            with anyio.CancelScope(shield=True):
                held = await anyio.to_thread.run_sync(DataDir.take, data_dir)
            stack.callback(held.release)
            path = held.database
            held.limit = max_bytes
            opened: list[Connection] = []
            stack.push(partial(_left, held, opened))
            writing = await open_writer(path, max_bytes=max_bytes, busy_timeout_ms=busy_timeout_ms)
            stack.push_async_callback(writing.close)
            info = await writing.run(_prepare, path, migrations or schema.migrations(), held.left_whole)
            identity = Identity()
            await writing.run(segments.load, identity)
            # The check and this read much that nobody asks for soon.
            await writing.run(_let_go)
            readers = []
            for _ in range(READERS):
                reader = await open_reader(path, busy_timeout_ms=busy_timeout_ms)
                stack.push_async_callback(reader.close)
                readers.append(reader)
            opened += [writing, *readers]
            compaction = segments.Compaction(identity, seal_keys=seal_keys)
            writer = Writer(writing, path, identity, compaction, on_beat)
            return cls(held, info, identity, writer, readers, stack.pop_all(), opened)
        raise AssertionError("an exit stack swallows nothing")

    @classmethod
    async def open_to_read(cls, data_dir: Path, *, busy_timeout_ms: int = 5000) -> Self:
        """Only to look, beside whoever owns the directory: no lock is taken and nothing can be committed.

        Raises StorageIo if there is no database, StorageCorrupt, NotOurs, SchemaTooNew.
        """
        path = data_dir / DATABASE
        async with AsyncExitStack() as stack:
            readers = []
            for _ in range(READERS):
                reader = await open_reader(path, busy_timeout_ms=busy_timeout_ms)
                stack.push_async_callback(reader.close)
                readers.append(reader)
            version = await readers[0].run(schema.version, path)
            info = StoreInfo(
                path=str(path),
                schema_version=version,
                migrated_from=version,
                sqlite_version=sqlite3.sqlite_version,
                quick_check="skipped",
            )
            identity = Identity()
            writer = Writer(readers[0], path, identity, segments.Compaction(identity), lambda: None)
            await writer.stop()
            return cls(None, info, identity, writer, readers, stack.pop_all(), [])
        raise AssertionError("an exit stack swallows nothing")

    async def run_writer(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """The writing task; start it in a task group.

        Ends after ``aclose`` has begun, everything queued being committed, or when cancelled: the group under
        way is committed then and the rest answered StorageClosed. A file whose check was put off is looked
        through beside it: StorageCorrupt, in a group, if it is damaged; the next opening checks it first.
        """
        if self.info.quick_check != "later":
            await self._writer.run(task_status=task_status)
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._read_through)
            await self._writer.run(task_status=task_status)
            tasks.cancel_scope.cancel()

    async def _read_through(self) -> None:
        await anyio.sleep(_READ_THROUGH_AFTER)
        path = Path(self.info.path)
        # One of its own: the others would be one short for seconds.
        reader = await open_reader(path, busy_timeout_ms=5000)
        self._opened.append(reader)
        try:
            await reader.run(schema.read_through, path)
        except StorageCorrupt:
            raise
        except StorageError:
            # What the disk refuses here it refuses the writer too, who is heard.
            pass
        finally:
            reader.interrupt()
            await reader.close()

    async def aclose(self) -> None:
        """Commit what is queued, close everything, give the lock back. Idempotent."""
        with anyio.CancelScope(shield=True):
            self._closed = True
            await self._writer.stop()
            await self._closing.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # Writing

    async def commit(self, unit: Unit) -> Committed:
        """Commit ``unit`` as a whole, durably, when this returns.

        Raises Stale, OutOfOrder, StorageConflict (this unit alone is refused), StorageFull, StorageBusy,
        StorageClosed and others (nothing of it was stored).
        """
        return await self.begin(unit).outcome()

    def begin(self, unit: Unit) -> Job[Committed]:
        """Hand ``unit`` over; its ``outcome`` is what ``commit`` returns and raises. Raises StorageClosed.

        Units are committed in the order they were handed over.
        """
        return self._writer.enqueue(partial(units.apply, unit), units.weight(unit))

    async def outbox_sent(self, ids: Sequence[int]) -> int:
        """Delete messages that left, or must not leave; the number there were. Idempotent."""
        return await self._writer.submit(partial(outbox.sent, ids=tuple(ids)), units.ROW_WEIGHT * len(ids))

    # Runs and their messages

    def maybe_known(self, tenant: str, lane: str, run: str, channel: Channel, event_id: str) -> bool:
        """False: this id was certainly never committed. True: ask ``find_ids``. Touches memory only."""
        return self._identity.maybe(identity_key(tenant, lane, run, channel, event_id))

    def keys(self, tenant: str, lane: str, names: Sequence[IdKey]) -> list[int]:
        """The key of each (run, channel, event id): for ``maybe_stored``, and for its entry when it comes."""
        return identity_keys(tenant, lane, names)

    def maybe_stored(self, key: int) -> bool:
        """What ``maybe_known`` says, by the key."""
        return self._identity.maybe(key)

    async def find_ids(self, tenant: str, lane: str, keys: Sequence[IdKey]) -> dict[IdKey, StoredId]:
        """Of (run, channel, event id) those that are committed, and where. Queued units are not seen."""
        named = [(key, identity_key(tenant, lane, *key)) for key in keys]
        wanted = [(key, number) for key, number in named if self._identity.maybe(number)]
        if not wanted:
            return {}
        return await self._own_read(_find, self._identity, tenant, lane, wanted)

    async def load_family(
        self, tenant: str, lane: str, run: str, *, live_only: bool = False
    ) -> list[StoredRun]:
        """Every run of the family of ``run`` with its items, oldest first; [] if the run is unknown."""
        return await self._read(ledgers.load_family, tenant, lane, run, live_only)

    async def runs(self, tenant: str, lane: str, *, finished: bool | None = None) -> list[RunSummary]:
        """The lane's runs without heads and items, oldest first; ``finished`` None: all."""
        return await self._read(ledgers.runs, tenant, lane, finished)

    async def each_run(
        self,
        tenant: str,
        lane: str,
        look: Callable[[RunSummary], T | None],
        *,
        finished: bool | None = None,
    ) -> list[T]:
        """What ``look`` makes of each of these runs, None left out, on another thread: for when there are many."""

        def whole(connection: sqlite3.Connection) -> list[T]:
            found = ledgers.each_run(connection, tenant, lane, finished, look)
            _let_go(connection)
            return found

        return await self._read(whole)

    async def item(self, tenant: str, lane: str, run: str, kind: str, key: str) -> StoredItem | None:
        return await self._read(ledgers.item, tenant, lane, run, kind, key)

    async def tail(
        self,
        tenant: str,
        lane: str,
        run: str,
        *,
        after: int,
        through: int | None = None,
        after_version: int = 0,
        limit: int | None = None,
        bodies: bool = True,
    ) -> list[JournalEntry]:
        """Messages of all channels with after < position <= through and version > ``after_version``.

        Ascending by version, at most ``limit``. ``after=-1`` takes in records of position 0. To page, give
        the last version seen as ``after_version``: several records may share a position.
        """
        return await self._read(journal.tail, tenant, lane, run, after, through, after_version, limit, bodies)

    @overload
    async def entry(
        self, tenant: str, lane: str, run: str, *, event_id: str, channel: Channel = ...
    ) -> JournalEntry | None: ...

    @overload
    async def entry(
        self, tenant: str, lane: str, run: str, *, position: int, channel: Channel | None = ...
    ) -> JournalEntry | None: ...

    async def entry(
        self,
        tenant: str,
        lane: str,
        run: str,
        *,
        event_id: str | None = None,
        position: int | None = None,
        channel: Channel | None = None,
    ) -> JournalEntry | None:
        """One message: by id (of the event channel unless named), or by position (the event or authority
        message there; with channel ``record`` the newest record there)."""
        if event_id is not None:
            return await self._own_read(
                journal.entry_named, self._identity, tenant, lane, run, channel or "event", event_id
            )
        if position is None:
            raise TypeError("entry() needs event_id or position")
        return await self._read(journal.entry_at, tenant, lane, run, position, channel)

    async def evidence(
        self,
        tenant: str,
        lane: str,
        run: str,
        *,
        after: int,
        through: int,
        limit: int,
        max_bytes: int,
        types: Sequence[str] = (),
    ) -> list[StoredMessage]:
        """Messages of ``event`` and ``authority`` with after < position <= through, ascending, each checked
        against its head: at most ``limit``, and as many as make ``max_bytes`` of bodies, but at least one."""
        return await self._read(evidence.page, tenant, lane, run, after, through, limit, max_bytes, types)

    async def verify_chain(self, tenant: str, lane: str, run: str) -> BrokenLink | None:
        """Recompute the run's hash chain from its bodies; the first broken link, None if it holds or the run
        is unknown. Reads the whole run, page by page."""
        check = audit.ChainCheck(tenant, lane, run)
        broken = None
        while not check.done and broken is None:
            broken = await self._read(check.step)
        return broken

    async def tombstones(self, tenant: str, lane: str) -> list[TombstoneRow]:
        return await self._read(retention.tombstones, tenant, lane)

    # Compaction

    async def newest_checkpoint(
        self, tenant: str, lane: str, run: str, *, chain: Chain = "live"
    ) -> CheckpointRow | None:
        return await self._read(checkpoints.newest_checkpoint, tenant, lane, run, chain)

    async def checkpoint(self, tenant: str, lane: str, run: str, checkpoint_id: str) -> CheckpointRow | None:
        return await self._read(checkpoints.checkpoint, tenant, lane, run, checkpoint_id)

    async def checkpoints(
        self, tenant: str, lane: str, run: str, *, chain: Chain = "live"
    ) -> list[CheckpointRow]:
        """Oldest first."""
        return await self._read(checkpoints.checkpoints, tenant, lane, run, chain)

    async def receipts(self, tenant: str, lane: str, run: str) -> list[ReceiptRow]:
        """Oldest first."""
        return await self._read(checkpoints.receipts, tenant, lane, run)

    async def packet(self, tenant: str, lane: str, run: str) -> PacketRow | None:
        """The newest packet of the run that shortened its context."""
        return await self._read(checkpoints.packet, tenant, lane, run)

    async def open_attempts(self, tenant: str, lane: str) -> list[AttemptRow]:
        return await self._read(checkpoints.open_attempts, tenant, lane)

    # Lane

    async def cursor(self, tenant: str, lane: str) -> Cursor | None:
        return await self._read(outbox.cursor, tenant, lane)

    async def outbox(self, tenant: str, lane: str, *, after_id: int = 0, limit: int) -> list[StoredOutbox]:
        """The lane's messages still to be sent with id > ``after_id``, in order."""
        return await self._read(outbox.pending, tenant, lane, after_id, limit)

    async def outbox_count(self, tenant: str, lane: str) -> int:
        return await self._read(outbox.count, tenant, lane)

    async def outbox_span(self, tenant: str, lane: str) -> tuple[int, int]:
        """Least and greatest id of the lane's outbox, zeros where it is empty. Ids only rise."""
        return await self._read(outbox.span, tenant, lane)

    # Search

    async def search(
        self,
        tenant: str,
        lane: str,
        run: str,
        query: str,
        *,
        limit: int,
        types: Sequence[str] | None = None,
        first: int = 0,
        through: int | None = None,
        beside: Sequence[SearchRow] = (),
        indexed: bool = True,
    ) -> SearchFound:
        """Messages of the run that answer ``query`` best. No syntax in ``query``; bounded work.

        ``beside`` are rows to be searched as well, such as what is not indexed yet; with ``indexed`` False
        only they are.
        """
        wanted = Wanted(
            limit=limit, types=None if types is None else frozenset(types), first=first, through=through
        )
        return await self._read(search.find, tenant, lane, run, query, wanted, tuple(beside), indexed)

    async def searchable_through(self, tenant: str, lane: str, run: str) -> int:
        """The last position indexed; -1 for none."""
        return await self._read(search.through, tenant, lane, run)

    # The store itself

    async def meta(self, key: str) -> bytes | None:
        return await self._read(outbox.meta, key)

    async def lanes(self) -> list[tuple[str, str]]:
        """(tenant, lane) of everything that was ever stored here."""
        return await self._read(outbox.lanes)

    async def backup(self, target: Path) -> int:
        """Copy all that is committed into the new file ``target``, while others write; its size in bytes.

        Raises AlreadyThere if the file exists, StorageFull or StorageIo if it cannot be written.
        """
        return await self._own_read(backup.copy, target)

    async def scrub(self) -> None:
        """Overwrite what forgetting leaves in the search index and in the log, in steps between commits."""
        first = True
        while await self._writer.submit(partial(search.merge, first=first), search.MERGE_WEIGHT):
            first = False
        self._writer.empty_log = True
        await self._writer.submit(lambda tx: None, units.ROW_WEIGHT)

    async def counts(self) -> Counts:
        return await self._read(audit.counts)

    @property
    def full(self) -> bool:
        """True from a commit refused for space until one succeeds."""
        return self._writer.full

    @property
    def size_bytes(self) -> int:
        """Bytes on disk of the database with its log."""
        return self._held.size_bytes() if self._held is not None else 0

    @property
    def free_bytes(self) -> int:
        """Bytes by which the database may still grow; 0 where that cannot be told."""
        return self._held.free_bytes() if self._held is not None else 0

    async def _read(
        self,
        work: Callable[Concatenate[sqlite3.Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        def whole(connection: sqlite3.Connection) -> T:
            connection.execute("BEGIN")
            try:
                return work(connection, *args, **kwargs)
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

        return await self._own_read(whole)

    async def _own_read(
        self,
        work: Callable[Concatenate[sqlite3.Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        if self._closed:
            raise StorageClosed("the store is closed")
        async with self._free:
            reader = self._readers.pop()
            try:
                return await reader.run(work, *args, **kwargs)
            finally:
                # Also when cancelled: what still runs on its thread ends before the next read begins there.
                self._readers.append(reader)


def _let_go(connection: sqlite3.Connection) -> None:
    """Give back what the driver keeps of pages it has read."""
    connection.execute("PRAGMA shrink_memory")


def _left(
    held: DataDir,
    opened: Sequence[Connection],
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """After the connections are closed: whether the file was left whole."""
    if kind is None and opened and not any(connection.damaged for connection in opened):
        held.leave_whole()


def _prepare(
    connection: sqlite3.Connection, path: Path, known: Sequence[schema.Migration], left_whole: bool
) -> StoreInfo:
    verdict = schema.check(connection, path, left_whole)
    before, after = schema.migrate(connection, path, known)
    return StoreInfo(
        path=str(path),
        schema_version=after,
        migrated_from=before,
        sqlite_version=sqlite3.sqlite_version,
        quick_check=verdict,
    )


def _find(
    connection: sqlite3.Connection,
    identity: Identity,
    tenant: str,
    lane: str,
    wanted: Sequence[tuple[IdKey, int]],
) -> dict[IdKey, StoredId]:
    lane_no = lane_number(connection, tenant, lane)
    return {} if lane_no is None else identity.find(connection, lane_no, wanted)
