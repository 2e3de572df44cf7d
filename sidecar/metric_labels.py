"""The closed sets of label values the metrics know.

Names only, importable by anyone and free of any metrics library. A value that is not listed here is counted
as `other`, so that no label can grow with what others send.
"""

from __future__ import annotations

from itertools import product
from typing import Final, get_args

from protocol import asks, errors, events, handoff, subjects
from protocol.detectors import KINDS

OTHER: Final = "other"

EVENT_TYPES: Final = (*sorted(events.EVENT_TYPES), "unknown")
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

CANDIDATE_CODES: Final = (
    "empty_summary",
    "schema_invalid",
    "unknown_reference",
    "unbacked_claim",
    "question_dropped",
    "operation_dropped",
    "operation_promoted",
    "approval_promoted",
    "approval_dropped",
    "objective_changed",
    "next_action_changed",
    "constraint_contradicted",
    "contradiction_hidden",
    "inference_as_observation",
    "unsupported_figure",
    "raw_content",
    "secret_in_summary",
    "over_budget",
    "no_gain",
    "stale",
)
RUN_CODES: Final = (
    "history_gap",
    "duplicate_conflict",
    "sequence_conflict",
    "orphan_result",
    "duplicate_call",
    "illegal_transition",
    "repeated_operation",
    "unauthorized_write",
    "expired_approval_used",
    "self_approval",
    "foreign_session",
    "late_event",
    "contract_conflict",
)
RESUME_CODES: Final = (
    "stale_packet",
    "policy_mismatch",
    "first_action_mismatch",
    "artifact_missing",
    "ledger_version_mismatch",
)
VIOLATION_CODES: Final = CANDIDATE_CODES + RUN_CODES + RESUME_CODES
RESUME_OUTCOMES: Final = ("ok", *RESUME_CODES)

AUTHORIZE_CODES: Final = get_args(asks.AuthorizeCode)
EFFECT_PREVENTED_CODES: Final = frozenset({"already_succeeded", "in_flight", "outcome_unknown"})
RETRIEVAL_STATUSES: Final = get_args(asks.FetchStatus)
RETRIEVALS: Final = (
    *product(("fetch", "search"), RETRIEVAL_STATUSES),
    *product(("packet", "context"), ("found", "out_of_scope")),
)
STORAGE_ERRORS: Final = ("full", "busy", "io", "corrupt")
PARTS: Final = ("lane", "compaction")
SECRETS: Final = KINDS
