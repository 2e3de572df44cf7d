"""What a run has from its ancestors, and what its family shares: constraints, policy, pauses, gaps, keys.

Read only. ``runs`` must hold the whole family; an ancestor that is missing counts as a reason to do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from sidecar.core.state import ConstraintItem, Gap, Lane, Ledger, Operation

BINDING_SOURCES: Final = frozenset({"user", "policy", "operator"})
"""Sources whose constraints hold for descendants too."""


class Stop(NamedTuple):
    """Why a run may do nothing now, and what ends that."""

    text: str
    clears_when: str


class Holder(NamedTuple):
    """An operation and the run it belongs to."""

    run: str
    operation: Operation


def line(runs: Mapping[str, Ledger], run: str) -> Iterator[Ledger]:
    """The run's ledger, then its parent's, and so on to the root, as far as ``runs`` holds them."""
    seen: set[str] = set()
    name: str | None = run
    while name is not None and name not in seen and name in runs:
        seen.add(name)
        ledger = runs[name]
        yield ledger
        name = ledger.head.parent


def root(runs: Mapping[str, Ledger], run: str) -> Ledger:
    """The topmost ledger of the line. Raises KeyError when ``run`` is not in ``runs``."""
    top = runs[run]
    for ledger in line(runs, run):
        top = ledger
    return top


def descends(runs: Mapping[str, Ledger], run: str, ancestor: str) -> bool:
    """Whether ``ancestor`` is the run itself or above it."""
    return run == ancestor or any(ledger.head.run == ancestor for ledger in line(runs, run))


def members(runs: Mapping[str, Ledger], run: str) -> Iterator[Ledger]:
    """The whole family: the root and all that were spawned by, or claim, one of its members."""
    seen: set[str] = set()
    waiting = [root(runs, run).head.run]
    while waiting:
        name = waiting.pop()
        if name in seen or name not in runs:
            continue
        seen.add(name)
        ledger = runs[name]
        yield ledger
        waiting += sorted({*ledger.items["child"], *ledger.items["claim"]}, reverse=True)


def handed_down(ledger: Ledger) -> tuple[object, ...] | None:
    """Changes whenever what holds for the run's descendants does: binding constraints, policy, pauses, its being
    begun and spawned, gaps. None: it has no descendants. Comparable only within one message's fold."""
    items = ledger.items
    if not items["child"] and not items["claim"]:
        return None
    head, policy = ledger.head, ledger.policy
    return (
        ledger.index.binding_changes,
        (policy.release, policy.released, policy.approval_kinds, policy.forbidden_kinds),
        (head.pauses, head.started, head.spawned, head.parent),
    )


def constraints(runs: Mapping[str, Ledger], run: str) -> list[ConstraintItem]:
    """The run's active constraints and its ancestors' binding ones, nearest run first, by id within a run."""
    found: list[ConstraintItem] = []
    for ledger in line(runs, run):
        own = ledger.head.run == run
        active = ledger.active["constraint"].values()
        found += sorted(
            (item for item in active if own or item.source in BINDING_SOURCES), key=lambda item: item.id
        )
    return found


def released(runs: Mapping[str, Ledger], run: str) -> str | None:
    """The policy version in force: the newest released to the run or one of its ancestors."""
    newest: tuple[int, str] | None = None
    for ledger in line(runs, run):
        policy = ledger.policy
        if policy.released is not None and (newest is None or policy.release >= newest[0]):
            newest = (policy.release, policy.released)
    return None if newest is None else newest[1]


def approval_kinds(lane: Lane, runs: Mapping[str, Ledger], run: str) -> tuple[str, ...]:
    """Globs of kinds that need approval: all lists released to run and ancestors, else the lane's."""
    lists = [ledger.policy.approval_kinds for ledger in line(runs, run)]
    return _together(lists, lane.settings.approval_kinds)


def forbidden_kinds(lane: Lane, runs: Mapping[str, Ledger], run: str) -> tuple[str, ...]:
    """Globs of kinds that are forbidden, found as ``approval_kinds`` are."""
    lists = [ledger.policy.forbidden_kinds for ledger in line(runs, run)]
    return _together(lists, lane.settings.forbidden_kinds)


def stop(runs: Mapping[str, Ledger], run: str) -> Stop | None:
    """The nearest pause of run or ancestors; no contract, no parent or not being spawned is one too."""
    for ledger in line(runs, run):
        head = ledger.head
        whose = "the run" if head.run == run else f"its ancestor {head.run}"
        if not head.started:
            return Stop(f"{whose} has no contract yet", "run.started arrives")
        for pause in head.pauses:
            if pause.by == "authority":
                return Stop(
                    f"{whose} was paused by an authority: {pause.reason}", "an authority's run.resumed"
                )
            return Stop(f"{whose} was paused by its agent: {pause.reason}", "run.resumed")
        if head.parent is not None and not head.spawned:
            return Stop(f"{whose} was not spawned by its parent {head.parent}", "the parent's child.spawned")
        if head.parent is not None and head.parent not in runs:
            return Stop(
                f"the parent {head.parent} of {whose} is not known here", "the parent's ledger is read"
            )
    return None


def open_gap(runs: Mapping[str, Ledger], run: str) -> tuple[str, Gap] | None:
    """The first open gap of the run, else of its nearest ancestor: a constraint or a pause may be in it."""
    for ledger in line(runs, run):
        gaps = ledger.active["gap"].values()
        if gaps:
            return ledger.head.run, min(gaps, key=lambda gap: (gap.session or "", gap.first, gap.id))
    return None


def holder(runs: Mapping[str, Ledger], run: str, operation: Operation, state: str) -> Holder | None:
    """The first other operation of the family with the key of this one of ``run`` that is in this state."""
    for ledger in members(runs, run):
        for _, name in ledger.index.holding.get((operation.idempotency_key, state)):
            if (ledger.head.run, name) != (run, operation.id):
                return Holder(ledger.head.run, ledger.items["operation"][name])
    return None


def _together(lists: list[tuple[str, ...] | None], configured: tuple[str, ...]) -> tuple[str, ...]:
    told = [entries for entries in lists if entries is not None]
    return configured if not told else tuple(entry for entries in told for entry in entries)
