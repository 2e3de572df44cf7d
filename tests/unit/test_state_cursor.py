"""How far a message of the state stream goes: said by the message, fetched only where an older one does not say it."""

from __future__ import annotations

import gzip
from typing import Any, cast

import msgspec
import pytest

from protocol.codec import digest_bytes, encode
from protocol.state import Blob, Cursor, RunStateReference, Since
from sidecar.large_states import cursor_told, stored_apart
from sidecar.transport.blobs import Blobs
from support.run_states import CURSOR, STATE

pytestmark = pytest.mark.anyio


class Bucket:
    """Counts how often an object is fetched."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.fetched = 0

    async def put(self, name: str, payload: bytes) -> None:
        self.kept[name] = payload

    async def get(self, name: str) -> bytes | None:
        self.fetched += 1
        return self.kept.get(name)


def _since(stream_seq: int) -> Since:
    return Since(checkpoint=None, trimmed_through=0, stream_seq=stream_seq, ledger_version=9)


async def _told(bucket: Bucket, message: Any) -> Cursor:
    return await cursor_told(cast(Blobs, bucket), encode(message))


async def test_a_whole_state_says_it() -> None:
    assert await _told(Bucket(), STATE) == CURSOR


async def test_a_reference_says_it_and_nothing_is_fetched() -> None:
    bucket = Bucket()
    reference = await stored_apart(cast(Blobs, bucket), "s", encode(STATE), "id")
    later = msgspec.structs.replace(reference, since=_since(12))
    assert await _told(bucket, reference) == CURSOR
    assert (await _told(bucket, later)).stream_seq == 12
    assert bucket.fetched == 0


async def test_of_an_older_reference_the_object_is_fetched() -> None:
    bucket = Bucket()
    packed = gzip.compress(encode(STATE))
    await bucket.put("n", packed)
    older = RunStateReference(
        epoch=1,
        ledger_version=5,
        ledger_digest=STATE.ledger_digest,
        blob=Blob(name="n", digest=digest_bytes(packed), bytes=len(packed), encoding="gzip"),
    )
    assert await _told(bucket, older) == CURSOR
    assert bucket.fetched == 1
