"""Full text over what the caller chose to index. Built off the hot path, for ranges already covered."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence

from storage.records import SearchHit, SearchRow
from storage.transaction import Transaction, run_number

SNIPPET_TOKENS = 24
_WORD = re.compile(r"\w+")


def add(tx: Transaction, lane_no: int, rows: Sequence[SearchRow]) -> None:
    """Index rows beyond each run's indexed position, and move that position on. Idempotent."""
    before: dict[int, int] = {}
    newest: dict[int, int] = {}
    for row in rows:
        run_no = tx.run(lane_no, row.run).run_no
        if run_no not in before:
            before[run_no] = _through(tx.connection, run_no)
        if row.position <= before[run_no]:
            continue
        done = tx.connection.execute(
            "INSERT INTO search (scope, text, position, event_id, type) VALUES (?, ?, ?, ?, ?)",
            (_scope(run_no), row.text, row.position, row.event_id, row.type),
        )
        tx.connection.execute("INSERT INTO search_rows VALUES (?, ?)", (run_no, done.lastrowid))
        newest[run_no] = max(newest.get(run_no, 0), row.position)
    tx.connection.executemany(
        "INSERT INTO search_through VALUES (?, ?) ON CONFLICT DO UPDATE SET position = excluded.position",
        newest.items(),
    )


def forget(tx: Transaction, run_no: int) -> None:
    """Delete every row of a run."""
    tx.connection.execute(
        "DELETE FROM search WHERE rowid IN (SELECT row FROM search_rows WHERE run_no = ?)", (run_no,)
    )
    tx.connection.execute("DELETE FROM search_rows WHERE run_no = ?", (run_no,))
    tx.connection.execute("DELETE FROM search_through WHERE run_no = ?", (run_no,))


def through(connection: sqlite3.Connection, tenant: str, lane: str, run: str) -> int:
    """The last position indexed for the run, -1 for none."""
    return _through(connection, run_number(connection, tenant, lane, run))


def find(
    connection: sqlite3.Connection,
    tenant: str,
    lane: str,
    run: str,
    query: str,
    limit: int,
    types: Sequence[str] | None,
    first: int,
    last: int | None,
) -> list[SearchHit]:
    """Messages of one run that hold every word of ``query``, best first. [] if it has no word.

    The query is plain words: nothing in it is read as syntax.
    """
    words = _WORD.findall(query)
    run_no = run_number(connection, tenant, lane, run)
    if not words or run_no is None:
        return []
    sql = (
        f"SELECT position, event_id, type, snippet(search, 1, '', '', ' … ', {SNIPPET_TOKENS}), "
        "bm25(search, 0.0, 1.0) AS rank FROM search WHERE search MATCH ? AND position >= ?"
    )
    terms = " ".join(f'"{word}"' for word in words)
    values: list[str | int] = [f"scope : {_scope(run_no)} AND text : ({terms})", first]
    if last is not None:
        sql += " AND position <= ?"
        values.append(last)
    if types is not None:
        sql += f" AND type IN ({','.join('?' * len(types))})"
        values.extend(types)
    rows = connection.execute(f"{sql} ORDER BY rank, position LIMIT ?", (*values, limit))
    return [
        SearchHit(position=position, event_id=event_id, type=type_, snippet=snippet, score=-rank)
        for position, event_id, type_, snippet, rank in rows
    ]


def _scope(run_no: int) -> str:
    return f"run{run_no}"


def _through(connection: sqlite3.Connection, run_no: int | None) -> int:
    row = connection.execute("SELECT position FROM search_through WHERE run_no = ?", (run_no,)).fetchone()
    return -1 if row is None else int(row[0])
