"""A run is not told forgotten while what was said of it before is still on its way: it would stay for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from sidecar import retention
from sidecar.retention import Retention
from storage.records import OutboxRow
from support.bench import LANE, TENANT, Bench, bench

pytestmark = pytest.mark.anyio


def said(number: int) -> OutboxRow:
    return OutboxRow(
        stream="out", subject=f"wk.v1.out.{TENANT}.{LANE}.r.notice", msg_id=f"m{number}", payload=b"{}"
    )


async def ids(made: Bench) -> list[int]:
    return [row.id for row in await made.store.outbox(TENANT, LANE, limit=100)]


async def test_output_committed_before_has_to_leave_and_later_output_need_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path) as made:
        nobody: Any = None
        waiting = Retention(made.desk, nobody, made.packets, made.compactor)
        assert await waiting._left()
        await made.desk.commit(outbox=[said(1), said(2)])
        with monkeypatch.context() as patched:
            patched.setattr(retention, "_LEAVES_SECONDS", 0.01)
            assert not await waiting._left()
        first, second = await ids(made)
        assert await made.store.outbox_span(TENANT, LANE) == (first, second)
        monkeypatch.setattr(retention, "_LEAVES_SECONDS", 60.0)
        outcome: list[bool] = []

        async def wait() -> None:
            outcome.append(await waiting._left())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await made.store.outbox_sent([first])
            await made.store.outbox_sent([second])
        assert outcome == [True]
        assert await ids(made) == []
        assert await made.store.outbox_span("unknown", LANE) == (0, 0)
