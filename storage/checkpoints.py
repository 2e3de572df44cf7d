"""Attempts, checkpoints, receipts and packets: the durable side of one compaction.

A checkpoint is committed by compare-and-set on its parent. Whether a candidate is any good is not known here.
"""

from __future__ import annotations

import sqlite3
from typing import Any, Final

from storage.errors import Stale
from storage.records import Adoption, AttemptRow, Chain, CheckpointRow, PacketRow, ReceiptRow
from storage.transaction import Transaction, lane_number, run_number

_CHECKPOINT: Final = (
    "SELECT checkpoint_id, chain, version, parent_id, covers_through, event_id, range_digest, "
    "created_at, body FROM checkpoints WHERE run_no = ? "
)


def open_attempt(tx: Transaction, lane_no: int, row: AttemptRow) -> None:
    """Store an attempt as open. Raises Stale if one of the run is open, or the id was used."""
    run_no = tx.run(lane_no, row.run).run_no
    try:
        tx.connection.execute(
            "INSERT INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 1, ?)",
            (
                run_no,
                row.attempt_id,
                row.trigger,
                row.first,
                row.through,
                row.range_digest,
                row.handoff_position,
                row.ledger_digest,
                row.started_at,
                row.body,
            ),
        )
    except sqlite3.IntegrityError as error:
        if error.sqlite_errorname not in ("SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY"):
            raise
        raise Stale(f"run {row.run}: another attempt is open, or {row.attempt_id} was used") from error


def close_attempt(tx: Transaction, lane_no: int, attempt_id: str) -> None:
    """Close an open attempt of the lane. Raises Stale if it is not open."""
    closed = tx.connection.execute(
        "UPDATE attempts SET open = 0 WHERE open = 1 AND attempt_id = ? "
        "AND run_no IN (SELECT run_no FROM runs WHERE lane_no = ?)",
        (attempt_id, lane_no),
    ).rowcount
    if closed != 1:
        raise Stale(f"attempt {attempt_id} is not open")


def add_checkpoint(tx: Transaction, lane_no: int, row: CheckpointRow) -> None:
    """Append a checkpoint. Raises Stale unless its parent is the newest of the run's chain and its version
    the next one."""
    run_no = tx.run(lane_no, row.run).run_no
    newest = tx.connection.execute(
        "SELECT checkpoint_id, version FROM checkpoints WHERE run_no = ? AND chain = ? "
        "ORDER BY version DESC LIMIT 1",
        (run_no, row.chain),
    ).fetchone()
    parent, version = newest or (None, 0)
    if row.parent_id != parent or row.version != version + 1:
        raise Stale(
            f"run {row.run}: checkpoint {row.checkpoint_id} follows {row.parent_id} as version "
            f"{row.version}, the newest is {parent}, version {version}"
        )
    _insert(tx, run_no, row)


def adopt(tx: Transaction, lane_no: int, adoption: Adoption) -> None:
    """Make another owner's checkpoint the newest of its chain; see ``Adoption``. Idempotent."""
    run_no = tx.run(lane_no, adoption.run).run_no
    row = adoption.checkpoint
    ours = {
        checkpoint_id: (number, parent, version)
        for number, checkpoint_id, parent, version in tx.connection.execute(
            "SELECT checkpoint_no, checkpoint_id, parent_id, version FROM checkpoints "
            "WHERE run_no = ? AND chain = ?",
            (run_no, adoption.chain),
        )
    }
    kept = set()
    known = row is not None and row.checkpoint_id in ours
    ancestor = None if row is None else row.checkpoint_id if known else row.parent_id
    while ancestor is not None and ancestor in ours:
        number, ancestor, _ = ours[ancestor]
        kept.add(number)
    tx.connection.execute("INSERT INTO permits VALUES (?)", (run_no,))
    tx.connection.executemany(
        "DELETE FROM checkpoints WHERE checkpoint_no = ?",
        [(number,) for number, _, _ in ours.values() if number not in kept],
    )
    tx.connection.execute("DELETE FROM permits")
    if row is not None and not known:
        _insert(tx, run_no, row)


def add_receipt(tx: Transaction, lane_no: int, row: ReceiptRow) -> None:
    """Append a receipt."""
    tx.connection.execute(
        "INSERT INTO receipts (run_no, receipt_id, attempt_id, outcome, created_at, body) "
        "VALUES (?, ?, ?, ?, ?, ?)",
        (
            tx.run(lane_no, row.run).run_no,
            row.receipt_id,
            row.attempt_id,
            row.outcome,
            row.created_at,
            row.body,
        ),
    )


