"""Which (run, channel, id) are known, for ever, at a cost that does not grow with history.

A unique index over ids grows in random order and makes every insert dearer. Here an id is a 64-bit key; the
newest keys are a dictionary (rebuilt at start from the journal), older ones sorted segments in the database
(``segments.py``), each with a filter in memory of about two bytes a key. A key not found in any of them is
certainly new; one found is confirmed by reading the journal. This module reads, it never writes.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Final

from msgspec import Struct

from storage.errors import StorageBusy
from storage.records import Channel, StoredId

CHANNELS: Final[tuple[Channel, ...]] = ("event", "authority", "record")
CHANNEL_NO: Final[dict[str, int]] = {name: number for number, name in enumerate(CHANNELS)}
SIGN: Final = 1 << 63
"""Keys are unsigned in memory and in blocks; SQLite's integers are signed, so columns hold key - SIGN."""
PAIR: Final = 16
"""Bytes of one (key, entry) pair: two big-endian 64-bit numbers, so that pairs sort as bytes."""
BLOCK_PAIRS: Final = 240
"""A block of so many pairs fills a page of 4 KiB, or half one of 8 KiB, and needs no overflow page."""
BUCKET_KEYS: Final = 32
_ATTEMPTS: Final = 5

IdKey = tuple[str, Channel, str]
"""(run, channel, event id)."""


def identity_key(tenant: str, lane: str, run: str, channel: str, event_id: str) -> int:
    """The 64-bit key of a message's identity. Two identities may share one; that costs a look, no more."""
    (key,) = identity_keys(tenant, lane, [(run, channel, event_id)])
    return key


def identity_keys(tenant: str, lane: str, names: Iterable[tuple[str, str, str]]) -> list[int]:
    """``identity_key`` of each (run, channel, event id)."""
    begin = f"{tenant}\0{lane}\0"
    return [
        int.from_bytes(
            blake2b(f"{begin}{run}\0{channel}\0{event_id}".encode(), digest_size=8).digest(), "big"
        )
        for run, channel, event_id in names
    ]


class Segment(Struct, frozen=True):
    """The filter of one sealed segment: a key's high bits choose a bucket, its two low bytes are kept."""

    number: int
    level: int
    count: int
    last_entry: int
    shift: int
    offsets: array[int]
    high: bytes
    low: bytes

    def ranks(self, key: int) -> Iterator[int]:
        """Where in the sorted order ``key`` may be; a false hit in about 1 of 2000 cases."""
        bucket = key >> self.shift
        end = self.offsets[bucket + 1]
        first, second = (key >> 8) & 255, key & 255
        at = self.high.find(first, self.offsets[bucket], end)
        while at >= 0:
            if self.low[at] == second:
                yield at
            at = self.high.find(first, at + 1, end)


class Identity:
    """The ids in memory. Changed on the writer's thread only, after a commit; read from any thread.

    Readers look at the newest keys first and at the segments second; the writer publishes a segment before
    it lets go of the keys it took over. So no reader ever misses a key in between.
    """

    def __init__(self) -> None:
        self.newest: dict[int, int] = {}
        self.twins: dict[int, list[int]] = {}
        """Further entries of a key in ``newest``: two identities with one key."""
        self.segments: tuple[Segment, ...] = ()

    def add(self, keys: Iterable[tuple[int, int]]) -> None:
        """Take (key, entry) pairs of a committed transaction."""
        for key, entry in keys:
            if key in self.newest:
                self.twins.setdefault(key, []).append(entry)
            else:
                self.newest[key] = entry

    def maybe(self, key: int) -> bool:
        """False: certainly not stored. True: probably stored."""
        if key in self.newest:
            return True
        first, second = (key >> 8) & 255, key & 255
        for segment in self.segments:
            bucket = key >> segment.shift
            offsets = segment.offsets
            at = segment.high.find(first, offsets[bucket], offsets[bucket + 1])
            if at >= 0 and (segment.low[at] == second or next(segment.ranks(key), None) is not None):
                return True
        return False

    def find(
        self, connection: sqlite3.Connection, lane_no: int, wanted: Sequence[tuple[IdKey, int]]
    ) -> dict[IdKey, StoredId]:
        """Of (identity, key) pairs those that are stored, confirmed in the journal.

        Opens and ends its own read transactions: a merge may retire a segment between the look in memory and
        the snapshot, which shows as a missing block and is looked up anew.
        """
        for _ in range(_ATTEMPTS):
            newest, twins, segments = self.newest, self.twins, self.segments
            connection.execute("BEGIN")
            try:
                found = {}
                for identity, key in wanted:
                    entries = _candidates(connection, key, newest, twins, segments)
                    if entries is None:
                        break
                    stored = _confirm(connection, lane_no, identity, entries)
                    if stored is not None:
                        found[identity] = stored
                else:
                    return found
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
        raise StorageBusy("identity segments changed under every look-up")


def _candidates(
    connection: sqlite3.Connection,
    key: int,
    newest: dict[int, int],
    twins: dict[int, list[int]],
    segments: tuple[Segment, ...],
) -> list[int] | None:
    entries = [newest[key], *twins.get(key, ())] if key in newest else []
    for segment in segments:
        for rank in segment.ranks(key):
            block, at = divmod(rank, BLOCK_PAIRS)
            row = connection.execute(
                "SELECT pairs FROM id_blocks WHERE block = ?", ((segment.number << 24) + block,)
            ).fetchone()
            if row is None:
                return None
            pair = row[0][at * PAIR : (at + 1) * PAIR]
            if int.from_bytes(pair[:8], "big") == key:
                entries.append(int.from_bytes(pair[8:], "big"))
    return entries


def _confirm(
    connection: sqlite3.Connection, lane_no: int, identity: IdKey, entries: Iterable[int]
) -> StoredId | None:
    run, channel, event_id = identity
    # A message stored again in its right place counts there.
    for entry in sorted(entries, reverse=True):
        row = connection.execute(
            "SELECT h.sha256, h.version, h.position FROM heads h JOIN runs r USING (run_no) "
            "WHERE h.entry = ? AND h.event_id = ? AND h.channel = ? AND r.run = ? AND r.lane_no = ?",
            (entry, event_id, CHANNEL_NO[channel], run, lane_no),
        ).fetchone()
        if row is not None:
            return StoredId(entry=entry, sha256=row[0], version=row[1], position=row[2])
    return None
