"""What the daemon counts: one declared set of metrics in a registry of its own, and a verb for each fact.

The only module that knows the metrics library. Other modules say what happened (`metrics.rejected(code)`);
which series that moves is decided here. Labels take the closed sets of `sidecar.metric_surface` and the names
of configured or owned lanes; never a run, an id or an error's text. A counter's value that is not declared
counts as `other`; a gauge's or histogram's is left out.
"""

from __future__ import annotations

import platform
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics

from sidecar import tracing
from sidecar.metric_labels import EFFECT_PREVENTED_CODES, LEVELS, OTHER, SECRETS
from sidecar.metric_surface import PREFIX, SURFACE, Declared

_CONTENT_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_CONTENT_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class _Counters(dict[tuple[str, ...], Counter]):
    """The held children of one counter; label values that were not declared are counted as `other`."""

    def __init__(self, counter: Counter, declared: Declared) -> None:
        super().__init__((values, counter.labels(*values)) for values in declared.children)
        if not declared.names:
            self[()] = counter
        self._counter = counter
        self._other = (OTHER,) * len(declared.names)

    def __missing__(self, _values: tuple[str, ...]) -> Counter:
        return self._counter.labels(*self._other)


class _LaneSum:
    """A gauge that is the sum of what each lane last said."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._parts: dict[str, float] = {}

    def set(self, lane: str, value: float) -> None:
        self._parts[lane] = value
        self._gauge.set(sum(self._parts.values()))

    def forget(self, lane: str) -> None:
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


def _exemplar(traceparent: str | None) -> dict[str, str] | None:
    """The trace an observation belongs to, if it was sampled: of another nothing can be looked up."""
    value = tracing.valid(traceparent)
    if value is None or not int(value[53:55], 16) & 1:
        return None
    return {"trace_id": tracing.trace_id(value)}


def _wants_openmetrics(accept: str) -> bool:
    """Whether the header names OpenMetrics of a version we speak; it may hold anything a client sends."""
    for part in accept.split(","):
        media_type, *parameters = (word.strip().lower() for word in part.split(";"))
        versions = [word.removeprefix("version=") for word in parameters if word.startswith("version=")]
        if media_type == "application/openmetrics-text" and all(v.startswith("1.") for v in versions):
            return True
    return False


class Metrics:
    """The declared set. `lanes` are those whose epoch is shown even while they are not ours."""

    def __init__(
        self,
        *,
        version: str = "unknown",
        sqlite_version: str = sqlite3.sqlite_version,
        lanes: Iterable[str] = (),
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._counters: dict[str, _Counters] = {}
        self._gauges: dict[str, dict[tuple[str, ...], Gauge]] = {}
        self._histograms: dict[str, dict[tuple[str, ...], Histogram]] = {}
        for name, declared in SURFACE.items():
            self._declare(name, declared)
        Info(f"{PREFIX}build", "What is running.", registry=self.registry).info(
            {"version": version, "python": platform.python_version(), "sqlite": sqlite_version}
        )
        self._lag = _LaneSum(self._gauges["intake_lag_events"][()])
        self._outbox = _LaneSum(self._gauges["outbox_pending"][()])
        self._levels = {level: _LaneSum(self._gauges["runs"][level,]) for level in LEVELS}
        self._breakers = {
            values[0]: _LaneSum(gauge) for values, gauge in self._gauges["summarizer_breaker_open"].items()
        }
        self._configured = frozenset(lanes)
        self._owned: set[str] = set()
        self._was_connected = False
        self._connected_now = False
        for lane in self._configured:
            self._lane_epoch.labels(lane).set(0)

    def _declare(self, name: str, declared: Declared) -> None:
        kind, text, names, children, buckets = declared
        full = f"{PREFIX}{name}"
        if kind == "counter":
            self._counters[name] = _Counters(Counter(full, text, names, registry=self.registry), declared)
        elif kind == "gauge":
            gauge = Gauge(full, text, names, registry=self.registry)
            self._gauges[name] = {values: gauge.labels(*values) for values in children}
            if not names:
                self._gauges[name][()] = gauge
            if name == "lane_epoch":
                self._lane_epoch = gauge
        else:
            histogram = Histogram(full, text, names, registry=self.registry, buckets=buckets)
            self._histograms[name] = {values: histogram.labels(*values) for values in children}
            if not names:
                self._histograms[name][()] = histogram

    def _count(self, name: str, *values: str, by: float = 1) -> None:
        self._counters[name][values].inc(by)

    def _observe(self, name: str, amount: float, *values: str, traceparent: str | None = None) -> None:
        series = self._histograms[name].get(values)
        if series is not None:
            series.observe(amount, _exemplar(traceparent or tracing.current()))

    def _set(self, name: str, amount: float, *values: str) -> None:
        series = self._gauges[name].get(values)
        if series is not None:
            series.set(amount)

    # --- intake ---------------------------------------------------------------------------------------------

    def folded(self, event_type: str, count: int = 1) -> None:
        """So many messages of a type were folded and committed."""
        self._count("events_total", event_type, by=count)

    def rejected(self, code: str, *, published: bool = True) -> None:
        """A message was refused; `published` is false where the limit per run kept it quiet."""
        self._count("events_rejected_total", code)
        if not published:
            self._count("rejections_suppressed_total")

    def redacted(self, counts: Mapping[str, int]) -> None:
        """Secrets of these kinds were taken out of a message; configured ones count as `custom`."""
        for kind, number in counts.items():
            self._count("redactions_total", kind if kind in SECRETS else "custom", by=number)

    def duplicate(self) -> None:
        """A message was known already."""
        self._count("events_duplicate_total")

    def committed(self, seconds: float, traceparent: str | None = None) -> None:
        """An intake transaction took this long; `traceparent` is of a message in it."""
        self._observe("intake_commit_seconds", seconds, traceparent=traceparent)

    def lag(self, lane: str, events: int) -> None:
        """Messages of this lane in the stream and not yet folded, as of now."""
        self._lag.set(lane, events)

    def consumer_restarted(self) -> None:
        """The lane's consumer was made anew."""
        self._count("consumer_restarts_total")

    def stream_reborn(self) -> None:
        """The input stream was another one than before, or shorter."""
        self._count("stream_resets_total")

    # --- runs and budget ------------------------------------------------------------------------------------

    def levels(self, lane: str, counts: Mapping[str, int]) -> None:
        """Unfinished runs of this lane by level, as of now; a level not named has none."""
        for level, share in self._levels.items():
            share.set(lane, counts.get(level, 0))

    def finished(self, outcome: str, compactions: int) -> None:
        """A run ended after this many compactions."""
        self._count("runs_finished_total", outcome, "true" if compactions else "false")
        self._observe("compactions_per_run", compactions)

    def usage(
        self, used_share: float, estimate_error: float | None = None, traceparent: str | None = None
    ) -> None:
        """A usage report: share of usable used; relative error of the estimate, if known."""
        self._observe("context_used_ratio", used_share, traceparent=traceparent)
        if estimate_error is not None:
            self._observe("budget_estimate_error_ratio", abs(estimate_error), traceparent=traceparent)

    def usage_ignored(self) -> None:
        """A usage report was left out of account."""
        self._count("estimate_samples_ignored_total")

    def violation(self, code: str, count: int = 1) -> None:
        """An invariant was broken, by a run, a candidate or a resume."""
        self._count("invariant_violations_total", code, by=count)

    def forgotten(self, runs: int) -> None:
        """Bodies of this many finished runs were removed."""
        self._count("runs_forgotten_total", by=runs)

    # --- compaction -----------------------------------------------------------------------------------------

    def compacted(
        self, outcome: str, trigger: str, before: int | None = None, after: int | None = None
    ) -> None:
        """An attempt ended; tokens of context before and after where it changed something."""
        self._count("compactions_total", outcome, trigger)
        if before is not None:
            self._observe("compaction_tokens_before", before)
        if after is not None:
            self._observe("compaction_tokens_after", after)

    def failed(self, reason: str) -> None:
        """Why an attempt failed; its outcome is told by `compacted`."""
        self._count("compaction_failures_total", reason)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of an attempt, whatever its end."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._observe("compaction_seconds", time.perf_counter() - began, name)

    def phase_took(self, name: str, seconds: float, traceparent: str | None = None) -> None:
        """A phase of an attempt took this long, in the trace it belongs to."""
        self._observe("compaction_seconds", seconds, name, traceparent=traceparent)

    def deferred(self, reason: str) -> None:
        """A compaction was put off, or the reason for it changed."""
        self._count("compaction_deferred_total", reason)

    def trimmed(self) -> None:
        """Tool results became references."""
        self._count("trims_total")

    def not_taken_up(self) -> None:
        """A committed packet was not applied within three usage reports."""
        self._count("not_applied_total")

    def chose(self, choice: str) -> None:
        """The protected part did not fit."""
        self._count("choices_total", choice)

    def summarized(self, summarizer: str, outcome: str) -> None:
        """One request to a summariser ended: `ok` or a failure reason."""
        self._count("summarizer_requests_total", summarizer, outcome)

    def summary_late(self, summarizer: str) -> None:
        """An answer of a summariser came when nobody waited for it any more."""
        self._count("summarizer_late_replies_total", summarizer)

    def summary_cost(self, summarizer: str, tokens_in: int, tokens_out: int) -> None:
        """The tokens a summariser reported for one request, whatever came of it."""
        self._count("summarizer_tokens_total", summarizer, "in", by=tokens_in)
        self._count("summarizer_tokens_total", summarizer, "out", by=tokens_out)

    def breaker(self, lane: str, summarizer: str, runs: int) -> None:
        """Runs of this lane for which the summariser is not asked any more, as of now."""
        share = self._breakers.get(summarizer)
        if share is not None:
            share.set(lane, runs)

    # --- handing over ---------------------------------------------------------------------------------------

    def packet(self, verdict: str, tokens: int) -> None:
        """A resume packet was committed for publishing."""
        self._count("packets_published_total", verdict)
        self._observe("packet_tokens", tokens)

    def resumed(self, outcome: str) -> None:
        """A run was resumed: `ok` or the code of what was wrong."""
        self._count("resumes_total", outcome)

    def authorized(self, code: str, *, act: bool = True) -> None:
        """An answer of authorize; `act` is false where the asker only looked."""
        self._count("authorizations_total", code)
        if act and code in EFFECT_PREVENTED_CODES:
            self._count("duplicate_effects_prevented_total")

    def prevented(self) -> None:
        """A dispatch was recognised as the repetition of an effect."""
        self._count("duplicate_effects_prevented_total")

    def retrieved(self, verb: str, status: str, count: int = 1) -> None:
        """Pieces of evidence asked for, by what was found."""
        self._count("retrievals_total", verb, status, by=count)

    def asked(self, verb: str, seconds: float, error: str | None = None) -> None:
        """A question was answered after this long, with an error code if it failed."""
        self._observe("ask_seconds", seconds, verb)
        if error is not None:
            self._count("ask_errors_total", error)

    # --- the daemon -----------------------------------------------------------------------------------------

    def outbox(self, lane: str, pending: int) -> None:
        """Messages of this lane committed and not yet published, as of now."""
        self._outbox.set(lane, pending)

    def storage_full(self, full: bool) -> None:
        """Whether there is room to commit, as of now."""
        self._set("storage_full", full)

    def storage_size(self, size: int) -> None:
        """Bytes of the database on disk, as of now."""
        self._set("storage_bytes", size)

    def storage_free(self, size: int) -> None:
        """Bytes free on the file system of the database, as of now."""
        self._set("storage_free_bytes", size)

    def storage_failed(self, kind: str) -> None:
        """A transaction failed; the kind is a label's value, or the name of the error's class."""
        self._count("storage_errors_total", kind.removeprefix("Storage").lower())

    def unforeseen(self, part: str) -> None:
        """An error nobody foresaw stopped a lane or a compaction attempt: a defect."""
        self._count("unforeseen_errors_total", part)

    def lane_owned(self, lane: str, epoch: int | None) -> None:
        """The lane is ours under this epoch; `None`: not any more, and nothing of it is counted as ours."""
        if epoch is not None:
            self._owned.add(lane)
            self._lane_epoch.labels(lane).set(epoch)
        else:
            self._owned.discard(lane)
            for share in (self._lag, self._outbox, *self._levels.values(), *self._breakers.values()):
                share.forget(lane)
            if lane in self._configured:
                self._lane_epoch.labels(lane).set(0)
            else:
                self._lane_epoch.remove(lane)
        self._set("lanes_owned", len(self._owned))

    def lane_flap(self, lane: str) -> None:
        """Another sidecar took the lane from us."""
        self._count("lanes_lost_total")

    def took_over(self, seconds: float) -> None:
        """A lane was rebuilt this long after it was claimed."""
        self._observe("takeover_seconds", seconds)

    def ledger_mismatch(self) -> None:
        """A rebuilt ledger differed from the stored state: an alarm."""
        self._count("ledger_mismatches_total")

    def connected(self, connected: bool) -> None:
        """The state of the broker connection, as of now; every connection after the first is counted."""
        if connected and self._was_connected and not self._connected_now:
            self._count("nats_reconnects_total")
        self._was_connected |= connected
        self._connected_now = connected
        self._set("nats_connected", connected)

    def loop_lag(self, seconds: float) -> None:
        """The event loop woke a task this much later than asked."""
        self._observe("loop_lag_seconds", seconds)

    def total(self, name: str) -> float:
        """The sum over all series of a counter or gauge, by its name without the prefix."""
        full = f"{PREFIX}{name}"
        samples = (sample for metric in self.registry.collect() for sample in metric.samples)
        return sum(sample.value for sample in samples if sample.name == full)

    # --- exposition -----------------------------------------------------------------------------------------

    def render(self, accept: str) -> tuple[str, bytes]:
        """Content type and body: OpenMetrics if the `Accept` header asks for it, else the text format."""
        if _wants_openmetrics(accept):
            body: bytes = openmetrics.generate_latest(_Exposed(self.registry))  # type: ignore[no-untyped-call]
            return _CONTENT_OPENMETRICS, body
        return _CONTENT_TEXT, generate_latest(_Exposed(self.registry))
