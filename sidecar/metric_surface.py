"""The metrics of the daemon as a table: name, kind, help, labels with every value they take, buckets.

Data only. What is counted when is said in `sidecar.metrics`; dashboards and alerts stand on the names.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Final, Literal, NamedTuple

from sidecar import metric_labels as labels

_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_LONG_SECONDS: Final = (0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_LAG_SECONDS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_TOKENS: Final = (500, 1e3, 2e3, 4e3, 8e3, 16e3, 32e3, 64e3, 128e3, 256e3, 512e3, 1e6)
_PACKET_TOKENS: Final = (250, 500, 1e3, 2e3, 3e3, 4e3, 5e3, 6e3, 8e3, 12e3, 16e3, 32e3)
_SHARE: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.1)
_ERROR: Final = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)
_COUNT: Final = (0, 1, 2, 3, 5, 8, 13, 21, 34)


class Declared(NamedTuple):
    """One metric. `children`: the label values that exist from the start, one tuple per series."""

    kind: Literal["counter", "gauge", "histogram"]
    text: str
    names: tuple[str, ...] = ()
    children: tuple[tuple[str, ...], ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(text: str, **values: Iterable[str]) -> Declared:
    return Declared("counter", text, tuple(values), tuple(product(*values.values())) if values else ())


def _gauge(text: str, **values: Iterable[str]) -> Declared:
    return Declared("gauge", text, tuple(values), tuple(product(*values.values())) if values else ())


def _histogram(text: str, buckets: tuple[float, ...], **values: Iterable[str]) -> Declared:
    return Declared(
        "histogram", text, tuple(values), tuple(product(*values.values())) if values else (), buckets
    )


PREFIX: Final = "watchkeeper_"

SURFACE: Final[dict[str, Declared]] = {
    # Intake
    "events_total": _counter("Messages folded.", type=labels.EVENT_TYPES),
    "events_rejected_total": _counter("Messages refused.", code=labels.REJECTION_CODES),
    "events_duplicate_total": _counter("Messages that were known already."),
    "rejections_suppressed_total": _counter("Refusals not published because of the limit per run."),
    "redactions_total": _counter(
        "Secrets taken out of texts before anything was stored.", kind=labels.SECRETS
    ),
    "intake_lag_events": _gauge("Messages in the stream not yet folded."),
    "intake_commit_seconds": _histogram("Time of one intake transaction.", _SECONDS),
    "consumer_restarts_total": _counter("Consumers made anew because they were gone or out of order."),
    "stream_resets_total": _counter(
        "Times the input stream was another one, or shorter than what was folded."
    ),
    # Runs and budget
    "runs": _gauge("Unfinished runs of owned lanes by level of their budget.", level=labels.LEVELS),
    "runs_finished_total": _counter(
        "Runs that ended.", outcome=labels.RUN_OUTCOMES, compacted=("true", "false")
    ),
    "runs_forgotten_total": _counter("Finished runs whose bodies were removed."),
    "context_used_ratio": _histogram("Used share of the usable window at each usage report.", _SHARE),
    "budget_estimate_error_ratio": _histogram(
        "Distance of the estimate from a usage report, as a share of the report.", _ERROR
    ),
    "estimate_samples_ignored_total": _counter("Usage reports left out of account."),
    "invariant_violations_total": _counter("Broken invariants.", code=labels.VIOLATION_CODES),
    # Compaction
    "compactions_total": _counter(
        "Compaction attempts by their end.", outcome=labels.COMPACTION_OUTCOMES, trigger=labels.TRIGGERS
    ),
    "compaction_failures_total": _counter("Failed attempts.", reason=labels.FAILURE_REASONS),
    "compaction_seconds": _histogram("Time of each phase of an attempt.", _LONG_SECONDS, phase=labels.PHASES),
    "compaction_deferred_total": _counter("Compactions put off.", reason=labels.DEFER_REASONS),
    "compaction_tokens_before": _histogram("Context used before a compaction, in tokens.", _TOKENS),
    "compaction_tokens_after": _histogram("Context used after a compaction, in tokens.", _TOKENS),
    "compactions_per_run": _histogram("Compactions applied to a run by its end.", _COUNT),
    "trims_total": _counter("Times that making tool results references was enough."),
    "not_applied_total": _counter("Packets committed that no agent took up."),
    "choices_total": _counter("What was done because the protected part did not fit.", choice=labels.CHOICES),
    "summarizer_requests_total": _counter(
        "Requests to a summariser.", summarizer=labels.SUMMARIZERS, outcome=labels.SUMMARIZER_OUTCOMES
    ),
    "summarizer_tokens_total": _counter(
        "Tokens a summariser reported.", summarizer=labels.SUMMARIZERS, direction=labels.DIRECTIONS
    ),
    "summarizer_late_replies_total": _counter(
        "Answers of a summariser that came after its time limit.", summarizer=labels.SUMMARIZERS
    ),
    "summarizer_breaker_open": _gauge(
        "Runs in memory for which a summariser is not asked for now.", summarizer=labels.SUMMARIZERS
    ),
    # Handing over
    "packets_published_total": _counter("Resume packets published.", verdict=labels.VERDICTS),
    "packet_tokens": _histogram("Size of resume packets, in tokens.", _PACKET_TOKENS),
    "resumes_total": _counter("Resumes by what was wrong with them.", outcome=labels.RESUME_OUTCOMES),
    "authorizations_total": _counter("Answers to authorize.", code=labels.AUTHORIZE_CODES),
    "duplicate_effects_prevented_total": _counter(
        "Denials of an operation that was under way, done or of unknown outcome."
    ),
    "retrievals_total": Declared(
        "counter", "Pieces of evidence asked for.", ("verb", "status"), labels.RETRIEVALS
    ),
    "ask_seconds": _histogram("Time from question to answer.", _SECONDS, verb=labels.VERBS),
    "ask_errors_total": _counter("Questions answered with an error.", code=labels.ASK_ERROR_CODES),
    # The daemon
    "outbox_pending": _gauge("Messages committed and not yet published."),
    "storage_full": _gauge("1 while the disk or the database has no room."),
    "storage_bytes": _gauge("Size of the database on disk."),
    "storage_free_bytes": _gauge(
        "By how much the database may grow: free on its disk, or left of its limit. 0 until a lane is read."
    ),
    "storage_errors_total": _counter("Failed transactions.", kind=labels.STORAGE_ERRORS),
    "lanes_owned": _gauge("Lanes this sidecar owns."),
    "lane_epoch": Declared("gauge", "Epoch under which a lane is owned, 0 if it is not.", ("lane",)),
    "lanes_lost_total": _counter("Lanes another sidecar took from this one."),
    "takeover_seconds": _histogram("Time from claiming a lane to having rebuilt it.", _LONG_SECONDS),
    "ledger_mismatches_total": _counter("Rebuilt ledgers that differed from the stored state. Must stay 0."),
    "nats_connected": _gauge("1 while connected to the broker."),
    "nats_reconnects_total": _counter("Connections made after the first."),
    "unforeseen_errors_total": _counter(
        "Defects: errors nobody foresaw that stopped a lane or a compaction. Must stay 0.", part=labels.PARTS
    ),
    "loop_lag_seconds": _histogram("How much later than asked the event loop woke a task.", _LAG_SECONDS),
}
