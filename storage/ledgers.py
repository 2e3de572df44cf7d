"""Runs and their ledger items: one row per run, one per item, only what changed is written."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TypeVar

from storage.records import ItemRow, RunRow, RunSummary, StoredItem, StoredRun
from storage.transaction import Transaction, lane_number, run_number

T = TypeVar("T")


def write(
    tx: Transaction, lane_no: int, rows: Sequence[RunRow], touched: Iterable[str], items: Sequence[ItemRow]
) -> None:
    """Write the given runs whole, move on the rows of runs the journal touched, and write the items."""
    named = set()
    whole = []
    for row in rows:
        state = tx.run(lane_no, row.run)
        named.add(row.run)
        if row.family != state.family or row.parent != state.parent:
            # By itself: a column of an index that is named in an UPDATE is taken out and put in again.
            tx.connection.execute(
                "UPDATE runs SET family = ?, parent = ? WHERE run_no = ?",
                (row.family, row.parent, state.run_no),
            )
            state.family, state.parent = row.family, row.parent
        whole.append(
            (
                row.finished,
                state.last_entry,
                state.version,
                state.position,
                state.chain,
                row.view,
                row.head,
                state.run_no,
            )
        )
    tx.connection.executemany(
        "UPDATE runs SET finished = ?, last_entry = ?, version = ?, position = ?, chain = ?, view = ?, head = ? "
        "WHERE run_no = ?",
        whole,
    )
    for run in touched:
        if run not in named:
            state = tx.run(lane_no, run)
            tx.connection.execute(
                "UPDATE runs SET last_entry = ?, version = ?, position = ?, chain = ? WHERE run_no = ?",
                (state.last_entry, state.version, state.position, state.chain, state.run_no),
            )
    _write_items(tx, lane_no, items)


def load_family(
    connection: sqlite3.Connection, tenant: str, lane: str, run: str, live_only: bool
) -> list[StoredRun]:
    """All runs of the family of ``run``, oldest first; items in order of kind and key. [] if unknown."""
    lane_no = lane_number(connection, tenant, lane)
    rows = connection.execute(
        "SELECT run_no, run, family, parent, finished, head, view, chain, version, position, last_entry "
        "FROM runs WHERE lane_no = :lane AND family = "
        "(SELECT family FROM runs WHERE lane_no = :lane AND run = :run) ORDER BY run_no",
        {"lane": lane_no, "run": run},
    ).fetchall()
    return [
        StoredRun(
            run=name,
            family=family,
            parent=parent,
            finished=bool(finished),
            head=head,
            view=view,
            chain=chain,
            version=version,
            position=position,
            last_entry=last_entry,
            items=_items(connection, run_no, live_only),
        )
        for run_no, name, family, parent, finished, head, view, chain, version, position, last_entry in rows
    ]


def runs(connection: sqlite3.Connection, tenant: str, lane: str, finished: bool | None) -> list[RunSummary]:
    """The lane's runs, oldest first; ``finished`` None gives all."""
    return list(_summaries(connection, tenant, lane, finished))


def each_run(
    connection: sqlite3.Connection,
    tenant: str,
    lane: str,
    finished: bool | None,
    look: Callable[[RunSummary], T | None],
) -> list[T]:
    """What ``look`` makes of each of them, None left out; a summary is held while it is looked at."""
    found = (look(summary) for summary in _summaries(connection, tenant, lane, finished))
    return [one for one in found if one is not None]


def _summaries(
    connection: sqlite3.Connection, tenant: str, lane: str, finished: bool | None
) -> Iterator[RunSummary]:
    rows = connection.execute(
        "SELECT run, family, parent, view, finished, version, position FROM runs "
        "WHERE lane_no = ? AND (? IS NULL OR finished = ?) ORDER BY run_no",
        (lane_number(connection, tenant, lane), finished, finished),
    )
    for run, family, parent, view, done, version, position in rows:
        yield RunSummary(
            run=run,
            family=family,
            parent=parent,
            view=view,
            finished=bool(done),
            version=version,
            position=position,
        )


def item(
    connection: sqlite3.Connection, tenant: str, lane: str, run: str, kind: str, key: str
) -> StoredItem | None:
    """One item of a run, live or not."""
    row = connection.execute(
        "SELECT kind, key, body, live FROM items WHERE run_no = ? AND kind = ? AND key = ?",
        (run_number(connection, tenant, lane, run), kind, key),
    ).fetchone()
    return None if row is None else StoredItem(row[0], row[1], row[2], bool(row[3]))


def _write_items(tx: Transaction, lane_no: int, items: Sequence[ItemRow]) -> None:
    # In the caller's order, since a unit may delete and set the same key.
    for gone, some in groupby(items, lambda row: row.body is None):
        if gone:
            tx.connection.executemany(
                "DELETE FROM items WHERE run_no = ? AND kind = ? AND key = ?",
                [(tx.run(lane_no, row.run).run_no, row.kind, row.key) for row in some],
            )
        else:
            tx.connection.executemany(
                "INSERT INTO items VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "live = excluded.live, body = excluded.body",
                [(tx.run(lane_no, row.run).run_no, row.kind, row.key, row.live, row.body) for row in some],
            )


def _items(connection: sqlite3.Connection, run_no: int, live_only: bool) -> list[StoredItem]:
    rows = connection.execute(
        "SELECT kind, key, body, live FROM items WHERE run_no = ? AND live >= ? ORDER BY kind, key",
        (run_no, live_only),
    )
    return [StoredItem(kind, key, body, bool(live)) for kind, key, body, live in rows]
