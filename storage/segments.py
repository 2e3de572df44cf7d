"""Sealing the newest identity keys into sorted segments, and merging segments in small steps.

Log-structured: four segments of a level become one of the next, so a look-up meets few of them and a key is
rewritten a logarithmic number of times, always in order. Runs on the writer's thread between commits, each
step a short transaction of its own; whatever a crash leaves half done is dropped at the next start.
"""

from __future__ import annotations

import sqlite3
import sys
from array import array
from bisect import bisect_left
from itertools import chain, starmap
from struct import Struct
from typing import Final

from storage.identity import BLOCK_PAIRS, BUCKET_KEYS, PAIR, SIGN, Identity, Segment

SEAL_KEYS: Final = 32_768
FAN_IN: Final = 4
STEP_EVERY: Final = 4_096
"""Newly committed messages between two steps of merging."""
STEP_KEYS: Final = 32_768
"""Keys a step merges: eight levels keep up with ``STEP_EVERY``."""
_IN_USE, _RETIRED, _BUILDING = 0, 1, 2
_pack = Struct(">QQ").pack
"""A key and its entry as a pair."""


def load(connection: sqlite3.Connection, identity: Identity) -> None:
    """Fill ``identity`` from the database; drops segments that were retired or never finished."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for (number,) in connection.execute(
            "SELECT segment FROM id_segments WHERE state <> ?", (_IN_USE,)
        ).fetchall():
            _drop(connection, number)
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    identity.segments = tuple(
        _unpack(*row)
        for row in connection.execute(
            "SELECT segment, level, count, last_entry, filter FROM id_segments ORDER BY segment"
        )
    )
    sealed = max((segment.last_entry for segment in identity.segments), default=0)
    identity.add(
        (key + SIGN, entry)
        for key, entry in connection.execute("SELECT identity, entry FROM heads WHERE entry > ?", (sealed,))
    )


class Compaction:
    """Keeps the segments few. ``seal_keys`` is smaller in tests only."""

    def __init__(self, identity: Identity, *, seal_keys: int = SEAL_KEYS, step_keys: int = STEP_KEYS) -> None:
        self._identity = identity
        self._seal_keys = seal_keys
        self._step_keys = step_keys
        self._step_every = min(STEP_EVERY, seal_keys)
        self._since = 0
        self._merge: _Merge | None = None
        self._retired: tuple[int, ...] = ()

    def committed(self, messages: int) -> bool:
        """Count committed messages; True when ``step`` has something to do."""
        self._since += messages
        if len(self._identity.newest) >= self._seal_keys:
            return True
        return self._since >= self._step_every and (
            self._merge is not None or bool(self._retired) or self._due() is not None
        )

    def step(self, connection: sqlite3.Connection) -> None:
        """One bounded piece of work in its own transaction. A failed step changes nothing."""
        connection.execute("BEGIN IMMEDIATE")
        try:
            if len(self._identity.newest) >= self._seal_keys:
                self._seal(connection)
            elif self._retired:
                for number in self._retired:
                    _drop(connection, number)
                connection.execute("COMMIT")
                self._retired = ()
            else:
                self._advance(connection)
                self._since = 0
        except BaseException:
            # Half a merge in memory does not match what the transaction left.
            self._merge = None
            raise
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def _seal(self, connection: sqlite3.Connection) -> None:
        newest, twins = self._identity.newest, self._identity.twins
        doubled = [(key, entry) for key, more in twins.items() for entry in more]
        pairs = sorted(starmap(_pack, chain(newest.items(), doubled)))
        last = max(chain(newest.values(), (entry for _, entry in doubled)))
        builder = _Builder(_new_number(connection), 0, len(pairs), last)
        connection.execute(
            "INSERT INTO id_segments VALUES (?, 0, ?, ?, ?, x'')",
            (builder.number, _BUILDING, len(pairs), last),
        )
        builder.take(connection, b"".join(pairs))
        segment = builder.finish(connection)
        connection.execute("COMMIT")
        self._identity.segments = (*self._identity.segments, segment)
        self._identity.newest, self._identity.twins = {}, {}

    def _due(self) -> tuple[Segment, ...] | None:
        levels: dict[int, list[Segment]] = {}
        for segment in self._identity.segments:
            same = levels.setdefault(segment.level, [])
            same.append(segment)
            if len(same) == FAN_IN:
                return tuple(same)
        return None

    def _advance(self, connection: sqlite3.Connection) -> None:
        if self._merge is None:
            inputs = self._due()
            if inputs is None:
                return
            # What a failed or forgotten merge left behind would collide with the new number's blocks.
            for (number,) in connection.execute(
                "SELECT segment FROM id_segments WHERE state = ?", (_BUILDING,)
            ).fetchall():
                _drop(connection, number)
            self._merge = _Merge(connection, inputs)
        merge = self._merge
        segment = merge.step(connection, self._step_keys)
        if segment is None:
            connection.execute("COMMIT")
            return
        numbers = tuple(old.number for old in merge.inputs)
        connection.executemany(
            "UPDATE id_segments SET state = ? WHERE segment = ?", [(_RETIRED, number) for number in numbers]
        )
        connection.execute("COMMIT")
        kept = (old for old in self._identity.segments if old.number not in numbers)
        self._identity.segments = (segment, *kept)
        # Their blocks stay for one step more: a reader may have looked in memory just before.
        self._merge, self._retired = None, numbers


class _Merge:
    """A merge under way. Works through ranges of keys: in each, every input is one slice, already sorted."""

    def __init__(self, connection: sqlite3.Connection, inputs: tuple[Segment, ...]) -> None:
        self.inputs = inputs
        count = sum(segment.count for segment in inputs)
        last = max(segment.last_entry for segment in inputs)
        level = inputs[0].level + 1
        self._builder = _Builder(_new_number(connection), level, count, last)
        self._bits = min(64 - segment.shift for segment in inputs)
        self._at = 0
        connection.execute(
            "INSERT INTO id_segments VALUES (?, ?, ?, ?, ?, x'')",
            (self._builder.number, level, _BUILDING, count, last),
        )

    def step(self, connection: sqlite3.Connection, keys: int) -> Segment | None:
        """Merge about ``keys`` more; the new segment when it is whole."""
        done = 0
        while self._at < 1 << self._bits and done < keys:
            slices = b"".join(_range(connection, old, self._bits, self._at) for old in self.inputs)
            # Four sorted runs one after the other: the sort only merges them.
            pairs = sorted(slices[at : at + PAIR] for at in range(0, len(slices), PAIR))
            self._builder.take(connection, b"".join(pairs))
            done += len(pairs)
            self._at += 1
        return self._builder.finish(connection) if self._at == 1 << self._bits else None


class _Builder:
    """Writes a segment's sorted pairs block by block and grows its filter."""

    def __init__(self, number: int, level: int, count: int, last_entry: int) -> None:
        self.number = number
        self._level = level
        self._count = count
        self._last = last_entry
        self._shift = _shift(count)
        self._offsets = array("I", [0])
        self._high = bytearray()
        self._low = bytearray()
        self._open = b""
        self._blocks = 0

    def take(self, connection: sqlite3.Connection, pairs: bytes) -> None:
        before = len(self._high)
        self._high += pairs[6::PAIR]
        self._low += pairs[7::PAIR]
        keys = array("Q")
        keys.frombytes(pairs)
        if sys.byteorder == "little":
            keys.byteswap()
        keys = keys[0::2]
        if keys:
            # Buckets that begin at or before the last key given so far have a known start.
            for bucket in range(len(self._offsets), (keys[-1] >> self._shift) + 1):
                self._offsets.append(before + bisect_left(keys, bucket << self._shift))
        self._open += pairs
        size = BLOCK_PAIRS * PAIR
        whole = len(self._open) // size
        self._write(connection, [self._open[at * size : (at + 1) * size] for at in range(whole)])
        self._open = self._open[whole * size :]

    def finish(self, connection: sqlite3.Connection) -> Segment:
        if self._open:
            self._write(connection, [self._open])
        buckets = 1 << (64 - self._shift)
        self._offsets.extend([len(self._high)] * (buckets + 1 - len(self._offsets)))
        filter_ = self._offsets.tobytes() + self._high + self._low
        connection.execute(
            "UPDATE id_segments SET state = ?, filter = ? WHERE segment = ?", (_IN_USE, filter_, self.number)
        )
        return _unpack(self.number, self._level, self._count, self._last, filter_)

    def _write(self, connection: sqlite3.Connection, blocks: list[bytes]) -> None:
        first = (self.number << 24) + self._blocks
        connection.executemany(
            "INSERT INTO id_blocks VALUES (?, ?)", [(first + at, pairs) for at, pairs in enumerate(blocks)]
        )
        self._blocks += len(blocks)


