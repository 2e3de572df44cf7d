"""What a stream alone says: every message folded once, in order, with nothing else going on.

No store, no batch, no compaction, no crash: what the daemon must agree with at every message. Which messages
count is worked out here again from the wire protocol, not taken from the daemon's reading.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from protocol import subjects
from protocol.asks import AskAuthorize
from protocol.codec import decode_event
from protocol.errors import ProtocolError
from protocol.events import SettingsApplied, identity
from sidecar.core import gate
from sidecar.core.fold import Origin, Outcome, fold, fold_settings, note_rejected
from sidecar.core.protected import protected_digest, protected_view
from sidecar.core.state import Lane, Ledger, ledger_value
from sidecar.transport.pump import Delivery


class Truth:
    """The lane's ledgers after the messages taken so far."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.runs: dict[str, Ledger] = {}
        self.chains: dict[str, list[bytes]] = {}
        """By run: the chain after each message that has a position of its own; index 0 is before the first."""
        self.told: dict[str, list[tuple[int, str, dict[str, Any]]]] = {}
        """By run: ledger version, channel and body of every message folded."""
        self.order: list[dict[str, Any]] = []
        """The bodies of all of them in the lane's order."""
        self.decided: dict[tuple[str, str], gate.Decision] = {}
        """(run, record id) → what the fold decided there."""
        self._chain: dict[str, bytes] = {}
        self._known: dict[tuple[str, str, str], bytes] = {}

    def take(self, deliveries: Iterable[Delivery]) -> Truth:
        for delivery in deliveries:
            self._one(delivery)
        return self

    def _one(self, delivery: Delivery) -> None:
        address = subjects.parse_inbound(delivery.subject)
        run, channel = address.run, address.channel
        try:
            event = decode_event(delivery.payload, run=run, channel=channel)
        except ProtocolError as error:
            self._refused(run, channel, delivery.payload, error.code)
            return
        if run == subjects.LANE_TOKEN:
            assert isinstance(event, SettingsApplied)
            fold_settings(self.lane, event)
            return
        sha256 = hashlib.sha256(delivery.payload).digest()
        name = identity(event)
        key = (run, channel, name)
        turn = 1
        while (before := self._known.get(key)) is not None:
            if before == sha256 or channel == "record":
                return
            if "#" not in name:
                self._refused(run, channel, delivery.payload, "duplicate_conflict")
                return
            turn += 1
            key = (run, channel, f"{name}#{turn}")
        outcome = fold(self.lane, self.runs, run, event, Origin(channel, stream_seq=delivery.stream_seq))
        if outcome.rejection is None:
            self._known[key] = sha256
            self._note(run, channel, delivery, sha256, outcome)

    def _note(self, run: str, channel: str, delivery: Delivery, sha256: bytes, outcome: Outcome) -> None:
        chain = hashlib.sha256(self._chain.get(run, bytes(32)) + sha256).digest()
        self._chain[run] = chain
        body = json.loads(delivery.payload)
        head = self.runs[run].head
        self.told.setdefault(run, []).append((head.version, channel, body))
        self.order.append(body)
        chains = self.chains.setdefault(run, [bytes(32)])
        if channel != "record":
            chains.append(chain)
            assert len(chains) == head.position + 1
        if outcome.decision is not None:
            self.decided[run, body["id"]] = outcome.decision

    def _refused(self, run: str, channel: Any, payload: bytes, code: str) -> None:
        if run not in self.runs:
            return
        try:
            body = json.loads(payload)
        except ValueError:
            return
        note_rejected(self.runs[run], code, channel=channel, session=body.get("session"), seq=body.get("seq"))

    # --- what follows from it ---------------------------------------------------------------------------

    def positions(self, run: str) -> dict[str, int]:
        """Event id → position, of the agent's channel."""
        found: dict[str, int] = {}
        position = 0
        for _, channel, body in self.told.get(run, []):
            position += channel != "record"
            if channel == "event":
                found.setdefault(body["id"], position)
        return found

    def values(self) -> dict[str, Any]:
        return {run: ledger_value(ledger) for run, ledger in sorted(self.runs.items())}

    def looks(self, run: str) -> dict[str, str]:
        """What ``authorize`` would say of every operation of the run, no clock in it."""
        return {
            name: gate.look(self.lane, self.runs, run, AskAuthorize(operation_id=name, dry_run=True)).code
            for name in sorted(self.runs[run].items["operation"])
        }

    def protected(self, run: str) -> dict[str, Any]:
        return protected_view(self.runs, run)

    def protected_digest(self, run: str) -> str:
        return protected_digest(self.protected(run))
