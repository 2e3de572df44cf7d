"""Which constraints of one run may forbid an operation, found without asking every one of them.

A constraint waits under the literal beginnings of the globs of one of its lists; only where the operation has
such a beginning is it looked at. Derived from the constraints alone and never stored; it decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from protocol.events import Forbids
from sidecar.core.globs import beginning

if TYPE_CHECKING:
    from sidecar.core.state import ConstraintItem, Operation

_FIELDS: Final = {"targets": "target", "tools": "tool", "kinds": "kind"}
"""List of a constraint → field of an operation; of lists that tell equally much the first is taken."""

_Key = tuple[str, bool, str]
"""List, whether the text must be all of the field, text."""


class Rules:
    """The active constraints of one run that forbid something."""

    __slots__ = ("_lengths", "_places", "_under")

    def __init__(self) -> None:
        self._places: dict[_Key, dict[str, ConstraintItem]] = {}
        self._under: dict[str, dict[str, ConstraintItem]] = {name: {} for name in _FIELDS}
        """List → every constraint that waits under it: a field the operation lacks matches."""
        self._lengths: dict[str, Counter[int]] = {name: Counter() for name in _FIELDS}
        """List → lengths of the beginnings in use."""

    def copy(self) -> Rules:
        twin = Rules()
        twin._places = {key: dict(waiting) for key, waiting in self._places.items()}
        twin._under = {name: dict(waiting) for name, waiting in self._under.items()}
        twin._lengths = {name: Counter(lengths) for name, lengths in self._lengths.items()}
        return twin

    def note(self, old: ConstraintItem | None, new: ConstraintItem | None) -> None:
        """A constraint takes the place of ``old``; None: there was none, or there is none any more."""
        if old is not None and old.live and (keys := _keys(old.forbids)):
            self._under[keys[0][0]].pop(old.id, None)
            for key in keys:
                self._take(key, old.id)
        if new is not None and new.live and (keys := _keys(new.forbids)):
            self._under[keys[0][0]][new.id] = new
            for key in keys:
                self._give(key, new)

    def concerning(self, operation: Operation) -> Iterator[ConstraintItem]:
        """Constraints that may forbid the operation; all that do are among them, some perhaps twice."""
        for name, field in _FIELDS.items():
            value = getattr(operation, field)
            if value is None:
                yield from self._under[name].values()
                continue
            yield from self._places.get((name, True, value), {}).values()
            for length in self._lengths[name]:
                if length <= len(value):
                    yield from self._places.get((name, False, value[:length]), {}).values()

    def _give(self, key: _Key, item: ConstraintItem) -> None:
        waiting = self._places.setdefault(key, {})
        waiting[item.id] = item
        name, whole, text = key
        if not whole and len(waiting) == 1:
            self._lengths[name][len(text)] += 1

    def _take(self, key: _Key, constraint_id: str) -> None:
        waiting = self._places[key]
        del waiting[constraint_id]
        if waiting:
            return
        del self._places[key]
        name, whole, text = key
        if not whole:
            self._lengths[name][len(text)] -= 1
            if not self._lengths[name][len(text)]:
                del self._lengths[name][len(text)]


def _keys(forbids: Forbids | None) -> list[_Key]:
    """Where a constraint waits: under the list whose least telling glob tells most. None: it forbids nothing."""
    found: list[_Key] = []
    if forbids is not None:
        for name in _FIELDS:
            keys = list({(name, *beginning(glob)) for glob in getattr(forbids, name) or ()})
            if keys and (not found or _least(keys) > _least(found)):
                found = keys
    return found


def _least(keys: list[_Key]) -> int:
    return min(len(text) for _, _, text in keys)
