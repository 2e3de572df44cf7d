"""What the run is for and under whose rules: its start, resumption, pause and end, task, policy, constraints.

A contract is set once; what a later ``run.started`` says otherwise is a conflict and changes nothing, except
that a constraint is never lost.
"""

from __future__ import annotations

from typing import TypeVar

from msgspec.structs import replace

from protocol.events import (
    ConstraintLifted,
    ConstraintSet,
    Event,
    Forbids,
    InputRef,
    Model,
    PolicyLoaded,
    PolicyReleased,
    RunFinished,
    RunPaused,
    RunResumed,
    RunStarted,
    Source,
    TaskChanged,
)
from sidecar.core import children, family, sessions
from sidecar.core.entry import Entry
from sidecar.core.state import ConstraintItem, Ledger, ModelInfo, Pause, PinnedInput
from sidecar.core.transitions import CONSTRAINT, RUN

T = TypeVar("T")

_UNNUMBERED = 2**53
"""Stands for the number of a release that has none: nothing late is newer."""


def refusal(ledger: Ledger, event: Event) -> str | None:
    """Why the agent may not lift or replace this constraint, or ``None``: its own it may."""
    match event:
        case ConstraintLifted():
            item = ledger.items["constraint"].get(event.constraint_id)
            if item is None or not _is_the_agents(item):
                return "only an authority lifts a constraint that is not the agent's own"
        case ConstraintSet(replaces=str(other)) if event.constraint_id not in ledger.items["constraint"]:
            item = ledger.items["constraint"].get(other)
            if item is not None and not _is_the_agents(item):
                return "only an authority replaces a constraint that is not the agent's own"
        case _:
            pass
    return None


def started(entry: Entry, event: RunStarted) -> None:
    """The contract, or a new session of the same one. A late one fills in a missing contract."""
    head, ledger = entry.head, entry.ledger
    for constraint in event.constraints:
        known = ledger.items["constraint"].get(constraint.id)
        if known is None:
            if head.started:
                _conflict(entry)
            _set(entry, constraint.id, constraint.text, constraint.source, constraint.forbids)
        elif (known.text, known.source, known.forbids) != (
            constraint.text,
            constraint.source,
            constraint.forbids,
        ):
            _conflict(entry)
    if entry.late and head.started:
        return
    if entry.channel == "event" and not (entry.late and head.session is not None):
        sessions.begin(entry, event.session)
    if not (entry.late and head.model is not None):
        head.model = model_info(event.model)
    if event.policy_version is not None and not (entry.late and ledger.policy.loaded is not None):
        _load(entry, event.policy_version)
    first = not head.started
    head.started = True
    _settle_task(entry, event, first)
    _settle_inputs(entry, event.inputs, first)
    head.agent = _once(entry, head.agent, event.agent, first)
    head.continues = _once(entry, head.continues, event.continues, first)
    head.labels = dict(_once(entry, head.labels, event.labels, first) or {})
    if event.parent_run is not None and event.parent_run != head.parent:
        if first and head.parent is None:
            children.claim(entry, event.parent_run)
        else:
            _conflict(entry)


def resumed(entry: Entry, event: RunResumed) -> None:
    """The agent's begins its session and ends its own pause; an authority's ends every pause and reopens."""
    if entry.late:
        return
    head = entry.head
    if entry.channel == "event":
        sessions.begin(entry, event.session)
    if entry.has_authority:
        head.pauses = ()
        if head.finished is not None and ("finished", "run.resumed by an authority") in RUN:
            head.finished = None
    else:
        head.pauses = tuple(pause for pause in head.pauses if pause.by == "authority")
    if event.policy_version is not None:
        _load(entry, event.policy_version)
    if event.ledger_version is not None and event.ledger_version < head.version:
        head.context_known_at = max(head.context_known_at, event.ledger_version)


def paused(entry: Entry, event: RunPaused) -> None:
    """One pause by the agent and one by an authority may stand at a time; the newest reason is kept."""
    by: Pause = Pause("authority" if entry.channel == "authority" else "agent", event.reason)
    others = tuple(pause for pause in entry.head.pauses if pause.by != by.by)
    entry.head.pauses = (*others, by)


def finished(entry: Entry, event: RunFinished) -> None:
    """The end; a second one is illegal."""
    state = "running" if entry.head.finished is None else "finished"
    if (state, "run.finished") not in RUN:
        entry.violate("illegal_transition")
        return
    entry.head.finished = event.outcome


def task_changed(entry: Entry, event: TaskChanged) -> None:
    """An authority's new task, owner or trust; the agent has to resume from a packet that knows it."""
    if entry.late:
        return
    given = {
        name: value
        for name in ("goal", "done_when", "owner", "trust")
        if (value := getattr(event, name)) is not None
    }
    if given:
        entry.ledger.put("task", replace(entry.ledger.task, **given))
        entry.head.context_changed_at = entry.head.version


