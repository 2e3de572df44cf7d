"""The Grafana dashboards as tables of panels. ``make pages`` writes them as the JSON that ships.

A query says ``$where`` for the labels chosen at the top of the page. Zero series of labelled counters are left
out by ``> 0`` where the event is a matter of every day; where it must not happen at all, the zero is shown.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).resolve().parents[2] / "deploy" / "grafana"
WHERE: Final = 'job=~"$job",instance=~"$instance"'
_WIDTH: Final = 24
_HEIGHT: Final = 7
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """``queries``: expression and legend of each. ``words``: what the panel tells, for who hovers over it."""

    title: str
    words: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    stacked: bool = False
    width: int = 8
    bad_from: float | None = None


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    words: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]

    @property
    def panels(self) -> list[Panel]:
        return [panel for _, panels in self.rows for panel in panels]


def _by(name: str, label: str, unit: str = "") -> tuple[tuple[str, str], ...]:
    """A counter's pace by one label, what does not move left out."""
    series = f"watchkeeper_{name}{{$where}}"
    return ((f"sum by ({label}) (rate({series}[$__rate_interval])) > 0", f"{{{{{label}}}}}{unit}"),)


def _sum(name: str, legend: str) -> tuple[tuple[str, str], ...]:
    return ((f"sum(rate(watchkeeper_{name}{{$where}}[$__rate_interval]))", legend),)


def _quantile(share: float, name: str, by: str = "") -> str:
    grouped = f"le, {by}" if by else "le"
    series = f"watchkeeper_{name}_bucket{{$where}}"
    return f"histogram_quantile({share}, sum by ({grouped}) (rate({series}[$__rate_interval])))"


def _quantiles(name: str, *shares: float) -> tuple[tuple[str, str], ...]:
    return tuple((_quantile(share, name), f"{share * 100:g} % below") for share in shares)


def _stat(title: str, words: str, query: str, unit: str = "short", bad_from: float | None = None) -> Panel:
    return Panel(title, words, ((query, ""),), unit, "stat", width=4, bad_from=bad_from)


