"""Who owns a lane: one epoch record on ``state`` and on ``out``, moved by compare-and-set only.

Every write of the owner expects the sequence of its own newest record in that stream, so that a former
owner can store nothing. The record on ``state`` decides; nothing here ever re-reads a sequence to force
a write through.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final, Literal

import anyio
import msgspec
import structlog

from protocol import subjects
from protocol.codec import encode
from protocol.handoff import LaneEpoch
from sidecar.transport.errors import ApiError, Conflict, Fenced, StreamFull, Unavailable
from sidecar.transport.jetstream import Link
from sidecar.transport.retry import pause_seconds
from sidecar.transport.writes import EXPECTED_SEQUENCE, last_message, store

FencedStream = Literal["out", "state"]

_SURE: Final = 2 / 3
_LONGEST_REQUEST: Final = 3.0
_PURGE_EVERY: Final = 60

log = structlog.get_logger(__name__)


def utc_now() -> datetime:
    """The wall clock, in UTC."""
    return datetime.now(UTC)


class StreamFence:
    """The lane's epoch record in one stream: what the lane's writes expect, and the lock for one at a
    time.
    """

    def __init__(self, stream: str, subject: str) -> None:
        self.stream = stream
        self.subject = subject
        self.lock = anyio.Lock()
        self.seq: int | None = None
        """Sequence of our newest record; None when we have none there."""


class _Record(msgspec.Struct, frozen=True):
    """What a stream holds on the epoch subject. A record that cannot be read has epoch 0 and no owner."""

    seq: int
    epoch: int
    owner: str
    released: bool


_NOTHING: Final = _Record(0, 0, "", True)


class LaneClaim:
    """One sidecar's claim on one lane.

    ``owner`` is new at each process start. ``previous_owner`` is an owner whose process the caller knows
    to be dead (it holds that process's data directory by an exclusive lock): its lane is free at once.
    ``on_wait`` is called with the present owner, once, when its record was seen to move: it lives. Clocks are
    injected: ``wall`` stamps records and decides nothing, ``monotonic`` decides leases.
    """

    def __init__(
        self,
        link: Link,
        tenant: str,
        lane: str,
        owner: str,
        lease_seconds: float,
        *,
        previous_owner: str | None = None,
        on_wait: Callable[[str], None] | None = None,
        wall: Callable[[], datetime] = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lane = lane
        self.owner = owner
        self.epoch = 0
        self.replaced_owner = ""
        """Owner in the record that ours took the place of; empty if there was none."""
        self.out_blocked = False
        """Whether ``WK_OUT`` refuses our record for want of space: ownership holds, output waits."""
        self._link = link
        self._lease = float(lease_seconds)
        self._previous_owner = previous_owner
        self._on_wait = on_wait
        self._wall = wall
        self._monotonic = monotonic
        self._state = StreamFence(subjects.STREAM_STATE, subjects.state_epoch(tenant, lane))
        self._out = StreamFence(subjects.STREAM_OUT, subjects.out_epoch(tenant, lane))
        self._timeout = min(_LONGEST_REQUEST, self._lease / 3)
        self._owned = False
        self._renewed = 0.0

    # -- what the lane's writer needs -----------------------------------------------------------------

    def fence(self, stream: FencedStream) -> StreamFence:
        """What a write to the stream must expect."""
        return self._out if stream == "out" else self._state

    @property
    def owned(self) -> bool:
        """Whether the lane was claimed and neither lost nor released since."""
        return self._owned

    def valid(self) -> bool:
        """Whether the lease is certain at this moment: the last renewal began less than 2/3 of it ago."""
        return self._owned and self._monotonic() - self._renewed < self._lease * _SURE

    async def recover(self, fence: StreamFence) -> None:
        """After a wrong sequence: make the fence that of our own newest record. Call with its lock held.

        Ours there: adopt its sequence. None there (a stream made again): store ours. Another's: raise
        Fenced, except an older owner's on ``out``, which goes once ``state`` is seen to be ours. Raises
        Unavailable, StreamFull.
        """
        found = await self._read(fence)
        if self._is_ours(found):
            fence.seq = found.seq
            return
        if found is not _NOTHING and (fence is self._state or found.epoch >= self.epoch):
            raise self._lose(found)
        if fence is self._out:
            async with self._state.lock:
                await self.recover(self._state)
        try:
            await self._write(fence, found.seq)
        except Conflict as error:
            raise Unavailable(f"epoch record of lane {self.lane} was moved meanwhile") from error

    # -- life -----------------------------------------------------------------------------------------

    async def claim(self, *, floor: int = 0) -> int:
        """Wait until the lane is free, take it, and return the epoch: greater than any seen and than
        ``floor``.

        Broker trouble is waited out; only cancelling ends it. Where ``WK_OUT`` refuses for want of space
        the lane is owned by ``state`` alone and ``out_blocked`` is set.
        """
        self._owned = False
        watched: tuple[int, int] | None = None
        since = 0.0
        told = False
        failures = 0
        while True:
            try:
                state, out = await self._read(self._state), await self._read(self._out)
                now = self._monotonic()
                # Trouble with the broker stops the owner as well: the time counts anew after it.
                sight = (self._link.generation, state.seq)
                lives = watched is not None and watched[0] == sight[0] and watched != sight
                if sight != watched:
                    watched, since = sight, now
                # Where all of a stream was deleted, the other one still tells who owned the lane: it may live.
                if self._is_free(out if state is _NOTHING else state) or now - since >= self._lease:
                    await self._take(state, out, max(state.epoch, out.epoch, floor) + 1)
                    return self.epoch
                failures = 0
                if lives and not told:
                    told = True
                    if self._on_wait is not None:
                        self._on_wait(state.owner)
                await anyio.sleep(max(0.01, min(self._lease / 3, since + self._lease - now)))
                continue
            except (Unavailable, StreamFull) as error:
                log.debug("lane claim retry", lane=self.lane, reason=str(error))
                watched = None
            except Conflict:
                log.debug("lane claim retry", lane=self.lane, reason="another was faster")
            failures += 1
            await anyio.sleep(pause_seconds(failures))

    async def renew_forever(self) -> None:
        """Renew both records every third of the lease. Returns after ``release``; raises Fenced when lost."""
        rounds = 0
        while self._owned:
            await anyio.sleep(self._lease / 3)
            await self._renew_state()
            await self._renew_out()
            rounds += 1
            if rounds % _PURGE_EVERY == 0:
                await self._drop_old_records()

    async def release(self) -> None:
        """Give the lane up, so that the next owner need not wait. Tries for a third of the lease at most.

        Never raises for the broker's trouble or a lane already lost: the lease then ends by itself.
        """
        if not self._owned:
            return
        self._owned = False
        with anyio.move_on_after(self._lease / 3):
            for fence in (self._out, self._state):
                await self._release(fence)

    # -- steps ----------------------------------------------------------------------------------------

    async def _take(self, state: _Record, out: _Record, epoch: int) -> None:
        """Both records by compare-and-set, ``state`` first. Raises Conflict when another was faster."""
        self.epoch = epoch
        self.replaced_owner = state.owner
        self._out.seq = None
        self.out_blocked = False
        began = self._monotonic()
        async with self._state.lock:
            await self._write(self._state, state.seq)
        async with self._out.lock:
            try:
                await self._write(self._out, out.seq)
            except StreamFull as error:
                self._block_out(error)
        self._renewed = began
        self._owned = True

    async def _renew_state(self) -> None:
        failures = 0
        while True:
            began = self._monotonic()
            try:
                async with self._state.lock:
                    if not self._owned:
                        return
                    if self._state.seq is None:
                        await self.recover(self._state)
                    await self._write(self._state, self._state.seq or 0)
                self._renewed = began
                return
            except Conflict as error:
                if not error.contended:
                    self._state.seq = None
            except StreamFull as error:
                # Newer servers replace our record whatever the stream's limits are, older ones may refuse.
                if failures == 0:
                    log.warning("lane renewal refused", lane=self.lane, reason=error.reason)
            except Unavailable as error:
                log.debug("lane renewal retry", lane=self.lane, reason=error.reason)
            failures += 1
            await anyio.sleep(min(pause_seconds(failures), self._lease / 10))

    async def _renew_out(self) -> None:
        try:
            async with self._out.lock:
                if not self._owned:
                    return
                if self._out.seq is None:
                    await self.recover(self._out)
                else:
                    await self._write(self._out, self._out.seq)
            self.out_blocked = False
        except Conflict as error:
            if not error.contended:
                self._out.seq = None
        except StreamFull as error:
            self._block_out(error)
        except Unavailable as error:
            log.debug("lane renewal retry", lane=self.lane, reason=str(error))

    async def _release(self, fence: StreamFence) -> None:
        failures = 0
        async with fence.lock:
            while fence.seq is not None:
                try:
                    await self._write(fence, fence.seq, released=True)
                    fence.seq = None
                except Conflict as error:
                    if not error.contended:
                        with suppress(Unavailable):
                            found = await self._read(fence)
                            fence.seq = found.seq if self._is_ours(found) else None
                except StreamFull:
                    fence.seq = None
                except Unavailable as error:
                    log.debug("lane release retry", lane=self.lane, reason=str(error))
                failures += 1
                if fence.seq is not None:
                    await anyio.sleep(pause_seconds(failures))

    async def _drop_old_records(self) -> None:
        """Keep the stream from filling with our renewals. Best effort: it may not be permitted."""
        with suppress(Unavailable, ApiError):
            await self._link.api(
                f"STREAM.PURGE.{self._out.stream}",
                {"filter": self._out.subject, "keep": 1},
                timeout=self._timeout,
            )

    # -- records --------------------------------------------------------------------------------------

    async def _read(self, fence: StreamFence) -> _Record:
        found = await last_message(self._link, fence.stream, fence.subject, timeout=self._timeout)
        if found is None:
            return _NOTHING
        seq, payload = found
        try:
            record = msgspec.json.decode(payload, type=LaneEpoch)
        except msgspec.DecodeError:
            return _Record(seq, 0, "", False)
        return _Record(seq, record.epoch, record.owner, record.released is True)

    async def _write(self, fence: StreamFence, expected: int, *, released: bool = False) -> None:
        record = LaneEpoch(
            epoch=self.epoch, owner=self.owner, at=self._wall(), released=True if released else msgspec.UNSET
        )
        fence.seq = await store(
            self._link,
            fence.stream,
            fence.subject,
            encode(record),
            {EXPECTED_SEQUENCE: str(expected)},
            timeout=self._timeout,
        )

    def _is_ours(self, record: _Record) -> bool:
        return record.owner == self.owner and record.epoch == self.epoch and not record.released

    def _is_free(self, record: _Record) -> bool:
        return record.released or record.owner == self.owner or record.owner == self._previous_owner

    def _lose(self, found: _Record) -> Fenced:
        self._owned = False
        log.warning("lane lost", lane=self.lane, epoch=self.epoch, by_epoch=found.epoch)
        return Fenced(self.lane, f"epoch {found.epoch}, ours was {self.epoch}")

    def _block_out(self, error: StreamFull) -> None:
        if not self.out_blocked:
            log.warning("lane output blocked", lane=self.lane, reason=error.reason)
        self.out_blocked = True
