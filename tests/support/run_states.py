"""A state of the state stream with nothing in its ledger."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from protocol.state import Cursor, RunState

BORN = datetime(2026, 11, 30, 9, 0, tzinfo=UTC)
CURSOR = Cursor(stream_seq=7, stream_created=BORN, next_seq={"event/s1": 5})
STATE = RunState(
    epoch=1,
    fold_version=3,
    checkpoint=None,
    ledger=msgspec.Raw(b"{}"),
    ledger_version=5,
    ledger_digest="sha256:" + 64 * "0",
    cursor=CURSOR,
    trimmed_through=0,
    settings=None,
    hash_chain="sha256:" + 64 * "0",
)
