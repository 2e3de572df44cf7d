"""The settings a lane folds by are those its owner was configured with, whatever else the stream holds."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest

from sidecar.app import running
from support.bench import configured, event
from support.nats_server import NatsServer
from tests.support.links import eventually, linked

pytestmark = pytest.mark.anyio

SUBJECT = "wk.v1.in.acme.main._lane.record"


async def _kinds(server: NatsServer, folder: Path, kinds: str) -> tuple[str, ...]:
    """The kinds that need approval once a daemon with this configuration has read everything."""
    config = configured(
        folder, NATS__URL=server.url, ADMIN__LISTEN="127.0.0.1:0", AUTHORITY__APPROVAL_KINDS=kinds
    )
    async with running(config) as daemon:
        await eventually(lambda: daemon.metrics.total("lanes_owned") == 1, "ownership")
        await eventually(lambda: daemon.health.ready().ready, "readiness")
        desk = daemon.lanes[0].desk
        assert desk is not None
        with anyio.move_on_after(10):
            while desk.runs.lane.settings.approval_kinds != tuple(kinds.split(",")):
                await anyio.sleep(0.02)
        return desk.runs.lane.settings.approval_kinds


async def test_settings_of_a_former_owner_that_come_too_late_do_not_pass_for_ours(tmp_path: Path) -> None:
    with NatsServer() as server:
        assert await _kinds(server, tmp_path, "prod.*") == ("prod.*",)
        assert await _kinds(server, tmp_path, "mail.*") == ("mail.*",)
        settings = {
            "authority_required": True,
            "approval_kinds": ["prod.*"],
            "forbidden_kinds": [],
            "reconcile_by_authority_kinds": [],
        }
        late = event("settings.applied", "late-settings", epoch=1, settings=settings)
        async with linked(server.url) as link:
            newest = await link.api("STREAM.MSG.GET.WK_IN", {"last_by_subj": SUBJECT}, timeout=5)
            assert newest["message"]["seq"] > 1
            await link.publish(SUBJECT, json.dumps(late).encode())
        assert await _kinds(server, tmp_path, "prod.*") == ("prod.*",)
