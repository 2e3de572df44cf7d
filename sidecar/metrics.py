"""Every metric of the daemon, declared once, in a registry of its own.

The only module that knows the metrics library. Labels take closed sets of values (`sidecar.metric_labels`)
and the names of configured or owned lanes; never a run, an id or an error's text. Children are made at the
start and held, so that every series exists from the first scrape and counting costs no look-up by label.
"""

from __future__ import annotations

import platform
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics

from sidecar import metric_labels as labels

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_LONG_SECONDS = (0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_LAG_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_TOKENS = (500, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000, 256_000, 512_000, 1_000_000)
_PACKET_TOKENS = (250, 500, 1_000, 2_000, 3_000, 4_000, 5_000, 6_000, 8_000, 12_000, 16_000, 32_000)
_SHARE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.1)
_ERROR = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)
_COUNT = (0, 1, 2, 3, 5, 8, 13, 21, 34)

_CONTENT_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_CONTENT_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def _wants_openmetrics(accept: str) -> bool:
    """Whether the header names OpenMetrics of a version we speak; it may hold anything a client sends."""
    for part in accept.split(","):
        media_type, *parameters = (word.strip().lower() for word in part.split(";"))
        versions = [word.removeprefix("version=") for word in parameters if word.startswith("version=")]
        if media_type == "application/openmetrics-text" and all(v.startswith("1.") for v in versions):
            return True
    return False


class Counters(dict[str, Counter]):
    """The held children of a counter with one label; an unlisted value is counted as `other`."""

    def __init__(self, counter: Counter, values: Sequence[str]) -> None:
        super().__init__((value, counter.labels(value)) for value in values)
        self._counter = counter

    def __missing__(self, _value: str) -> Counter:
        return self._counter.labels(labels.OTHER)


class CounterPairs(dict[tuple[str, str], Counter]):
    """The held children of a counter with two labels; an unlisted pair is counted as `other`, `other`."""

    def __init__(self, counter: Counter, pairs: Iterable[tuple[str, str]]) -> None:
        super().__init__((pair, counter.labels(*pair)) for pair in pairs)
        self._counter = counter

    def __missing__(self, _pair: tuple[str, str]) -> Counter:
        return self._counter.labels(labels.OTHER, labels.OTHER)


class LaneSum:
    """A gauge without labels that is the sum of what each lane last said."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._parts: dict[str, float] = {}

    def set(self, lane: str, value: float) -> None:
        """The lane's share from now on."""
        self._parts[lane] = value
        self._gauge.set(sum(self._parts.values()))

    def forget(self, lane: str) -> None:
        """The lane is no longer ours; its share goes."""
        self._parts.pop(lane, None)
        self._gauge.set(sum(self._parts.values()))


