"""What ``authorize`` finds by its indexes is what asking every item one by one would find."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from protocol.events import Forbids
from sidecar.core import family, permission
from sidecar.core.globs import any_matches, beginning, matches
from sidecar.core.state import Approval, ConstraintItem, Ledger, Operation
from support.laws import law
from tests.support.packets import started

laws = law(10)

_letters = st.sampled_from(["a", "b", "/", ".", "é", "["])
_texts = st.text(_letters, max_size=6)
_globs = st.lists(st.one_of(_letters, st.sampled_from(["*", "?", "*", "ab"])), max_size=6).map("".join)


def plainly(pattern: str, text: str) -> bool:
    """Whether it matches, by the definition."""
    if not pattern:
        return not text
    if pattern[0] == "*":
        return any(plainly(pattern[1:], text[at:]) for at in range(len(text) + 1))
    return bool(text) and pattern[0] in ("?", text[0]) and plainly(pattern[1:], text[1:])


@law(2)
@given(_globs, _texts)
def test_a_glob_matches_as_it_is_defined(pattern: str, text: str) -> None:
    assert matches(pattern, text) == plainly(pattern, text)
    whole, start = beginning(pattern)
    if matches(pattern, text):
        assert text == start if whole else text.startswith(start)


def test_the_worst_glob_takes_no_longer_than_the_lengths_multiplied() -> None:
    assert not matches("*a" * 60 + "*b", "a" * 20_000)
    assert not matches("*a?" * 20 + "b", "a" * 2_000)


# --- constraints ------------------------------------------------------------------------------------------

_lists = st.none() | st.lists(_globs, max_size=3).map(tuple)
_forbids = st.none() | st.builds(lambda k, t, g: Forbids(kinds=k, tools=t, targets=g), _lists, _lists, _lists)
_constraint = st.tuples(
    st.sampled_from("rrc"),
    st.sampled_from([f"k{n}" for n in range(6)]),
    _forbids,
    st.sampled_from(["user", "agent"]),
    st.sampled_from(["active", "active", "active", "lifted"]),
)
_field = st.none() | _texts
_operation = st.builds(lambda k, t, g: Operation(id="op", kind=k, tool=t, target=g), _field, _field, _field)


def one_by_one(runs: dict[str, Ledger], run: str, operation: Operation) -> ConstraintItem | None:
    values = {"kinds": operation.kind, "tools": operation.tool, "targets": operation.target}
    for item in family.constraints(runs, run):
        given_ = [(getattr(item.forbids, name, None), value) for name, value in values.items()]
        told = [(globs, value) for globs, value in given_ if globs]
        if told and all(value is None or any_matches(globs, value) for globs, value in told):
            return item
    return None


@laws
@given(st.lists(_constraint, max_size=20), st.lists(_operation, min_size=1, max_size=6), st.integers(0, 20))
def test_the_constraint_that_forbids_is_the_one_found_by_asking_all(
    told: Any, operations: list[Operation], snapshot_at: int
) -> None:
    runs = {"r": started("r"), "c": started("c", parent="r", spawned=True)}
    early = runs
    before: list[Any] = []
    for number, (run, name, forbids, source, state) in enumerate(told):
        if number == snapshot_at:
            early = {name_: ledger.snapshot() for name_, ledger in runs.items()}
            before = [one_by_one(early, "c", operation) for operation in operations]
        item = ConstraintItem(id=name, text="t", source=source, told_by="agent", forbids=forbids, state=state)
        runs[run].put("constraint", item)
    for run in runs:
        for operation in operations:
            assert permission.forbidding(runs, run, operation) == one_by_one(runs, run, operation)
    if before:
        assert [permission.forbidding(early, "c", operation) for operation in operations] == before


# --- keys and approvals -----------------------------------------------------------------------------------

_STATES = ("not_started", "pending", "succeeded", "failed", "unknown")
_held = st.tuples(
    st.sampled_from("rrc"),
    st.sampled_from([f"op{n}" for n in range(5)]),
    st.sampled_from(["key1", "key1", "key2", None]),
    st.sampled_from(_STATES),
)


@laws
@given(st.lists(_held, max_size=20))
def test_who_holds_a_key_is_found_by_asking_all(told: Any) -> None:
    runs = {"r": started("r"), "c": started("c", parent="r", spawned=True)}
    runs["r"].put("claim", _Child("c"))
    for run, name, key, state in told:
        known = runs[run].items["operation"].get(name)
        # A key is given once, by the declaration.
        key = key if known is None or known.idempotency_key is None else known.idempotency_key
        position = known.position if known is not None else len(runs[run].items["operation"])
        runs[run].put("operation", Operation(id=name, idempotency_key=key, state=state, position=position))
    asked = Operation(id="op1", idempotency_key="key1")
    for state in _STATES:
        wanted = [
            (ledger.head.run, item.id)
            for ledger in family.members(runs, "c")
            for item in sorted(ledger.items["operation"].values(), key=lambda item: (item.position, item.id))
            if item.idempotency_key == "key1"
            and item.state == state
            and (ledger.head.run, item.id) != ("c", "op1")
        ]
        found = family.holder(runs, "c", asked, state)
        assert (None if found is None else (found.run, found.operation.id)) == (wanted[0] if wanted else None)


class _Child:
    """What makes a run of the family."""

    live = True

    def __init__(self, run: str) -> None:
        self.id = run


_approval = st.builds(
    lambda name, action, of, state, at: Approval(
        id=name,
        action=action,
        operation_id=of,
        state=state,
        granted_at=at,
        uses_left=1,
        position=int(name[2:]),
    ),
    st.sampled_from([f"ap{n}" for n in range(6)]),
    st.sampled_from(["deploy", "mail"]),
    st.sampled_from(["op", "other", None]),
    st.sampled_from(["pending", "granted", "granted", "denied", "consumed"]),
    st.integers(0, 9),
)


@laws
@given(st.lists(_approval, max_size=14), st.sampled_from([None, "ap1"]))
def test_the_approval_that_is_meant_is_found_by_asking_all(told: list[Approval], named: str | None) -> None:
    ledger = started()
    for approval in told:
        known = ledger.items["approval"].get(approval.id)
        if known is not None:
            # What it is for is set once.
            approval = Approval(
                id=known.id,
                action=known.action,
                operation_id=known.operation_id,
                state=approval.state,
                granted_at=approval.granted_at,
                uses_left=1,
                position=known.position,
            )
        ledger.put("approval", approval)
    operation = Operation(id="op", kind="deploy", approval_id=named)
    assert permission.meant_approval(ledger, operation) == meant(ledger, operation)


def meant(ledger: Ledger, operation: Operation) -> Approval | None:
    every: list[Approval] = list(ledger.items["approval"].values())
    naming = [item for item in every if item.operation_id == operation.id]
    by_kind = [item for item in every if item.operation_id is None and item.action == operation.kind]
    if operation.approval_id is not None:
        return next((item for item in [*naming, *by_kind] if item.id == operation.approval_id), None)

    def order(item: Approval) -> tuple[int, int, str]:
        return item.granted_at, item.position, item.id

    granted = [item for item in naming if item.state == "granted"]
    if granted:
        return max(granted, key=order)
    for_kind = [item for item in by_kind if item.state == "granted"]
    if for_kind:
        return min(for_kind, key=order)
    return max([*naming, *by_kind], key=lambda item: (item.position, item.id), default=None)
