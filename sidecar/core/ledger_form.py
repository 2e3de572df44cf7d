"""A whole ledger as bytes and as a digest, made item by item: what ``ledger_value`` says, without its copy.

Nothing is read but the ledger. CPU only, linear in the ledger: run it off the loop where the ledger may be large.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from protocol.codec import canonical, encode
from sidecar.core.state import ITEM_TYPES, Head, Ledger

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


class _Form(msgspec.Struct, forbid_unknown_fields=True):
    head: Head
    items: dict[str, list[msgspec.Raw]]


_FORM: Final = msgspec.json.Decoder(_Form)
_ITEMS: Final = {kind: msgspec.json.Decoder(type_) for kind, type_ in ITEM_TYPES.items()}


def ledger_of(form: bytes) -> Ledger:
    """The ledger of ``ledger_json``, with nothing marked as changed. Raises ValueError for what is none."""
    try:
        found = _FORM.decode(form)
        items = [(kind, _ITEMS[kind].decode(raw)) for kind, raws in found.items.items() for raw in raws]
    except (msgspec.DecodeError, KeyError, RecursionError) as error:
        raise ValueError(f"no ledger: {error}") from error
    # As they are put when a stored run is read.
    items.sort(key=lambda pair: (getattr(pair[1], "position", 0), pair[1].id))
    ledger = Ledger(found.head)
    for kind, item in items:
        ledger.put(kind, item)
    ledger.changed.clear()
    return ledger


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
