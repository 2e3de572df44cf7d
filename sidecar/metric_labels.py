"""The closed sets of label values the metrics know.

Names only, importable by anyone and free of any metrics library. A value that is not listed here is counted
as `other`, so that no label can grow with what others send.
"""

from __future__ import annotations

from itertools import product
from typing import Final, get_args

from protocol import errors, events, subjects

OTHER: Final = "other"

EVENT_TYPES: Final = (*sorted(events.EVENT_TYPES), "unknown")
REJECTION_CODES: Final = get_args(errors.RejectionCode)
ASK_ERROR_CODES: Final = get_args(errors.AskErrorCode)
VERBS: Final = get_args(subjects.Verb)

LEVELS: Final = ("ok", "checkpoint", "compact", "critical", "overflow")
RUN_OUTCOMES: Final = ("succeeded", "failed", "cancelled")
VERDICTS: Final = ("pause", "new_context", "reload_policy", "reconcile", "await_approval", "continue")
CHOICES: Final = ("reduced", "postpone", "pause")

COMPACTION_OUTCOMES: Final = ("applied", "shadow", "failed", "stale", "skipped")
TRIGGERS: Final = ("threshold", "critical", "overflow", "requested", "model_changed")
PHASES: Final = ("prepare", "generate", "validate", "commit", "publish")
FAILURE_REASONS: Final = (
    "timeout",
    "refused",
    "truncated",
    "echo",
    "invalid",
    "unavailable",
    "rate_limited",
    "interrupted",
    "storage",
)
DEFER_REASONS: Final = (
    "no_boundary",
    "in_flight",
    "open_gap",
    "artifact_unsaved",
    "little_new",
    "cool_down",
    "breaker",
    "not_applied",
    "mode",
)
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

AUTHORIZE_CODES: Final = (
    "unknown_operation",
    "run_finished",
    "run_paused",
    "history_gap",
    "already_succeeded",
    "already_failed",
    "in_flight",
    "outcome_unknown",
    "policy_stale",
    "out_of_scope",
    "constraint_forbids",
    "approval_missing",
    "approval_pending",
    "approval_denied",
    "approval_expired",
    "approval_revoked",
    "approval_consumed",
    "payload_mismatch",
    "postponed",
    "ok",
)
RETRIEVAL_STATUSES: Final = ("found", "not_found", "gone", "redacted", "out_of_scope", "digest_mismatch")
RETRIEVALS: Final = (
    *product(("fetch", "search"), RETRIEVAL_STATUSES),
    *product(("packet", "context"), ("found", "out_of_scope")),
)
STORAGE_ERRORS: Final = ("full", "busy", "io", "corrupt")
