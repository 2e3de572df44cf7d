"""What a resume packet must hold whatever is cut: the protected view of a run, its digest, and its parts.

A pure function of the family's ledgers. It knows no clock, position, version, verdict, checkpoint or
budget, and it never shortens a text: whoever needs less room shortens a copy and keeps this digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from protocol.codec import digest
from protocol.identifiers import parse_ref
from sidecar.core import family
from sidecar.core.state import Approval, Artifact, ConstraintItem, Decision, Evidence, Gap, Ledger, Operation
from sidecar.core.stock import digest_of


class RestedOn(NamedTuple):
    """Keys of the artifacts and evidence that something protected, a decision or a completed step names."""

    artifacts: frozenset[str]
    evidence: frozenset[str]


def protected_view(runs: Mapping[str, Ledger], run: str) -> dict[str, Any]:
    """The object ``protected_digest`` is taken over, for ``run`` with its ancestors found in ``runs``.

    Plain JSON values with the wire's names; what is absent is left out, ``None`` is kept. Raises KeyError
    when ``run`` itself is not in ``runs``; an ancestor that is not there adds nothing.
    """
    ledger = runs[run]
    head, task, progress = ledger.head, ledger.task, ledger.progress
    policy = policy_of(runs, run)
    rested = rested_on(ledger)
    view: dict[str, Any] = {
        "task": {
            "goal": task.goal,
            "done_when": list(task.done_when),
            "scope": None if task.scope is None else _plain(task.scope),
            "constraints": [constraint_fields(item) for item in constraints_of(runs, run)],
            "current_request": [
                {"event_id": item.id, "text": item.text}
                for item in sorted(
                    ledger.active["request"].values(), key=lambda item: (item.position, item.id)
                )
            ],
        },
        "inputs": [
            _without_none({"name": item.id, "version": item.version, "digest": item.digest})
            for item in _by_id(ledger.active["input"].values())
        ],
        "policy": policy,
        "progress": {
            "phase": progress.phase,
            "completed": [{"text": step.text, "refs": list(step.refs)} for step in progress.completed],
            "plan": [{"id": item.id, "text": item.text, "state": item.state} for item in progress.plan],
            "focus": {} if progress.focus is None else _without_none(_plain(progress.focus)),
            "next_action": None
            if progress.next_action is None
            else _without_none(_plain(progress.next_action)),
            "uncertain": list(progress.uncertain),
        },
        "blockers": [{"id": note.id, "text": note.text} for note in _by_id(progress.blockers)],
        "questions": [
            {"id": question.id, "text": question.text}
            for question in _by_id(ledger.active["question"].values())
        ],
        "operations": [operation_fields(item) for item in _by_id(ledger.active["operation"].values())],
        "approvals": [approval_fields(item) for item in _by_id(ledger.active["approval"].values())],
        "artifacts": [
            artifact_fields(item)
            for item in in_artifact_order(ledger.items["artifact"][key] for key in rested.artifacts)
        ],
        "evidence": [
            evidence_fields(item) for item in _by_id(ledger.items["evidence"][key] for key in rested.evidence)
        ],
        "contradictions": contradictions_of(ledger),
        "parent": None if head.parent is None else {"run": head.parent},
        "gaps": [gap_fields(item) for item in sorted(ledger.active["gap"].values(), key=_gap_order)],
    }
    if head.allowed_tools is not None:
        view["allowed_tools"] = list(head.allowed_tools)
    if head.required_artifacts is not None:
        view["required_artifacts"] = list(head.required_artifacts)
    return view


def protected_digest(view: Mapping[str, Any]) -> str:
    """``sha256:`` of the view's RFC 8785 form."""
    return digest(view)


def constraints_of(runs: Mapping[str, Ledger], run: str) -> list[ConstraintItem]:
    """The run's active constraints and its ancestors' binding ones, by id; of equal ids the nearest run's
    first."""
    return sorted(family.constraints(runs, run), key=lambda item: item.id)


def policy_of(runs: Mapping[str, Ledger], run: str) -> dict[str, str | None]:
    """The released version in force for the run, its own or an ancestor's, and the one it loaded itself."""
    return {"released": family.released(runs, run), "loaded": runs[run].policy.loaded}


def rested_on(ledger: Ledger) -> RestedOn:
    """What pending and granted approvals, unsettled operations, decisions in force and completed steps
    name.

    An approval names by ``payload_ref``, an operation by ``target`` and ``receipt`` where these are refs,
    decisions and steps by ``refs``. An artifact ref without a version means the version whose digest the
    approval carries, else the newest saved one. Withdrawn artifacts and other runs' refs are not among
    them.
    """
    artifacts: set[str] = set()
    evidence: set[str] = set()
    stock = ledger.index.stock
    for ref, payload_digest in _named_refs(ledger):
        try:
            kind, name, run = parse_ref(ref)
        except ValueError:
            continue
        if run is not None and run != ledger.head.run:
            continue
        if kind == "evidence" and name in ledger.items["evidence"]:
            evidence.add(name)
        elif kind in ("artifact", "sha256"):
            found = _version(
                ledger, stock.versions(name if kind == "artifact" else f"sha256:{name}"), payload_digest
            )
            if found is not None:
                artifacts.add(found)
    return RestedOn(frozenset(artifacts), frozenset(evidence))


