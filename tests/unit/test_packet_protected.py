"""The protected view, its digest, and what a child sees of its ancestors."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.codec import digest
from sidecar.core.packet import protected_names
from sidecar.core.protected import protected_digest, protected_view, rested_on
from sidecar.core.state import (
    Approval,
    Artifact,
    CompletedStep,
    ConstraintItem,
    Decision,
    Evidence,
    Forbids,
    Gap,
    Ledger,
    Operation,
    PinnedInput,
    Policy,
    Progress,
    Request,
)
from tests.support.packets import PATCH, busy, started

GOLDEN: dict[str, Any] = {
    "task": {
        "goal": "Ship the release",
        "done_when": ["tests pass", "notes are out"],
        "scope": {"actor": "bot", "tools": ["bash", "edit"]},
        "constraints": [
            {
                "id": "c-1",
                "text": "never deploy on Friday",
                "source": "operator",
                "told_by": "agent",
                "forbids": {"kinds": ["deploy.*"]},
            },
            {"id": "c-2", "text": "no force push", "source": "user", "told_by": "authority"},
        ],
        "current_request": [
            {"event_id": "e-29", "text": "go on"},
            {"event_id": "e-30", "text": "and write the notes"},
        ],
    },
    "inputs": [{"name": "spec", "version": "v3"}],
    "policy": {"released": "p-2", "loaded": "p-2"},
    "progress": {
        "phase": "testing",
        "completed": [{"text": "built it", "refs": ["evidence:ev-1"]}],
        "plan": [
            {"id": "t-2", "text": "tag", "state": "todo"},
            {"id": "t-1", "text": "test", "state": "doing"},
        ],
        "focus": {"files": ["a.py"], "hypothesis": "a race"},
        "next_action": {"verb": "call", "detail": "run the suite", "operation_id": "op-1"},
        "uncertain": ["whether the cache is warm"],
    },
    "blockers": [{"id": "b-1", "text": "CI is slow"}],
    "questions": [{"id": "q-1", "text": "which branch?"}],
    "operations": [
        {"id": "op-1", "kind": "test.run", "idempotency_key": "k1", "state": "not_started"},
        {
            "id": "op-2",
            "kind": "release.publish",
            "idempotency_key": "k2",
            "state": "unknown",
            "target": "registry",
            "approval_id": "ap-1",
        },
    ],
    "approvals": [
        {
            "id": "ap-1",
            "action": "release.publish",
            "state": "granted",
            "by": "ann",
            "expires_at": "2026-12-01T00:00:00Z",
            "payload_ref": "artifact:patch",
            "payload_digest": PATCH,
            "uses_left": 1,
        }
    ],
    "artifacts": [{"id": "patch", "uri": "file:p", "sha256": PATCH, "description": "the patch"}],
    "evidence": [{"id": "ev-1", "claim": "it builds", "kind": "observed", "source": "event:e-5"}],
    "contradictions": [["evidence:ev-2", "evidence:ev-3"]],
    "parent": None,
    "gaps": [],
}


def test_the_view_is_exactly_the_protocols_object() -> None:
    assert protected_view({"r1": busy()}, "r1") == GOLDEN


def test_the_digest_is_over_that_object() -> None:
    view = protected_view({"r1": busy()}, "r1")
    assert protected_digest(view) == digest(GOLDEN)


def test_a_run_without_beginning_keeps_its_nulls() -> None:
    ledger = started()
    ledger.items["task"].clear()
    view = protected_view({"r1": ledger}, "r1")
    assert view["task"] == {
        "goal": "",
        "done_when": [],
        "scope": None,
        "constraints": [],
        "current_request": [],
    }
    assert view["policy"] == {"released": None, "loaded": None}
    assert view["progress"] == {
        "phase": None,
        "completed": [],
        "plan": [],
        "focus": {},
        "next_action": None,
        "uncertain": [],
    }
    assert "allowed_tools" not in view
    assert "required_artifacts" not in view


@pytest.mark.parametrize(
    "change",
    [
        lambda ledger: setattr(ledger.head, "version", 99),
        lambda ledger: setattr(ledger.head, "position", 99),
        lambda ledger: ledger.head.violations.update(late_event=1),
        lambda ledger: ledger.put("decision", Decision(id="d-9", summary="more")),
        lambda ledger: ledger.put(
            "evidence", Evidence(id="ev-9", claim="x", kind="inferred", source="event:e-1")
        ),
        lambda ledger: ledger.put(
            "operation", Operation(id="op-9", kind="k", idempotency_key="k9", state="succeeded", receipt="r")
        ),
        lambda ledger: ledger.put("approval", Approval(id="ap-9", action="k", state="denied")),
    ],
    ids=["version", "position", "violations", "decision", "evidence", "settled", "denied"],
)
def test_what_is_not_protected_does_not_move_the_digest(change: Any) -> None:
    ledger = busy()
    change(ledger)
    assert protected_view({"r1": ledger}, "r1") == GOLDEN


@pytest.mark.parametrize(
    "change",
    [
        lambda ledger: ledger.put("request", Request(id="e-31", text="stop", position=31)),
        lambda ledger: ledger.put("operation", Operation(id="op-9", kind="k", idempotency_key="k9")),
        lambda ledger: ledger.put(
            "gap", Gap(id="event/s1/4", channel="event", session="s1", first=4, through=5)
        ),
        lambda ledger: ledger.put("input", PinnedInput(id="spec", version="v4")),
        lambda ledger: ledger.put("policy", Policy(released="p-3", loaded="p-2")),
        lambda ledger: setattr(ledger.head, "allowed_tools", ()),
    ],
    ids=["request", "operation", "gap", "input", "policy", "tools"],
)
def test_what_is_protected_does(change: Any) -> None:
    ledger = busy()
    change(ledger)
    assert protected_digest(protected_view({"r1": ledger}, "r1")) != digest(GOLDEN)


def test_gaps_in_the_stream_have_no_session() -> None:
    ledger = started()
    ledger.put("gap", Gap(id="event/s1/10", channel="event", session="s1", first=10, through=11))
    ledger.put("gap", Gap(id="event/s1/9", channel="event", session="s1", first=9, through=9))
    ledger.put("gap", Gap(id="stream/3", channel="event", session=None, first=3, through=4, declared=True))
    assert protected_view({"r1": ledger}, "r1")["gaps"] == [
        {"from": 3, "through": 4},
        {"session": "s1", "from": 9, "through": 9},
        {"session": "s1", "from": 10, "through": 11},
    ]


def test_insertion_order_does_not_matter() -> None:
    ledger = busy()
    turned = Ledger(ledger.head)
    for kind, items in ledger.items.items():
        for item in reversed(items.values()):
            turned.put(kind, item)
    assert protected_view({"r1": turned}, "r1") == GOLDEN


def test_an_undeclared_operation_has_empty_kind_and_key() -> None:
    ledger = started()
    ledger.put("operation", Operation(id="op-x", declared=False, state="unknown"))
    (operation,) = protected_view({"r1": ledger}, "r1")["operations"]
    assert operation == {"id": "op-x", "kind": "", "idempotency_key": "", "state": "unknown"}


def _versions() -> Ledger:
    ledger = started()
    for version, key, state, fill in (
        ("1", "a", "superseded", "1"),
        ("2", "a@2", "saved", "2"),
        ("3", "a@3", "withdrawn", "3"),
    ):
        item = Artifact(
            id=key,
            artifact_id="a",
            uri=f"file:{version}",
            sha256=f"sha256:{fill * 64}",
            description=version,
            version=version,
            state=state,  # type: ignore[arg-type]
            position=int(version),
        )
        ledger.put("artifact", item)
    return ledger


@pytest.mark.parametrize(
    ("ref", "payload_digest", "key"),
    [
        ("artifact:a", None, "a@2"),
        ("artifact:a@2", None, "a@2"),
        ("artifact:a", f"sha256:{'1' * 64}", "a"),
        (f"sha256:{'1' * 64}", f"sha256:{'2' * 64}", "a"),
        (f"sha256:{'3' * 64}", None, None),
        ("artifact:b", None, None),
        ("run:other/artifact:a", None, None),
        ("run:r1/artifact:a", None, "a@2"),
        ("no ref at all", None, None),
    ],
)
def test_which_version_an_approval_names(ref: str, payload_digest: str | None, key: str | None) -> None:
    ledger = _versions()
    ledger.put("approval", Approval(id="ap", action="x", payload_ref=ref, payload_digest=payload_digest))
    assert rested_on(ledger).artifacts == ({key} if key else set())


def test_only_what_is_alive_makes_evidence_rested_on() -> None:
    ledger = started()
    for number in range(5):
        ledger.put("evidence", Evidence(id=f"ev-{number}", claim="x", kind="observed", source="event:e-1"))
    ledger.put("decision", Decision(id="d-1", summary="s", refs=("evidence:ev-0", "evidence:gone")))
    ledger.put("decision", Decision(id="d-2", summary="s", refs=("evidence:ev-1",), state="superseded"))
    ledger.put("operation", Operation(id="op-1", kind="k", idempotency_key="1", target="evidence:ev-2"))
    ledger.put(
        "operation",
        Operation(id="op-2", kind="k", idempotency_key="2", target="evidence:ev-3", state="succeeded"),
    )
    ledger.put("progress", Progress(completed=(CompletedStep(text="t", refs=("evidence:ev-4",)),)))
    assert rested_on(ledger).evidence == {"ev-0", "ev-2", "ev-4"}


def test_contradictions_are_pairs_told_once_older_first() -> None:
    ledger = started()
    told = (("ev-10", 2, ("ev-9",)), ("ev-9", 1, ("ev-10",)), ("ev-2", 3, ("ev-9", "ev-2", "unknown")))
    for name, position, against in told:
        ledger.put(
            "evidence",
            Evidence(
                id=name,
                claim="x",
                kind="observed",
                source="event:e-1",
                contradicts=against,
                position=position,
            ),
        )
    assert protected_view({"r1": ledger}, "r1")["contradictions"] == [
        ["evidence:ev-9", "evidence:ev-10"],
        ["evidence:ev-9", "evidence:ev-2"],
        ["evidence:unknown", "evidence:ev-2"],
    ]


def _family() -> dict[str, Ledger]:
    root = started("root")
    root.put("policy", Policy(released="p-1", loaded="p-1"))
    middle = started("middle", parent="root", spawned=True)
    leaf = started(
        "leaf", parent="middle", spawned=True, allowed_tools=("bash",), required_artifacts=("patch",)
    )
    sources = ("user", "policy", "operator", "agent")
    for ledger in (root, middle):
        for source in sources:
            name = f"{ledger.head.run}-{source}"
            ledger.put(
                "constraint",
                ConstraintItem(id=name, text=name, source=source, told_by="authority"),  # type: ignore[arg-type]
            )
    root.put(
        "constraint",
        ConstraintItem(id="gone", text="gone", source="user", told_by="authority", state="lifted"),
    )
    root.put("approval", Approval(id="ap-root", action="deploy", state="granted", uses_left=1))
    root.put("operation", Operation(id="op-root", kind="deploy", idempotency_key="k"))
    leaf.put(
        "constraint",
        ConstraintItem(
            id="own", text="own", source="agent", told_by="agent", forbids=Forbids(targets=("prod",))
        ),
    )
    return {"root": root, "middle": middle, "leaf": leaf}


def test_a_child_has_its_ancestors_binding_constraints_and_policy_and_nothing_else_of_theirs() -> None:
    view = protected_view(_family(), "leaf")
    assert [item["id"] for item in view["task"]["constraints"]] == [
        "middle-operator",
        "middle-policy",
        "middle-user",
        "own",
        "root-operator",
        "root-policy",
        "root-user",
    ]
    assert view["policy"] == {"released": "p-1", "loaded": None}
    assert view["approvals"] == []
    assert view["operations"] == []
    assert view["parent"] == {"run": "middle"}
    assert view["allowed_tools"] == ["bash"]
    assert view["required_artifacts"] == ["patch"]


def test_a_lifted_constraint_of_an_ancestor_leaves_the_child_at_once() -> None:
    runs = _family()
    runs["root"].put(
        "constraint",
        ConstraintItem(id="root-user", text="root-user", source="user", told_by="authority", state="lifted"),
    )
    assert "root-user" not in [item["id"] for item in protected_view(runs, "leaf")["task"]["constraints"]]


def test_the_summarisers_view_has_the_packets_names() -> None:
    names = protected_names({"r1": busy()}, "r1")
    assert set(names) == {
        "task",
        "questions",
        "operations",
        "approvals",
        "progress",
        "contradictions",
        "decisions",
        "evidence",
        "artifacts",
    }
    assert names["task"]["user_messages"] == []
    assert [item["id"] for item in names["decisions"]] == ["d-1"]
    assert names["operations"] == GOLDEN["operations"]
