"""Search over what the caller chose to index, and over rows it has beside that.

Built off the hot path. A query is plain words (``terms``): no syntax, so no syntax error. The work of one
search is bounded by ``ROWS`` rows looked up per term and ``TEXT_BYTES`` of texts read, whatever the query and
however long the run; a search that reaches a bound says so.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from msgspec import Struct

from storage import terms
from storage.records import SearchHit, SearchRow
from storage.terms import Query
from storage.transaction import Transaction, run_number

ROWS: Final = 400
"""Rows looked up per term, the newest ones."""
CANDIDATES: Final = 120
"""Rows whose text is read and judged."""
TEXT_BYTES: Final = 8 * 1024 * 1024
LEAST: Final = 0.2
"""Of the best score; what answers worse is no answer."""
_STEPS: Final = 20_000
_TURNS: Final = 2_000
"""Steps of the database's machine between looks, and how many looks a search may last."""


class SearchFound(Struct, frozen=True):
    """Hits, best first. ``truncated``: there were more, or a bound was reached before all was looked at."""

    hits: tuple[SearchHit, ...] = ()
    truncated: bool = False


class Wanted(Struct, frozen=True, kw_only=True):
    """Which rows count: positions ``first`` to ``through``, of these types; None: all."""

    limit: int
    types: frozenset[str] | None = None
    first: int = 0
    through: int | None = None

    def holds(self, row: SearchRow) -> bool:
        return (
            row.position >= self.first
            and (self.through is None or row.position <= self.through)
            and (self.types is None or row.type in self.types)
        )


MERGE_WEIGHT: Final = 2 * 1024 * 1024
"""Bytes that one step of ``merge`` writes, about."""
_MERGE_PAGES: Final = 400


def merge(tx: Transaction, *, first: bool) -> bool:
    """One bounded step towards an index without words of rows that are gone; False once it is there."""
    connection = tx.connection
    before = connection.total_changes
    pages = -_MERGE_PAGES if first else _MERGE_PAGES
    connection.execute("INSERT INTO search (search, rank) VALUES ('merge', ?)", (pages,))
    return connection.total_changes - before >= 2


def add(tx: Transaction, lane_no: int, rows: Sequence[SearchRow]) -> None:
    """Index rows beyond each run's indexed position, and move that position on. Idempotent.

    Rows of a forgotten run are left out: they were read before it was.
    """
    before: dict[int, int] = {}
    newest: dict[int, int] = {}
    for row in rows:
        run_no = tx.run(lane_no, row.run).run_no
        if run_no not in before:
            before[run_no] = _end(tx.connection, run_no)
        if row.position <= before[run_no]:
            continue
        done = tx.connection.execute(
            "INSERT INTO search (scope, text) VALUES (?, ?)", (_scope(run_no), terms.ready(row.text))
        )
        tx.connection.execute(
            "INSERT INTO search_rows VALUES (?, ?, ?, ?, ?)",
            (run_no, done.lastrowid, row.position, row.event_id, row.type),
        )
        newest[run_no] = max(newest.get(run_no, 0), row.position)
    tx.connection.executemany(
        "INSERT INTO search_through VALUES (?, ?) ON CONFLICT DO UPDATE SET position = excluded.position",
        newest.items(),
    )


def _end(connection: sqlite3.Connection, run_no: int) -> int:
    gone = connection.execute("SELECT 1 FROM tombstones WHERE run_no = ?", (run_no,)).fetchone()
    return _through(connection, run_no) if gone is None else (1 << 62)


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
    text: str,
    wanted: Wanted,
    beside: Sequence[SearchRow],
    indexed: bool,
) -> SearchFound:
    """Messages of one run that answer the query best, the newest first among equals.

    ``beside``: rows that are searched like indexed ones; one that is indexed by now counts once. ``indexed``
    False: nothing else is looked at.
    """
    query = terms.parse(text)
    if not query.terms or wanted.limit < 1:
        return SearchFound()
    run_no = run_number(connection, tenant, lane, run) if indexed else None
    end = _through(connection, run_no)
    near = [row for row in beside if row.position > end and wanted.holds(row)]
    look = _Look(connection, run_no, wanted)
    try:
        with _bounded(connection):
            counts, rows = look.candidates(query)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorname != "SQLITE_INTERRUPT":
            raise
        look.cut, counts, rows = True, [0] * len(query.terms), []
    lowered = [(row, terms.folded(row.text)) for row in near]
    counts = [
        count + sum(term.literal in low for _, low in lowered)
        for count, term in zip(counts, query.terms, strict=True)
    ]
    weight = terms.weights(query, counts, look.total() + len(near))
    judged = [
        (value, row)
        for row, low in (*((row, terms.folded(row.text)) for row in rows), *lowered)
        if (value := terms.score(query, weight, low)) > 0
    ]
    judged.sort(key=lambda pair: (-round(pair[0], 6), -pair[1].position))
    least = judged[0][0] * LEAST if judged else 0.0
    judged = [pair for pair in judged if pair[0] >= least]
    hits = tuple(
        SearchHit(
            position=row.position,
            event_id=row.event_id,
            type=row.type,
            snippet=terms.snippet(query, weight, row.text),
            score=round(value, 6),
        )
        for value, row in judged[: wanted.limit]
    )
    return SearchFound(hits, look.cut or len(judged) > wanted.limit)