FLEET: Final = Dashboard(
    "watchkeeper-fleet",
    "Watchkeeper: fleet",
    "Whether the sidecars are there, keep up and can write; who owns which lane.",
    (
        (
            "Is everything there?",
            (
                _stat(
                    "Sidecars up", "Of those that are scraped.", 'sum(up{job=~"$job",instance=~"$instance"})'
                ),
                _stat("Lanes owned", "By all sidecars together.", "sum(watchkeeper_lanes_owned{$where})"),
                _stat(
                    "Lanes without an owner",
                    "Nobody reads or answers there.",
                    "count(max by (lane) (watchkeeper_lane_epoch{$where}) == 0) or vector(0)",
                    bad_from=1,
                ),
                _stat("Unfinished runs", "In owned lanes.", "sum(watchkeeper_runs{$where})"),
                _stat(
                    "Runs near their limit",
                    "Critical or over the limit.",
                    'sum(watchkeeper_runs{$where,level=~"critical|overflow"})',
                    bad_from=1,
                ),
                _stat(
                    "Alerts firing",
                    "What each means and what to do: deploy/README.md.",
                    'count(ALERTS{alertname=~"Watchkeeper.*",alertstate="firing"}) or vector(0)',
                    bad_from=1,
                ),
            ),
        ),
        (
            "What comes in",
            (
                Panel(
                    "Events folded",
                    "Messages per second that became part of a ledger.",
                    _by("events_total", "type"),
                    "cps",
                    stacked=True,
                ),
                Panel(
                    "Messages refused",
                    "By reason. What they were to say is in no ledger.",
                    (
                        *_by("events_rejected_total", "code"),
                        *_sum("rejections_suppressed_total", "refused without an answer"),
                    ),
                    "cps",
                ),
                Panel(
                    "Known already, and secrets taken out",
                    "Messages that came again, and secrets by kind.",
                    (*_sum("events_duplicate_total", "known already"), *_by("redactions_total", "kind")),
                    "cps",
                ),
                Panel(
                    "Events not read yet",
                    "In the stream behind the cursor.",
                    (("sum by (instance) (watchkeeper_intake_lag_events{$where})", "{{instance}}"),),
                ),
                Panel(
                    "Time of an intake transaction",
                    "Reading, folding and committing one batch.",
                    _quantiles("intake_commit_seconds", 0.5, 0.99),
                    "s",
                ),
                Panel(
                    "Readers made anew",
                    "Consumers that were gone or out of order, and connections made again.",
                    (
                        *_sum("consumer_restarts_total", "consumers"),
                        *_sum("nats_reconnects_total", "connections"),
                        *_sum("stream_resets_total", "streams that were another one"),
                    ),
                    "cps",
                ),
            ),
        ),
        (
            "What goes out",
            (
                Panel(
                    "Messages waiting to leave",
                    "Committed and not yet at the broker.",
                    (("sum by (instance) (watchkeeper_outbox_pending{$where})", "{{instance}}"),),
                ),
                Panel(
                    "Packets published",
                    "By what they tell the agent to do.",
                    _by("packets_published_total", "verdict"),
                    "cps",
                    stacked=True,
                ),
                Panel(
                    "Questions answered",
                    "By verb.",
                    (
                        (
                            "sum by (verb) (rate(watchkeeper_ask_seconds_count{$where}[$__rate_interval])) > 0",
                            "{{verb}}",
                        ),
                    ),
                    "cps",
                    stacked=True,
                ),
                Panel(
                    "Time to an answer",
                    "99 in 100 are faster.",
                    ((_quantile(0.99, "ask_seconds", "verb"), "{{verb}}"),),
                    "s",
                ),
                Panel(
                    "Questions answered with an error",
                    "Unavailable and behind mean: ask again.",
                    _by("ask_errors_total", "code"),
                    "cps",
                ),
                Panel(
                    "Evidence asked for",
                    "By verb and what was found.",
                    (
                        (
                            "sum by (verb, status) (rate(watchkeeper_retrievals_total{$where}[$__rate_interval])) > 0",
                            "{{verb}} {{status}}",
                        ),
                    ),
                    "cps",
                ),
            ),
        ),
        (
            "Who owns what",
            (
                Panel(
                    "Epoch of each lane",
                    "Grows by one with each change of owner; 0: not owned by this sidecar.",
                    (("max by (lane, instance) (watchkeeper_lane_epoch{$where})", "{{lane}} {{instance}}"),),
                ),
                Panel(
                    "Lanes lost, and how long taking over took",
                    "To another sidecar; the slowest in ten of the rebuildings.",
                    (
                        *_sum("lanes_lost_total", "lost per second"),
                        (_quantile(0.9, "takeover_seconds"), "seconds to take over"),
                    ),
                ),
                Panel(
                    "Connected to the broker",
                    "1 while there is a connection.",
                    (("min by (instance) (watchkeeper_nats_connected{$where})", "{{instance}}"),),
                ),
            ),
        ),
        (
            "Disk and processor",
            (
                Panel(
                    "Disk",
                    "The database, and what is free beside it.",
                    (
                        ("sum by (instance) (watchkeeper_storage_bytes{$where})", "{{instance}} database"),
                        ("min by (instance) (watchkeeper_storage_free_bytes{$where})", "{{instance}} free"),
                    ),
                    "bytes",
                ),
                Panel(
                    "Must stay zero",
                    "A full disk, failed transactions, defects, ledgers that differ when rebuilt.",
                    (
                        ("max by (instance) (watchkeeper_storage_full{$where})", "{{instance}} full"),
                        (
                            "sum by (kind) (increase(watchkeeper_storage_errors_total{$where}[$__rate_interval]))",
                            "transactions failed: {{kind}}",
                        ),
                        (
                            "sum by (part) (increase(watchkeeper_unforeseen_errors_total{$where}[$__rate_interval]))",
                            "defects: {{part}}",
                        ),
                        (
                            "sum(increase(watchkeeper_ledger_mismatches_total{$where}[$__rate_interval]))",
                            "ledgers that differ",
                        ),
                    ),
                ),
                Panel(
                    "How late tasks wake",
                    "The event loop's lag; from half a second on leases are in danger.",
                    _quantiles("loop_lag_seconds", 0.5, 0.99),
                    "s",
                ),
                Panel(
                    "Versions",
                    "What runs where.",
                    (
                        (
                            "max by (instance, version, python, sqlite) (watchkeeper_build_info{$where})",
                            "{{instance}}: {{version}}, Python {{python}}, SQLite {{sqlite}}",
                        ),
                    ),
                    kind="bargauge",
                    width=24,
                ),
            ),
        ),
    ),
)

