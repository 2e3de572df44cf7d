"""The agent without a client, the permissions of the runbook, and the end of a run whose agent is gone: as they
stand there, against a real broker and daemon.
"""

from __future__ import annotations

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
from support.pages import ROOT, runbook_permissions

pytestmark = pytest.mark.anyio

EXAMPLES = ROOT / "deploy" / "examples"
USERS = {"keeper": "change-me-1", "agent": "change-me-2", "authority": "change-me-3"}


async def run(script: str, *arguments: str) -> str:
    done = await anyio.to_thread.run_sync(
        lambda: subprocess.run(
            [sys.executable, str(EXAMPLES / script), *arguments], capture_output=True, text=True, timeout=60
        )
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_the_agent_without_a_client_works_under_the_permissions_of_the_runbook(tmp_path: Path) -> None:
    with NatsServer(config=runbook_permissions()) as server:
        urls = {user: server.url_for(user, password) for user, password in USERS.items()}
        daemon = DaemonProcess(urls["keeper"], tmp_path / "daemon").start()
        try:
            await daemon.ready()
            said = await run("wire.py", urls["agent"])
            assert said.startswith("may I? ok\n")
            assert 'OPERATION "op-tag" state=succeeded may=none' in said
            assert said.endswith("again? already_succeeded\n")
            again = await run("wire.py", urls["agent"])
            assert again.startswith("may I? already_succeeded\n")
            assert await daemon.metric("invariant_violations_total") == 0
            assert await run("finish.py", urls["authority"], "first-watch") == "finished: first-watch\n"
            assert (await run("wire.py", urls["agent"])).startswith("may I? run_finished\nVERDICT pause")
            assert "Permissions Violation" not in server.log
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
