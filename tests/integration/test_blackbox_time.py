"""What only time brings: approvals expire, operations and calls are given up, and the owner says so."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta

import pytest

from tests.support.blackbox import Box, Json, blackbox, event, eventually
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.anyio

SHA = "sha256:" + "ab" * 32


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as started:
        yield started


@pytest.fixture(scope="module")
async def box(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Box]:
    settings = {
        "operations.unknown_after_seconds": 1,
        "calls.abandon_after_seconds": 1,
        "intake.gap_after_seconds": 1,
        "authority.approval_kinds": ["db.*"],
    }
    async with blackbox(server, tmp_path_factory.mktemp("time"), settings) as opened:
        yield opened


def in_seconds(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


async def record(box: Box, run: str, type: str, number: int = 1) -> list[Json]:
    """Wait for that many records of a type in the run's own channel."""
    found: list[Json] = []

    async def there() -> bool:
        found[:] = [item for item in await box.records(run) if item["type"] == type]
        return len(found) >= number

    await eventually(there, f"{number} {type} of {run}")
    assert all(item["epoch"] >= 1 and item["id"] and item["at"] for item in found)
    return found


async def newest(box: Box, run: str) -> None:
    """Let the next answers include every record of the run."""
    message = await box.js.get_last_msg("WK_IN", f"wk.v1.in.{box.tenant}.{box.lane}.{run}.record")
    assert message.seq is not None
    box.newest[run] = max(box.newest.get(run, 0), message.seq)


async def approved(box: Box, expires_at: str, *, grant: bool = True) -> str:
    run = await box.start()
    await box.tell(
        run,
        event("operation.declared", operation_id="op", kind="db.x", idempotency_key="k", payload_digest=SHA),
        event(
            "approval.requested",
            approval_id="ap",
            action="db.x",
            payload_digest=SHA,
            operation_id="op",
            expires_at=expires_at,
        ),
    )
    if grant:
        granted = event(
            "approval.resolved",
            approval_id="ap",
            outcome="granted",
            by="ann",
            action="db.x",
            payload_digest=SHA,
            expires_at=expires_at,
        )
        await box.tell(run, granted, channel="authority")
    return run


@pytest.mark.parametrize("grant", [True, False])
async def test_an_approval_expires_by_a_record_of_the_owner(box: Box, grant: bool) -> None:
    run = await approved(box, in_seconds(1), grant=grant)
    assert len((await box.packet(run))["approvals"]) == 1
    found = await record(box, run, "approval.expired")
    assert [item["approval_id"] for item in found] == ["ap"]
    await newest(box, run)
    assert (await box.packet(run))["approvals"] == []
    assert (await box.look(run, operation_id="op"))["code"] == "approval_expired"
    assert (await box.status(run))["pending_approvals"] == []
    assert len([item for item in await box.records(run) if item["type"] == "approval.expired"]) == 1


async def test_the_clock_may_only_take_a_permission_away(box: Box) -> None:
    """Over by the clock, and not yet by the ledger: the answer is no, and nothing is folded for it."""
    run = await approved(box, in_seconds(-5))
    answer = await box.authorize(run, "op")
    assert (answer["code"], answer["allowed"]) == ("approval_expired", False)
    await record(box, run, "approval.expired")
    await newest(box, run)
    assert (await box.authorize(run, "op"))["code"] == "approval_expired"
    assert (await box.packet(run))["operations"][0]["state"] == "not_started"


async def test_a_dispatch_under_an_expired_approval_is_two_faults(box: Box) -> None:
    run = await approved(box, in_seconds(-5))
    await record(box, run, "approval.expired")
    await newest(box, run)
    await box.tell(run, event("operation.dispatched", operation_id="op"))
    assert (await box.status(run))["violations"] == {"unauthorized_write": 1, "expired_approval_used": 1}


async def test_an_operation_without_outcome_becomes_unknown(box: Box) -> None:
    run = await box.start()
    await box.tell(run, event("operation.declared", operation_id="op", kind="x", idempotency_key="k"))
    assert (await box.authorize(run, "op"))["code"] == "ok"
    assert (await box.packet(run))["operations"][0]["state"] == "pending"
    found = await record(box, run, "operation.timed_out")
    assert found[0]["operation_id"] == "op"
    await newest(box, run)
    await box.hear(run, "notice", kind="operation_unknown", operation_id="op")
    packet = await box.packet(run)
    assert packet["verdict"] == "reconcile"
    assert packet["operations"][0] == {**packet["operations"][0], "state": "unknown", "may": "reconcile"}
    assert (await box.look(run, operation_id="op"))["code"] == "outcome_unknown"
    await box.hear(run, "packet", verdict="reconcile")


async def test_what_was_settled_in_time_is_not_given_up(box: Box) -> None:
    run, other = await box.start(), await box.start()
    for name in (run, other):
        await box.tell(
            name,
            event("operation.declared", operation_id="op", kind="x", idempotency_key=name),
            event("operation.dispatched", operation_id="op"),
        )
    await box.tell(run, event("operation.settled", operation_id="op", state="succeeded"))
    await record(box, other, "operation.timed_out")
    assert await box.records(run) == []


async def test_a_call_without_result_is_abandoned(box: Box) -> None:
    run = await box.start()
    await box.tell(
        run,
        event("operation.declared", operation_id="op", kind="x", idempotency_key="k"),
        event("tool.called", id="call", call_id="c1", tool="slow", arguments={}, operation_id="op"),
        event("tool.called", id="fast", call_id="c2", tool="fast", arguments={}),
        event("tool.returned", call_id="c2", status="ok", content="x"),
    )
    found = await record(box, run, "call.abandoned")
    assert [(item["call_id"], item["event_id"]) for item in found] == [("c1", "call")]
    await newest(box, run)
    packet = await box.packet(run)
    assert packet["open_calls"] == []
    assert packet["abandoned_calls"] == [{"call_id": "c1", "tool": "slow"}]
    assert packet["operations"][0]["state"] == "unknown"


async def test_records_are_said_once_whatever_happens_meanwhile(box: Box) -> None:
    run = await box.start()
    await box.tell(
        run,
        event("operation.declared", operation_id="op", kind="x", idempotency_key="k"),
        event("operation.dispatched", operation_id="op"),
        event("tool.called", id="call", call_id="c1", tool="slow", arguments={}),
    )
    await record(box, run, "operation.timed_out")
    await record(box, run, "call.abandoned")
    await newest(box, run)
    before = await box.status(run)
    types = [item["type"] for item in await box.records(run)]
    assert sorted(types) == ["call.abandoned", "operation.timed_out"]
    assert before["violations"] == {}


async def test_a_record_of_a_lower_epoch_changes_nothing(box: Box) -> None:
    run = await box.start()
    await box.tell(run, event("operation.declared", operation_id="op", kind="x", idempotency_key="k"))
    before = await box.status(run)
    forged = event("authorization.requested", operation_id="op", request_id="r", epoch=0)
    await box.tell(run, forged, channel="record")
    packet = await box.packet(run)
    assert packet["operations"][0]["state"] == "not_started"
    assert (await box.status(run))["ledger_version"] == before["ledger_version"] + 1


async def test_the_lanes_settings_stand_in_its_own_channel(box: Box) -> None:
    found = await box.records("_lane")
    assert [item["type"] for item in found] == ["settings.applied"]
    assert found[0]["settings"] == {
        **found[0]["settings"],
        "authority_required": True,
        "approval_kinds": ["db.*"],
    }
