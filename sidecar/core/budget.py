"""How full a run's context is: a figure kept up to date event by event, in constant time.

Used = the newest request's whole prompt as reported + an estimate of what came after its last event. The
figure drops when the agent takes a packet up, never because we committed one. This module decides nothing
about compaction and knows no clock and no batch.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from protocol.content import Model
from protocol.events import (
    ContextReplaced,
    Event,
    Message,
    ModelChanged,
    RunResumed,
    RunStarted,
    UsageReported,
)
from sidecar.core.samples import (
    ELSEWHERE,
    MARKS,
    Budget,
    Expected,
    Ignored,
    Mark,
    count_ignored,
    expectation,
    find_mark,
    take_sample,
    take_up,
)
from sidecar.core.tokens import added
from sidecar.core.window import (
    HYSTERESIS,
    LEVELS,
    BudgetSettings,
    Level,
    at_least,
    gauge,
    level_of,
    usable,
)

__all__ = [
    "HYSTERESIS",
    "LEVELS",
    "Budget",
    "BudgetSettings",
    "Expected",
    "Level",
    "Observed",
    "after_take_up",
    "at_least",
    "expect",
    "level_of",
    "observe",
    "took_up",
    "usable",
]


class Observed(Struct, frozen=True, gc=False):
    """What one event did to the figure. ``sample_error``: (expected - reported) / reported."""

    level_before: Level
    level_after: Level
    used: int
    usable: int
    sampled: bool = False
    sample_error: float | None = None
    ignored: Ignored | None = None
    took_up: bool = False


def observe(
    budget: Budget,
    event: Event,
    *,
    position: int,
    current: bool,
    late: bool,
    settings: BudgetSettings,
    channel: str = "event",
) -> Observed:
    """Account for one event, in stream order. Constant time.

    ``current`` is false for what another session says: it moves nothing. ``late`` events bring their
    content, but set no current value. ``channel`` is the message's; ``through`` names the event channel.
    """
    before = budget.level
    ignored: Ignored | None = None
    error: float | None = None
    sampled = taken = fresh = False
    if not current:
        if isinstance(event, UsageReported):
            ignored = count_ignored(budget, "foreign_session")
        return Observed(before, before, budget.used(), budget.usable(settings), ignored=ignored)
    # Types are compared, not asked for by ``isinstance``, wherever nearly every event says no.
    if type(event) is Message:
        if event.role == "assistant":
            budget.before_assistant = Mark("", position - 1, budget.total)
    elif type(event) is UsageReported:
        ignored, error, taken = take_sample(budget, event, late)
        sampled = ignored is None
    elif not late and type(event) in _CHANGES:
        fresh, taken = _change(budget, event, position, settings)
    total = budget.total
    if (more := added(total, event)) is not total:
        total = budget.total = more
    marks = budget.marks
    marks.append(Mark(event.id if channel == "event" else ELSEWHERE + event.id, position, total))
    if len(marks) > MARKS:
        del marks[0]
        budget.marks_lost = True
    used = budget.used()
    room, quiet = gauge(budget.window, budget.max_output, settings)
    previous: Level = "ok" if fresh else before
    # Nearly every event leaves nothing to look at.
    level: Level = "ok" if previous == "ok" and used < quiet else level_of(used, room, previous, settings)
    if level != before:
        budget.level = level
    if fresh and at_least(level, "compact"):
        budget.by_model = LEVELS.index(level) > LEVELS.index(before)
    elif budget.by_model and (taken or not at_least(level, "compact")):
        budget.by_model = False
    return Observed(before, level, used, room, sampled, error, ignored, taken)


def _change(budget: Budget, event: Event, position: int, settings: BudgetSettings) -> tuple[bool, bool]:
    """What one of ``_CHANGES`` does: whether it changed the window, and whether a history was taken up."""
    match event:
        case RunStarted():
            fresh = _set_model(budget, event.model)
            _session(budget, event.session)
            return fresh, False
        case ModelChanged():
            return _set_model(budget, event.model), False
        case RunResumed():
            _session(budget, event.session)
            taken = event.packet_id is not None
            if taken:
                take_up(budget, expectation(budget, settings), position, known=budget.expected is not None)
            return False, taken
        case ContextReplaced() if event.context_tokens:
            take_up(budget, event.context_tokens, position, known=False, whole=True)
        case ContextReplaced():
            known = budget.expected is not None and event.packet_id is not None
            tokens = expectation(budget, settings)
            kept = None if known or event.kept_from is None else find_mark(budget, event.kept_from)
            if kept is not None:
                tokens = min(tokens, settings.packet_tokens + budget.since(kept.total))
            take_up(budget, tokens, position, known=known)
    return False, True


_CHANGES: Final = frozenset({RunStarted, ModelChanged, RunResumed, ContextReplaced})


def expect(budget: Budget, *, packet_tokens: int, tail_tokens: int) -> None:
    """A packet was committed: what the context will hold once it is taken up (tail: provider's tokens).

    Nothing drops yet. Later packets of the same checkpoint need not be told.
    """
    budget.expected = Expected(packet_tokens + tail_tokens, budget.total)


def took_up(budget: Budget, *, packet_tokens: int, tail_tokens: int, settings: BudgetSettings) -> None:
    """The history was replaced by a packet and this tail, as the caller knows: the figure drops."""
    position = budget.marks[-1].position if budget.marks else 0
    take_up(budget, packet_tokens + tail_tokens, position, known=True)
    budget.level = level_of(budget.used(), budget.usable(settings), budget.level, settings)


def after_take_up(budget: Budget, *, packet_tokens: int, tail_tokens: int) -> int:
    """The figure to expect once this packet is taken up, with the fixed cost as far as it is known."""
    return budget.fixed + packet_tokens + tail_tokens


def _session(budget: Budget, session: str | None) -> None:
    if session is None or session == budget.session:
        return
    if budget.session is not None:
        # Whether the new session carries the old history is not known before it reports.
        budget.content = None
    budget.session = session
    budget.before_assistant = None


def _set_model(budget: Budget, model: Model) -> bool:
    """Whether anything that sizes the window changed."""
    changed = (model.name, model.context_window, model.max_output_tokens) != (
        budget.model,
        budget.window,
        budget.max_output,
    )
    budget.model = model.name
    budget.window = model.context_window
    budget.max_output = model.max_output_tokens
    if changed:
        budget.report_model, budget.other_models = "", 0
        budget.reweigh()
    return changed
