"""Resume packets as they come: read with suspicion, and the one kept that is to be taken up.

What a reader must understand and does not, belongs to another run or does not match its own digest is refused by
name and never half-read. It decides nothing about when a packet is taken up.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, Final

import anyio

from protocol.client.errors import PacketRefused
from protocol.codec import decode_struct, digest
from protocol.errors import ProtocolError
from protocol.handoff import DIGEST_EXCLUDES, Packet

_KNOWN: Final = frozenset(Packet.__struct_encode_fields__)
_REMEMBERED: Final = 32

_log = logging.getLogger("watchkeeper")


def read_packet(payload: bytes, tenant: str, lane: str, run: str) -> Packet:
    """Decode a packet of this run. Raises PacketRefused."""
    try:
        fields = decode_struct(payload, dict[str, Any])
    except ProtocolError as error:
        raise PacketRefused("malformed", error.detail) from error
    if fields.get("type") != "resume.packet":
        raise PacketRefused("malformed", "not a resume packet")
    version = fields.get("v")
    if isinstance(version, int) and version > 1:
        raise PacketRefused("unsupported_version", f"version {version}, known is 1")
    names = fields.get("must_understand", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise PacketRefused("malformed", "must_understand is no list of names")
    unknown = sorted(set(names) - _KNOWN)
    if unknown:
        raise PacketRefused("must_understand", ", ".join(ascii(name[:80]) for name in unknown[:8]))
    try:
        packet = decode_struct(payload, Packet)
    except ProtocolError as error:
        raise PacketRefused("malformed", error.detail) from error
    if (packet.tenant, packet.lane, packet.run) != (tenant, lane, run):
        raise PacketRefused("run_mismatch", f"of run {packet.run[:128]} in lane {packet.lane[:128]}")
    try:
        told = digest({name: value for name, value in fields.items() if name not in DIGEST_EXCLUDES})
    except ValueError as error:
        raise PacketRefused("malformed", str(error)) from error
    if packet.v != 1 or told != packet.digest:
        raise PacketRefused("digest_mismatch", "what it says is not what its digest is over")
    return packet


def rank(packet: Packet) -> tuple[int, int]:
    """What makes one packet win over another: its checkpoint, then how much of the run is in it."""
    return (0 if packet.checkpoint is None else packet.checkpoint.version, packet.ledger_version)


class PacketBox:
    """The packets of one run. Not thread-safe: one event loop."""

    def __init__(self, tenant: str, lane: str, run: str) -> None:
        self._address = (tenant, lane, run)
        self._changed = anyio.Event()
        self._given: Packet | None = None
        self._done = (-1, -1)
        self._covered = 0
        self._cleared: frozenset[str] = frozenset()
        self.newest: Packet | None = None
        self.refused: deque[PacketRefused] = deque(maxlen=_REMEMBERED)
        """Packets that were refused and not told of yet."""

    def put(self, payload: bytes) -> None:
        """A packet came. One that is refused is told to whoever waits next; one of an older checkpoint is dropped."""
        try:
            packet = read_packet(payload, *self._address)
        except PacketRefused as refused:
            _log.warning("packet refused: %s", refused)
            self.refused.append(refused)
            self._tell()
            return
        if self.newest is None or rank(packet) >= rank(self.newest):
            self.newest = packet
            self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    @property
    def due(self) -> Packet | None:
        """The newest packet unless it, or a newer one, was taken up."""
        newest = self.newest
        return newest if newest is not None and rank(newest) > self._done else None

    @property
    def shortened(self) -> Packet | None:
        """The newest packet if it covers or clears what those taken up did not."""
        packet = self.due
        if packet is None:
            return None
        more = rank(packet)[0] > self._covered or any(
            item.event_id not in self._cleared for item in packet.cleared
        )
        return packet if more else None

    async def following(self) -> Packet:
        """Wait for a packet that was not taken up and not returned here before. Raises PacketRefused, once for each."""
        while True:
            if self.refused:
                raise self.refused.popleft()
            packet = self.due
            if packet is not None and packet is not self._given:
                self._given = packet
                return packet
            await self._changed.wait()

    def taken(self, packet: Packet) -> None:
        """The agent goes on from this packet."""
        self._done = max(self._done, rank(packet))
        self._covered = max(self._covered, rank(packet)[0])
        self._cleared = frozenset(item.event_id for item in packet.cleared)
