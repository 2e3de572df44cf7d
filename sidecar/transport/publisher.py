"""The one writer of a lane: serial, fenced by the lane's epoch, each message once in effect.

Nothing is queued here: the caller keeps what is not stored yet. Input records of the sidecar itself are
not fenced; the fold ignores those of an old epoch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

import anyio
import structlog

from protocol import subjects
from sidecar.transport.errors import Conflict, Fenced, StreamFull, TooLarge, Unavailable
from sidecar.transport.jetstream import Link
from sidecar.transport.ownership import FencedStream, LaneClaim, StreamFence
from sidecar.transport.retry import pause_seconds
from sidecar.transport.wire import HEADER_RESERVE, headers_size
from sidecar.transport.writes import (
    EXPECTED_SEQUENCE,
    EXPECTED_SUBJECT,
    MSG_ID,
    first_message,
    last_message,
    store,
    stream_of,
)

_TIMEOUT: Final = 3.0
_CONTENDED_LONGEST: Final = 0.1
_REMIND_SECONDS: Final = 30.0

log = structlog.get_logger(__name__)


class LanePublisher:
    """Publishes for one lane under its claim. Any number of tasks may use it; writes of a stream go one
    by one.
    """

    def __init__(self, link: Link, tenant: str, lane: str, claim: LaneClaim) -> None:
        self._link = link
        self._tenant = tenant
        self._lane = lane
        self._claim = claim

    async def publish(
        self,
        stream: FencedStream,
        subject: str,
        payload: bytes,
        msg_id: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Store a message exactly once, as long as the stream remembers ``msg_id``; with ``headers`` beside
        those of the fence.

        Broker trouble is waited out with the same id; only cancelling ends that, and then the outcome is
        unknown. Raises Fenced when another sidecar owns the lane or it was released, StreamFull,
        TooLarge before sending.
        """
        fence = self._claim.fence(stream)
        more = headers or {}
        self._check_size(payload, {**more, **_fenced(fence, msg_id)})
        failures = 0
        reminded = time.monotonic()
        while True:
            contended = False
            try:
                async with fence.lock:
                    if not self._claim.owned:
                        raise Fenced(self._lane, "no claim")
                    await self._attempt(fence, subject, payload, msg_id, more)
                return
            except Conflict as error:
                contended = error.contended
                if not contended:
                    # The record is read again under the lock, with the next attempt.
                    fence.seq = None
            except Unavailable as error:
                if time.monotonic() - reminded >= _REMIND_SECONDS:
                    reminded = time.monotonic()
                    log.warning(
                        "publish waits", lane=self._lane, stream=fence.stream, reason=error.reason[:300]
                    )
            failures += 1
            await anyio.sleep(pause_seconds(failures, longest=_CONTENDED_LONGEST if contended else 2.0))

    async def _attempt(
        self, fence: StreamFence, subject: str, payload: bytes, msg_id: str, more: Mapping[str, str]
    ) -> None:
        if fence.seq is None:
            await self._claim.recover(fence)
        headers = {**more, **_fenced(fence, msg_id)}
        await store(self._link, fence.stream, subject, payload, headers, timeout=_TIMEOUT)

    def _check_size(self, payload: bytes, headers: Mapping[str, str]) -> None:
        size = len(payload) + headers_size(headers) + HEADER_RESERVE
        if size > self._link.max_payload:
            raise TooLarge(self._link.max_payload, size)

    async def publish_rejected(self, subject: str, payload: bytes, msg_id: str) -> None:
        """Store an answer to a message that cannot be accepted, unfenced, once as long as ``msg_id`` is
        known.

        Broker trouble is waited out. Raises StreamFull, TooLarge.
        """
        failures = 0
        while True:
            try:
                await store(
                    self._link, subjects.STREAM_REJECTED, subject, payload, {MSG_ID: msg_id}, timeout=_TIMEOUT
                )
                return
            except (Unavailable, Conflict):
                failures += 1
                await anyio.sleep(pause_seconds(failures))

    async def publish_record(self, subject: str, payload: bytes) -> int:
        """Store a record of the sidecar among the inbound messages, once tried. Returns its stream sequence.

        Without a message id: others could use it up. Raises Unavailable when the outcome is unknown:
        publish the same record again, its derived id folds once. Raises StreamFull, TooLarge.
        """
        return await _store_inbound(self._link, subject, payload)

    async def get_first(self, subject: str) -> tuple[int, bytes] | None:
        """Sequence and payload of the oldest stored message of one of our subjects. Raises Unavailable."""
        return await first_message(self._link, stream_of(subject), subject)

    async def get_last(self, subject: str) -> tuple[int, bytes] | None:
        """Sequence and payload of the newest stored message of one of our subjects. Raises Unavailable."""
        return await last_message(self._link, stream_of(subject), subject)


async def publish_inbound(link: Link, subject: str, payload: bytes, *, give_up_after: float = 60.0) -> int:
    """Store an inbound message as an agent would, trying again for ``give_up_after`` seconds.

    Returns the stream sequence. It may be stored twice: readers dedupe by the message's own id. Raises
    Unavailable, StreamFull, TooLarge.
    """
    began = time.monotonic()
    failures = 0
    while True:
        try:
            return await _store_inbound(link, subject, payload)
        except (Unavailable, StreamFull):
            failures += 1
            wait = pause_seconds(failures)
            if time.monotonic() - began + wait > give_up_after:
                raise
            await anyio.sleep(wait)


async def _store_inbound(link: Link, subject: str, payload: bytes) -> int:
    try:
        return await store(link, subjects.STREAM_IN, subject, payload, {}, timeout=_TIMEOUT)
    except Conflict as error:
        raise Unavailable(f"stream {subjects.STREAM_IN} was busy") from error


def _fenced(fence: StreamFence, msg_id: str) -> dict[str, str]:
    return {
        MSG_ID: msg_id,
        EXPECTED_SEQUENCE: str(fence.seq),
        EXPECTED_SUBJECT: fence.subject,
    }
