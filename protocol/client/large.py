"""Texts too large for an event: the whole goes to the bucket ``WK_CONTENT``, the event carries its beginning.

The object is there before the event that names it. Where there is no bucket, or no room in it, the event says that
the rest was not kept; nothing is lost silently. The daemon never needs the object to know what a run may do.
"""

from __future__ import annotations

import base64
import hashlib
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, NamedTuple

import anyio
import msgspec

from protocol import subjects
from protocol.client.broker import HEADER_RESERVE, Broker, Denied, NobodyListens, Trouble, pause_seconds
from protocol.codec import encode
from protocol.content import MAX_BLOB_BYTES, ContentBlob

_PIECE: Final = 128 * 1024
_SHOWN_CHARS: Final = 8_000
"""Of the text that the event itself carries."""
_ACK_SECONDS: Final = 5.0
_ABSENT_TRIES: Final = 8
_REMEMBERED: Final = 256
_ROLLUP: Final = {"Nats-Rollup": "sub"}
"""What was begun and not finished under the same name is replaced by the first piece."""

_log = logging.getLogger("watchkeeper")


class Shortened(NamedTuple):
    """What the event carries: the beginning with a note, and where the whole is (None: nowhere)."""

    text: str
    blob: ContentBlob | None


class _Ack(msgspec.Struct):
    seq: int = 0


class LargeTexts:
    """Puts texts of one run apart. ``above``: bytes an event's text may have; ``patience``: seconds to try."""

    def __init__(
        self, broker: Broker, tenant: str, lane: str, run: str, *, above: int | None, patience: float
    ) -> None:
        self._broker = broker
        self._address = (tenant, lane, run)
        self._above = above
        self._patience = patience
        self._known: dict[str, None] = {}
        self._lock = anyio.Lock()

    def too_large(self, text: str) -> bool:
        """Whether the text does not go into an event."""
        most = (self._broker.max_payload - HEADER_RESERVE) // 2
        limit = most if self._above is None else min(self._above, most)
        try:
            return len(text) * 6 > limit and len(encode(text)) > limit
        except ValueError:
            # No text that could be sent: told where the event is made.
            return False

    async def apart(self, text: str, media_type: str | None, ref: str) -> Shortened:
        """Keep the text apart. ``ref`` names the event that will carry it."""
        raw = text.encode("utf-8", "replace")
        blob = None
        if len(raw) <= MAX_BLOB_BYTES:
            digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
            async with self._lock:
                if digest in self._known or await self._put(digest, raw):
                    self._known[digest] = None
                    if len(self._known) > _REMEMBERED:
                        del self._known[next(iter(self._known))]
                    blob = ContentBlob(sha256=digest, bytes=len(raw), media_type=media_type)
        rest = f"the whole by fetch of {ref}" if blob is not None else "the rest was not kept"
        note = f"\n[… {len(text)} characters in all; {rest}]"
        return Shortened(text[:_SHOWN_CHARS] + note, blob)

    async def _put(self, digest: str, raw: bytes) -> bool:
        """Whether the broker has the whole of it now; as often from the beginning as patience allows."""
        deadline = anyio.current_time() + self._patience
        failures = absent = 0
        while True:
            try:
                await self._once(digest, raw)
                return True
            except NobodyListens as error:
                absent += 1
                reason = f"bucket {subjects.BUCKET_CONTENT}: {error}"
            except Trouble as error:
                reason = str(error)
            except Denied as error:
                absent, reason = _ABSENT_TRIES, str(error)
            failures += 1
            wait = pause_seconds(failures)
            if absent >= _ABSENT_TRIES or anyio.current_time() + wait >= deadline:
                _log.warning("a text of %d bytes is not kept whole: %s", len(raw), reason)
                return False
            await anyio.sleep(wait)
            with anyio.move_on_after(max(0.0, deadline - anyio.current_time())):
                await self._broker.connected()

    async def _once(self, digest: str, raw: bytes) -> None:
        pieces = subjects.content_pieces(*self._address, digest)
        size = max(1, min(_PIECE, self._broker.max_payload - HEADER_RESERVE))
        count = 0
        for begin in range(0, len(raw), size):
            await self._stored(pieces, raw[begin : begin + size], None if begin else _ROLLUP)
            count += 1
        name = subjects.content_object(*self._address, digest)
        packed = base64.urlsafe_b64encode(bytes.fromhex(digest.removeprefix("sha256:"))).decode()
        description = {
            "name": name,
            "bucket": subjects.BUCKET_CONTENT,
            "nuid": pieces.removeprefix(subjects.CONTENT_PIECES),
            "size": len(raw),
            "chunks": count,
            "digest": f"SHA-256={packed}",
            "mtime": datetime.now(UTC).isoformat(),
            "options": {"max_chunk_size": size},
        }
        await self._stored(subjects.content_description(name), encode(description), _ROLLUP)

    async def _stored(self, subject: str, payload: bytes, headers: Mapping[str, str] | None) -> None:
        reply = await self._broker.request(subject, payload, seconds=_ACK_SECONDS, headers=headers)
        try:
            ack = msgspec.json.decode(reply.payload, type=_Ack)
        except msgspec.DecodeError as error:
            raise Trouble("the broker's answer is none") from error
        if ack.seq < 1:
            raise NobodyListens(f"not stored: {reply.payload[:200].decode(errors='replace')}")
