"""Pages of ``fetch`` joined to what was fetched: a message cut over several pages becomes whole again.

Pure. A page carries a cut message with the pieces of its long texts that belong there and everything else as it is;
how long the piece is tells which texts were cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from protocol.asks import FetchItem
from protocol.client.errors import ContentChanged
from protocol.codec import encode


class Joiner:
    """Takes items page by page, gives whole ones back."""

    def __init__(self) -> None:
        self._parts: list[FetchItem] = []

    def take(self, items: Sequence[FetchItem]) -> Iterator[FetchItem]:
        """The whole items that are complete with this page. Raises ContentChanged."""
        for item in items:
            part = item.part
            if part is UNSET:
                self._nothing_open()
                yield item
                continue
            if part.offset == 0:
                self._nothing_open()
            expected = sum(known.part.chars for known in self._parts if known.part is not UNSET)
            if part.offset != expected or (self._parts and not _same(self._parts[0], item)):
                raise ContentChanged(f"{item.ref}: goes on at {part.offset} instead of {expected}")
            self._parts.append(item)
            if part.offset + part.chars >= part.total_chars:
                whole = join(self._parts)
                self._parts = []
                yield whole

    def end(self) -> None:
        """There are no more pages. Raises ContentChanged when a message is not complete."""
        self._nothing_open()

    def _nothing_open(self) -> None:
        if self._parts:
            raise ContentChanged(f"{self._parts[0].ref}: the rest did not come")


def _same(first: FetchItem, item: FetchItem) -> bool:
    return (first.ref, first.status, first.position, first.digest) == (
        item.ref,
        item.status,
        item.position,
        item.digest,
    )


def join(parts: Sequence[FetchItem]) -> FetchItem:
    """One item of all its pages, in order. Raises ContentChanged where they do not fit together."""
    pages = [{name: msgspec.json.decode(raw) for name, raw in _raws(item)} for item in parts]
    texts = [dict(_texts(page, ())) for page in pages]
    if any(page.keys() != texts[0].keys() for page in texts):
        raise ContentChanged(f"{parts[0].ref}: its pages differ in shape")
    chars = [0 if item.part is UNSET else item.part.chars for item in parts]
    cut = _cut_paths(texts, chars, parts[0].ref) if len(parts) > 1 else []
    whole = _replaced(pages[0], (), {path: "".join(page[path] for page in texts) for path in cut})
    fields: dict[str, Any] = {"part": UNSET}
    for name, value in whole.items():
        # Of a message that was cut as a text, that text is its JSON.
        fields[name] = Raw(value.encode() if isinstance(value, str) else encode(value))
    return msgspec.structs.replace(parts[0], **fields)


def _raws(item: FetchItem) -> Iterator[tuple[str, Raw]]:
    if item.event is not UNSET:
        yield "event", item.event
    if item.record is not UNSET:
        yield "record", item.record


_Path = tuple[str | int, ...]


def _texts(value: Any, path: _Path) -> Iterator[tuple[_Path, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts(inner, (*path, index))
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner, (*path, name))


def _cut_paths(texts: Sequence[dict[_Path, str]], chars: Sequence[int], ref: str) -> list[_Path]:
    """The texts that were cut: those that differ from page to page, and at most one whose pieces are all alike."""
    cut = [path for path in texts[0] if any(page[path] != texts[0][path] for page in texts)]
    missing = [size - sum(len(page[path]) for path in cut) for page, size in zip(texts, chars, strict=True)]
    if not any(missing):
        return cut
    alike = [path for path, text in texts[0].items() if path not in cut and len(text) == missing[0]]
    if any(size != missing[0] for size in missing) or len({texts[0][path] for path in alike}) != 1:
        raise ContentChanged(f"{ref}: its pages do not add up")
    # Two texts that are alike in every page, and only one was cut: a content is what gets so long.
    chosen = next((path for path in alike if path[-1:] == ("content",)), alike[0])
    return [*cut, chosen]


def _replaced(value: Any, path: _Path, texts: dict[_Path, str]) -> Any:
    if isinstance(value, str):
        return texts.get(path, value)
    if isinstance(value, list):
        return [_replaced(inner, (*path, index), texts) for index, inner in enumerate(value)]
    if isinstance(value, dict):
        return {name: _replaced(inner, (*path, name), texts) for name, inner in value.items()}
    return value
