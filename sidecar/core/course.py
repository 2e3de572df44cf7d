"""Where a run stands with its compactions: what is covered, what is awaited, what failed, what was said.

The functions here note what happened; ``policy`` decides what happens next. Times are the caller's seconds. A
``Course`` holds only plain values, so ``copy.copy`` is a true copy.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from sidecar.core.budget import (
    LEVELS,
    Budget,
    BudgetSettings,
    Expected,
    Level,
    Observed,
    at_least,
    expect,
    level_of,
    took_up,
)
from sidecar.core.trimming import Cleared, Trimming

DeferReason = Literal[
    "no_boundary",
    "in_flight",
    "open_gap",
    "artifact_unsaved",
    "little_new",
    "cool_down",
    "breaker",
    "not_applied",
    "mode",
]
Trigger = Literal["threshold", "critical", "overflow", "requested", "model_changed"]

UNAPPLIED_SAMPLES: Final = 3
BACK_OFF_SECONDS: Final = (5.0, 20.0, 60.0)
"""Wait after the first, second, … failure of one need; the last one repeats."""
BREAKER_SECONDS: Final = 300.0
GAIN_FLOOR: Final = 0.10
"""Share of the range that a compaction must save at the very least."""
USED_FLOOR: Final = 0.05
"""Share of what is used that a compaction must save at the very least: smaller steps would follow in chains."""
_DROP_SHARE = 0.05
"""Share of the usable window by which the figure must fall to count as a real change."""


class Course(Struct, kw_only=True, omit_defaults=True):
    """Compaction state of one chain (live or shadow) of one run."""

    checkpoint_version: int = 0
    checkpoint_id: str = ""
    covers_through: int = 0
    trimmed_through: int = 0
    packet_tokens: int = 0
    """Of the newest committed packet."""
    shadow_saved: int = 0
    """Tokens that shadow compactions would have saved since the history was last really replaced."""

    awaiting: Literal["", "compaction", "trim"] = ""
    """What the agent has not taken up yet."""
    samples_since_commit: int = 0
    not_applied_said: bool = False
    waiting_used: int = 0
    waiting_least: int = 0
    """The figure before the packet is taken up, and what that must save at the very least."""
    taken_used: int = 0
    taken_total: int = 0
    """The figure before it was, and the tokens observed until then; 0 once its effect was seen."""

    attempts: int = 0
    failures: int = 0
    retry_at: float | None = None
    breaker_until: float | None = None
    fallback_failed: bool = False

    ineffective: str = ""
    ineffective_times: int = 0
    """In a row: each time twice as much has to come before it is tried again."""
    ineffective_window: int = 0
    ineffective_used: int = 0
    ineffective_total: int = 0
    ineffective_level: Level = "ok"

    deferred: str = ""
    wanted_at: float | None = None
    """When the present need arose."""
    asked: bool = False
    """Somebody asked, and waits for work in flight: that need does not pass with the level."""
    planned: str = ""
    planned_at: int = 0
    compactions: int = 0

    @property
    def awaiting_take_up(self) -> bool:
        """A packet was committed and the agent's context does not show it yet."""
        return self.awaiting != ""

    @property
    def at_rest(self) -> bool:
        """Nothing is wanted, planned or deferred, and no wait is running."""
        return (
            self.wanted_at is None
            and self.retry_at is None
            and self.breaker_until is None
            and not (self.asked or self.deferred or self.ineffective or self.planned)
        )

    @property
    def not_applied(self) -> bool:
        """The agent reported several requests without having taken the packet up."""
        return self.awaiting_take_up and self.samples_since_commit >= UNAPPLIED_SAMPLES

    @property
    def attempt(self) -> int:
        """Number of the next try of the present need, from 1."""
        return self.failures + 1


class Defer(Struct, frozen=True, kw_only=True):
    """Compaction is wanted, and waits. ``changed``: not said yet."""

    reason: DeferReason
    changed: bool


class Ineffective(Struct, frozen=True, kw_only=True):
    """No compaction can help now. ``fixed_cost``: what no compaction can shrink is too large alone;
    ``recent_part``: what stays verbatim is; ``no_gain``: the range is too small to be worth it."""

    reason: Literal["fixed_cost", "recent_part", "no_gain"]


