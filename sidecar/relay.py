"""The outbox relay of one lane: sends what was committed, in order, each message once in effect.

It reads committed rows only and removes a row after the broker has it, not always at once. It decides nothing about
content. A former owner's write is refused by the broker, and the relay stops then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import structlog

from protocol.codec import encode
from protocol.errors import ProtocolError
from protocol.state import RunStateReference
from sidecar import tracing
from sidecar.desk import Desk
from sidecar.large_states import MAX_STATE_BYTES, object_named, stored_apart
from sidecar.transport.blobs import Blobs
from sidecar.transport.errors import StreamFull, TooLarge, Unavailable
from sidecar.transport.publisher import LanePublisher
from storage.errors import StorageBusy, StorageFull
from storage.records import StoredOutbox

_BATCH = 128
_PAUSE_SECONDS = 1.0
_REMOVE_SECONDS = 1.0
"""How long sent rows stay in the store while others follow: taking each out by itself is one more commit in the way
of an event's."""

log = structlog.get_logger(__name__)


class Relay:
    """Runs until cancelled; raises ``Fenced`` when another owner has the lane.

    Without ``blobs`` a state too large for a message is left out and told: a new owner then needs the stream.
    ``apart`` is called with a message's id and what stands for it once the broker has both, where it was kept apart.
    """

    def __init__(
        self,
        desk: Desk,
        publisher: LanePublisher,
        blobs: Blobs | None = None,
        apart: Callable[[str, RunStateReference], None] = lambda _id, _reference: None,
    ) -> None:
        self._desk = desk
        self._publisher = publisher
        self._blobs = blobs
        self._apart = apart
        self.pending = 0
        """Rows committed and not yet sent, as of the last look."""
        self._sent: list[int] = []
        """Rows the broker has and the store still lists."""
        self._removed_at = 0.0
        self._replaced: dict[str, str] = {}
        """Objects that a state sent since named, or took the place of, and the subject of each."""

    async def run(self) -> None:
        last = 0
        try:
            while True:
                rows = await self._desk.store.outbox(
                    self._desk.tenant, self._desk.lane, after_id=last, limit=_BATCH
                )
                if rows:
                    self._show(await self._waiting(rows))
                for row in rows:
                    await self._send(row)
                    self._desk.left(row.msg_id)
                    self._sent.append(row.id)
                    last = row.id
                if len(rows) < _BATCH:
                    await self._let_go()
                if not rows or self._desk.mono() - self._removed_at >= _REMOVE_SECONDS:
                    await self._remove()
                if len(rows) < _BATCH:
                    self._show(0)
                    # What was sent and could not be removed is not asked for in a circle.
                    with anyio.move_on_after(_REMOVE_SECONDS if self._sent else None):
                        await self._desk.wait_outgoing()
        finally:
            # A row sent but not removed is sent again with the same id: harmless, so no shield on kill.
            with anyio.CancelScope(shield=True):
                await self._remove()

    async def _waiting(self, rows: Sequence[StoredOutbox]) -> int:
        """How many there are, of which these are the first."""
        if len(rows) < _BATCH:
            return len(rows)
        return await self._desk.store.outbox_count(self._desk.tenant, self._desk.lane) - len(self._sent)

    async def _remove(self) -> None:
        """Take what was sent out of the store; a full or busy disk keeps it for the next time."""
        try:
            if self._sent:
                await self._desk.store.outbox_sent(self._sent)
            self._sent = []
            self._removed_at = self._desk.mono()
        except (StorageFull, StorageBusy) as error:
            log.warning("sent messages not removed yet: storage refuses", error=str(error))

    async def _send(self, row: StoredOutbox) -> None:
        stream, subject, payload, msg_id = row.stream, row.subject, row.payload, row.msg_id
        headers = None if row.traceparent is None else {tracing.HEADER: row.traceparent}
        while True:
            try:
                if stream == "rejected":
                    await self._publisher.publish_rejected(subject, payload, msg_id)
                elif stream == "state":
                    await self._send_state(subject, payload, msg_id)
                else:
                    await self._publisher.publish("out", subject, payload, msg_id, headers)
                return
            except (TooLarge, ProtocolError) as error:
                # Sizes are checked before commit; the broker's limit was lowered since. Never block the rest.
                log.error("message left out: it cannot be sent", subject=subject, error=str(error))
                return
            except StreamFull as error:
                log.warning("stream full, output waits", stream=stream, error=str(error))
            except Unavailable as error:
                log.warning("broker unavailable, output waits", stream=stream, error=str(error))
            await anyio.sleep(_PAUSE_SECONDS)

    async def _send_state(self, subject: str, payload: bytes, msg_id: str) -> None:
        """One state; what is too large for a message is kept apart first. What it replaces goes last."""
        limit = min(MAX_STATE_BYTES, self._desk.message_room)
        if self._blobs is None:
            if len(payload) > limit:
                raise TooLarge(limit, len(payload))
            await self._publisher.publish("state", subject, payload, msg_id)
            return
        former, reference = await self._publisher.get_last(subject), None
        if len(payload) > limit:
            reference = await stored_apart(self._blobs, subject, payload, msg_id)
            payload = encode(reference)
        await self._publisher.publish("state", subject, payload, msg_id)
        if reference is not None:
            self._apart(msg_id, reference)
        names = {object_named(None if former is None else former[1]), object_named(payload)}
        if len(names) > 1 or reference is not None:
            self._replaced.update((name, subject) for name in names if name is not None)

    async def _let_go(self) -> None:
        """Delete the objects that no state names any more, once everything there was is sent. What stays costs space
        only.

        Not at once: a row may go out a second time, after a kill, and one behind it, not its own, stands already.
        """
        replaced, self._replaced = self._replaced, {}
        for name, subject in replaced.items():
            assert self._blobs is not None
            try:
                newest = await self._publisher.get_last(subject)
                if object_named(None if newest is None else newest[1]) != name:
                    await self._blobs.delete(name)
            except (Unavailable, StreamFull) as error:
                log.warning("object of an old state stays", object=name, error=str(error))

    async def drained(self, seconds: float) -> bool:
        """Whether the outbox became empty within ``seconds``."""
        desk = self._desk
        with anyio.move_on_after(seconds):
            while await desk.store.outbox_count(desk.tenant, desk.lane):
                desk.wake_relay()
                await anyio.sleep(0.02)
            return True
        return False

    def _show(self, pending: int) -> None:
        self.pending = pending
        self._desk.metrics.outbox(self._desk.lane, pending)
