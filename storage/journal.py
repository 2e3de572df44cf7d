"""The journal: every folded message of every run, in commit order, for ever.

Rows are appended under a local number and point back to the run's previous row; a run is read by walking
back from its newest. There is no index over (run, position): it would make each insert dearer as history
grows. One mark per 256 versions lets a read begin in the middle of a long run.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, Final

from storage.errors import OutOfOrder
from storage.identity import CHANNEL_NO, CHANNELS, SIGN, Identity, identity_key
from storage.records import JournalEntry, link
from storage.transaction import RunState, Transaction, lane_number

MARK_EVERY: Final = 256


def _inserts(table: str, columns: int) -> tuple[tuple[int, str], ...]:
    """Statements for many rows and for few: how many values each takes, and its text."""
    row = f"({', '.join('?' * columns)})"
    return tuple(
        (rows * columns, f"INSERT INTO {table} VALUES {', '.join([row] * rows)}") for rows in (512, 64, 8, 1)
    )


_INTO_HEADS: Final = _inserts("heads", 13)
_INTO_BODIES: Final = _inserts("bodies", 2)
_WALK = """
WITH RECURSIVE walk (entry, prev, version, position) AS (
    SELECT entry, prev, version, position FROM heads WHERE entry = :start
    UNION ALL
    SELECT h.entry, h.prev, h.version, h.position FROM walk JOIN heads h ON h.entry = walk.prev
    WHERE walk.position > :after AND walk.version > :after_version
)
SELECT h.channel, h.position, h.version, h.stream_seq, h.event_id, h.type, h.sha256, h.chain, {body}, h.kept
FROM walk JOIN heads h USING (entry) {join}
WHERE h.position > :after AND h.version > :after_version AND h.position <= :through
ORDER BY h.version LIMIT :limit
"""
_BODIES = _WALK.format(body="coalesce(b.body, x'')", join="LEFT JOIN bodies b USING (entry)")
_NO_BODIES = _WALK.format(body="x''", join="")
_END: Final = (1 << 63) - 1


def append(
    tx: Transaction, lane_no: int, tenant: str, lane: str, entries: Sequence[JournalEntry], holes: bool
) -> tuple[range, set[str]]:
    """Write ``entries``; returns their local numbers and the runs they touched.

    The runs' rows in the transaction are moved on, but not yet written (``ledgers.write``). Raises
    OutOfOrder for an entry that does not follow the run's newest by version, position and chain; with
    ``holes`` a run's first entry here may begin anywhere beyond it. So may the first entry ever of a run.
    """
    heads: list[Any] = []
    bodies: list[Any] = []
    marks: list[tuple[int, int, int, int]] = []
    first = entry = tx.next_entry
    touched = set()
    for message in entries:
        state = tx.run(lane_no, message.run)
        free = message.run not in touched and (holes or state.last_entry == 0)
        if not _follows(message, state, free):
            raise OutOfOrder(
                f"run {message.run}: version {message.version} at position {message.position} does not "
                f"follow version {state.version} at position {state.position}, or its chain does not"
            )
        key = message.key
        if key is None:
            key = identity_key(tenant, lane, message.run, message.channel, message.event_id)
        heads += (
            entry,
            state.run_no,
            state.last_entry,
            message.version,
            message.position,
            CHANNEL_NO[message.channel],
            message.stream_seq,
            message.event_id,
            message.type,
            message.sha256,
            message.chain,
            key - SIGN,
            hashlib.sha256(message.body).digest() if message.redacted else None,
        )
        bodies += (entry, message.body)
        if message.version // MARK_EVERY > state.version // MARK_EVERY:
            marks.append((state.run_no, message.version, message.position, entry))
        tx.keys.append((key, entry))
        state.last_entry, state.version, state.position = entry, message.version, message.position
        state.chain = message.chain
        touched.add(message.run)
        entry += 1
    tx.next_entry = entry
    _insert(tx.connection, _INTO_HEADS, heads)
    _insert(tx.connection, _INTO_BODIES, bodies)
    if marks:
        tx.connection.executemany("INSERT INTO marks VALUES (?, ?, ?, ?)", marks)
    return range(first, entry), touched


def _insert(connection: sqlite3.Connection, statements: Sequence[tuple[int, str]], values: list[Any]) -> None:
    """Write the rows whose values these are, one behind the other. In as few statements as may be: after each the
    thread waits to get the interpreter back from the loop, and a row takes less time than that."""
    at = 0
    for size, statement in statements:
        while at + size <= len(values):
            connection.execute(statement, values[at : at + size])
            at += size


def _follows(message: JournalEntry, state: RunState, free: bool) -> bool:
    # The last chance to see it: what is written here is never changed again.
    if message.version == state.version + 1:
        ahead = free or message.chain == link(state.chain, message.sha256)
    else:
        ahead = free and message.version > state.version
    return ahead and message.position >= state.position


def tail(
    connection: sqlite3.Connection,
    tenant: str,
    lane: str,
    run: str,
    after: int,
    through: int | None,
    after_version: int,
    limit: int | None,
    bodies: bool,
) -> list[JournalEntry]:
    """The run's messages with after < position <= through and version > after_version, ascending."""
    return [
        message
        for message, _ in read(connection, tenant, lane, run, after, through, after_version, limit, bodies)
    ]


