"""The composition root: the only place that builds the daemon's parts and decides how the process ends.

Start: storage, broker, streams, admin port, lanes. Stop: not ready, lanes drain, storage closes. A
second signal ends the drain at once; nothing is lost by that.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import metadata
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread
import msgspec
import structlog

from protocol.errors import ExitCode
from sidecar import admin, memory
from sidecar.config import Config, ConfigError, reload_rules
from sidecar.embedded_nats import embedded_nats
from sidecar.failures import explain
from sidecar.health import Health, loop_monitor
from sidecar.lane import LaneService
from sidecar.large_contents import Shelf
from sidecar.metrics import Metrics
from sidecar.runviews import run_views
from sidecar.streams import Streams
from sidecar.summarizers.choice import check_summarizers
from sidecar.telemetry import tracer_for
from sidecar.tracing import CARRIER, Tracer
from sidecar.transport.jetstream import Link, LinkSettings
from storage import set_aside
from storage.errors import StorageBusy, StorageCorrupt, StorageFull
from storage.store import Store

_RETRY_SECONDS = 1.0
_MIB = 1024 * 1024
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

log = structlog.get_logger(__name__)


def version() -> str:
    """The installed distribution's version."""
    try:
        return metadata.version("watchkeeper-sidecar")
    except metadata.PackageNotFoundError:
        return "unknown"


