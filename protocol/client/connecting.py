"""Opening a run: one connection and the tasks that serve it, for the length of a block."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio.abc import TaskStatus

from protocol.client.broker import Broker, Credentials
from protocol.client.run import Run, Settings, opened
from protocol.content import RedactionRules
from protocol.subjects import Channel


@asynccontextmanager
async def connect(
    url: str = "nats://127.0.0.1:4222",
    *,
    run: str,
    tenant: str = "default",
    lane: str = "main",
    session: str | None = None,
    channel: Channel = "event",
    creds: Path | str | None = None,
    tls: ssl.SSLContext | None = None,
    inbox_prefix: str = "_INBOX",
    redaction: RedactionRules | None = RedactionRules(),  # noqa: B008  # a value, never changed
    connect_seconds: float = 10.0,
    ask_seconds: float = 30.0,
    drain_seconds: float = 10.0,
    queue: int = 64,
    content_bytes: int | None = None,
) -> AsyncIterator[Run]:
    """Open a run for the length of the block. Raises NotConnected after ``connect_seconds``, Refused at once.

    ``url`` may list servers, separated by commas. ``session`` is one life of the agent, new by default; the first
    event of each is ``run_started`` or ``run_resumed`` (``take_up`` says that). Give your own only if it was never
    used before. ``channel="authority"`` is for whoever decides over the agent, with the broker's permission for it.
    ``redaction`` takes secrets out of texts as the daemon does; None sends them as they are. ``ask_seconds``: how
    long a question is asked again while nobody is sure. ``queue``: events told and not stored yet; whoever tells
    more waits. A content over ``content_bytes`` (by default half of what the broker takes) is kept apart.

    A lost connection is made again for as long as the block lasts. Leaving the block sends what is queued, for
    ``drain_seconds`` at most, and raises Unsent where that was not enough.
    """
    credentials = Credentials(
        url=url, creds=None if creds is None else Path(creds), tls=tls, inbox_prefix=inbox_prefix
    )
    settings = Settings(
        tenant=tenant,
        lane=lane,
        channel=channel,
        redaction=redaction,
        ask_seconds=ask_seconds,
        drain_seconds=drain_seconds,
        queue=queue,
        content_bytes=content_bytes,
    )
    broker = Broker(credentials, connect_seconds=connect_seconds)
    failure: BaseException | None = None
    # Shielded: whoever is cancelled may still have something to say. Ended below in any case.
    serving = anyio.CancelScope(shield=True)

    async def serve(*, task_status: TaskStatus[None]) -> None:
        with serving:
            await broker.run(task_status=task_status)

    async with anyio.create_task_group() as tasks:
        try:
            await tasks.start(serve)
            async with opened(broker, tasks, settings, run, session) as open_run:
                yield open_run
        except BaseException as error:
            if isinstance(error, anyio.get_cancelled_exc_class() | GeneratorExit):
                raise
            # Raised below: out of the task group it would come as a group of one.
            failure = error
        finally:
            serving.cancel()
    if failure is not None:
        raise failure
