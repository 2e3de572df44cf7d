"""Where a ledger's items are found by something other than their id.

Derived from the items alone and never stored: built anew from them it is the same. It keeps the cost of
a message and of a judgement independent of how long the run is. It decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from sidecar.core.ordered import Ordered
from sidecar.core.rules import Rules
from sidecar.core.stock import Stock

if TYPE_CHECKING:
    from sidecar.core.state import Approval, Artifact, Call, Operation

INDEXED: Final = frozenset(
    {"operation", "approval", "artifact", "call", "constraint", "gap", "decision", "evidence"}
)
"""Kinds whose items it finds."""


class Index:
    """Secondary keys of operations, approvals, artifacts, calls and constraints."""

    __slots__ = (
        "approvals_of_kind",
        "approvals_of_operation",
        "binding_changes",
        "calls_of_operation",
        "current",
        "granted",
        "holding",
        "open_calls",
        "requests",
        "rules",
        "sizes",
        "stock",
        "unsettled",
        "versions",
    )

    def __init__(self) -> None:
        self.holding = Ordered()
        """(idempotency key, state) → (position, id) of operations."""
        self.requests: dict[str, str] = {}
        """Request of ``authorize`` → the operation it reserved."""
        self.unsettled: set[str] = set()
        """Operations pending or unknown."""
        self.granted = Ordered()
        """("operation", id), or ("action", kind) of those that name none → (granted at, position, id)."""
        self.approvals_of_operation: dict[str, tuple[int, str]] = {}
        """Operation → (position, id) of the newest approval that names it, whatever its state."""
        self.approvals_of_kind: dict[str, tuple[int, str]] = {}
        """Action → (position, id) of the newest approval for it that names no operation."""
        self.current: dict[str, tuple[int, str]] = {}
        """Artifact id → (position, key) of its newest saved version."""
        self.versions: dict[str, dict[str | None, str]] = {}
        """Artifact id → version → key, withdrawn ones too."""
        self.open_calls: dict[str, tuple[str, ...]] = {}
        """Call id → event ids of its open calls."""
        self.calls_of_operation: Counter[str] = Counter()
        """Operation → how many of its calls are open; none where none is."""
        self.rules = Rules()
        """The active constraints, by what they forbid."""
        self.binding_changes = 0
        """How often a constraint or gap that holds for descendants came, went or changed."""
        self.stock = Stock()
        """What a packet may show of what is finished, and what is named by what is not."""
        self.sizes: dict[str, int] = dict.fromkeys(INDEXED, 0)

    @classmethod
    def of(cls, items: Mapping[str, Mapping[str, Any]]) -> Index:
        """The index of these items."""
        index = cls()
        for kind in INDEXED:
            for item in items[kind].values():
                index.note(kind, None, item)
        return index

    def covers(self, items: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether every indexed item went through ``note``; false where items were put in by other ways."""
        sizes = self.sizes
        # Spelt out: asked for with every call and result.
        return (
            sizes["call"] == len(items["call"])
            and sizes["operation"] == len(items["operation"])
            and sizes["approval"] == len(items["approval"])
            and sizes["artifact"] == len(items["artifact"])
            and sizes["decision"] == len(items["decision"])
            and sizes["evidence"] == len(items["evidence"])
        )

    def copy(self) -> Index:
        twin = Index()
        twin.holding = self.holding.copy()
        twin.requests = dict(self.requests)
        twin.unsettled = set(self.unsettled)
        twin.granted = self.granted.copy()
        twin.rules = self.rules.copy()
        twin.stock = self.stock.copy()
        twin.binding_changes = self.binding_changes
        twin.approvals_of_operation = dict(self.approvals_of_operation)
        twin.approvals_of_kind = dict(self.approvals_of_kind)
        twin.current = dict(self.current)
        twin.versions = {name: dict(keys) for name, keys in self.versions.items()}
        twin.open_calls = dict(self.open_calls)
        twin.calls_of_operation = self.calls_of_operation.copy()
        twin.sizes = dict(self.sizes)
        return twin

    def note(self, kind: str, old: Any, new: Any) -> None:
        """An item takes the place of ``old``; None: there was none, or there is none any more."""
        if kind not in INDEXED:
            return
        self.sizes[kind] += (new is not None) - (old is not None)
        if kind == "call":
            # Half of everything that comes and goes, and nothing a packet shows of what is finished.
            self._call(old, new)
            return
        self.stock.note(kind, old, new)
        if kind == "operation":
            self._operation(old, new)
        elif kind == "approval":
            self._approval(old, new)
        elif kind == "artifact":
            self._artifact(old, new)
        elif kind == "constraint":
            self.rules.note(old, new)
            self.binding_changes += any(item is not None and item.source != "agent" for item in (old, new))
        elif kind == "gap":
            self.binding_changes += 1

    def _operation(self, old: Operation | None, new: Operation | None) -> None:
        if new is None:
            return  # operations are never dropped
        before, after = _held(old), _held(new)
        if before != after:
            if before is not None:
                self.holding.remove(*before)
            if after is not None:
                self.holding.add(*after)
        if new.request_id is not None:
            self.requests[new.request_id] = new.id
        if new.state in ("pending", "unknown"):
            self.unsettled.add(new.id)
        else:
            self.unsettled.discard(new.id)

    def _approval(self, old: Approval | None, new: Approval | None) -> None:
        if new is None:
            return  # nor are approvals
        before, after = _grant(old), _grant(new)
        if before != after:
            if before is not None:
                self.granted.remove(*before)
            if after is not None:
                self.granted.add(*after)
        newest = (new.position, new.id)
        if new.operation_id is not None:
            table, name = self.approvals_of_operation, new.operation_id
        else:
            table, name = self.approvals_of_kind, new.action
        table[name] = max(newest, table.get(name, newest))

    def _artifact(self, old: Artifact | None, new: Artifact | None) -> None:
        if old is not None and self.current.get(old.artifact_id) == (old.position, old.id):
            del self.current[old.artifact_id]
        if new is not None:
            self.versions.setdefault(new.artifact_id, {})[new.version] = new.id
        if new is not None and new.state == "saved":
            newest = (new.position, new.id)
            self.current[new.artifact_id] = max(newest, self.current.get(new.artifact_id, newest))

    def _call(self, old: Call | None, new: Call | None) -> None:
        if old is not None and old.state == "open":
            keys = self.open_calls.get(old.call_id, ())
            left = () if keys == (old.id,) else tuple([key for key in keys if key != old.id])
            if left:
                self.open_calls[old.call_id] = left
            else:
                self.open_calls.pop(old.call_id, None)
            if old.operation_id is not None:
                self._count_call(old.operation_id, -1)
        if new is not None and new.state == "open":
            self.open_calls[new.call_id] = (*self.open_calls.get(new.call_id, ()), new.id)
            if new.operation_id is not None:
                self._count_call(new.operation_id, 1)

    def _count_call(self, operation: str, change: int) -> None:
        self.calls_of_operation[operation] += change
        if not self.calls_of_operation[operation]:
            del self.calls_of_operation[operation]


def _held(item: Operation | None) -> tuple[tuple[str, str], tuple[int, str]] | None:
    if item is None or item.idempotency_key is None:
        return None
    return (item.idempotency_key, item.state), (item.position, item.id)


def _grant(item: Approval | None) -> tuple[tuple[str, str], tuple[int, int, str]] | None:
    if item is None or item.state != "granted":
        return None
    named = ("action", item.action) if item.operation_id is None else ("operation", item.operation_id)
    return named, (item.granted_at, item.position, item.id)