RUNS: Final = Dashboard(
    "watchkeeper-runs",
    "Watchkeeper: runs and compaction",
    "Whether runs are safe, whether compaction works, what is lost or refused, and what it costs.",
    (
        (
            "Are runs safe?",
            (
                Panel(
                    "Unfinished runs by level",
                    "How full their contexts are: from compact on history is shortened.",
                    (("sum by (level) (watchkeeper_runs{$where})", "{{level}}"),),
                    stacked=True,
                ),
                Panel(
                    "Broken invariants by severity",
                    "Of runs, of summaries that were rejected for it, and of resumes; in ten minutes.",
                    (
                        (
                            "sum by (severity) (watchkeeper:invariant_violations:increase10m{$where})",
                            "{{severity}}",
                        ),
                    ),
                ),
                Panel(
                    "Broken invariants by code",
                    "What each means: deploy/reference.md.",
                    _by("invariant_violations_total", "code"),
                    "cps",
                ),
                Panel(
                    "Answers to authorize",
                    "Everything but ok is a refusal.",
                    _by("authorizations_total", "code"),
                    "cps",
                    stacked=True,
                ),
                Panel(
                    "Repeated effects prevented",
                    "An agent tried again what was under way, done or of unknown outcome.",
                    _sum("duplicate_effects_prevented_total", "prevented"),
                    "cps",
                ),
                Panel(
                    "Resumes",
                    "Agents going on from a packet, by what was wrong with it.",
                    _by("resumes_total", "outcome"),
                    "cps",
                ),
            ),
        ),
        (
            "Is compaction working?",
            (
                Panel(
                    "Attempts by their end",
                    "Applied is a new checkpoint; failed leaves everything as it was.",
                    _by("compactions_total", "outcome"),
                    "cps",
                ),
                Panel(
                    "What set them off",
                    "Critical and overflow mean that it comes late.",
                    _by("compactions_total", "trigger"),
                    "cps",
                ),
                Panel(
                    "Why attempts failed",
                    "Invalid: the summary did not pass its checks.",
                    _by("compaction_failures_total", "reason"),
                    "cps",
                ),
                Panel(
                    "Put off",
                    "By reason; said once per change.",
                    _by("compaction_deferred_total", "reason"),
                    "cps",
                ),
                Panel(
                    "Time of each phase",
                    "Nine in ten are faster. Generate is the summariser's, publish the way to the broker.",
                    ((_quantile(0.9, "compaction_seconds", "phase"), "{{phase}}"),),
                    "s",
                ),
                Panel(
                    "Without a summary, and not taken up",
                    "Tool results made references; packets that no agent took up.",
                    (*_sum("trims_total", "trims"), *_sum("not_applied_total", "not taken up")),
                    "cps",
                ),
                Panel(
                    "Share of the window in use",
                    "At each usage report.",
                    _quantiles("context_used_ratio", 0.5, 0.9, 0.99),
                    "percentunit",
                ),
                Panel(
                    "Context before and after",
                    "Mean tokens of a compaction.",
                    (
                        (
                            "sum(rate(watchkeeper_compaction_tokens_before_sum{$where}[$__rate_interval])) / "
                            "sum(rate(watchkeeper_compaction_tokens_before_count{$where}[$__rate_interval]))",
                            "before",
                        ),
                        (
                            "sum(rate(watchkeeper_compaction_tokens_after_sum{$where}[$__rate_interval])) / "
                            "sum(rate(watchkeeper_compaction_tokens_after_count{$where}[$__rate_interval]))",
                            "after",
                        ),
                    ),
                ),
                Panel(
                    "Summarisers given up for now",
                    "Runs whose breaker is open.",
                    (
                        (
                            "sum by (summarizer) (watchkeeper_summarizer_breaker_open{$where})",
                            "{{summarizer}}",
                        ),
                    ),
                ),
            ),
        ),
        (
            "What is lost or refused?",
            (
                Panel(
                    "Missing events",
                    "Gaps in a run's numbers, and events that came after their gap was given up.",
                    (
                        (
                            "sum by (code) (increase(watchkeeper_invariant_violations_total"
                            '{$where,code=~"history_gap|late_event"}[$__rate_interval]))',
                            "{{code}}",
                        ),
                    ),
                ),
                Panel(
                    "Too much to protect",
                    "What was done where the protected part did not fit.",
                    _by("choices_total", "choice"),
                    "cps",
                ),
                Panel(
                    "Evidence that is no more, or not theirs",
                    "Asked for and not given.",
                    (
                        (
                            "sum by (status) (rate(watchkeeper_retrievals_total"
                            '{$where,status!="found"}[$__rate_interval])) > 0',
                            "{{status}}",
                        ),
                    ),
                    "cps",
                ),
                Panel(
                    "Runs finished",
                    "By outcome, and whether they were compacted.",
                    (
                        (
                            "sum by (outcome, compacted) "
                            "(rate(watchkeeper_runs_finished_total{$where}[$__rate_interval])) > 0",
                            "{{outcome}}, compacted {{compacted}}",
                        ),
                    ),
                    "cps",
                    stacked=True,
                ),
                Panel(
                    "Runs forgotten",
                    "Bodies removed by retention or by command.",
                    _sum("runs_forgotten_total", "forgotten"),
                    "cps",
                ),
                Panel(
                    "Compactions of a run",
                    "By its end.",
                    _quantiles("compactions_per_run", 0.5, 0.9),
                ),
            ),
        ),
        (
            "What does it cost?",
            (
                Panel(
                    "Tokens of summarisers",
                    "As they reported them.",
                    _by("summarizer_tokens_total", "direction"),
                    "cps",
                ),
                Panel(
                    "Tokens taken out of contexts",
                    "Per second, and the share that stayed.",
                    (
                        (
                            "sum(rate(watchkeeper_compaction_tokens_before_sum{$where}[$__rate_interval])) - "
                            "sum(rate(watchkeeper_compaction_tokens_after_sum{$where}[$__rate_interval]))",
                            "taken out",
                        ),
                    ),
                    "cps",
                ),
                Panel(
                    "Requests to summarisers",
                    "By summariser and end; late ones were paid for nothing.",
                    (
                        (
                            "sum by (summarizer, outcome) "
                            "(rate(watchkeeper_summarizer_requests_total{$where}[$__rate_interval])) > 0",
                            "{{summarizer}} {{outcome}}",
                        ),
                        *_sum("summarizer_late_replies_total", "too late"),
                    ),
                    "cps",
                ),
                Panel(
                    "Size of packets",
                    "In tokens.",
                    _quantiles("packet_tokens", 0.5, 0.95),
                ),
                Panel(
                    "Error of the token estimate",
                    "Distance from the report, as a share of it.",
                    _quantiles("budget_estimate_error_ratio", 0.5, 0.9),
                    "percentunit",
                ),
                Panel(
                    "Usage reports left out",
                    "Nonsense, or of another session.",
                    _sum("estimate_samples_ignored_total", "left out"),
                    "cps",
                ),
            ),
        ),
    ),
)
DASHBOARDS: Final = (FLEET, RUNS)


