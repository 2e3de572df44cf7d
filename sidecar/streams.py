"""The streams for as long as the daemon runs: made at the start, looked after, and made again when one is gone.

The only place that notices a deleted stream. Whoever works on one waits for it as for any trouble of the broker:
the claim stores its record anew, the reader reads the new stream from its first message. Here no lane is touched.
"""

from __future__ import annotations

import time

import anyio
import structlog

from sidecar.config import Config
from sidecar.health import Health
from sidecar.transport.contents import ensure_contents
from sidecar.transport.errors import Refused, Unavailable
from sidecar.transport.jetstream import Link
from sidecar.transport.topology import ensure_streams, missing_streams

_CONDITION = "streams"
_RETRY_SECONDS = 1.0
_PATIENCE_SECONDS = 5.0
_LONGEST_ROUND = 5.0
_REMIND_SECONDS = 30.0

log = structlog.get_logger(__name__)


class Streams:
    """One daemon's."""

    def __init__(self, config: Config, link: Link, health: Health) -> None:
        self._config = config
        self._link = link
        self._health = health
        self._told = ""
        self._told_at = 0.0

    async def made(self, stop: anyio.Event) -> bool:
        """Whether the streams are there; waits for a broker that is not ready, unless told to stop.

        Raises ``Refused``.
        """
        while not stop.is_set():
            try:
                await self._ensure()
                return True
            except Unavailable as error:
                log.warning("streams not there yet", error=str(error))
                with anyio.move_on_after(_RETRY_SECONDS):
                    await stop.wait()
        return False

    async def guard(self) -> None:
        """Until cancelled: look for each stream several times within a lease, and make again what is gone.

        From then until it is there again the daemon is not ready. What the broker refuses now is no reason to
        end: it is told, and tried again.
        """
        while True:
            await anyio.sleep(min(_LONGEST_ROUND, self._config.lease.seconds / 4))
            try:
                missing = await missing_streams(self._link)
            except Unavailable:
                # That the broker does not answer is the connection's condition.
                continue
            if not missing:
                self._health.set(_CONDITION, True)
                self._told = ""
                continue
            names = ", ".join(missing)
            gone = f"{names} deleted under the running daemon"
            self._health.set(_CONDITION, False, f"{gone}; making it again")
            self._tell(names, gone)
            try:
                await self._ensure()
            except (Refused, Unavailable) as error:
                reason = f"{gone}; cannot be made again: {error}"
                self._health.set(_CONDITION, False, reason)
                self._tell(str(error), reason)
            else:
                log.warning("stream made again: what it held is lost", streams=names)

    async def _ensure(self) -> None:
        config = self._config
        await ensure_streams(self._link, replicas=config.nats.replicas, patience=_PATIENCE_SECONDS)
        if config.intake.content_mib:
            size = config.intake.content_mib << 20
            await ensure_contents(self._link, max_bytes=size, replicas=config.nats.replicas)

    def _tell(self, what: str, line: str) -> None:
        """Once for each trouble, and again twice a minute."""
        now = time.monotonic()
        if what != self._told or now - self._told_at >= _REMIND_SECONDS:
            self._told, self._told_at = what, now
            log.error("stream gone", reason=line)
