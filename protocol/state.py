"""What a new owner needs, beside the in stream, to answer as the old one did.

Shapes only: how a state is compressed, stored and checked is not decided here.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from protocol.content import Count, Ordinal, Settings
from protocol.handoff import CoversThrough, Projector
from protocol.summary import Summary

Instant = Annotated[datetime, Meta(tz=True)]


class StateCheckpoint(Struct, frozen=True, kw_only=True):
    """A checkpoint with its words and its parent (None for the first)."""

    id: str
    version: Ordinal
    schema: int = 1
    summarizer: str
    projector: Projector
    covers_through: CoversThrough
    range_digest: str
    parent_checkpoint_id: str | None
    summary: Summary


class Cursor(Struct, frozen=True, kw_only=True):
    """How far the in stream was folded.

    ``stream_created`` tells one incarnation of the stream from another. ``next_seq`` is the next number
    expected, by channel and session (``event/s1``).
    """

    stream_seq: Count
    stream_created: Instant
    next_seq: dict[str, Count]


class Tombstone(Struct, frozen=True, kw_only=True):
    """A forgotten run: bodies are gone, the chain of heads through ``through`` ends in ``hash_chain``.

    ``through`` is the ledger's version, ``position`` the newest position of the run.
    """

    run: str
    through: Count
    hash_chain: str
    at: Instant
    reason: str
    position: Count | UnsetType = UNSET


class StatePacket(Struct, frozen=True, kw_only=True):
    """The newest packet that shortened the context, as the message list to go on with begins with it.

    ``checkpoint_id`` is of the checkpoint it stands on, None before the first; ``position`` the run's newest in it.
    """

    packet_id: str
    text: str
    checkpoint_id: str | None
    position: Count


class RunState(Struct, frozen=True, kw_only=True):
    """One run's durable state as of ``cursor``. ``ledger`` is the fold's own form, of ``fold_version``."""

    v: int = 1
    type: Literal["run.state"] = "run.state"
    epoch: Count
    fold_version: Ordinal
    checkpoint: StateCheckpoint | None
    ledger: Raw
    ledger_version: Count
    ledger_digest: str
    cursor: Cursor
    trimmed_through: Count
    settings: Settings | None
    hash_chain: str
    tombstones: tuple[Tombstone, ...] = ()
    packet: StatePacket | UnsetType = UNSET


class Blob(Struct, frozen=True, kw_only=True):
    """An object in the bucket: its name, digest and size as stored, and how it is compressed."""

    name: str
    digest: str
    bytes: Count
    encoding: str


class Since(Struct, frozen=True, kw_only=True):
    """What holds in the place of the same fields of a state that was written earlier.

    ``stream_seq`` and ``ledger_version`` tell how far the run was folded when this was said; the ledger itself is the
    state's, and the messages after its cursor lead from there to here.
    """

    checkpoint: StateCheckpoint | None
    trimmed_through: Count
    packet: StatePacket | UnsetType = UNSET
    stream_seq: Count
    ledger_version: Count


class RunStateReference(Struct, frozen=True, kw_only=True):
    """Stands in the state stream for a ``RunState`` too large for a message, and what was committed since.

    ``cursor`` is that state's, so that nobody has to fetch the object to see how far it goes.
    """

    v: int = 1
    type: Literal["run.state"] = "run.state"
    epoch: Count
    ledger_version: Count
    ledger_digest: str
    blob: Blob
    cursor: Cursor | UnsetType = UNSET
    since: Since | UnsetType = UNSET
    must_understand: tuple[str, ...] = ("blob",)


class StateHead(Struct, frozen=True, kw_only=True):
    """The least to read of a message of the state stream: enough to tell the two forms apart."""

    v: int
    type: str
    epoch: Count
    blob: Blob | UnsetType = UNSET
    must_understand: tuple[str, ...] = ()
