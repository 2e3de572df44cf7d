"""Stored messages of a run as the core reads them, and the digest of a range of them. CPU only, no I/O."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.codec import decode_event
from protocol.errors import ProtocolError
from sidecar.core.exchanges import TailItem
from sidecar.core.tokens import estimate
from storage.records import JournalEntry


def tail_items(entries: Sequence[JournalEntry]) -> list[TailItem]:
    """Stored messages of ``event`` and ``authority`` as the core reads them; run it off the loop."""
    items: list[TailItem] = []
    for entry in entries:
        if entry.channel == "record":
            continue
        try:
            event = decode_event(entry.body, channel=entry.channel)
        except ProtocolError:
            # Accepted by an older version under rules that were wider; it weighs nothing and is covered.
            continue
        items.append(
            TailItem(
                position=entry.position, channel=entry.channel, event=event, tokens=estimate(event).tokens
            )
        )
    return items


def range_digest(entries: Sequence[JournalEntry], through: int) -> str:
    """Digest of positions 1 to ``through``: the run's hash chain at that message."""
    entry = next(item for item in entries if item.position == through and item.channel != "record")
    return f"sha256:{entry.chain.hex()}"
