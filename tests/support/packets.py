"""Hand-made ledgers and packet inputs."""

from __future__ import annotations

from typing import Any

from protocol.events import NextAction, Scope, Settings
from protocol.handoff import ClearedResult, CoversThrough, Projector, Recent, Tail
from protocol.state import StateCheckpoint
from protocol.summary import Statement, Summary
from sidecar.core.packet import BudgetFigures, PacketInputs
from sidecar.core.state import (
    Approval,
    Artifact,
    Call,
    Child,
    CompletedStep,
    ConstraintItem,
    Decision,
    Evidence,
    Forbids,
    Head,
    Ledger,
    ModelInfo,
    Note,
    Operation,
    PinnedInput,
    PlanStep,
    Policy,
    Progress,
    Question,
    Request,
    Task,
    UserMessage,
    WorkFocus,
)

PATCH = f"sha256:{'a' * 64}"


def started(run: str = "r1", **head: Any) -> Ledger:
    """A run with a contract and nothing else."""
    ledger = Ledger(
        Head(run=run, version=1, position=1, started=True, session="s1", last_event_id="e-1", **head)
    )
    ledger.put("task", Task(goal="Ship the release"))
    return ledger


def windowed(ledger: Ledger, usable: int) -> Ledger:
    """The ledger, with a model declared whose window leaves about so many usable tokens."""
    window = usable + 8_001 if usable >= 72_000 else (usable + 1) * 10 // 9
    ledger.head.model = ModelInfo("m", max(1, window), 1)
    return ledger


def busy() -> Ledger:
    """A run with at least one item of every kind."""
    ledger = started(constraint_seen=True)
    ledger.head.version, ledger.head.position, ledger.head.last_event_id = 42, 40, "e-40"
    ledger.head.violations = {"orphan_result": 2, "duplicate_call": 1}
    ledger.put(
        "task",
        Task(
            goal="Ship the release",
            done_when=("tests pass", "notes are out"),
            scope=Scope(actor="bot", tools=("bash", "edit")),
        ),
    )
    ledger.put("policy", Policy(released="p-2", loaded="p-2"))
    ledger.put(
        "progress",
        Progress(
            phase="testing",
            completed=(CompletedStep(text="built it", refs=("evidence:ev-1",)),),
            plan=(
                PlanStep(id="t-2", text="tag", state="todo"),
                PlanStep(id="t-1", text="test", state="doing"),
            ),
            focus=WorkFocus(files=("a.py",), hypothesis="a race"),
            next_action=NextAction(verb="call", detail="run the suite", operation_id="op-1"),
            blockers=(Note(id="b-1", text="CI is slow"),),
            uncertain=("whether the cache is warm",),
        ),
    )
    ledger.put("request", Request(id="e-30", text="and write the notes", position=30))
    ledger.put("request", Request(id="e-29", text="go on", position=29))
    ledger.put("user", UserMessage(id="e-2", text="please ship it", position=2, rank=3))
    ledger.put("user", UserMessage(id="e-9", text="never touch prod-db-7", position=9, rank=2))
    ledger.put("user", UserMessage(id="e-30", text="and write the notes", position=30, rank=2))
    ledger.put("input", PinnedInput(id="spec", version="v3"))
    ledger.put(
        "constraint", ConstraintItem(id="c-2", text="no force push", source="user", told_by="authority")
    )
    ledger.put(
        "constraint",
        ConstraintItem(
            id="c-1",
            text="never deploy on Friday",
            source="operator",
            told_by="agent",
            forbids=Forbids(kinds=("deploy.*",)),
        ),
    )
    ledger.put(
        "constraint",
        ConstraintItem(id="c-0", text="old rule", source="user", told_by="agent", state="lifted"),
    )
    ledger.put(
        "decision",
        Decision(
            id="d-1",
            summary="use plan B",
            reason="A is slow",
            refs=("artifact:patch",),
            rejected=(("plan A", "slow"),),
            position=12,
        ),
    )
    ledger.put("decision", Decision(id="d-0", summary="use plan C", state="superseded", position=11))
    ledger.put("question", Question(id="q-1", text="which branch?", position=13))
    ledger.put("question", Question(id="q-0", text="who?", state="answered", answer="Ann", position=10))
    ledger.put("operation", Operation(id="op-1", kind="test.run", idempotency_key="k1", position=14))
    ledger.put(
        "operation",
        Operation(
            id="op-2",
            kind="release.publish",
            idempotency_key="k2",
            target="registry",
            approval_id="ap-1",
            state="unknown",
            position=15,
        ),
    )
    ledger.put(
        "operation",
        Operation(
            id="op-0", kind="git.tag", idempotency_key="k0", state="succeeded", receipt="tag v1", position=9
        ),
    )
    ledger.put(
        "approval",
        Approval(
            id="ap-1",
            action="release.publish",
            payload_ref="artifact:patch",
            payload_digest=PATCH,
            state="granted",
            by="ann",
            uses_left=1,
            expires_at="2026-12-01T00:00:00Z",
            position=16,
        ),
    )
    ledger.put("approval", Approval(id="ap-0", action="git.tag", state="consumed", position=8))
    ledger.put(
        "artifact",
        Artifact(
            id="patch", artifact_id="patch", uri="file:p", sha256=PATCH, description="the patch", position=17
        ),
    )
    ledger.put(
        "artifact",
        Artifact(
            id="log", artifact_id="log", uri="file:l", sha256="b" * 64, description="a log", position=18
        ),
    )
    ledger.put(
        "evidence", Evidence(id="ev-1", claim="it builds", kind="observed", source="event:e-5", position=5)
    )
    ledger.put(
        "evidence",
        Evidence(
            id="ev-2", claim="took 5 s", kind="observed", source="event:e-6", value=5, unit="s", position=6
        ),
    )
    ledger.put(
        "evidence",
        Evidence(
            id="ev-3",
            claim="took 9 s",
            kind="inferred",
            source="event:e-7",
            contradicts=("ev-2",),
            position=7,
        ),
    )
    ledger.put("call", Call(id="e-38", call_id="c-38", tool="bash", position=38))
    ledger.put("call", Call(id="e-20", call_id="c-20", tool="fetch", state="abandoned", position=20))
    ledger.put("child", Child(id="r1-child", task="translate", position=21))
    return ledger