class Trim(Struct, frozen=True, kw_only=True):
    """Clear these results, make no summary."""

    through: int
    cleared: tuple[Cleared, ...]
    saved_tokens: int


class Compact(Struct, frozen=True, kw_only=True):
    """Cover ``first`` to ``through``. A rebuilt layer begins at 1 and uses no previous summary."""

    first: int
    through: int
    event_id: str | None
    trigger: Trigger
    rebuild: bool
    range_tokens: int
    """What the newly covered part takes in the context, in the provider's tokens."""
    kept_tokens: int
    trimming: Trimming
    missing_artifacts: tuple[str, ...] = ()


def follow(
    course: Course, budget: Budget, observed: Observed, settings: BudgetSettings
) -> Literal["not_applied", "ineffective"] | None:
    """Note what an event did to the figure; what has to be said now: that a packet is not taken up, once for
    each, or that it was and the context is as large as before."""
    if observed.took_up:
        if course.awaiting and not observed.sampled:
            course.taken_used, course.taken_total = course.waiting_used, budget.total.tokens
        course.awaiting = ""
        course.samples_since_commit = 0
        course.not_applied_said = False
        course.shadow_saved = 0
        course.planned = ""
        course.wanted_at, course.asked = None, False
    elif course.awaiting:
        course.waiting_used = observed.used
        course.samples_since_commit += observed.sampled
    elif observed.sampled and course.taken_used:
        came = round((budget.total.tokens - course.taken_total) * budget.scale())
        saved = course.taken_used - (observed.used - came)
        enough = saved >= course.waiting_least
        course.taken_used = 0
        if enough:
            course.ineffective_times = 0
        elif at_least(budget.level, "compact"):
            mark_ineffective(course, budget, "no_gain")
            return "ineffective"
    if course.ineffective and really_changed(course, budget, settings):
        course.ineffective = ""
    if course.awaiting and course.not_applied and not course.not_applied_said:
        course.not_applied_said = True
        return "not_applied"
    return None


def committed(
    course: Course,
    budget: Budget,
    plan: Compact,
    *,
    checkpoint_id: str,
    live: bool,
    packet_tokens: int = 0,
    tail_tokens: int = 0,
) -> None:
    """A checkpoint was accepted. Live: the figure drops once the packet is taken up, by these tokens."""
    course.checkpoint_version += 1
    course.checkpoint_id = checkpoint_id
    course.covers_through = plan.through
    course.trimmed_through = max(course.trimmed_through, plan.trimming.through)
    course.compactions += 1
    course.failures = 0
    course.retry_at = course.breaker_until = course.wanted_at = None
    course.fallback_failed = course.asked = False
    course.ineffective = course.deferred = course.planned = ""
    if live:
        course.packet_tokens = packet_tokens
        _await(course, budget, "compaction")
        expect(budget, packet_tokens=packet_tokens, tail_tokens=tail_tokens)
    else:
        course.shadow_saved += max(0, plan.range_tokens + course.packet_tokens - packet_tokens)
        course.packet_tokens = packet_tokens


def inherited(
    course: Course,
    budget: Budget,
    settings: BudgetSettings,
    what: Literal["compaction", "trim"],
    *,
    said_at: int,
    packet_tokens: int,
    tail_tokens: int,
) -> None:
    """The history was last shortened by another owner, in a packet of position ``said_at``: unless the messages
    since show that it was taken up, it is still waited for. Call once the history up to now is observed."""
    course.packet_tokens = packet_tokens
    taken = budget.taken_up
    if taken is None or taken.position <= max(course.covers_through, said_at):
        _await(course, budget, what)
        expect(budget, packet_tokens=packet_tokens, tail_tokens=tail_tokens)
    elif budget.sample is None:
        # Taken up when it was not known here what would be left, and no report has said so since.
        took_up(budget, packet_tokens=packet_tokens, tail_tokens=tail_tokens, settings=settings)


