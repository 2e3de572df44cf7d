"""States too large for a message: the object bucket holds them compressed, the stream a reference to each.

An object's name holds the message's id, so that no owner ever writes over another's. Decides nothing about what
a state says or when one is written.
"""

from __future__ import annotations

import gzip
import zlib
from typing import Final

import anyio.to_thread
import msgspec
from msgspec import UNSET

from protocol.codec import decode_state, digest_bytes
from protocol.errors import ProtocolError
from protocol.state import Blob, Cursor, RunState, RunStateReference, Since
from sidecar.transport.blobs import Blobs

MAX_STATE_BYTES: Final = 512 * 1024
"""A larger state does not go into a message (wire protocol, section 5)."""
_ENCODING: Final = "gzip"
_LEVEL: Final = 3
"""A third of the time of the usual one, for an object half as large again."""


async def stored_apart(blobs: Blobs, subject: str, payload: bytes, msg_id: str) -> RunStateReference:
    """Put a state into the bucket; returns what stands for it in the stream.

    Raises Unavailable, StreamFull, and ProtocolError for what is no state.
    """
    state, packed = await anyio.to_thread.run_sync(_packed, payload)
    name = f"{subject}.{msg_id}"
    await blobs.put(name, packed)
    return RunStateReference(
        epoch=state.epoch,
        ledger_version=state.ledger_version,
        ledger_digest=state.ledger_digest,
        blob=Blob(name=name, digest=digest_bytes(packed), bytes=len(packed), encoding=_ENCODING),
        cursor=state.cursor,
    )


class _Named(msgspec.Struct):
    """What of a state its reference repeats: the rest of a large one is better not decoded."""

    epoch: int
    ledger_version: int
    ledger_digest: str
    cursor: Cursor


_NAMED: Final = msgspec.json.Decoder(_Named)


def _packed(payload: bytes) -> tuple[_Named, bytes]:
    try:
        state = _NAMED.decode(payload)
    except msgspec.DecodeError as error:
        raise ProtocolError("malformed", f"no state: {error}") from error
    return state, gzip.compress(payload, _LEVEL, mtime=0)


async def newest_state(blobs: Blobs, payload: bytes) -> RunState:
    """As ``whole_state``, with what was committed since. The ledger may be older than the rest; the cursor's
    ``stream_seq`` is the rest's. Raises as that does.
    """
    found = decode_state(payload)
    if isinstance(found, RunState):
        return found
    state, since = await _unpacked(blobs, found), found.since
    if since is UNSET:
        return state
    return msgspec.structs.replace(
        state,
        checkpoint=since.checkpoint,
        trimmed_through=since.trimmed_through,
        packet=since.packet,
        cursor=_moved(state.cursor, since),
    )


async def cursor_told(blobs: Blobs, payload: bytes) -> Cursor:
    """How far a message of the state stream goes, its object fetched only where the message does not say it.

    Raises as ``whole_state`` does.
    """
    found = decode_state(payload)
    if isinstance(found, RunState):
        return found.cursor
    cursor = (await _unpacked(blobs, found)).cursor if found.cursor is UNSET else found.cursor
    return cursor if found.since is UNSET else _moved(cursor, found.since)


def _moved(cursor: Cursor, since: Since) -> Cursor:
    return msgspec.structs.replace(cursor, stream_seq=max(cursor.stream_seq, since.stream_seq))


def version_told(payload: bytes) -> int:
    """The newest ledger version that a message of the state stream speaks of, without its object.

    Raises ProtocolError.
    """
    found = decode_state(payload)
    if isinstance(found, RunState) or found.since is UNSET:
        return found.ledger_version
    return max(found.ledger_version, found.since.ledger_version)


async def whole_state(blobs: Blobs, payload: bytes) -> RunState:
    """The state a message of the state stream holds or refers to, as it was when its ledger was written.

    Raises ProtocolError for what cannot be read, whose object is gone or is not the one meant; Unavailable.
    """
    found = decode_state(payload)
    return found if isinstance(found, RunState) else await _unpacked(blobs, found)


async def _unpacked(blobs: Blobs, found: RunStateReference) -> RunState:
    packed = await blobs.get(found.blob.name)
    if packed is None or digest_bytes(packed) != found.blob.digest or found.blob.encoding != _ENCODING:
        raise ProtocolError("malformed", f"the object {found.blob.name} is gone or another")
    try:
        state = await anyio.to_thread.run_sync(lambda: decode_state(gzip.decompress(packed)))
    except (OSError, EOFError, zlib.error) as error:
        raise ProtocolError("malformed", f"the object {found.blob.name} cannot be unpacked") from error
    if not isinstance(state, RunState):
        raise ProtocolError("malformed", f"the object {found.blob.name} holds no state")
    return state


def object_named(payload: bytes | None) -> str | None:
    """The object that a message of the state stream refers to; None where it refers to none."""
    if payload is None or len(payload) > MAX_STATE_BYTES:
        return None
    try:
        state = decode_state(payload)
    except ProtocolError:
        return None
    return state.blob.name if isinstance(state, RunStateReference) else None