class Daemon:
    """One running daemon. ``stop`` drains it; use ``running`` to have one for the length of a block."""

    def __init__(self, config: Config, tracer: Tracer = CARRIER) -> None:
        self.config = config
        self.tracer = tracer
        self.metrics = Metrics(version=version(), lanes=config.lane_names)
        self.health = Health()
        self.stop = anyio.Event()
        self.lanes: list[LaneService] = []
        self.listening: str = ""
        self.health.expect(*(f"lane {lane}" for lane in config.lane_names))

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until ``stop`` is set and the drain is over; reports started once the first recovery is done.

        Raises ``Refused``, ``StorageError``, ``OSError`` (address in use) in an exception group.
        """
        config = self.config
        memory.few_arenas()
        # What cannot be built is refused before anything starts.
        check_summarizers(config)
        async with AsyncExitStack() as stack:
            serving = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(serving.cancel_scope.cancel)
            serving.start_soon(loop_monitor, self.health, self.metrics)
            self.listening = await serving.start(
                admin.serve,
                admin.build(self.health, self.metrics, lambda: run_views(self.lanes)),
                config.admin.listen,
            )
            log.info("admin listening", address=self.listening)
            store = await self._store(stack)
            if store is None:
                return
            background = await stack.enter_async_context(anyio.create_task_group())
            await background.start(store.run_writer)
            link = Link(
                LinkSettings(
                    url=config.nats.url,
                    creds=config.nats.creds,
                    ca=config.nats.ca,
                    cert=config.nats.cert,
                    key=config.nats.key,
                    name="watchkeeper",
                ),
                self._connected,
            )
            await self._start(background, link)
            streams = Streams(config, link, self.health)
            if await streams.made(self.stop):
                background.start_soon(streams.guard)
                owner = f"{os.uname().nodename}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
                shelf = Shelf()
                async with anyio.create_task_group() as lanes:
                    for lane in config.lane_names:
                        service = LaneService(
                            config=config,
                            link=link,
                            store=store,
                            metrics=self.metrics,
                            health=self.health,
                            lane=lane,
                            owner=owner,
                            tracer=self.tracer,
                            shelf=shelf,
                        )
                        self.lanes.append(service)
                        lanes.start_soon(service.run, self.stop)
                    task_status.started()
                    await self.stop.wait()
                    self.health.set("drain", False, "draining")
            background.cancel_scope.cancel()

    async def _store(self, stack: AsyncExitStack) -> Store | None:
        """The open store; ``None`` if told to stop before the disk let us. A damaged file is moved aside:
        the streams fill a new one."""
        folder, max_mib = self.config.data_dir, self.config.storage.max_mib
        max_bytes = None if max_mib is None else max_mib * _MIB
        while not self.stop.is_set():
            try:
                store = await Store.open(
                    folder, max_bytes=max_bytes, on_beat=lambda: self.health.beat("writer")
                )
                self.health.set("storage", True)
                return await stack.enter_async_context(store)
            except StorageCorrupt as error:
                self.metrics.storage_failed("StorageCorrupt")
                aside = await anyio.to_thread.run_sync(set_aside, folder)
                log.error("database damaged, moved aside, rebuilding", aside=str(aside), error=str(error))
            except (StorageFull, StorageBusy) as error:
                log.error("storage cannot be opened yet", error=str(error))
                self.metrics.storage_full(isinstance(error, StorageFull))
                self.health.set("storage", False, str(error))
                with anyio.move_on_after(_RETRY_SECONDS):
                    await self.stop.wait()
        return None

    async def _start(self, background: anyio.abc.TaskGroup, link: Link) -> None:
        """Connect, unless told to stop before the broker was ever reached."""
        async with anyio.create_task_group() as starting:

            async def give_up() -> None:
                await self.stop.wait()
                starting.cancel_scope.cancel()

            starting.start_soon(give_up)
            await background.start(link.run)
            starting.cancel_scope.cancel()

    def _connected(self, connected: bool, reason: str) -> None:
        self.metrics.connected(connected)
        self.health.set("nats", connected, reason)

    def reload(self) -> None:
        """Read mode and rules again (SIGHUP); a mistake keeps the old ones."""
        try:
            found = reload_rules(self.config, os.environ)
        except ConfigError as error:
            log.error("configuration not reloaded, the old one stays", problems=str(error))
            return
        self.config = found.config
        for lane in self.lanes:
            lane.config_changed(found.config)
        log.info(
            "rules reloaded", mode=found.config.mode, rules=len(found.config.rules), ignored=found.ignored
        )


@asynccontextmanager
async def running(config: Config, tracer: Tracer = CARRIER) -> AsyncIterator[Daemon]:
    """A daemon in this event loop; drains when the block ends."""
    daemon = Daemon(config, tracer)
    async with anyio.create_task_group() as tasks:
        await tasks.start(daemon.run)
        try:
            yield daemon
        finally:
            daemon.stop.set()


async def _signals(daemon: Daemon, scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(*_SIGNALS) as received:
        try:
            async for number in received:
                if number == signal.SIGHUP:
                    daemon.reload()
                elif daemon.stop.is_set():
                    log.warning("second signal: stopping without draining")
                    scope.cancel()
                else:
                    log.info("draining", signal=signal.Signals(number).name)
                    daemon.stop.set()
                    scope.deadline = anyio.current_time() + daemon.config.drain.seconds + 5
        finally:
            # The work is over: one more signal, while the interpreter ends, must not look like a crash.
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


async def serve(config: Config, with_embedded_nats: bool = False) -> int:
    """Run the daemon as the process's main job; returns the exit code and says why on the log."""
    async with AsyncExitStack() as stack:
        try:
            if with_embedded_nats:
                url = await stack.enter_async_context(embedded_nats(Path(config.data_dir) / "nats"))
                config = replaced_url(config, url)
                log.info("embedded nats-server", url=url)
            tracer = tracer_for(os.environ, version())
            stack.callback(tracer.close)
            daemon = Daemon(config, tracer)
            memory.collect_seldom()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_signals, daemon, tasks.cancel_scope)
                await daemon.run()
                tasks.cancel_scope.cancel()
        except BaseException as error:
            code, line = explain(error)
            if code is None:
                raise
            for part in line.splitlines():
                log.error(part)
            return int(code)
    return int(ExitCode.CLEAN)


def replaced_url(config: Config, url: str) -> Config:
    """The configuration with another broker address, which a reload keeps as it keeps the flags."""
    return msgspec.structs.replace(
        config,
        nats=msgspec.structs.replace(config.nats, url=url),
        overrides={**config.overrides, "nats.url": url},
    )
