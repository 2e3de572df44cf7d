"""A small ordered multimap: entries under a key, kept in their own order as they come and go.

It knows nothing of what the entries mean.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from typing import Any


class Ordered:
    """Items under a key, in an order of their own; empty keys are not kept."""

    __slots__ = ("_owned", "_under")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self._under: dict[Hashable, list[tuple[Any, ...]]] = {}
        self._owned: set[Hashable] | None = None
        """Keys whose entries no copy has as well, None: all. Those of the others are copied before a change."""

    def add(self, key: Hashable, entry: tuple[Any, ...]) -> None:
        insort(self._own(key), entry)

    def remove(self, key: Hashable, entry: tuple[Any, ...]) -> None:
        entries = self._own(key)
        del entries[bisect_left(entries, entry)]
        if not entries:
            del self._under[key]

    def get(self, key: Hashable) -> list[tuple[Any, ...]]:
        """The entries, least first; not to be changed."""
        return self._under.get(key, [])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ordered) and self._under == other._under

    def copy(self) -> Ordered:
        """A copy that later changes of either do not touch. Many small lists copied at once would keep the loop."""
        twin = Ordered()
        twin._under = self._under.copy()
        self._owned, twin._owned = set(), set()
        return twin

    def _own(self, key: Hashable) -> list[tuple[Any, ...]]:
        if self._owned is None or key in self._owned:
            return self._under.setdefault(key, [])
        self._owned.add(key)
        self._under[key] = own = list(self._under.get(key, ()))
        return own
