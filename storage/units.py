"""A unit of work written inside a transaction: everything it names, in the one order that is right."""

from __future__ import annotations

from typing import Final

from storage import checkpoints, journal, ledgers, outbox, retention, search
from storage.records import Committed, Unit
from storage.transaction import Transaction

ROW_WEIGHT: Final = 256
"""Bytes a row costs beside its payload, roughly."""


def apply(unit: Unit, tx: Transaction) -> Committed:
    """Write ``unit``. Raises StorageError or the driver's error; the caller rolls its savepoint back then."""
    lane_no = tx.lane(unit.tenant, unit.lane)
    for tombstone in unit.forget:
        retention.forget(tx, lane_no, tombstone)
    for rebase in unit.rebase:
        retention.rebase(tx, lane_no, rebase)
    entries, touched = journal.append(tx, lane_no, unit.tenant, unit.lane, unit.journal, unit.holes)
    ledgers.write(tx, lane_no, unit.runs, touched, unit.items)
    if unit.open_attempt is not None:
        checkpoints.open_attempt(tx, lane_no, unit.open_attempt)
    for adoption in unit.adopt:
        checkpoints.adopt(tx, lane_no, adoption)
    if unit.checkpoint is not None:
        checkpoints.add_checkpoint(tx, lane_no, unit.checkpoint)
    if unit.close_attempt is not None:
        # Before its receipt: an attempt closed already is Stale, whatever a second receipt would break.
        checkpoints.close_attempt(tx, lane_no, unit.close_attempt)
    if unit.receipt is not None:
        checkpoints.add_receipt(tx, lane_no, unit.receipt)
    if unit.packet is not None:
        checkpoints.keep_packet(tx, lane_no, unit.packet)
    search.add(tx, lane_no, unit.search)
    if unit.cursor is not None:
        outbox.set_cursor(tx, lane_no, unit.cursor)
    outbox.set_meta(tx, unit.meta)
    return Committed(outbox.add(tx, lane_no, unit.outbox), entries)


def weight(unit: Unit) -> int:
    """About how many bytes ``unit`` writes."""
    rows = len(unit.journal) + len(unit.runs) + len(unit.items) + len(unit.outbox) + 1
    total = rows * ROW_WEIGHT
    for entry in unit.journal:
        total += len(entry.body)
    for run in unit.runs:
        total += len(run.head) + len(run.view)
    for item in unit.items:
        total += len(item.body or b"")
    for message in unit.outbox:
        total += len(message.payload)
    for text in unit.search:
        total += len(text.text)
    return total if unit.packet is None else total + len(unit.packet.body)
