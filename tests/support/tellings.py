"""Any message a lane may meet: random, but of few ids, so that they concern each other.

Numbers of sessions come and lack at random, children are claimed by anyone, the sidecar's own records say what
is not so. Each message is dealt out by one number, so that drawing a long story costs little: ``words`` gives
the numbers, and a smaller one gives a plainer message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st

from support.story import D1, D2

T = TypeVar("T")
Choices = tuple[Any, ...]
Telling = tuple[str, str, str, dict[str, Any]]
"""Run, channel, type, fields."""

_COUNT_BYTES = 2
_WORD_BYTES = 6


class Deal:
    """A number taken apart into choices: the least choice of everything is dealt by 0."""

    def __init__(self, number: int) -> None:
        self._left = number

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def below(self, count: int) -> int:
        self._left, index = divmod(self._left, count)
        return index

    def fields(self, table: dict[str, Choices]) -> dict[str, Any]:
        return {name: self.pick(choices) for name, choices in table.items()}


def words(least: int, most: int) -> st.SearchStrategy[list[int]]:
    """That many numbers to deal from, drawn as one string of bytes: quick, and no two alike."""

    def cut(drawn: bytes) -> list[int]:
        count = least + int.from_bytes(drawn[:_COUNT_BYTES]) % (most - least + 1)
        starts = range(_COUNT_BYTES, _COUNT_BYTES + count * _WORD_BYTES, _WORD_BYTES)
        return [int.from_bytes(drawn[at : at + _WORD_BYTES]) for at in starts]

    # Of one size: of two sizes the shorter one would be drawn nearly always.
    size = _COUNT_BYTES + most * _WORD_BYTES
    return st.binary(min_size=size, max_size=size).map(cut)


def maybe(choices: Choices) -> Choices:
    return (None, *choices)


RUNS = ("r", "c", "g")
SMALL = (1, 2, 3)
KINDS = ("deploy", "mail")
DIGESTS = (D1, D2, None)
OPERATIONS = ("op1", "op2", "op3")
APPROVALS = ("ap1", "ap2")
CALLS = ("c1", "c2")
CONSTRAINTS = ("k1", "k2")
VERSIONS = ("v1", "v2")
MODEL = {"name": "m", "context_window": 1000}

AGENT: dict[str, dict[str, Choices]] = {
    "run.started": {
        "goal": ("a", "b"),
        "model": (MODEL,),
        "policy_version": maybe(VERSIONS),
        "parent_run": maybe(RUNS),
        "constraints": ([], [{"id": "k3", "text": "t", "source": "user"}]),
    },
    "run.paused": {"reason": ("r",)},
    "run.finished": {"outcome": ("succeeded",)},
    "run.resumed": {"policy_version": maybe(VERSIONS), "ledger_version": maybe(tuple(range(10)))},
    "message": {"role": ("user", "assistant"), "content": ("never x",), "supersedes": maybe(("e-1",))},
    "tool.called": {
        "call_id": CALLS,
        "tool": ("t",),
        "arguments": ({},),
        "operation_id": maybe(OPERATIONS),
    },
    "tool.returned": {
        "call_id": CALLS,
        "status": ("ok", "error", "timeout", "cancelled", "pending"),
        "content": ("x",),
    },
    "step.changed": {"phase": ("p",), "next_action": ({"verb": "wait"},)},
    "model.changed": {"model": (MODEL,)},
    "input.pinned": {"name": ("n",), "version": VERSIONS},
    "usage.reported": {"model": ("m",), "context_tokens": SMALL, "output_tokens": SMALL},
    "context.replaced": {"by": ("agent",)},
    "constraint.set": {
        "constraint_id": CONSTRAINTS,
        "text": ("t",),
        "source": ("user", "agent"),
        "replaces": maybe(CONSTRAINTS),
        "forbids": maybe(({}, {"kinds": ["deploy"]}, {"targets": ["x"]})),
    },
    "constraint.lifted": {"constraint_id": CONSTRAINTS, "reason": ("r",)},
    "decision.made": {"decision_id": OPERATIONS, "summary": ("s",), "supersedes": maybe(OPERATIONS)},
    "question.opened": {"question_id": OPERATIONS, "text": ("t",)},
    "question.answered": {"question_id": OPERATIONS, "answer": ("t",)},
    "operation.declared": {
        "operation_id": OPERATIONS,
        "kind": KINDS,
        "idempotency_key": ("key1", "key2"),
        "approval_id": maybe(APPROVALS),
        "payload_digest": DIGESTS,
        "tool": maybe(("t",)),
    },
    "operation.dispatched": {"operation_id": OPERATIONS},
    "operation.settled": {"operation_id": OPERATIONS, "state": ("succeeded", "failed", "unknown")},
    "operation.reconciled": {
        "operation_id": OPERATIONS,
        "state": ("succeeded", "failed", "review"),
        "evidence": (
            *("evidence:op1",) * 3,
            *(f"event:e-{number}" for number in (1, 2, 3, 5, 8, 13, 21, 34)),
            "no ref",
        ),
    },
    "approval.requested": {
        "approval_id": APPROVALS,
        "action": KINDS,
        "payload_digest": DIGESTS,
        "operation_id": maybe(OPERATIONS),
    },
    "approval.resolved": {
        "approval_id": APPROVALS,
        "outcome": ("granted", "denied", "revoked"),
        "by": ("ann",),
        "action": KINDS,
        "payload_digest": DIGESTS,
        "uses": SMALL,
    },
    "artifact.saved": {
        "artifact_id": OPERATIONS,
        "uri": ("u",),
        "sha256": (D1,),
        "description": ("d",),
        "version": maybe(VERSIONS),
    },
    "artifact.withdrawn": {"artifact_id": OPERATIONS, "reason": ("r",)},
    "evidence.recorded": {
        "evidence_id": OPERATIONS,
        "claim": ("c",),
        "kind": ("observed", "inferred"),
        "source": ("s",),
    },
    "policy.loaded": {"version": VERSIONS},
    "policy.released": {
        "version": VERSIONS,
        "approval_kinds": maybe((["mail"],)),
        "forbidden_kinds": maybe((["deploy"],)),
    },
    "task.changed": {"reason": ("r",), "goal": maybe(("z",))},
    "boundary.marked": {"kind": ("turn_ended",)},
    "child.spawned": {"child_run": RUNS, "task": ("t",), "allowed_tools": maybe((["t"],))},
    "child.returned": {"child_run": RUNS, "status": ("failed",)},
    "gap.accepted": {
        "from_": SMALL,
        "through": tuple(range(1, 10)),
        "by": ("ann",),
        "session": maybe(("s1",)),
    },
}
RECORD: dict[str, tuple[dict[str, Choices], ...]] = {
    "authorization.requested": ({"operation_id": OPERATIONS, "request_id": ("q1", "q2", "q3")},),
    "approval.expired": ({"approval_id": APPROVALS},),
    "operation.timed_out": ({"operation_id": OPERATIONS},),
    "call.abandoned": (
        {"call_id": CALLS, "event_id": tuple(f"e-{number}" for number in (1, 2, 3, 5, 8, 13, 21, 34))},
    ),
    "gap.declared": (
        {"stream_from": SMALL, "stream_through": (3, 4, 6, 9)},
        {"session": ("s1",), "from_": SMALL, "through": (3, 4, 6, 9)},
    ),
}
_AGENT_TYPES = tuple(AGENT)
_RECORD_TYPES = tuple(RECORD)
_CALM_TYPES = tuple(
    type_
    for type_ in AGENT
    if type_ not in ("run.finished", "run.paused", "tool.called", "operation.dispatched", "usage.reported")
)
_WEIGHTY = (
    *("constraint.set", "question.opened", "operation.declared", "approval.requested", "approval.resolved"),
    *("operation.settled", "operation.reconciled", "evidence.recorded", "step.changed", "message"),
)
_OF_AUTHORITY = ("approval.resolved", "constraint.lifted", "policy.released", "task.changed", "gap.accepted")
_CALM_TYPES = (*_WEIGHTY, *_WEIGHTY, *_WEIGHTY, *_CALM_TYPES)
"""Most that is told opens something, or settles it."""
_RUN = ("r", "r", "r", "c", "g")
_MOSTLY_AGENT = ("event", "event", "authority")
_MOSTLY_AUTHORITY = ("authority", "authority", "event")
_EPOCHS = (1, 1, 1, 2)


def telling(deal: Deal) -> Telling:
    """Any message of anyone."""
    channel = deal.pick(("event", "event", "authority", "record"))
    run = deal.pick(_RUN)
    if channel == "record":
        type_ = deal.pick(_RECORD_TYPES)
        fields = deal.fields(deal.pick(RECORD[type_]))
        return run, channel, type_, fields | {"epoch": deal.pick(_EPOCHS)}
    type_ = deal.pick(_AGENT_TYPES)
    return run, channel, type_, deal.fields(AGENT[type_]) | _numbers(deal)


def calm_telling(deal: Deal, types: Sequence[str] = _CALM_TYPES) -> Telling:
    """One that neither ends nor holds up a run; of these types only, if some are given."""
    type_ = deal.pick(types)
    channels = _MOSTLY_AUTHORITY if type_ in _OF_AUTHORITY else _MOSTLY_AGENT
    return deal.pick(_RUN), deal.pick(channels), type_, deal.fields(AGENT[type_])


def flavour(deal: Deal, count: int) -> list[str]:
    """A few types: told of nothing else, a story meets itself often."""
    return [deal.pick(_CALM_TYPES) for _ in range(count)]


def _numbers(deal: Deal) -> dict[str, Any]:
    match deal.pick(("none", "session", "seq")):
        case "none":
            return {}
        case "session":
            return {"session": deal.pick(("s1", "s2"))}
        case _:
            return {"session": deal.pick(("s1", "s2")), "seq": 1 + deal.below(9)}


MESSAGE = words(1, 1).map(lambda drawn: telling(Deal(drawn[0])))
STORY = words(0, 30).map(lambda drawn: [telling(Deal(word)) for word in drawn])
