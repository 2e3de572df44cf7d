"""Answers that go on in the next question: where a page ends, how a long message is cut, what the cursor says.

Pure. A message is cut between characters, inside its long texts only; each page carries the message with the
pieces of its texts that belong there, so that a text is joined from the pages in order. A message of which
nothing but structure would fit comes as pieces of its JSON text. A cursor is opaque, bound to the run and the
question it continues, and gives access to nothing: scope is looked at anew with every page.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec import Struct

from protocol.asks import AskFetch, FetchPart
from protocol.codec import encode
from sidecar.core.longtext import LongText

LONG: Final = (2_000, 128)
"""Texts longer than this many characters are cut; the second where the first does not help."""
MIN_PIECE: Final = 16
"""Characters a page carries at least, whatever its limit: paging always ends."""
_CURSOR = re.compile(r"[A-Za-z0-9_-]{16,400}")
_TAG: Final = 8
Text = str | LongText


class Cursor(Struct, frozen=True, array_like=True):
    """Where the next page begins: thing ``index`` of the question, message ``at`` of its span, character
    ``offset`` of that message.

    ``newest`` is the run's position at the first page; ``check`` tells whether the message that is being cut is
    still the same.
    """

    index: int = 0
    at: int = 0
    offset: int = 0
    newest: int = 0
    check: str = ""


class Doc(Struct, frozen=True):
    """A message and the ledger's view of an item, as JSON values; None for what there is none of."""

    event: Any = None
    record: Any = None


class Piece(Struct, frozen=True):
    """One page's part of a document, as JSON; ``following`` is the next offset, None at the end."""

    event: bytes | None
    record: bytes | None
    part: FetchPart
    following: int | None


class Cut:
    """A document that is longer than a page, taken apart. ``page`` is a whole page's bytes; ``content`` stands in
    place of the message's own."""

    def __init__(
        self, event: bytes | None, record: bytes | None, page: int, content: LongText | None = None
    ) -> None:
        self._doc, self._limit = _layout(event, record, page, content)
        frame, long = _blanked(self._doc, self._limit)
        self._frame = _size(frame)
        self.total = sum(map(len, long))
        check = hashlib.blake2b(encode([self._limit, self.total, frame.event, frame.record]), digest_size=6)
        for text in long:
            check.update(text.digest if isinstance(text, LongText) else encode(text))
        self.check = check.hexdigest()

    def piece(self, offset: int, room: int) -> Piece:
        """The part from ``offset`` on that fits ``room`` bytes, at least a few characters."""
        left = room - self._frame
        at = taken = 0

        def cut(text: Text) -> str:
            nonlocal at, left, taken
            begin = max(0, offset + taken - at)
            at += len(text)
            if begin >= len(text) or (left <= 0 and taken):
                return ""
            size = fitting(text, begin, left if taken else max(left, MIN_PIECE))
            if taken and size == 0:
                left = 0
                return ""
            piece = text[begin : begin + size]
            left -= len(encode(piece)) - 2
            if begin + size < len(text):
                left = 0
            taken += size
            return piece

        shown = _mapped(self._doc, self._limit, cut)
        end = offset + taken
        return Piece(
            None if shown.event is None else encode(shown.event),
            None if shown.record is None else encode(shown.record),
            FetchPart(offset=offset, chars=taken, total_chars=self.total),
            end if end < self.total else None,
        )


def joined(event: bytes, content: LongText) -> bytes:
    """The message with this content, as JSON."""
    fields = {**msgspec.json.decode(event), "content": None}
    pairs = (
        encode(name) + b":" + (content.quoted() if name == "content" else encode(value))
        for name, value in fields.items()
    )
    return b"{" + b",".join(pairs) + b"}"


def fitting(text: Text, begin: int, room: int) -> int:
    """How many characters from ``begin`` fit ``room`` bytes of a JSON string; at least one if room is left."""
    size = min(len(text) - begin, max(0, room))
    while size > 0:
        used = len(encode(text[begin : begin + size])) - 2
        if used <= room:
            return size
        size = min(size - 1, size * room // used)
    return min(1, len(text) - begin) if room > 0 else 0


def _layout(
    event: bytes | None, record: bytes | None, page: int, content: LongText | None
) -> tuple[Doc, int]:
    """The document, and from which length on its texts are cut: so that the rest takes half a page at most."""
    values: list[Any] = [None if raw is None else msgspec.json.decode(raw) for raw in (event, record)]
    if content is not None:
        values[0]["content"] = content
    doc = Doc(*values)
    for limit in LONG:
        frame, long = _blanked(doc, limit)
        # With nothing to cut, it is long only as it was written: escapes and blanks.
        if long and _size(frame) <= page // 2:
            return doc, limit
    texts: list[Text | None] = [
        None if raw is None else raw.decode("utf-8", "replace") for raw in (event, record)
    ]
    if event is not None and content is not None:
        texts[0] = LongText(joined(event, content))
    return Doc(*texts), 0


def _blanked(doc: Doc, limit: int) -> tuple[Doc, list[Text]]:
    """The document without its texts over ``limit`` characters, and these."""
    long: list[Text] = []

    def blank(text: Text) -> str:
        long.append(text)
        return ""

    return _mapped(doc, limit, blank), long


def _size(doc: Doc) -> int:
    return sum(len(encode(value)) for value in (doc.event, doc.record) if value is not None)


def _mapped(doc: Doc, limit: int, change: Callable[[Text], str]) -> Doc:
    """The document with every text over ``limit`` characters changed, in the order they stand."""

    def walk(value: Any) -> Any:
        if isinstance(value, str | LongText):
            return change(value) if len(value) > limit else value
        if isinstance(value, list):
            return [walk(item) for item in value]
        if isinstance(value, dict):
            return {name: walk(item) for name, item in value.items()}
        return value

    return Doc(walk(doc.event), walk(doc.record))


# --- the cursor -----------------------------------------------------------------------------------------------


def question(tenant: str, lane: str, run: str, request: AskFetch) -> bytes:
    """What a cursor is bound to: all of the question but the cursor itself and what it waits for."""
    fields = msgspec.to_builtins(msgspec.structs.replace(request, cursor=None, after=None))
    return hashlib.blake2b(encode([tenant, lane, run, fields]), digest_size=16).digest()


def write_cursor(cursor: Cursor, bound: bytes) -> str:
    """The cursor as it is handed out."""
    body = msgspec.msgpack.encode(cursor)
    return base64.urlsafe_b64encode(_tag(body, bound) + body).decode().rstrip("=")


def read_cursor(text: str, bound: bytes) -> Cursor:
    """The cursor of an answer to the same question. Raises ValueError for any other text."""
    if _CURSOR.fullmatch(text) is None:
        raise ValueError("not a cursor")
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        body = raw[_TAG:]
        if raw[:_TAG] != _tag(body, bound):
            raise ValueError("not the cursor of this question")
        cursor = msgspec.msgpack.decode(body, type=Cursor)
    except (binascii.Error, msgspec.DecodeError) as error:
        raise ValueError("not a cursor") from error
    if write_cursor(cursor, bound) != text:
        raise ValueError("not a cursor as it is written")
    if min(cursor.index, cursor.at, cursor.offset, cursor.newest) < 0:
        raise ValueError("not a cursor")
    return cursor


def _tag(body: bytes, bound: bytes) -> bytes:
    return hashlib.blake2b(body, key=bound, digest_size=_TAG).digest()
