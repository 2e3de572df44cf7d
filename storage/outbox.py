"""What has to leave, how far a lane has read, and the store's small keys."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence

from storage.records import Cursor, OutboxRow, StoredOutbox
from storage.transaction import Transaction, lane_number


def add(tx: Transaction, lane_no: int, rows: Sequence[OutboxRow]) -> tuple[int, ...]:
    """Queue messages; their ids, rising in the order given and never given twice."""
    ids = []
    for row in rows:
        done = tx.connection.execute(
            "INSERT INTO outbox (lane_no, stream, subject, msg_id, payload, traceparent) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (lane_no, row.stream, row.subject, row.msg_id, row.payload, row.traceparent),
        )
        ids.append(int(done.lastrowid or 0))
    return tuple(ids)


def sent(tx: Transaction, ids: Sequence[int]) -> int:
    """Delete messages that left (or must not leave); unknown ids are passed over. The number deleted."""
    return tx.connection.executemany(
        "DELETE FROM outbox WHERE id = ?", [(number,) for number in ids]
    ).rowcount


def pending(
    connection: sqlite3.Connection, tenant: str, lane: str, after_id: int, limit: int
) -> list[StoredOutbox]:
    """The lane's next messages in the order they were queued."""
    rows = connection.execute(
        "SELECT id, stream, subject, msg_id, payload, traceparent FROM outbox WHERE lane_no = ? AND id > ? "
        "ORDER BY id LIMIT ?",
        (lane_number(connection, tenant, lane), after_id, limit),
    )
    return [
        StoredOutbox(
            id=number, stream=stream, subject=subject, msg_id=msg_id, payload=payload, traceparent=trace
        )
        for number, stream, subject, msg_id, payload, trace in rows
    ]


def count(connection: sqlite3.Connection, tenant: str, lane: str) -> int:
    (number,) = connection.execute(
        "SELECT count(*) FROM outbox WHERE lane_no = ?", (lane_number(connection, tenant, lane),)
    ).fetchone()
    return int(number)


def span(connection: sqlite3.Connection, tenant: str, lane: str) -> tuple[int, int]:
    """The least and the greatest id of what has to leave; zeros where nothing has."""
    least, greatest = connection.execute(
        "SELECT min(id), max(id) FROM outbox WHERE lane_no = ?", (lane_number(connection, tenant, lane),)
    ).fetchone()
    return int(least or 0), int(greatest or 0)


def set_cursor(tx: Transaction, lane_no: int, cursor: Cursor) -> None:
    tx.connection.execute(
        "UPDATE lanes SET stream_seq = ?, stream_created = ? WHERE lane_no = ?",
        (cursor.stream_seq, cursor.stream_created, lane_no),
    )


def cursor(connection: sqlite3.Connection, tenant: str, lane: str) -> Cursor | None:
    row = connection.execute(
        "SELECT stream_seq, stream_created FROM lanes "
        "WHERE tenant = ? AND lane = ? AND stream_seq IS NOT NULL",
        (tenant, lane),
    ).fetchone()
    return None if row is None else Cursor(*row)


def set_meta(tx: Transaction, values: Mapping[str, bytes | None]) -> None:
    for key, value in values.items():
        if value is None:
            tx.connection.execute("DELETE FROM meta WHERE key = ?", (key,))
        else:
            tx.connection.execute(
                "INSERT INTO meta VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value",
                (key, value),
            )


def meta(connection: sqlite3.Connection, key: str) -> bytes | None:
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else bytes(row[0])


def lanes(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    """Every lane of the store."""
    return list(connection.execute("SELECT tenant, lane FROM lanes ORDER BY tenant, lane"))