class _Look:
    """One search of the index: rows by term first, texts of the promising ones after."""

    def __init__(self, connection: sqlite3.Connection, run_no: int | None, wanted: Wanted) -> None:
        self._connection = connection
        self._run_no = run_no
        self._wanted = wanted
        self.cut = False

    def total(self) -> int:
        """Rows of the run, at most ten thousand: more makes no difference to a weight."""
        row = self._connection.execute(
            "SELECT count(*) FROM (SELECT 1 FROM search_rows WHERE run_no = ? LIMIT 10000)", (self._run_no,)
        ).fetchone()
        return int(row[0])

    def candidates(self, query: Query) -> tuple[list[int], list[SearchRow]]:
        """How many rows hold each term, and the rows to judge."""
        if self._run_no is None:
            return [0] * len(query.terms), []
        phrases = [term.phrase if term.words else None for term in query.terms]
        told = [phrase for phrase in phrases if phrase is not None]
        found = [self._rows(phrase) if phrase is not None else [] for phrase in phrases]
        counts = [len(rows) for rows in found]
        weight = terms.weights(query, counts, self.total())
        rough: dict[int, float] = {}
        for rows, worth in zip(found, weight, strict=True):
            for row in rows:
                rough[row] = rough.get(row, 0.0) + worth
        if len(told) > 1:
            # Both may lie beyond the newest rows of the single terms.
            for row in self._rows(" AND ".join(told)):
                rough[row] = max(rough.get(row, 0.0), sum(weight))
            for row in self._rows(" + ".join(told)):
                rough[row] = 2 * sum(weight)
        if len(rough) < self._wanted.limit:
            for word in terms.loose(query.words):
                for row in self._rows(word):
                    rough.setdefault(row, 0.0)
                    rough[row] += 0.1
        best = sorted(rough, key=lambda row: (-rough[row], -row))
        self.cut = self.cut or len(best) > CANDIDATES
        rows_found = list(self._texts(best[:CANDIDATES]))
        if not rough:
            # What no tokenizer takes for a word, or the inside of one: read the newest texts themselves.
            rows_found = [
                row
                for row in self._texts(self._newest())
                if any(term.literal in terms.folded(row.text) for term in query.terms)
            ]
        return counts, rows_found

    def _rows(self, phrase: str) -> list[int]:
        where, values = self._filter()
        rows = self._connection.execute(
            "SELECT s.rowid FROM search s CROSS JOIN search_rows r ON r.row = s.rowid AND r.run_no = ? "
            f"WHERE s.search MATCH ?{where} ORDER BY s.rowid DESC LIMIT ?",
            (self._run_no, f"scope : {_scope(self._run_no)} AND text : ({phrase})", *values, ROWS),
        ).fetchall()
        self.cut = self.cut or len(rows) == ROWS
        return [row for (row,) in rows]

    def _newest(self) -> Iterable[int]:
        where, values = self._filter()
        rows = self._connection.execute(
            f"SELECT r.row FROM search_rows r WHERE r.run_no = ?{where} ORDER BY r.row DESC",
            (self._run_no, *values),
        )
        return (row for (row,) in rows)

    def _filter(self) -> tuple[str, list[str | int]]:
        sql = ""
        values: list[str | int] = []
        wanted = self._wanted
        if wanted.first > 0:
            sql += " AND r.position >= ?"
            values.append(wanted.first)
        if wanted.through is not None:
            sql += " AND r.position <= ?"
            values.append(wanted.through)
        if wanted.types is not None:
            sql += f" AND r.type IN ({','.join('?' * len(wanted.types))})"
            values.extend(sorted(wanted.types))
        return sql, values

    def _texts(self, rows: Iterable[int]) -> Iterator[SearchRow]:
        left = TEXT_BYTES
        for number in rows:
            position, event_id, type_, text = self._connection.execute(
                "SELECT r.position, r.event_id, r.type, s.text FROM search_rows r "
                "JOIN search s ON s.rowid = r.row WHERE r.run_no = ? AND r.row = ?",
                (self._run_no, number),
            ).fetchone()
            if left <= 0:
                self.cut = True
                return
            left -= len(text)
            yield SearchRow(run="", position=position, event_id=event_id, type=type_, text=terms.shown(text))


@contextmanager
def _bounded(connection: sqlite3.Connection) -> Iterator[None]:
    """Interrupt the database after so much work."""
    turns = 0

    def turn() -> int:
        nonlocal turns
        turns += 1
        return turns > _TURNS

    connection.set_progress_handler(turn, _STEPS)
    try:
        yield
    finally:
        connection.set_progress_handler(None, _STEPS)


def _scope(run_no: int | None) -> str:
    return f"run{run_no}"


def _through(connection: sqlite3.Connection, run_no: int | None) -> int:
    row = connection.execute("SELECT position FROM search_through WHERE run_no = ?", (run_no,)).fetchone()
    return -1 if row is None else int(row[0])
