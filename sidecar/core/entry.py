"""One message on its way into the ledger: what it is, what it may touch, and what comes of it.

The rules (``sessions``, ``contract``, ``operations``, …) read and write through an ``Entry``. It knows who
speaks with whose authority, and no other rule.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Final

from msgspec import Struct, field

from protocol.events import Event
from sidecar.core.gate import Decision
from sidecar.core.state import Channel, Gap, Head, Lane, Ledger

RUN_VIOLATIONS: Final = (
    "history_gap",
    "duplicate_conflict",
    "sequence_conflict",
    "orphan_result",
    "duplicate_call",
    "illegal_transition",
    "repeated_operation",
    "unauthorized_write",
    "expired_approval_used",
    "self_approval",
    "foreign_session",
    "late_event",
    "contract_conflict",
)
"""Codes a ledger counts."""


class Origin(Struct, frozen=True):
    """Where a message came from: its channel, and its sequence in the stream (0: none)."""

    channel: Channel
    stream_seq: int = 0


class Violation(Struct, frozen=True):
    """A broken rule: one of ``RUN_VIOLATIONS``, and refs to what it concerns."""

    code: str
    refs: tuple[str, ...] = ()


class Outcome(Struct, kw_only=True):
    """What folding one message came to."""

    rejection: tuple[str, str] | None = None
    """(code, detail): not folded, to be answered on ``.rejected``."""
    violations: list[Violation] = field(default_factory=list)
    decision: Decision | None = None
    """Of an ``authorization.requested`` that was not ignored."""
    late: bool = False
    foreign: bool = False
    ignored: bool = False
    """A record of an epoch lower than the lane's highest: counted in the version, otherwise nothing."""
    operations_unknown: list[str] = field(default_factory=list)
    """Operations whose outcome became unknown by this message."""
    gaps: list[Gap] = field(default_factory=list)
    """Gaps that opened."""
    touched: set[str] = field(default_factory=set)
    """Runs whose ledger changed."""
    handed_down: bool = False
    """What holds for the run's descendants changed."""


class Entry:
    """One message and the ledgers it may change. Made by ``fold`` after the message was not refused."""

    __slots__ = (
        "channel",
        "event",
        "foreign",
        "head",
        "lane",
        "late",
        "ledger",
        "outcome",
        "position",
        "run",
        "runs",
    )

    def __init__(
        self,
        lane: Lane,
        runs: MutableMapping[str, Ledger],
        run: str,
        event: Event,
        origin: Origin,
    ) -> None:
        self.lane = lane
        self.runs = runs
        self.run = run
        self.event = event
        self.channel = origin.channel
        ledger = self.ledger = runs[run]
        head = self.head = ledger.head
        self.position = head.position
        self.outcome = Outcome(touched={run})
        self.late = self.foreign = False
        """As in the outcome."""

    @property
    def has_authority(self) -> bool:
        """Whether the speaker counts as an authority: on its channel, or because none is required."""
        return self.channel == "authority" or not self.lane.settings.authority_required

    @property
    def ref(self) -> str:
        """The message itself as a ref."""
        return f"event:{self.event.id}" if self.channel == "event" else f"pos:{self.position}"

    def violate(self, code: str, *refs: str) -> None:
        """Record a violation of this run."""
        count_violation(self.head, code)
        self.outcome.violations.append(Violation(code, refs or (self.ref,)))

    def relative(self, run: str) -> Ledger:
        """The ledger of another run, made if it has none yet; it counts as changed."""
        ledger = self.runs.get(run)
        if ledger is None:
            ledger = self.runs[run] = Ledger(Head(run=run))
        self.outcome.touched.add(run)
        return ledger

    def free_key(self, kind: str) -> str:
        """The key of an item named by its message: the event id on the event channel, else ``pos:<n>``."""
        key = self.event.id if self.channel == "event" else f"pos:{self.position}"
        while key in self.ledger.items[kind]:
            key = f"pos:{key}"
        return key


def count_violation(head: Head, code: str) -> None:
    """Add one to a code's count."""
    head.violations[code] = head.violations.get(code, 0) + 1
