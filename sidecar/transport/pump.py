"""Reads a stream in order from a given sequence on, without acknowledgements.

Each incarnation has its own ephemeral consumer and its own inbox; what still arrives at an old inbox is
dropped. The pump never skips: when the consumer's own sequence is not the expected next one, heartbeats
stop, or consumer, stream or connection is gone, it says so, and the caller opens it anew at its cursor +
1. What the server delivered and the caller has not taken is bounded by the requests made ahead.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import anyio
import msgspec

from sidecar.transport.errors import ApiError, TransportError, Unavailable
from sidecar.transport.jetstream import Link
from sidecar.transport.session import Session, Subscription
from sidecar.transport.topology import StreamFacts, facts_of
from sidecar.transport.wire import API, Incoming

_NANO: Final = 1_000_000_000
_EXPIRES: Final = 30.0
_HEARTBEAT: Final = 2.0
_MISSED_AFTER: Final = 2 * _HEARTBEAT + 1.0
_INACTIVE: Final = 300
_AHEAD: Final = 2
_REQUEST_BYTES: Final = 16 * 1024 * 1024
_API_TIMEOUT: Final = 5.0
_REQUEST_OVER: Final = ("exceeds maxbytes", "batch completed")


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """One message as the stream holds it.

    ``pending`` is how many more the consumer has to deliver after this one; ``stamp`` is when the stream
    stored it, in seconds since the epoch by the broker's clock.
    """

    subject: str
    payload: bytes
    stream_seq: int
    pending: int
    headers: Mapping[str, str] | None
    stamp: float


class Pump:
    """A reader of one stream. One task uses it: ``open``, then ``next`` until it raises, ``open`` again,
    ``close``.

    ``batch`` is the most messages ``next`` is asked for; about twice as many are requested ahead.
    """

    def __init__(self, link: Link, stream: str, filter_subject: str, *, batch: int = 256) -> None:
        if batch < 1:
            raise ValueError("batch must be at least 1")
        self._link = link
        self._stream = stream
        self._filter = filter_subject
        self._batch = batch
        self._incarnation: _Incarnation | None = None

    async def open(self, start_seq: int) -> StreamFacts:
        """Begin at ``start_seq`` (1 or more), dropping whatever was open. Returns where the stream stands.

        The facts are read after the consumer was made, so they are of the stream that will be read.
        With a start beyond ``last_seq + 1`` nothing comes before the stream gets there: compare, and
        read a stream that is shorter than the cursor, or of another incarnation, from 1. Raises
        Unavailable.
        """
        await self.close()
        if start_seq < 1:
            raise ValueError("stream sequences begin at 1")
        fresh = _Incarnation(self._link.session(), self._stream, self._filter, self._batch)
        try:
            facts = await fresh.begin(start_seq)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await fresh.end()
            raise
        self._incarnation = fresh
        return facts

    async def next(self, max_messages: int, timeout: float) -> list[Delivery]:  # noqa: ASYNC109
        """What has arrived, at most ``max_messages``, in stream order; waits up to ``timeout`` seconds,
        else [].

        Cancelling loses nothing. Raises Unavailable once what arrived before the trouble has been handed out.
        """
        if self._incarnation is None:
            raise Unavailable("the pump is not open")
        return await self._incarnation.next(max_messages, timeout)

    @property
    def arrived(self) -> int:
        """Messages that ``next`` would hand out at once."""
        return 0 if self._incarnation is None else self._incarnation.arrived

    async def facts(self) -> StreamFacts:
        """Where the stream stands now. Raises Unavailable."""
        try:
            return facts_of(await self._link.api(f"STREAM.INFO.{self._stream}", timeout=_API_TIMEOUT))
        except ApiError as error:
            raise Unavailable(f"stream {self._stream}: {error.description}") from error

    async def settled_through(self) -> int | None:
        """The stream sequence up to which every message of the filter has been handed out; None if some wait.

        It moves on while nothing comes for the filter, so that a cursor can follow the stream's end. It
        is learnt from the server's heartbeats and may be half a minute late, never early.
        """
        return None if self._incarnation is None else self._incarnation.settled_through()

    async def close(self) -> None:
        """Drop the consumer and everything that arrived. Idempotent, never raises for a broker's trouble."""
        gone, self._incarnation = self._incarnation, None
        if gone is not None:
            await gone.end()


