"""When history is shortened.

``decide`` is asked after every folded message of a run and on timers, ``on_request`` when somebody asks; they
look at a few counters. What to do then is ``planning``'s. Coverage follows from the stream and
the committed checkpoints alone; the clock only matters for back-off, breaker and the patience with work in
flight. Nothing here calls anyone or stores anything.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from sidecar.core.budget import Budget, BudgetSettings, at_least
from sidecar.core.course import (
    Course,
    Defer,
    DeferReason,
    Trigger,
    bounded,
    falls_back,
    level_now,
    really_changed,
)
from sidecar.core.planning import open_calls
from sidecar.core.state import Ledger

IN_FLIGHT_PATIENCE: Final = 60.0
"""Seconds, from when the level was first wanted, that work in flight may hold a compaction below critical."""

_REPLAN_SHARE = 32
"""A deferred plan is made anew once the tail grew by this part of it, or when what held it changed."""


class Nothing(Struct, frozen=True):
    """Go on."""


class Prepare(Struct, frozen=True, kw_only=True):
    """Freeze the run here and plan. ``fallback``: the configured summariser is not to be asked."""

    trigger: Trigger
    fallback: bool = False


Step = Nothing | Defer | Prepare

NOTHING: Final = Nothing()


def decide(
    ledger: Ledger,
    budget: Budget,
    course: Course,
    settings: BudgetSettings,
    *,
    mode: str,
    bypass: bool,
    now: float,
) -> Step:
    """Whether to plan a compaction at this message; notes in ``course`` what it said and since when it waits.

    ``now``: seconds of any one clock. Cost: the open items of the ledger.
    """
    bounded(course, now)
    if not at_least(level_now(budget, course, settings), "compact"):
        if not (course.asked and in_flight(ledger)):
            course.wanted_at, course.asked = None, False
        course.deferred = course.ineffective = course.planned = ""
        return NOTHING
    return _decide(ledger, budget, course, settings, mode=mode, bypass=bypass, now=now, requested=False)


def on_request(
    ledger: Ledger,
    budget: Budget,
    course: Course,
    settings: BudgetSettings,
    *,
    mode: str,
    bypass: bool,
    now: float,
) -> Prepare | Defer:
    """The same for one who asks, whatever the level. A refusal is for the asker alone: it does not pass for told
    to everybody, and who asks again waits no longer for work in flight than since the first time."""
    bounded(course, now)
    told = course.deferred
    step = _decide(ledger, budget, course, settings, mode=mode, bypass=bypass, now=now, requested=True)
    if isinstance(step, Prepare):
        return step
    course.deferred = told
    if isinstance(step, Nothing):
        # The run has finished, or has no window: there is nothing to make room for.
        return Defer(reason="little_new", changed=False)
    course.asked = course.asked or step.reason == "in_flight"
    return step


def _decide(
    ledger: Ledger,
    budget: Budget,
    course: Course,
    settings: BudgetSettings,
    *,
    mode: str,
    bypass: bool,
    now: float,
    requested: bool,
) -> Step:
    if ledger.head.finished is not None or budget.usable(settings) <= 0:
        return NOTHING
    if mode == "observe" or bypass:
        return _defer(course, "mode")
    if course.wanted_at is None:
        course.wanted_at = now
    level = level_now(budget, course, settings)
    critical = at_least(level, "critical")
    held = _held(course, budget, settings, now, critical=critical, requested=requested)
    if held is not None:
        return held
    if not critical and now < course.wanted_at + IN_FLIGHT_PATIENCE and in_flight(ledger):
        return _defer(course, "in_flight")
    print_ = _fingerprint(ledger, budget, level)
    position = ledger.head.position
    step = max(1, (position - course.covers_through) // _REPLAN_SHARE)
    if not requested and course.planned == print_ and position < course.planned_at + step:
        return NOTHING
    course.planned, course.planned_at = print_, position
    trigger: Trigger = "threshold"
    if requested:
        trigger = "requested"
    elif budget.by_model:
        trigger = "model_changed"
    elif critical:
        trigger = "overflow" if level == "overflow" else "critical"
    return Prepare(trigger=trigger, fallback=falls_back(course, settings, now=now))


def _held(
    course: Course, budget: Budget, settings: BudgetSettings, now: float, *, critical: bool, requested: bool
) -> Step | None:
    """What earlier compactions say against another one."""
    if course.awaiting_take_up and not (course.awaiting == "trim" and critical):
        if course.not_applied:
            return _defer(course, "not_applied")
        return _defer(course, "cool_down") if requested else NOTHING
    if course.ineffective:
        if not really_changed(course, budget, settings):
            return _defer(course, "little_new") if requested else NOTHING
        course.ineffective = ""
    if course.breaker_until is not None:
        if now >= course.breaker_until:
            # Half open: one more try of the configured summariser; its failure opens the breaker again.
            course.breaker_until = None
            course.fallback_failed = False
            course.failures = max(0, settings.max_attempts - 1)
        elif not falls_back(course, settings, now=now):
            return _defer(course, "breaker")
    elif course.retry_at is not None and now < course.retry_at:
        return _defer(course, "cool_down")
    return None


def in_flight(ledger: Ledger) -> bool:
    """Whether an operation is pending or a call open."""
    return bool(open_calls(ledger)) or any(
        operation.state == "pending" for operation in ledger.active["operation"].values()
    )


def _fingerprint(ledger: Ledger, budget: Budget, level: str) -> str:
    """What may lift a deferral at once when it changes."""
    counts = (len(ledger.items["artifact"]), len(ledger.active["gap"]), len(ledger.active["call"]))
    return f"{level}/{budget.window}/{budget.take_ups}/{'/'.join(map(str, counts))}"


def _defer(course: Course, reason: DeferReason) -> Defer:
    changed = course.deferred != reason
    course.deferred = reason
    return Defer(reason=reason, changed=changed)
