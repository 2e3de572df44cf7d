"""The way out for events: one queue, one message in flight, in the order they were told, until the broker has each.

An outcome nobody knows is settled by sending the very same bytes again; that the same event is counted once is the
daemon's work. No ``Nats-Msg-Id`` is sent: it would be shared with everybody who writes to the stream. Decides
nothing about what an event says.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import anyio
import msgspec

from protocol.client.broker import HEADER_RESERVE, Broker, Denied, Trouble, pause_seconds
from protocol.client.errors import EventTooLarge, Refused, WatchkeeperError
from protocol.subjects import STREAM_IN

_ACK_SECONDS: Final = 5.0
_REMIND_SECONDS: Final = 30.0
_TOO_LARGE: Final = frozenset({10054, 10097})

_log = logging.getLogger("watchkeeper")


class Outgoing:
    """One event on its way."""

    __slots__ = ("error", "event_id", "payload", "settled", "stream_seq")

    def __init__(self, event_id: str, payload: bytes) -> None:
        self.event_id = event_id
        self.payload = payload
        self.settled = anyio.Event()
        self.stream_seq = 0
        self.error: WatchkeeperError | None = None


class _AckError(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Ack(msgspec.Struct):
    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: _AckError | None = None


class Publisher:
    """Sends to one subject. ``bound``: events told and not yet stored; whoever tells more waits."""

    def __init__(self, broker: Broker, subject: str, *, bound: int) -> None:
        self._broker = broker
        self._subject = subject
        self._room = anyio.Semaphore(bound)
        self._queue: deque[tuple[Outgoing, bool]] = deque()
        self._wake = anyio.Event()
        self._broken: WatchkeeperError | None = None
        self.newest = 0
        """Sequence of the newest event the stream has."""

    async def send(self, make: Callable[[], Outgoing], *, at_once: bool = False) -> int:
        """Queue what ``make`` gives, called once there is room and without a pause before it is queued; wait until
        the stream has it and return its sequence.

        Cancelling ends the waiting only: what is queued is still sent. ``at_once`` waits for no room. Raises what
        ``make`` raises, Refused, EventTooLarge.
        """
        if not at_once:
            await self._room.acquire()
        try:
            if self._broken is not None:
                raise self._broken
            item = make()
        except BaseException:
            if not at_once:
                self._room.release()
            raise
        self._queue.append((item, not at_once))
        self._wake.set()
        await item.settled.wait()
        if item.error is not None:
            raise item.error
        return item.stream_seq

    def check_size(self, payload: bytes) -> None:
        """Raises EventTooLarge: what the broker does not take would cost the connection."""
        limit = self._broker.max_payload - HEADER_RESERVE
        if len(payload) > limit:
            raise EventTooLarge(f"{len(payload)} bytes, the broker takes {limit}")

    async def run(self) -> None:
        """Send what is queued, until cancelled."""
        while True:
            while not self._queue:
                self._wake = anyio.Event()
                await self._wake.wait()
            item, counted = self._queue[0]
            try:
                item.stream_seq = await self._stored(item)
                self.newest = max(self.newest, item.stream_seq)
            except WatchkeeperError as error:
                item.error = error
            self._queue.popleft()
            item.settled.set()
            if counted:
                self._room.release()

    async def drained(self, seconds: float) -> tuple[str, ...]:
        """Wait until nothing is queued, at most so long; the ids of what is left."""
        with anyio.move_on_after(seconds):
            while self._queue:
                await self._queue[-1][0].settled.wait()
        return tuple(item.event_id for item, _ in self._queue)

    async def _stored(self, item: Outgoing) -> int:
        failures, reminded = 0, time.monotonic()
        while True:
            reason = ""
            try:
                reply = await self._broker.request(self._subject, item.payload, seconds=_ACK_SECONDS)
                seq, reason = _read(reply.payload)
                if seq:
                    return seq
            except Trouble as error:
                reason = str(error)
            except Denied as error:
                self._broken = Refused(str(error))
                raise self._broken from error
            failures += 1
            if time.monotonic() - reminded >= _REMIND_SECONDS:
                reminded = time.monotonic()
                _log.warning("event %s waits for the broker: %s", item.event_id, reason)
            await anyio.sleep(pause_seconds(failures))
            await self._broker.connected()


def _read(payload: bytes) -> tuple[int, str]:
    """The sequence it is stored under, 0 and why where it is not, or where nobody knows. Raises EventTooLarge."""
    try:
        ack = msgspec.json.decode(payload, type=_Ack)
    except msgspec.DecodeError:
        return 0, "the broker's answer is none"
    if ack.error is not None:
        if ack.error.err_code in _TOO_LARGE:
            raise EventTooLarge(ack.error.description)
        return 0, ack.error.description
    if ack.duplicate:
        # Somebody's message id stood in for it: this one was not stored.
        return 0, "taken for another message"
    if ack.stream != STREAM_IN or ack.seq < 1:
        return 0, f"stored in {ack.stream[:40] or 'no stream'}"
    return ack.seq, ""
