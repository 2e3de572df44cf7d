"""What stands in a run, one method for each event: constraints, decisions, questions, operations, and so on.

What a field means is said where the event is defined (``protocol.events``).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from protocol.client.answers import Published
from protocol.client.speech import Fields, Speech
from protocol.events import (
    Forbids,
    RejectedAlternative,
    Scalar,
    Source,
)


class ItemEvents(Speech):
    """Events about the items of a ledger."""

    async def constraint_set(
        self,
        *,
        constraint_id: str,
        text: str,
        source: Source,
        replaces: str | None = None,
        forbids: Forbids | Fields | None = None,
        id: str | None = None,
    ) -> Published:
        """A constraint holds from here on; ``replaces`` is the id of the one it takes the place of."""
        return await self._tell(
            "constraint.set",
            id,
            constraint_id=constraint_id,
            text=text,
            source=source,
            replaces=replaces,
            forbids=forbids,
        )

    async def constraint_lifted(self, *, constraint_id: str, reason: str, id: str | None = None) -> Published:
        """A constraint holds no longer. By an authority; by the agent only for its own."""
        return await self._tell("constraint.lifted", id, constraint_id=constraint_id, reason=reason)

    async def decision_made(
        self,
        *,
        decision_id: str,
        summary: str,
        reason: str | None = None,
        refs: Sequence[str] | None = None,
        rejected: Sequence[RejectedAlternative | Fields] | None = None,
        supersedes: str | None = None,
        id: str | None = None,
    ) -> Published:
        """A decision is settled; ``supersedes`` is the id of the one it takes the place of."""
        return await self._tell(
            "decision.made",
            id,
            decision_id=decision_id,
            summary=summary,
            reason=reason,
            refs=refs,
            rejected=rejected,
            supersedes=supersedes,
        )

    async def question_opened(self, *, question_id: str, text: str, id: str | None = None) -> Published:
        """Something is not known yet."""
        return await self._tell("question.opened", id, question_id=question_id, text=text)

    async def question_answered(
        self, *, question_id: str, answer: str, by: str | None = None, id: str | None = None
    ) -> Published:
        """The question's answer."""
        return await self._tell("question.answered", id, question_id=question_id, answer=answer, by=by)

    async def operation_declared(
        self,
        *,
        operation_id: str,
        kind: str,
        idempotency_key: str,
        target: str | None = None,
        tool: str | None = None,
        description: str | None = None,
        approval_id: str | None = None,
        payload_digest: str | None = None,
        nonessential: bool | None = None,
        id: str | None = None,
    ) -> Published:
        """An effect on the outside is intended. Nothing is done yet."""
        return await self._tell(
            "operation.declared",
            id,
            operation_id=operation_id,
            kind=kind,
            idempotency_key=idempotency_key,
            target=target,
            tool=tool,
            description=description,
            approval_id=approval_id,
            payload_digest=payload_digest,
            nonessential=nonessential,
        )

    async def operation_dispatched(self, *, operation_id: str, id: str | None = None) -> Published:
        """The operation went out."""
        return await self._tell("operation.dispatched", id, operation_id=operation_id)

    async def operation_settled(
        self,
        *,
        operation_id: str,
        state: Literal["succeeded", "failed", "unknown"],
        receipt: str | None = None,
        detail: str | None = None,
        id: str | None = None,
    ) -> Published:
        """What became of a dispatched operation."""
        return await self._tell(
            "operation.settled", id, operation_id=operation_id, state=state, receipt=receipt, detail=detail
        )

    async def operation_reconciled(
        self,
        *,
        operation_id: str,
        state: Literal["succeeded", "failed", "review"],
        evidence: str,
        id: str | None = None,
    ) -> Published:
        """An unknown outcome is found out. ``evidence`` is a ref; ``review`` leaves it to an authority."""
        return await self._tell(
            "operation.reconciled", id, operation_id=operation_id, state=state, evidence=evidence
        )

    async def approval_requested(
        self,
        *,
        approval_id: str,
        action: str,
        scope: str | None = None,
        payload_ref: str | None = None,
        payload_digest: str | None = None,
        operation_id: str | None = None,
        expires_at: datetime | None = None,
        id: str | None = None,
    ) -> Published:
        """The agent asks an authority. Nothing is granted yet."""
        return await self._tell(
            "approval.requested",
            id,
            approval_id=approval_id,
            action=action,
            scope=scope,
            payload_ref=payload_ref,
            payload_digest=payload_digest,
            operation_id=operation_id,
            expires_at=expires_at,
        )

    async def artifact_saved(
        self,
        *,
        artifact_id: str,
        uri: str,
        sha256: str,
        description: str,
        version: str | None = None,
        media_type: str | None = None,
        bytes: int | None = None,
        id: str | None = None,
    ) -> Published:
        """A file, patch or report is stored outside. ``sha256`` with or without prefix; ``bytes``: its size."""
        return await self._tell(
            "artifact.saved",
            id,
            artifact_id=artifact_id,
            uri=uri,
            sha256=sha256,
            description=description,
            version=version,
            media_type=media_type,
            bytes=bytes,
        )

    async def artifact_withdrawn(self, *, artifact_id: str, reason: str, id: str | None = None) -> Published:
        """The artifact is not to be used any more."""
        return await self._tell("artifact.withdrawn", id, artifact_id=artifact_id, reason=reason)

    async def evidence_recorded(
        self,
        *,
        evidence_id: str,
        claim: str,
        kind: Literal["observed", "inferred"],
        source: str,
        value: Scalar | None = None,
        unit: str | None = None,
        contradicts: Sequence[str] | None = None,
        id: str | None = None,
    ) -> Published:
        """A claim, observed or inferred, with its source (ref or URL). ``contradicts``: other evidence ids."""
        return await self._tell(
            "evidence.recorded",
            id,
            evidence_id=evidence_id,
            claim=claim,
            kind=kind,
            source=source,
            value=value,
            unit=unit,
            contradicts=contradicts,
        )
