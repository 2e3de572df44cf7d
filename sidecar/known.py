"""Which messages were accepted before: identity and digest, and what was said of one item more than once.

It reads the store and remembers; it decides nothing. Two different statements of one type about one item
are two messages: the second is kept under another key (``again_key``), so all of an item's digests are needed to
tell a new one from one that came before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sidecar.chunk import Incoming, Key, again_key, names_item
from sidecar.desk import Desk

_REMEMBERED: Final = 20_000
"""Statements about items of which the digests stay in memory."""


class Known:
    """One lane's. What it remembers holds for what is committed or folded: ``forget`` when that is discarded."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._told: dict[Key, dict[bytes, None]] = {}
        """First key of an item's statements of one type → the digests of all of them, in order."""

    async def of(self, incoming: Sequence[Incoming]) -> dict[Key, bytes]:
        """The payload digests of those keys that were accepted before, by key."""
        desk = self._desk
        items = [item for item in incoming if item.key is not None]
        names = [item.key for item in items if item.key is not None]
        numbers = desk.store.keys(desk.tenant, desk.lane, names)
        maybe = []
        for item, name, number in zip(items, names, numbers, strict=True):
            item.number = number
            if desk.store.maybe_stored(number):
                maybe.append(name)
        if not maybe:
            return {}
        found = await desk.store.find_ids(desk.tenant, desk.lane, maybe)
        for key, stored in found.items():
            if names_item(key) and key not in self._told:
                self._told[key] = await self._statements(key, stored.sha256)
        return {key: stored.sha256 for key, stored in found.items()}

    async def _statements(self, key: Key, first: bytes) -> dict[bytes, None]:
        """The digests of all statements of one type about an item. Read once while the item is spoken of."""
        desk = self._desk
        told = {first: None}
        while True:
            # Twice as many each time: an item that was spoken of often must not cost a read for each.
            asked = [again_key(key, turn) for turn in range(len(told) + 1, 2 * len(told) + 1)]
            maybe = [again for again in asked if desk.store.maybe_known(desk.tenant, desk.lane, *again)]
            found = await desk.store.find_ids(desk.tenant, desk.lane, maybe) if maybe else {}
            for again in asked:
                if again not in found:
                    return told
                told[found[again].sha256] = None

    def told(self, key: Key, first: bytes) -> dict[bytes, None]:
        """The digests of all statements behind this first key, to be added to."""
        return self._told.setdefault(key, {first: None})

    def forget(self) -> None:
        """What was folded last did not reach the disk."""
        self._told.clear()

    def bound(self) -> None:
        """Let go of it all when it is much. Only with nothing on its way to the disk: it is read again there."""
        if sum(map(len, self._told.values())) > _REMEMBERED:
            self._told.clear()
