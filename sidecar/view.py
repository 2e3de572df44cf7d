"""Everything about a run that is not its ledger: budget, compaction course, what was published, what waits.

Stored beside the ledger in the same transaction, but no part of it: no decision of the fold reads any of
this, and a lost view costs a compaction, never a commitment.
"""

from __future__ import annotations

import msgspec

from protocol.events import Message
from protocol.handoff import ClearedResult, Packet, Recent, Tail
from protocol.identifiers import MAX_INTEGER
from sidecar.core.budget import Budget, BudgetSettings, Level, after_take_up, at_least
from sidecar.core.course import Compact, Course, Trim
from sidecar.core.excerpt import content_text, first_sentence
from sidecar.core.packet import BudgetFigures
from sidecar.core.resume import StoodOn
from sidecar.core.samples import expectation
from sidecar.core.state import Head
from sidecar.core.tokens import NOTHING, Estimate
from sidecar.core.trimming import REFERENCE_TOKENS, Cleared

RECENT_LINES = 3
PACKETS_REMEMBERED = 32
_TEXT_LOOKED_AT = 8_000


class Published(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the newest packet on the wire said, to publish the next one only when it differs."""

    protected_digest: str = ""
    verdict: str = ""
    packet_id: str = ""
    shortening_id: str = ""
    """Id of the newest packet that shortened the context: compacted or trimmed."""


class ClearedInTail(msgspec.Struct, frozen=True, kw_only=True):
    """A cleared result and where it stands; it leaves once a checkpoint covers it."""

    position: int
    saved: int
    result: ClearedResult


class View(msgspec.Struct, kw_only=True, omit_defaults=True):
    """See the module. Values only, so that encoding and decoding is a true copy."""

    budget: Budget = msgspec.field(default_factory=Budget)
    course: Course = msgspec.field(default_factory=Course)
    """Of the live chain."""
    shadow: Course = msgspec.field(default_factory=Course)
    """Of the shadow chain, which never touches the agent."""
    published: Published = msgspec.field(default_factory=Published)
    packets: dict[str, StoodOn] = {}
    """Ids of the newest packets published → what each stood on."""
    changed_by_others_at: int = 0
    """Ledger version at which an authority or the clock last said something that may change the protected part."""
    handed_down: int = 0
    """How often something that holds for the descendants changed."""
    spawned: int = 0
    """How often the parent's word changed the contract."""
    since: dict[str, float] = {}
    """``operation/<id>``, ``call/<event id>``, ``gap/<id>``, ``approval/<id>`` → broker time (s) at which it
    began; an approval: at which it expires."""
    violations: dict[str, int] = {}
    """Codes of candidates and resumes, which are no part of the ledger."""
    cleared: list[ClearedInTail] = []
    recent: list[Recent] = []
    choice: str | None = None
    """How the protected part was made to fit in the newest packet, if it had to be."""
    tail_tokens: int = 0
    """Of the tail when the newest checkpoint was committed, what was cleared left out."""
    tail_total: Estimate = NOTHING
    """The budget's running total then."""
    trims: int = 0
    missing_artifacts: tuple[str, ...] = ()
    """Ids of artifacts that covered history names and nobody saved."""
    stream_seq: int = 0
    """Of the newest message folded."""
    unproven_before: int = 0
    """Stream messages before this sequence are gone and no number proves this run whole yet; 0: none."""
    ended: str = ""
    """How the run ended the last time it did; it may have been reopened since."""
    ended_at: float = 0.0
    """Broker time (s) of that."""

    def note_packet(self, packet: Packet, stood_on: StoodOn) -> None:
        """Remember what went out, to tell later what is new and who works from something old."""
        self.published = Published(
            protected_digest=packet.protected_digest,
            verdict=packet.verdict,
            packet_id=packet.packet_id,
            shortening_id=packet.packet_id
            if packet.reason in ("compacted", "trimmed")
            else self.published.shortening_id,
        )
        kept = list(self.packets.items())[-PACKETS_REMEMBERED + 1 :]
        self.packets = dict([*kept, (packet.packet_id, stood_on)])

    def course_of(self, mode: str) -> Course:
        """The course of the chain that a run in this mode has."""
        return self.shadow if mode == "shadow" else self.course

    def tail_now(self) -> int:
        """Estimated tokens of what comes after the newest live checkpoint."""
        return self.tail_tokens + self.budget.weigh(self.budget.total - self.tail_total)

    def tail(self, head: Head, covered: int) -> Tail:
        """The tail as a packet tells it."""
        return Tail(
            from_position=covered + 1,
            through_position=head.position,
            through_event_id=head.last_event_id,
            events=head.position - covered,
            tokens=min(max(0, self.tail_now()), MAX_INTEGER),
        )

    def figures(self, settings: BudgetSettings) -> BudgetFigures:
        """Budget figures of a packet: after is what the context holds once the newest packet is taken up."""
        used = max(0, self.budget.used())
        after = used
        if self.course.awaiting_take_up and self.budget.expected is not None:
            after = min(used, expectation(self.budget, settings) + self.budget.fixed)
        return BudgetFigures(
            window=self.budget.window,
            usable=self.budget.usable(settings),
            used_before=used,
            used_after=max(0, after),
            level=self.budget.level,
        )

    def note_said(self, message: Message) -> None:
        """The agent's newest words, a line of each message."""
        text = first_sentence(content_text(message.content)[:_TEXT_LOOKED_AT])
        if text:
            line = Recent(text=text[:200], ref=f"event:{message.id}")
            self.recent = [*self.recent, line][-RECENT_LINES:]

    def note_cleared(self, cleared: tuple[Cleared, ...]) -> None:
        """Results that became references."""
        self.cleared = [
            *self.cleared,
            *(
                ClearedInTail(
                    position=item.position,
                    saved=max(0, item.tokens - REFERENCE_TOKENS),
                    result=ClearedResult(
                        call_id=item.call_id,
                        event_id=item.event_id,
                        ref=f"event:{item.event_id}",
                        status=item.status,
                        note=item.note,
                    ),
                )
                for item in cleared
            ),
        ]

    def covered(self, plan: Compact, at_handoff: Budget) -> None:
        """A checkpoint covers ``plan.through`` now; what lay behind it is the tail."""
        self.note_cleared(plan.trimming.cleared)
        self.cleared = [item for item in self.cleared if item.position > plan.through]
        saved = self.budget.weigh(Estimate(data=sum(item.saved for item in self.cleared)))
        self.tail_tokens = max(0, plan.kept_tokens - saved)
        self.tail_total = at_handoff.total
        self.missing_artifacts = tuple(sorted({*self.missing_artifacts, *plan.missing_artifacts}))

    def trimmed(self, plan: Trim) -> None:
        """Results of the tail became references."""
        self.note_cleared(plan.cleared)
        self.tail_tokens -= plan.saved_tokens
        self.trims += 1

    def after_take_up(self, text_tokens: int) -> int:
        """The figure to expect once a packet with this text is taken up."""
        tail = max(0, self.tail_now())
        return after_take_up(self.budget, packet_tokens=text_tokens, tail_tokens=tail)


_DECODER = msgspec.msgpack.Decoder(View)


def encode_view(view: View) -> bytes:
    return msgspec.msgpack.encode(view)


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """What of a stored view tells how old a finished run is."""

    ended: str = ""
    ended_at: float = 0.0


_ENDING = msgspec.msgpack.Decoder(Ending)


def decode_ending(body: bytes) -> Ending:
    """Only this of a stored view, cheaply; of one that cannot be read, as if nothing were known."""
    try:
        return _ENDING.decode(body) if body else Ending()
    except msgspec.DecodeError:
        return Ending()


class _Level(msgspec.Struct, frozen=True):
    level: Level = "ok"


class _Breaker(msgspec.Struct, frozen=True):
    breaker_until: float | None = None


class Standing(msgspec.Struct, frozen=True):
    """What of a stored view tells whether a run nobody speaks of has to be looked at all the same."""

    budget: _Level = _Level()
    course: _Breaker = _Breaker()
    shadow: _Breaker = _Breaker()
    unproven_before: int = 0

    @property
    def waits(self) -> bool:
        """Whether it is for time alone to change what is decided of it."""
        return at_least(self.budget.level, "compact") or not (
            self.course.breaker_until is None and self.shadow.breaker_until is None
        )


def waits(view: View) -> bool:
    """The same of a whole view."""
    breakers = (view.course.breaker_until, view.shadow.breaker_until)
    return at_least(view.budget.level, "compact") or breakers != (None, None)


_STANDING = msgspec.msgpack.Decoder(Standing)


def decode_standing(body: bytes) -> Standing:
    """Only this of a stored view, cheaply; of one that cannot be read that of a fresh one."""
    try:
        return _STANDING.decode(body) if body else Standing()
    except msgspec.DecodeError:
        return Standing()


def decode_level(body: bytes) -> str:
    """The budget's level alone."""
    return decode_standing(body).budget.level


class ViewUnreadable(ValueError):
    """A stored view of another shape. What now: begin a fresh one; no commitment stands in it."""


def decode_view(body: bytes) -> View:
    """The stored form back; an empty body is a fresh view. Raises ``ViewUnreadable``."""
    try:
        return _DECODER.decode(body) if body else View()
    except msgspec.DecodeError as error:
        raise ViewUnreadable(str(error)) from error


def copy_view(view: View) -> View:
    """A copy that shares nothing."""
    return _DECODER.decode(msgspec.msgpack.encode(view))
