"""What an outsider found by sending what nobody would send by intention."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest

from tests.support.blackbox import Json, blackbox, event, stored, words
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


async def test_a_packet_nobody_took_up_is_waited_for_by_the_next_owner_too(
    server: NatsServer, tmp_path: Path
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    model = {"name": "small", "context_window": 20_000, "max_output_tokens": 2_000}
    async with blackbox(server, before) as box:
        run = await box.start(model=model)
        await box.tell(run, event("message", role="user", content="Go on, please."))
        for step in range(10):
            await box.tell(run, event("message", role="assistant", content=words(900, f"s{step}")))
        await box.tell(run, usage(12_600))
        await box.hear(run, "receipt", outcome="applied")
        told = (await box.packet(run))["budget"]
        newest = box.newest
    async with blackbox(server, after) as box:
        box.newest |= newest
        assert (await box.packet(run))["budget"]["used_after"] == told["used_after"] < told["used_before"]
        await box.hear(run, "packet", reason="takeover")
        for number in range(3):
            await box.tell(run, event("message", role="assistant", content=f"Still here, {number}."))
            await box.tell(run, usage(12_700 + number))
        await box.hear(run, "notice", kind="not_applied")
        assert (await box.status(run))["compaction"] == {"state": "deferred", "reason": "not_applied"}
        await box.tell(run, event("message", role="assistant", content="Shorter."), usage(5_000))
        assert (await box.status(run))["level"] == "ok"
        assert box.of(run, "receipt") == []


async def test_a_takeover_packet_says_so_whatever_else_it_could_say(
    server: NatsServer, tmp_path: Path
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    async with blackbox(server, before) as box:
        run = await box.start()
        await box.tell(run, event("message", role="assistant", content="Begun."), usage(60_000))
        await box.hear(run, "packet", reason="checkpoint")
    async with blackbox(server, after) as box:
        await box.hear(run, "packet", reason="takeover")


async def test_a_state_too_large_for_a_message_is_kept_as_an_object_and_taken_over(
    server: NatsServer, tmp_path: Path
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    model = {"name": "small", "context_window": 20_000, "max_output_tokens": 2_000}
    async with blackbox(server, before) as box:
        run = await box.start(model=model)
        await box.tell(run, event("message", role="user", content="Go on, please."))
        for step in range(10):
            await box.tell(run, event("message", role="assistant", content=words(900, f"s{step}")))
        for number in range(700):
            text = f"{number} " + "why it was decided " * 50
            await box.tell(run, event("decision.made", id=f"d-{number}", summary=text))
        await box.tell(run, usage(12_600))
        await box.hear(run, "receipt", outcome="applied")
        told, newest = await box.packet(run), box.newest
    subject = f"wk.v1.state.{box.tenant}.{box.lane}.{run}"
    async with blackbox(server, after) as box:
        box.newest |= newest
        packet = await box.packet(run)
        assert packet["checkpoint"] == told["checkpoint"]
        assert packet["protected_digest"] == told["protected_digest"]
        message = json.loads((await stored(box.js, "WK_STATE", subject))[-1][1])
        assert message["must_understand"] == ["blob"]
        packed = await (await box.js.object_store("WK_BLOBS")).get(message["blob"]["name"])
        assert packed.data is not None
        assert message["blob"]["digest"] == f"sha256:{hashlib.sha256(packed.data).hexdigest()}"
        state = json.loads(gzip.decompress(packed.data))
        assert state["checkpoint"]["id"] == told["checkpoint"]["id"]
        assert state["ledger_digest"] == message["ledger_digest"]
    # One more is written at the drain; the one it takes the place of is gone.
    client = await nats.connect(server.url)
    try:
        kept = await (await client.jetstream().object_store("WK_BLOBS")).list()
        assert len([item for item in kept if (item.name or "").startswith(subject) and not item.deleted]) == 1
    finally:
        await client.close()


def usage(tokens: int) -> Json:
    """What the provider counted for the newest request."""
    return event("usage.reported", model="small", context_tokens=tokens, output_tokens=5)
