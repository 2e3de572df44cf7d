"""Resume packets of one lane: builds them from memory, publishes the ones that say something new.

It gathers what the core's packet builder needs and paces publishing (at most one a second per run; the
last state is always published). What a packet says is decided in ``sidecar.core``.
"""

from __future__ import annotations

from typing import Final

import anyio
import msgspec
import structlog

from protocol import subjects
from protocol.codec import encode
from protocol.handoff import CoversThrough, Packet, PacketReason, Projector
from protocol.state import StateCheckpoint, StatePacket
from protocol.summary import Summary
from sidecar.core import family, room
from sidecar.core.packet import BudgetFigures, Built, PacketInputs, build_packet
from sidecar.core.resume import StoodOn
from sidecar.desk import Desk
from sidecar.notices import derived_id
from sidecar.runs import HotRun
from sidecar.view import View
from storage.errors import StorageError
from storage.records import CheckpointRow, OutboxRow, PacketRow

_PACE_SECONDS: Final = 1.0
_PACE_SHARE: Final = 10
"""Of the time between two packets of a run, at most one part in so many is spent on building them."""
_TICK_SECONDS: Final = 0.05
_REMEMBERED: Final = 2_000
_WIRE_PER_TEXT: Final = 4
"""No packet is larger than so many times its text: each text stands in it twice, at worst with every letter
escaped, and an eighth of it lists cleared results."""
_NO_ID: Final = "pk-" + 24 * "0"
"""As wide as a real id, for measuring."""

log = structlog.get_logger(__name__)


class StoredBody(msgspec.Struct, kw_only=True):
    """What of a checkpoint is stored in its body, beside the columns of its row."""

    summarizer: str
    projector: Projector
    attempt_id: str
    parent_checkpoint_id: str | None
    summary: Summary


_BODY = msgspec.json.Decoder(StoredBody)


class KeptCheckpoint(msgspec.Struct):
    """The checkpoint a kept packet stands on."""

    id: str


class KeptTail(msgspec.Struct):
    """How far the run was when the packet was made."""

    through_position: int


class KeptPacket(msgspec.Struct):
    """What of a kept packet (``PacketRow``) the message list to go on with needs."""

    packet_id: str
    text: str
    checkpoint: KeptCheckpoint | None
    tail: KeptTail


_KEPT = msgspec.json.Decoder(KeptPacket)


def kept_packet(row: PacketRow) -> KeptPacket:
    """A packet that shortened the context, as it was published."""
    return _KEPT.decode(row.body)


def state_packet(packet: KeptPacket | Packet) -> StatePacket:
    """The same for the state stream."""
    return StatePacket(
        packet_id=packet.packet_id,
        text=packet.text,
        checkpoint_id=None if packet.checkpoint is None else packet.checkpoint.id,
        position=packet.tail.through_position,
    )


def adopted_packet(run: str, packet: StatePacket) -> PacketRow:
    """Another owner's packet as it is kept here."""
    checkpoint = None if packet.checkpoint_id is None else KeptCheckpoint(packet.checkpoint_id)
    kept = KeptPacket(packet.packet_id, packet.text, checkpoint, KeptTail(packet.position))
    return PacketRow(run=run, packet_id=packet.packet_id, body=encode(kept))


def stored_checkpoint(row: CheckpointRow) -> StateCheckpoint:
    """A stored row as packet and state show it."""
    body = _BODY.decode(row.body)
    return StateCheckpoint(
        id=row.checkpoint_id,
        version=row.version,
        summarizer=body.summarizer,
        projector=body.projector,
        covers_through=CoversThrough(position=row.covers_through, event_id=row.event_id or None),
        range_digest=row.range_digest,
        parent_checkpoint_id=body.parent_checkpoint_id,
        summary=body.summary,
    )


def packet_id(packet: Packet) -> str:
    """Derived from everything the packet says, so that no id ever stands on two contents.

    One that is published is built once for a ledger version, so its moment need not tell it from others,
    and the same input gives the same id.
    """
    return derived_id(
        "pk",
        packet.tenant,
        packet.lane,
        packet.run,
        packet.reason,
        packet.at if packet.reason == "asked" else "",
        packet.epoch,
        packet.ledger_version,
        packet.digest,
    )


