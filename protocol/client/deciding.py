"""What only an authority may say, one method for each event.

What a field means is said where the event is defined (``protocol.events``).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from protocol.client.answers import Published
from protocol.client.speech import Speech


class AuthorityEvents(Speech):
    """Decisions about a run. They count on the authority channel."""

    async def task_changed(
        self,
        *,
        reason: str,
        goal: str | None = None,
        done_when: Sequence[str] | None = None,
        owner: str | None = None,
        trust: str | None = None,
        id: str | None = None,
    ) -> Published:
        """An authority changes task, owner or trust. ``done_when`` absent: unchanged; empty: cleared."""
        return await self._tell(
            "task.changed", id, reason=reason, goal=goal, done_when=done_when, owner=owner, trust=trust
        )

    async def approval_resolved(
        self,
        *,
        approval_id: str,
        outcome: Literal["granted", "denied", "revoked"],
        by: str,
        action: str,
        payload_digest: str | None = None,
        expires_at: datetime | None = None,
        uses: int | None = None,
        id: str | None = None,
    ) -> Published:
        """An authority's word on a request; repeats its action and payload digest. ``uses`` is at least 1."""
        return await self._tell(
            "approval.resolved",
            id,
            approval_id=approval_id,
            outcome=outcome,
            by=by,
            action=action,
            payload_digest=payload_digest,
            expires_at=expires_at,
            uses=uses,
        )

    async def policy_released(
        self,
        *,
        version: str,
        summary: str | None = None,
        approval_kinds: Sequence[str] | None = None,
        forbidden_kinds: Sequence[str] | None = None,
        id: str | None = None,
    ) -> Published:
        """A policy is in force. An absent list keeps the old one."""
        return await self._tell(
            "policy.released",
            id,
            version=version,
            summary=summary,
            approval_kinds=approval_kinds,
            forbidden_kinds=forbidden_kinds,
        )

    async def gap_accepted(
        self,
        *,
        from_: int,
        through: int,
        by: str,
        session: str | None = None,
        channel: Literal["event", "authority"] | None = None,
        id: str | None = None,
    ) -> Published:
        """An authority goes on without the messages ``from_`` to ``through`` (``seq``, inclusive) of ``session``.

        ``channel`` is the one that counted them; absent: the event channel.
        """
        return await self._tell(
            "gap.accepted", id, from_=from_, through=through, by=by, session=session, channel=channel
        )
