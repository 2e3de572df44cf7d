"""The closed sets of label values the metrics know.

Names only, importable by anyone and free of any metrics library. A value that is not listed here is counted
as `other`, so that no label can grow with what others send.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Final, get_args

from protocol import asks, errors, events, handoff, subjects
from protocol.detectors import KINDS
from sidecar.core.entry import RUN_VIOLATIONS
from sidecar.core.gate import PREVENTING
from sidecar.core.resume import RESUME_CODES
from sidecar.core.validation import CHECKS

OTHER: Final = "other"

EVENT_TYPES: Final = tuple(sorted(events.EVENT_TYPES))
REJECTION_CODES: Final = get_args(errors.RejectionCode)
ASK_ERROR_CODES: Final = get_args(errors.AskErrorCode)
VERBS: Final = get_args(subjects.Verb)

LEVELS: Final = get_args(handoff.Level)
RUN_OUTCOMES: Final = get_args(events.Outcome)
VERDICTS: Final = get_args(handoff.Verdict)
CHOICES: Final = ("reduced", "postpone", "pause")

COMPACTION_OUTCOMES: Final = get_args(handoff.ReceiptOutcome)
TRIGGERS: Final = get_args(handoff.Trigger)
PHASES: Final = ("prepare", "generate", "validate", "commit", "publish")
FAILURE_REASONS: Final = get_args(handoff.FailureReason)
DEFER_REASONS: Final = get_args(handoff.DeferReason)
SUMMARIZERS: Final = ("digest", "nats", "openai", "anthropic")
SUMMARIZER_OUTCOMES: Final = ("ok", *FAILURE_REASONS)
DIRECTIONS: Final = ("in", "out")

CANDIDATE_CODES: Final = tuple(CHECKS)
RUN_CODES: Final = RUN_VIOLATIONS
VIOLATION_CODES: Final = CANDIDATE_CODES + RUN_CODES + RESUME_CODES
RESUME_OUTCOMES: Final = ("ok", *RESUME_CODES)
SEVERITIES: Final[Mapping[str, str]] = {
    **{code: check.severity for code, check in CHECKS.items()},
    "history_gap": "major",
    "duplicate_conflict": "major",
    "sequence_conflict": "major",
    "orphan_result": "minor",
    "duplicate_call": "minor",
    "illegal_transition": "major",
    "repeated_operation": "major",
    "unauthorized_write": "critical",
    "expired_approval_used": "critical",
    "self_approval": "critical",
    "foreign_session": "minor",
    "late_event": "minor",
    "contract_conflict": "major",
    "stale_packet": "major",
    "policy_mismatch": "major",
    "first_action_mismatch": "minor",
    "artifact_missing": "major",
    "ledger_version_mismatch": "major",
}
"""How bad a broken invariant is; alerts are graded by it."""

AUTHORIZE_CODES: Final = get_args(asks.AuthorizeCode)
EFFECT_PREVENTED_CODES: Final = PREVENTING
RETRIEVAL_STATUSES: Final = get_args(asks.FetchStatus)
RETRIEVALS: Final = (
    *product(("fetch",), RETRIEVAL_STATUSES),
    *product(("search",), ("found", "not_found", "out_of_scope")),
    *product(("packet", "context"), ("found", "not_found")),
)
STORAGE_ERRORS: Final = ("full", "busy", "io", "corrupt")
PARTS: Final = ("lane", "compaction")
SECRETS: Final = KINDS
