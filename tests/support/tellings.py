"""Any message a lane may meet: random, but of few ids, so that they concern each other.

Strategies only. Numbers of sessions come and lack at random, children are claimed by anyone, the sidecar's own
records say what is not so.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from support.story import D1, D2

RUNS = ("r", "c", "g")
SMALL = st.integers(1, 3)
KINDS = st.sampled_from(["deploy", "mail"])
DIGESTS = st.sampled_from([D1, D2, None])
OPERATIONS = st.sampled_from(["op1", "op2", "op3"])
APPROVALS = st.sampled_from(["ap1", "ap2"])
CALLS = st.sampled_from(["c1", "c2"])
CONSTRAINTS = st.sampled_from(["k1", "k2"])
VERSIONS = st.sampled_from(["v1", "v2"])
MODEL = {"name": "m", "context_window": 1000}


def fields(**strategies: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            name: value if isinstance(value, st.SearchStrategy) else st.just(value)
            for name, value in strategies.items()
        }
    )


maybe = lambda strategy: st.one_of(st.none(), strategy)  # noqa: E731

AGENT: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "run.started": fields(
        goal=st.sampled_from(["a", "b"]),
        model=MODEL,
        policy_version=maybe(VERSIONS),
        parent_run=maybe(st.sampled_from(RUNS)),
        constraints=st.sampled_from([[], [{"id": "k3", "text": "t", "source": "user"}]]),
    ),
    "run.paused": fields(reason="r"),
    "run.finished": fields(outcome="succeeded"),
    "run.resumed": fields(policy_version=maybe(VERSIONS), ledger_version=maybe(st.integers(0, 9))),
    "message": fields(
        role=st.sampled_from(["user", "assistant"]), content="never x", supersedes=maybe(st.just("e-1"))
    ),
    "tool.called": fields(call_id=CALLS, tool="t", arguments={}, operation_id=maybe(OPERATIONS)),
    "tool.returned": fields(
        call_id=CALLS, status=st.sampled_from(["ok", "error", "timeout", "cancelled", "pending"]), content="x"
    ),
    "step.changed": fields(phase="p", next_action={"verb": "wait"}),
    "model.changed": fields(model=MODEL),
    "input.pinned": fields(name="n", version=VERSIONS),
    "usage.reported": fields(model="m", context_tokens=SMALL, output_tokens=SMALL),
    "context.replaced": fields(by="agent"),
    "constraint.set": fields(
        constraint_id=CONSTRAINTS,
        text="t",
        source=st.sampled_from(["user", "agent"]),
        replaces=maybe(CONSTRAINTS),
        forbids=maybe(st.sampled_from([{}, {"kinds": ["deploy"]}, {"targets": ["x"]}])),
    ),
    "constraint.lifted": fields(constraint_id=CONSTRAINTS, reason="r"),
    "decision.made": fields(decision_id=OPERATIONS, summary="s", supersedes=maybe(OPERATIONS)),
    "question.opened": fields(question_id=OPERATIONS, text="t"),
    "question.answered": fields(question_id=OPERATIONS, answer="t"),
    "operation.declared": fields(
        operation_id=OPERATIONS,
        kind=KINDS,
        idempotency_key=st.sampled_from(["key1", "key2"]),
        approval_id=maybe(APPROVALS),
        payload_digest=DIGESTS,
        tool=maybe(st.just("t")),
    ),
    "operation.dispatched": fields(operation_id=OPERATIONS),
    "operation.settled": fields(
        operation_id=OPERATIONS, state=st.sampled_from(["succeeded", "failed", "unknown"])
    ),
    "operation.reconciled": fields(
        operation_id=OPERATIONS,
        state=st.sampled_from(["succeeded", "failed", "review"]),
        evidence=st.one_of(
            st.just("evidence:op1"), st.integers(1, 40).map(lambda n: f"event:e-{n}"), st.just("no ref")
        ),
    ),
    "approval.requested": fields(
        approval_id=APPROVALS, action=KINDS, payload_digest=DIGESTS, operation_id=maybe(OPERATIONS)
    ),
    "approval.resolved": fields(
        approval_id=APPROVALS,
        outcome=st.sampled_from(["granted", "denied", "revoked"]),
        by="ann",
        action=KINDS,
        payload_digest=DIGESTS,
        uses=SMALL,
    ),
    "artifact.saved": fields(
        artifact_id=OPERATIONS, uri="u", sha256=D1, description="d", version=maybe(VERSIONS)
    ),
    "artifact.withdrawn": fields(artifact_id=OPERATIONS, reason="r"),
    "evidence.recorded": fields(
        evidence_id=OPERATIONS, claim="c", kind=st.sampled_from(["observed", "inferred"]), source="s"
    ),
    "policy.loaded": fields(version=VERSIONS),
    "policy.released": fields(
        version=VERSIONS, approval_kinds=maybe(st.just(["mail"])), forbidden_kinds=maybe(st.just(["deploy"]))
    ),
    "task.changed": fields(reason="r", goal=maybe(st.just("z"))),
    "boundary.marked": fields(kind="turn_ended"),
    "child.spawned": fields(child_run=st.sampled_from(RUNS), task="t", allowed_tools=maybe(st.just(["t"]))),
    "child.returned": fields(child_run=st.sampled_from(RUNS), status="failed"),
    "gap.accepted": fields(from_=SMALL, through=st.integers(1, 9), by="ann", session=maybe(st.just("s1"))),
}
RECORD: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "authorization.requested": fields(
        operation_id=OPERATIONS, request_id=st.sampled_from(["q1", "q2", "q3"])
    ),
    "approval.expired": fields(approval_id=APPROVALS),
    "operation.timed_out": fields(operation_id=OPERATIONS),
    "call.abandoned": fields(call_id=CALLS, event_id=st.integers(1, 40).map(lambda n: f"e-{n}")),
    "gap.declared": st.one_of(
        fields(stream_from=SMALL, stream_through=st.integers(3, 9)),
        fields(session="s1", from_=SMALL, through=st.integers(3, 9)),
    ),
}


def told(
    types: dict[str, Any], channel: str, extra: dict[str, Any]
) -> st.SearchStrategy[tuple[str, str, str, dict]]:
    run = st.sampled_from(["r", "r", "r", "c", "g"])
    return (
        st.sampled_from(sorted(types))
        .flatmap(
            lambda name: st.tuples(
                run, st.just(channel), st.just(name), types[name], st.fixed_dictionaries(extra)
            )
        )
        .map(lambda all_: (all_[0], all_[1], all_[2], all_[3] | all_[4]))
    )


NUMBERS = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"session": st.sampled_from(["s1", "s2"])}),
    st.fixed_dictionaries({"session": st.sampled_from(["s1", "s2"]), "seq": st.integers(1, 9)}),
)
MESSAGE = st.one_of(
    st.tuples(told(AGENT, "event", {}), NUMBERS),
    st.tuples(told(AGENT, "event", {}), NUMBERS),
    st.tuples(told(AGENT, "authority", {}), NUMBERS),
    st.tuples(told(RECORD, "record", {"epoch": st.sampled_from([1, 1, 1, 2])}), st.just({})),
).map(lambda pair: (*pair[0][:3], pair[0][3] | pair[1]))
STORY = st.lists(MESSAGE, max_size=30)
