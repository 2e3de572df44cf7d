"""What is wrong with a resumption: the codes, worst first, and what is none of them."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.events import NextAction, RunResumed
from sidecar.core.resume import StoodOn, resume_faults
from sidecar.core.state import Ledger, Policy, Progress
from tests.support.packets import started
from tests.support.story import event

NEWEST = StoodOn(checkpoint=2, version=40, received=1)


def _ledger() -> Ledger:
    ledger = started()
    ledger.head.version = 50
    return ledger


def _faults(packet: StoodOn | None = NEWEST, ledger: Ledger | None = None, **told: Any) -> list[str]:
    resumed = event("run.resumed", packet_id="pk-1", **told)
    assert isinstance(resumed, RunResumed)
    return resume_faults({"r1": ledger or _ledger()}, "r1", resumed, packet=packet, newest=NEWEST)


def test_nothing_is_wrong_with_the_newest_packet() -> None:
    assert _faults(ledger_version=45) == []
    assert _faults(StoodOn(2, 45, 1)) == []


@pytest.mark.parametrize(
    "packet",
    [StoodOn(1, 45, 1), StoodOn(2, 39, 1), StoodOn(2, 45, 0)],
    ids=["checkpoint", "own", "ancestors"],
)
def test_a_packet_from_before_a_change_is_stale(packet: StoodOn) -> None:
    assert _faults(packet) == ["stale_packet"]


def test_the_older_of_packet_and_said_version_counts() -> None:
    assert _faults(StoodOn(2, 45, 1), ledger_version=39) == ["stale_packet"]
    assert _faults(StoodOn(2, 39, 1), ledger_version=45) == ["stale_packet"]


def test_of_a_packet_nobody_remembers_only_the_said_version_counts() -> None:
    assert _faults(None) == []
    assert _faults(None, ledger_version=39) == ["stale_packet"]


def test_another_policy_another_first_action_and_a_version_from_the_future() -> None:
    ledger = _ledger()
    ledger.put("policy", Policy(released="p2"))
    ledger.put("progress", Progress(next_action=NextAction(verb="test")))
    found = _faults(ledger=ledger, policy_version="p1", first_action={"verb": "edit"}, ledger_version=51)
    assert found == ["policy_mismatch", "first_action_mismatch", "ledger_version_mismatch"]
    assert _faults(ledger=ledger, policy_version="p2", first_action={"verb": "test", "detail": "x"}) == []


def test_artifacts_that_nobody_saved_are_told() -> None:
    resumed = event("run.resumed")
    assert isinstance(resumed, RunResumed)
    found = resume_faults(
        {"r1": _ledger()}, "r1", resumed, packet=None, newest=NEWEST, missing_artifacts=("log",)
    )
    assert found == ["artifact_missing"]
