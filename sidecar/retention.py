"""Forgetting finished runs, whole families at a time: when it is due, and in which order it happens.

First the disk, in one transaction: bodies, items, checkpoints, receipts and search rows go; heads and a
tombstone stay. Then the broker: the run's messages go from the streams, its large texts from their bucket, and its
state becomes the tombstone.
A tombstone that was not told yet is taken up again until the broker has heard of it, so a crash in between
leaves nothing behind. Nothing of a run that is not finished is ever touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Final

import anyio
import anyio.to_thread
import msgspec
import structlog
from msgspec import UNSET

from protocol import subjects
from protocol.codec import encode
from protocol.state import RunState
from sidecar.compactor import Compactor
from sidecar.config import Config
from sidecar.desk import Desk
from sidecar.packets import Packets
from sidecar.states import tombstone_row
from sidecar.transport.contents import Contents
from sidecar.transport.errors import TransportError
from sidecar.transport.inventory import purge
from sidecar.transport.jetstream import Link
from sidecar.view import decode_ending
from storage.errors import StorageError
from storage.records import RunRow, RunSummary, StoredRun, TombstoneRow, Unit
from storage.store import Store

BY_COMMAND: Final = "command"
DAY_SECONDS: Final = 86_400.0
_SOONEST_SECONDS: Final = 1.0
_LATEST_SECONDS: Final = 600.0
_LEAVES_SECONDS: Final = 5.0

log = structlog.get_logger(__name__)


Attempts = tuple[tuple[str, str], ...]
"""Id and outcome of each compaction attempt of a run."""


class Grave(msgspec.Struct, frozen=True, kw_only=True):
    """What is left of a run beside the heads of its messages: figures and names, no word of what was said."""

    reason: str
    outcome: str
    version: int
    position: int
    hash_chain: str
    attempts: Attempts = ()
    told: bool = False
    """The broker has forgotten the run as well."""


class NotForgotten(Exception):
    """The run cannot be forgotten now; the text says why."""


class NotFinished(NotForgotten):
    """A run of the family goes on; the text names those that do."""


# --- what is due --------------------------------------------------------------------------------------------


def periods(config: Config) -> dict[str, float]:
    """Seconds that a run is kept after its end, by outcome; those kept for ever are left out."""
    days = {
        "succeeded": config.retention.succeeded_days,
        "failed": config.retention.failed_days,
        "cancelled": config.retention.cancelled_days,
    }
    return {outcome: number * DAY_SECONDS for outcome, number in days.items() if number}


def due(summaries: Iterable[RunSummary], kept: Mapping[str, float], now: float) -> list[str]:
    """Families of which every run is finished and past its time, oldest first; ``now`` in seconds.

    A run whose end was never dated (it was written by a version that did not know of retention) stays.
    """
    families: dict[str, bool] = {}
    for summary in summaries:
        note(families, summary, kept, now)
    return [family for family, past in families.items() if past]


def note(families: dict[str, bool], summary: RunSummary, kept: Mapping[str, float], now: float) -> None:
    """Note under the family of a run whether it and those noted before are past their time."""
    ending = decode_ending(summary.view) if summary.finished else None
    past = (
        ending is not None
        and ending.ended in kept
        and ending.ended_at > 0
        and now - ending.ended_at >= kept[ending.ended]
    )
    families[summary.family] = families.get(summary.family, True) and past


def graves(
    family: Sequence[StoredRun], reason: str, at: str, attempts: Mapping[str, Attempts]
) -> list[TombstoneRow]:
    """A tombstone for each run of a family. Raises NotForgotten if one of them is not finished."""
    if all(not row.head for row in family):
        raise NotForgotten("forgotten already")
    unfinished = [row.run for row in family if not row.finished]
    if unfinished:
        raise NotFinished(f"not finished: {', '.join(sorted(unfinished))}")
    return [
        TombstoneRow(
            run=row.run,
            forgotten_at=at,
            body=encode(
                Grave(
                    reason=reason,
                    outcome=decode_ending(row.view).ended,
                    version=row.version,
                    position=row.position,
                    hash_chain=f"sha256:{row.chain.hex()}",
                    attempts=attempts.get(row.run, ()),
                )
            ),
        )
        for row in family
    ]


async def bury(store: Store, tenant: str, lane: str, run: str, reason: str, at: str) -> list[TombstoneRow]:
    """Read a run's family from the disk and make its tombstones; nothing is written yet.

    Raises NotForgotten (unknown, not finished, forgotten already), StorageError.
    """
    family = await store.load_family(tenant, lane, run, live_only=True)
    if not family:
        raise NotForgotten(f"no run {run} in lane {lane}")
    attempts = {}
    for row in family:
        receipts = await store.receipts(tenant, lane, row.run)
        attempts[row.run] = tuple((receipt.attempt_id, receipt.outcome) for receipt in receipts)
    return graves(family, reason, at, attempts)


# --- in the daemon ------------------------------------------------------------------------------------------


class Retention:
    """One lane's forgetting. It acts only while the lane is ours and everything is read."""

    def __init__(self, desk: Desk, link: Link, packets: Packets, compactor: Compactor) -> None:
        self._desk = desk
        self._link = link
        self._packets = packets
        self._compactor = compactor

    async def run(self) -> None:
        """Until cancelled. Trouble with storage or broker is told and waited out."""
        kept = periods(self._desk.config)
        pause = min([_LATEST_SECONDS, *(max(_SOONEST_SECONDS, seconds / 10) for seconds in kept.values())])
        wait = _SOONEST_SECONDS
        while True:
            await anyio.sleep(wait)
            if not self._desk.caught_up or not self._desk.lease_valid():
                continue
            wait = pause
            try:
                await self.sweep(kept)
            except (StorageError, TransportError) as error:
                log.warning("forgetting waits", lane=self._desk.lane, error=str(error))

    async def sweep(self, kept: Mapping[str, float]) -> int:
        """Forget what is due, and tell the broker of what it was not told yet; returns how many runs went."""
        desk = self._desk
        gone = 0
        if kept:
            families: dict[str, bool] = {}
            look = partial(note, families, kept=kept, now=desk.wall())
            await desk.store.each_run(desk.tenant, desk.lane, look)
            for family in [family for family, past in families.items() if past]:
                gone += await self._forget(family)
        for row in await desk.store.tombstones(desk.tenant, desk.lane):
            if desk.lease_valid() and not msgspec.json.decode(row.body, type=Grave).told:
                await self._tell(row)
        if gone:
            await desk.store.scrub()
        return gone

    async def _forget(self, family: str) -> int:
        desk = self._desk
        async with desk.lock:
            await desk.runs.load([family])
            members = list(desk.runs.family(family))
            if any(desk.runs.hot[name].busy or name in self._compactor.running for name in members):
                return 0
            try:
                rows = await bury(desk.store, desk.tenant, desk.lane, family, "retention", desk.now_text())
            except NotForgotten as reason:
                log.info("run stays", run=family, reason=str(reason))
                return 0
            await desk.commit(forget=rows)
            desk.runs.drop(row.run for row in rows)
            for row in rows:
                self._packets.forget(row.run)
        desk.metrics.forgotten(len(rows))
        log.info("forgotten", run=family, runs=len(rows))
        return len(rows)

    async def _left(self) -> bool:
        """Whether everything that has to leave by now does so soon."""
        desk = self._desk
        _, newest = await desk.store.outbox_span(desk.tenant, desk.lane)
        with anyio.move_on_after(_LEAVES_SECONDS):
            while True:
                oldest, _ = await desk.store.outbox_span(desk.tenant, desk.lane)
                if not oldest or oldest > newest:
                    return True
                await anyio.sleep(_LEAVES_SECONDS / 100)
        return False

    async def _tell(self, row: TombstoneRow) -> None:
        desk = self._desk
        left = await self._left()
        read = desk.cursor.stream_seq
        inbound = subjects.run_inbound_filter(desk.tenant, desk.lane, row.run)
        outbound = subjects.run_outbound_filter(desk.tenant, desk.lane, row.run)
        await Contents(self._link).forget(desk.tenant, desk.lane, row.run)
        # What came since is not ours to delete unread: it is read, and refused.
        await purge(self._link, subjects.STREAM_IN, inbound, through=read)
        await purge(self._link, subjects.STREAM_OUT, outbound)
        await purge(self._link, subjects.STREAM_REJECTED, outbound)
        if not left:
            # What was said of the run before is still on its way and would stay: purged again next time.
            log.info("forgotten, told again once the output is through", run=row.run)
            return
        grave = msgspec.json.decode(row.body, type=Grave)
        told = TombstoneRow(
            run=row.run,
            forgotten_at=row.forgotten_at,
            body=encode(msgspec.structs.replace(grave, told=True)),
        )
        async with desk.lock:
            state = tombstone_row(
                desk,
                row.run,
                version=grave.version,
                position=grave.position,
                hash_chain=grave.hash_chain,
                reason=grave.reason,
                at=datetime.fromisoformat(row.forgotten_at),
            )
            await desk.commit(forget=[told], outbox=[state])
        if grave.reason == BY_COMMAND:
            # Forgotten while no daemon ran that could have counted it.
            desk.metrics.forgotten(1)


