"""Resume packets of one lane: builds them from memory, publishes the ones that say something new.

It gathers what the core's packet builder needs and paces publishing (at most one a second per run; the
last state is always published). What a packet says is decided in ``sidecar.core``.
"""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import structlog

from protocol import subjects
from protocol.codec import encode
from protocol.handoff import Packet
from protocol.summary import Summary
from sidecar.core.packet import Built, PacketInputs, StoredCheckpoint, build_packet
from sidecar.core.state import Ledger
from sidecar.desk import Desk
from sidecar.notices import derived_id
from sidecar.runs import HotRun
from storage.errors import StorageError
from storage.records import OutboxRow

_PACE_SECONDS = 1.0
_TICK_SECONDS = 0.05
_HEADROOM_BYTES = 4096

log = structlog.get_logger(__name__)


class StoredBody(msgspec.Struct, kw_only=True):
    """A checkpoint's stored body: what the packet shows of it beside its row."""

    summarizer: str
    projector: dict[str, Any]
    summary: Summary
    attempt_id: str


_BODY = msgspec.json.Decoder(StoredBody)


def dead_refs(ledger: Ledger) -> set[str]:
    """Refs whose item was superseded, withdrawn, lifted or answered: a statement on these alone is stale."""
    dead: set[str] = set()
    for kind in ("decision", "question", "constraint", "artifact"):
        for key, item in ledger.items[kind].items():
            if not item.live:
                dead.add(f"{kind}:{key}")
    return dead


class Packets:
    """Builds under the lock, publishes through the outbox."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._dirty: dict[str, str] = {}
        self._due: dict[str, float] = {}
        self._checkpoints: dict[str, StoredCheckpoint | None] = {}
        self._wake = anyio.Event()

    def mark(self, run: str, reason: str) -> None:
        """Something about the run changed; ``reason`` is why a packet may be due (``changed`` is the weakest)."""
        if self._dirty.get(run, "changed") == "changed":
            self._dirty[run] = reason
        self._wake.set()

    def forget(self, run: str) -> None:
        """The run's newest checkpoint changed: read it again next time."""
        self._checkpoints.pop(run, None)

    async def checkpoint(self, run: str) -> StoredCheckpoint | None:
        """The newest committed checkpoint of the run's live chain."""
        if run not in self._checkpoints:
            desk = self._desk
            row = await desk.store.newest_checkpoint(desk.tenant, desk.lane, run)
            if len(self._checkpoints) > 2_000:
                self._checkpoints.clear()
            self._checkpoints[run] = None if row is None else stored_checkpoint(row)
        return self._checkpoints[run]

    async def build(self, run: str, reason: str) -> Built:
        """A packet of the run as it stands; hold the lock, the run must be hot."""
        return self.build_with(run, reason, await self.checkpoint(run))

    def build_with(self, run: str, reason: str, checkpoint: StoredCheckpoint | None) -> Built:
        desk = self._desk
        hot = desk.runs.hot[run]
        head, view = hot.ledger.head, hot.view
        covered = 0 if checkpoint is None else checkpoint.covers_through.position
        at = desk.now_text()
        dead = dead_refs(hot.ledger)
        inputs = PacketInputs(
            tenant=desk.tenant,
            lane=desk.lane,
            run=run,
            epoch=desk.voice.epoch,
            at=at,
            packet_id="",
            reason=reason,
            runs=desk.runs.ledgers,
            settings=desk.runs.lane.settings,
            checkpoint=checkpoint,
            tail=view.tail(head, covered),
            cleared=[item for item in view.cleared if item.position > covered],
            budget=view.packet_budget(desk.budget),
            packet_tokens=desk.budget.packet_tokens,
            user_tokens=desk.budget.user_tokens,
            usable=view.usable(desk.budget),
            recent=view.recent,
            max_bytes=desk.max_payload - _HEADROOM_BYTES,
            dead=dead.__contains__,
        )
        built = build_packet(inputs)
        packet = msgspec.structs.replace(built.packet, packet_id=packet_id(built.packet))
        return msgspec.structs.replace(built, packet=packet)

    def row(self, packet: Packet) -> OutboxRow:
        return OutboxRow(
            stream="out",
            subject=subjects.outbound(packet.tenant, packet.lane, packet.run, "packet"),
            msg_id=packet.packet_id,
            payload=encode(packet),
        )

    def published(self, hot: HotRun, packet: Packet) -> None:
        """Remember in the run's view what went out; call in the same transaction as its row."""
        said = hot.view.published
        said.protected_digest = packet.protected_digest
        said.verdict = packet.verdict
        said.packet_id = packet.packet_id
        said.checkpoint_version = packet.checkpoint.version if packet.checkpoint is not None else 0
        said.ledger_version = packet.ledger_version
        said.at = self._desk.wall()
        hot.view_changed = True

    def count(self, built: Built) -> None:
        """Metrics of a packet that was committed."""
        self._desk.metrics.packet(built.packet.verdict, built.tokens)

    async def run(self) -> None:
        """Publish packets of changed runs until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            now = self._desk.wall()
            waiting = False
            for run, reason in list(self._dirty.items()):
                if reason == "changed" and self._due.get(run, 0.0) > now:
                    waiting = True
                    continue
                del self._dirty[run]
                try:
                    await self.publish(run, reason)
                except StorageError as error:
                    self._dirty.setdefault(run, reason)
                    waiting = True
                    log.warning("packet not stored, tried again", run=run, error=str(error))
            if waiting:
                await anyio.sleep(_TICK_SECONDS)
                self._wake.set()

    async def publish(self, run: str, reason: str) -> None:
        """Publish a packet of the run if it differs from the last one or the reason asks for one anyway."""
        desk = self._desk
        async with desk.lock:
            await desk.runs.load([run])
            hot = desk.runs.hot.get(run)
            if hot is None:
                return
            mode, bypass = desk.config.mode_for(hot.ledger.head.labels)
            if mode != "live" or bypass:
                return
            self._due[run] = desk.wall() + _PACE_SECONDS
            if len(self._due) > 10_000:
                self._due.clear()
            built = await self.build(run, reason)
            said = hot.view.published
            same = said.protected_digest == built.packet.protected_digest and said.verdict == built.packet.verdict
            if same and reason == "changed":
                return
            self.published(hot, built.packet)
            outbox = [self.row(built.packet)]
            if built.choice is not None and hot.view.choice != built.choice:
                outbox.append(
                    desk.voice.notice(
                        run,
                        "choice",
                        desk.now_text(),
                        built.packet.ledger_version,
                        choice=built.choice,
                        reason="protected content does not fit the packet budget",
                    )
                )
            hot.view.choice = built.choice
            await desk.commit(touched=[run], outbox=outbox)
            self.count(built)


def packet_id(packet: Packet) -> str:
    """Derived from everything the packet says, so that no id ever stands on two contents."""
    return derived_id(
        "pk",
        packet.tenant,
        packet.lane,
        packet.run,
        packet.reason,
        packet.at,
        packet.epoch,
        packet.ledger_version,
        packet.digest,
    )


def stored_checkpoint(row: Any) -> StoredCheckpoint:
    """A stored row as the packet builder wants it."""
    body = _BODY.decode(row.body)
    return StoredCheckpoint.of(row, body)
