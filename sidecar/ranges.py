"""Stored messages of a run as the core reads them: decoded, and a range of them page by page.

A page is read, worked on in a thread and let go before the next one is read: no more than one is in memory, however
long the run. Nothing is decided here and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import anyio
import anyio.to_thread

from protocol.codec import decode_event
from protocol.errors import ProtocolError
from sidecar.core.exchanges import TailItem
from sidecar.core.tokens import estimate
from sidecar.desk import Desk
from storage.records import JournalEntry

PAGE_MESSAGES: Final = 256
PAGE_BYTES: Final = 1 << 20
"""Of bodies, but at least one message."""
LONGEST_REST: Final = 0.25
"""Seconds."""


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


class Reading:
    """The messages of a run with after < position <= through, once, ascending.

    Where messages come in meanwhile it rests after each page as long as the page took: threads share one
    interpreter with the loop, and the intake goes first.
    """

    def __init__(self, desk: Desk, run: str, after: int, through: int) -> None:
        self._desk = desk
        self._run = run
        self._at = after
        self._through = through
        self._seen = desk.cursor.stream_seq

    @property
    def ended(self) -> bool:
        """Whether nothing is left."""
        return self._at >= self._through

    async def page(self, work: Callable[[Sequence[JournalEntry]], None]) -> bool:
        """Read the next messages and do ``work`` on them in a thread; false when there were none.

        Raises StorageError, and what ``work`` raises.
        """
        if self.ended:
            return False
        desk = self._desk
        began = desk.mono()
        messages = await desk.store.evidence(
            desk.tenant,
            desk.lane,
            self._run,
            after=self._at,
            through=self._through,
            limit=PAGE_MESSAGES,
            max_bytes=PAGE_BYTES,
        )
        if not messages:
            self._at = self._through
            return False
        self._at = messages[-1].entry.position
        await anyio.to_thread.run_sync(work, [message.entry for message in messages])
        if desk.cursor.stream_seq != self._seen:
            self._seen = desk.cursor.stream_seq
            await anyio.sleep(min(max(0.0, desk.mono() - began), LONGEST_REST))
        return True

    async def pages(self, work: Callable[[Sequence[JournalEntry]], None]) -> None:
        """The same with all that is left."""
        while await self.page(work):
            pass


async def range_digest(desk: Desk, run: str, through: int) -> str | None:
    """Digest of positions 1 to ``through``: the run's hash chain at that message; None if it is not there."""
    entry = await desk.store.entry(desk.tenant, desk.lane, run, position=through)
    return None if entry is None else f"sha256:{entry.chain.hex()}"
