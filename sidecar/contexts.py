"""The message list to go on with: the packet as it was committed, the tail, and what changed since.

What must fit together (position, packet, cleared results) is taken from memory under the lane's lock; the
messages are read after that. It decides nothing about their order or shape (``core.context``) and leaves no
message of the tail out: a list that does not fit is refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import anyio.to_thread
from msgspec import UNSET, Struct

from protocol import asks
from protocol.codec import encode
from protocol.errors import AskRefused
from protocol.handoff import ClearedResult
from sidecar.core import context, context_anthropic, context_openai, context_responses
from sidecar.core.context import Conversation, Turn
from sidecar.core.exchanges import TailItem
from sidecar.desk import Desk
from sidecar.packets import KeptPacket, KeptTail, Packets, kept_packet
from sidecar.ranges import tail_items
from storage.records import PacketRow

_READ_MESSAGES: Final = 256
_READ_BYTES: Final = 1 << 20
_MOST_BYTES: Final = 64 << 20
"""Of a tail: beyond that no provider takes it in one request."""
_ATTEMPTS: Final = 3
_REMEMBERED: Final = 500


class _Moment(Struct):
    """A run at one ledger version."""

    covered: int
    checkpoint_id: str
    position: int
    event_id: str | None
    cleared: dict[int, ClearedResult]
    open_calls: frozenset[str]
    shortening_id: str
    fresh: KeptPacket
    scale: float


class Contexts:
    """One lane's message lists."""

    def __init__(self, desk: Desk, packets: Packets) -> None:
        self._desk = desk
        self._packets = packets
        self._system: dict[str, tuple[int, list[TailItem]]] = {}

    async def context(self, run: str, request: asks.AskContext) -> bytes:
        """The reply to ``context``. Raises ``AskRefused``, ``StorageError``."""
        desk = self._desk
        moment, committed = await self._together(run)
        system = await self._system_texts(run, moment.covered)
        tail = await self._tail(run, moment)
        made = await anyio.to_thread.run_sync(partial(_make, request.format, moment, committed, system, tail))
        tokens = max(1, round(made.tokens * moment.scale))
        if request.max_tokens is not None and tokens > request.max_tokens:
            raise AskRefused(
                "too_large", f"the context takes about {tokens} tokens, max_tokens is {request.max_tokens}"
            )
        desk.metrics.retrieved("context", "found")
        return encode(
            asks.ContextReply(
                epoch=desk.voice.epoch,
                packet_id=committed.packet_id,
                messages=tuple(made.messages),
                tokens=tokens,
                through_event_id=moment.event_id,
                system=UNSET if made.system is None else made.system,
            )
        )

    def rest(self) -> None:
        """Let go of the texts of runs that left memory; they are read again."""
        hot = self._desk.runs.hot
        self._system = {run: known for run, known in self._system.items() if run in hot}

    @property
    def held(self) -> frozenset[str]:
        """Runs of which texts are in memory."""
        return frozenset(self._system)

    async def _together(self, run: str) -> tuple[_Moment, KeptPacket]:
        """The run as it is, and the packet its context begins with: the newest one that shortened it, as it was
        published, by us or by the owner before; a fresh one where there was none."""
        desk = self._desk
        for _ in range(_ATTEMPTS):
            moment = await self._moment(run)
            row: PacketRow | None = None
            if moment.shortening_id:
                row = await desk.store.packet(desk.tenant, desk.lane, run)
                if row is not None and row.packet_id != moment.shortening_id:
                    continue  # Another compaction was committed in between.
            if row is None:
                return moment, moment.fresh
            committed = kept_packet(row)
            stood_on = "" if committed.checkpoint is None else committed.checkpoint.id
            # A checkpoint of an owner that said no packet with it may have been taken over since.
            return moment, committed if stood_on == moment.checkpoint_id else moment.fresh
        return moment, moment.fresh

    async def _moment(self, run: str) -> _Moment:
        desk = self._desk
        async with desk.lock:
            await desk.runs.load([run])
            hot = desk.runs.hot.get(run)
            if hot is None:
                self._system.pop(run, None)
                raise AskRefused("run_unknown", f"no message of run {run} was read in this lane")
            checkpoint = await self._packets.checkpoint(run)
            built = await self._packets.build(run, "asked")
            head, view = hot.ledger.head, hot.view
            return _Moment(
                covered=0 if checkpoint is None else checkpoint.covers_through.position,
                checkpoint_id="" if checkpoint is None else checkpoint.id,
                position=head.position,
                event_id=head.last_event_id,
                cleared={item.position: item.result for item in view.cleared},
                open_calls=frozenset(
                    call.id for call in hot.ledger.active["call"].values() if call.state == "open"
                ),
                shortening_id=view.published.shortening_id,
                fresh=KeptPacket(built.packet.packet_id, built.packet.text, None, KeptTail(head.position)),
                scale=view.budget.scale(),
            )

    async def _system_texts(self, run: str, covered: int) -> list[Turn]:
        """System and developer messages of covered history; read once per run and new coverage."""
        known, items = self._system.get(run, (0, []))
        if known > covered:
            known, items = 0, []
        if known < covered:
            items = [*items, *await self._items(run, known, covered, types=("message",), roles=True)]
            if len(self._system) >= _REMEMBERED:
                self._system.clear()
            self._system[run] = (covered, items)
        return context.system_turns(items)

    async def _tail(self, run: str, moment: _Moment) -> list[TailItem]:
        return await self._items(run, moment.covered, moment.position)

    async def _items(
        self, run: str, after: int, through: int, *, types: tuple[str, ...] = (), roles: bool = False
    ) -> list[TailItem]:
        """Messages after one position through another; with ``roles`` only those of system and developer, and
        what replaces a message."""
        desk = self._desk
        found: list[TailItem] = []
        size = 0
        while after < through:
            messages = await desk.store.evidence(
                desk.tenant,
                desk.lane,
                run,
                after=after,
                through=through,
                limit=_READ_MESSAGES,
                max_bytes=_READ_BYTES,
                types=types,
            )
            if not messages:
                break
            after = messages[-1].entry.position
            for message in messages:
                if not message.sound:
                    raise AskRefused("unavailable", f"pos:{message.entry.position} does not match its digest")
            items = await anyio.to_thread.run_sync(tail_items, [message.entry for message in messages])
            if roles:
                items = [item for item in items if _governs(item)]
            else:
                size += sum(len(message.entry.body) for message in messages)
            if size > _MOST_BYTES:
                raise AskRefused("too_large", "what came after the checkpoint is more than any request takes")
            found += items
        return found


class _Made(Struct):
    messages: list[dict[str, Any]]
    system: str | None
    tokens: int


def _make(
    format: str, moment: _Moment, committed: KeptPacket, system: list[Turn], tail: list[TailItem]
) -> _Made:
    """CPU only; run it off the loop."""
    changed = ""
    if committed is not moment.fresh:
        told = {item.event.id for item in tail}
        changed = context.changes(committed.text, moment.fresh.text, told)
    whole: Conversation = context.conversation(
        system=system,
        packet=committed.text,
        tail=tail,
        cleared=moment.cleared,
        open_calls=moment.open_calls,
        changed=changed,
    )
    if format == "anthropic":
        messages, texts = context_anthropic.messages(whole)
        return _Made(messages, texts, context.weigh(messages) + context.weigh(texts))
    messages = context_openai.messages(whole) if format == "openai" else context_responses.items(whole)
    return _Made(messages, None, context.weigh(messages))


def _governs(item: TailItem) -> bool:
    role = getattr(item.event, "role", "")
    return role in ("system", "developer") or getattr(item.event, "supersedes", None) is not None