def keep_packet(tx: Transaction, lane_no: int, row: PacketRow) -> None:
    """Keep the packet in the place of the run's last one."""
    tx.connection.execute(
        "INSERT INTO packets VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET "
        "packet_id = excluded.packet_id, body = excluded.body",
        (tx.run(lane_no, row.run).run_no, row.packet_id, row.body),
    )


def packet(connection: sqlite3.Connection, tenant: str, lane: str, run: str) -> PacketRow | None:
    row = connection.execute(
        "SELECT packet_id, body FROM packets WHERE run_no = ?", (run_number(connection, tenant, lane, run),)
    ).fetchone()
    return None if row is None else PacketRow(run=run, packet_id=row[0], body=row[1])


def newest_checkpoint(
    connection: sqlite3.Connection, tenant: str, lane: str, run: str, chain: Chain
) -> CheckpointRow | None:
    row = connection.execute(
        f"{_CHECKPOINT} AND chain = ? ORDER BY version DESC LIMIT 1",
        (run_number(connection, tenant, lane, run), chain),
    ).fetchone()
    return None if row is None else _checkpoint(run, row)


def checkpoint(
    connection: sqlite3.Connection, tenant: str, lane: str, run: str, checkpoint_id: str
) -> CheckpointRow | None:
    row = connection.execute(
        f"{_CHECKPOINT} AND checkpoint_id = ?", (run_number(connection, tenant, lane, run), checkpoint_id)
    ).fetchone()
    return None if row is None else _checkpoint(run, row)


def checkpoints(
    connection: sqlite3.Connection, tenant: str, lane: str, run: str, chain: Chain
) -> list[CheckpointRow]:
    """Oldest first."""
    rows = connection.execute(
        f"{_CHECKPOINT} AND chain = ? ORDER BY version", (run_number(connection, tenant, lane, run), chain)
    )
    return [_checkpoint(run, row) for row in rows]


def receipts(connection: sqlite3.Connection, tenant: str, lane: str, run: str) -> list[ReceiptRow]:
    """Oldest first."""
    rows = connection.execute(
        "SELECT receipt_id, attempt_id, outcome, body, created_at FROM receipts WHERE run_no = ? "
        "ORDER BY receipt_no",
        (run_number(connection, tenant, lane, run),),
    )
    return [
        ReceiptRow(
            receipt_id=receipt_id, run=run, attempt_id=attempt, outcome=outcome, body=body, created_at=at
        )
        for receipt_id, attempt, outcome, body, at in rows
    ]


def open_attempts(connection: sqlite3.Connection, tenant: str, lane: str) -> list[AttemptRow]:
    """The lane's open attempts, by run."""
    rows = connection.execute(
        "SELECT a.attempt_id, r.run, a.cause, a.first, a.through, a.range_digest, a.handoff_position, "
        "a.ledger_digest, a.started_at, a.body FROM attempts a JOIN runs r USING (run_no) "
        "WHERE a.open = 1 AND r.lane_no = ? ORDER BY a.run_no",
        (lane_number(connection, tenant, lane),),
    )
    return [
        AttemptRow(
            attempt_id=attempt_id,
            run=run,
            trigger=trigger,
            first=first,
            through=through,
            range_digest=range_digest,
            handoff_position=handoff,
            ledger_digest=ledger_digest,
            started_at=started_at,
            body=body,
        )
        for (
            attempt_id,
            run,
            trigger,
            first,
            through,
            range_digest,
            handoff,
            ledger_digest,
            started_at,
            body,
        ) in rows
    ]


def _insert(tx: Transaction, run_no: int, row: CheckpointRow) -> None:
    tx.connection.execute(
        "INSERT INTO checkpoints (run_no, chain, version, checkpoint_id, parent_id, covers_through, "
        "event_id, range_digest, created_at, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            run_no,
            row.chain,
            row.version,
            row.checkpoint_id,
            row.parent_id,
            row.covers_through,
            row.event_id,
            row.range_digest,
            row.created_at,
            row.body,
        ),
    )


def _checkpoint(run: str, row: tuple[Any, ...]) -> CheckpointRow:
    checkpoint_id, chain, version, parent_id, covers_through, event_id, range_digest, created_at, body = row
    return CheckpointRow(
        checkpoint_id=checkpoint_id,
        run=run,
        chain=chain,
        version=version,
        parent_id=parent_id,
        covers_through=covers_through,
        event_id=event_id,
        range_digest=range_digest,
        created_at=created_at,
        body=body,
    )
