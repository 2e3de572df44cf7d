"""One run as its agent sees it: telling, asking, taking packets up, guarding effects.

It numbers what it tells, in one session, and takes secrets out of texts before they leave. What the run may do is
never decided here.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Final

import anyio
import msgspec
from anyio.abc import TaskGroup
from msgspec import UNSET, Struct, UnsetType

from protocol import subjects
from protocol.client.answers import Published
from protocol.client.asking import Asker
from protocol.client.broker import Broker, Denied, Trouble
from protocol.client.deciding import AuthorityEvents
from protocol.client.effects import Effect, guarded
from protocol.client.errors import AskFailed, InvalidEvent, Refused, StalePacket, Unsent
from protocol.client.items import ItemEvents
from protocol.client.large import LargeTexts
from protocol.client.packets import PacketBox, rank
from protocol.client.publishing import Outgoing, Publisher
from protocol.client.questions import Questions
from protocol.client.telling import RunEvents
from protocol.codec import decode_event, decode_struct, encode
from protocol.content import RedactionRules
from protocol.errors import ProtocolError
from protocol.events import Event, Message, NextAction, RunResumed, RunStarted, ToolReturned
from protocol.handoff import Packet, Rejected
from protocol.redaction import Redactor, redactor_for

_NEWEST_SECONDS: Final = 3.0
_DIRECT: Final = f"$JS.API.DIRECT.GET.{subjects.STREAM_OUT}."

_log = logging.getLogger("watchkeeper")


def utc_now() -> datetime:
    """This moment, to the millisecond."""
    now = datetime.now(UTC)
    return now.replace(microsecond=now.microsecond // 1000 * 1000)


class Settings(Struct, frozen=True, kw_only=True):
    """How a run is served; see ``connect``."""

    tenant: str
    lane: str
    channel: subjects.Channel
    redaction: RedactionRules | None
    ask_seconds: float
    drain_seconds: float
    queue: int
    content_bytes: int | None
    now: Callable[[], datetime] = utc_now


class Run(RunEvents, ItemEvents, AuthorityEvents, Questions):
    """See ``connect``, which opens one. Safe to use from many tasks of one event loop: events keep the order in
    which they were told.
    """

    def __init__(self, broker: Broker, tasks: TaskGroup, settings: Settings, name: str, session: str) -> None:
        tenant, lane = settings.tenant, settings.lane
        self.tenant = tenant
        self.lane = lane
        self.name = name
        self.session = session
        self._broker = broker
        self._tasks = tasks
        self._settings = settings
        self._publisher = Publisher(
            broker, subjects.inbound(tenant, lane, name, settings.channel), bound=settings.queue
        )
        self._asker = Asker(broker, tenant, lane, name, patience=settings.ask_seconds)
        self._box = PacketBox(tenant, lane, name)
        self._redactor: Redactor | None = (
            None if settings.redaction is None else redactor_for(settings.redaction)
        )
        self._large = LargeTexts(
            broker, tenant, lane, name, above=settings.content_bytes, patience=settings.ask_seconds
        )
        self._numbered = 0
        self._policy: str | None = None

    # --- telling ----------------------------------------------------------------------------------------

    @property
    def newest(self) -> int:
        """Stream sequence of the newest event this client had acknowledged; 0 before the first."""
        return self._publisher.newest

    async def publish(self, event: Event) -> Published:
        """Publish an event made of the protocol's own struct; session and number are the client's, the rest as it is.

        Returns once the broker has stored it. Until then the very same bytes are sent again, in order, however
        long that takes: bound it with ``anyio.fail_after``; what is given up waiting for is still sent. Raises
        InvalidEvent, EventTooLarge, Refused.
        """
        if isinstance(event, Message | ToolReturned) and isinstance(event.content, str):
            found = await self._content(event.id, event.content, None)
            if found is not None:
                event = msgspec.structs.replace(event, **found)
        told = event
        return await self._send(told.id, lambda numbers: encode(msgspec.structs.replace(told, **numbers)))

    async def tell_at_once(self, name: str, **fields: Any) -> Published:
        """As the typed methods, past the queue's bound: for what has to be said whatever happens."""
        return await self._send(None, self._message(name, fields), at_once=True)

    async def _tell(self, name: str, id: str | None, /, **fields: Any) -> Published:
        told = await self._send(id, self._message(name, fields))
        self._policy = fields.get("version" if name == "policy.loaded" else "policy_version") or self._policy
        return told

    async def _tell_text(
        self, name: str, id: str | None, media_type: str | None, /, **fields: Any
    ) -> Published:
        if isinstance(fields["content"], str):
            id = id or self._fresh_id()
            found = await self._content(id, fields["content"], media_type)
            if found is not None:
                if found["blob"] is None and name == "tool.returned":
                    found["truncated"] = True
                fields |= found
        return await self._tell(name, id, **fields)

    async def _content(self, id: str, text: str, media_type: str | None) -> dict[str, Any] | None:
        """Fields that stand for a text too large for its event; None for one that is not."""
        if not self._large.too_large(text):
            return None
        if self._redactor is not None:
            text = await anyio.to_thread.run_sync(self._redactor.text, text)
        whose = "event:" + id if self._settings.channel == "event" else "this message"
        shortened = await self._large.apart(text, media_type, whose)
        return {"content": shortened.text, "blob": shortened.blob}

    def _message(self, name: str, fields: dict[str, Any]) -> Callable[[dict[str, Any]], bytes]:
        said = {key.rstrip("_"): value for key, value in fields.items() if value is not None}

        def write(envelope: dict[str, Any]) -> bytes:
            return encode({"v": 1, "type": name, "at": self._settings.now(), **envelope, **said})

        return write

    async def _send(
        self, id: str | None, write: Callable[[dict[str, Any]], bytes], *, at_once: bool = False
    ) -> Published:
        event_id = id or ""

        def make() -> Outgoing:
            nonlocal event_id
            numbers: dict[str, Any] = {}
            if self._settings.channel == "event":
                numbers = {"session": self.session, "seq": self._numbered + 1}
            event_id = id or (f"{self.session}-{self._numbered + 1}" if numbers else self._fresh_id())
            payload = self._checked(write, {"id": event_id, **numbers})
            self._publisher.check_size(payload)
            self._numbered += 1
            return Outgoing(event_id, payload)

        seq = await self._publisher.send(make, at_once=at_once)
        return Published(event_id, seq)

    def _checked(self, write: Callable[[dict[str, Any]], bytes], envelope: dict[str, Any]) -> bytes:
        """The bytes to send, without secrets. Raises InvalidEvent."""
        try:
            payload = write(envelope)
            event = decode_event(payload, run=self.name, channel=self._settings.channel)
        except ProtocolError as error:
            raise InvalidEvent(str(error)) from error
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            raise InvalidEvent(f"cannot be written as JSON: {error}") from error
        if envelope.get("seq") == 1 and not isinstance(event, RunStarted | RunResumed):
            raise InvalidEvent("a session begins with run_started, run_resumed or take_up")
        found = None if self._redactor is None else self._redactor.message(payload)
        return payload if found is None else found.payload

    def _fresh_id(self) -> str:
        return f"{self.session}-{uuid.uuid4().hex[:12]}"

    # --- packets ----------------------------------------------------------------------------------------

    @property
    def packet_due(self) -> Packet | None:
        """The newest packet that came and was not taken up, whatever it says anew."""
        return self._box.due

    @property
    def context_due(self) -> Packet | None:
        """The newest packet if it shortens the context by what was not taken up yet.

        Look here between two model requests: then replace the message list (``context`` has it) and ``take_up``.
        """
        return self._box.shortened

    async def next_packet(self) -> Packet:
        """Wait for a packet that is to be taken up and was not returned here before, the newest if there are more.

        Raises PacketRefused, once for each that came and must not be continued from.
        """
        return await self._box.following()

    async def take_up(
        self,
        packet: Packet,
        *,
        policy_version: str | None = None,
        first_action: NextAction | UnsetType | None = UNSET,
    ) -> Published:
        """Say that the run goes on from this packet: call it once the message list was replaced, when no call of the
        covered part is open.

        ``policy_version``: what the agent works under now, by default what it last said; ``first_action``: by
        default the packet's next action. Raises StalePacket.
        """
        newest = self._box.newest
        if newest is not None and rank(newest)[0] > rank(packet)[0]:
            raise StalePacket(f"checkpoint {rank(newest)[0]} is newer than {rank(packet)[0]}")
        told = await self.run_resumed(
            packet_id=packet.packet_id,
            ledger_version=packet.ledger_version,
            policy_version=policy_version or self._policy or packet.policy.loaded,
            first_action=packet.progress.next_action if first_action is UNSET else first_action,
        )
        self._box.taken(packet)
        return told

    async def _look_for_packet(self) -> None:
        """The newest packet the stream has; where it may not be read, what the daemon says now, if it does."""
        subject = subjects.outbound(self.tenant, self.lane, self.name, "packet")
        try:
            reply = await self._broker.request(_DIRECT + subject, b"", seconds=_NEWEST_SECONDS)
            if reply.headers.get("Nats-Subject") == subject:
                self._box.put(reply.payload)
            return
        except (Trouble, Denied) as error:
            _log.debug("packets cannot be read from the stream: %s", error)
        try:
            self._box.put(await self._asker.once("packet", b"{}", _NEWEST_SECONDS))
        except (AskFailed, Refused) as error:
            _log.info("no packet of before: %s", error)

    # --- effects ----------------------------------------------------------------------------------------

    def effect(
        self,
        kind: str,
        idempotency_key: str,
        *,
        target: str | None = None,
        tool: str | None = None,
        description: str | None = None,
        approval_id: str | None = None,
        payload_digest: str | None = None,
        nonessential: bool | None = None,
        operation_id: str | None = None,
    ) -> AbstractAsyncContextManager[Effect]:
        """Guard an effect in the world: ``async with run.effect("mail.send", "invoice-7") as effect:``.

        The block is entered with a permission, which is used up by that, or NotAllowed is raised. What became of it
        is told at its end: what ``effect.succeeded``, ``failed`` or ``unknown`` said; else ``succeeded``, and
        ``unknown`` where the block is left by an error or cancelled. The same ``kind`` and ``idempotency_key`` are
        the same effect in every process: it is not done twice, whoever asks.
        """
        declared = {
            "target": target,
            "tool": tool,
            "description": description,
            "approval_id": approval_id,
            "payload_digest": payload_digest,
            "nonessential": nonessential,
        }
        return guarded(self, kind, idempotency_key, operation_id, declared)

    # --- life -------------------------------------------------------------------------------------------

    def child(self, name: str, *, session: str | None = None) -> AbstractAsyncContextManager[Run]:
        """Another run of the same lane over the same connection: a sub-agent's, told of by ``child_spawned``."""
        return opened(self._broker, self._tasks, self._settings, name, session)


