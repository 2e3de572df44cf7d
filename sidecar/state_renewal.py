"""Large states: what is new goes out at once on the object that stands, the object is made anew soon after.

A ledger holds everything a run ever settled. Where its state is too large for a message, a checkpoint or a trim adds
a small message to the object the broker has already, so that none of them costs more the longer the run is. Between
two objects lie seconds; the run's messages of that time are in the stream. When a state is due is others' matter.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import anyio
import anyio.to_thread
import msgspec
import structlog
from msgspec import UNSET

from protocol import subjects
from protocol.codec import encode
from protocol.state import RunState, RunStateReference, Since, StateCheckpoint, StatePacket
from sidecar.core.state import Ledger
from sidecar.desk import Desk
from sidecar.large_states import MAX_STATE_BYTES, stored_apart
from sidecar.notices import derived_id
from sidecar.packets import Packets
from sidecar.runs import HotRun
from sidecar.states import filled, standing, state_id, state_row
from sidecar.transport.blobs import Blobs
from sidecar.transport.errors import TransportError
from storage.errors import StorageBusy, StorageError, StorageFull
from storage.records import OutboxRow

SOONEST_SECONDS: Final = 1.0
"""From what was committed to the new object: what comes in that time goes into one."""
LATEST_SECONDS: Final = 60.0
_SHARE: Final = 20
"""Of the time between two objects of a run, at most one part in so many is spent on making them."""
_REMEMBERED: Final = 2_000
_LET_GO_SECONDS: Final = 2.0

log = structlog.get_logger(__name__)


class _Said(NamedTuple):
    """What of a state a checkpoint or a trim changes."""

    checkpoint: str | None
    trimmed_through: int
    packet: str | None


class _Base(NamedTuple):
    """An object the broker has, as of the newest row in the outbox that names it."""

    reference: RunStateReference
    says: _Said


class StateRenewal:
    """One lane's states. Without ``blobs`` every state is a whole one."""

    def __init__(self, desk: Desk, packets: Packets, blobs: Blobs | None) -> None:
        self._desk = desk
        self._packets = packets
        self._blobs = blobs
        self._bases: dict[str, _Base] = {}
        self._sent: dict[str, tuple[str, _Said]] = {}
        """Message id → the run and what is said, of whole states on their way that will be kept apart."""
        self._due: dict[str, float] = {}
        """When an object is to be made anew, by the monotonic clock."""
        self._not_before: dict[str, float] = {}
        self._made = 0
        self._wake = anyio.Event()

    async def row(
        self, hot: HotRun, checkpoint: StateCheckpoint | None, packet: StatePacket | None
    ) -> OutboxRow | None:
        """The run's state at a checkpoint or a trim, to be committed with it; hold the lock until it is."""
        run = hot.ledger.head.run
        base = self._bases.get(run)
        if base is not None:
            row = self._on(run, base, standing(self._desk, hot, checkpoint, packet))
            if len(row.payload) <= self._room:
                self._renew_soon(run)
                return row
        return await self.whole(hot, checkpoint, packet)

    async def whole(
        self, hot: HotRun, checkpoint: StateCheckpoint | None, packet: StatePacket | None
    ) -> OutboxRow | None:
        """The run's state with its ledger, to be committed; hold the lock until it is.

        ``None`` when it is too large to be kept at all.
        """
        desk, run = self._desk, hot.ledger.head.run
        self._forget(run)
        row = await desk.aside(run, lambda: state_row(desk, hot, checkpoint, packet))
        if row is not None and self._blobs is not None and len(row.payload) > self._room:
            if len(self._sent) >= _REMEMBERED:
                self._sent.clear()
            self._sent[row.msg_id] = (run, _said(standing(desk, hot, checkpoint, packet)))
        return row

    async def whole_of(self, run: str) -> OutboxRow | None:
        """``whole`` of a hot run as it stands in memory; hold the lock."""
        return await self.whole(self._desk.runs.hot[run], *await self._committed(run))

    def apart(self, msg_id: str, reference: RunStateReference) -> None:
        """The broker has the object of this whole state, and the message that names it."""
        sent = self._sent.pop(msg_id, None)
        if sent is not None:
            self._stands(sent[0], _Base(reference, sent[1]))

    async def run(self) -> None:
        """Make objects anew until cancelled, one at a time."""
        desk = self._desk
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            while self._due:
                run = min(self._due, key=self._due.__getitem__)
                wait = self._due[run] - desk.mono()
                if wait > 0:
                    await anyio.sleep(min(wait, SOONEST_SECONDS))
                    continue
                began = desk.mono()
                try:
                    del self._due[run]
                    await self._renew(run)
                except (StorageError, TransportError) as error:
                    log.warning("state not made anew, tried again", run=run, error=str(error))
                    self._due[run] = desk.mono() + LATEST_SECONDS
                pause = min(LATEST_SECONDS, (desk.mono() - began) * _SHARE)
                self._not_before[run] = began + pause

    @property
    def _room(self) -> int:
        return min(MAX_STATE_BYTES, self._desk.message_room)

    def _renew_soon(self, run: str) -> None:
        soon = self._desk.mono() + SOONEST_SECONDS
        self._due.setdefault(run, max(soon, self._not_before.get(run, soon)))
        self._wake.set()

    def _forget(self, run: str) -> None:
        """A whole state follows everything said so far: nothing may be said on an older one behind it."""
        self._bases.pop(run, None)
        self._due.pop(run, None)
        for msg_id in [msg_id for msg_id, (of, _) in self._sent.items() if of == run]:
            del self._sent[msg_id]

    def _stands(self, run: str, base: _Base) -> None:
        if len(self._bases) >= _REMEMBERED:
            self._bases.clear()
            self._not_before.clear()
        self._bases[run] = base

    def _on(self, run: str, base: _Base, state: RunState) -> OutboxRow:
        """The object, and of this newer state what the object does not say."""
        reference = base.reference
        since = Since(
            checkpoint=state.checkpoint,
            trimmed_through=state.trimmed_through,
            packet=state.packet,
            stream_seq=state.cursor.stream_seq,
            ledger_version=state.ledger_version,
        )
        message = msgspec.structs.replace(reference, epoch=state.epoch)
        if _said(state) != base.says:
            # Without it a reader would go on from an older checkpoint.
            message = msgspec.structs.replace(message, since=since, must_understand=("blob", "since"))
        return OutboxRow(
            stream="state",
            subject=subjects.state(self._desk.tenant, self._desk.lane, run),
            msg_id=state_id(
                self._desk, run, state, reference.blob.name, since.trimmed_through, since.stream_seq
            ),
            payload=encode(message),
        )

    async def _renew(self, run: str) -> None:
        """Write the ledger as it is now into an object of its own, and say so behind what was said meanwhile."""
        desk, blobs, former = self._desk, self._blobs, self._bases.get(run)
        if blobs is None or former is None:
            return
        async with desk.changing():
            found = await self._now(run)
            if found is None:
                return
            state, ledger = found
        subject = subjects.state(desk.tenant, desk.lane, run)
        made = await anyio.to_thread.run_sync(_written, state, ledger)
        if made is None:
            return
        # A name of its own: an object that is let go must not be the one of a whole state that says the same.
        self._made += 1
        name = derived_id("st", desk.tenant, desk.lane, run, desk.voice.epoch, "anew", self._made)
        reference = await stored_apart(blobs, subject, made, name)
        named = False
        try:
            async with desk.changing():
                # A whole state that was said meanwhile stands behind this one and is newer.
                found = await self._now(run) if self._bases.get(run) is former else None
                if found is not None:
                    base = _Base(reference, _said(state))
                    row, named = self._on(run, base, found[0]), True
                    await desk.commit(outbox=[row])
                    self._stands(run, base)
        except (StorageFull, StorageBusy):
            # Of any other refusal it cannot be told whether the row is on disk.
            named = False
            raise
        finally:
            if not named:
                await _let_go(blobs, reference.blob.name)

    async def _now(self, run: str) -> tuple[RunState, Ledger] | None:
        """How the run stands, and a copy of its ledger; None where it is gone. Hold the lock."""
        desk = self._desk
        await desk.runs.load([run])
        hot = desk.runs.hot.get(run)
        if hot is None:
            self._forget(run)
            return None
        return standing(desk, hot, *await self._committed(run)), hot.ledger.snapshot(bare=True)

    async def _committed(self, run: str) -> tuple[StateCheckpoint | None, StatePacket | None]:
        """The newest checkpoint of a hot run, and the newest packet that shortened its context."""
        return await self._packets.checkpoint(run), await self._packets.shortening(run)


async def _let_go(blobs: Blobs, name: str) -> None:
    """Delete an object that no message will name, also where the lane is given up meanwhile."""
    try:
        with anyio.CancelScope(shield=True), anyio.move_on_after(_LET_GO_SECONDS):
            await blobs.delete(name)
    except TransportError as error:
        log.warning("object that no state names stays", object=name, error=str(error))


def _said(state: RunState) -> _Said:
    return _Said(
        None if state.checkpoint is None else state.checkpoint.id,
        state.trimmed_through,
        None if state.packet is UNSET else state.packet.packet_id,
    )


def _written(state: RunState, ledger: Ledger) -> bytes | None:
    whole = filled(state, ledger)
    return None if whole is None else encode(whole)