def read(
    connection: sqlite3.Connection,
    tenant: str,
    lane: str,
    run: str,
    after: int,
    through: int | None,
    after_version: int,
    limit: int | None,
    bodies: bool,
) -> list[tuple[JournalEntry, bytes | None]]:
    """As ``tail``, each message with the sha256 of its kept body where it was redacted."""
    row = connection.execute(
        "SELECT run_no, last_entry FROM runs JOIN lanes USING (lane_no) "
        "WHERE tenant = ? AND lane = ? AND run = ?",
        (tenant, lane, run),
    ).fetchone()
    if row is None or limit == 0:
        return []
    run_no, last = row
    start = _start(connection, run_no, last, after, through, after_version, limit)
    found = _walk(connection, run, start, after, through, after_version, limit, bodies)
    if start != last and limit is not None and len(found) < limit and through is None:
        # A run with holes has fewer messages between two marks than their distance says.
        found = _walk(connection, run, last, after, through, after_version, limit, bodies)
    return found


def entry_at(
    connection: sqlite3.Connection, tenant: str, lane: str, run: str, position: int, channel: str | None
) -> JournalEntry | None:
    """The event or authority message of that position; with channel ``record`` the newest record there."""
    found = tail(connection, tenant, lane, run, position - 1, position, 0, None, True)
    wanted = ("event", "authority") if channel is None else (channel,)
    return next((message for message in reversed(found) if message.channel in wanted), None)


def entry_named(
    connection: sqlite3.Connection,
    identity: Identity,
    tenant: str,
    lane: str,
    run: str,
    channel: str,
    event_id: str,
) -> JournalEntry | None:
    """The message of that id. Ends its own read transactions."""
    lane_no = lane_number(connection, tenant, lane)
    if lane_no is None or channel not in CHANNEL_NO:
        return None
    name = (run, CHANNELS[CHANNEL_NO[channel]], event_id)
    key = identity_key(tenant, lane, *name)
    stored = identity.find(connection, lane_no, [(name, key)]).get(name)
    if stored is None:
        return None
    found = _walk(connection, run, stored.entry, -1, None, stored.version - 1, 1, True)
    return found[0][0] if found else None


def entry_count(connection: sqlite3.Connection) -> int:
    """Messages in the journal. Local numbers have no holes and no row ever goes."""
    (newest,) = connection.execute("SELECT coalesce(max(entry), 0) FROM heads").fetchone()
    return int(newest)


def forget_bodies(tx: Transaction, last_entry: int) -> None:
    """Delete every body of the run whose newest entry this is. The tombstone must be in the transaction already."""
    tx.connection.execute(
        """
        WITH RECURSIVE walk (entry, prev) AS (
            SELECT entry, prev FROM heads WHERE entry = ?
            UNION ALL
            SELECT h.entry, h.prev FROM walk JOIN heads h ON h.entry = walk.prev
        )
        DELETE FROM bodies WHERE entry IN (SELECT entry FROM walk)
        """,
        (last_entry,),
    )


def _start(
    connection: sqlite3.Connection,
    run_no: int,
    last: int,
    after: int,
    through: int | None,
    after_version: int,
    limit: int | None,
) -> int:
    """The oldest known entry at or after all that is wanted: a mark, else the run's newest."""
    if through is not None:
        row = connection.execute(
            "SELECT entry FROM marks WHERE run_no = ? AND position > ? ORDER BY version LIMIT 1",
            (run_no, through),
        ).fetchone()
    elif limit is not None:
        row = connection.execute(
            "SELECT entry FROM marks WHERE run_no = ? AND version > ? AND position > ? "
            "ORDER BY version LIMIT 1 OFFSET ?",
            (run_no, after_version, after, limit // MARK_EVERY + 1),
        ).fetchone()
    else:
        row = None
    return last if row is None else int(row[0])


def _walk(
    connection: sqlite3.Connection,
    run: str,
    start: int,
    after: int,
    through: int | None,
    after_version: int,
    limit: int | None,
    bodies: bool,
) -> list[tuple[JournalEntry, bytes | None]]:
    rows: Iterable[Any] = connection.execute(
        _BODIES if bodies else _NO_BODIES,
        {
            "start": start,
            "after": after,
            "after_version": after_version,
            "through": _END if through is None else through,
            "limit": -1 if limit is None else limit,
        },
    )
    return [
        (
            JournalEntry(
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
            ),
            kept,
        )
        for channel, position, version, stream_seq, event_id, type_, sha256, chain, body, kept in rows
    ]
