"""A summariser as others run one: a plain client that answers ``wk.v1.summarize`` requests as a test says.

What it is told to do is said per run; where nothing is said it answers with a sound summary.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec
import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from protocol.codec import encode
from protocol.summary import SummarizeRequest
from sidecar.core.digest import digest

Json = dict[str, Any]
USAGE = {"input_tokens": 1_000, "output_tokens": 50}


@dataclass
class Asked:
    """One request as it came, and how to answer it."""

    message: Msg
    service: Service

    @property
    def body(self) -> Json:
        value: Json = json.loads(self.message.data)
        return value

    @property
    def subject(self) -> str:
        return self.message.subject

    def sound(self) -> Json:
        """A summary that passes every check."""
        return sound(self.message.data)

    async def answer(self, payload: bytes | Any, headers: dict[str, str] | None = None) -> None:
        raw = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        await self.service.client.publish(self.message.reply, raw, headers=headers)
        await self.service.client.flush()

    async def summary(self, value: Any, **more: Any) -> None:
        await self.answer({"v": 1, "summary": value, "usage": USAGE, **more})


Behaviour = Callable[[Asked], Awaitable[None]]


@dataclass
class Service:
    """``script[run]`` are the behaviours of that run's next requests; ``always[run]`` of all others."""

    client: Client
    script: dict[str, list[Behaviour]] = field(default_factory=dict)
    always: dict[str, Behaviour] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)

    def of(self, run: str) -> list[Asked]:
        """The requests about a run, so far."""
        return [item for item in self.asked if item.subject.split(".")[5] == run]


def sound(request: bytes) -> Json:
    """The deterministic summary of a request, as plain JSON."""
    value: Json = json.loads(encode(digest(msgspec.json.decode(request, type=SummarizeRequest))))
    return value


async def well(asked: Asked) -> None:
    """Answer with a sound summary."""
    await asked.summary(asked.sound(), finish_reason="stop")


async def silent(asked: Asked) -> None:
    """Never answer."""


def says(payload: bytes | Any, headers: dict[str, str] | None = None) -> Behaviour:
    """Answer with exactly this."""

    async def behaviour(asked: Asked) -> None:
        await asked.answer(payload, headers)

    return behaviour


def told(value: Any, **more: Any) -> Behaviour:
    """Answer with this in the place of a summary."""

    async def behaviour(asked: Asked) -> None:
        await asked.summary(value, **more)

    return behaviour


def altered(change: Callable[[Json, Json], None]) -> Behaviour:
    """Answer with a sound summary after ``change(summary, request)``."""

    async def behaviour(asked: Asked) -> None:
        summary = asked.sound()
        change(summary, asked.body)
        await asked.summary(summary)

    return behaviour


class Held:
    """A behaviour that waits to be let go; ``reached`` tells that it was asked."""

    def __init__(self, then: Behaviour = well) -> None:
        self.reached = anyio.Event()
        self.release = anyio.Event()
        self._then = then

    async def __call__(self, asked: Asked) -> None:
        self.reached.set()
        await self.release.wait()
        await self._then(asked)


@asynccontextmanager
async def summary_service(url: str, subject: str = "wk.v1.summarize.>") -> AsyncIterator[Service]:
    """The service on this broker, until the block ends. Requests are answered side by side."""
    client = await nats.connect(url)
    service = Service(client)
    async with anyio.create_task_group() as tasks:

        async def take(message: Msg) -> None:
            asked = Asked(message, service)
            run = message.subject.split(".")[5]
            service.asked.append(asked)
            waiting = service.script.get(run)
            behaviour = waiting.pop(0) if waiting else service.always.get(run, well)
            tasks.start_soon(behaviour, asked)

        try:
            await client.subscribe(subject, cb=take)
            await client.flush()
            yield service
        finally:
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await client.close()
