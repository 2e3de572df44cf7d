"""The broker's client for the life of the process: builds a session, watches it, builds the next one.

The supervisor decides only between two things: at start a refusal ends the process, everything else is
tried again. It knows nothing of streams, lanes or messages.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import anyio
import structlog
from anyio.abc import TaskStatus

from sidecar.transport import tls
from sidecar.transport.errors import Refused, Unavailable
from sidecar.transport.session import Session, Subscription
from sidecar.transport.wire import Incoming, LinkSettings, Reply

__all__ = ["Link", "LinkSettings"]

DEFAULT_MAX_PAYLOAD: Final = 1024 * 1024
_FIRST_WAIT: Final = 0.05
_LONGEST_WAIT: Final = 2.0
_STEADY_SECONDS: Final = 5.0
_REMIND_SECONDS: Final = 30.0
_STOPPED: Final = "stopped"

log = structlog.get_logger(__name__)


class Link:
    """Supervisor of the client. Run ``run`` as one task; use the rest from any task of the same event loop.

    ``on_state(connected, reason)`` is called at each change, from the supervisor's task; it must not raise.
    ``generation`` counts sessions: 0 before the first. A subscription or consumer belongs to one generation.
    """

    def __init__(
        self,
        settings: LinkSettings,
        on_state: Callable[[bool, str], None],
        *,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._settings = settings
        self._on_state = on_state
        self._jitter = jitter
        self._session: Session | None = None
        self._changed = asyncio.Event()
        self._told: tuple[bool, str] | None = None
        self._max_payload = DEFAULT_MAX_PAYLOAD
        self._discovered: list[str] = []
        self.generation = 0
        self.reason = "not connected yet"

    # -- supervision -------------------------------------------------------------------------------

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep a session until cancelled. Reports started after the first one.

        Raises Refused when the first server that answers refuses us (credentials, version, JetStream
        off). A server that cannot be reached is tried again for ever; it is reported after
        ``start_timeout``.
        """
        began = time.monotonic()
        failures = 0
        try:
            while True:
                try:
                    session = await self._open()
                except Refused as refusal:
                    if self.generation == 0:
                        raise
                    self._report(False, refusal.reason)
                    failures += 1
                    await self._pause(failures)
                    continue
                except Unavailable as trouble:
                    self.reason = trouble.reason
                    if self.generation == failures == 0:
                        log.warning("nats not reached yet", reason=trouble.reason[:300])
                    if self.generation > 0 or time.monotonic() - began >= self._settings.start_timeout:
                        self._report(False, trouble.reason)
                    failures += 1
                    await self._pause(failures)
                    continue
                since = time.monotonic()
                self._install(session)
                if self.generation == 1:
                    task_status.started()
                reason = await session.watch()
                self._drop(session, reason)
                await session.close()
                failures = 1 if time.monotonic() - since >= _STEADY_SECONDS else failures + 1
                await self._pause(failures)
        finally:
            if self._session is not None:
                last = self._session
                self._drop(last, _STOPPED)
                await last.close()

    async def _open(self) -> Session:
        servers = self._settings.servers
        trouble: Unavailable | None = None
        refusal: Refused | None = None
        for server in dict.fromkeys([*servers, *self._discovered]):
            try:
                return await Session.open(self._settings, server)
            except Unavailable as error:
                trouble = trouble or error
            except Refused as error:
                refusal = refusal or error
        if refusal is not None:
            raise refusal
        raise trouble or Unavailable("no server configured")

    def _install(self, session: Session) -> None:
        self._session = session
        self._max_payload = session.max_payload
        self.generation += 1
        self._report(True, "")

    def _drop(self, session: Session, reason: str) -> None:
        if not tls.wanted(self._settings, self._settings.url):
            # Told addresses are numbers; a certificate names hosts, so under TLS only the configured
            # ones count.
            self._discovered = session.discovered or self._discovered
        self._session = None
        self._report(False, reason)

    def _report(self, connected: bool, reason: str) -> None:
        self.reason = reason
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if self._told == (connected, reason):
            return
        self._told = (connected, reason)
        if connected:
            log.info("nats connected", generation=self.generation)
        elif reason == _STOPPED:
            log.info("nats closed", generation=self.generation)
        else:
            log.warning("nats disconnected", reason=reason[:300], generation=self.generation)
        self._on_state(connected, reason)

    async def _pause(self, failures: int) -> None:
        longest = min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** min(failures - 1, 10))
        await anyio.sleep(longest * (0.5 + 0.5 * self._jitter()))

    # -- state -------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether a checked session is up now."""
        return self._session is not None and self._session.lost is None

    @property
    def max_payload(self) -> int:
        """The broker's limit in bytes, headers included; the last one known while not connected."""
        return self._max_payload

    def session(self) -> Session:
        """The session that is up. Raises Unavailable with the reason. For this package."""
        session = self._session
        if session is None or session.lost is not None:
            raise Unavailable(f"not connected: {self.reason or 'connection lost'}")
        return session

    async def wait_connected(self, after: int = 0) -> int:
        """Wait for a session of a generation greater than ``after`` and return its generation."""
        while not (self.connected and self.generation > after):
            await self._changed.wait()
        return self.generation

    async def wait_lost(self, generation: int) -> None:
        """Wait until the session of that generation is gone."""
        while self.generation == generation and self._session is not None:
            await self._changed.wait()

    # -- primitives --------------------------------------------------------------------------------

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = 5.0,  # noqa: ASYNC109
        on_late: Callable[[], None] | None = None,
    ) -> Reply:
        """Publish and wait for one answer, ``timeout`` seconds at most. Does not wait for a connection.
        ``on_late`` is told of an answer that came when nobody waited for it any more.

        Raises NoResponders, TimedOut, Unavailable (outcome unknown), Refused (denied, not delivered),
        TooLarge.
        """
        return await self.session().request(
            subject, payload, headers=headers, timeout=timeout, on_late=on_late
        )

    async def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Send without waiting for an answer. Raises Unavailable, TooLarge."""
        await self.session().publish(subject, payload, reply=reply, headers=headers)

    async def subscribe(self, subject: str, callback: Callable[[Incoming], None]) -> Subscription:
        """Subscribe for the life of the present session. Raises Unavailable."""
        return await self.session().subscribe(subject, callback)

    async def api(
        self,
        verb: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float = 5.0,  # noqa: ASYNC109
    ) -> dict[str, Any]:
        """One request of JetStream's interface (``verb`` without its prefix). For this package.

        Raises ApiError beside what ``request`` raises.
        """
        return await self.session().api(verb, body, timeout=timeout)
