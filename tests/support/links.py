"""A link to a test's server, and streams to speak of. Real client, real server."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from sidecar.transport.jetstream import Link, LinkSettings


class States:
    """Every state a link told."""

    def __init__(self) -> None:
        self.told: list[tuple[bool, str]] = []

    def __call__(self, connected: bool, reason: str) -> None:
        self.told.append((connected, reason))


def settings(url: str, *, creds: Path | None = None, **times: float) -> LinkSettings:
    """Settings with a short ping interval."""
    wanted = {"connect_timeout": 5.0, "start_timeout": 20.0, "ping_interval": 2.0, **times}
    return LinkSettings(url=url, creds=creds, name="watchkeeper-test", **wanted)


@asynccontextmanager
async def linked(url: str, states: States | None = None, **times: float) -> AsyncIterator[Link]:
    """A link that is connected, and stopped afterwards."""
    link = Link(settings(url, **times), states or States())
    async with anyio.create_task_group() as group:
        with anyio.fail_after(30):
            await group.start(link.run)
        try:
            yield link
        finally:
            group.cancel_scope.cancel()


async def eventually(
    condition: Callable[[], bool] | Callable[[], Awaitable[bool]], what: str, seconds: float = 30.0
) -> None:
    """Poll until the condition holds. Raises AssertionError naming ``what``."""
    deadline = time.monotonic() + seconds
    while True:
        held = condition()
        if not isinstance(held, bool):
            held = await held
        if held:
            return
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:g} s"
        await anyio.sleep(0.02)
