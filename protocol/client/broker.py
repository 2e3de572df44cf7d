"""One connection to the broker for as long as it is needed, made anew as often as it is lost.

A session never reconnects: whatever ends it, a new one takes its place, so that there is one way back and a message
is never sent again behind our back. Requests end at once when the connection does. It knows nothing of runs.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio
import nats.errors
from anyio.abc import TaskStatus
from nats.aio.client import Client
from nats.aio.msg import Msg

from protocol.client.errors import NotConnected, Refused

HEADER_RESERVE: Final = 256
"""Bytes left free below the broker's limit: it counts more than payload and headers."""
_PING_SECONDS: Final = 10.0
_CLOSE_SECONDS: Final = 2.0
_FIRST_WAIT: Final = 0.02
_LONGEST_WAIT: Final = 2.0
_DENIED = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]*)\"", re.IGNORECASE)
_REFUSALS: Final = (
    "authorization violation",
    "authentication expired",
    "authentication revoked",
    "invalid user",
)

_log = logging.getLogger("watchkeeper")


class Trouble(Exception):
    """A request without an answer: it may have been received or not. Stays inside the client."""


class NobodyListens(Trouble):
    """Nothing was received, for now."""


class Denied(Exception):
    """The broker's permissions forbid it; nothing was received. Stays inside the client."""


class Reply(NamedTuple):
    """Answer to a request."""

    payload: bytes
    headers: Mapping[str, str]


class Credentials(NamedTuple):
    """How to reach the broker: ``url`` may list several servers, separated by commas."""

    url: str
    creds: Path | None = None
    tls: ssl.SSLContext | None = None
    inbox_prefix: str = "_INBOX"
    name: str = "watchkeeper-agent"


def pause_seconds(failures: int) -> float:
    """Seconds to wait after so many failures in a row (1, 2, …): doubling, at most two, half of it at random."""
    longest: float = min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(failures - 1, 10))
    return longest * (0.5 + 0.5 * random.random())


class Broker:
    """Run ``run`` as one task and use the rest from any task of the same event loop.

    ``on_session`` callbacks are awaited after each connect, before anybody is told of it: they subscribe anew.
    """

    def __init__(self, credentials: Credentials, *, connect_seconds: float) -> None:
        self._credentials = credentials
        self._connect_seconds = connect_seconds
        self._session: _Session | None = None
        self._changed = asyncio.Event()
        self._subscriptions: dict[object, tuple[str, Callable[[bytes], None]]] = {}
        self.on_session: list[Callable[[], Awaitable[None]]] = []
        self.max_payload = 1 << 20

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep a session until cancelled; reports started after the first one.

        Raises Refused, and NotConnected when no server was reached in time, for the first one only.
        """
        failures, first = 0, True
        deadline = anyio.current_time() + self._connect_seconds
        while True:
            try:
                session = await self._open()
            except (Refused, NotConnected) as error:
                failures += 1
                if first and (isinstance(error, Refused) or anyio.current_time() >= deadline):
                    raise
                _log.log(logging.DEBUG if first else logging.WARNING, "broker not reached: %s", error)
                await anyio.sleep(pause_seconds(failures))
                continue
            try:
                self._session, self.max_payload = session, session.max_payload
                for key, (subject, callback) in tuple(self._subscriptions.items()):
                    await session.subscribe(key, subject, callback)
                for told in self.on_session:
                    await told()
                self._tell()
                failures = 0
                if first:
                    task_status.started()
                    first = False
                reason = await session.watch()
                _log.warning("connection lost: %s", reason)
            except Trouble as error:
                failures += 1
                _log.warning("connection lost: %s", error)
            finally:
                self._session = None
                self._tell()
                await session.close()
            await anyio.sleep(pause_seconds(max(1, failures)))

    async def _open(self) -> _Session:
        trouble: NotConnected | Refused | None = None
        for server in self._credentials.url.split(","):
            session = _Session()
            try:
                await session.connect(server.strip(), self._credentials)
                return session
            except (Refused, NotConnected) as error:
                await session.close()
                trouble = error if trouble is None or isinstance(error, Refused) else trouble
            except BaseException:
                await session.close()
                raise
        raise trouble or NotConnected("no server is named")

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def connected(self) -> None:
        """Wait until there is a session."""
        while self._session is None or self._session.lost:
            await self._changed.wait()

    async def request(
        self, subject: str, payload: bytes, *, seconds: float, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Publish and wait for one answer. Raises Trouble, NobodyListens, Denied."""
        session = self._session
        if session is None:
            raise Trouble("not connected")
        return await session.request(subject, payload, seconds=seconds, headers=headers)

    @asynccontextmanager
    async def subscribed(self, subject: str, callback: Callable[[bytes], None]) -> AsyncIterator[None]:
        """Call back for each message of the subject, over every session, until the block ends."""
        key = object()
        self._subscriptions[key] = subject, callback
        try:
            if self._session is not None:
                # Lost meanwhile: the next session subscribes.
                with suppress(Trouble):
                    await self._session.subscribe(key, subject, callback)
            yield
        finally:
            del self._subscriptions[key]
            if self._session is not None:
                with anyio.CancelScope(shield=True):
                    await self._session.unsubscribe(key)


