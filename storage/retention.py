"""Forgetting whole runs. Parts of a run are never forgotten; heads and one tombstone stay."""

from __future__ import annotations

import sqlite3

from storage import journal, search
from storage.records import Rebase, TombstoneRow
from storage.transaction import Transaction, lane_number

_CLEARED = ("items", "attempts", "checkpoints", "receipts", "packets")


def forget(tx: Transaction, lane_no: int, row: TombstoneRow) -> None:
    """Delete the run's bodies, items, attempts, checkpoints, receipts, packet and search rows under its
    tombstone, and empty its head and view. Forgetting again replaces the tombstone.

    Messages of the run still in the outbox stay. Raises StorageConflict for a run never stored.
    """
    state = tx.known_run(lane_no, row.run)
    connection = tx.connection
    connection.execute(
        "INSERT INTO tombstones VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET "
        "forgotten_at = excluded.forgotten_at, body = excluded.body",
        (state.run_no, row.forgotten_at, row.body),
    )
    journal.forget_bodies(tx, state.last_entry)
    for table in _CLEARED:
        connection.execute(f"DELETE FROM {table} WHERE run_no = ?", (state.run_no,))
    search.forget(tx, state.run_no)
    connection.execute("UPDATE runs SET head = x'', view = x'' WHERE run_no = ?", (state.run_no,))


def rebase(tx: Transaction, lane_no: int, row: Rebase) -> None:
    """Begin the run's journal anew at a version: see ``Rebase``. Its heads stay, and its ids with them."""
    state = tx.run(lane_no, row.run)
    connection = tx.connection
    # A body goes only under a tombstone: this one does not outlive the transaction.
    connection.execute("INSERT OR IGNORE INTO tombstones VALUES (?, '', x'')", (state.run_no,))
    journal.forget_bodies(tx, state.last_entry)
    connection.execute("DELETE FROM tombstones WHERE run_no = ?", (state.run_no,))
    connection.execute("DELETE FROM marks WHERE run_no = ?", (state.run_no,))
    search.forget(tx, state.run_no)
    state.last_entry, state.version, state.position, state.chain = 0, row.version, row.position, row.chain


def tombstones(connection: sqlite3.Connection, tenant: str, lane: str) -> list[TombstoneRow]:
    """The lane's forgotten runs, by age of the run."""
    rows = connection.execute(
        "SELECT r.run, t.forgotten_at, t.body FROM tombstones t JOIN runs r USING (run_no) "
        "WHERE r.lane_no = ? ORDER BY run_no",
        (lane_number(connection, tenant, lane),),
    )
    return [TombstoneRow(run=run, forgotten_at=at, body=body) for run, at, body in rows]
