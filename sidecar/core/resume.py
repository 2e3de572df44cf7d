"""Whether an agent that resumes a run works from what is true now.

Compares what ``run.resumed`` says with the ledger and with the packet it names. A fault is recorded and
told; it never undoes the resumption, since ``authorize`` refuses whatever a stale view would get wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from protocol.events import RunResumed
from sidecar.core import family
from sidecar.core.state import Ledger

RESUME_CODES: Final = (
    "stale_packet",
    "policy_mismatch",
    "first_action_mismatch",
    "artifact_missing",
    "ledger_version_mismatch",
)
"""What can be wrong with a resumption, worst first."""


class StoodOn(NamedTuple):
    """What a packet was made of: the versions of checkpoint (0: none) and ledger, and what its ancestors had
    changed for the run until then."""

    checkpoint: int
    version: int
    received: int = 0


def resume_faults(
    runs: Mapping[str, Ledger],
    run: str,
    event: RunResumed,
    *,
    packet: StoodOn | None,
    newest: StoodOn,
    missing_artifacts: Collection[str] = (),
) -> list[str]:
    """Codes of what is wrong with this resumption, worst first; empty when all is well.

    ``packet``: what the packet that is taken up stood on, as far as it is remembered; ``newest``: the newest
    checkpoint, the ledger version at which something other than the agent last changed what is protected, and
    what the ancestors changed until now. Call after the event was folded.
    """
    ledger = runs[run]
    found: list[str] = []
    stood_on = newest._replace(version=ledger.head.version) if packet is None else packet
    if event.ledger_version is not None:
        stood_on = stood_on._replace(version=min(stood_on.version, event.ledger_version))
    if any(had < there for had, there in zip(stood_on, newest, strict=True)):
        found.append("stale_packet")
    released = family.released(runs, run)
    if event.policy_version is not None and released is not None and event.policy_version != released:
        found.append("policy_mismatch")
    expected, first = ledger.progress.next_action, event.first_action
    if (
        expected is not None
        and first is not None
        and (first.verb, first.operation_id) != (expected.verb, expected.operation_id)
    ):
        found.append("first_action_mismatch")
    if missing_artifacts:
        found.append("artifact_missing")
    if event.ledger_version is not None and event.ledger_version > ledger.head.version:
        found.append("ledger_version_mismatch")
    return found