def _version(ledger: Ledger, versions: list[tuple[Any, ...]], payload_digest: str | None) -> str | None:
    """Key of the newest of these that is not withdrawn, of those with the digest if there are any."""
    newest: str | None = None
    for *_, key in reversed(versions):
        item: Artifact = ledger.items["artifact"][key]
        if item.state == "withdrawn":
            continue
        if payload_digest is None or digest_of(item) == payload_digest:
            return item.id
        newest = newest or item.id
    return newest


def contradictions_of(ledger: Ledger) -> list[list[str]]:
    """Pairs of evidence refs that contradict each other, in the order told; within a pair the older one
    first."""
    known: dict[str, Evidence] = ledger.items["evidence"]
    disputing = (known[name] for name in ledger.index.stock.disputing)
    pairs: dict[tuple[str, str], list[str]] = {}
    told = sorted(disputing, key=lambda item: (item.position, item.id))
    for item in told:
        for other in item.contradicts:
            older = known[other].position if other in known else 0
            first, second = sorted([(item.position, item.id), (older, other)])
            if other != item.id:
                pairs.setdefault((first[1], second[1]), [f"evidence:{first[1]}", f"evidence:{second[1]}"])
    return list(pairs.values())


def constraint_fields(item: ConstraintItem) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": item.id,
        "text": item.text,
        "source": item.source,
        "told_by": item.told_by,
    }
    if item.forbids is not None:
        fields["forbids"] = _plain(item.forbids)
    return fields


def operation_fields(item: Operation) -> dict[str, Any]:
    """An operation as the digest sees it: no ``may``, no receipt. Kind and key are empty while undeclared."""
    fields = {
        "id": item.id,
        "kind": item.kind or "",
        "idempotency_key": item.idempotency_key or "",
        "state": item.state,
    }
    return fields | _without_none({"target": item.target, "approval_id": item.approval_id})


def approval_fields(item: Approval) -> dict[str, Any]:
    """An approval as folded; ``uses_left`` once it is granted."""
    optional = {
        "scope": item.scope,
        "by": item.by,
        "expires_at": item.expires_at,
        "payload_ref": item.payload_ref,
        "payload_digest": item.payload_digest,
        "uses_left": item.uses_left if item.state == "granted" else None,
    }
    return {"id": item.id, "action": item.action, "state": item.state} | _without_none(optional)


def decision_fields(item: Decision) -> dict[str, Any]:
    fields: dict[str, Any] = {"id": item.id, "summary": item.summary}
    if item.reason is not None:
        fields["reason"] = item.reason
    if item.rejected:
        fields["rejected"] = [{"alternative": other, "reason": reason} for other, reason in item.rejected]
    return fields


def artifact_fields(item: Artifact) -> dict[str, Any]:
    return {"id": item.artifact_id, "uri": item.uri, "sha256": item.sha256, "description": item.description}


def evidence_fields(item: Evidence) -> dict[str, Any]:
    fields = {"id": item.id, "claim": item.claim, "kind": item.kind, "source": item.source}
    return fields | _without_none({"value": item.value, "unit": item.unit})


def gap_fields(item: Gap) -> dict[str, Any]:
    return _without_none({"session": item.session, "from": item.first, "through": item.through})


def in_artifact_order(items: Iterable[Artifact]) -> list[Artifact]:
    """By artifact id, older versions first."""
    return sorted(items, key=lambda item: (item.artifact_id, item.position, item.id))


def _named_refs(ledger: Ledger) -> Iterator[tuple[str, str | None]]:
    """Every ref that makes its artifact or evidence protected, with the payload digest it stands beside."""
    for approval in ledger.active["approval"].values():
        if approval.payload_ref is not None:
            yield approval.payload_ref, approval.payload_digest
    for operation in ledger.active["operation"].values():
        for ref in (operation.target, operation.receipt):
            if ref is not None:
                yield ref, operation.payload_digest
    for ref in ledger.index.stock.refs:
        yield ref, None
    for step in ledger.progress.completed:
        for ref in step.refs:
            yield ref, None


def _gap_order(item: Gap) -> tuple[str, int, str]:
    return item.session or "", item.first, item.id


def _by_id(items: Iterable[Any]) -> list[Any]:
    return sorted(items, key=lambda item: item.id)


def _plain(value: Any) -> dict[str, Any]:
    """As it reads from the wire: absent what is unset, lists for tuples."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    return plain


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
