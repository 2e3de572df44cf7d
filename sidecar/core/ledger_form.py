"""A whole ledger as bytes and as a digest, made item by item: what ``ledger_value`` says, without its copy.

Nothing is read but the ledger. CPU only, linear in the ledger: run it off the loop where the ledger may be large.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from protocol.codec import canonical, encode
from sidecar.core.state import ITEM_TYPES, Head, Ledger

_ITEMS_AT_ONCE: Final = 64
"""Items written in one call: the interpreter is kept for as long."""
_HASHED_AT_ONCE: Final = 64 * 1024
"""Bytes hashed at a time: the interpreter is given up for each, which costs as much as the hash of a small one."""
TOLD_NUMBERS: Final = {
    "approval": ("uses_left",),
    "early": ("uses",),
    "artifact": ("bytes",),
    "evidence": ("value",),
    "gap": ("first", "through"),
    "accepted": ("first", "through"),
}
"""By collection the fields of its items that hold numbers as they were told. All other numbers count messages, and
no item holds a mapping or raw JSON."""
_WHOLE_BELOW: Final = 2**53
_SORTED: Final = msgspec.json.Encoder(order="sorted")
"""Of what holds none of that it writes the canonical form, at an eighth of the cost of ``canonical``."""


def ledger_json(ledger: Ledger) -> bytes:
    """The JSON of ``ledger_value``."""
    return b"".join(_pieces(encode(ledger.head), ledger, _plain_items))


def ledger_digest(ledger: Ledger) -> str:
    """The digest of ``ledger_value``: ``sha256:<hex>`` over its canonical form."""
    whole, waiting = hashlib.sha256(), bytearray()
    for piece in _pieces(canonical(ledger.head), ledger, _canonical_items):
        waiting += piece
        if len(waiting) >= _HASHED_AT_ONCE:
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


def _canonical_items(kind: str, items: Sequence[Any]) -> bytes:
    told = TOLD_NUMBERS.get(kind, ())
    if any(_is_odd(getattr(item, field)) for field in told for item in items):
        return b",".join(map(canonical, items))
    return _SORTED.encode(items)[1:-1]


def _is_odd(value: object) -> bool:
    """Whether it is a number that the canonical form writes otherwise than plain JSON does."""
    return isinstance(value, float) or (isinstance(value, int) and not -_WHOLE_BELOW < value < _WHOLE_BELOW)


def _plain_items(kind: str, items: Sequence[Any]) -> bytes:
    return encode(items)[1:-1]


def _pieces(head: bytes, ledger: Ledger, written: Callable[[str, Sequence[Any]], bytes]) -> Iterator[bytes]:
    yield b'{"head":' + head + b',"items":{'
    kinds = sorted(kind for kind, items in ledger.items.items() if items)
    for number, kind in enumerate(kinds):
        items = ledger.items[kind]
        yield (b',"' if number else b'"') + kind.encode() + b'":['
        keys = sorted(items)
        for first in range(0, len(keys), _ITEMS_AT_ONCE):
            some = written(kind, [items[key] for key in keys[first : first + _ITEMS_AT_ONCE]])
            yield b"," + some if first else some
        yield b"]"
    yield b"}}"
