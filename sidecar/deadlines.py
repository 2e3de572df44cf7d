"""Notices that time has passed and says so on the run's ``record`` channel; the fold decides what it means.

It reads the clocks and the hot runs, publishes records with derived ids, and changes no ledger.
A record said twice, or by two owners, changes nothing. When an approval expires is a moment of the wall clock.
How long something has waited is counted by the monotonic one: the wall clock may be set at any time, and need
not agree with the broker's.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import anyio
import structlog

from protocol import subjects
from protocol.codec import encode
from protocol.events import ApprovalExpired, CallAbandoned, Event, GapDeclared, OperationTimedOut
from sidecar.desk import Desk
from sidecar.notices import derived_id
from sidecar.runs import HotRun
from sidecar.transport.errors import TransportError
from sidecar.transport.publisher import LanePublisher
from sidecar.view import ViewUnreadable, decode_view
from storage.records import RunSummary

_TICK_SECONDS = 0.25
_AGAIN_SECONDS = 10.0

log = structlog.get_logger(__name__)

_WATCHED = ("operation", "call", "gap", "approval")
_SPARE = 256
"""Entries of what waits no more that are let go only together with others."""

Wait = tuple[str, float | None]
"""Key, and when it began; None: it waits no longer."""


def note_changes(hot: HotRun, stamp: float) -> Sequence[Wait]:
    """Record in the run's view when watched items began, from the broker's time of the message.

    Call after each folded message. Returns the keys that are new, with the moment each began (an approval:
    the moment it expires), and with None those that wait no longer.
    """
    changed = hot.ledger.changed
    if not changed:
        return ()
    since = hot.view.since
    told: list[Wait] = []
    for kind, item_id in changed:
        if kind not in _WATCHED:
            continue
        key = f"{kind}/{item_id}"
        begins = _begins(kind, hot.ledger.items[kind].get(item_id), stamp)
        if begins is None:
            if since.pop(key, None) is not None:
                told.append((key, None))
        elif key not in since or (kind == "approval" and since[key] != begins):
            since[key] = begins
            told.append((key, begins))
    # Looked at once: what the messages before it in the transaction changed is not looked at again.
    hot.changed |= changed
    changed.clear()
    return told


def _begins(kind: str, item: Any, stamp: float) -> float | None:
    if item is None:
        return None
    if kind == "operation":
        return stamp if item.state == "pending" else None
    if kind == "call":
        return stamp if item.state == "open" else None
    if kind == "gap":
        return None if item.declared else stamp
    if item.state in ("pending", "granted") and item.expires_at is not None:
        return datetime.fromisoformat(item.expires_at).timestamp()
    return None


def _waiting(row: RunSummary) -> tuple[str, dict[str, float] | None] | None:
    """What waits in a stored run; None for ``since``: its view cannot be read."""
    try:
        since = decode_view(row.view).since
    except ViewUnreadable:
        return row.run, None
    return (row.run, since) if since else None


def _is_moment(key: str) -> bool:
    """Whether it is over at a moment that was named, and not after a wait."""
    return key.startswith("approval/")


_Place = tuple[str, str]
"""Run and key of what waits."""


class _Queue:
    """What waits and when it is over, by one clock. It grows with what waits now, not with what ever did."""

    def __init__(self) -> None:
        self.over: dict[_Place, float] = {}
        self.heap: list[tuple[float, str, str]] = []
        """Holds some that were dropped or put off since, at most as many as there are others."""

    def put(self, place: _Place, over: float) -> None:
        """It is over then, and not when it was said before."""
        self.over[place] = over
        heapq.heappush(self.heap, (over, *place))
        if len(self.heap) > 2 * len(self.over) + _SPARE:
            self.heap = [(over, *place) for place, over in self.over.items()]
            heapq.heapify(self.heap)

    def drop(self, place: _Place) -> None:
        """It waits no more."""
        self.over.pop(place, None)

    def take(self, now: float) -> _Place | None:
        """One that is over by now, which is dropped."""
        while self.heap and self.heap[0][0] <= now:
            over, run, key = heapq.heappop(self.heap)
            if self.over.get((run, key)) == over:
                del self.over[run, key]
                return run, key
        return None


class Deadlines:
    """One lane's clock hand. ``watch`` is cheap and may be called under the lock."""

    def __init__(self, desk: Desk, publisher: LanePublisher) -> None:
        self._desk = desk
        self._publisher = publisher
        self._moments = _Queue()
        """By the wall clock."""
        self._waits = _Queue()
        """By the monotonic clock."""
        config = desk.config
        self._patience = {
            "operation": config.operations.unknown_after_seconds,
            "call": config.calls.abandon_after_seconds,
            "gap": config.intake.gap_after_seconds,
        }

    def watched(self) -> set[tuple[str, str]]:
        """Run and key of everything that waits."""
        return {*self._moments.over, *self._waits.over}

    @property
    def held(self) -> int:
        """Entries in memory, those included that wait no more and are let go in bulk."""
        return len(self._moments.heap) + len(self._waits.heap)

    def watch(self, run: str, waits: Iterable[Wait]) -> None:
        """Say so when the time of these is over; ``waits`` is what ``note_changes`` returned."""
        self._watch(run, waits, now=self._desk.caught_up)

    def _watch(self, run: str, waits: Iterable[Wait], *, now: bool) -> None:
        """``now``: what waits has just begun. How long before it did else, only the wall clock can tell."""
        for key, begins in waits:
            place = (run, key)
            if begins is None:
                self._waits.drop(place)
                self._moments.drop(place)
                continue
            if _is_moment(key):
                self._moments.put(place, begins)
                continue
            left = patience = self._patience[key.split("/", 1)[0]]
            if not now:
                left = min(patience, max(0.0, begins + patience - self._desk.wall()))
            self._waits.put(place, self._desk.mono() + left)

    async def run(self) -> None:
        """Until cancelled. Starts with everything that was waiting when the daemon last stopped."""
        desk = self._desk
        for run, waiting in await desk.store.each_run(desk.tenant, desk.lane, _waiting, finished=False):
            since = await self._since_now(run) if waiting is None else waiting
            self._watch(run, since.items(), now=False)
        while True:
            for queue, clock in ((self._moments, self._desk.wall), (self._waits, self._desk.mono)):
                # What clears a deadline may still lie unread in the stream.
                while self._desk.caught_up and self._desk.lease_valid() and (place := queue.take(clock())):
                    if await self._say(*place) and place not in self._waits.over:
                        self._waits.put(place, self._desk.mono() + _AGAIN_SECONDS)
            await anyio.sleep(_TICK_SECONDS)

    async def _say(self, run: str, key: str) -> bool:
        """Publish the record if it is still true; whether to look again later."""
        async with self._desk.lock:
            await self._desk.runs.load([run])
            hot = self._desk.runs.hot.get(run)
            began = None if hot is None else hot.view.since.get(key)
            if hot is None or began is None:
                return False
            kind, item_id = key.split("/", 1)
            if (run, key) in self._waits.over or (_is_moment(key) and began > self._desk.wall()):
                # It was said anew meanwhile, and is over later.
                return True
            event = self._record(hot.ledger.items[kind].get(item_id), kind, item_id)
        if event is None:
            return False
        subject = subjects.inbound(self._desk.tenant, self._desk.lane, run, "record")
        try:
            await self._publisher.publish_record(subject, encode(event))
        except TransportError as error:
            log.info("record not published, tried again later", run=run, record=key, error=str(error))
        return True

    def _envelope(self) -> dict[str, Any]:
        return {"v": 1, "at": self._desk.now(), "epoch": self._desk.voice.epoch}

    async def _since_now(self, run: str) -> dict[str, float]:
        """What waits in a run whose view cannot be read: counted from now on, later than it should, never earlier."""
        async with self._desk.lock:
            await self._desk.runs.load([run])
            hot = self._desk.runs.hot[run]
            for kind in _WATCHED:
                for key, item in hot.ledger.active[kind].items():
                    begins = _begins(kind, item, self._desk.wall())
                    if begins is not None:
                        hot.view.since[f"{kind}/{key}"] = begins
            return dict(hot.view.since)

    async def declare_stream_gap(self, run: str, before: int) -> None:
        """Say on ``record`` that messages of the stream before ``before`` may have been the run's own."""
        async with self._desk.lock:
            await self._desk.runs.load([run])
            hot = self._desk.runs.hot[run]
            first = hot.view.stream_seq + 1
        event = GapDeclared(
            id=derived_id("stream-gap", run, first, before),
            stream_from=first,
            stream_through=max(first, before - 1),
            **self._envelope(),
        )
        subject = subjects.inbound(self._desk.tenant, self._desk.lane, run, "record")
        try:
            await self._publisher.publish_record(subject, encode(event))
        except TransportError as error:
            log.warning("lost history not declared yet", run=run, error=str(error))

    def _record(self, item: Any, kind: str, item_id: str) -> Event | None:
        if item is None:
            return None
        known: dict[str, Any] = self._envelope()
        if kind == "operation":
            # A dispatch is one occasion: however often it is noticed, it is one record.
            record_id = derived_id("timed-out", item_id, item.dispatched_at)
            return OperationTimedOut(id=record_id, operation_id=item_id, **known)
        if kind == "call":
            return CallAbandoned(
                id=derived_id("abandoned", item_id), call_id=item.call_id, event_id=item_id, **known
            )
        if kind == "gap":
            return GapDeclared(
                id=derived_id("gap", item_id, item.through),
                session=item.session,
                channel=item.channel,
                from_=item.first,
                through=item.through,
                **known,
            )
        return ApprovalExpired(
            id=derived_id("expired", item_id, item.expires_at), approval_id=item_id, **known
        )
