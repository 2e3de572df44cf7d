"""A broker that takes small messages only: what must survive does not fit one, and what is not essential waits."""

from __future__ import annotations

from typing import Any

import pytest

from support.harness import Harness, Life, workplace

pytestmark = pytest.mark.anyio

SMALL = 64 * 1024


def told(harness: Harness) -> None:
    harness.start(model={"name": "m", "context_window": 1_000_000})
    for name, nonessential in (("main", False), ("side", True), ("barred", True)):
        harness.tell(
            "operation.declared",
            operation_id=name,
            kind="barred" if name == "barred" else "write",
            idempotency_key=f"key-{name}",
            nonessential=nonessential,
        )
    harness.tell(
        "constraint.set", constraint_id="c", text="not that", source="user", forbids={"kinds": ["barred"]}
    )


def ask(harness: Harness, count: int) -> None:
    for _ in range(count):
        harness.tell("question.opened", question_id=f"q-{harness.count}", text="what? " * 60)


async def builds(life: Life, **ask: Any) -> tuple[str, int]:
    """The code of one answer, and how many packets were built for it."""
    packets, count = life.parts.packets, 0
    build = packets.build

    async def counted(*given: Any) -> Any:
        nonlocal count
        count += 1
        return await build(*given)

    packets.build = counted  # type: ignore[method-assign]
    try:
        answer = await life.ask("authorize", **ask)
    finally:
        packets.build = build  # type: ignore[method-assign]
    return answer["code"], count


async def test_what_is_not_essential_waits_while_no_message_takes_what_must_survive() -> None:
    with workplace() as folder:
        harness = Harness(folder)
        told(harness)
        async with harness.alive() as life:
            life.desk.max_payload = SMALL
            await life.read_all()
            assert await builds(life, operation_id="side", dry_run=True) == ("ok", 0)
            ask(harness, 600)
            await life.read_all()
            packet = await life.packet()
            assert packet["verdict"] == "pause"
            assert "protected_too_large" in [item["code"] for item in packet["blockers"]]
            assert await builds(life, operation_id="side", dry_run=True) == ("postponed", 1)
            assert await builds(life, operation_id="barred", dry_run=True) == ("constraint_forbids", 1)
            assert await builds(life, operation_id="main", dry_run=True) == ("ok", 0)
            assert (await life.act("side", "q-1"))["code"] == "postponed"
            assert (await life.act("barred", "q-2"))["code"] == "constraint_forbids"
            assert (await life.act("main", "q-3"))["code"] == "ok"
            assert (await life.ledger()).items["operation"]["side"].state == "not_started"
            life.desk.max_payload = 1 << 20
            assert await builds(life, operation_id="side", dry_run=True) == ("ok", 0)
            assert (await life.act("side", "q-4"))["code"] == "ok"


async def test_a_reservation_that_stands_is_not_taken_back() -> None:
    with workplace() as folder:
        harness = Harness(folder)
        told(harness)
        async with harness.alive() as life:
            await life.read_all()
            assert (await life.act("side", "q-1"))["code"] == "ok"
            life.desk.max_payload = SMALL
            ask(harness, 600)
            await life.read_all()
            answer = await life.ask("authorize", operation_id="side", request_id="q-1")
            assert (answer["code"], answer["reserved"]) == ("ok", True)