class Packets:
    """Builds under the lock, publishes through the outbox."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._dirty: dict[str, PacketReason] = {}
        self._due: dict[str, float] = {}
        self._checkpoints: dict[str, StateCheckpoint | None] = {}
        self._asked: dict[tuple[str, str], StoodOn] = {}
        self._wake = anyio.Event()

    def mark(self, run: str, reason: PacketReason) -> None:
        """The run changed; ``reason`` is why a packet may be due (``changed``: if it says anything new).

        The first reason that asks for a packet anyway stands; only a takeover is told before every other.
        """
        if reason == "takeover" or self._dirty.get(run, "changed") == "changed":
            self._dirty[run] = reason
        self._wake.set()

    def mark_descendants(self, run: str) -> None:
        """What holds for a run holds for those it spawned: their packets may say something new."""
        runs = self._desk.runs.ledgers
        for ledger in family.members(runs, run) if run in runs else ():
            name = ledger.head.run
            if name != run and family.descends(runs, name, run):
                self.mark(name, "changed")

    def forget(self, run: str) -> None:
        """The run's newest checkpoint changed: read it again next time."""
        self._checkpoints.pop(run, None)

    def rest(self) -> None:
        """Let go of what is known of runs that left memory; it is read again."""
        hot = self._desk.runs.hot
        self._checkpoints = {run: known for run, known in self._checkpoints.items() if run in hot}

    async def checkpoint(self, run: str) -> StateCheckpoint | None:
        """The newest committed checkpoint of the run's live chain."""
        if run not in self._checkpoints:
            desk = self._desk
            row = await desk.store.newest_checkpoint(desk.tenant, desk.lane, run)
            if len(self._checkpoints) >= _REMEMBERED:
                self._checkpoints.clear()
            self._checkpoints[run] = None if row is None else stored_checkpoint(row)
        return self._checkpoints[run]

    async def shortening(self, run: str) -> StatePacket | None:
        """The newest published packet that shortened the run's context, for the state stream; hold the lock."""
        wanted = self._desk.runs.hot[run].view.published.shortening_id
        if not wanted:
            return None
        row = await self._desk.store.packet(self._desk.tenant, self._desk.lane, run)
        return None if row is None or row.packet_id != wanted else state_packet(kept_packet(row))

    def stood_on(self, packet: Packet) -> StoodOn:
        """What the packet, just built, was made of; hold the lock."""
        return StoodOn(
            checkpoint=0 if packet.checkpoint is None else packet.checkpoint.version,
            version=packet.ledger_version,
            received=self._desk.runs.received(packet.run),
        )

    def remembered(self, run: str, packet_id: str) -> StoodOn | None:
        """What this packet was made of, if it went out lately."""
        return self._desk.runs.hot[run].view.packets.get(packet_id) or self._asked.get((run, packet_id))

    async def asked(self, run: str) -> Packet:
        """A fresh packet for one who asks; hold the lock, the run must be hot."""
        packet = (await self.build(run, "asked")).packet
        if len(self._asked) >= _REMEMBERED:
            self._asked.clear()
        self._asked[run, packet.packet_id] = self.stood_on(packet)
        return packet

    async def short(self, run: str) -> bool:
        """Whether what must survive does not fit a message of the broker; hold the lock, the run must be hot.

        The core's own bound goes by the window alone. A packet is built only where the text is near the limit.
        """
        desk, runs = self._desk, self._desk.runs
        text = await desk.aside(run, lambda: room.text_bytes(runs.lane, runs.ledgers, run), shown=True)
        if _WIRE_PER_TEXT * (text + room.FRAME_BYTES) <= desk.message_room:
            return False
        return (await self.build(run, "asked")).choice in ("postpone", "pause")

    async def build(self, run: str, reason: PacketReason) -> Built:
        """A packet of the run as it stands; hold the lock, the run must be hot."""
        return await self.build_on(run, reason, await self.checkpoint(run), self._desk.runs.hot[run].view)

    async def build_on(
        self,
        run: str,
        reason: PacketReason,
        checkpoint: StateCheckpoint | None,
        view: View,
        figures: BudgetFigures | None = None,
    ) -> Built:
        """As ``build_with``, and the loop goes on meanwhile where the ledger is large."""
        return await self._desk.aside(
            run, lambda: self.build_with(run, reason, checkpoint, view, figures), shown=True
        )

    def build_with(
        self,
        run: str,
        reason: PacketReason,
        checkpoint: StateCheckpoint | None,
        view: View,
        figures: BudgetFigures | None = None,
    ) -> Built:
        """A packet on this checkpoint and view, whether or not they are committed yet."""
        desk = self._desk
        head = desk.runs.hot[run].ledger.head
        covered = 0 if checkpoint is None else checkpoint.covers_through.position
        built = build_packet(
            PacketInputs(
                tenant=desk.tenant,
                lane=desk.lane,
                run=run,
                epoch=desk.voice.epoch,
                at=desk.now_text(),
                packet_id=_NO_ID,
                reason=reason,
                runs=desk.runs.ledgers,
                settings=desk.runs.lane.settings,
                checkpoint=checkpoint,
                tail=view.tail(head, covered),
                cleared=[item.result for item in view.cleared if item.position > covered],
                budget=figures if figures is not None else view.figures(desk.budget),
                packet_tokens=desk.budget.packet_tokens,
                user_tokens=desk.budget.user_tokens,
                recent=view.recent,
                missing_artifacts=view.missing_artifacts,
                wire_bytes=desk.message_room,
                now=desk.now(),
            )
        )
        return built._replace(packet=msgspec.structs.replace(built.packet, packet_id=packet_id(built.packet)))

    def row(self, packet: Packet) -> OutboxRow:
        """The packet as a message to be sent."""
        return OutboxRow(
            stream="out",
            subject=subjects.outbound(packet.tenant, packet.lane, packet.run, "packet"),
            msg_id=packet.packet_id,
            payload=encode(packet),
        )

    def kept(self, packet: Packet, row: OutboxRow) -> PacketRow:
        """A packet that shortens the context, as ``ask.context`` will show it."""
        return PacketRow(run=packet.run, packet_id=packet.packet_id, body=row.payload)

    def choice_notice(self, hot: HotRun, view: View, built: Built) -> list[OutboxRow]:
        """Note in the view how the packet was made to fit; the notice that says so, if that is news."""
        news = built.choice is not None and view.choice != built.choice
        view.choice = built.choice
        if not news:
            return []
        desk = self._desk
        desk.metrics.chose(str(built.choice))
        return [
            desk.voice.notice(
                hot.ledger.head.run,
                "choice",
                desk.now(),
                (built.choice, built.packet.ledger_version),
                choice=built.choice,
                reason="what must survive does not fit the packet's budget",
            )
        ]

    def count(self, built: Built) -> None:
        """Metrics of a packet that was committed."""
        self._desk.metrics.packet(built.packet.verdict, built.tokens)

    async def run(self) -> None:
        """Publish packets of changed runs until cancelled."""
        while True:
            await self._wake.wait()
            if not self._desk.caught_up:
                await anyio.sleep(_TICK_SECONDS)
                continue
            self._wake = anyio.Event()
            now = self._desk.mono()
            waiting = False
            for run in list(self._dirty):
                # Read now: while another run's packet was built a stronger reason may have come.
                reason = self._dirty[run]
                if reason == "changed" and self._due.get(run, now) > now:
                    waiting = True
                    continue
                del self._dirty[run]
                try:
                    await self.publish(run, reason)
                except StorageError as error:
                    self.mark(run, reason)
                    waiting = True
                    log.warning("packet not stored, tried again", run=run, error=str(error))
            if waiting:
                await anyio.sleep(_TICK_SECONDS)
                self._wake.set()

    async def publish(self, run: str, reason: PacketReason) -> None:
        """Publish a packet of the run if it says something new, or the reason asks for one anyway."""
        desk = self._desk
        async with desk.changing():
            await desk.runs.load([run])
            hot = desk.runs.hot.get(run)
            if hot is None:
                return
            mode, bypass = desk.config.mode_for(hot.ledger.head.labels)
            if mode != "live" or bypass:
                return
            if len(self._due) >= _REMEMBERED * 5:
                self._due.clear()
            began = desk.mono()
            built = await self.build(run, reason)
            # A packet that takes long is made more seldom, so that one run does not take the lane for itself.
            took = desk.mono() - began
            self._due[run] = began + max(_PACE_SECONDS, took * _PACE_SHARE)
            view, packet = hot.view, built.packet
            said = view.published
            same = (said.protected_digest, said.verdict) == (packet.protected_digest, packet.verdict)
            same = same and view.choice == built.choice
            if same and reason == "changed":
                return
            outbox = [self.row(packet), *self.choice_notice(hot, view, built)]
            view.note_packet(packet, self.stood_on(packet))
            await desk.commit(touched=[run], outbox=outbox)
            self.count(built)
