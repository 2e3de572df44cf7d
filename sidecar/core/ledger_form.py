"""A whole ledger as bytes and as a digest, made item by item: what ``ledger_value`` says, without its copy.

Nothing is read but the ledger. CPU only, linear in the ledger: run it off the loop where the ledger may be large.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Final

from protocol.codec import canonical, encode
from sidecar.core.state import Ledger

_AT_ONCE: Final = 64 * 1024
"""Bytes hashed at a time: the interpreter is given up for each, which costs as much as the hash of a small one."""


def ledger_json(ledger: Ledger) -> bytes:
    """The JSON of ``ledger_value``."""
    return b"".join(_pieces(ledger, encode))


def ledger_digest(ledger: Ledger) -> str:
    """The digest of ``ledger_value``: ``sha256:<hex>`` over its canonical form."""
    whole, waiting = hashlib.sha256(), bytearray()
    for piece in _pieces(ledger, canonical):
        waiting += piece
        if len(waiting) >= _AT_ONCE:
            whole.update(waiting)
            waiting.clear()
    whole.update(waiting)
    return f"sha256:{whole.hexdigest()}"


def _pieces(ledger: Ledger, written: Callable[[Any], bytes]) -> Iterator[bytes]:
    yield b'{"head":' + written(ledger.head) + b',"items":{'
    kinds = sorted(kind for kind, items in ledger.items.items() if items)
    for number, kind in enumerate(kinds):
        items = ledger.items[kind]
        yield (b',"' if number else b'"') + kind.encode() + b'":['
        for place, key in enumerate(sorted(items)):
            yield (b"," if place else b"") + written(items[key])
        yield b"]"
    yield b"}}"
