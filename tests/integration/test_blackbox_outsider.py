"""What an outsider found by sending what nobody would send by intention."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.blackbox import blackbox, event
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as started:
        yield started


@pytest.mark.parametrize(
    "number",
    [2**53, 2**63, 2**64, 2**70, -(2**70), 10**400],
    ids=["53", "63", "64", "70", "negative", "endless"],
)
async def test_a_refused_message_with_a_number_nobody_can_store_stops_no_lane(
    server: NatsServer, tmp_path: Path, number: int
) -> None:
    async with blackbox(server, tmp_path) as box:
        run = await box.start()
        bad = event("message", role="user", content="x", session="s", seq=number)
        sequence = await box.send(run, json.dumps(bad).encode())
        assert (await box.hear_rejected(run, sequence))["code"] == "invalid_field"
        await box.tell(run, event("message", id="next", role="user", content="on", session="s", seq=1))
        packet = await box.packet(run)
        assert packet["verdict"] == "continue"
        assert packet["task"]["current_request"] == [{"event_id": "next", "text": "on"}]
        assert (await box.status(run))["gaps"] == []
