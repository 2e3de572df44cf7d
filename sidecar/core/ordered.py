"""A small ordered multimap: entries under a key, kept in their own order as they come and go.

It knows nothing of what the entries mean.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from typing import Any


class Ordered:
    """Items under a key, in an order of their own; empty keys are not kept."""

    __slots__ = ("_under",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self._under: dict[Hashable, list[tuple[Any, ...]]] = {}

    def add(self, key: Hashable, entry: tuple[Any, ...]) -> None:
        insort(self._under.setdefault(key, []), entry)

    def remove(self, key: Hashable, entry: tuple[Any, ...]) -> None:
        entries = self._under[key]
        del entries[bisect_left(entries, entry)]
        if not entries:
            del self._under[key]

    def get(self, key: Hashable) -> list[tuple[Any, ...]]:
        """The entries, least first."""
        return self._under.get(key, [])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ordered) and self._under == other._under

    def copy(self) -> Ordered:
        twin = Ordered()
        twin._under = {key: list(entries) for key, entries in self._under.items()}
        return twin
