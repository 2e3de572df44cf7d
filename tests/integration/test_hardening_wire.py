"""What a stranger may put on the wire beside a message's bytes: subjects and headers that are no text.

The broker stores and delivers them as they are; neither the reader of the stream nor the connection that
all lanes share may end by one.
"""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest

from sidecar.app import running
from support.bench import configured, event, started
from support.nats_server import NatsServer
from tests.support.links import eventually, linked

pytestmark = pytest.mark.anyio

IN = b"wk.v1.in.acme.main."


def _pub(subject: bytes, payload: bytes) -> bytes:
    return b"PUB %s %d\r\n%s\r\n" % (subject, len(payload), payload)


def _hpub(subject: bytes, header: bytes, payload: bytes) -> bytes:
    return b"HPUB %s %d %d\r\n%s%s\r\n" % (
        subject,
        len(header),
        len(header) + len(payload),
        header,
        payload,
    )


async def _send(server: NatsServer, *frames: bytes) -> None:
    """Bytes as they are, past every client library; returns once the server has taken them."""
    async with await anyio.connect_tcp("127.0.0.1", server.port) as stream:
        await stream.receive()
        await stream.send(b'CONNECT {"verbose":false,"headers":true}\r\n' + b"".join(frames) + b"PING\r\n")
        assert b"PONG" in await stream.receive()


def _message(id: str) -> bytes:
    return json.dumps(event("message", id, role="user", content="hello")).encode()


async def test_subjects_and_headers_that_are_no_text_end_neither_reader_nor_connection(
    tmp_path: Path,
) -> None:
    with NatsServer() as server:
        config = configured(tmp_path / "data", NATS__URL=server.url, ADMIN__LISTEN="127.0.0.1:0")
        async with running(config) as daemon, linked(server.url) as link:
            await eventually(lambda: daemon.metrics.total("lanes_owned") == 1, "ownership")
            await eventually(lambda: daemon.health.ready().ready, "readiness")

            async def position() -> int:
                reply = await link.request("wk.v1.ask.acme.main.r1.status", b"{}", timeout=3)
                return int(json.loads(reply.payload).get("position", 0))

            async def reads(expected: int) -> None:
                async def reached() -> bool:
                    return await position() == expected

                await eventually(reached, f"position {expected}")

            await _send(server, _pub(IN + b"r1.event", json.dumps(started()).encode()))
            await reads(1)
            await _send(server, _pub(b"wk.v1.ask.acme.main.\xff\xfe.status", b"{}"))
            await _send(
                server,
                _pub(IN + b"\xff\xfe.event", b"{}"),
                _hpub(IN + b"r1.event", b"NATS/1.0\r\nX: \xff\xfe\r\n\r\n", _message("m1")),
                _hpub(IN + b"r1.event", b"NATS/1.0\r\nnothing of a header\r\n\r\n", _message("m2")),
                _hpub(IN + b"r1.event", b"NATS/1.0 \xff\xfe\xfd no status\r\n\r\n", _message("m3")),
                _hpub(IN + b"r1.event", b"NATS/1.0 503 \xff\xfe\xfd\r\n\r\n", _message("m4")),
            )
            await reads(5)
            assert daemon.metrics.total("nats_reconnects_total") == 0
            assert daemon.metrics.total("events_rejected_total") == 1
