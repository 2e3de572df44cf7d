"""A daemon in a process of its own: started against a broker, made ready, killed, told to stop, started again.

Its place on disk stays the same over all its starts. It is looked at from outside only: exit code, log,
admin port.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import anyio
import anyio.to_thread
import httpx

from support.links import eventually
from support.nats_server import wait_until

PLAIN = ("-m", "sidecar", "run")
DOOMED = Path(__file__).with_name("doomed_daemon.py")
SHIFTED = Path(__file__).with_name("shifted_daemon.py")
TENANT = "default"
LANE = "main"


class DaemonProcess:
    """One daemon. ``settings`` are environment variables without their prefix: ``{"LEASE__SECONDS": "1"}``."""

    def __init__(self, url: str, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self.url = url
        self.folder = folder
        self.data_dir = folder / "data"
        self.settings = dict(settings or {})
        self.starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    # --- life -------------------------------------------------------------------------------------------

    def start(self, program: Sequence[str] = PLAIN) -> DaemonProcess:
        """Start it anew; does not wait for anything."""
        assert self.process is None or self.process.poll() is not None, "it still runs"
        self.starts += 1
        # A variable of the person who runs the tests must not reach the daemon.
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("WATCHKEEPER_")}
        given = {
            "NATS__URL": self.url,
            "DATA_DIR": str(self.data_dir),
            "ADMIN__LISTEN": "127.0.0.1:0",
            "LOGS__FORMAT": "json",
            **self.settings,
        }
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program],
                cwd=self.folder,
                env={**inherited, **{f"WATCHKEEPER_{key}": value for key, value in given.items()}},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        return self

    def start_doomed(self, point: str) -> DaemonProcess:
        """Start it so that it kills itself, or holds still, at a point (``doomed_daemon.py``)."""
        self.mark.unlink(missing_ok=True)
        # -P: the folder of the tests must not come before the installed packages.
        return self.start(("-P", str(DOOMED), point, str(self.mark)))

    def start_shifted(self, seconds: float = 0.0) -> DaemonProcess:
        """Start it under a wall clock that is wrong by so much, and that ``set_clock`` changes."""
        self.set_clock(seconds)
        return self.start(("-P", str(SHIFTED), str(self.folder / "offset")))

    def set_clock(self, seconds: float) -> None:
        """From now on its wall clock is wrong by so many seconds."""
        new = self.folder / "offset.new"
        new.write_text(str(seconds))
        new.replace(self.folder / "offset")

    @property
    def mark(self) -> Path:
        """Exists once a doomed daemon has reached its point."""
        return self.folder / "reached"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill9(self) -> None:
        """End it without warning."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def terminate(self) -> None:
        """Tell it to drain."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def freeze(self) -> None:
        """Stop the process without ending it: it holds its connections and knows nothing of the time."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        wait_until(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "T", "stop of the process")

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    async def ended(self, seconds: float = 30.0) -> int:
        """Wait for its end; the exit code, negative for a signal. Fails with its log after ``seconds``."""
        assert self.process is not None
        try:
            return await anyio.to_thread.run_sync(partial(self.process.wait, seconds))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the daemon did not end within {seconds:g} s\n{self.log}") from None

    async def stopped(self, seconds: float = 30.0) -> int:
        """Tell it to drain and wait for its end."""
        self.terminate()
        return await self.ended(seconds)

    def __enter__(self) -> DaemonProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None:
            self.kill9()

    # --- looking ----------------------------------------------------------------------------------------

    @property
    def log_file(self) -> Path:
        return self.folder / f"daemon-{self.starts}.log"

    @property
    def log(self) -> str:
        """What the present start has said on standard error."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def said(self, event: str | None = None) -> list[dict[str, Any]]:
        """Entries of the log, all or those of this event; lines that are none are left out."""
        lines = self.log.splitlines(keepends=True)
        entries = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]
        return [entry for entry in entries if event is None or entry["event"] == event]

    def defects(self) -> list[str]:
        """Tracebacks in the logs of all its starts: errors nobody foresaw, survived or not."""
        found = []
        for start in range(1, self.starts + 1):
            log = (self.folder / f"daemon-{start}.log").read_text(errors="replace")
            found += [line for line in log.splitlines() if "Traceback" in line]
        return found

    @property
    def admin(self) -> str | None:
        """Address of the admin port of the present start, once it has one."""
        told = self.said("admin listening")
        return str(told[-1]["address"]) if told else None

    async def get(self, path: str) -> httpx.Response | None:
        """One request to the admin port; None while nobody answers there."""
        address = self.admin
        if address is None:
            return None
        try:
            async with httpx.AsyncClient(verify=False, trust_env=False, timeout=10) as client:
                return await client.get(f"http://{address}{path}")
        except httpx.TransportError:
            return None

    async def readiness(self) -> dict[str, Any]:
        """The answer of ``/readyz``; {} while nobody answers."""
        answer = await self.get("/readyz")
        return {} if answer is None else dict(answer.json())

    async def ready(self, seconds: float = 30.0) -> None:
        """Wait until it says that it is ready. Fails with its log if it ends before."""

        async def is_ready() -> bool:
            assert self.running, f"the daemon ended\n{self.log}"
            answer = await self.get("/readyz")
            return answer is not None and answer.status_code == 200

        try:
            await eventually(is_ready, "readiness", seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log[-6000:]}") from None

    async def owning(self, seconds: float = 30.0) -> None:
        """Wait until it owns its lane and has read everything: a stand-by is ready as well."""

        async def owns() -> bool:
            return await self.metric("lanes_owned") == 1

        await self.ready(seconds)
        await eventually(owns, "ownership of the lane", seconds)
        await self.ready(seconds)

    async def unready(self, condition: str, seconds: float = 60.0) -> str:
        """Wait until it is not ready because of this condition; the reason it gives."""
        found: list[str] = []

        async def is_unready() -> bool:
            reasons = (await self.readiness()).get("reasons", {})
            found[:] = [reasons[condition]] if condition in reasons else []
            return bool(found)

        await eventually(is_unready, f"{condition} as a reason not to be ready", seconds)
        return found[0]

    async def metric(self, name: str, **labels: str) -> float:
        """Value of a metric without its prefix, summed over the series that carry these labels; 0 for none."""
        answer = await self.get("/metrics")
        assert answer is not None, "the admin port does not answer"
        total = 0.0
        for line in answer.text.splitlines():
            if line.startswith("#") or not line.startswith(f"watchkeeper_{name}"):
                continue
            series, _, value = line.rpartition(" ")
            named, _, rest = series.partition("{")
            if named == f"watchkeeper_{name}" and all(
                f'{key}="{label}"' in rest for key, label in labels.items()
            ):
                total += float(value)
        return total

    async def reached(self, seconds: float = 60.0) -> None:
        """Wait until a doomed daemon is at its point."""

        def is_there() -> bool:
            assert self.running or self.mark.exists(), f"the daemon ended before its point\n{self.log}"
            return self.mark.exists()

        await eventually(is_there, "the doomed daemon's point", seconds)
