"""Child runs: who spawned whom, with what, and what came back.

The parent's word makes a child; a run that only claims a parent belongs to the family and may do nothing.
"""

from __future__ import annotations

from msgspec.structs import replace

from protocol.events import ChildReturned, ChildSpawned
from sidecar.core import family
from sidecar.core.entry import Entry
from sidecar.core.state import Child, Claim, Ledger, Pause, PinnedInput
from sidecar.core.transitions import CHILD


def spawned(entry: Entry, event: ChildSpawned) -> None:
    """The child's contract comes from its parent, before or after the child itself speaks.

    Refused, and recorded, for a child that exists, that is another's, or that is an ancestor of this run.
    """
    ledger, name = entry.ledger, event.child_run
    known = entry.runs.get(name)
    taken = known is not None and known.head.spawned
    if name in ledger.items["child"] or taken or family.descends(entry.runs, entry.run, name):
        entry.violate("illegal_transition", entry.ref)
        return
    inputs = tuple(
        PinnedInput(id=item.name, version=item.version, digest=item.digest) for item in event.inputs
    )
    ledger.put(
        "child",
        Child(
            id=name,
            task=event.task,
            done_when=event.done_when,
            inputs=inputs,
            allowed_tools=event.allowed_tools,
            required_artifacts=event.required_artifacts,
            granted_refs=event.granted_refs,
            position=entry.position,
        ),
    )
    child = entry.relative(name)
    head = child.head
    if head.parent is not None and head.parent in entry.runs:
        entry.relative(head.parent).drop("claim", name)
    head.parent = entry.run
    head.spawned = True
    head.allowed_tools = event.allowed_tools
    head.required_artifacts = event.required_artifacts
    head.granted_refs = event.granted_refs
    _give_task(child, event)
    for item in inputs:
        child.put("input", item)


def returned(entry: Entry, event: ChildReturned) -> None:
    """What the child brings; only from one that was spawned and did not return before."""
    child: Child | None = entry.ledger.items["child"].get(event.child_run)
    status = None if child is None else CHILD.get((child.status, event.status))
    if child is None or status is None:
        entry.violate("illegal_transition", entry.ref)
        return
    entry.ledger.put(
        "child", replace(child, status=status, artifacts=event.artifacts, evidence=event.evidence)
    )


def claim(entry: Entry, parent: str) -> None:
    """The run says whose child it is. Until that run spawns it, it is paused."""
    if family.descends(entry.runs, parent, entry.run):
        # Its own descendant cannot be its parent. It acts for nobody, so an authority has to let it go on.
        entry.violate("illegal_transition", entry.ref)
        entry.head.pauses = (Pause("authority", "the parent it claims is its own descendant"),)
        return
    entry.head.parent = parent
    entry.relative(parent).put("claim", Claim(id=entry.run))


def _give_task(child: Ledger, event: ChildSpawned) -> None:
    """The parent's task; what an authority changed stands."""
    if child.head.context_changed_at:
        return
    task = child.task
    child.put("task", replace(task, goal=event.task, done_when=event.done_when or task.done_when))
