"""What a packet may show of what is finished, and what unfinished work names, found without asking every item.

Kept by the ledger's index item by item, so that the cost of a packet is what it shows and not what the run did
in its life. Derived from the items alone and never stored. It decides nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from sidecar.core.ordered import Ordered

if TYPE_CHECKING:
    from sidecar.core.state import Artifact

Age = tuple[int, str]
"""(position, id)."""

_SHELVED: Final[Mapping[str, Callable[[Any], bool]]] = {
    "operation": lambda item: not item.live,
    "decision": lambda item: item.live,
    "artifact": lambda item: item.live,
    "evidence": lambda item: item.live,
}
"""Kinds of which only the newest are shown → whether an item is one of those: settled operations, what is in
force of the others."""


class Stock:
    """Items by age, artifacts by every name a ref may use, and the refs that decisions in force hold."""

    __slots__ = ("_ages", "_named", "_refs", "disputing")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self._ages: dict[str, list[Age]] = {kind: [] for kind in _SHELVED}
        self._named = Ordered()
        """Artifact id, key or digest → (artifact id, position, key) of the versions, withdrawn ones too."""
        self._refs: Counter[str] = Counter()
        self.disputing: set[str] = set()
        """Evidence that contradicts other evidence."""

    def note(self, kind: str, old: Any, new: Any) -> None:
        """An item takes the place of ``old``; None: there was none, or there is none any more."""
        wanted = _SHELVED.get(kind)
        if wanted is None:
            return
        before = (old.position, old.id) if old is not None and wanted(old) else None
        after = (new.position, new.id) if new is not None and wanted(new) else None
        if before != after:
            ages = self._ages[kind]
            if before is not None:
                del ages[bisect_left(ages, before)]
            if after is not None:
                insort(ages, after)
        if kind == "decision":
            self._count(old, -1)
            self._count(new, 1)
        elif kind == "evidence":
            for item in (old, new):
                if item is not None:
                    self.disputing.discard(item.id)
            if new is not None and new.contradicts:
                self.disputing.add(new.id)
        elif kind == "artifact":
            self._name(old, new)

    def newest(self, kind: str, most: int, but: Collection[str] = ()) -> list[str]:
        """At most so many ids, newest first, ``but`` these."""
        ages = reversed(self._ages[kind])
        if not but:
            return [name for _, name in islice(ages, most)]
        return list(islice((name for _, name in ages if name not in but), most))

    def count(self, kind: str) -> int:
        """How many there are in all."""
        return len(self._ages[kind])

    def versions(self, name: str) -> list[tuple[Any, ...]]:
        """(artifact id, position, key) of the artifacts with this id, key or prefixed digest, in that order."""
        return self._named.get(name)

    @property
    def refs(self) -> Iterator[str]:
        """What decisions in force name, each once."""
        return iter(self._refs)

    def _count(self, decision: Any, change: int) -> None:
        if decision is None or not decision.live:
            return
        for ref in decision.refs:
            self._refs[ref] += change
            if not self._refs[ref]:
                del self._refs[ref]

    def _name(self, old: Artifact | None, new: Artifact | None) -> None:
        before, after = _names(old), _names(new)
        if before != after:
            for (names, entry), change in ((before, self._named.remove), (after, self._named.add)):
                for name in names:
                    change(name, entry)

    def copy(self) -> Stock:
        twin = Stock()
        twin._ages = {kind: list(ages) for kind, ages in self._ages.items()}
        twin._named = self._named.copy()
        twin._refs = self._refs.copy()
        twin.disputing = set(self.disputing)
        return twin

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stock) and (self._ages, self._named, self._refs, self.disputing) == (
            other._ages,
            other._named,
            other._refs,
            other.disputing,
        )


def digest_of(artifact: Artifact) -> str:
    """The artifact's digest with its prefix."""
    return artifact.sha256 if artifact.sha256.startswith("sha256:") else f"sha256:{artifact.sha256}"


def _names(item: Artifact | None) -> tuple[frozenset[str], tuple[Any, ...]]:
    """Names of a version, and what stands under each of them."""
    if item is None:
        return frozenset(), ()
    return frozenset({item.artifact_id, item.id, digest_of(item)}), (item.artifact_id, item.position, item.id)