def _told_rejected(payload: bytes) -> None:
    """The daemon refused an event of the run: whoever wrote the agent should see that."""
    try:
        refused = decode_struct(payload, Rejected)
    except ProtocolError:
        return
    _log.warning("event %s was rejected: %s: %s", refused.event_id or "?", refused.code, refused.detail[:300])


@asynccontextmanager
async def opened(
    broker: Broker, tasks: TaskGroup, settings: Settings, name: str, session: str | None
) -> AsyncIterator[Run]:
    """A run over this connection. At the end what is queued is sent, within bounds. Raises Unsent."""
    run = Run(broker, tasks, settings, name, session or f"s-{uuid.uuid4().hex[:12]}")
    unsent: tuple[str, ...] = ()
    async with AsyncExitStack() as stack:
        # Shielded: what has to be said when everything is cancelled is still sent. Ended below in any case.
        sending = anyio.CancelScope(shield=True)
        stack.callback(sending.cancel)
        if settings.channel == "event":
            subject = subjects.outbound(settings.tenant, settings.lane, name, "packet")
            await stack.enter_async_context(broker.subscribed(subject, run._box.put))
            refused = subjects.outbound(settings.tenant, settings.lane, name, "rejected")
            await stack.enter_async_context(broker.subscribed(refused, _told_rejected))
            broker.on_session.append(run._look_for_packet)
            stack.callback(broker.on_session.remove, run._look_for_packet)
            await run._look_for_packet()

        async def send() -> None:
            with sending:
                await run._publisher.run()

        tasks.start_soon(send)
        try:
            yield run
        finally:
            with anyio.CancelScope(shield=True):
                unsent = await run._publisher.drained(settings.drain_seconds)
            if unsent:
                _log.warning("left with %d events not known to be stored", len(unsent))
    if unsent:
        raise Unsent(unsent)
