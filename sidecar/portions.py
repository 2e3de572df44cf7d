"""A range as a summariser is asked about it: one part after the other, read from storage as each is needed.

How a range is divided is ``core.material``'s. Of what was asked already nothing is kept but its number.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio.to_thread

from protocol.summary import Exchange
from sidecar.core.material import exchange_items, item_tokens, part_room, parts
from sidecar.ranges import Reading, tail_items
from storage.records import JournalEntry


class Portions:
    """The parts of what a reading yields, each as large as the window allows at that time."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._left: list[Exchange] = []
        self._sizes: list[int] = []
        self.shown = 0
        """Messages, calls and results so far."""
        self.others = 0
        """Other messages of the range so far."""

    @property
    def ended(self) -> bool:
        """Whether the last part was given out; known once ``next`` has returned."""
        return not self._left

    async def next(self, window_tokens: int, overhead_tokens: int) -> tuple[Exchange, ...]:
        """The next part, as ``core.material.parts`` cuts it off what is left. Raises StorageError."""
        room = part_room(window_tokens, overhead_tokens)
        more = True
        while more and sum(self._sizes) <= room:
            more = await self._reading.page(self._take)
        part = await self._cut(window_tokens, overhead_tokens)
        while more and len(part) == len(self._left):
            # Single messages larger than the room were shortened: there is room for others.
            more = await self._reading.page(self._take)
            part = await self._cut(window_tokens, overhead_tokens)
        del self._left[: len(part)], self._sizes[: len(part)]
        while more and not self._left:
            more = await self._reading.page(self._take)
        return part

    async def _cut(self, window_tokens: int, overhead_tokens: int) -> tuple[Exchange, ...]:
        return await anyio.to_thread.run_sync(
            lambda: next(parts(self._left, window_tokens, overhead_tokens=overhead_tokens))
        )

    def _take(self, entries: Sequence[JournalEntry]) -> None:
        items = tail_items(entries)
        shown = exchange_items(items)
        self._left += shown
        self._sizes += map(item_tokens, shown)
        self.shown += len(shown)
        self.others += len(items) - len(shown)
