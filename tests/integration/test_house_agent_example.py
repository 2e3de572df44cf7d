"""The README's agent and its permissions, as they stand there, against a real broker and daemon."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import anyio
import anyio.to_thread
import nats
import pytest
from nats.js.errors import NoStreamResponseError

from support.daemon import DaemonProcess
from support.nats_server import NatsServer
from support.pages import ROOT

pytestmark = pytest.mark.anyio

README = ROOT / "README.md"
USERS = {"keeper": "change-me-1", "agent": "change-me-2", "authority": "change-me-3"}


def block(mark: str) -> str:
    found = re.search(
        rf"<!-- {mark} -->\n```\w+\n(.*?)```\n<!-- {mark} end -->", README.read_text(), re.DOTALL
    )
    assert found is not None
    return found[1]


async def test_the_agent_of_the_readme_works_under_the_permissions_of_the_readme(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(block("agent example"))
    with NatsServer(config=block("permissions")) as server:
        urls = {user: server.url_for(user, password) for user, password in USERS.items()}
        daemon = DaemonProcess(urls["keeper"], tmp_path / "daemon").start()
        try:
            await daemon.ready()
            done = await anyio.to_thread.run_sync(
                lambda: subprocess.run(
                    [sys.executable, str(script), urls["agent"]], capture_output=True, text=True, timeout=60
                )
            )
            assert done.returncode == 0, done.stderr + daemon.log
            lines = done.stdout.splitlines()
            assert lines[0] == "may I? ok"
            assert 'OPERATION "op-tag" state=succeeded may=none' in done.stdout
            assert lines[-1] == "again? already_succeeded"
            await an_agent_is_no_authority(urls["agent"])
            await an_authority_is_heard(urls["authority"])
        finally:
            daemon.terminate()
            assert await daemon.ended() == 0


async def an_agent_is_no_authority(url: str) -> None:
    denied: list[str] = []

    async def hear(error: Exception) -> None:
        denied.append(str(error).lower())

    broker = await nats.connect(url, error_cb=hear)
    for channel in ("authority", "record"):
        with pytest.raises((TimeoutError, nats.errors.TimeoutError)):
            await broker.request(f"wk.v1.in.default.main.first-watch.{channel}", b"{}", timeout=0.5)
    await broker.close()
    assert sum("permissions violation" in text for text in denied) == 2


async def an_authority_is_heard(url: str) -> None:
    broker = await nats.connect(url)
    try:
        stored = await broker.jetstream().publish("wk.v1.in.default.main.first-watch.authority", b"{}")
        assert stored.stream == "WK_IN"
    except NoStreamResponseError:
        pytest.fail("the authority may publish, and the stream is there")
    finally:
        await broker.close()
