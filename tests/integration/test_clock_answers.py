"""What the clock may change in an answer: it takes a permission away, and it ends a wait. Nothing else."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from support.harness import MODEL, Harness, Life
from support.story import D1

pytestmark = pytest.mark.anyio


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


async def _may(life: Life) -> tuple[str, str]:
    packet = await life.packet()
    (operation,) = packet["operations"]
    return operation["may"], packet["protected_digest"]


async def test_no_packet_permits_what_authorize_would_refuse_by_the_clock(tmp_path: Path) -> None:
    """The approval's time is over and its record has not come: asked for or published, no packet says dispatch."""
    harness = Harness(tmp_path)
    harness.start()
    harness.tell(
        "operation.declared",
        operation_id="op",
        kind="deploy",
        idempotency_key="k",
        payload_digest=D1,
    )
    known = {"approval_id": "ap", "action": "deploy", "payload_digest": D1}
    harness.tell("approval.requested", **known)
    over = _moment(harness.broker.now + 60)
    harness.authority("approval.resolved", **known, outcome="granted", by="ann", expires_at=over)
    async with harness.alive() as life:
        await life.read_all()
        may, digest = await _may(life)
        assert may == "dispatch"
        await life.publish()
        harness.wait(60)
        assert (await life.ask("authorize", operation_id="op", dry_run=True))["code"] == "approval_expired"
        assert await _may(life) == ("none", digest)
        harness.tell("message", role="user", content="and now?")
        await life.read_all()
        await life.publish()
        await life.relayed()
        said = [packet["operations"][0]["may"] for packet in harness.sent("packet")]
        assert said == ["dispatch", "none"]
        # The ledger waits for the record, and with it everything that must be the same for everybody.
        assert (await life.ledger()).items["approval"]["ap"].state == "granted"


async def test_one_who_asks_waits_for_work_in_flight_a_minute_in_all_over_a_restart(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.start(model=MODEL)
    harness.tell("operation.declared", operation_id="op", kind="mail", idempotency_key="k")
    harness.tell("operation.dispatched", operation_id="op")
    for _ in range(4):
        harness.turn(3_000)
    harness.tell("boundary.marked", kind="turn_ended")

    async def asked(life: Life) -> dict[str, Any]:
        answer = await life.compact()
        return {name: answer[name] for name in ("state", "reason") if name in answer}

    async with harness.alive() as life:
        await life.read_all()
        assert await asked(life) == {"state": "deferred", "reason": "in_flight"}
        harness.wait(40)
        assert await asked(life) == {"state": "deferred", "reason": "in_flight"}
        assert harness.sent("notice", kind="compaction_deferred") == []
    async with harness.alive() as life:
        harness.wait(20)
        assert await asked(life) == {"state": "started"}
        assert len(await life.checkpoints()) == 1


async def test_a_finished_run_has_nothing_to_make_room_for(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.start()
    for _ in range(4):
        harness.turn(3_000)
    harness.tell("run.finished", outcome="succeeded")
    async with harness.alive() as life:
        await life.read_all()
        answer = await life.compact()
        assert (answer["state"], answer["reason"]) == ("deferred", "little_new")
        assert "attempt_id" not in answer
        harness.authority("run.resumed")
        await life.read_all()
        assert (await life.compact())["state"] == "started"
