"""Proof that what is stored is what was folded: the hash chain recomputed, and what there is counted."""

from __future__ import annotations

import hashlib
import sqlite3
from typing import Final, Literal

from storage import journal
from storage.records import GENESIS, BrokenLink, Counts, JournalEntry, link

PAGE: Final = 512


class ChainCheck:
    """Recomputes one run's chain from its bodies, a page per call, so that no snapshot is held for long.

    The first message is checked against the genesis only if it is version 1: a run whose beginning the
    streams no longer held starts in the middle, and its first chain value is taken as given. Of a forgotten
    run only the links are checked.
    """

    def __init__(self, tenant: str, lane: str, run: str) -> None:
        self._run = (tenant, lane, run)
        self._version = 0
        self._chain: bytes | None = None
        self.done = False

    def step(self, connection: sqlite3.Connection) -> BrokenLink | None:
        """Check the next page; the first broken link. ``done`` is set once nothing is left to check."""
        row = connection.execute(
            "SELECT version, chain, EXISTS (SELECT 1 FROM tombstones t WHERE t.run_no = runs.run_no) "
            "FROM runs JOIN lanes USING (lane_no) WHERE tenant = ? AND lane = ? AND run = ?",
            self._run,
        ).fetchone()
        if row is None:
            self.done = True
            return None
        version, chain, forgotten = row
        messages = journal.read(connection, *self._run, -1, None, self._version, PAGE, True)
        if not messages and self._chain is None:
            # Nothing since the streams lost all there was.
            self.done = True
            return None
        for message, kept in messages:
            reason = self._judge(message, kept, bool(forgotten))
            if reason is not None:
                self.done = True
                return BrokenLink(version=message.version, event_id=message.event_id, reason=reason)
            self._chain, self._version = message.chain, message.version
        self.done = self._version >= version
        if self.done and chain != (self._chain or GENESIS):
            return BrokenLink(version=version, event_id="", reason="head")
        return None

    def _judge(
        self, message: JournalEntry, kept: bytes | None, forgotten: bool
    ) -> Literal["body", "chain", "hole", "missing_body"] | None:
        if self._chain is not None and message.version != self._version + 1:
            return "hole"
        before = GENESIS if message.version == 1 else self._chain
        if before is not None and message.chain != link(before, message.sha256):
            return "chain"
        if forgotten:
            return None
        if not message.body:
            return "missing_body"
        if hashlib.sha256(message.body).digest() != (kept or message.sha256):
            return "body"
        return None


def counts(connection: sqlite3.Connection) -> Counts:
    """How much there is; its cost does not depend on the length of history."""
    row = connection.execute(
        "SELECT (SELECT count(*) FROM runs), (SELECT count(*) FROM runs WHERE finished = 1), "
        "(SELECT count(*) FROM checkpoints), (SELECT count(*) FROM attempts WHERE open = 1), "
        "(SELECT count(*) FROM outbox), (SELECT count(*) FROM tombstones)"
    ).fetchone()
    runs, finished, checkpoints, attempts, outbox, tombstones = row
    return Counts(
        entries=journal.entry_count(connection),
        runs=runs,
        finished_runs=finished,
        checkpoints=checkpoints,
        open_attempts=attempts,
        outbox=outbox,
        tombstones=tombstones,
    )