class _Session:
    """A client from connect to close. Its callbacks only set values: an error in one would stop it for ever."""

    def __init__(self) -> None:
        self._client = Client()
        self._connecting: anyio.CancelScope | None = None
        self._error: Exception | None = None
        self._ended = asyncio.Event()
        self._waiting: dict[str, tuple[str, asyncio.Future[Msg | Exception]]] = {}
        self._held: dict[object, Any] = {}
        self._inbox = ""
        self._sent = 0
        self.lost = ""

    async def connect(self, server: str, credentials: Credentials) -> None:
        """Raises Refused, NotConnected."""
        options: dict[str, Any] = {} if credentials.tls is None else {"tls": credentials.tls}
        if credentials.creds is not None:
            options["user_credentials"] = str(credentials.creds)
        with anyio.move_on_after(5.0) as scope:
            self._connecting = scope
            try:
                await self._client.connect(
                    servers=[server],
                    name=credentials.name,
                    allow_reconnect=False,
                    connect_timeout=5,
                    ping_interval=round(_PING_SECONDS),
                    max_outstanding_pings=2,
                    inbox_prefix=credentials.inbox_prefix,
                    error_cb=self._on_error,
                    closed_cb=self._on_closed,
                    **options,
                )
                self._inbox = self._client.new_inbox()
                await self._client.subscribe(f"{self._inbox}.*", cb=self._on_reply)
            except (nats.errors.Error, OSError, ValueError, ssl.SSLError) as error:
                self._error = self._error or error
            finally:
                self._connecting = None
        if self._error is None and not scope.cancelled_caught:
            return
        reason = str(self._error) if self._error is not None else "no answer"
        if any(sign in reason.lower() for sign in _REFUSALS):
            raise Refused(f"{server}: {reason}")
        raise NotConnected(f"{server}: {reason or type(self._error).__name__}")

    @property
    def max_payload(self) -> int:
        return int(self._client.max_payload)

    async def watch(self) -> str:
        """Wait until the session is lost and return why; a ping finds a peer that is silently gone."""
        while not self._ended.is_set():
            with anyio.move_on_after(_PING_SECONDS):
                await self._ended.wait()
                break
            try:
                await self._client.rtt(timeout=round(_PING_SECONDS))
            except (nats.errors.Error, OSError) as error:
                self._end(str(error) or "no pong")
        return self.lost

    async def close(self) -> None:
        """Close within two seconds, whatever the peer does. Safe under cancellation."""
        self._end("closed")
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(_CLOSE_SECONDS), suppress(nats.errors.Error, OSError, AssertionError):
                await self._client.close()
            # A peer that reads no more would keep the socket open for minutes.
            writer = getattr(getattr(self._client, "_transport", None), "_io_writer", None)
            if writer is not None:
                writer.transport.abort()

    async def request(
        self, subject: str, payload: bytes, *, seconds: float, headers: Mapping[str, str] | None
    ) -> Reply:
        if self.lost:
            raise Trouble(f"connection lost: {self.lost}")
        self._sent += 1
        inbox = f"{self._inbox}.{self._sent}"
        future: asyncio.Future[Msg | Exception] = asyncio.get_running_loop().create_future()
        self._waiting[inbox] = (subject, future)
        answer: Msg | Exception | None = None
        try:
            with anyio.move_on_after(seconds):
                await self._client.publish(
                    subject, payload, reply=inbox, headers=None if headers is None else dict(headers)
                )
                answer = await future
        except (nats.errors.Error, OSError) as error:
            raise Trouble(f"cannot publish: {error}") from error
        finally:
            self._waiting.pop(inbox, None)
        if answer is None:
            raise Trouble(f"no answer on {subject} within {seconds:g} s")
        if isinstance(answer, Exception):
            raise answer
        told = answer.headers or {}
        if not answer.data and told.get("Status") == "503":
            raise NobodyListens(f"nobody listens on {subject}")
        return Reply(answer.data, told)

    async def subscribe(self, key: object, subject: str, callback: Callable[[bytes], None]) -> None:
        async def deliver(message: Msg) -> None:
            callback(message.data)

        try:
            self._held[key] = await self._client.subscribe(subject, cb=deliver)
        except (nats.errors.Error, OSError) as error:
            raise Trouble(f"cannot subscribe: {error}") from error

    async def unsubscribe(self, key: object) -> None:
        held = self._held.pop(key, None)
        with suppress(nats.errors.Error, OSError):
            if held is not None:
                await held.unsubscribe()

    async def _on_error(self, error: Exception) -> None:
        if self._connecting is not None:
            self._error = self._error or error
            self._connecting.cancel()
            return
        denied = _DENIED.search(str(error))
        if denied is None:
            _log.warning("broker: %s", error)
            return
        told = False
        reason = Denied(f"no permission for {denied[1].lower()} to {denied[2]}")
        for wanted, future in self._waiting.values():
            mine = denied[1].lower() == "subscription" and denied[2].lower().startswith(self._inbox.lower())
            if not future.done() and (mine or wanted.lower() == denied[2].lower()):
                future.set_result(reason)
                told = True
        if not told:
            _log.warning("broker: %s", error)

    async def _on_closed(self) -> None:
        error = self._client.last_error
        self._end(str(error) if error is not None else "connection closed")

    async def _on_reply(self, message: Msg) -> None:
        _, future = self._waiting.get(message.subject, ("", None))
        if future is not None and not future.done():
            future.set_result(message)

    def _end(self, reason: str) -> None:
        if not self.lost:
            self.lost = reason or "closed"
            self._ended.set()
            for _, future in self._waiting.values():
                if not future.done():
                    future.set_result(Trouble(f"connection lost: {self.lost}"))
