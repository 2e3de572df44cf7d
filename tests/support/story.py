"""A run told message by message, straight into the fold: short to write, no broker, no files.

Events go through the codec, so that only what may stand on the wire is told.
"""

from __future__ import annotations

import json
from typing import Any

from protocol.asks import AskAuthorize
from protocol.codec import decode_event
from protocol.events import Event, Settings
from sidecar.core import gate
from sidecar.core.fold import Origin, Outcome, fold
from sidecar.core.gate import Decision
from sidecar.core.state import Channel, Lane, Ledger

D1 = "sha256:" + "1" * 64
D2 = "sha256:" + "2" * 64
AT = "2026-11-30T09:12:00Z"


def event(type_: str, id_: str = "e", channel: str = "event", **fields: Any) -> Event:
    """One message as decoded from its bytes. ``from_`` stands for ``from``."""
    body = {"v": 1, "id": id_, "type": type_, "at": AT}
    body |= {name.rstrip("_"): value for name, value in fields.items() if value is not None}
    return decode_event(json.dumps(body).encode(), channel=channel)


class Story:
    """A lane with its runs. Each telling returns the outcome; ``run`` is ``r`` unless said."""

    def __init__(self, **settings: Any) -> None:
        self.lane = Lane(settings=Settings(**settings))
        self.runs: dict[str, Ledger] = {}
        self.count = 0

    def ledger(self, run: str = "r") -> Ledger:
        return self.runs[run]

    def tell(self, type_: str, *, run: str = "r", channel: Channel = "event", **fields: Any) -> Outcome:
        self.count += 1
        if channel == "record":
            fields.setdefault("epoch", 1)
        told = event(type_, fields.pop("id_", f"e-{self.count}"), channel, **fields)
        return fold(self.lane, self.runs, run, told, Origin(channel=channel, stream_seq=self.count))

    def authority(self, type_: str, **fields: Any) -> Outcome:
        return self.tell(type_, channel="authority", **fields)

    def record(self, type_: str, **fields: Any) -> Outcome:
        return self.tell(type_, channel="record", **fields)

    def start(self, run: str = "r", **fields: Any) -> Outcome:
        fields.setdefault("goal", "mend the pump")
        fields.setdefault("model", {"name": "m", "context_window": 100_000})
        return self.tell("run.started", run=run, **fields)

    def declare(self, operation: str, *, run: str = "r", kind: str = "deploy", **fields: Any) -> Outcome:
        fields.setdefault("idempotency_key", f"key-{operation}")
        return self.tell("operation.declared", run=run, operation_id=operation, kind=kind, **fields)

    def act(self, operation: str, request: str = "q-1", *, run: str = "r", **fields: Any) -> Decision:
        outcome = self.record(
            "authorization.requested", run=run, operation_id=operation, request_id=request, **fields
        )
        assert outcome.decision is not None
        return outcome.decision

    def look(self, operation: str, *, run: str = "r", now: Any = None, **fields: Any) -> Decision:
        ask = AskAuthorize(operation_id=operation, dry_run=True, **fields)
        return gate.look(self.lane, self.runs, run, ask, now=now)

    def code(self, operation: str, **fields: Any) -> str:
        return self.look(operation, **fields).code

    def state(self, operation: str, run: str = "r") -> str:
        return str(self.runs[run].items["operation"][operation].state)

    def approval(self, approval: str, run: str = "r") -> str:
        return str(self.runs[run].items["approval"][approval].state)

    def grant(
        self, approval: str, *, action: str = "deploy", digest: str | None = D1, run: str = "r", **fields: Any
    ) -> None:
        """Request and grant, one use."""
        operation = fields.pop("operation_id", None)
        self.tell(
            "approval.requested",
            run=run,
            approval_id=approval,
            action=action,
            payload_digest=digest,
            operation_id=operation,
        )
        self.resolve(approval, action=action, digest=digest, run=run, **fields)

    def resolve(
        self, approval: str, outcome: str = "granted", *, digest: str | None = D1, **fields: Any
    ) -> Outcome:
        fields.setdefault("action", "deploy")
        fields.setdefault("by", "ann")
        return self.authority(
            "approval.resolved", approval_id=approval, outcome=outcome, payload_digest=digest, **fields
        )

    def violations(self, run: str = "r") -> dict[str, int]:
        return self.runs[run].head.violations


def codes(outcome: Outcome) -> list[str]:
    """The codes an outcome's violations have, sorted."""
    return sorted(violation.code for violation in outcome.violations)
