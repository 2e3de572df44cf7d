"""Questions to a lane as a NATS micro service: one subscription without queue group, and discovery.

The client's own service wiring always joins a queue group, which would hand a question to whoever
watches the lane; so the documented answers of discovery are given here. What a question means is the
handler's business.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from importlib import metadata
from typing import Any, Final

import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup, TaskStatus

from protocol import subjects
from sidecar.tracing import HEADER, carrying
from sidecar.transport.errors import TooLarge, Unavailable
from sidecar.transport.jetstream import Link
from sidecar.transport.wire import Incoming

SERVICE: Final = "watchkeeper"
ERROR_CODE: Final = "Nats-Service-Error-Code"
ERROR: Final = "Nats-Service-Error"

_TYPES: Final = "io.nats.micro.v1"
_QUEUED: Final = 1024
_OURS: Final = "wk."
_TOO_LARGE: Final = 413
_BUSY: Final = 503

log = structlog.get_logger(__name__)


class AskAnswer(msgspec.Struct, frozen=True):
    """What goes back to the asker. ``error_code`` and ``error`` (a short text) are set together, for an
    error.
    """

    body: bytes
    error_code: int | None = None
    error: str | None = None


Handler = Callable[[str, str, bytes], Awaitable[AskAnswer | None]]
"""(run, verb, payload) to an answer; None stays silent, as who is not sure of its lease must."""


async def serve_asks(
    link: Link,
    tenant: str,
    lane: str,
    handler: Handler,
    *,
    concurrency: int = 64,
    wall: Callable[[], datetime] = lambda: datetime.now(UTC),
    task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Answer the lane's questions until cancelled, through every new connection. Started: the first
    subscription.

    Each question has its own task, ``concurrency`` at a time; a thousand more wait, others are answered
    ``unavailable``. The handler answers its own errors: an exception of it ends this call.
    """
    async with anyio.create_task_group() as tasks:
        service = _Service(link, tenant, lane, handler, concurrency, wall(), tasks)
        generation = 0
        started = False
        while True:
            generation = await link.wait_connected(generation)
            try:
                await service.subscribe()
            except Unavailable:
                continue
            if not started:
                task_status.started()
                started = True
            await link.wait_lost(generation)


class _Service:
    def __init__(
        self,
        link: Link,
        tenant: str,
        lane: str,
        handler: Handler,
        concurrency: int,
        started: datetime,
        tasks: TaskGroup,
    ) -> None:
        self._link = link
        self._subject = subjects.ask_filter(tenant, lane)
        self._handler = handler
        self._slots = anyio.Semaphore(concurrency)
        self._most = concurrency + _QUEUED
        self._tasks = tasks
        self._open = 0
        self._started = started
        self._requests = 0
        self._errors = 0
        self._nanoseconds = 0
        self._last_error = ""
        self._identity = {
            "name": SERVICE,
            "id": uuid.uuid4().hex,
            "version": _version(),
            "metadata": {"tenant": tenant, "lane": lane},
        }

    async def subscribe(self) -> None:
        """For the life of the present session."""
        await self._link.subscribe(self._subject, self._asked)
        for verb, describe in (("PING", self._ping), ("INFO", self._info), ("STATS", self._stats)):
            answer = self._discovery(describe)
            for suffix in ("", f".{SERVICE}", f".{SERVICE}.{self._identity['id']}"):
                await self._link.subscribe(f"$SRV.{verb}{suffix}", answer)

    # -- questions ------------------------------------------------------------------------------------

    def _asked(self, message: Incoming) -> None:
        if not _may_answer(message.reply):
            return
        self._requests += 1
        if self._open >= self._most:
            self._tasks.start_soon(
                self._reply, message.reply, _failure(_BUSY, "unavailable", "too many questions")
            )
            return
        self._open += 1
        self._tasks.start_soon(self._serve, message)

    async def _serve(self, message: Incoming) -> None:
        began = time.perf_counter_ns()
        try:
            async with self._slots:
                parts = message.subject.split(".")
                with carrying((message.headers or {}).get(HEADER)):
                    answer = await self._handler(parts[-2], parts[-1], message.data)
                if answer is not None:
                    await self._reply(message.reply, answer)
        finally:
            self._open -= 1
            self._nanoseconds += time.perf_counter_ns() - began

    async def _reply(self, reply: str, answer: AskAnswer) -> None:
        try:
            await self._send(reply, answer)
        except TooLarge as error:
            text = f"the answer of {error.size} bytes is over the broker's limit of {error.limit}"
            await self._send(reply, _failure(_TOO_LARGE, "too_large", text))
        except Unavailable as error:
            # The asker's request ran out with its connection or ours; it asks again.
            log.debug("answer not sent", reason=error.reason)

    async def _send(self, reply: str, answer: AskAnswer) -> None:
        headers: dict[str, str] | None = None
        if answer.error_code is not None:
            self._errors += 1
            self._last_error = answer.error or ""
            headers = {ERROR_CODE: str(answer.error_code), ERROR: self._last_error[:300]}
        await self._link.publish(reply, answer.body, headers=headers)

    # -- discovery ------------------------------------------------------------------------------------

    def _discovery(self, describe: Callable[[], dict[str, Any]]) -> Callable[[Incoming], None]:
        def answer(message: Incoming) -> None:
            if _may_answer(message.reply):
                body = msgspec.json.encode(describe())
                self._tasks.start_soon(self._reply, message.reply, AskAnswer(body))

        return answer

    def _ping(self) -> dict[str, Any]:
        return {"type": f"{_TYPES}.ping_response", **self._identity}

    def _info(self) -> dict[str, Any]:
        endpoint = {"name": "ask", "subject": self._subject, "queue_group": "", "metadata": {}}
        return {
            "type": f"{_TYPES}.info_response",
            **self._identity,
            "description": "Answers what an agent may do and what it must know to continue.",
            "endpoints": [endpoint],
        }

    def _stats(self) -> dict[str, Any]:
        endpoint = {
            "name": "ask",
            "subject": self._subject,
            "queue_group": "",
            "num_requests": self._requests,
            "num_errors": self._errors,
            "last_error": self._last_error,
            "processing_time": self._nanoseconds,
            "average_processing_time": self._nanoseconds // max(1, self._requests),
        }
        started = self._started.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
        return {
            "type": f"{_TYPES}.stats_response",
            **self._identity,
            "started": started,
            "endpoints": [endpoint],
        }


def _may_answer(reply: str) -> bool:
    """Whether an answer is wanted, and not on a subject that a stream stores or the broker acts on: the asker
    chooses it, and would otherwise write there with our permissions."""
    return reply != "" and not reply.startswith((_OURS, "$"))


def _failure(status: int, code: str, message: str) -> AskAnswer:
    body = msgspec.json.encode({"error": {"code": code, "message": message}})
    return AskAnswer(body, status, code)


def _version() -> str:
    try:
        return metadata.version("watchkeeper-sidecar")
    except metadata.PackageNotFoundError:
        return "0.0.0"