def trimmed(course: Course, budget: Budget, plan: Trim, *, live: bool = True) -> None:
    """Results were cleared; live: the figure drops once the agent applies it."""
    course.trimmed_through = max(course.trimmed_through, plan.through)
    course.planned = course.deferred = ""
    course.wanted_at, course.asked = None, False
    if live:
        _await(course, budget, "trim", plan.saved_tokens // 2)
        left = max(0, budget.used() - budget.fixed - plan.saved_tokens)
        budget.expected = Expected(left, budget.total)
    else:
        course.shadow_saved += plan.saved_tokens


def failed(course: Course, reason: str, *, now: float, settings: BudgetSettings) -> bool:
    """An attempt failed or its candidate was rejected; true when the breaker opened by it.

    ``interrupted`` ones do not count. While the breaker is open it is the fallback that failed.
    """
    course.planned = ""
    if reason == "interrupted":
        return False
    course.failures += 1
    if course.breaker_until is not None:
        course.fallback_failed = True
        return False
    if course.failures >= settings.max_attempts:
        course.breaker_until = now + BREAKER_SECONDS
        course.retry_at = None
        return True
    course.retry_at = now + _back_off(course)
    return False


def _back_off(course: Course) -> float:
    return BACK_OFF_SECONDS[min(course.failures, len(BACK_OFF_SECONDS)) - 1]


def bounded(course: Course, now: float) -> None:
    """Let no wait be longer than it was when it began: the clock may have been set back since."""
    if course.wanted_at is not None:
        course.wanted_at = min(course.wanted_at, now)
    if course.retry_at is not None:
        course.retry_at = min(course.retry_at, now + _back_off(course))
    if course.breaker_until is not None:
        course.breaker_until = min(course.breaker_until, now + BREAKER_SECONDS)


def given_up(course: Course) -> None:
    """A prepared plan came to nothing (stale, not stored, stopped): plan again at the next occasion."""
    course.planned = ""


def falls_back(course: Course, settings: BudgetSettings, *, now: float) -> bool:
    """Whether an attempt made now is the fallback's: the breaker is open, and it did not fail either."""
    return (
        course.breaker_until is not None
        and now < course.breaker_until
        and settings.fallback
        and not course.fallback_failed
    )


def mark_ineffective(course: Course, budget: Budget, reason: str) -> None:
    """Compaction cannot help, or did not: stop until window, figure or material really change."""
    course.ineffective = reason
    course.ineffective_times += 1
    course.ineffective_window = budget.window
    course.ineffective_used = budget.used()
    course.ineffective_total = budget.total.tokens
    course.ineffective_level = budget.level
    course.deferred = ""


def really_changed(course: Course, budget: Budget, settings: BudgetSettings) -> bool:
    """Whether something moved since compaction was found to be ineffective that may make it worth while."""
    usable = budget.usable(settings)
    material = max(keep_recent(budget, settings), usable // 10) << max(
        0, min(course.ineffective_times, 6) - 1
    )
    return (
        budget.window != course.ineffective_window
        or LEVELS.index(budget.level) > LEVELS.index(course.ineffective_level)
        or not at_least(budget.level, "compact")
        or budget.used() <= course.ineffective_used - _DROP_SHARE * usable
        or budget.total.tokens - course.ineffective_total >= material
    )


def gains(used_before: int, used_after: int, plan: Compact) -> bool:
    """Whether what was really built keeps the hard floors: a tenth of the range, and a share of what is used.

    The larger default (``min_gain`` of what is used) was asked for when planning; what is left of it after
    the packet took its real size must still be worth rewriting a prefix for.
    """
    saved = used_before - used_after
    return saved > 0 and saved >= max(GAIN_FLOOR * plan.range_tokens, USED_FLOOR * used_before)


def keep_recent(budget: Budget, settings: BudgetSettings) -> int:
    """Tokens of the recent part: the smaller of the setting and a tenth of the window."""
    return min(settings.keep_recent_tokens, budget.window // 10)


def _await(
    course: Course, budget: Budget, what: Literal["compaction", "trim"], least: int | None = None
) -> None:
    course.waiting_used = budget.used()
    floor = round(USED_FLOOR * course.waiting_used)
    course.waiting_least = floor if least is None else min(least, floor)
    course.awaiting = what
    course.samples_since_commit = 0
    course.not_applied_said = False


def used_tokens(budget: Budget, course: Course) -> int:
    """The figure; in shadow, what it would be had the compactions been real."""
    return max(0, budget.used() - course.shadow_saved)


def level_now(budget: Budget, course: Course, settings: BudgetSettings) -> Level:
    """The run's level; in shadow, the one it would have had."""
    if not course.shadow_saved:
        return budget.level
    return level_of(used_tokens(budget, course), budget.usable(settings), "ok", settings)
