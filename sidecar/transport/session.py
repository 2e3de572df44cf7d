"""One client of the broker, from connect to close: connecting, the check of the server, requests,
subscriptions.

A session never reconnects. Whatever ends it, it is lost for good and a new one takes its place, so that
there is one way back to health instead of two. Every callback of the client only sets values: an
exception in one would stop the client for ever. Requests have their own reply inbox, so that a lost
connection or a denied subject ends them at once and not at their time-out.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
import msgspec
import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from sidecar.transport import tls
from sidecar.transport.arrivals import Arrival, Arrivals, Sink, readable
from sidecar.transport.credentials import CredentialsFile
from sidecar.transport.errors import (
    ASK_FOR,
    ApiError,
    Denied,
    NoResponders,
    Refused,
    TimedOut,
    TooLarge,
    TransportError,
    Unavailable,
    without_credentials,
)
from sidecar.transport.wire import (
    API,
    HEADER_RESERVE,
    Incoming,
    LinkSettings,
    Reply,
    decode_api,
    headers_size,
)

MIN_SERVER: Final = (2, 11)
MIN_API_LEVEL: Final = 1
_PENDING_SIZE: Final = 16 * 1024 * 1024
_CLOSE_SECONDS: Final = 2.0
_MOST_GIVEN_UP: Final = 256
_NO_JETSTREAM: Final = frozenset({10035, 10039, 10076})
_LOG_EVERY_SECONDS: Final = 30.0
_REFUSALS: Final = (
    "authorization violation",
    "authentication expired",
    "authentication revoked",
    "authentication timeout",
    "invalid user credentials",
    "account authentication",
)
_DENIED = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]*)\"")
_LINE_BREAKS = re.compile(r"[\r\n]+")

log = structlog.get_logger(__name__)


class _Client(Client):
    """The client, proof against what strangers may put on the wire.

    It reads subject, reply and the first header line as UTF-8 in its own reader, which an error ends: one
    message stored under a subject that is none would stop whoever reads the stream, again and again.
    And it says nothing in the clear where TLS is wanted: left to itself it does as the server's greeting says.
    """

    tls_wanted = False

    def __init__(self) -> None:
        super().__init__()
        self._ps = self.arrivals = Arrivals(self)

    async def subscribe_with(
        self, queued: Callable[[Msg], Awaitable[None]], subject: str, sink: Sink | None
    ) -> Any:
        """Subscribe without limits. Instead of ``queued`` the ``sink`` is called as messages are read."""
        if sink is not None:
            # Before the server is asked: its first message may be read before the answer.
            self.arrivals.sinks[b"%d" % (self._sid + 1)] = sink
        return await self.subscribe(subject, cb=queued, pending_msgs_limit=0, pending_bytes_limit=0)

    async def _process_msg(self, sid: Any, subject: Any, reply: Any, data: Any, headers: Any) -> None:
        sink = self.arrivals.sinks.get(b"%d" % sid)
        if sink is None or sid not in self._subs:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        found = await self._process_headers(headers)
        sink(Arrival(readable(bytes(subject)), readable(bytes(reply)), data, found))

    def _connect_command(self) -> bytes:
        if self.tls_wanted and not self._server_info.get("tls_required"):
            raise nats.errors.SecureConnWantedError
        return bytes(super()._connect_command())

    async def _process_headers(self, headers: Any) -> Any:
        try:
            return await super()._process_headers(headers)
        except (ValueError, IndexError):
            return None

    def _build_message(self, sid: Any, subject: Any, reply: Any, data: Any, headers: Any) -> Any:
        subject, reply = readable(bytes(subject)).encode(), readable(bytes(reply)).encode()
        return super()._build_message(sid, subject, reply, data, headers)


class Subscription:
    """A subscription of one session. It ends with the session at the latest."""

    def __init__(self, inner: Any, sinks: dict[bytes, Sink]) -> None:
        self._inner = inner
        self._sinks = sinks

    async def close(self) -> None:
        """Stop deliveries. Idempotent; never raises when the session is gone already."""
        self._sinks.pop(b"%d" % self._inner._id, None)
        with suppress(nats.errors.Error, OSError):
            await self._inner.unsubscribe()


class Session:
    """A connected client. Built by ``Session.open``; ``lost`` says why it ended, None while it lives."""

    def __init__(self, settings: LinkSettings) -> None:
        self._settings = settings
        self._client = _Client()
        self._connecting: anyio.CancelScope | None = None
        self._connect_error: BaseException | None = None
        self._inbox = ""
        self._inbox_denied: str | None = None
        self._sent = 0
        self._waiting: dict[str, tuple[str, asyncio.Future[Incoming | TransportError]]] = {}
        self._given_up: dict[str, Callable[[], None]] = {}
        self._ended = asyncio.Event()
        self._logged: dict[str, float] = {}
        self._at_end: set[Callable[[], None]] = set()
        self.lost: str | None = None

    # -- life --------------------------------------------------------------------------------------

    @classmethod
    async def open(cls, settings: LinkSettings, server: str) -> Session:
        """Connect to one server and check it. Raises Refused or Unavailable, and leaves nothing open then."""
        session = cls(settings)
        try:
            await session._connect(server)
            await session._verify(server)
        except BaseException:
            await session.close()
            raise
        return session

    async def _connect(self, server: str) -> None:
        options: dict[str, Any] = {}
        if self._settings.creds is not None:
            creds = CredentialsFile(self._settings.creds)
            creds.check()
            options = {"user_jwt_cb": creds.jwt, "signature_cb": creds.sign}
        host = without_credentials(server)
        self._client.tls_wanted = tls.wanted(self._settings, server)
        context = tls.client_context(self._settings)
        if context is not None:
            options["tls"] = context
        with anyio.move_on_after(self._settings.connect_timeout) as scope:
            self._connecting = scope
            try:
                await self._client.connect(
                    servers=[server],
                    name=self._settings.name,
                    allow_reconnect=False,
                    connect_timeout=max(1, round(self._settings.connect_timeout)),
                    ping_interval=max(1, round(self._settings.ping_interval)),
                    max_outstanding_pings=2,
                    pending_size=_PENDING_SIZE,
                    error_cb=self._on_error,
                    closed_cb=self._on_closed,
                    **options,
                )
                self._inbox = self._client.new_inbox()
                await self._client.subscribe(f"{self._inbox}.*", cb=self._on_reply)
            except (nats.errors.Error, OSError, TimeoutError) as error:
                self._connect_error = self._connect_error or error
            finally:
                self._connecting = None
        if self._connect_error is not None:
            raise _connect_failure(host, self._connect_error)
        if scope.cancelled_caught:
            raise Unavailable(f"no answer from {host} within {self._settings.connect_timeout:g} s")

    async def _verify(self, server: str) -> None:
        version = str(self._client.connected_server_version).removeprefix("<nats server v").removesuffix(">")
        found = re.match(r"(\d+)\.(\d+)", version)
        if found is None or (int(found[1]), int(found[2])) < MIN_SERVER:
            raise Refused(f"nats-server {version} is too old: 2.11 or newer is needed")
        for attempt in range(3):
            try:
                info = await self.api("INFO", timeout=self._settings.connect_timeout)
                break
            except NoResponders as error:
                # A cluster that is just starting says this too, hence not at the first time.
                if attempt == 2:
                    raise Refused("JetStream is off on this server") from error
                await anyio.sleep(0.3)
            except Denied as error:
                who = _user(self._settings, server)
                raise Refused(f"{without_credentials(server)}: {who}: {error.reason}: {ASK_FOR}") from error
            except ApiError as error:
                if error.err_code in _NO_JETSTREAM:
                    raise Refused(f"JetStream is off for this account: {error.description}") from error
                raise Unavailable(f"JetStream does not answer: {error}") from error
        level = info.get("api", {}).get("level", 0)
        if level < MIN_API_LEVEL:
            raise Refused(f"JetStream API level {level} of nats-server {version} is too old: 1 is needed")

    async def watch(self) -> str:
        """Wait until the session is lost and return why.

        Sends a ping every ``ping_interval`` and ends the session when no pong comes in that time: this
        also finds a half-open connection and a client whose reader died.
        """
        interval = self._settings.ping_interval
        while not self._ended.is_set():
            with anyio.move_on_after(interval):
                await self._ended.wait()
                break
            if self._client.is_closed:
                self._end("connection closed")
                break
            try:
                await self._client.rtt(timeout=max(1, round(interval)))
            except (nats.errors.Error, OSError) as error:
                late = isinstance(error, TimeoutError)
                self._end(f"no pong within {interval:g} s" if late else str(error))
        return self.lost or "connection closed"

    async def close(self) -> None:
        """Close the client, within two seconds whatever the peer does. Idempotent. Safe under
        cancellation.
        """
        self._end("closed by us")
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(_CLOSE_SECONDS), suppress(nats.errors.Error, OSError, AssertionError):
                await self._client.close()
            # A peer that reads no more would keep the socket's buffer, and the socket, open for minutes.
            writer = getattr(getattr(self._client, "_transport", None), "_io_writer", None)
            if writer is not None:
                writer.transport.abort()

    # -- callbacks: they only set values -----------------------------------------------------------

    async def _on_error(self, error: Exception) -> None:
        scope = self._connecting
        if scope is not None:
            self._connect_error = self._connect_error or error
            scope.cancel()
            return
        text = _LINE_BREAKS.sub(" ", without_credentials(str(error)))
        denied = _DENIED.search(text)
        if denied is not None:
            self._deny(denied[1], denied[2])
        self._log(text or type(error).__name__)

    def _log(self, text: str) -> None:
        now = time.monotonic()
        if now - self._logged.get(text, -_LOG_EVERY_SECONDS) < _LOG_EVERY_SECONDS:
            return
        if len(self._logged) >= 100:
            self._logged.clear()
        self._logged[text] = now
        log.warning("nats error", error=text[:300])

    def _deny(self, what: str, subject: str) -> None:
        if what == "subscription":
            if subject.startswith(self._inbox.lower()):
                self._inbox_denied = f"no permission to subscribe to {self._inbox}.*"
                self._fail_waiting(Denied(self._inbox_denied), None)
            return
        self._fail_waiting(Denied(f"no permission to publish to {subject}"), subject)

    async def _on_closed(self) -> None:
        error = self._client.last_error
        self._end(without_credentials(str(error)) if error is not None else "connection closed")

    async def _on_reply(self, message: Msg) -> None:
        entry = self._waiting.get(message.subject)
        if entry is not None and not entry[1].done():
            entry[1].set_result(message)
        elif message.data and (on_late := self._given_up.pop(message.subject, None)) is not None:
            on_late()

    def _give_up(self, inbox: str, on_late: Callable[[], None]) -> None:
        """Remember whom a late answer would have been for; the oldest are forgotten."""
        if len(self._given_up) >= _MOST_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]
        self._given_up[inbox] = on_late

    def _end(self, reason: str) -> None:
        if self.lost is None:
            self.lost = reason
            self._ended.set()
            self._fail_waiting(Unavailable(f"connection lost: {reason}"), None)
            for callback in tuple(self._at_end):
                callback()

    def _fail_waiting(self, error: TransportError, subject: str | None) -> None:
        for wanted, future in self._waiting.values():
            if future.done():
                continue
            if subject is None:
                future.set_result(error)
            elif wanted.lower() == subject:
                # As it is written: the client tells us errors in small letters.
                future.set_result(Denied(str(error).replace(subject, wanted)))

    # -- primitives --------------------------------------------------------------------------------

    @property
    def max_payload(self) -> int:
        """The largest message in bytes, headers included, that the server takes."""
        return int(self._client.max_payload)

    @property
    def discovered(self) -> list[str]:
        """Other servers of the cluster as this one told them, without credentials."""
        return [server.geturl() for server in self._client.discovered_servers]

    def at_end(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back once when the session is lost. Returns what takes the callback away again."""
        self._at_end.add(callback)
        return lambda: self._at_end.discard(callback)

    def jetstream(self) -> JetStreamContext:
        """The client's own JetStream calls. For this package, where there is no simpler way."""
        return self._client.jetstream()

    def new_inbox(self) -> str:
        """A subject nobody else knows."""
        return str(self._client.new_inbox())

    async def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Hand a message to the connection, without waiting for anybody's answer.

        Raises TooLarge before anything is sent (the client would be closed for good otherwise), Unavailable.
        """
        size = len(payload) + HEADER_RESERVE + headers_size(headers)
        if size > self.max_payload:
            raise TooLarge(self.max_payload, size)
        if self.lost is not None:
            raise Unavailable(f"connection lost: {self.lost}")
        with anyio.move_on_after(self._settings.ping_interval) as scope:
            try:
                await self._client.publish(
                    subject, payload, reply=reply, headers=dict(headers) if headers is not None else None
                )
            except (nats.errors.Error, OSError) as error:
                raise Unavailable(f"cannot publish: {error}") from error
        if scope.cancelled_caught:
            raise Unavailable("cannot publish: the connection takes no more data")

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float,  # noqa: ASYNC109
        on_late: Callable[[], None] | None = None,
    ) -> Reply:
        """Publish and wait for one answer, ``timeout`` seconds at most. ``on_late`` is called once if the answer
        comes after nobody waits for it any more (time-out or cancellation); it is discarded all the same.

        Raises NoResponders, TimedOut, Denied, Unavailable, TooLarge.
        """
        if self._inbox_denied is not None:
            raise Denied(self._inbox_denied)
        self._sent += 1
        inbox = f"{self._inbox}.{self._sent}"
        future: asyncio.Future[Incoming | TransportError] = asyncio.get_running_loop().create_future()
        self._waiting[inbox] = (subject, future)
        answer: Incoming | TransportError | None = None
        try:
            with anyio.move_on_after(timeout):
                await self.publish(subject, payload, reply=inbox, headers=headers)
                answer = await future
        finally:
            self._waiting.pop(inbox, None)
            if answer is None and on_late is not None:
                self._give_up(inbox, on_late)
        if answer is None:
            raise TimedOut(f"no answer on {subject} within {timeout:g} s")
        if isinstance(answer, TransportError):
            raise answer
        replied = answer.headers or {}
        if not answer.data and replied.get("Status") == "503":
            raise NoResponders(f"nobody listens on {subject}")
        return Reply(answer.data, replied)

    async def api(
        self,
        verb: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float,  # noqa: ASYNC109
    ) -> dict[str, Any]:
        """One request of JetStream's interface. Raises ApiError beside what ``request`` raises."""
        payload = b"" if body is None else msgspec.json.encode(body)
        reply = await self.request(f"{API}.{verb}", payload, timeout=timeout)
        return decode_api(reply.payload)

    async def subscribe(
        self, subject: str, callback: Callable[[Incoming], None], *, at_once: bool = False
    ) -> Subscription:
        """Call back for each message, in order, on the event loop. Nothing is ever dropped here: bound
        it yourself. ``at_once``: from within the client's reader, which an error of the callback would end.

        Raises Unavailable.
        """
        if self.lost is not None:
            raise Unavailable(f"connection lost: {self.lost}")

        async def queued(message: Msg) -> None:
            callback(message)

        try:
            inner = await self._client.subscribe_with(queued, subject, callback if at_once else None)
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"cannot subscribe: {error}") from error
        return Subscription(inner, self._client.arrivals.sinks)


def _user(settings: LinkSettings, server: str) -> str:
    """Whom the broker takes us for, as far as it may be said: a name without a password may be a token."""
    if settings.creds is not None:
        return f"user of {settings.creds}"
    given = urlsplit(server)
    return f"user {given.username}" if given.username and given.password else "user as nats.url tells it"


def _connect_failure(host: str, error: BaseException) -> TransportError:
    if isinstance(error, TransportError):
        return error
    text = without_credentials(str(error)) or type(error).__name__
    if isinstance(error, ssl.SSLCertVerificationError):
        return Refused(f"{host}: certificate not trusted: {error.verify_message}")
    if isinstance(error, nats.errors.SecureConnWantedError):
        return Refused(f"{host}: {tls.NOT_OFFERED}")
    if any(phrase in text.lower() for phrase in _REFUSALS):
        return Refused(f"{host} refuses our credentials: {text}")
    return Unavailable(f"cannot connect to {host}: {text}")
