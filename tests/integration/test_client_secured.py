"""The client over TLS with a credentials file, under the accounts and permissions the deployment files make."""

from __future__ import annotations

import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import trustme

from protocol.client import NotConnected, Refused, connect
from support.daemon import DaemonProcess
from support.nats_server import NatsServer
from support.pages import ROOT

pytestmark = pytest.mark.anyio

MODEL = {"name": "m", "context_window": 100_000}
BIG = "".join(f"line {number} of a large result\n" for number in range(50_000))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    made = tmp_path / "keys"
    script = ROOT / "deploy" / "nats" / "credentials.py"
    subprocess.run(
        [sys.executable, str(script), str(made), "--lane", "main"], check=True, capture_output=True
    )
    return made


@pytest.fixture
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def server(ca: trustme.CA, keys: Path, tmp_path: Path) -> Iterator[NatsServer]:
    leaf = ca.issue_cert("127.0.0.1", "localhost")
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    leaf.private_key_pem.write_to_path(str(key))
    certificate.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    tls = f'tls {{ cert_file: "{certificate}", key_file: "{key}" }}\n'
    with NatsServer(config=tls + (keys / "auth.conf").read_text()) as running:
        yield running


async def test_an_agent_with_credentials_works_within_its_permissions(
    ca: trustme.CA, keys: Path, server: NatsServer, tmp_path: Path
) -> None:
    url = server.url.replace("nats://", "tls://")
    trusted = tmp_path / "ca.crt"
    ca.cert_pem.write_to_path(str(trusted))
    context = ssl.create_default_context()
    ca.configure_trust(context)
    settings = {"NATS__CREDS": str(keys / "keeper.creds"), "NATS__CA": str(trusted)}
    with DaemonProcess(url, tmp_path / "daemon", settings).start() as daemon:
        await daemon.owning()
        agent, authority = keys / "agent-main.creds", keys / "authority.creds"
        async with connect(url, run="r", creds=agent, tls=context) as run:
            await run.run_started(goal="g", model=MODEL)
            assert (await run.next_packet()).task.goal == "g"
            async with run.effect("git.tag", "1.4"):
                await run.tool_called(call_id="c", tool="git", arguments={})
                told = await run.tool_returned(call_id="c", status="ok", content=BIG)
            (item,) = [item async for item in run.fetch(f"event:{told.event_id}")]
            assert msgspec.json.decode(item.event)["content"] == BIG
            await run.approval_requested(approval_id="ap", action="x")
            async with connect(url, run="r", creds=authority, tls=context, channel="authority") as deciding:
                await deciding.approval_resolved(approval_id="ap", outcome="granted", by="ops", action="x")
                with pytest.raises(Refused):
                    await deciding.authorize("op-1")
                after = deciding.newest
            packet = await run.fresh_packet(after=after)
            assert [item.state for item in packet.approvals] == ["granted"]
            assert (await run.status()).violations == {}
        # A process of its own has no packet of before by the stream, but by asking.
        async with connect(url, run="r", creds=agent, tls=context) as later:
            assert later.packet_due is not None
        for options in ({"tls": context}, {"creds": agent, "tls": ssl.create_default_context()}):
            with pytest.raises((Refused, NotConnected)):
                async with connect(url, run="r", connect_seconds=1, **options):  # type: ignore[arg-type]
                    pytest.fail("not let in")
        assert daemon.defects() == []
