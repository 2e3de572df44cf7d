"""What to do about a tail that has grown too large: clear results, compact up to where, wait, or give up.

One decision from figures computed once. Reads only; no clock, no storage, no summariser.
"""

from __future__ import annotations

from sidecar.core.boundary import Cut, NoCut, choose_cut
from sidecar.core.budget import HYSTERESIS, Budget, BudgetSettings, at_least
from sidecar.core.course import (
    GAIN_FLOOR,
    Compact,
    Course,
    Defer,
    DeferReason,
    Ineffective,
    Trigger,
    Trim,
    keep_recent,
    level_now,
    used_tokens,
)
from sidecar.core.state import Ledger
from sidecar.core.tail import Tail, Tailed
from sidecar.core.trimming import REFERENCE_TOKENS, Trimming, clearing, trim_plan

Plan = Trim | Compact | Defer | Ineffective

_TRIM_LEAST = 0.02
"""Share of the usable window that clearing results must save to be worth a packet of its own."""
_CRITICAL_LEAST = 0.10
"""Share of what is used that a compaction must win at ``critical`` when it does not get below ``compact``."""
_PACKET_SHARE = 4
"""A summary is expected to take at most this part of its range."""


def empty_tail(ledger: Ledger, course: Course, settings: BudgetSettings) -> Tail:
    """What a plan on this ledger needs gathered: give it every message of the tail, then plan on it."""
    return Tail(
        open_calls(ledger),
        [gap for gap in ledger.active["gap"].values() if not gap.declared],
        clearing(settings.result_tokens, course.trimmed_through),
    )


def plan(
    items: Tailed,
    ledger: Ledger,
    budget: Budget,
    course: Course,
    settings: BudgetSettings,
    *,
    trigger: str = "threshold",
) -> Plan:
    """What to do about this tail. Reads only; the same arguments give the same plan.

    ``items``: every message of ``event`` and ``authority`` after ``course.covers_through``, ascending, or what
    ``empty_tail`` gathered of them.
    """
    if not isinstance(items, Tail):
        messages, items = items, empty_tail(ledger, course, settings)
        items.extend(messages)
    return _Planner(items, ledger, budget, course, settings, trigger).plan()