async def adopt_tombstone(desk: Desk, run: str, state: RunState) -> bool:
    """Another owner forgot the run: forget it here too, and remember that it was. Whether that was news."""
    grave = next((item for item in state.tombstones if item.run == run), None)
    if grave is None:
        return False
    body = encode(
        Grave(
            reason=grave.reason,
            outcome="",
            version=grave.through,
            # Never too low: what was there must not be told as if it had never been.
            position=grave.through if grave.position is UNSET else grave.position,
            hash_chain=grave.hash_chain,
            told=True,
        )
    )
    at = grave.at.astimezone(UTC).isoformat()
    async with desk.lock:
        await desk.runs.load([run])
        # Not by the empty head: it is written first, and a stop in between must not leave the bodies for ever.
        if any(row.run == run for row in await desk.store.tombstones(desk.tenant, desk.lane)):
            return False
        hot = desk.runs.hot.get(run)
        row = RunRow(
            run=run,
            family=run if hot is None else hot.family,
            parent=None if hot is None else hot.ledger.head.parent,
            head=b"",
            view=b"",
            finished=True,
        )
        await desk.store.commit(Unit(tenant=desk.tenant, lane=desk.lane, runs=(row,)))
        await desk.commit(forget=[TombstoneRow(run=run, forgotten_at=at, body=body)])
        desk.runs.drop([run])
    return True
