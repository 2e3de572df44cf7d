"""The messages the daemon sends of itself: notices and refusals, as outbox rows with derived ids.

An id is derived from what the message speaks of, so that a message built twice is one message.
Nothing here decides whether to send.
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Any

from msgspec import UNSET

from protocol import subjects
from protocol.codec import encode
from protocol.handoff import Notice, Rejected
from storage.records import OutboxRow


def derived_id(prefix: str, *parts: object) -> str:
    """``<prefix>-<24 hex>`` over the parts; the same parts give the same id."""
    text = "\x1f".join(str(part) for part in parts)
    return f"{prefix}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


class Voice:
    """Builds this lane's outgoing rows; knows the lane's address and its epoch."""

    def __init__(self, tenant: str, lane: str) -> None:
        self.tenant = tenant
        self.lane = lane
        self.epoch = 0

    def notice(self, run: str, kind: str, at: datetime, key: object, **fields: Any) -> OutboxRow:
        """One ``run.notice``; ``key`` tells two notices of the same kind apart (a position, an id)."""
        notice_id = derived_id("nt", self.tenant, self.lane, run, kind, key, self.epoch)
        body: Any = Notice(
            tenant=self.tenant,
            lane=self.lane,
            run=run,
            at=at,
            epoch=self.epoch,
            notice_id=notice_id,
            kind=kind,  # type: ignore[arg-type]
            **fields,
        )
        return OutboxRow(
            stream="out",
            subject=subjects.outbound(self.tenant, self.lane, run, "notice"),
            msg_id=notice_id,
            payload=encode(body),
        )

    def rejected(
        self,
        run: str | None,
        at: datetime,
        stream_seq: int,
        subject: str,
        code: str,
        detail: str,
        event_id: str | None,
    ) -> OutboxRow:
        """One ``message.rejected``; a run that cannot be told becomes the token ``_``."""
        token = run if run is not None else subjects.NO_RUN_TOKEN
        body = Rejected(
            tenant=self.tenant,
            lane=self.lane,
            run=token,
            at=at,
            epoch=self.epoch,
            stream_seq=stream_seq,
            subject=subject,
            code=code,  # type: ignore[arg-type]
            detail=detail,
            event_id=UNSET if event_id is None else event_id,
        )
        return OutboxRow(
            stream="rejected",
            subject=subjects.outbound(self.tenant, self.lane, token, "rejected"),
            msg_id=derived_id("rj", self.tenant, self.lane, stream_seq, code),
            payload=encode(body),
        )
