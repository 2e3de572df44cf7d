"""What the probes say, reached by the fault itself: a broker killed or frozen, a foreign lock on the database, a
disk that hangs, a log nobody reads, a long rebuild. And the command that asks them.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest

from storage.data_dir import DATABASE
from support.daemon import DaemonProcess
from support.links import eventually, linked
from support.nats_server import NatsServer, free_port

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]


@asynccontextmanager
async def ready(folder: Path, **settings: str) -> AsyncIterator[tuple[NatsServer, DaemonProcess]]:
    """A daemon that is ready, and its broker; afterwards it must never have been restarted."""
    with NatsServer() as server, DaemonProcess(server.url, folder / "daemon", settings) as daemon:
        daemon.start()
        await daemon.owning()
        yield server, daemon
        assert daemon.running
        assert daemon.starts == 1


async def status(daemon: DaemonProcess, path: str) -> tuple[int, dict[str, Any]]:
    answer = await daemon.get(path)
    assert answer is not None, f"nobody answers {path}"
    return answer.status_code, answer.json()


async def all_is_well(daemon: DaemonProcess) -> None:
    await daemon.ready(60)
    assert (await status(daemon, "/healthz"))[0] == 200
    assert (await status(daemon, "/startupz"))[0] == 200


# --- the broker -----------------------------------------------------------------------------------------------


async def test_a_broker_that_is_back_soon_is_not_noticed_by_the_probes(tmp_path: Path) -> None:
    async with ready(tmp_path) as (server, daemon):
        server.kill9()
        await eventually(lambda: bool(daemon.said("nats disconnected")), "the loss of the broker")
        code, answer = await status(daemon, "/readyz")
        assert (code, answer["reasons"]) == (200, {})
        assert "nats" in answer["tolerated"]
        assert (await status(daemon, "/healthz"))[0] == 200
        server.start()
        await eventually(lambda: len(daemon.said("nats connected")) > 1, "the broker's return")
        await all_is_well(daemon)


async def a_broker_that_stays_away(tmp_path: Path) -> None:
    async with ready(tmp_path) as (server, daemon):
        server.freeze()
        try:
            # Half open: only the missing pong tells.
            await daemon.unready("nats", 90)
            assert (await status(daemon, "/healthz"))[0] == 200
            assert (await status(daemon, "/startupz"))[0] == 200
        finally:
            server.resume()
        await all_is_well(daemon)


# --- the writer -----------------------------------------------------------------------------------------------


async def test_a_foreign_lock_on_the_database_costs_readiness_and_no_restart(tmp_path: Path) -> None:
    async with ready(tmp_path) as (server, daemon), linked(server.url) as link:
        foreign = sqlite3.connect(daemon.data_dir / DATABASE, isolation_level=None)
        try:
            foreign.execute("BEGIN IMMEDIATE")
            await link.publish("wk.v1.in.default.main.r.event", b"{}")
            reason = await daemon.unready("storage main")
            assert "locked" in reason
            assert (await status(daemon, "/healthz"))[0] == 200
        finally:
            foreign.close()
        await all_is_well(daemon)


async def test_a_database_at_its_bound_costs_readiness_until_the_bound_is_raised(tmp_path: Path) -> None:
    large = json.dumps(json.loads(event(0)) | {"content": "word " * 50_000}).encode()
    async with ready(tmp_path, STORAGE__MAX_MIB="16") as (server, daemon), linked(server.url) as link:
        for number in range(100):
            text = large.replace(b'"e-0"', b'"e-%d"' % number)
            await link.request("wk.v1.in.default.main.r.event", text)
        assert "full" in await daemon.unready("storage main")
        assert await daemon.metric("storage_full") == 1
        assert (await status(daemon, "/healthz"))[0] == 200
        assert (daemon.data_dir / DATABASE).stat().st_size <= 16 * 1024 * 1024
        assert await daemon.stopped() == 0
        daemon.starts -= 1
        daemon.settings["STORAGE__MAX_MIB"] = "64"
        daemon.start()
        await all_is_well(daemon)
        assert await daemon.metric("intake_lag_events") == 0


@contextmanager
def disk_that_can_hang(folder: Path) -> Iterator[Path]:
    """A file system of its own; ``fsfreeze`` holds every write to it, as a disk or a network volume may."""
    tools = [shutil.which(name) for name in ("mkfs.ext4", "mount", "umount", "fsfreeze")]
    if os.geteuid() != 0 or None in tools:
        pytest.skip("freezing a file system needs root, mount, mkfs.ext4 and fsfreeze")
    image, mounted = folder / "disk.img", folder / "disk"
    with image.open("wb") as file:
        file.truncate(64 * 1024 * 1024)
    mounted.mkdir()
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(mounted)], capture_output=True).returncode:
        pytest.skip("no loop device can be mounted here")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)


@contextmanager
def hanging(disk: Path) -> Iterator[None]:
    subprocess.run(["fsfreeze", "--freeze", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(disk)], check=True)


async def a_writer_that_hangs(tmp_path: Path) -> None:
    with ExitStack() as stack:
        disk = stack.enter_context(disk_that_can_hang(tmp_path))
        async with (
            ready(tmp_path, DATA_DIR=str(disk / "data")) as (server, daemon),
            linked(server.url) as link,
        ):
            with hanging(disk):
                await link.publish("wk.v1.in.default.main.r.event", b"{}")
                stuck = await stuck_tasks(daemon)
                assert set(stuck) == {"writer"}
                code, answer = await status(daemon, "/readyz")
                assert code == 503
                assert "no sign of life" in answer["reasons"]["task writer"]
                refused = await asked(daemon, "alive")
                assert refused.returncode == 1
                assert "writer" in refused.stdout
            await all_is_well(daemon)


async def stuck_tasks(daemon: DaemonProcess) -> dict[str, float]:
    """Wait until the daemon is not alive; the tasks that gave no sign of life."""
    found: dict[str, float] = {}

    async def not_alive() -> bool:
        code, answer = await status(daemon, "/healthz")
        found.update(answer["stuck"])
        return code == 503

    await eventually(not_alive, "a task that is stuck", 90)
    return found


# --- the event loop -------------------------------------------------------------------------------------------


async def an_event_loop_that_hangs(tmp_path: Path) -> None:
    """Who reads the log stands still: the next line blocks the thread that writes it, the event loop's."""
    with NatsServer() as server, DaemonProcess(server.url, tmp_path / "daemon") as daemon:
        os.mkfifo(daemon.folder / "daemon-1.log")
        reader = os.open(daemon.folder / "daemon-1.log", os.O_RDONLY | os.O_NONBLOCK)
        address = ""
        try:
            daemon.start()
            lines = Lines(reader)
            address = (await lines.first("admin listening"))["address"]
            await lines.first("lane owned")
            probe = Probe(address)
            await eventually(probe.ready, "readiness")
            fill(daemon.folder / "daemon-1.log")
            # It logs that it read its rules again.
            os.kill(daemon.pid, signal.SIGHUP)
            await eventually(probe.stuck_in_the_loop, "a loop that is stuck", 90)
            assert not await probe.ready()
            async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False, timeout=30) as client:
                assert (await client.get("/metrics")).status_code == 200
                # What the loop would have to tell is not waited for.
                assert (await client.get("/")).status_code == 503
            await lines.first("rules reloaded")
            await eventually(probe.ready, "readiness", 60)
            daemon.terminate()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lines.drain)
                assert await daemon.ended() == 0
                tasks.cancel_scope.cancel()
        finally:
            os.close(reader)


