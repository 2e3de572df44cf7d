"""What one run may read of another: what was granted to it when it was spawned, and what a child brought back.

Everything else is out of scope, whether it exists or not: nothing here looks at the thing itself. A run passes
on no more than it may read itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from protocol.identifiers import Ref, parse_ref
from sidecar.core.state import Ledger


def may_read(runs: Mapping[str, Ledger], asker: str, target: str, ref: Ref) -> bool:
    """Whether ``asker`` may read what ``ref`` (its ``run`` is not looked at) names in ``target``."""
    return _may_read(runs, asker, target, local(ref), len(runs))


def local(ref: Ref) -> str:
    """The ref without the run it names."""
    return str(ref._replace(run=None))


def granted_here(runs: Mapping[str, Ledger], asker: str, ref: Ref) -> str | None:
    """The parent, if it granted exactly this ref of its own without saying whose: then ``ref`` as it stands
    may mean the parent's."""
    head = runs[asker].head
    if head.parent is not None and head.spawned and local(ref) in head.granted_refs:
        return head.parent
    return None


def readable(runs: Mapping[str, Ledger], asker: str, target: str) -> list[Ref]:
    """All that ``asker`` may read of another run, as refs without a run; [] for nothing."""
    ledger = runs.get(asker)
    if ledger is None or asker == target:
        return []
    told = list(ledger.head.granted_refs)
    child = ledger.items["child"].get(target)
    if child is not None:
        told += [f"run:{target}/artifact:{name}" for name in child.artifacts]
        told += [f"run:{target}/evidence:{name}" for name in child.evidence]
    found: dict[Ref, None] = {}
    for text in told:
        try:
            ref = parse_ref(text)
        except ValueError:
            continue
        whose = ref.run if ref.run is not None else ledger.head.parent
        if whose == target and may_read(runs, asker, target, ref):
            found[ref._replace(run=None)] = None
    return list(found)


def _may_read(runs: Mapping[str, Ledger], asker: str, target: str, name: str, steps: int) -> bool:
    if asker == target:
        return True
    ledger = runs.get(asker)
    if ledger is None or steps < 0:
        return False
    head = ledger.head
    if head.parent is not None and head.spawned:
        own = head.parent == target
        granted = f"run:{target}/{name}" in head.granted_refs or (own and name in head.granted_refs)
        if granted and _may_read(runs, head.parent, target, name, steps - 1):
            return True
    child = ledger.items["child"].get(target)
    if child is None:
        return False
    kind, _, value = name.partition(":")
    return (kind == "artifact" and value in child.artifacts) or (
        kind == "evidence" and value in child.evidence
    )
