"""What an operator does to a data directory by command: verify, forget, back up, put back.

Verifying and backing up only read, so they work beside a running daemon. Forgetting takes the directory's lock:
the daemon owns what it serves, and must be stopped. Nothing here speaks to the broker.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import anyio
import anyio.to_thread
from msgspec import Struct

from sidecar.retention import BY_COMMAND, NotFinished, NotForgotten, bury
from storage import restore
from storage.data_dir import DATABASE, require_file
from storage.records import BrokenLink, Unit
from storage.store import Store

__all__ = ["NotForgotten", "Verified", "back_up", "forget", "put_back", "verify"]


class Verified(Struct, frozen=True, kw_only=True):
    """What verifying a run found; ``broken`` is the first link that does not hold, None if all do."""

    tenant: str
    lane: str
    run: str
    messages: int
    hash_chain: str
    forgotten: bool
    broken: str | None

    def __str__(self) -> str:
        name = f"run {self.run} (tenant {self.tenant}, lane {self.lane})"
        if self.broken is not None:
            return f"BROKEN {name}: {self.broken}"
        kept = "heads only, forgotten" if self.forgotten else "heads and bodies"
        return f"holds  {name}: {self.messages} messages, {kept}, chain {self.hash_chain}"


_REASONS = {
    "body": "the kept body is not the one that was stored",
    "chain": "its digest does not continue the chain",
    "hole": "a message before it is missing",
    "missing_body": "its body is gone and the run is not forgotten",
    "head": "the chain ends before the run's newest message",
}


_FINISH = (
    ". A run ends by run.finished: where its agent is gone an authority publishes it to "
    "wk.v1.in.{tenant}.{lane}.{run}.authority while the daemon runs; then stop the daemon and forget"
)


async def verify(data_dir: Path, run: str | None, tenant: str | None, lane: str | None) -> list[Verified]:
    """Prove the hash chain of one run, or of every run (None), of this tenant and lane (None: of all).

    Raises ``StorageError`` if there is no database, or none of ours.
    """
    found = []
    async with await Store.open_to_read(data_dir) as store:
        for where in await _lanes(store, tenant, lane):
            forgotten = {row.run for row in await store.tombstones(*where)}
            for row in await store.runs(*where):
                if run is not None and row.run != run:
                    continue
                broken = await store.verify_chain(*where, row.run)
                chain = await _chain(store, *where, row.run)
                found.append(
                    Verified(
                        tenant=where[0],
                        lane=where[1],
                        run=row.run,
                        messages=row.version,
                        hash_chain=f"sha256:{chain.hex()}",
                        forgotten=row.run in forgotten,
                        broken=None if broken is None else _words(broken),
                    )
                )
    return found


async def _lanes(store: Store, tenant: str | None, lane: str | None) -> list[tuple[str, str]]:
    return [where for where in await store.lanes() if tenant in (None, where[0]) and lane in (None, where[1])]


async def _chain(store: Store, tenant: str, lane: str, run: str) -> bytes:
    family = await store.load_family(tenant, lane, run, live_only=True)
    return next((row.chain for row in family if row.run == run), b"")


def _words(broken: BrokenLink) -> str:
    return f"message {broken.version} ({broken.event_id or 'the newest'}): {_REASONS[broken.reason]}"


async def forget(data_dir: Path, run: str, tenant: str | None, lane: str | None) -> list[str]:
    """Forget a finished run and its family on disk; the names of the runs that went.

    The daemon that owns the lane next tells the broker. Raises ``NotForgotten`` (unknown, of several lanes, not
    finished, forgotten already), ``AlreadyOpen`` while a daemon holds the directory, other ``StorageError``.
    """
    await anyio.to_thread.run_sync(require_file, data_dir / DATABASE)
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    async with await Store.open(data_dir) as store:
        places = [
            where
            for where in await _lanes(store, tenant, lane)
            if await store.load_family(*where, run, live_only=True)
        ]
        if len(places) != 1:
            names = ", ".join(f"{of}/{name}" for of, name in places)
            raise NotForgotten(f"in several lanes, say which: {names}" if places else f"not in {data_dir}")
        (where,) = places
        try:
            rows = await bury(store, *where, run, BY_COMMAND, at)
        except NotFinished as reason:
            first = str(reason).removeprefix("not finished: ").partition(",")[0]
            how = _FINISH.format(tenant=where[0], lane=where[1], run=first)
            raise NotForgotten(f"{reason}{how}") from reason
        async with anyio.create_task_group() as tasks:
            await tasks.start(store.run_writer)
            await store.commit(Unit(tenant=where[0], lane=where[1], forget=tuple(rows)))
            await store.scrub()
            tasks.cancel_scope.cancel()
    return [row.run for row in rows]


async def back_up(data_dir: Path, target: Path) -> int:
    """Copy the database into one new file while the daemon runs or not; its size in bytes."""
    async with await Store.open_to_read(data_dir) as store:
        return await store.backup(target)


async def put_back(source: Path, data_dir: Path) -> int:
    """Make a copy the database of a data directory without one; its schema version."""
    return await restore(source, data_dir)