def _shift(count: int) -> int:
    return 64 - (count // BUCKET_KEYS).bit_length()


def _unpack(number: int, level: int, count: int, last_entry: int, filter_: bytes) -> Segment:
    shift = _shift(count)
    size = ((1 << (64 - shift)) + 1) * array("I").itemsize
    offsets = array("I")
    offsets.frombytes(filter_[:size])
    high, low = filter_[size : size + count], filter_[size + count :]
    return Segment(number, level, count, last_entry, shift, offsets, bytes(high), bytes(low))


def _range(connection: sqlite3.Connection, segment: Segment, bits: int, at: int) -> bytes:
    spread = (64 - segment.shift) - bits
    start, end = segment.offsets[at << spread], segment.offsets[(at + 1) << spread]
    if start == end:
        return b""
    first = start // BLOCK_PAIRS
    rows = connection.execute(
        "SELECT pairs FROM id_blocks WHERE block BETWEEN ? AND ? ORDER BY block",
        ((segment.number << 24) + first, (segment.number << 24) + (end - 1) // BLOCK_PAIRS),
    )
    pairs = b"".join(row[0] for row in rows)
    skip = first * BLOCK_PAIRS
    return pairs[(start - skip) * PAIR : (end - skip) * PAIR]


def _new_number(connection: sqlite3.Connection) -> int:
    (newest,) = connection.execute("SELECT coalesce(max(segment), 0) FROM id_segments").fetchone()
    return int(newest) + 1


def _drop(connection: sqlite3.Connection, number: int) -> None:
    connection.execute(
        "DELETE FROM id_blocks WHERE block BETWEEN ? AND ?", (number << 24, ((number + 1) << 24) - 1)
    )
    connection.execute("DELETE FROM id_segments WHERE segment = ?", (number,))