def summary(**parts: Any) -> Summary:
    """A summary with nothing in it but what is given."""
    empty: dict[str, Any] = {
        "accepted_decisions": (),
        "open_questions": (),
        "completed": (),
        "observations": (),
        "inferences": (),
        "contradictions": (),
        "evidence_refs": (),
        "pending_action_refs": (),
        "operations": {},
        "approvals": {},
        "objective": "",
        "next_action": None,
        "narrative": "",
    }
    return Summary(**(empty | parts))


def says(text: str, *refs: str) -> Statement:
    return Statement(text=text, refs=refs)


def checkpoint(covers: int = 10, **parts: Any) -> StateCheckpoint:
    """A checkpoint that covers positions 1 to ``covers``."""
    return StateCheckpoint(
        id="cp-1",
        version=1,
        summarizer="digest",
        projector=Projector(version="1"),
        covers_through=CoversThrough(position=covers, event_id=f"e-{covers}"),
        range_digest=f"sha256:{'c' * 64}",
        parent_checkpoint_id=None,
        summary=summary(**parts),
    )


def inputs(*family: Ledger, run: str | None = None, **given: Any) -> PacketInputs:
    """Inputs for the packet of ``run`` (default: the first ledger's) with plenty of room."""
    runs = {ledger.head.run: ledger for ledger in family}
    name = run if run is not None else family[0].head.run
    head = runs[name].head
    fields: dict[str, Any] = {
        "tenant": "t",
        "lane": "l",
        "run": name,
        "epoch": 7,
        "at": "2026-11-30T09:12:00Z",
        "packet_id": "pk-1",
        "reason": "asked",
        "runs": runs,
        "settings": Settings(),
        "checkpoint": None,
        "tail": Tail(
            from_position=1,
            through_position=head.position,
            through_event_id=head.last_event_id,
            events=head.position,
            tokens=100,
        ),
        "cleared": [],
        "budget": BudgetFigures(200_000, 180_000, 90_000, 40_000, "ok"),
        "packet_tokens": 8_000,
        "user_tokens": 2_000,
    }
    return PacketInputs(**(fields | given))


def cleared(count: int) -> list[ClearedResult]:
    return [
        ClearedResult(call_id=f"c-{n}", event_id=f"e-{n}", ref=f"event:e-{n}", status="error", note="boom")
        for n in range(count)
    ]


def lines_about(count: int, text: str) -> list[Recent]:
    return [Recent(text=f"{text} {n}", ref=f"event:e-{n}") for n in range(count)]
