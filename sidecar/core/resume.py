"""Whether an agent that resumes a run works from what is true now.

Compares what ``run.resumed`` says with the ledger and with the packet it names. A fault is recorded and
told; it never undoes the resumption, since ``authorize`` refuses whatever a stale view would get wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

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


def resume_faults(
    runs: Mapping[str, Ledger],
    run: str,
    event: RunResumed,
    *,
    packets: Mapping[str, tuple[int, int]],
    checkpoint_version: int,
    changed_by_others_at: int = 0,
    missing_artifacts: Collection[str] = (),
) -> list[str]:
    """Codes of what is wrong with this resumption, worst first; empty when all is well.

    ``packets``: ids of packets published lately → the checkpoint version (0: none) and ledger version each
    stood on; ``checkpoint_version``: of the newest checkpoint; ``changed_by_others_at``: ledger version at
    which something other than the agent last changed what is protected. Call after the event was folded.
    """
    ledger = runs[run]
    found: list[str] = []
    newest = (checkpoint_version, ledger.head.version)
    stood_on, version = packets.get(event.packet_id or "", newest)
    if event.ledger_version is not None:
        version = min(version, event.ledger_version)
    if stood_on < checkpoint_version or version < changed_by_others_at:
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
