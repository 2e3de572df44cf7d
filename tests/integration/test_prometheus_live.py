"""Daemons under load and faults, scraped by a real Prometheus with the shipped rules and asked what the dashboards ask.

One voyage of about a minute for all tests here: a summariser that fails, lanes that are fought over, output that
cannot leave, a broker that stops, a daemon that is killed. Time in the rules is 60 times as fast
(``support.prometheus``).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from nats.js.api import DiscardPolicy

from sidecar.importers import import_files
from sidecar.metric_surface import PREFIX, SURFACE
from sidecar.replay import Replay
from support import alert_cases, dashboards
from support.daemon import DaemonProcess
from support.links import eventually, linked
from support.nats_server import NatsServer, free_port
from support.prometheus import Prometheus
from tests.support import watched_load as load
from tests.support.blackbox import Box, event, new_run
from tests.support.conversation import at, talk
from tests.support.summary_service import Held, Service, summary_service

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

PATIENCE_SECONDS = 90.0
SAMPLE = Path(load.__file__).resolve().parents[2] / "sidecar" / "samples" / "night_watch.jsonl"
RULES = '[[rules]]\nlabels = {kind = "shadow"}\nmode = "shadow"\n'
TURNED = RULES + '[[rules]]\nlabels = {kind = "turning"}\nmode = "observe"\n'
MAIN = {
    "LANES": "main",
    "SUMMARIZER__KIND": "nats",
    "SUMMARIZER__TIMEOUT_SECONDS": "1.5",
    "SUMMARIZER__FALLBACK": "none",
    "SUMMARIZER__MAX_ATTEMPTS": "2",
    "RETENTION__SUCCEEDED_DAYS": "0.000001",
    "INTAKE__GAP_AFTER_SECONDS": "6",
    "INTAKE__MAX_EVENT_BYTES": "65536",
    "OPERATIONS__UNKNOWN_AFTER_SECONDS": "3",
    "CALLS__ABANDON_AFTER_SECONDS": "8",
    "AUTHORITY__APPROVAL_KINDS": "deploy",
    "LEASE__SECONDS": "4",
}
CALM = {"LANES": "calm", "MODE": "observe", "LEASE__SECONDS": "4"}
SHARED = {"LANES": "shared", "LEASE__SECONDS": "1"}

MUST_FIRE = {
    *(("CompactionsFail", "main"), ("BreakerOpen", "main"), ("ProtectedTooLarge", "main")),
    *(("CriticalViolations", "main"), ("MajorViolations", "main"), ("HistoryGap", "main")),
    *(("DuplicateEffectsPrevented", "main"), ("MessagesRejected", "main"), ("OutboxStuck", "main")),
    *(("NatsDisconnected", "main"), ("NatsDisconnected", "calm"), ("Down", "main")),
    *(("NothingCompacts", "calm"), ("LaneFlapping", "pair"), ("LaneUnowned", "")),
}
"""Alert and sidecar; ``pair`` is either of the two that share a lane."""
MUST_NOT = {"StorageFull", "StorageErrors", "StorageFilling", "StreamReset", "Defect", "EstimateError"}
MUST_NOT_AT_CALM = set(alert_cases.ALERTS) - {
    "NothingCompacts",
    "NatsDisconnected",
    "OutboxStuck",
}
MAY_BY_THE_MACHINE = {"LoopLag", "IntakeLag", "Down"}
"""A machine that is busy with other tests may be short of time, and is then told so."""

UNMOVED = {
    "storage_full": "needs a full disk: tests/crash/test_crash_faults.py",
    "storage_errors_total": "needs a failing disk: tests/integration/test_storage_faults.py",
    "stream_resets_total": "needs the stream to be deleted: tests/integration/test_blackbox_stream.py",
    "ledger_mismatches_total": "must stay 0; counted in tests/crash/test_crash_history.py",
    "unforeseen_errors_total": "must stay 0; counted in tests/crash/test_crash_faults.py",
    "redactions_total{custom}": "a pattern of the configuration: tests/integration/test_redaction_daemon.py",
    "redactions_total{discord_token}": "one form among many: tests/unit/test_redaction.py",
    "redactions_total{twilio_key}": "one form among many: tests/unit/test_redaction.py",
    "redactions_total{url_token}": "one form among many: tests/unit/test_redaction.py",
    "compactions_total{skipped}": "reserved by the wire protocol; no attempt ends so",
    "compaction_failures_total{storage}": "needs a refusing disk: tests/crash/test_crash_faults.py",
    "retrievals_total{fetch,digest_mismatch}": "needs a damaged disk: tests/integration/test_retrieval.py",
    "ask_errors_total{unavailable}": "a matter of moments: tests/integration/test_blackbox_races.py",
    "summarizer_requests_total{openai}": "another kind in the configuration: tests/integration/test_summarizer_http.py",
    "summarizer_requests_total{anthropic}": "as above",
    "summarizer_requests_total{interrupted}": "an interrupted request has no end to be counted by",
    "summarizer_requests_total{storage}": "storage is no business of a summariser",
    "summarizer_tokens_total{openai}": "as above",
    "summarizer_tokens_total{anthropic}": "as above",
    "summarizer_tokens_total{digest}": "it costs none",
    "summarizer_late_replies_total{digest}": "it answers at once",
    "summarizer_late_replies_total{openai}": "its requests are cancelled with their time",
    "summarizer_late_replies_total{anthropic}": "as above",
    "summarizer_breaker_open{digest}": "it does not fail",
    "summarizer_breaker_open{openai}": "another kind in the configuration",
    "summarizer_breaker_open{anthropic}": "as above",
}
"""Metric, or metric and label values, that this load does not move, and why."""


@dataclass
class Watch:
    """What Prometheus knows, and every alert that was seen firing."""

    prometheus: Prometheus
    began: float
    ended: float = 0.0
    exposition: str = ""
    fired: set[tuple[str, str]] = field(default_factory=set)

    async def watch(self) -> None:
        while True:
            self.fired |= await anyio.to_thread.run_sync(self.prometheus.firing)
            await anyio.sleep(0.4)

    async def sees(self, alert: str, *instances: str) -> None:
        """Wait until the alert was seen firing at one of these."""

        def fires() -> bool:
            return any((alert, instance) in self.fired for instance in instances)

        await eventually(fires, f"{alert} at {' or '.join(instances)}", PATIENCE_SECONDS)


@pytest.fixture(scope="module")
async def watch(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Watch]:
    folder = tmp_path_factory.mktemp("watched")
    settings = {"main": MAIN, "calm": CALM, "a": SHARED, "b": SHARED}
    ports = {name: f"127.0.0.1:{free_port()}" for name in settings}
    prometheus = Prometheus(folder / "prometheus", ports)
    with NatsServer() as server, prometheus:
        daemons = {
            name: DaemonProcess(server.url, folder / name, {**given, "ADMIN__LISTEN": ports[name]})
            for name, given in settings.items()
        }
        (folder / "main" / "watchkeeper.toml").write_text(RULES)
        try:
            for daemon in daemons.values():
                daemon.start()
                await daemon.ready(60)
            watched = Watch(prometheus, time.time())
            await voyage(watched, server, daemons)
            yield watched
        finally:
            for daemon in daemons.values():
                if daemon.process is not None:
                    daemon.kill9()


async def voyage(watched: Watch, server: NatsServer, daemons: dict[str, DaemonProcess]) -> None:
    main = daemons["main"]
    async with (
        load.outside(server.url, "main") as box,
        load.outside(server.url, "calm") as calm,
        summary_service(server.url) as service,
        anyio.create_task_group() as watching,
    ):
        watching.start_soon(watched.watch)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(busy, watched, box, service, main)
            tasks.start_soon(idle, watched, calm)
            tasks.start_soon(fought_over, watched, server, daemons["a"], daemons["b"])
        answer = await main.get("/metrics")
        assert answer is not None
        watched.exposition = answer.text
        await blocked(watched, box)
        await without_broker(watched, server, daemons)
        await killed(watched, box, service, main)
        watched.ended = time.time()
        watching.cancel_scope.cancel()


async def busy(watched: Watch, box: Box, service: Service, main: DaemonProcess) -> None:
    """Everything a daemon can count, and a summariser that fails before anything was compacted."""
    await load.failures(box, service)
    await watched.sees("CompactionsFail", "main")
    async with anyio.create_task_group() as tasks:
        for plain in (
            *(load.every_type, load.what_is_refused, load.secrets, load.odd_sequences, load.time_passes),
            *(load.permissions, load.resumes, load.questions, load.usage, load.deferrals, load.too_much),
        ):
            tasks.start_soon(plain, box)
        tasks.start_soon(load.compactions, box, service)
        tasks.start_soon(load.lies, box, service)
        tasks.start_soon(turned, box, service, main)
    run = await box.start(new_run("unruly"))
    wanted = {("MajorViolations", "main"), ("MessagesRejected", "main")}

    async def misbehaves() -> bool:
        await box.tell(run, event("question.answered", question_id="none", answer="?"))
        await box.send(run, b"no json")
        await anyio.sleep(0.1)
        return wanted <= watched.fired

    await eventually(misbehaves, "alerts about a run that misbehaves", PATIENCE_SECONDS)
    for alert in ("BreakerOpen", "ProtectedTooLarge", "CriticalViolations", "HistoryGap"):
        await watched.sees(alert, "main")
    await watched.sees("DuplicateEffectsPrevented", "main")


async def turned(box: Box, service: Service, main: DaemonProcess) -> None:
    """A candidate that comes when its run is only observed any more."""
    it, held = await talk(box, run=new_run("turning"), labels={"kind": "turning"}), Held()
    service.always[it.run] = held
    await it.fill(load.FULL, load.LARGE)
    await held.reached.wait()
    (main.folder / "watchkeeper.toml").write_text(TURNED)
    os.kill(main.pid, signal.SIGHUP)
    await eventually(lambda: bool(main.said("rules reloaded")), "new rules")
    held.release.set()
    await box.hear(it.run, "receipt", outcome="stale")


async def idle(watched: Watch, box: Box) -> None:
    """One run that is watched, not helped, and nearly full."""
    it = await talk(box)
    await it.fill(0.6)
    await it.used(at(0.93))
    await watched.sees("NothingCompacts", "calm")


async def fought_over(watched: Watch, server: NatsServer, a: DaemonProcess, b: DaemonProcess) -> None:
    """A replayed transcript, and then two sidecars of which now one and now the other stops too long."""
    async with linked(server.url) as link:
        player = Replay(link, tenant="default", lane="shared")
        await player.feed(import_files([SAMPLE]))
        await player.finish()
    owner, other = (a, b) if await a.metric("lanes_owned") else (b, a)
    while not {("LaneFlapping", "a"), ("LaneFlapping", "b")} & watched.fired:
        owner.freeze()
        try:
            await other.owning(60)
        finally:
            owner.resume()

        async def lost(former: DaemonProcess = owner) -> bool:
            return await former.metric("lanes_owned") == 0

        await eventually(lost, "the loss of the lane")
        owner, other = other, owner


async def blocked(watched: Watch, box: Box) -> None:
    """The output stream takes nothing more for a while."""
    info = await box.js.stream_info("WK_OUT")
    config = info.config
    before = (config.max_bytes, config.discard)
    config.max_bytes, config.discard = info.state.bytes, DiscardPolicy.NEW
    await box.js.update_stream(config)
    try:
        await box.start(new_run("unheard"))
        await watched.sees("OutboxStuck", "main")
    finally:
        config.max_bytes, config.discard = before
        await box.js.update_stream(config)


async def without_broker(watched: Watch, server: NatsServer, daemons: dict[str, DaemonProcess]) -> None:
    """A broker that stops; one sidecar is started anew meanwhile and cannot know who owns its lane."""
    server.stop()
    await watched.sees("NatsDisconnected", "main")
    await watched.sees("NatsDisconnected", "calm")
    daemons["calm"].kill9()
    daemons["calm"].start()
    await watched.sees("LaneUnowned", "")
    server.start()
    for daemon in daemons.values():
        await daemon.ready(60)


async def killed(watched: Watch, box: Box, service: Service, main: DaemonProcess) -> None:
    """Killed while a summary is being made, and started again."""
    await main.owning(60)
    it, held = await talk(box, run=new_run("cut-off")), Held()
    service.always[it.run] = held
    await it.fill(load.FULL, load.LARGE)
    await held.reached.wait()
    main.kill9()
    await watched.sees("Down", "main")
    main.start()
    await main.ready(60)
    query = f'max_over_time({PREFIX}compaction_failures_total{{reason="interrupted"}}[1m])'

    def counted() -> bool:
        return any(value for _, value in watched.prometheus.series(query))

    await eventually(counted, "the interrupted attempt", 60)


# --- alerts ---------------------------------------------------------------------------------------------------


async def test_the_alerts_that_must_fire_do(watch: Watch) -> None:
    seen = {(alert, "pair" if alert == "LaneFlapping" else instance) for alert, instance in watch.fired}
    assert MUST_FIRE - seen == set()


async def test_the_others_do_not(watch: Watch) -> None:
    assert {alert for alert, _ in watch.fired} & MUST_NOT == set()
    calm = {alert for alert, instance in watch.fired if instance == "calm"}
    assert calm & (MUST_NOT_AT_CALM - MAY_BY_THE_MACHINE) == set()
    assert ("LaneFlapping", "main") not in watch.fired
    assert ("NoPacketsResumed", "main") not in watch.fired


async def test_no_rule_is_in_error(watch: Watch) -> None:
    groups = watch.prometheus.get("rules")["groups"]
    assert [
        (rule["name"], rule.get("lastError"))
        for group in groups
        for rule in group["rules"]
        if rule["health"] != "ok"
    ] == []
    found = {rule["name"] for group in groups for rule in group["rules"]}
    assert found == {rule.get("alert") or rule["record"] for rule in alert_cases.rules()}


# --- dashboards -----------------------------------------------------------------------------------------------

QUERIES = dashboards.queries()


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=[where for where, _ in QUERIES])
async def test_a_panel_shows_something(watch: Watch, where: str, query: str) -> None:
    assert watch.prometheus.points(dashboards.filled(query, "5s"), watch.began, watch.ended), where


# --- metrics --------------------------------------------------------------------------------------------------


async def test_every_series_moves_or_is_known_not_to(watch: Watch) -> None:
    """Counted over the whole voyage and all sidecars; of metrics with two labels each value of either."""
    span = f"{watch.ended - watch.began + 5:.0f}s"
    still: list[str] = []
    for name, declared in SURFACE.items():
        shown = f"{PREFIX}{name}" + ("_count" if declared.kind == "histogram" else "")
        found = watch.prometheus.series(f"max_over_time({shown}[{span}])")
        moved = [labels for labels, value in found if value]
        if not declared.children or name == "lane_epoch":
            still += [] if moved else [name]
        elif name == "retrievals_total" or len(declared.names) == 1:
            still += [
                f"{name}{{{','.join(values)}}}"
                for values in declared.children
                if not any(
                    all(labels[key] == value for key, value in zip(declared.names, values, strict=True))
                    for labels in moved
                )
            ]
        else:
            for place, key in enumerate(declared.names):
                wanted = dict.fromkeys(values[place] for values in declared.children)
                still += [
                    f"{name}{{{value}}}" for value in wanted if value not in {labels[key] for labels in moved}
                ]
    known = {name for name in still if name in UNMOVED or name.partition("{")[0] in UNMOVED}
    assert sorted(set(still) - known) == []
    needless = {
        name for name in UNMOVED if not any(one == name or one.partition("{")[0] == name for one in still)
    }
    assert needless <= {"ask_errors_total{unavailable}"}, "it moves: no reason why not is needed"


async def test_the_number_of_series_does_not_depend_on_the_runs(watch: Watch) -> None:
    query = f'count({{__name__=~"{PREFIX}.+",instance="main"}})'
    ((_, points),) = watch.prometheus.points(query, watch.began, watch.ended)
    assert len({number for _, number in points}) == 1
    told = watch.prometheus.series(f'sum(max_over_time({PREFIX}runs{{instance="main"}}[5m]))')
    assert told[0][1] > 50


@pytest.mark.parametrize("name", ["intake_commit_seconds", "compaction_seconds", "context_used_ratio"])
async def test_an_observation_leads_to_its_trace(watch: Watch, name: str) -> None:
    found = watch.prometheus.exemplars(f"{PREFIX}{name}_bucket", watch.began - 5, watch.ended + 5)
    traces = {exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]}
    assert load.SAMPLED[3:35] in traces
    assert load.UNSAMPLED[3:35] not in traces


async def test_a_linter_has_nothing_to_say_about_a_daemon_under_load(watch: Watch) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    check = partial(subprocess.run, [tool, "check", "metrics"], input=watch.exposition.encode(), timeout=60)
    done = await anyio.to_thread.run_sync(partial(check, capture_output=True))
    assert (done.returncode, done.stderr.decode()) == (0, "")
