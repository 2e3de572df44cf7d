"""Questions of one run, as methods. Every answer includes what this client has published so far, unless told not to.

Only the shape of a question is made here; who answers, and how often it is asked, is ``protocol.client.asking``.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from msgspec import UNSET

from protocol.asks import (
    AskAuthorize,
    AskCompact,
    AskContext,
    AskFetch,
    AskPacket,
    AskSearch,
    AskStatus,
    CompactReply,
    ContextReply,
    FetchItem,
    FetchReply,
    SearchReply,
    StatusReply,
)
from protocol.client.answers import Permission
from protocol.client.asking import Asker
from protocol.client.joining import Joiner
from protocol.client.packets import read_packet
from protocol.client.publishing import Publisher
from protocol.handoff import Packet

Format = Literal["openai", "openai_responses", "anthropic"]


class Questions:
    """What a run may ask. ``after`` is a stream sequence an answer must include: by default the newest this client
    had acknowledged; 0 for none.

    Every method raises RunUnknown, InvalidRequest, AnswerTooLarge, Unavailable, Refused, all of them
    WatchkeeperError. ``patience``: seconds to go on asking while nobody is sure.
    """

    tenant: str
    lane: str
    name: str
    _asker: Asker
    _publisher: Publisher

    def _after(self, after: int | None) -> int | None:
        return (self._publisher.newest if after is None else after) or None

    async def fresh_packet(self, *, after: int | None = None) -> Packet:
        """A resume packet of this moment. Raises PacketRefused too."""
        return await self._asker.packet(
            AskPacket(after=self._after(after)),
            lambda body: read_packet(body, self.tenant, self.lane, self.name),
        )

    async def context(
        self, format: Format, *, max_tokens: int | None = None, after: int | None = None
    ) -> ContextReply:
        """The message list to go on with, in a provider's shape: packet, tail, and what changed since."""
        request = AskContext(format=format, max_tokens=max_tokens, after=self._after(after))
        return await self._asker.ask("context", request, ContextReply)

    async def status(self, *, after: int | None = None) -> StatusReply:
        """How the run stands."""
        return await self._asker.ask("status", AskStatus(after=self._after(after)), StatusReply)

    async def compact(self, reason: str | None = None, *, after: int | None = None) -> CompactReply:
        """Compact now if it is safe."""
        request = AskCompact(reason=reason, after=self._after(after))
        return await self._asker.ask("compact", request, CompactReply)

    async def search(
        self,
        query: str,
        *,
        limit: int | None = None,
        types: Sequence[str] | None = None,
        from_: int | None = None,
        through: int | None = None,
        max_tokens: int | None = None,
        of_run: str | None = None,
        after: int | None = None,
    ) -> SearchReply:
        """Words in the run's original events, best first."""
        request = AskSearch(
            query=query,
            limit=limit,
            types=None if types is None else tuple(types),
            from_=from_,
            through=through,
            max_tokens=max_tokens,
            of_run=of_run,
            after=self._after(after),
        )
        return await self._asker.ask("search", request, SearchReply)

    async def fetch(
        self,
        *refs: str,
        from_: int | None = None,
        through: int | None = None,
        before: int = 0,
        after_events: int = 0,
        max_tokens: int | None = None,
        of_run: str | None = None,
        after: int | None = None,
    ) -> AsyncIterator[FetchItem]:
        """Original evidence by refs, or by positions ``from_`` to ``through``: each item once and whole, page after
        page as it is read.

        ``max_tokens`` bounds a page, not the whole. Raises ContentChanged too.
        """
        request: dict[str, Any] = {
            "refs": refs or None,
            "from_": from_,
            "through": through,
            "before": before,
            "after_events": after_events,
            "max_tokens": max_tokens,
            "of_run": of_run,
        }
        joiner, cursor = Joiner(), None
        while True:
            question = AskFetch(**request, cursor=cursor, after=self._after(after))
            page = await self._asker.ask("fetch", question, FetchReply)
            for item in joiner.take(page.items):
                yield item
            if page.next is UNSET:
                joiner.end()
                return
            cursor = page.next

    def fresh_request_id(self) -> str:
        """A request id nobody used before, in whatever session: a permission asked for anew must not be an old one."""
        return f"r-{uuid.uuid4().hex}"

    async def authorize(
        self,
        operation_id: str,
        *,
        request_id: str | None = None,
        policy_version: str | None = None,
        patience: float | None = None,
        after: int | None = None,
    ) -> Permission:
        """May this operation be done now? A true answer is the one permission there is: act on it once.

        While nobody is sure it is asked again with the same ``request_id``; in the end that is a no as well
        (``unavailable``).
        """
        request = AskAuthorize(
            operation_id=operation_id,
            request_id=request_id or self.fresh_request_id(),
            policy_version=policy_version,
            after=self._after(after),
        )
        return await self._asker.authorize(request, patience)

    async def look(
        self,
        *,
        operation_id: str | None = None,
        kind: str | None = None,
        idempotency_key: str | None = None,
        approval_id: str | None = None,
        payload_digest: str | None = None,
        target: str | None = None,
        tool: str | None = None,
        policy_version: str | None = None,
        patience: float | None = None,
        after: int | None = None,
    ) -> Permission:
        """What ``authorize`` would say, for an operation or for a kind and key; nothing is reserved by it."""
        request = AskAuthorize(
            operation_id=operation_id,
            dry_run=operation_id is not None,
            kind=kind,
            idempotency_key=idempotency_key,
            approval_id=approval_id,
            payload_digest=payload_digest,
            target=target,
            tool=tool,
            policy_version=policy_version,
            after=self._after(after),
        )
        return await self._asker.authorize(request, patience)
