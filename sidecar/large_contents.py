"""Texts too large for a message, put back into it for ``fetch``: read from the bucket, checked, without secrets.

Never called by the fold: a ledger depends on messages alone, and an object may be gone. Which object is read follows
from the message's own run and the digest it names. The text that was read last is kept for a minute, so that its
pages are not each read from the beginning.
"""

from __future__ import annotations

import asyncio
from typing import Final, Literal

import anyio
import anyio.to_thread
import msgspec
from msgspec import Struct

from protocol import subjects
from protocol.codec import decode_event, digest_bytes, encode
from protocol.content import ContentBlob
from protocol.errors import ProtocolError
from protocol.events import Message, ToolReturned
from protocol.redaction import Redactor
from sidecar.desk import Desk
from sidecar.transport.contents import Contents
from storage.evidence import StoredMessage

_KEPT_SECONDS: Final = 60.0
_HINT: Final = b'"blob"'


class Whole(Struct, frozen=True):
    """A message's JSON with its whole content; as it was stored where the content is gone or another."""

    status: Literal["found", "redacted", "gone", "digest_mismatch"]
    event: bytes


class LargeContents:
    """One lane's texts."""

    def __init__(self, desk: Desk, contents: Contents) -> None:
        self._desk = desk
        self._contents = contents
        self._kept: tuple[tuple[str, bytes, int], Whole] | None = None
        self._drop: asyncio.TimerHandle | None = None
        self._lock = anyio.Lock()

    async def whole(self, run: str, message: StoredMessage) -> Whole | None:
        """The message with its whole content; None for one that has no other than its own.

        Raises ``Unavailable`` where the broker does not answer.
        """
        blob = _blob(message)
        if blob is None:
            return None
        desk = self._desk
        pieces = subjects.content_pieces(desk.tenant, desk.lane, run, blob.sha256)
        redactor = desk.redactor
        key = (pieces, message.entry.sha256, id(redactor))
        # One at a time: who asks again while the first answer is made waits for it instead of making another.
        async with self._lock:
            if self._kept is not None and self._kept[0] == key:
                self._keep(key, self._kept[1])
                return self._kept[1]
            raw = await self._contents.read(pieces, blob.bytes)
            body = message.entry.body
            if raw is None:
                return Whole("gone", body)
            found = await anyio.to_thread.run_sync(_joined, body, raw, blob, redactor)
            if found.status != "digest_mismatch":
                self._keep(key, found)
            return found

    def _keep(self, key: tuple[str, bytes, int], found: Whole) -> None:
        self._kept = key, found
        if self._drop is not None:
            self._drop.cancel()
        self._drop = asyncio.get_running_loop().call_later(_KEPT_SECONDS, self._let_go)

    def _let_go(self) -> None:
        self._kept = self._drop = None


def _blob(message: StoredMessage) -> ContentBlob | None:
    entry = message.entry
    if not message.sound or _HINT not in entry.body:
        return None
    try:
        event = decode_event(entry.body, channel=entry.channel)
    except ProtocolError:
        return None
    return event.blob if isinstance(event, Message | ToolReturned) else None


def _joined(body: bytes, raw: bytes, blob: ContentBlob, redactor: Redactor) -> Whole:
    """CPU only; run it off the loop."""
    if len(raw) != blob.bytes or digest_bytes(raw) != blob.sha256:
        return Whole("digest_mismatch", body)
    text = raw.decode("utf-8", "replace")
    shown = redactor.text(text)
    event = msgspec.json.decode(body)
    event["content"] = shown
    return Whole("found" if shown == text else "redacted", encode(event))