def policy_released(entry: Entry, event: PolicyReleased) -> None:
    """A policy is in force; an absent list keeps the old one.

    A late release sets no version. Its lists hold where no newer one has set them: they only were overtaken.
    """
    ledger = entry.ledger
    policy = ledger.policy
    told_in = f"{entry.channel}/{event.session or ''}"
    number = _UNNUMBERED if event.seq is None else event.seq
    changes: dict[str, object] = {}
    for name in ("approval_kinds", "forbidden_kinds"):
        kinds = getattr(event, name)
        if kinds is None:
            continue
        overtaken = getattr(policy, name) is not None and (
            policy.told_in != told_in or getattr(policy, f"{name}_seq") > number
        )
        if not (entry.late and overtaken):
            changes |= {name: kinds, f"{name}_seq": number}
    if not entry.late:
        top = family.root(entry.runs, entry.run)
        entry.relative(top.head.run).head.releases += 1
        changes |= {
            "released": event.version,
            "summary": event.summary,
            "release": top.head.releases,
            "told_in": told_in,
        }
    if changes:
        ledger.put("policy", replace(policy, **changes))


def policy_loaded(entry: Entry, event: PolicyLoaded) -> None:
    if not entry.late:
        _load(entry, event.version)


def constraint_set(entry: Entry, event: ConstraintSet) -> None:
    """A constraint holds, and the one it replaces does not any more. One that is not there is recorded."""
    known = entry.ledger.items["constraint"].get(event.constraint_id)
    if known is not None:
        entry.violate("illegal_transition", _ref(event.constraint_id))
        if entry.late and known.live and (known.text, known.forbids) != (event.text, event.forbids):
            # Told first, it came second. Both hold, this one under a name of its own.
            other = f"{event.constraint_id[:90]}@pos:{entry.position}"
            _set(entry, other, event.text, event.source, event.forbids)
        return
    _set(entry, event.constraint_id, event.text, event.source, event.forbids)
    if event.replaces is not None:
        _end(entry, event.replaces, "replaced", except_for=event.constraint_id)


def constraint_lifted(entry: Entry, event: ConstraintLifted) -> None:
    if not entry.late:
        _end(entry, event.constraint_id, "lifted")


def model_info(model: Model) -> ModelInfo:
    return ModelInfo(model.name, model.context_window, model.max_output_tokens)


def _is_the_agents(item: ConstraintItem) -> bool:
    return item.source == "agent" and item.told_by == "agent"


def _set(entry: Entry, constraint_id: str, text: str, source: Source, forbids: Forbids | None) -> None:
    entry.ledger.put(
        "constraint",
        ConstraintItem(
            id=constraint_id,
            text=text,
            source=source,
            told_by="authority" if entry.channel == "authority" else "agent",
            forbids=forbids,
            position=entry.position,
        ),
    )
    entry.head.constraint_seen = True


def _end(entry: Entry, constraint_id: str, happens: str, except_for: str | None = None) -> None:
    item = entry.ledger.items["constraint"].get(constraint_id)
    state = None if item is None or constraint_id == except_for else CONSTRAINT.get((item.state, happens))
    if item is None or state is None:
        entry.violate("illegal_transition", _ref(constraint_id))
    else:
        entry.ledger.put("constraint", replace(item, state=state))


def _load(entry: Entry, version: str) -> None:
    entry.ledger.put("policy", replace(entry.ledger.policy, loaded=version))


def _settle_task(entry: Entry, event: RunStarted, first: bool) -> None:
    task = entry.ledger.task
    settled = replace(
        task,
        goal=_once(entry, task.goal, event.goal, first) or "",
        done_when=_once(entry, task.done_when, event.done_when, first) or (),
        scope=_once(entry, task.scope, event.scope, first),
        owner=_once(entry, task.owner, event.owner, first),
    )
    if first or settled != task:
        entry.ledger.put("task", settled)


def _settle_inputs(entry: Entry, inputs: tuple[InputRef, ...], first: bool) -> None:
    """The inputs of the first start; those of a parent, and what is pinned when it comes again, stand."""
    known = entry.ledger.items["input"]
    for item in inputs:
        told = PinnedInput(id=item.name, version=item.version, digest=item.digest)
        stands = item.name in known and (entry.head.spawned or entry.late or not first)
        if (first and not stands) or known.get(item.name) == told:
            entry.ledger.put("input", told)
        else:
            _conflict(entry)


def _once(entry: Entry, known: T, told: T, first: bool) -> T:
    """A field of the contract: what is known stands, what differs is a conflict, no value is no claim."""
    if not told or told == known:
        return known
    if first and not known:
        return told
    _conflict(entry)
    return known


def _conflict(entry: Entry) -> None:
    """Once per message, however much differs."""
    if not any(violation.code == "contract_conflict" for violation in entry.outcome.violations):
        entry.violate("contract_conflict")


def _ref(constraint_id: str) -> str:
    return f"constraint:{constraint_id}"
