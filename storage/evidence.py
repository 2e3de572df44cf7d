"""Stored messages as evidence: read a bounded page at a time, each checked against its head.

A body that does not give the digest its head holds is told, never repaired and never hidden.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Sequence
from typing import Any, Final

from msgspec import Struct

from storage.identity import CHANNEL_NO, CHANNELS
from storage.records import JournalEntry

_WALK: Final = """
WITH RECURSIVE walk (entry, prev, version, position) AS (
    SELECT entry, prev, version, position FROM heads WHERE entry = :start
    UNION ALL
    SELECT h.entry, h.prev, h.version, h.position FROM walk JOIN heads h ON h.entry = walk.prev
    WHERE walk.position > :after
)
SELECT h.entry, h.channel, h.position, h.version, h.stream_seq, h.event_id, h.type, h.sha256, h.chain, h.kept,
       length(b.body)
FROM walk JOIN heads h USING (entry) LEFT JOIN bodies b USING (entry)
WHERE h.position > :after AND h.position <= :through AND h.channel <> :record {types}
ORDER BY h.version LIMIT :limit
"""


class StoredMessage(Struct, frozen=True):
    """A message of the event or authority channel. ``sound``: its body is what its head says; True where the
    body is gone."""

    entry: JournalEntry
    sound: bool


def page(
    connection: sqlite3.Connection,
    tenant: str,
    lane: str,
    run: str,
    after: int,
    through: int,
    limit: int,
    max_bytes: int,
    types: Sequence[str],
) -> list[StoredMessage]:
    """The first messages with after < position <= through, at most ``limit`` of them and as many as make
    ``max_bytes`` of bodies, but at least one. ``types`` []: all."""
    row = connection.execute(
        "SELECT run_no, last_entry FROM runs JOIN lanes USING (lane_no) "
        "WHERE tenant = ? AND lane = ? AND run = ?",
        (tenant, lane, run),
    ).fetchone()
    if row is None or limit < 1 or through <= after:
        return []
    run_no, last = row
    values: dict[str, Any] = {
        "after": after,
        "through": through,
        "limit": limit,
        "record": CHANNEL_NO["record"],
    }
    values |= {f"type{number}": name for number, name in enumerate(types)}
    named = f"AND h.type IN ({', '.join(f':type{number}' for number in range(len(types)))})" if types else ""
    start = _mark(connection, run_no, min(through, after + limit)) if not types else None
    heads = _heads(connection, values, named, start or _mark(connection, run_no, through) or last)
    if not heads and start is not None:
        # Nothing is left of the beginning: the streams no longer held it.
        heads = _heads(connection, values, named, _mark(connection, run_no, through) or last)
    found: list[StoredMessage] = []
    size = 0
    for head in heads:
        size += head[-1] or 0
        if found and size > max_bytes:
            break
        found.append(_message(connection, run, head))
    return found


def _mark(connection: sqlite3.Connection, run_no: int, position: int) -> int | None:
    """The oldest marked entry beyond a position, if there is one: few versions behind it."""
    row = connection.execute(
        "SELECT entry FROM marks WHERE run_no = ? AND position > ? ORDER BY version LIMIT 1",
        (run_no, position),
    ).fetchone()
    return None if row is None else int(row[0])


def _heads(connection: sqlite3.Connection, values: dict[str, Any], named: str, start: int) -> list[Any]:
    return connection.execute(_WALK.format(types=named), {**values, "start": start}).fetchall()


def _message(connection: sqlite3.Connection, run: str, head: Any) -> StoredMessage:
    entry, channel, position, version, stream_seq, event_id, type_, sha256, chain, kept, size = head
    body = b""
    if size is not None:
        (body,) = connection.execute("SELECT body FROM bodies WHERE entry = ?", (entry,)).fetchone()
    message = JournalEntry(
        run=run,
        channel=CHANNELS[channel],
        position=position,
        version=version,
        stream_seq=stream_seq,
        event_id=event_id,
        type=type_,
        sha256=sha256,
        chain=chain,
        body=body,
        redacted=kept is not None,
    )
    return StoredMessage(message, size is None or hashlib.sha256(body).digest() == (kept or sha256))