class Lines:
    """The log as read from a pipe, when asked to."""

    def __init__(self, reader: int) -> None:
        self._reader = reader
        self._text = b""

    async def first(self, event: str, seconds: float = 30) -> dict[str, Any]:
        """Read on until this event was logged."""
        found: list[dict[str, Any]] = []

        def there() -> bool:
            self._read()
            complete, _, self._text = self._text.rpartition(b"\n")
            entries = [json.loads(line) for line in complete.splitlines() if line.startswith(b"{")]
            found.extend(entry for entry in entries if entry["event"] == event)
            return bool(found)

        await eventually(there, f"{event} in the log", seconds)
        return found[0]

    async def drain(self) -> None:
        while True:
            self._read()
            await anyio.sleep(0.02)

    def _read(self) -> None:
        try:
            while piece := os.read(self._reader, 65536):
                self._text += piece
        except BlockingIOError:
            pass


def fill(pipe: Path) -> None:
    """Leave no room in the pipe for another line."""
    writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    try:
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        for size in (4096, 1):
            try:
                while os.write(writer, b"\n" * size):
                    pass
            except BlockingIOError:
                pass
    finally:
        os.close(writer)


class Probe:
    """Asks as a node does, over the command that a container's own check runs."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.last: dict[str, Any] = {}

    async def ready(self) -> bool:
        return (await self._ask("ready")).returncode == 0

    async def stuck_in_the_loop(self) -> bool:
        return (await self._ask("alive")).returncode == 1 and "loop" in self.last["stuck"]

    async def _ask(self, question: str) -> subprocess.CompletedProcess[str]:
        done = await run_health(self._address, question)
        self.last = json.loads(done.stdout)
        return done


async def run_health(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WATCHKEEPER_")}
    return await anyio.to_thread.run_sync(
        lambda: subprocess.run(
            [sys.executable, "-m", "sidecar", "health", *arguments],
            env={**environment, "WATCHKEEPER_ADMIN__LISTEN": address},
            capture_output=True,
            text=True,
            timeout=60,
        )
    )


async def asked(daemon: DaemonProcess, question: str) -> subprocess.CompletedProcess[str]:
    assert daemon.admin is not None
    return await run_health(daemon.admin, question)


# --- faults that last -----------------------------------------------------------------------------------------

LASTING = {
    "a broker that stays away costs readiness and nothing else": a_broker_that_stays_away,
    "a writer that hangs costs liveness": a_writer_that_hangs,
    "an event loop that hangs costs liveness and is told all the same": an_event_loop_that_hangs,
}


@pytest.fixture(scope="module")
async def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BaseException | None]:
    """How each of them ended. Each takes half a minute of waiting, so they go side by side."""
    ends: dict[str, BaseException | None] = {}

    async def one(name: str) -> None:
        ends[name] = None
        try:
            await LASTING[name](tmp_path_factory.mktemp("lasting"))
        except (Exception, pytest.skip.Exception) as error:
            ends[name] = error

    async with anyio.create_task_group() as tasks:
        for name in LASTING:
            tasks.start_soon(one, name)
    return ends


@pytest.mark.parametrize("name", LASTING)
async def test_a_lasting_fault(name: str, outcomes: dict[str, BaseException | None]) -> None:
    error = outcomes[name]
    if error is not None:
        raise error


# --- the start ------------------------------------------------------------------------------------------------


async def test_a_successor_is_alive_and_not_started_until_it_has_rebuilt(tmp_path: Path) -> None:
    lease = {"LEASE__SECONDS": "3"}
    with NatsServer() as server, DaemonProcess(server.url, tmp_path / "daemon", lease) as daemon:
        daemon.start()
        await daemon.owning()
        # A machine that is gone with its disk, and the lane's record says that it still owns it.
        daemon.kill9()
        shutil.rmtree(daemon.data_dir)
        async with linked(server.url) as link:
            for number in range(4_000):
                await link.publish(f"wk.v1.in.default.main.r{number % 50}.event", event(number))
            await link.api("INFO")
        daemon.start()
        await eventually(lambda: bool(daemon.said("nats connected")), "the connection")
        while not daemon.said("lane owned"):
            code, answer = await status(daemon, "/startupz")
            # To watch beside nobody is not to be ready.
            assert (code, answer) == (503, {"started": False})
            await anyio.sleep(0.02)
        server.freeze()
        try:
            assert (await status(daemon, "/startupz"))[0] == 503
            assert (await status(daemon, "/readyz"))[0] == 503
            assert (await status(daemon, "/healthz"))[0] == 200
        finally:
            server.resume()
        await daemon.ready(120)
        assert (await asked(daemon, "started")).returncode == 0
        assert (await status(daemon, "/startupz"))[0] == 200


async def test_a_stand_by_is_ready_beside_an_owner_that_lives(tmp_path: Path) -> None:
    lease = {"LEASE__SECONDS": "1.5"}
    with (
        NatsServer() as server,
        DaemonProcess(server.url, tmp_path / "owner", lease) as owner,
        DaemonProcess(server.url, tmp_path / "stand-by", lease) as stand_by,
    ):
        owner.start()
        await owner.owning()
        stand_by.start()
        await stand_by.ready()
        assert await stand_by.metric("lanes_owned") == 0
        assert (await status(stand_by, "/startupz"))[0] == 200
        assert await owner.stopped() == 0
        await stand_by.owning()
        assert await stand_by.stopped() == 0


def event(number: int) -> bytes:
    return json.dumps(
        {
            "v": 1,
            "id": f"e-{number}",
            "type": "message",
            "at": "2026-11-30T09:00:00Z",
            "role": "user",
            "content": "word " * 100,
        }
    ).encode()


async def test_before_the_broker_was_ever_there_it_is_alive_and_not_started(tmp_path: Path) -> None:
    with DaemonProcess(f"nats://127.0.0.1:{free_port()}", tmp_path / "daemon") as daemon:
        daemon.start()
        await eventually(lambda: daemon.admin is not None, "the admin port")
        assert (await status(daemon, "/startupz"))[0] == 503
        assert (await status(daemon, "/healthz"))[0] == 200
        assert await daemon.stopped() == 0


# --- the command ----------------------------------------------------------------------------------------------


async def test_the_health_command_answers_by_its_exit_code(tmp_path: Path) -> None:
    async with ready(tmp_path) as (_, daemon):
        for question, word in (("alive", "alive"), ("ready", "ready"), ("started", "started")):
            done = await asked(daemon, question)
            assert (done.returncode, json.loads(done.stdout)[word]) == (0, True)
        assert daemon.admin is not None
        port = daemon.admin.rpartition(":")[2]
        # The address to listen on may be any; the daemon beside is on loopback as well.
        assert (await run_health(f"0.0.0.0:{port}")).returncode == 0
    away = await run_health(f"127.0.0.1:{port}", "ready", "--timeout", "1")
    assert away.returncode == 1
    assert "no daemon answers" in away.stderr
    unknowable = await run_health("127.0.0.1:0")
    assert unknowable.returncode == 2
    assert "port 0" in unknowable.stderr