class _Incarnation:
    """One consumer with its inbox, on one session."""

    def __init__(self, session: Session, stream: str, filter_subject: str, batch: int) -> None:
        self._session = session
        self._stream = stream
        self._filter = filter_subject
        self._batch = batch
        self._inbox = session.new_inbox()
        self._consumer = f"wk-{self._inbox.rsplit('.', 1)[-1]}"
        self._box: deque[Delivery] = deque()
        self._arrived = asyncio.Event()
        self._subscription: Subscription | None = None
        self._expected = 1
        self._owed = 0
        self._pending = 0
        self._settled = 0
        self._requests = 0
        self._heard = time.monotonic()
        self._trouble: str | None = None
        self._forget = session.at_end(self._session_ended)

    async def begin(self, start_seq: int) -> StreamFacts:
        self._subscription = await self._session.subscribe(f"{self._inbox}.*", self._receive, at_once=True)
        config: dict[str, Any] = {
            "name": self._consumer,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": start_seq,
            "ack_policy": "none",
            "replay_policy": "instant",
            "filter_subject": self._filter,
            "inactive_threshold": _INACTIVE * _NANO,
            "num_replicas": 1,
            "mem_storage": True,
        }
        create = f"CONSUMER.CREATE.{self._stream}.{self._consumer}.{self._filter}"
        try:
            made = await self._session.api(
                create,
                {"stream_name": self._stream, "config": config, "action": "create"},
                timeout=_API_TIMEOUT,
            )
            info = await self._session.api(f"STREAM.INFO.{self._stream}", timeout=_API_TIMEOUT)
        except ApiError as error:
            raise Unavailable(f"stream {self._stream}: {error.description}") from error
        if self._expected == 1:
            self._pending = int(made["num_pending"])
            self._settled = start_seq - 1
        await self._top_up(0)
        return facts_of(info)

    async def end(self) -> None:
        self._forget()
        self._trouble = self._trouble or "closed"
        self._box.clear()
        if self._subscription is not None:
            await self._subscription.close()
        if self._session.lost is None:
            # Nobody waits for the answer: an abandoned consumer ends by itself.
            with suppress(TransportError):
                await self._session.publish(f"{API}.CONSUMER.DELETE.{self._stream}.{self._consumer}", b"")

    def _receive(self, message: Incoming) -> None:
        self._heard = time.monotonic()
        if message.subject.startswith(self._inbox):
            self._status(message)
            return
        if self._trouble is not None:
            return
        # $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>, and since
        # newer servers may do so, with domain and account before the stream.
        parts = message.reply.split(".")
        at = 5 if len(parts) == 9 else 7
        try:
            sequence = int(parts[at])
            if int(parts[at + 1]) != self._expected:
                self._fail(f"consumer sequence {parts[at + 1]} instead of {self._expected}")
                return
            delivery = Delivery(
                message.subject,
                message.data,
                sequence,
                int(parts[at + 3]),
                message.headers,
                int(parts[at + 2]) / _NANO,
            )
        except (IndexError, ValueError):
            self._fail("a delivery's reply subject cannot be read")
            return
        self._pending = delivery.pending
        self._settled = sequence
        self._expected += 1
        self._owed -= 1
        self._box.append(delivery)
        self._arrived.set()

    def _status(self, message: Incoming) -> None:
        headers = message.headers or {}
        status = headers.get("Status", "")
        if status == "100":
            last = headers.get("Nats-Last-Consumer")
            if last is not None and last.isdigit() and int(last) >= self._expected:
                self._fail(f"consumer sequences {self._expected} to {last} never arrived")
            else:
                # How far the consumer has looked: what matched up to there came before this heartbeat.
                scanned = headers.get("Nats-Last-Stream", "")
                self._settled = max(self._settled, int(scanned) if scanned.isdigit() else 0)
            return
        description = headers.get("Description", "")
        if status in ("404", "408") or (status == "409" and description.lower().endswith(_REQUEST_OVER)):
            # That request is over; what it did not use is free again.
            left = headers.get("Nats-Pending-Messages", "")
            self._owed -= int(left) if left.isdigit() else 0
            self._arrived.set()
            return
        if status == "503":
            description = description or "consumer or stream is gone, or JetStream is not ready"
        self._fail(f"pull ended: {status} {description}".rstrip())

    @property
    def arrived(self) -> int:
        return len(self._box)

    def settled_through(self) -> int | None:
        if self._box or self._trouble is not None or self._pending > 0:
            return None
        return self._settled

    def _session_ended(self) -> None:
        self._fail(f"connection lost: {self._session.lost}")

    def _fail(self, reason: str) -> None:
        if self._trouble is None:
            self._trouble = reason
        self._arrived.set()

    async def next(self, max_messages: int, timeout: float) -> list[Delivery]:  # noqa: ASYNC109
        deadline = time.monotonic() + timeout
        while not self._box:
            if self._trouble is not None:
                raise Unavailable(f"{self._stream}: {self._trouble}")
            await self._top_up(0)
            if self._box or self._trouble is not None:
                continue
            now = time.monotonic()
            silent_until = self._heard + _MISSED_AFTER
            if now >= silent_until:
                self._fail("heartbeats are missing")
                continue
            if now >= deadline:
                return []
            self._arrived.clear()
            with anyio.move_on_after(min(deadline, silent_until) - now):
                await self._arrived.wait()
        box = self._box
        await self._top_up(max(0, len(box) - max_messages))
        # From here on nothing is awaited: a cancelled caller has either all of it or none.
        if len(box) <= max_messages:
            taken = list(box)
            box.clear()
            return taken
        return [box.popleft() for _ in range(max_messages)]

    async def _top_up(self, kept: int) -> None:
        """Keep a request open at the server while there is room, given how many stay in the box."""
        want = self._batch * _AHEAD - kept - self._owed
        if want < self._batch or self._trouble is not None:
            return
        if self._owed == 0:
            # Without a request nobody owed us a sign of life: count the silence from now.
            self._heard = time.monotonic()
        self._requests += 1
        self._owed += want
        body = msgspec.json.encode(
            {
                "batch": want,
                "expires": int(_EXPIRES * _NANO),
                "idle_heartbeat": int(_HEARTBEAT * _NANO),
                "max_bytes": max(_REQUEST_BYTES, 2 * self._session.max_payload),
            }
        )
        try:
            await self._session.publish(
                f"{API}.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}",
                body,
                reply=f"{self._inbox}.{self._requests}",
            )
        except Unavailable as error:
            self._fail(error.reason)
