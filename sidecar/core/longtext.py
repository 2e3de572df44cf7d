"""A text of many megabytes as it came, UTF-8 bytes: cut by characters without ever being a ``str`` as a whole.

Pure. As ``str`` one emoji makes such a text four times as large, and every copy of it too.
"""

from __future__ import annotations

import codecs
import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

from protocol.codec import encode

_BLOCK: Final = 64 * 1024
_CONTINUATION: Final = bytes(range(0x80, 0xC0))


class LongText:
    """Read like a ``str``: ``len`` in characters, slices without a step. Making it counts the characters once."""

    def __init__(self, raw: bytes) -> None:
        """``raw`` is valid UTF-8 (``valid``)."""
        self.raw = raw
        self.digest = hashlib.blake2b(raw, digest_size=16).digest()
        self._starts = [0]
        """How many characters begin before each block."""
        for block in self._blocks():
            self._starts.append(self._starts[-1] + len(block.translate(None, _CONTINUATION)))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, part: slice) -> str:
        begin, end, _ = part.indices(len(self))
        return self.raw[self._byte(begin) : self._byte(end)].decode() if begin < end else ""

    def quoted(self) -> bytes:
        """The JSON string of it."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        return b"".join((b'"', *(encode(decoder.decode(block))[1:-1] for block in self._blocks()), b'"'))

    def _blocks(self) -> Iterator[bytes]:
        return (self.raw[at : at + _BLOCK] for at in range(0, len(self.raw), _BLOCK))

    def _byte(self, char: int) -> int:
        """Where the character begins."""
        if char >= len(self):
            return len(self.raw)
        number = bisect_right(self._starts, char) - 1
        block = self.raw[number * _BLOCK : (number + 1) * _BLOCK]
        bare = block.lstrip(_CONTINUATION)
        # The last character may go on in the next block; it is not among those counted here.
        before = bare.decode("utf-8", "ignore")[: char - self._starts[number]]
        return number * _BLOCK + len(block) - len(bare) + len(before.encode())


def valid(raw: bytes) -> bytes:
    """The bytes as UTF-8, with a mark in place of what is none; the same object where all of it is."""
    try:
        for _ in _decoded(raw, "strict"):
            pass
    except UnicodeDecodeError:
        return b"".join(text.encode() for text in _decoded(raw, "replace"))
    return raw


def _decoded(raw: bytes, errors: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    for at in range(0, len(raw), _BLOCK):
        yield decoder.decode(raw[at : at + _BLOCK], at + _BLOCK >= len(raw))
