"""What may make anything more allowed than it was, and how often an approval permits.

Any messages of anyone; after each, ``authorize`` is asked about everything. Each ok that was none before has to
have one of the reasons there are. ``WATCHKEEPER_EXAMPLES`` sets how many examples each law is tried with.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.asks import AskAuthorize
from sidecar.core import gate
from sidecar.core.fold import Origin, fold
from support.story import D1, Story, event
from support.tellings import AGENT, RECORD, Deal, Telling, calm_telling, telling

EXAMPLES = int(os.environ.get("WATCHKEEPER_EXAMPLES", "100"))

BY_AUTHORITY = {
    "approval.resolved": {"approval_missing", "approval_pending"},
    "constraint.lifted": {"constraint_forbids"},
    "constraint.set": {"constraint_forbids"},
    "policy.released": {
        *("policy_stale", "constraint_forbids", "approval_missing", "approval_pending", "approval_denied"),
        *("approval_revoked", "approval_expired", "approval_consumed", "payload_mismatch"),
    },
    "run.resumed": {"run_finished", "run_paused", "policy_stale"},
    "gap.accepted": {"history_gap"},
    "operation.settled": {"outcome_unknown", "in_flight"},
    "operation.reconciled": {"outcome_unknown"},
}
"""What only an authority says → refusals it may end. A constraint ends by one that replaces it."""

BY_ANYONE = {
    "run.started": {"run_paused", "policy_stale"},
    "run.resumed": {"run_paused", "policy_stale"},
    "policy.loaded": {"policy_stale"},
    "child.spawned": {"run_paused"},
    "constraint.lifted": {"constraint_forbids"},
    "constraint.set": {"constraint_forbids"},
    "approval.requested": {"approval_missing"},
    "operation.settled": {"in_flight"},
    "operation.reconciled": {"outcome_unknown"},
}
"""What the agent may say too: it loads a policy, ends its own pause or constraint, asks for what was granted
before, tells that its own operation failed (which frees the key for another), or finds out what one did."""

_OF_PERMISSION = (
    *(
        "operation.declared",
        "operation.dispatched",
        "operation.settled",
        "operation.reconciled",
        "tool.called",
    ),
    *("tool.returned", "approval.requested", "approval.resolved", "policy.loaded", "evidence.recorded"),
)


def _telling(word: int) -> Telling:
    """A message of anyone; most are about operations and approvals, and few stop the run altogether."""
    deal = Deal(word)
    match deal.below(8):
        case 0:
            return telling(deal)
        case 1 | 2:
            type_ = deal.pick(("authorization.requested", "authorization.requested", *RECORD))
            return deal.pick(("r", "r", "c")), "record", type_, deal.fields(RECORD[type_][0]) | {"epoch": 1}
        case 3 | 4 | 5:
            type_ = deal.pick(_OF_PERMISSION)
            channel = (
                "authority" if type_ == "approval.resolved" else deal.pick(("event", "event", "authority"))
            )
            fields = deal.fields(AGENT[type_])
            # Requests, grants and operations that fit each other are rare otherwise.
            alike = {"payload_digest": D1, "action": "deploy", "kind": "deploy", "outcome": "granted"}
            if deal.below(4) and type_ != "evidence.recorded":
                fields |= {name: value for name, value in alike.items() if name in fields}
            return deal.pick(("r", "r", "c")), channel, type_, fields
        case _:
            run, channel, type_, fields = calm_telling(deal)
            if channel == "event":
                fields |= {"session": deal.pick((None, None, "s1", "s2"))}
            return run, channel, type_, fields


def _story(seed: int, length: int) -> list[Telling]:
    dice = random.Random(seed)
    return [_telling(dice.getrandbits(96)) for _ in range(length)]


STORY = st.builds(_story, st.integers(0, 2**32), st.integers(0, 45))
"""Shortened from its end only: what matters is that every choice is as likely as another."""


def _looks(story: Story) -> dict[Any, str]:
    """What is said of every operation there is, and of new ones."""

    def look(run: str, **ask: Any) -> str:
        return gate.look(story.lane, story.runs, run, AskAuthorize(**ask)).code

    found: dict[Any, str] = {}
    for run, ledger in story.runs.items():
        for name in ledger.items["operation"]:
            found[run, name] = look(run, operation_id=name, dry_run=True)
        for kind, key in (("deploy", "key1"), ("mail", "key1"), ("mail", "key2"), ("deploy", "new")):
            for approval in (None, "ap1"):
                ask = {"kind": kind, "idempotency_key": key, "approval_id": approval, "payload_digest": D1}
                found[run, kind, key, approval] = look(run, **ask)
    return found


@settings(max_examples=2 * EXAMPLES, deadline=None)
@given(STORY, st.booleans())
def test_nothing_is_more_allowed_without_a_reason(messages: list[Telling], required: bool) -> None:
    story = Story(approval_kinds=("deploy",), authority_required=required)
    story.start()
    story.tell("child.spawned", child_run="c", task="t")
    story.start(run="c")
    before = _looks(story)
    for run, channel, type_, fields in messages:
        story.count += 1
        one = event(type_, f"e-{story.count}", channel, **fields)
        outcome = fold(story.lane, story.runs, run, one, Origin(channel, story.count))  # type: ignore[arg-type]
        after = _looks(story)
        reasons = BY_ANYONE.get(type_, set())
        if channel == "authority" or not required:
            reasons = reasons | BY_AUTHORITY.get(type_, set())
        for what, code in after.items():
            # An operation that was not there stands where one of its kind and key would have.
            if code == "ok" and what in before and before[what] != "ok":
                assert outcome.rejection is None
                late = before[what] == "history_gap" and outcome.late
                assert late or before[what] in reasons, (what, before[what], type_, channel)
                # What ran, or may have run, is never allowed again itself.
                assert len(what) != 2 or before[what] not in _OF_STATE
        before = after


_OF_STATE = frozenset({"already_succeeded", "already_failed", "in_flight", "outcome_unknown"})


@settings(max_examples=2 * EXAMPLES, deadline=None)
@given(STORY)
def test_an_approval_permits_as_often_as_it_says(messages: list[Telling]) -> None:
    """However requests, dispatches, calls and settlements mix: each use is one operation's."""
    story = Story(approval_kinds=("deploy",))
    story.start()
    story.tell("child.spawned", child_run="c", task="t")
    story.start(run="c")
    granted: dict[tuple[str, str], int] = {}
    for run, channel, type_, fields in messages:
        story.count += 1
        one = event(type_, f"e-{story.count}", channel, **fields)
        fold(story.lane, story.runs, run, one, Origin(channel, story.count))  # type: ignore[arg-type]
        for name, ledger in story.runs.items():
            used = Counter(item.used_approval for item in ledger.items["operation"].values())
            for approval in ledger.items["approval"].values():
                if not approval.granted_at:
                    assert used[approval.id] == 0
                    continue
                uses = granted.setdefault((name, approval.id), approval.uses_left + used[approval.id])
                assert approval.uses_left + used[approval.id] == uses
                assert (approval.uses_left == 0) == (approval.state == "consumed") or approval.state in (
                    "expired",
                    "revoked",
                )