class _Exposed:
    """The registry as it is shown: without the `_created` series, which would double every counter."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            metric.samples = [s for s in metric.samples if s.name != f"{metric.name}_created"]
            yield metric


class Metrics:
    """The declared set. Counters with labels are mappings: `metrics.events["message"].inc()`."""

    def __init__(
        self,
        *,
        version: str = "unknown",
        sqlite_version: str = sqlite3.sqlite_version,
        lanes: Iterable[str] = (),
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._intake()
        self._runs_and_budget()
        self._compaction()
        self._handing_over()
        self._daemon()
        Info("watchkeeper_build", "What is running.", registry=self.registry).info(
            {"version": version, "python": platform.python_version(), "sqlite": sqlite_version}
        )
        self._lane_epoch = self._gauge(
            "lane_epoch", "Epoch under which a lane is owned, 0 if not.", ("lane",)
        )
        for lane in lanes:
            self.lane_owned(lane, 0)

    def _intake(self) -> None:
        self.events = self._counters("events_total", "Messages folded.", "type", labels.EVENT_TYPES)
        self.events_rejected = self._counters(
            "events_rejected_total", "Messages refused.", "code", labels.REJECTION_CODES
        )
        self.events_duplicate = self._counter("events_duplicate_total", "Messages that were known already.")
        self.rejections_suppressed = self._counter(
            "rejections_suppressed_total", "Refusals counted but not published, because of the limit per run."
        )
        self.intake_lag_events = self._gauge("intake_lag_events", "Messages in the stream not yet folded.")
        self._lag = LaneSum(self.intake_lag_events)
        self.intake_commit_seconds = self._histogram(
            "intake_commit_seconds", "Time of one intake transaction.", _SECONDS
        )
        self.consumer_restarts = self._counter(
            "consumer_restarts_total", "Consumers made anew because their sequence broke or they were gone."
        )
        self.stream_resets = self._counter(
            "stream_resets_total", "Times the input stream was another one, or shorter than what was folded."
        )

    def _runs_and_budget(self) -> None:
        runs = self._gauge("runs", "Unfinished runs by level of their budget.", ("level",))
        self.runs: dict[str, Gauge] = {level: runs.labels(level) for level in labels.LEVELS}
        self._levels = {level: LaneSum(gauge) for level, gauge in self.runs.items()}
        self.runs_finished = self._pairs(
            "runs_finished_total",
            "Runs that ended.",
            ("outcome", "compacted"),
            product(labels.RUN_OUTCOMES, ("true", "false")),
        )
        self.runs_forgotten = self._counter(
            "runs_forgotten_total", "Finished runs whose bodies were removed."
        )
        self.context_used_ratio = self._histogram(
            "context_used_ratio", "Used share of the usable window at each usage report.", _SHARE
        )
        self.budget_estimate_error_ratio = self._histogram(
            "budget_estimate_error_ratio",
            "Distance of estimate and report, as a share of the report.",
            _ERROR,
        )
        self.estimate_samples_ignored = self._counter(
            "estimate_samples_ignored_total", "Usage reports left out of account as nonsense or out of date."
        )
        self.violations = self._counters(
            "invariant_violations_total", "Broken invariants.", "code", labels.VIOLATION_CODES
        )

    def _compaction(self) -> None:
        self.compactions = self._pairs(
            "compactions_total",
            "Compaction attempts by their end.",
            ("outcome", "trigger"),
            product(labels.COMPACTION_OUTCOMES, labels.TRIGGERS),
        )
        self.compaction_failures = self._counters(
            "compaction_failures_total", "Failed attempts.", "reason", labels.FAILURE_REASONS
        )
        phases = Histogram(
            "watchkeeper_compaction_seconds",
            "Time of each phase of an attempt.",
            ("phase",),
            registry=self.registry,
            buckets=_LONG_SECONDS,
        )
        self.compaction_seconds: dict[str, Histogram] = {name: phases.labels(name) for name in labels.PHASES}
        self.compaction_deferred = self._counters(
            "compaction_deferred_total", "Compactions put off.", "reason", labels.DEFER_REASONS
        )
        self.compaction_tokens_before = self._histogram(
            "compaction_tokens_before", "Context used before a compaction, in tokens.", _TOKENS
        )
        self.compaction_tokens_after = self._histogram(
            "compaction_tokens_after", "Context used after a compaction, in tokens.", _TOKENS
        )
        self.compactions_per_run = self._histogram(
            "compactions_per_run", "Compactions applied to a run by its end.", _COUNT
        )
        self.trims = self._counter("trims_total", "Times tool results became references and that was enough.")
        self.not_applied = self._counter("not_applied_total", "Packets committed that no agent took up.")
        self.choices = self._counters(
            "choices_total", "What was done because the protected part did not fit.", "choice", labels.CHOICES
        )
        self.summarizer_requests = self._pairs(
            "summarizer_requests_total",
            "Requests to a summariser.",
            ("summarizer", "outcome"),
            product(labels.SUMMARIZERS, labels.SUMMARIZER_OUTCOMES),
        )
        self.summarizer_tokens = self._pairs(
            "summarizer_tokens_total",
            "Tokens a summariser reported.",
            ("summarizer", "direction"),
            product(labels.SUMMARIZERS, labels.DIRECTIONS),
        )
        breaker = self._gauge(
            "summarizer_breaker_open", "Runs for which a summariser is not asked any more.", ("summarizer",)
        )
        self.summarizer_breaker_open: dict[str, Gauge] = {
            name: breaker.labels(name) for name in labels.SUMMARIZERS
        }

    def _handing_over(self) -> None:
        self.packets_published = self._counters(
            "packets_published_total", "Resume packets published.", "verdict", labels.VERDICTS
        )
        self.packet_tokens = self._histogram(
            "packet_tokens", "Size of resume packets, in tokens.", _PACKET_TOKENS
        )
        self.resumes = self._counters(
            "resumes_total", "Resumes by what was wrong with them.", "outcome", labels.RESUME_OUTCOMES
        )
        self.authorizations = self._counters(
            "authorizations_total", "Answers to authorize.", "code", labels.AUTHORIZE_CODES
        )
        self.duplicate_effects_prevented = self._counter(
            "duplicate_effects_prevented_total",
            "Denials of an operation that was under way, done, failed or of unknown outcome.",
        )
        self.retrievals = self._pairs(
            "retrievals_total", "Pieces of evidence asked for.", ("verb", "status"), labels.RETRIEVALS
        )
        asks = Histogram(
            "watchkeeper_ask_seconds",
            "Time from question to answer.",
            ("verb",),
            registry=self.registry,
            buckets=_SECONDS,
        )
        self.ask_seconds: dict[str, Histogram] = {verb: asks.labels(verb) for verb in labels.VERBS}
        self.ask_errors = self._counters(
            "ask_errors_total", "Questions answered with an error.", "code", labels.ASK_ERROR_CODES
        )

    def _daemon(self) -> None:
        self.outbox_pending = self._gauge("outbox_pending", "Messages committed and not yet published.")
        self._outbox = LaneSum(self.outbox_pending)
        self.storage_full = self._gauge("storage_full", "1 while the disk or the database has no room.")
        self.storage_bytes = self._gauge("storage_bytes", "Size of the database on disk.")
        self.storage_errors = self._counters(
            "storage_errors_total", "Failed transactions.", "kind", labels.STORAGE_ERRORS
        )
        self.lanes_owned = self._gauge("lanes_owned", "Lanes this sidecar owns.")
        self.lanes_lost = self._counter("lanes_lost_total", "Lanes another sidecar took from this one.")
        self.takeover_seconds = self._histogram(
            "takeover_seconds", "Time from claiming a lane to having rebuilt it.", _LONG_SECONDS
        )
        self.ledger_mismatches = self._counter(
            "ledger_mismatches_total", "Rebuilt ledgers that differed from the stored state. Must stay 0."
        )
        self.nats_connected = self._gauge("nats_connected", "1 while connected to the broker.")
        self.nats_reconnects = self._counter("nats_reconnects_total", "Connections made after the first.")
        self.loop_lag_seconds = self._histogram(
            "loop_lag_seconds", "How much later than asked the event loop woke a task.", _LAG_SECONDS
        )

    # --- shares of lanes ------------------------------------------------------------------------------------

    def lag(self, lane: str, events: int) -> None:
        """Messages of this lane in the stream and not yet folded."""
        self._lag.set(lane, events)

    def outbox(self, lane: str, pending: int) -> None:
        """Messages of this lane committed and not yet published."""
        self._outbox.set(lane, pending)

    def levels(self, lane: str, counts: Mapping[str, int]) -> None:
        """Unfinished runs of this lane by level; a level not named has none."""
        for level, share in self._levels.items():
            share.set(lane, counts.get(level, 0))

    def lane_owned(self, lane: str, epoch: int) -> None:
        """The lane is ours under this epoch; 0: configured but not ours."""
        self._lane_epoch.labels(lane).set(epoch)

    def lane_gone(self, lane: str, *, configured: bool = True) -> None:
        """The lane is not ours any more: its shares go, and its series too unless it stays configured."""
        for share in (self._lag, self._outbox, *self._levels.values()):
            share.forget(lane)
        if configured:
            self._lane_epoch.labels(lane).set(0)
        else:
            self._lane_epoch.remove(lane)

    # --- exposition -----------------------------------------------------------------------------------------

    def render(self, accept: str) -> tuple[str, bytes]:
        """Content type and body: OpenMetrics if the `Accept` header asks for it, else the text format."""
        if _wants_openmetrics(accept):
            body: bytes = openmetrics.generate_latest(_Exposed(self.registry))  # type: ignore[no-untyped-call]
            return _CONTENT_OPENMETRICS, body
        return _CONTENT_TEXT, generate_latest(_Exposed(self.registry))

    # --- declaring ------------------------------------------------------------------------------------------

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"watchkeeper_{name}", text, registry=self.registry)

    def _counters(self, name: str, text: str, label: str, values: Sequence[str]) -> Counters:
        return Counters(Counter(f"watchkeeper_{name}", text, (label,), registry=self.registry), values)

    def _pairs(
        self, name: str, text: str, names: tuple[str, str], pairs: Iterable[tuple[str, str]]
    ) -> CounterPairs:
        return CounterPairs(Counter(f"watchkeeper_{name}", text, names, registry=self.registry), pairs)

    def _gauge(self, name: str, text: str, names: Sequence[str] = ()) -> Gauge:
        return Gauge(f"watchkeeper_{name}", text, names, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"watchkeeper_{name}", text, registry=self.registry, buckets=buckets)