class _Planner:
    """The figures of one decision, computed once."""

    def __init__(
        self,
        tail: Tail,
        ledger: Ledger,
        budget: Budget,
        course: Course,
        settings: BudgetSettings,
        trigger: str,
    ) -> None:
        self.tail = tail
        self.ledger = ledger
        self.budget = budget
        self.course = course
        self.settings = settings
        self.requested = trigger == "requested"
        self.trigger: Trigger = _trigger(trigger)
        self.used = used_tokens(budget, course)
        self.usable = budget.usable(settings)
        self.critical = at_least(level_now(budget, course, settings), "critical")
        self.keep = keep_recent(budget, settings)
        self.scale = budget.scale()
        self.target = settings.compact_at * self.usable

    def plan(self) -> Plan:
        trimming = self._trimming(inside=False)
        enough = self.used - self._scaled(trimming.saved_tokens) < self.target - HYSTERESIS * self.usable
        if enough and not self.requested and self._worth(trimming):
            return self._trim(trimming)
        cut = choose_cut(
            self.tail,
            keep_recent=self.keep,
            critical=self.critical,
            open_calls=open_calls(self.ledger),
            open_gap_from=self.tail.gap_position,
        )
        if isinstance(cut, NoCut):
            return self._no_cut(cut)
        return self._weigh(cut, trimming)

    def _weigh(self, cut: Cut, trimming: Trimming) -> Plan:
        missing = missing_artifacts(self.tail, self.ledger, cut.through)
        if missing and not self.critical:
            return self._defer("artifact_unsaved")
        range_tokens = min(self.used, self._in_context(cut.through))
        packet = min(self.settings.packet_tokens, range_tokens // _PACKET_SHARE)
        gain = range_tokens - packet + (0 if self.course.awaiting_take_up else self.course.packet_tokens)
        compact = Compact(
            first=1 if self._rebuild() else self.course.covers_through + 1,
            through=cut.through,
            event_id=cut.event_id,
            trigger=self.trigger,
            rebuild=self._rebuild(),
            range_tokens=range_tokens,
            kept_tokens=self._scaled(cut.kept),
            trimming=trimming,
            missing_artifacts=missing,
        )
        floor = gain > 0 and gain >= GAIN_FLOOR * range_tokens
        worth = gain >= self.settings.min_gain * self.used
        # Of one who asks: a range that an open gap keeps short is not what was asked for.
        if floor and (worth or (self.requested and not self._gap_open())):
            return compact
        if self.requested:
            return self._defer("open_gap" if self._gap_open() else "little_new")
        if floor and self.critical and gain >= _CRITICAL_LEAST * self.used:
            return compact
        if self.used - gain < self.target:
            if floor and self.critical:
                return compact
            return self._too_little()
        return self._last_resort()

    def _no_cut(self, cut: NoCut) -> Plan:
        if cut.reason == "little_new" and not self.requested:
            everything = self._scaled(self.tail.tokens)
            if self.used - everything >= self.target:
                return self._last_resort()
        if cut.reason == "no_boundary" and self.critical:
            deep = self._trimming(inside=True)
            if self._worth(deep):
                return self._trim(deep)
        return self._defer(cut.reason)

    def _too_little(self) -> Plan:
        """More material will come, and then the same cut is worth more."""
        if self._gap_open():
            return self._defer("open_gap")
        return self._defer("no_boundary" if open_calls(self.ledger) and self.critical else "little_new")

    def _last_resort(self) -> Plan:
        """Even without the whole range the run stays above the threshold."""
        if self._gap_open():
            # What lies behind the gap may be covered once it closes: nothing is beyond help yet.
            return self._defer("open_gap")
        if self.critical:
            if open_calls(self.ledger):
                deep = self._trimming(inside=True)
                return self._trim(deep) if self._worth(deep) else self._defer("no_boundary")
            deep = self._trimming(inside=True)
            if self._worth(deep):
                return self._trim(deep)
        everything = self._scaled(self.tail.tokens)
        if self.used - min(self.used, everything) >= self.target:
            return Ineffective(reason="fixed_cost")
        if everything > self._scaled(self.keep):
            return Ineffective(reason="recent_part")
        return Ineffective(reason="no_gain")

    def _gap_open(self) -> bool:
        return self.tail.gap_position is not None

    def _trimming(self, *, inside: bool) -> Trimming:
        return trim_plan(
            self.tail,
            keep_recent=self.keep,
            result_tokens=self.settings.result_tokens,
            trimmed_through=self.course.trimmed_through,
            inside=inside,
        )

    def _trim(self, trimming: Trimming) -> Trim:
        saved = self._scaled(trimming.saved_tokens)
        return Trim(
            through=trimming.through,
            cleared=trimming.cleared,
            saved_tokens=saved,
        )

    def _worth(self, trimming: Trimming) -> bool:
        return bool(trimming.cleared) and self._scaled(trimming.saved_tokens) >= _TRIM_LEAST * self.usable

    def _in_context(self, through: int) -> int:
        """What the range takes now: results cleared before are references."""
        tokens = self.tail.through(through)
        for _, size in self.tail.results(0, min(through, self.course.trimmed_through)):
            if size > self.settings.result_tokens:
                tokens += REFERENCE_TOKENS - size
        return self._scaled(tokens)

    def _rebuild(self) -> bool:
        every, version = self.settings.rebuild_every, self.course.checkpoint_version + 1
        return every > 0 and version > 1 and version % every == 0

    def _scaled(self, tokens: int) -> int:
        return round(tokens * self.scale)

    def _defer(self, reason: DeferReason) -> Defer:
        return Defer(reason=reason, changed=self.course.deferred != reason)


# --- what the ledger and the range say ------------------------------------------------------------------


def open_calls(ledger: Ledger) -> frozenset[str]:
    """Event ids of the calls without a final result."""
    return frozenset(call.id for call in ledger.active["call"].values() if call.state == "open")


def missing_artifacts(tail: Tail, ledger: Ledger, through: int) -> tuple[str, ...]:
    """Artifacts named by refs of the range and never saved, by id."""
    saved = {item.artifact_id for item in ledger.items["artifact"].values()} | set(ledger.items["artifact"])
    return tuple(sorted(tail.artifacts(through) - saved))


def _trigger(name: str) -> Trigger:
    match name:
        case "critical" | "overflow" | "requested" | "model_changed":
            return name
        case _:
            return "threshold"
