"""Where evidence is read from, and the page it is put on.

Reads from the store only, in bounded pieces and without any lock. What may be seen was decided before
(``core.evidence``, ``core.scope``); nothing here widens it.
"""

from __future__ import annotations

from typing import Final

import anyio.to_thread
import msgspec
from msgspec import UNSET, Raw, Struct

from protocol import asks
from protocol.codec import decode_event, digest_bytes, encode
from protocol.errors import ProtocolError
from protocol.events import item_id
from sidecar.core import evidence
from sidecar.core.evidence import Wanted
from sidecar.core.longtext import LongText
from sidecar.core.paging import Cut, joined
from sidecar.desk import Desk
from storage.evidence import StoredMessage
from storage.identity import IdKey

READ_MESSAGES: Final = 64
_READ_BYTES: Final = 1 << 20
"""Bounds of one read of the journal."""
MAX_ITEMS: Final = 1_000
"""Of one page."""
_BEGIN_SHARE: Final = 0.6
"""Of a page must be left for a message that does not fit one to begin there; else it begins the next."""
_DIGEST_VERSIONS: Final = 200_000
"""Heads looked through for a digest."""


class _Grave(Struct):
    """What of a tombstone is looked at."""

    position: int = 0


class Found(Struct):
    """One thing found: its head, and the JSON of message and ledger view; ``content`` is the message's where that is
    too long to stand in it."""

    head: asks.FetchItem
    event: bytes | None = None
    record: bytes | None = None
    content: LongText | None = None


class Lookup:
    """One lane's journal and checkpoints, as evidence."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def newest(self, run: str) -> int | None:
        """The run's newest position by the store alone, None for a run never stored."""
        rows = await self._desk.store.load_family(self._desk.tenant, self._desk.lane, run, live_only=True)
        return next((row.position for row in rows if row.run == run), None)

    async def buried(self, run: str) -> int:
        """The newest position a forgotten run had, by its tombstone; 0 where there is none."""
        graves = await self._desk.store.tombstones(self._desk.tenant, self._desk.lane)
        bodies = [row.body for row in graves if row.run == run]
        return max((msgspec.json.decode(body, type=_Grave).position for body in bodies), default=0)

    async def read(self, run: str, after: int, through: int) -> list[StoredMessage]:
        desk = self._desk
        return await desk.store.evidence(
            desk.tenant,
            desk.lane,
            run,
            after=after,
            through=through,
            limit=READ_MESSAGES,
            max_bytes=_READ_BYTES,
        )

    async def position_of(self, thing: Wanted) -> tuple[Wanted, Found | None]:
        """Find out the thing's position; or the item at once, if it is at none."""
        place = thing.place
        if place == "position":
            return thing, None
        if place == "record":
            return thing, Found(asks.FetchItem(ref=thing.ref, status="found"), record=thing.record)
        if place == "checkpoint":
            return thing, await self._checkpoint(thing)
        if place == "event":
            position = await self._named(thing.run, thing.name)
            if position is None and thing.instead is not None:
                thing = msgspec.structs.replace(thing, run=thing.instead)
                position = await self._named(thing.run, thing.name)
        else:
            position = await self._with_digest(thing.run, thing.name) if place == "sha256" else None
        if position is None:
            return thing, Found(asks.FetchItem(ref=thing.ref, status=thing.status))
        return msgspec.structs.replace(thing, position=position), None

    async def _named(self, run: str, event_id: str) -> int | None:
        """Position of the last message of the event channel with this id."""
        desk = self._desk
        newest: tuple[int, int, str] | None = None
        first, count = 1, 1
        while True:
            keys: list[IdKey] = [
                (run, "event", name)
                for name in evidence.identities(event_id, first, count)
                if desk.store.maybe_known(desk.tenant, desk.lane, run, "event", name)
            ]
            found = await desk.store.find_ids(desk.tenant, desk.lane, keys) if keys else {}
            for key, stored in found.items():
                newest = max(newest or (0, 0, ""), (stored.version, stored.position, key[2]))
            if not any("#" in name for _, _, name in found):
                break
            first, count = first + count, 16
        if newest is None:
            return None
        # Known by its id alone it is at no place: the stream no longer held what was before it.
        there = await desk.store.entry(desk.tenant, desk.lane, run, position=newest[1], channel="event")
        return newest[1] if there is not None and there.event_id == newest[2] else None

    async def _with_digest(self, run: str, wanted: str) -> int | None:
        """Position of the message whose bytes have this digest; the run's heads are read through."""
        desk = self._desk
        version = 0
        while version < _DIGEST_VERSIONS:
            heads = await desk.store.tail(
                desk.tenant, desk.lane, run, after=0, after_version=version, limit=4_096, bodies=False
            )
            for head in heads:
                if head.sha256.hex() == wanted and head.channel != "record":
                    return head.position
            if not heads:
                return None
            version = heads[-1].version
        return None

    async def _checkpoint(self, thing: Wanted) -> Found:
        desk = self._desk
        row = await desk.store.checkpoint(desk.tenant, desk.lane, thing.run, thing.name)
        if row is None or row.chain != "live":
            return Found(asks.FetchItem(ref=thing.ref, status="not_found"))
        fields = {
            "id": row.checkpoint_id,
            "version": row.version,
            "parent_id": row.parent_id,
            "covers_through": {"position": row.covers_through, "event_id": row.event_id or None},
            "range_digest": row.range_digest,
            "created_at": row.created_at,
            **msgspec.json.decode(row.body),
        }
        head = asks.FetchItem(ref=thing.ref, status="found", digest=digest_bytes(row.body))
        return Found(head, record=encode(fields))


