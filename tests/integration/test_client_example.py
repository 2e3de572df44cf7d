"""The README's agent, which is a file beside the examples, and the whole loop: as they stand, each run twice."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import anyio.to_thread
import pytest

from support.daemon import DaemonProcess
from support.nats_server import NatsServer
from support.pages import ROOT, runbook_permissions

pytestmark = pytest.mark.anyio

EXAMPLES = ROOT / "deploy" / "examples"


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    # Nothing is said that its reader would have to look into.
    assert done.stderr == ""
    return done.stdout


async def test_the_agent_of_the_readme_does_its_work_once_under_the_permissions_of_the_runbook(
    tmp_path: Path,
) -> None:
    script = EXAMPLES / "first.py"
    assert len(script.read_text().splitlines()) <= 30
    with NatsServer(config=runbook_permissions()) as server:
        keeper, agent = server.url_for("keeper", "change-me-1"), server.url_for("agent", "change-me-2")
        with DaemonProcess(keeper, tmp_path / "daemon").start() as daemon:
            await daemon.ready()
            first = await anyio.to_thread.run_sync(run, str(script), agent)
            assert first.startswith("VERDICT continue")
            assert "state=succeeded may=none" in first
            assert 'receipt="refs/tags/1.4"' in first
            second = await anyio.to_thread.run_sync(run, str(script), agent)
            assert second.startswith("not allowed: already_succeeded\nVERDICT continue")
            assert daemon.defects() == []
            assert await daemon.metric("invariant_violations_total") == 0
        # Nothing is tried that the permissions do not hold, by neither side.
        assert "Permissions Violation" not in server.log


async def test_the_example_keeps_its_word_over_compaction_and_restart(tmp_path: Path) -> None:
    example = str(EXAMPLES / "agent.py")
    with NatsServer() as server, DaemonProcess(server.url, tmp_path / "daemon").start() as daemon:
        await daemon.ready()
        first = await anyio.to_thread.run_sync(run, example, server.url)
        assert "MAIL SENT" in first
        second = await anyio.to_thread.run_sync(run, example, server.url)
        assert "MAIL SENT" not in second
        assert re.search(r"context: \d+ -> \d+ tokens, verdict continue", first + second)
        assert "the last result: not done: already_succeeded" in second
        assert daemon.defects() == []
        assert await daemon.metric("invariant_violations_total") == 0
