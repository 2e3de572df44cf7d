"""What goes into the store and what comes out: frozen rows of bytes and scalars.

Nothing here knows what a body means; the sidecar encodes and decodes. Nothing here does I/O. The rows that come
by the message are kept from the garbage collector: nothing in them can be part of a cycle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

Channel = Literal["event", "authority", "record"]
Chain = Literal["live", "shadow"]
OutboxStream = Literal["out", "state", "rejected"]
Bytes32 = Annotated[bytes, Meta(min_length=32, max_length=32)]

GENESIS: Final = bytes(32)
"""The link before a run's first message."""


def link(previous: bytes, sha256: bytes) -> bytes:
    """The chain value after a message: sha256 over the previous chain value and the message's sha256."""
    return hashlib.sha256(previous + sha256).digest()


class JournalEntry(Struct, frozen=True, gc=False, kw_only=True):
    """One folded message of a run, in the order it was folded.

    ``version`` is the ledger version after it, one more than that of the run's message before; ``position``
    is the run's position then (a record message repeats it, 0 before the first). ``sha256`` is of the bytes
    as received, ``chain`` is ``link(chain before, sha256)`` over all folded messages of the run. ``body`` is
    what is kept: equal to the bytes received unless ``redacted``. Read back, ``b""`` means not asked for, or
    gone with its run. ``key`` is what ``Store.keys`` says of (run, channel, event id), where that was asked; it is
    not read back.
    """

    run: str
    channel: Channel
    position: int
    version: int
    stream_seq: int
    event_id: str
    type: str
    sha256: Bytes32
    chain: Bytes32
    body: bytes
    redacted: bool = False
    key: int | None = None


class ItemRow(Struct, frozen=True, gc=False, kw_only=True):
    """One ledger item of a run. ``body`` None deletes the row; ``live`` False keeps it off the hot view."""

    run: str
    kind: str
    key: str
    body: bytes | None
    live: bool = True


class RunRow(Struct, frozen=True, gc=False, kw_only=True):
    """A run's head and its short view, written whole. Last entry, version, position and chain are kept by
    the store from the journal."""

    run: str
    family: str
    parent: str | None
    head: bytes
    view: bytes
    finished: bool = False


class OutboxRow(Struct, frozen=True, gc=False, kw_only=True):
    """One message that has to leave."""

    stream: OutboxStream
    subject: str
    msg_id: str
    payload: bytes
    traceparent: str | None = None
    """Of W3C Trace Context: a header of the message."""


class Cursor(Struct, frozen=True):
    """How far a lane has read its input, and of which incarnation of the stream."""

    stream_seq: int
    stream_created: str


class AttemptRow(Struct, frozen=True, kw_only=True):
    """A compaction attempt, stored open before a summary is asked for. At most one is open per run."""

    attempt_id: str
    run: str
    trigger: str
    first: int
    through: int
    range_digest: str
    handoff_position: int
    ledger_digest: str
    started_at: str
    body: bytes


class CheckpointRow(Struct, frozen=True, kw_only=True):
    """An accepted summary with its coverage. ``version`` is the parent's + 1, 1 for the first."""

    checkpoint_id: str
    run: str
    chain: Chain
    version: int
    parent_id: str | None
    covers_through: int
    event_id: str
    range_digest: str
    created_at: str
    body: bytes


class Adoption(Struct, frozen=True, kw_only=True):
    """Another owner's word on a chain: ``checkpoint`` becomes its newest without compare-and-set (None: the
    chain is empty), and every checkpoint of ours that is no ancestor of it is dropped."""

    run: str
    chain: Chain
    checkpoint: CheckpointRow | None


class ReceiptRow(Struct, frozen=True, kw_only=True):
    """The record of one compaction attempt, whatever its end."""

    receipt_id: str
    run: str
    attempt_id: str
    outcome: str
    body: bytes
    created_at: str


class PacketRow(Struct, frozen=True, kw_only=True):
    """The newest packet of a run that shortened its context, as published; it takes the place of the last."""

    run: str
    packet_id: str
    body: bytes


