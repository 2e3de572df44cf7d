"""Many ask for one large text at once: the daemon holds it once, and gives the memory back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import msgspec
import nats
import pytest

from protocol.client import connect
from support.daemon import LANE, TENANT, DaemonProcess
from support.nats_server import NatsServer

pytestmark = pytest.mark.anyio

TEXT = "line with größe and 🦓 in it\n" * 400_000
ASKERS = 30


async def test_many_askers_of_one_large_text_cost_the_memory_of_one(tmp_path: Path) -> None:
    raw = TEXT.encode()
    with NatsServer() as server, DaemonProcess(server.url, tmp_path).start() as daemon:
        await daemon.ready()
        async with connect(server.url, tenant=TENANT, lane=LANE, run="many") as run:
            await run.run_started(goal="g", model={"name": "m", "context_window": 100_000})
            told = await run.message("user", TEXT)
            await run.status()
            before = peak(daemon.pid)
            seen: list[dict[str, Any]] = []

            async def ask() -> None:
                subject = f"wk.v1.ask.{TENANT}.{LANE}.many.fetch"
                asked = {"refs": [f"event:{told.event_id}"], "max_tokens": 2_000, "after": run.newest}
                while True:
                    reply = await client.request(subject, msgspec.json.encode(asked), timeout=60)
                    answer = msgspec.json.decode(reply.data)
                    if "items" in answer:
                        seen.append(answer["items"][0])
                        return

            client = await nats.connect(server.url)
            try:
                with anyio.fail_after(120):
                    async with anyio.create_task_group() as tasks:
                        for _ in range(ASKERS):
                            tasks.start_soon(ask)
            finally:
                await client.close()
        assert {item["status"] for item in seen} == {"found"}
        assert {item["part"]["total_chars"] for item in seen} == {len(TEXT)}
        assert all(TEXT.startswith(item["event"]["content"]) for item in seen)
        # As text it would be four times as large, and that for each of them.
        assert peak(daemon.pid) - before < 8 * len(raw)


def peak(pid: int) -> int:
    """Bytes the process had in memory at most."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