class Page:
    """Items of one reply, within so many bytes."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._left = room
        self.items: list[asks.FetchItem] = []

    async def take(self, item: Found, offset: int, check: str) -> tuple[int, str] | None:
        """Put the item on, from character ``offset`` on if it is the one cut before (``check``); where it goes
        on if not all of it fits: on the next page."""
        if len(self.items) >= MAX_ITEMS:
            return 0, ""
        if _least(item) <= self._room and not offset:
            whole = await anyio.to_thread.run_sync(_whole, item) if item.content else _whole(item)
            cost = len(encode(whole)) + 1
            if cost <= self._left:
                self._put(whole, cost)
                return None
            if cost <= self._room:
                return 0, ""
        if self.items and self._left < self._room * _BEGIN_SHARE:
            return 0, ""
        heading = len(encode(item.head)) + 96
        page = max(0, self._room - heading)
        cut = await anyio.to_thread.run_sync(Cut, item.event, item.record, page, item.content)
        if cut.check != check:
            offset = 0
        if not cut.total:
            whole = _whole(item)
            self._put(whole, len(encode(whole)) + 1)
            return None
        piece = cut.piece(offset, self._left - heading)
        part = msgspec.structs.replace(
            item.head,
            event=UNSET if piece.event is None else Raw(piece.event),
            record=UNSET if piece.record is None else Raw(piece.record),
            part=piece.part,
        )
        self._put(part, len(encode(part)) + 1)
        if piece.following is None:
            return None
        return piece.following, cut.check

    def _put(self, item: asks.FetchItem, cost: int) -> None:
        self.items.append(item)
        self._left -= cost


def _least(item: Found) -> int:
    """Bytes the message takes at least."""
    return len(item.event or b"") if item.content is None else len(item.content.raw)


def _whole(item: Found) -> asks.FetchItem:
    event = item.event
    if event is not None and item.content is not None:
        event = joined(event, item.content)
    return msgspec.structs.replace(
        item.head,
        event=UNSET if event is None else Raw(event),
        record=UNSET if item.record is None else Raw(item.record),
    )


def about(message: StoredMessage, item: str) -> bool:
    """Whether the message speaks of this item and no other."""
    entry = message.entry
    if not entry.body or not message.sound:
        return False
    try:
        return item_id(decode_event(entry.body, channel=entry.channel)) == item
    except ProtocolError:
        return False
