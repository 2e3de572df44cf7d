"""The optional items of a packet, weighed one by one in the order in which they stay, and only as far as any fit.

The JSON and the text of a packet are put together item by item, so what a choice of them weighs is a sum that
can be known without writing the packet. It knows no ledger and decides nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

from msgspec import Struct

from protocol.codec import encode
from sidecar.core.text import item_lines


class Piece(Struct, frozen=True, kw_only=True):
    """One item of a list of the packet. ``order`` sorts it within its slot; ``required``: never left out.

    Of two others the one of higher ``rank`` is left out first, and of one rank the later one.
    """

    slot: str
    order: Any
    value: Any
    rank: int = 0
    required: bool = False


class Group(NamedTuple):
    """Optional pieces of one rank in their order, made when they are asked for, at most once.

    ``counts``: how many there are of each slot.
    """

    rank: int
    counts: Mapping[str, int]
    pieces: Iterable[Piece]


class Weight(NamedTuple):
    """Bytes: of JSON with ``text`` and without ``cleared``, and of ``text``."""

    measured: int
    text: int


_NO_LISTS: Final = frozenset({"rejected", "summary.narrative"})
"""Slots whose pieces are not items of a list of the packet's own."""


class Shelf:
    """Optional pieces in the order in which they stay; what would alone fill much of a packet comes last.

    ``large``: bytes of JSON from which on a piece must not keep all behind it out. Nothing beyond the first
    piece that makes all before it heavier than ``most`` is looked at.
    """

    def __init__(self, groups: Sequence[Group], large: int, most: Weight) -> None:
        groups = sorted(groups, key=lambda group: group.rank)
        self.counts: Counter[str] = Counter()
        for group in groups:
            self.counts.update(group.counts)
        self.total = sum(self.counts.values())
        self.pieces: list[Piece] = []
        self.ready: dict[int, str] = {}
        """The lines of the pieces, by the identity of their values."""
        self._sums = [Weight(0, 0)]
        """What the first so many weigh, without commas."""
        self._most = most
        self._decided: set[str] = set()
        self._waiting: dict[str, Weight] = {}
        self._fill(groups, large)

    @property
    def whole(self) -> bool:
        """Whether every piece was weighed."""
        return len(self.pieces) == self.total

    def left(self, count: int) -> Counter[str]:
        """Pieces of each slot beyond the first ``count``."""
        rest = self.counts.copy()
        rest.subtract(piece.slot for piece in self.pieces[:count])
        return rest

    def weight(self, count: int, required: Mapping[str, int]) -> Weight | None:
        """What the first ``count`` add to lists that hold ``required`` others; None: more than ``most``."""
        if count >= len(self._sums):
            return None
        commas = 0
        for slot, number in Counter(piece.slot for piece in self.pieces[:count]).items():
            if slot not in _NO_LISTS:
                commas += number - (0 if required.get(slot) else 1)
        measured, text = self._sums[count]
        return Weight(measured + commas, text)

    def beyond(self, room: Weight) -> int:
        """The least number of the pieces that does not go in, even without commas; all of them at most."""
        over = bisect_right(self._sums, room.measured, key=lambda sums: sums.measured)
        over = min(over, bisect_right(self._sums, room.text, key=lambda sums: sums.text))
        return min(max(over, 1), self.total)

    def _fill(self, groups: Iterable[Group], large: int) -> None:
        later: list[tuple[Piece, int]] = []
        ahead = self._small(chain.from_iterable(group.pieces for group in groups), large, later)
        # Those come last however small their rank is.
        for piece, size in chain(ahead, later):
            if not self._add(piece, size):
                return

    def _small(
        self, pieces: Iterable[Piece], large: int, later: list[tuple[Piece, int]]
    ) -> Iterator[tuple[Piece, int]]:
        for piece in pieces:
            size = len(encode(piece.value))
            if size > large:
                later.append((piece, size))
            else:
                yield piece, size

    def _add(self, piece: Piece, size: int) -> bool:
        """Whether more may fit."""
        lines = item_lines(piece.slot, piece.value)
        self.ready[id(piece.value)] = lines
        self.pieces.append(piece)
        added = self._weigh(piece, size, lines)
        measured, text = self._sums[-1]
        here = Weight(measured + added.measured, text + added.text)
        self._sums.append(here)
        return here.measured <= self._most.measured and here.text <= self._most.text

    def _weigh(self, piece: Piece, size: int, lines: str) -> Weight:
        own = weight_of(lines)
        if piece.slot == "rejected":
            decision_id, alternatives = piece.value
            added = Weight(own.measured + len(encode(alternatives)) + len(',"rejected":'), own.text)
            if decision_id in self._decided:
                return added
            # Shown with its decision or not at all.
            self._waiting[decision_id] = added
            return Weight(0, 0)
        if piece.slot == "summary.narrative":
            size -= len('""')
        if piece.slot == "decisions":
            self._decided.add(piece.value["id"])
            beside = self._waiting.pop(piece.value["id"], Weight(0, 0))
            size, own = size + beside.measured, Weight(own.measured, own.text + beside.text)
        return Weight(own.measured + size, own.text)


def weight_of(lines: str) -> Weight:
    """What lines of ``text`` weigh."""
    return Weight(len(encode(lines)) - len('""'), len(lines.encode("utf-8", "replace")))
