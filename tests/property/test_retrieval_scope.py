"""Who may read what of whom, over any family: nothing without a grant, no more than the granter, and an answer
that is the same whether the thing is there or not."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from protocol.identifiers import Ref, parse_ref
from sidecar.core import evidence, scope
from sidecar.core.state import Child, Decision, Evidence, Head, Ledger
from support.laws import law

NAMES = ["root", "left", "right", "leaf"]
PARENTS = {"left": "root", "right": "root", "leaf": "left"}
LOCAL = ["event:e1", "pos:3", "decision:d1", "evidence:v1", "artifact:a1", "operation:op1", "checkpoint:c1"]


@dataclass
class Family:
    grants: dict[str, tuple[str, ...]]
    returned: dict[str, tuple[tuple[str, ...], tuple[str, ...]]]

    def ledgers(self, *, full: bool) -> dict[str, Ledger]:
        """The family; ``full``: with the things that are named, else with none of them."""
        runs = {}
        for name in NAMES:
            head = Head(run=name, position=9 if full else 0, started=True)
            ledger = Ledger(head)
            if name in PARENTS:
                head.parent, head.spawned = PARENTS[name], True
                head.granted_refs = self.grants[name]
            if full:
                ledger.put("decision", Decision(id="d1", summary="s", position=2))
                ledger.put("evidence", Evidence(id="v1", claim="c", kind="observed", source="x", position=3))
            runs[name] = ledger
        for name, parent in PARENTS.items():
            artifacts, told = self.returned[name]
            child = Child(
                id=name, task="t", artifacts=artifacts, evidence=told, granted_refs=self.grants[name]
            )
            runs[parent].put("child", child)
        return runs


refs = st.sampled_from(LOCAL)
grants = st.lists(
    st.one_of(refs, st.builds(lambda run, ref: f"run:{run}/{ref}", st.sampled_from(NAMES), refs)), max_size=4
).map(tuple)
brought = st.tuples(
    st.lists(st.just("a1"), max_size=1).map(tuple), st.lists(st.just("v1"), max_size=1).map(tuple)
)
families = st.builds(
    Family,
    st.fixed_dictionaries(dict.fromkeys(PARENTS, grants)),
    st.fixed_dictionaries(dict.fromkeys(PARENTS, brought)),
)
runs_ = st.sampled_from(NAMES)


def granted(family: Family, asker: str, target: str, ref: str) -> bool:
    """The same rule, told anew: by the parent, of its own or of what it may read; or brought back."""
    if asker == target:
        return True
    parent = PARENTS.get(asker)
    if parent is not None:
        names = {f"run:{target}/{ref}"} | ({ref} if target == parent else set())
        if names & set(family.grants[asker]) and granted(family, parent, target, ref):
            return True
    if PARENTS.get(target) == asker:
        artifacts, told = family.returned[target]
        kind, value = ref.split(":")
        return (kind == "artifact" and value in artifacts) or (kind == "evidence" and value in told)
    return False


@law(8)
@given(families, runs_, runs_, refs)
def test_only_what_was_granted_or_brought_back(family: Family, asker: str, target: str, ref: str) -> None:
    allowed = scope.may_read(family.ledgers(full=True), asker, target, parse_ref(ref))
    assert allowed == granted(family, asker, target, ref)


@law(10)
@given(families, runs_, runs_, refs)
def test_a_grant_gives_no_more_than_the_granter_has(
    family: Family, asker: str, target: str, ref: str
) -> None:
    ledgers = family.ledgers(full=True)
    parent = PARENTS.get(asker)
    if parent is None or PARENTS.get(target) == asker or asker == target:
        return
    if scope.may_read(ledgers, asker, target, parse_ref(ref)):
        assert scope.may_read(ledgers, parent, target, parse_ref(ref))


@law(10)
@given(families, runs_, st.sampled_from([*NAMES, "stranger"]), refs)
def test_out_of_scope_says_nothing_about_what_is_there(
    family: Family, asker: str, target: str, ref: str
) -> None:
    full = evidence.wanted(family.ledgers(full=True), asker, [ref], target)
    bare = evidence.wanted(family.ledgers(full=False), asker, [ref], target)
    if full[0].status == "out_of_scope" or bare[0].status == "out_of_scope":
        assert full == bare
        assert full[0].place == "none"
        assert full[0].record is None


@law(10)
@given(families, runs_, runs_)
def test_what_is_readable_is_what_may_be_read(family: Family, asker: str, target: str) -> None:
    ledgers = family.ledgers(full=True)
    listed = set(scope.readable(ledgers, asker, target))
    if asker == target:
        assert listed == set()
        return
    for ref in LOCAL:
        parsed: Ref = parse_ref(ref)
        assert (parsed in listed) == scope.may_read(ledgers, asker, target, parsed)


def test_a_run_that_was_not_spawned_has_no_grants() -> None:
    child = Ledger(Head(run="left", parent="root", spawned=False, granted_refs=("event:e1",)))
    ledgers = {"root": Ledger(Head(run="root", position=5)), "left": child}
    assert not scope.may_read(ledgers, "left", "root", parse_ref("event:e1"))
