"""Packets as they come: hostile ones are refused by name, and the highest checkpoint wins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from protocol.client.errors import PacketRefused
from protocol.client.packets import PacketBox, rank, read_packet
from protocol.codec import digest
from protocol.handoff import DIGEST_EXCLUDES

pytestmark = pytest.mark.anyio

VECTOR = json.loads((Path(__file__).parent.parent / "vectors" / "v1" / "resume.packet.json").read_bytes())
ADDRESS = (VECTOR["tenant"], VECTOR["lane"], VECTOR["run"])


def packet(**changes: Any) -> bytes:
    """The golden packet with changes, under a digest that fits."""
    body = {**VECTOR, **changes}
    if "digest" not in changes:
        body["digest"] = digest({name: value for name, value in body.items() if name not in DIGEST_EXCLUDES})
    return json.dumps(body).encode()


def at(version: int | None, ledger: int, **changes: Any) -> bytes:
    checkpoint = None if version is None else {**VECTOR["checkpoint"], "version": version}
    return packet(checkpoint=checkpoint, ledger_version=ledger, **changes)


def test_a_packet_is_read_with_fields_nobody_knows_yet() -> None:
    read = read_packet(packet(something_new={"a": 1}), *ADDRESS)
    assert read.packet_id == VECTOR["packet_id"]


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"", "malformed"),
        (b"null", "malformed"),
        (b'{"type":"run.notice"}', "malformed"),
        (b"[" * 2_000, "malformed"),
        (b'{"type":"resume.packet","v":1}', "malformed"),
        (packet(v=2), "unsupported_version"),
        (packet(v=0), "digest_mismatch"),
        (packet(must_understand=["laws_of_physics"]), "must_understand"),
        (packet(must_understand=["task", "x" * 500]), "must_understand"),
        (packet(must_understand="task"), "malformed"),
        (packet(must_understand=[1]), "malformed"),
        (packet(run="another"), "run_mismatch"),
        (packet(lane="another"), "run_mismatch"),
        (packet(tenant="another"), "run_mismatch"),
        (packet(verdict="just_do_it"), "malformed"),
        (packet(digest="sha256:" + "0" * 64), "digest_mismatch"),
        (packet(digest=VECTOR["digest"], verdict="pause", something="else"), "digest_mismatch"),
        (packet() + b"\xff", "malformed"),
    ],
)
def test_a_hostile_packet_is_refused_by_name(payload: bytes, code: str) -> None:
    with pytest.raises(PacketRefused) as refused:
        read_packet(payload, *ADDRESS)
    assert refused.value.code == code
    if code == "must_understand":
        assert "laws_of_physics" in str(refused.value) or "xxx" in str(refused.value)
    assert len(str(refused.value)) < 800


def test_known_names_may_have_to_be_understood() -> None:
    assert read_packet(packet(must_understand=["task", "operations"]), *ADDRESS).must_understand


async def test_the_highest_checkpoint_wins_whatever_order_they_come_in() -> None:
    box = PacketBox(*ADDRESS)
    for payload in (at(2, 20), at(3, 10), at(2, 30), at(None, 90), at(3, 8)):
        box.put(payload)
    assert box.newest is not None
    assert rank(box.newest) == (3, 10)
    assert box.due is box.newest
    assert await box.following() is box.newest
    box.put(at(3, 11))
    assert rank(await box.following()) == (3, 11)
    box.taken(box.newest)
    assert box.due is None
    box.put(at(3, 10))
    assert box.due is None


async def test_whoever_waits_is_told_of_packets_and_of_refused_ones() -> None:
    box = PacketBox(*ADDRESS)
    heard: list[str] = []

    async def listen() -> None:
        while True:
            try:
                heard.append(str((await box.following()).ledger_version))
            except PacketRefused as refused:
                heard.append(refused.code)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listen)
        for payload in (at(1, 1), packet(must_understand=["x"]), at(1, 2)):
            await anyio.wait_all_tasks_blocked()
            box.put(payload)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert heard == ["1", "must_understand", "2"]
    assert not box.refused


def test_only_what_covers_or_clears_more_shortens_the_context() -> None:
    box = PacketBox(*ADDRESS)
    one = {"call_id": "c", "event_id": "e-1", "ref": "event:e-1", "status": "ok", "note": ""}
    box.put(at(None, 1, cleared=[]))
    assert box.due is not None
    assert box.shortened is None
    box.put(at(None, 2, cleared=[one]))
    assert box.shortened is box.due
    assert box.due is not None
    box.taken(box.due)
    assert box.shortened is None
    box.put(at(None, 3, cleared=[one]))
    assert (box.due is None, box.shortened) == (False, None)
    box.put(at(1, 4, cleared=[]))
    # A later one that only says something else still carries the checkpoint nobody took up.
    box.put(at(1, 5, cleared=[]))
    assert box.shortened is box.due
    assert box.due is not None
    box.taken(box.due)
    box.put(at(1, 6, cleared=[{**one, "event_id": "e-9"}]))
    assert box.shortened is box.due