class TombstoneRow(Struct, frozen=True, kw_only=True):
    """A run forgotten: its bodies, items, checkpoints, attempts, receipts, packet and search rows go, heads
    stay."""

    run: str
    forgotten_at: str
    body: bytes


class SearchRow(Struct, frozen=True, kw_only=True):
    """The searchable text of one message. Rows at or before the run's indexed position are skipped."""

    run: str
    position: int
    event_id: str
    type: str
    text: str


class Rebase(Struct, frozen=True, kw_only=True):
    """A run goes on from here, whatever is stored of it: its next message has the version after this one.

    Messages stored before stay known by their ids. Their bodies go, since nobody can tell their positions.
    """

    run: str
    version: int
    position: int
    chain: Bytes32


class Unit(Struct, frozen=True, kw_only=True):
    """One atomic piece of work in one lane: all of it is committed, or nothing."""

    tenant: str
    lane: str
    journal: tuple[JournalEntry, ...] = ()
    runs: tuple[RunRow, ...] = ()
    items: tuple[ItemRow, ...] = ()
    outbox: tuple[OutboxRow, ...] = ()
    cursor: Cursor | None = None
    open_attempt: AttemptRow | None = None
    close_attempt: str | None = None
    checkpoint: CheckpointRow | None = None
    receipt: ReceiptRow | None = None
    packet: PacketRow | None = None
    adopt: tuple[Adoption, ...] = ()
    forget: tuple[TombstoneRow, ...] = ()
    search: tuple[SearchRow, ...] = ()
    rebase: tuple[Rebase, ...] = ()
    """Before the journal's entries."""
    holes: bool = False
    """Messages of a run may be missing before its first entry here: the streams no longer hold them. Else the
    first entry must follow the run's newest, by version and by chain."""
    meta: Mapping[str, bytes | None] = {}
    """Key to value over the whole store, not per lane; None deletes."""


class Committed(Struct, frozen=True):
    """What a unit got. ``outbox_ids`` in the order of ``Unit.outbox``; ``entries`` in that of the journal."""

    outbox_ids: tuple[int, ...] = ()
    entries: range = range(0)


class StoredItem(Struct, frozen=True):
    kind: str
    key: str
    body: bytes
    live: bool


class StoredRun(Struct, frozen=True, kw_only=True):
    """A run as last committed. ``head`` is ``b""`` while only journal entries of it were stored."""

    run: str
    family: str
    parent: str | None
    finished: bool
    head: bytes
    view: bytes
    chain: bytes
    version: int
    position: int
    last_entry: int
    """Local number of its newest journal entry, 0 for none."""
    items: list[StoredItem]


class RunSummary(Struct, frozen=True, kw_only=True):
    run: str
    family: str
    parent: str | None
    view: bytes
    finished: bool
    version: int
    position: int


class StoredId(Struct, frozen=True, kw_only=True):
    """Where a (run, channel, id) already is."""

    entry: int
    sha256: bytes
    version: int
    position: int


class StoredOutbox(Struct, frozen=True, kw_only=True):
    id: int
    stream: OutboxStream
    subject: str
    msg_id: str
    payload: bytes
    traceparent: str | None = None


class SearchHit(Struct, frozen=True, kw_only=True):
    """``score`` is higher for the better; only the order within one answer means anything."""

    position: int
    event_id: str
    type: str
    snippet: str
    score: float


class BrokenLink(Struct, frozen=True, kw_only=True):
    """The first message of a run whose chain does not hold."""

    version: int
    event_id: str
    reason: Literal["body", "chain", "hole", "missing_body", "head"]


class Counts(Struct, frozen=True, kw_only=True):
    entries: int
    runs: int
    finished_runs: int
    checkpoints: int
    open_attempts: int
    outbox: int
    tombstones: int


class StoreInfo(Struct, frozen=True, kw_only=True):
    """What opening found. ``quick_check`` is ``skipped`` for files over 1 GiB, ``later`` where it follows."""

    path: str
    schema_version: int
    migrated_from: int
    sqlite_version: str
    quick_check: Literal["ok", "later", "skipped"]
