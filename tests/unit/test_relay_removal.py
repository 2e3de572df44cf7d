"""Rows that were sent: they go out once, and leave the store together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from sidecar.relay import Relay
from storage import OutboxRow
from support.bench import LANE, TENANT, bench

pytestmark = pytest.mark.anyio


class Sent:
    """Stands where the publisher stands."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    async def publish(self, stream: str, subject: str, payload: bytes, msg_id: str, *more: Any) -> int:
        self.ids.append(msg_id)
        return len(self.ids)

    async def until(self, count: int) -> None:
        with anyio.fail_after(30):
            while len(self.ids) < count:
                await anyio.sleep(0.005)


async def test_rows_leave_the_store_together_and_go_out_once(tmp_path: Path) -> None:
    now = 100.0
    async with bench(tmp_path) as made:
        desk, sent = made.desk, Sent()
        desk.mono = lambda: now

        async def hand_over(number: int) -> None:
            async with desk.lock:
                subject = f"wk.v1.out.{TENANT}.{LANE}.r1.notice"
                row = OutboxRow(stream="out", subject=subject, msg_id=f"m{number}", payload=b"{}")
                await desk.commit(outbox=[row])
            await sent.until(number)

        async with anyio.create_task_group() as tasks:
            publisher: Any = sent
            tasks.start_soon(Relay(desk, publisher).run)
            # The first one leaves at once; those that follow within a second wait for each other.
            await hand_over(1)
            await _left(made.store, 0)
            await hand_over(2)
            await hand_over(3)
            desk.wake_relay()
            await _left(made.store, 0)
            await hand_over(4)
            now += 2
            await hand_over(5)
            await _left(made.store, 0)
            await hand_over(6)
            tasks.cancel_scope.cancel()
        assert await made.store.outbox_count(TENANT, LANE) == 0
        assert sent.ids == [f"m{number}" for number in range(1, 7)]


async def _left(store: Any, count: int) -> None:
    with anyio.fail_after(30):
        while await store.outbox_count(TENANT, LANE) != count:
            await anyio.sleep(0.005)
