"""One voyage of several daemons under load and faults, watched by a real Prometheus with the shipped rules.

A summariser that fails and lies, lanes that are fought over, output that cannot leave, a broker that stops, a
daemon that is killed. About a minute; time in the rules is 60 times as fast (``support.prometheus``).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
from nats.js.api import DiscardPolicy

from sidecar.importers import import_files
from sidecar.metric_surface import PREFIX
from sidecar.replay import Replay
from support.daemon import DaemonProcess
from support.links import eventually, linked
from support.nats_server import NatsServer, free_port
from support.prometheus import Prometheus
from tests.support import watched_load as load
from tests.support.blackbox import Box, event, new_run
from tests.support.conversation import at, talk
from tests.support.summary_service import Held, Service, summary_service

PATIENCE_SECONDS: Final = 90.0
SAMPLE: Final = Path(__file__).resolve().parents[2] / "sidecar" / "samples" / "night_watch.jsonl"
RULES: Final = '[[rules]]\nlabels = {kind = "shadow"}\nmode = "shadow"\n'
TURNED: Final = RULES + '[[rules]]\nlabels = {kind = "turning"}\nmode = "observe"\n'
MAIN: Final = {
    "LANES": "main",
    "SUMMARIZER__KIND": "nats",
    "SUMMARIZER__TIMEOUT_SECONDS": "1.5",
    "SUMMARIZER__FALLBACK": "none",
    "SUMMARIZER__MAX_ATTEMPTS": "2",
    "RETENTION__SUCCEEDED_DAYS": "0.000001",
    "INTAKE__GAP_AFTER_SECONDS": "6",
    "INTAKE__MAX_EVENT_BYTES": "65536",
    "OPERATIONS__UNKNOWN_AFTER_SECONDS": "3",
    "CALLS__ABANDON_AFTER_SECONDS": "10",
    "AUTHORITY__APPROVAL_KINDS": "deploy",
    "LEASE__SECONDS": "4",
}
CALM: Final = {"LANES": "calm", "MODE": "observe", "LEASE__SECONDS": "4"}
SHARED: Final = {"LANES": "shared", "LEASE__SECONDS": "1"}


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


@asynccontextmanager
async def watched_voyage(folder: Path) -> AsyncIterator[Watch]:
    """The whole voyage, and then the Prometheus that saw it, until the block ends."""
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
            for daemon in daemons.values():
                await daemon.ready(60)
            watched = Watch(prometheus, time.time())
            try:
                await _voyage(watched, server, daemons)
            except BaseException:
                for name, daemon in daemons.items():
                    print(f"--- {name}\n{daemon.log[-3000:]}")
                raise
            yield watched
        finally:
            for daemon in daemons.values():
                if daemon.process is not None:
                    daemon.kill9()


async def _voyage(watched: Watch, server: NatsServer, daemons: dict[str, DaemonProcess]) -> None:
    main = daemons["main"]
    async with (
        load.outside(server.url, "main") as box,
        load.outside(server.url, "calm") as calm,
        summary_service(server.url) as service,
        anyio.create_task_group() as watching,
    ):
        watching.start_soon(watched.watch)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_busy, watched, box, service, main)
            tasks.start_soon(_idle, watched, calm)
            tasks.start_soon(_fought_over, watched, server, daemons["a"], daemons["b"])
        answer = await main.get("/metrics")
        assert answer is not None
        watched.exposition = answer.text
        await _blocked(watched, box)
        await _without_broker(watched, server, daemons)
        await _killed(watched, box, service, main)
        watched.ended = time.time()
        watching.cancel_scope.cancel()


async def _busy(watched: Watch, box: Box, service: Service, main: DaemonProcess) -> None:
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
        tasks.start_soon(_turned, box, service, main)
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


async def _turned(box: Box, service: Service, main: DaemonProcess) -> None:
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


async def _idle(watched: Watch, box: Box) -> None:
    """One run that is watched, not helped, and nearly full."""
    it = await talk(box)
    await it.fill(0.6)
    await it.used(at(0.93))
    await watched.sees("NothingCompacts", "calm")


async def _fought_over(watched: Watch, server: NatsServer, a: DaemonProcess, b: DaemonProcess) -> None:
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


async def _blocked(watched: Watch, box: Box) -> None:
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


async def _without_broker(watched: Watch, server: NatsServer, daemons: dict[str, DaemonProcess]) -> None:
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


async def _killed(watched: Watch, box: Box, service: Service, main: DaemonProcess) -> None:
    """Killed while a summary is being made, and started again."""
    await main.owning(60)
    it, held = await talk(box, run=new_run("cut-off")), Held()
    service.always[it.run] = held
    await it.fill(load.FULL, load.LARGE)
    await held.reached.wait()
    main.kill9()
    await load.backlog(box)
    await watched.sees("Down", "main")
    main.start()
    await main.ready(60)
    query = f'max_over_time({PREFIX}compaction_failures_total{{reason="interrupted"}}[1m])'

    def counted() -> bool:
        return any(value for _, value in watched.prometheus.series(query))

    await eventually(counted, "the interrupted attempt", 60)
