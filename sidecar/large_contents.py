"""Texts too large for a message, put back into it for ``fetch``: read from the bucket, checked, without secrets.

Never called by the fold: a ledger depends on messages alone, and an object may be gone. Which object is read follows
from the message's own run and the digest it names. A daemon reads one text at a time and keeps the last one for a
minute, so that its pages are not each read from the beginning; who asks for another waits, and not for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Literal

import anyio
import anyio.to_thread
import msgspec
from msgspec import Struct

from protocol import subjects
from protocol.codec import decode_event, digest_bytes, encode
from protocol.content import ContentBlob
from protocol.errors import AskRefused, ProtocolError
from protocol.events import Message, ToolReturned
from protocol.redaction import Redactor
from sidecar.core.longtext import LongText, valid
from sidecar.desk import Desk
from sidecar.memory import give_back
from sidecar.transport.contents import Contents
from storage.evidence import StoredMessage

_KEPT_SECONDS: Final = 60.0
_WAIT_SECONDS: Final = 10.0
"""For the texts others ask for; then the asker is to come again."""
_SHORT: Final = 64 * 1024
"""Bytes of a text that is put into its message at once."""
_NOTICED: Final = 1 << 20
"""Bytes of a text whose memory is given back to the system when it was worked on."""
_HINT: Final = b'"blob"'
_Key = tuple[str, bytes, int]


class Whole(Struct, frozen=True):
    """A message's JSON and what its whole content is; without ``content`` the message has it, or has it as it was
    stored, where it is gone or another."""

    status: Literal["found", "redacted", "gone", "digest_mismatch"]
    event: bytes
    content: LongText | None = None


class Shelf:
    """What one daemon holds of large texts: one that is read, and the one that was read last."""

    def __init__(self) -> None:
        self._kept: tuple[_Key, Whole] | None = None
        self._drop: asyncio.TimerHandle | None = None
        self._lock = anyio.Lock()

    def kept(self, key: _Key) -> Whole | None:
        """The text, if it is the one that is kept: for a minute from now on."""
        if self._kept is None or self._kept[0] != key:
            return None
        self.keep(key, self._kept[1])
        return self._kept[1]

    def keep(self, key: _Key, found: Whole) -> None:
        """In place of the former one."""
        self._kept = key, found
        if self._drop is not None:
            self._drop.cancel()
        self._drop = asyncio.get_running_loop().call_later(_KEPT_SECONDS, self.let_go)

    def let_go(self) -> None:
        """Keep nothing."""
        if self._drop is not None:
            self._drop.cancel()
        self._kept = self._drop = None

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """The right to read a text. Raises ``AskRefused`` ``unavailable`` where others take too long."""
        try:
            with anyio.fail_after(_WAIT_SECONDS):
                await self._lock.acquire()
        except TimeoutError:
            raise AskRefused("unavailable", "other large texts are being read; ask again") from None
        try:
            yield
        finally:
            self._lock.release()


class LargeContents:
    """One lane's texts, on the daemon's shelf."""

    def __init__(self, desk: Desk, contents: Contents, shelf: Shelf) -> None:
        self._desk = desk
        self._contents = contents
        self._shelf = shelf

    async def whole(self, run: str, message: StoredMessage) -> Whole | None:
        """The message with its whole content; None for one that has no other than its own.

        Raises ``Unavailable`` where the broker does not answer, ``AskRefused`` where others take too long.
        """
        blob = _blob(message)
        if blob is None:
            return None
        desk = self._desk
        pieces = subjects.content_pieces(desk.tenant, desk.lane, run, blob.sha256)
        redactor = desk.redactor
        key = (pieces, message.entry.sha256, id(redactor))
        shelf = self._shelf
        found = shelf.kept(key)
        if found is not None:
            return found
        # One at a time: who asks again while the first answer is made waits for it instead of making another.
        async with shelf.turn():
            found = shelf.kept(key)
            if found is not None:
                return found
            shelf.let_go()
            found = await self._read(pieces, message.entry.body, blob, redactor)
            if found.content is not None or found.status in ("found", "redacted"):
                shelf.keep(key, found)
            if blob.bytes >= _NOTICED:
                await anyio.to_thread.run_sync(give_back)
            return found

    async def _read(self, pieces: str, body: bytes, blob: ContentBlob, redactor: Redactor) -> Whole:
        raw = await self._contents.read(pieces, blob.bytes)
        if raw is None:
            return Whole("gone", body)
        return await anyio.to_thread.run_sync(_joined, body, raw, blob, redactor)


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
    text = valid(raw)
    shown = valid(redactor.utf8(text))
    status: Literal["found", "redacted"] = "found" if shown == text else "redacted"
    if len(shown) > _SHORT:
        return Whole(status, body, LongText(shown))
    event = msgspec.json.decode(body)
    event["content"] = shown.decode()
    return Whole(status, encode(event))
