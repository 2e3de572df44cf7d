"""One write transaction's working memory: small integers of lanes and runs, and each run's newest entry.

Lives on the writer's thread for one BEGIN … COMMIT. Holds nothing over a savepoint that was rolled back.
"""

from __future__ import annotations

import sqlite3

from storage.errors import StorageConflict
from storage.records import GENESIS


class RunState:
    """A run's place in the journal as the transaction sees it."""

    __slots__ = ("chain", "last_entry", "position", "run_no", "version")

    def __init__(self, run_no: int, last_entry: int, version: int, position: int, chain: bytes) -> None:
        self.run_no = run_no
        self.last_entry = last_entry
        self.version = version
        self.position = position
        self.chain = chain


class Transaction:
    """What the parts of one group commit share. ``keys`` are identity keys of entries written so far."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.keys: list[tuple[int, int]] = []
        self._runs: dict[tuple[int, str], RunState] = {}
        self._lanes: dict[tuple[str, str], int] = {}
        (newest,) = connection.execute("SELECT coalesce(max(entry), 0) FROM heads").fetchone()
        self.next_entry = int(newest) + 1

    def mark(self) -> tuple[int, int]:
        """Where a savepoint begins, for ``rewind``."""
        return self.next_entry, len(self.keys)

    def rewind(self, mark: tuple[int, int]) -> None:
        """Forget what was learnt since ``mark``: the savepoint was rolled back."""
        self.next_entry = mark[0]
        del self.keys[mark[1] :]
        self._runs.clear()
        self._lanes.clear()

    def lane(self, tenant: str, lane: str) -> int:
        """The lane's number; it is created if new."""
        number = self._lanes.get((tenant, lane))
        if number is None:
            found = lane_number(self.connection, tenant, lane)
            if found is None:
                row = self.connection.execute(
                    "INSERT INTO lanes (tenant, lane) VALUES (?, ?) RETURNING lane_no", (tenant, lane)
                ).fetchone()
                found = int(row[0])
            number = self._lanes[(tenant, lane)] = found
        return number

    def run(self, lane_no: int, run: str) -> RunState:
        """The run's state; a run never seen is created as the root of its own family."""
        state = self._runs.get((lane_no, run))
        if state is None:
            row = self.connection.execute(
                "SELECT run_no, last_entry, version, position, chain FROM runs WHERE lane_no = ? AND run = ?",
                (lane_no, run),
            ).fetchone()
            if row is None:
                row = self.connection.execute(
                    "INSERT INTO runs (lane_no, run, family, chain) VALUES (?, ?, ?, ?) "
                    "RETURNING run_no, last_entry, version, position, chain",
                    (lane_no, run, run, GENESIS),
                ).fetchone()
            state = self._runs[(lane_no, run)] = RunState(*row)
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
