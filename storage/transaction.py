"""A write transaction's working memory: small integers of lanes and runs, and each run's newest entry.

Lives on the writer's thread; what it learnt goes on to the next transaction if it was committed. Holds nothing
over a savepoint that was rolled back.
"""

from __future__ import annotations

import sqlite3
from typing import Final

from storage.errors import StorageConflict
from storage.records import GENESIS

_KEPT_RUNS: Final = 1_000
"""Runs whose place is remembered from one transaction to the next."""
_STATE: Final = "run_no, last_entry, version, position, chain, family, parent"


class RunState:
    """A run's place in the journal as the transaction sees it, and its family as stored."""

    __slots__ = ("chain", "family", "last_entry", "parent", "position", "run_no", "version")

    def __init__(
        self,
        run_no: int,
        last_entry: int,
        version: int,
        position: int,
        chain: bytes,
        family: str,
        parent: str | None,
    ) -> None:
        self.run_no = run_no
        self.last_entry = last_entry
        self.version = version
        self.position = position
        self.chain = chain
        self.family = family
        self.parent = parent


class Places:
    """What a transaction has learnt of the database. True for the next one too if it is committed, since nobody
    else writes."""

    __slots__ = ("lanes", "next_entry", "runs")

    def __init__(self, next_entry: int) -> None:
        self.next_entry = next_entry
        self.runs: dict[tuple[int, str], RunState] = {}
        self.lanes: dict[tuple[str, str], int] = {}


class Transaction:
    """What the parts of one group commit share. ``keys`` are identity keys of entries written so far.

    ``known``: the ``places`` of the last transaction of the connection, if that was committed.
    """

    def __init__(self, connection: sqlite3.Connection, known: Places | None = None) -> None:
        self.connection = connection
        self.keys: list[tuple[int, int]] = []
        if known is None:
            (newest,) = connection.execute("SELECT coalesce(max(entry), 0) FROM heads").fetchone()
            known = Places(int(newest) + 1)
        elif len(known.runs) > _KEPT_RUNS:
            known.runs.clear()
        self.places = known

    @property
    def next_entry(self) -> int:
        """The journal's next local number."""
        return self.places.next_entry

    @next_entry.setter
    def next_entry(self, number: int) -> None:
        self.places.next_entry = number

    def mark(self) -> tuple[int, int]:
        """Where a savepoint begins, for ``rewind``."""
        return self.next_entry, len(self.keys)

    def rewind(self, mark: tuple[int, int]) -> None:
        """Forget what was learnt since ``mark``: the savepoint was rolled back."""
        self.next_entry = mark[0]
        del self.keys[mark[1] :]
        self.places.runs.clear()
        self.places.lanes.clear()

    def lane(self, tenant: str, lane: str) -> int:
        """The lane's number; it is created if new."""
        number = self.places.lanes.get((tenant, lane))
        if number is None:
            found = lane_number(self.connection, tenant, lane)
            if found is None:
                row = self.connection.execute(
                    "INSERT INTO lanes (tenant, lane) VALUES (?, ?) RETURNING lane_no", (tenant, lane)
                ).fetchone()
                found = int(row[0])
            number = self.places.lanes[(tenant, lane)] = found
        return number

    def run(self, lane_no: int, run: str) -> RunState:
        """The run's state; a run never seen is created as the root of its own family."""
        state = self.places.runs.get((lane_no, run))
        if state is None:
            row = self.connection.execute(
                f"SELECT {_STATE} FROM runs WHERE lane_no = ? AND run = ?",
                (lane_no, run),
            ).fetchone()
            if row is None:
                row = self.connection.execute(
                    f"INSERT INTO runs (lane_no, run, family, chain) VALUES (?, ?, ?, ?) RETURNING {_STATE}",
                    (lane_no, run, run, GENESIS),
                ).fetchone()
            state = self.places.runs[(lane_no, run)] = RunState(*row)
        return state

    def known_run(self, lane_no: int, run: str) -> RunState:
        """The run's state. Raises StorageConflict if it was never stored."""
        row = self.connection.execute(
            "SELECT 1 FROM runs WHERE lane_no = ? AND run = ?", (lane_no, run)
        ).fetchone()
        if row is None:
            raise StorageConflict(f"run {run} was never stored")
        return self.run(lane_no, run)


def lane_number(connection: sqlite3.Connection, tenant: str, lane: str) -> int | None:
    """The lane's number, None if nothing of it was ever stored."""
    row = connection.execute(
        "SELECT lane_no FROM lanes WHERE tenant = ? AND lane = ?", (tenant, lane)
    ).fetchone()
    return None if row is None else int(row[0])


def run_number(connection: sqlite3.Connection, tenant: str, lane: str, run: str) -> int | None:
    """The run's number, None if nothing of it was ever stored."""
    row = connection.execute(
        "SELECT run_no FROM runs JOIN lanes USING (lane_no) WHERE tenant = ? AND lane = ? AND run = ?",
        (tenant, lane, run),
    ).fetchone()
    return None if row is None else int(row[0])