def _panel(panel: Panel, x: int, y: int) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": _SOURCE,
            "editorMode": "code",
            "expr": query.replace("$where", WHERE),
            "legendFormat": legend,
            "instant": panel.kind != "timeseries",
            "range": panel.kind == "timeseries",
        }
        for number, (query, legend) in enumerate(panel.queries)
    ]
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.bad_from is not None:
        steps.append({"color": "red", "value": panel.bad_from})
    defaults: dict[str, Any] = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"]}}
    if panel.kind == "timeseries":
        defaults["min"] = 0
        defaults["custom"] = {
            "fillOpacity": 30 if panel.stacked else 5,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none"},
        }
        options = {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    if panel.kind == "bargauge":
        options["displayMode"] = "basic"
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.words,
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": 4 if panel.kind != "timeseries" else _HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
    }


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }


def dashboard(of: Dashboard) -> dict[str, Any]:
    """As Grafana reads it: a stable ``uid``, no ids, the data source and what is shown as variables."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in of.rows:
        panels.append({"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": _line(y)})
        y += 1
        x = tallest = 0
        for panel in row:
            if x + panel.width > _WIDTH:
                x, y, tallest = 0, y + tallest, 0
            drawn = _panel(panel, x, y)
            panels.append(drawn)
            x += panel.width
            tallest = max(tallest, drawn["gridPos"]["h"])
        y += tallest
    return {
        "uid": of.uid,
        "title": of.title,
        "description": of.words,
        "tags": ["watchkeeper"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards",
                "tags": ["watchkeeper"],
                "title": "Watchkeeper",
                "keepTime": True,
                "includeVars": True,
            }
        ],
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {},
                    "refresh": 1,
                },
                _variable("job", "Job", "label_values(watchkeeper_build_info, job)"),
                _variable(
                    "instance", "Sidecar", 'label_values(watchkeeper_build_info{job=~"$job"}, instance)'
                ),
            ]
        },
        "annotations": {"list": []},
        "panels": panels,
    }


def _line(y: int) -> dict[str, int]:
    return {"x": 0, "y": y, "w": _WIDTH, "h": 1}


def printed() -> dict[Path, str]:
    """Every file that is printed → what it must hold."""
    return {
        FOLDER / "dashboards" / f"{one.uid}.json": json.dumps(dashboard(one), indent=1, ensure_ascii=False)
        + "\n"
        for one in DASHBOARDS
    }


def write() -> None:
    """Write them anew."""
    for path, text in printed().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def filled(query: str, window: str) -> str:
    """A query of a panel as Prometheus is asked it: everything chosen, rates over this window."""
    for name, value in (("$__rate_interval", window), ("$job", ".*"), ("$instance", ".*")):
        query = query.replace(name, value)
    return query


def queries() -> list[tuple[str, str]]:
    """Panel (dashboard and title) and query of everything that ships, read back from the JSON."""
    return [
        (f"{path.stem}: {panel['title']} {target['refId']}", target["expr"])
        for path in sorted((FOLDER / "dashboards").glob("*.json"))
        for panel in json.loads(path.read_text())["panels"]
        for target in panel.get("targets", ())
    ]
