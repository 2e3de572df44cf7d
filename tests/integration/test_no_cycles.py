"""The collector looks seldom: so nothing on the way of a message may wait for it, accepted or refused."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from support.bench import bench, event, started

pytestmark = pytest.mark.anyio

REFUSED: tuple[bytes, ...] = (
    b'{"v":1,' + b" " * 1_000,
    b'{"v":1,"id":"e","type":"message","note":"\\u0000"}',
    b"[]",
    b"\xff",
    b'{"v":1,"id":"e","type":"message","at":"2026","role":"user","content":"x"}',
    b'{"v":1,"id":"e","type":"nothing.known","at":"2026-11-30T09:12:00Z"}',
)


async def test_no_message_leaves_anything_to_the_collector(tmp_path: Path) -> None:
    run = "r1"
    async with bench(tmp_path) as made:
        await made.tell(run, started(), *REFUSED)
        gc.collect()
        gc.disable()
        try:
            for number in range(20):
                await made.tell(
                    run,
                    event("message", f"m{number}", role="assistant", content="password=abc123xyz and more"),
                    event("tool.called", f"c{number}", call_id=f"c{number}", tool="t", arguments={"a": [1]}),
                    event("tool.returned", f"t{number}", call_id=f"c{number}", status="ok", content="done"),
                    event("message", f"m{number}", role="assistant", content="other words"),
                    *REFUSED,
                )
            left = gc.collect()
        finally:
            gc.enable()
        assert made.desk.metrics.total("events_rejected_total") == 21 * len(REFUSED) + 20
        # What a test's own parts may leave does not grow with the messages.
        assert left < 20
