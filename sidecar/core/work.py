"""What the agent finds and decides on the way: progress, inputs, decisions, questions, evidence, artifacts.

All of it is the agent's word; none of it permits anything.
"""

from __future__ import annotations

from msgspec.structs import replace

from protocol.events import (
    ArtifactSaved,
    ArtifactWithdrawn,
    DecisionMade,
    EvidenceRecorded,
    Focus,
    InputPinned,
    ModelChanged,
    QuestionAnswered,
    QuestionOpened,
    Scalar,
    StepChanged,
)
from sidecar.core.contract import model_info
from sidecar.core.entry import Entry
from sidecar.core.state import (
    Artifact,
    CompletedStep,
    Decision,
    Evidence,
    Ledger,
    Note,
    PinnedInput,
    PlanStep,
    Question,
    WorkFocus,
)
from sidecar.core.transitions import ARTIFACT, DECISION, QUESTION


def step_changed(entry: Entry, event: StepChanged) -> None:
    """An absent field is unchanged, an empty list clears."""
    if entry.late:
        return
    changes: dict[str, object] = {}
    if event.phase is not None:
        changes["phase"] = event.phase
    if event.completed is not None:
        changes["completed"] = tuple(
            [CompletedStep(text=step.text, refs=step.refs) for step in event.completed]
        )
    if event.plan is not None:
        changes["plan"] = tuple(
            [PlanStep(id=step.id, text=step.text, state=step.state) for step in event.plan]
        )
    if event.focus is not None:
        changes["focus"] = _focus(event.focus)
    if event.next_action is not None:
        changes["next_action"] = event.next_action
    if event.blockers is not None:
        changes["blockers"] = tuple(Note(id=note.id, text=note.text) for note in event.blockers)
    if event.uncertain is not None:
        changes["uncertain"] = event.uncertain
    if changes:
        entry.ledger.put("progress", replace(entry.ledger.progress, **changes))


def model_changed(entry: Entry, event: ModelChanged) -> None:
    if not entry.late:
        entry.head.model = model_info(event.model)


def input_pinned(entry: Entry, event: InputPinned) -> None:
    if not entry.late:
        entry.ledger.put("input", PinnedInput(id=event.name, version=event.version, digest=event.digest))


def decided(entry: Entry, event: DecisionMade) -> None:
    """A decision stands, and the one it supersedes does not any more."""
    decisions = entry.ledger.items["decision"]
    if event.decision_id in decisions:
        entry.violate("illegal_transition", f"decision:{event.decision_id}")
        return
    entry.ledger.put(
        "decision",
        Decision(
            id=event.decision_id,
            summary=event.summary,
            reason=event.reason,
            refs=event.refs,
            rejected=tuple((other.alternative, other.reason) for other in event.rejected),
            position=entry.position,
        ),
    )
    if event.supersedes is None:
        return
    old: Decision | None = decisions.get(event.supersedes) if event.supersedes != event.decision_id else None
    state = None if old is None else DECISION.get((old.state, "superseded"))
    if old is None or state is None:
        entry.violate("illegal_transition", f"decision:{event.supersedes}")
    else:
        entry.ledger.put("decision", replace(old, state=state))


def asked(entry: Entry, event: QuestionOpened) -> None:
    if event.question_id in entry.ledger.items["question"]:
        entry.violate("illegal_transition", f"question:{event.question_id}")
    else:
        entry.ledger.put("question", Question(id=event.question_id, text=event.text, position=entry.position))


def answered(entry: Entry, event: QuestionAnswered) -> None:
    question: Question | None = entry.ledger.items["question"].get(event.question_id)
    state = None if question is None else QUESTION.get((question.state, "answered"))
    if question is None or state is None:
        entry.violate("illegal_transition", f"question:{event.question_id}")
    else:
        entry.ledger.put("question", replace(question, state=state, answer=event.answer, by=event.by))


def observed(entry: Entry, event: EvidenceRecorded) -> None:
    if event.evidence_id in entry.ledger.items["evidence"]:
        entry.violate("illegal_transition", f"evidence:{event.evidence_id}")
        return
    entry.ledger.put(
        "evidence",
        Evidence(
            id=event.evidence_id,
            claim=event.claim,
            kind=event.kind,
            source=event.source,
            value=_stored(event.value),
            unit=event.unit,
            contradicts=event.contradicts,
            position=entry.position,
            late=entry.late,
        ),
    )


def artifact_saved(entry: Entry, event: ArtifactSaved) -> None:
    """A version of an artifact; the newest saved one is current. A late one does not take its place."""
    ledger = entry.ledger
    versions = ledger.index.versions.get(event.artifact_id, {})
    if event.version in versions or (event.version is None and versions):
        entry.violate("illegal_transition", f"artifact:{event.artifact_id}")
        return
    saved = Artifact(
        id=_free_key(ledger, f"{event.artifact_id}@{event.version}" if versions else event.artifact_id),
        artifact_id=event.artifact_id,
        uri=event.uri,
        sha256=event.sha256,
        description=event.description,
        version=event.version,
        media_type=event.media_type,
        bytes=event.bytes,
        position=entry.position,
    )
    current = ledger.index.current.get(event.artifact_id)
    if current is not None and entry.late:
        saved = replace(saved, state="superseded")
    elif current is not None:
        old: Artifact = ledger.items["artifact"][current[1]]
        ledger.put("artifact", replace(old, state=ARTIFACT[old.state, "newer version"]))
    ledger.put("artifact", saved)


def artifact_withdrawn(entry: Entry, event: ArtifactWithdrawn) -> None:
    """No version of it is to be used any more."""
    ledger = entry.ledger
    found = False
    for key in sorted(ledger.index.versions.get(event.artifact_id, {}).values()):
        item: Artifact = ledger.items["artifact"][key]
        state = ARTIFACT.get((item.state, "withdrawn"))
        if state is not None:
            ledger.put("artifact", replace(item, state=state))
            found = True
    if not found:
        entry.violate("illegal_transition", f"artifact:{event.artifact_id}")


def _stored(value: Scalar) -> Scalar:
    """A number that no 64-bit integer holds as the double it is in canonical JSON anyway."""
    return float(value) if isinstance(value, int) and not -(2**63) <= value < 2**63 else value


def _free_key(ledger: Ledger, key: str) -> str:
    """The key, made another one while an artifact of that id and version has it."""
    while key in ledger.items["artifact"]:
        key += "@"
    return key


def _focus(focus: Focus) -> WorkFocus:
    return WorkFocus(files=focus.files, hypothesis=focus.hypothesis, remaining=focus.remaining)
