"""What a run's context figure rests on: the newest sample, what came since, and what was learnt from both.

Only single requests of the current session count. Sums, older samples, samples from before the last take-up
and nonsense are refused by name. Constant time, bounded memory; nothing here knows a clock or a batch.

A ``Budget`` holds only numbers, tuples, dictionaries that are replaced whole, and the list of its marks, which
grows in place; ``copy.copy`` gives a true copy.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from protocol.events import UsageReported
from protocol.identifiers import MAX_INTEGER
from sidecar.core.tokens import KINDS, NOTHING, Estimate, Kind
from sidecar.core.window import BudgetSettings, Level, gauge

DROP: Final = 0.80
"""A sample at or under this share of what was expected means that the history was replaced."""

MARKS: Final = 96
ELSEWHERE: Final = "~"
"""Before the id of a message of another channel: ``through`` means it only if no event has the id."""

_RATIOS = 7
_LEAST_DELTA = 200
"""Tokens between two samples below which their ratio says more about rounding than about the content."""
_LEAST_FACTOR = 0.25
_MOST_FACTOR = 4.0
_DIFFERENCES = 8
_MODELS_REMEMBERED = 16
_PATIENCE = 2
"""Reports in a row that may be set aside for an unknown model or ``through``; a run must not go blind."""

Ignored = Literal[
    "aggregate", "foreign_session", "late", "zero", "nonsense", "other_model", "before_take_up", "older"
]


class Mark(Struct, frozen=True, array_like=True, gc=False):
    """Where an event of the agent's channel stands, and what all events up to it are estimated at."""

    event_id: str
    position: int
    total: Estimate


class Sample(Struct, frozen=True, array_like=True, gc=False):
    """One report that counted: the prompt's tokens, and up to where it reached."""

    tokens: int
    model: str
    position: int
    total: Estimate


class Expected(Struct, frozen=True, array_like=True, gc=False):
    """What the context will hold once the newest packet is taken up."""

    tokens: int
    """Packet and tail at the time of the commit, fixed cost not included."""
    total: Estimate
    """The estimate of all events at that time."""


class Budget(Struct, kw_only=True, omit_defaults=True):
    """Accounting state of one run. Written by ``observe``, ``took_up`` and ``expect`` only."""

    model: str = ""
    window: int = 0
    max_output: int | None = None
    session: str | None = None
    level: Level = "ok"
    by_model: bool = False
    """The level last rose because the model changed."""

    total: Estimate = NOTHING
    """Everything estimated since the run began."""
    base: int = 0
    """Tokens of the context when ``total`` was ``base_total``; without the fixed cost if ``estimated``."""
    base_total: Estimate = NOTHING
    estimated: bool = True
    content: int | None = 0
    """What events (and a packet) accounted for when ``total`` was ``content_total``; None: not known."""
    content_total: Estimate = NOTHING

    sample: Sample | None = None
    marks: list[Mark] = []
    """Of the newest events since the last sample, at most ``MARKS``."""
    marks_lost: bool = False
    before_assistant: Mark | None = None
    """The last event before the newest assistant message of the session."""
    taken_up: Mark | None = None
    used_before_take_up: int = 0
    expected: Expected | None = None
    take_ups: int = 0

    differences: tuple[int, ...] = ()
    """Reports less the estimate of what they cover: the smallest few seen."""
    ratios: dict[str, tuple[float, ...]] = {}
    """``<model>|<kind>`` → the newest ratios of reported to estimated tokens."""
    weights: tuple[float, ...] = (1.0,) * len(KINDS)
    """``factor`` of each kind for the present model, in the order of ``KINDS``: asked for at every event."""
    report_model: str = ""
    other_models: int = 0
    unknown_through: int = 0
    ignored: dict[str, int] = {}

    def __copy__(self) -> Budget:
        return replace(self, marks=self.marks.copy())

    def used(self) -> int:
        """Tokens in the context now, by the newest sample and the estimate of what came since."""
        total, base = self.total, self.base_total
        tokens = self.base
        if total is not base:
            # As ``since`` does, but spelt out: this runs for every event.
            prose, data, reasoning, image = self.weights
            tokens += round(
                (total.prose - base.prose) * prose
                + (total.data - base.data) * data
                + (total.reasoning - base.reasoning) * reasoning
                + (total.image - base.image) * image
            )
        if self.estimated:
            tokens += self.fixed
        # No report is too large to be believed while no window is known; every figure told must fit the wire.
        return tokens if tokens < MAX_INTEGER else MAX_INTEGER

    @property
    def fixed(self) -> int:
        """Tokens of system prompt and tools, in every prompt: the smallest difference two reports show."""
        if len(self.differences) < 2:
            return 0
        for smaller, larger in zip(self.differences, self.differences[1:], strict=False):
            if larger - smaller <= max(256, larger // 10):
                return max(0, smaller)
        return 0

    def factor(self, kind: Kind) -> float:
        """Provider's tokens per estimated token of this kind; 1.0 until two ratios say otherwise."""
        return _factor(self.ratios.get(f"{self.model}|{kind}", ()))

    def weigh(self, amount: Estimate) -> int:
        """An estimate in the provider's tokens, by the factors learnt."""
        return self.since(NOTHING, amount)

    def since(self, then: Estimate, now: Estimate | None = None) -> int:
        """The same of what was added to ``then`` until ``now`` (None: ``total``), without an object for it."""
        if now is None:
            now = self.total
        prose, data, reasoning, image = self.weights
        return round(
            (now.prose - then.prose) * prose
            + (now.data - then.data) * data
            + (now.reasoning - then.reasoning) * reasoning
            + (now.image - then.image) * image
        )

    def reweigh(self) -> None:
        """Take over what the ratios say for the present model; call when either changed."""
        self.weights = tuple([self.factor(kind) for kind in KINDS])

    def scale(self) -> float:
        """The factor over all content seen since the history was last replaced; 1.0 for none."""
        amount = self.total - self.content_total
        return self.weigh(amount) / amount.tokens if amount.tokens > 0 else 1.0

    def usable(self, settings: BudgetSettings) -> int:
        """Tokens of the window that history may take."""
        return gauge(self.window, self.max_output, settings).usable


def expectation(budget: Budget, settings: BudgetSettings) -> int:
    """Tokens after an announced take-up, fixed cost left out; never more than what is there now."""
    now = budget.used() - budget.fixed
    if budget.expected is not None:
        since = budget.since(budget.expected.total)
        return min(now, budget.expected.tokens + since)
    return max(0, min(now, settings.packet_tokens + budget.weigh(budget.total)))


def take_up(budget: Budget, tokens: int, position: int, *, known: bool, whole: bool = False) -> None:
    """The context is ``tokens`` now; ``whole``: the fixed cost is among them."""
    again = budget.taken_up is not None and budget.sample is None and budget.total == budget.taken_up.total
    if not again:
        # Both ``context.replaced`` and ``run.resumed`` may tell of the same one.
        budget.used_before_take_up = budget.used()
    budget.base, budget.base_total, budget.estimated = max(0, tokens), budget.total, not whole
    budget.content, budget.content_total = (max(0, tokens), budget.total) if known else (None, budget.total)
    budget.sample = None
    budget.taken_up = Mark("", position, budget.total)
    budget.take_ups += 1


def take_sample(
    budget: Budget, event: UsageReported, late: bool
) -> tuple[Ignored | None, float | None, bool]:
    """Why it was ignored, how far the expectation was off, and whether it shows a take-up."""
    reason = _refusal(budget, event, late)
    if reason is not None:
        return count_ignored(budget, reason), None, False
    through = _through(budget, event)
    if isinstance(through, str):
        return count_ignored(budget, through), None, False
    budget.report_model, budget.other_models, budget.unknown_through = event.model, 0, 0
    tokens = event.context_tokens
    # A report of before the newest estimate of a replaced history cannot be measured against it.
    expected = budget.base + budget.since(budget.base_total, through.total)
    if budget.estimated:
        expected += budget.fixed
    last = budget.sample
    comparable = last is None or last.model == event.model
    known = last is not None or budget.expected is not None
    taken = known and (comparable or budget.expected is not None) and tokens <= DROP * expected
    error: float | None = None
    if taken:
        since = None if budget.expected is None else budget.since(budget.expected.total, through.total)
        budget.used_before_take_up = budget.used()
        budget.content = None if budget.expected is None else budget.expected.tokens + (since or 0)
        budget.content_total = through.total
        budget.taken_up = through
        budget.take_ups += 1
    elif last is not None and comparable:
        error = (expected - tokens) / tokens
        _learn_factor(budget, tokens - last.tokens, last.total, through.total)
    if budget.content is not None:
        # Without factors: one learnt from what came lately would be held against everything before it.
        covered = budget.content + through.total.tokens - budget.content_total.tokens
        _learn_fixed(budget, tokens - covered)
    budget.base, budget.base_total, budget.estimated = tokens, through.total, False
    budget.sample = Sample(tokens, event.model, through.position, through.total)
    reached = through.position
    budget.marks = [mark for mark in budget.marks if mark.position >= reached]
    budget.marks_lost = False
    return None, error, taken


def _refusal(budget: Budget, event: UsageReported, late: bool) -> Ignored | None:
    if late:
        return "late"
    if event.scope == "aggregate":
        return "aggregate"
    if event.context_tokens <= 0:
        return "zero"
    if budget.window and event.context_tokens > 2 * budget.window:
        return "nonsense"
    other = budget.report_model not in ("", event.model) and not _same_model(event.model, budget.report_model)
    if other and not _same_model(event.model, budget.model) and budget.other_models < _PATIENCE:
        # A small model asked on the side says nothing about this context.
        budget.other_models += 1
        return "other_model"
    return None


def _through(budget: Budget, event: UsageReported) -> Mark | Ignored:
    """Up to where the report reaches, or why that makes it worthless."""
    mark = budget.before_assistant
    if mark is None:
        mark = Mark("", budget.marks[-1].position if budget.marks else 0, budget.total)
    named = event.through is not None
    if named:
        found = find_mark(budget, event.through or "")
        if found is not None:
            mark = found
        elif (
            (budget.sample is not None or budget.taken_up is not None)
            and not budget.marks_lost
            and budget.unknown_through < _PATIENCE
        ):
            # All events since the last sample are known, so this one was before it.
            budget.unknown_through += 1
            return "older" if budget.sample is not None else "before_take_up"
    taken_up = budget.taken_up
    if taken_up is not None and mark.position < taken_up.position:
        if named and mark.total != taken_up.total:
            return "before_take_up"
        # The request may be the first one after the take-up (no content lies between) or the last one before
        # it: only its size tells, where the take-up made enough of a difference.
        limit = DROP * budget.used_before_take_up
        if event.context_tokens > limit and budget.base + budget.fixed <= limit:
            return "before_take_up"
        mark = taken_up
    if budget.sample is not None and mark.position < budget.sample.position:
        return "older"
    return mark


def find_mark(budget: Budget, name: str) -> Mark | None:
    """The newest remembered event of that id."""
    for wanted in (name, ELSEWHERE + name):
        for mark in reversed(budget.marks):
            if mark.event_id == wanted:
                return mark
    return None


def _same_model(one: str, other: str) -> bool:
    """Providers report dated or prefixed forms of the name that was asked for."""
    return one in other or other in one


def _learn_factor(budget: Budget, reported: int, then: Estimate, now: Estimate) -> None:
    """One ratio for the kind that makes up most of what came between two samples."""
    prose, data = now.prose - then.prose, now.data - then.data
    reasoning, image = now.reasoning - then.reasoning, now.image - then.image
    tokens = prose + data + reasoning + image
    if tokens < _LEAST_DELTA:
        return
    most, own = 0, prose
    if data > own:
        most, own = 1, data
    if reasoning > own:
        most, own = 2, reasoning
    if image > own:
        most, own = 3, image
    if own * 2 < tokens:
        return
    weights = list(budget.weights)
    others = (
        (prose * weights[0] if most != 0 else 0.0)
        + (data * weights[1] if most != 1 else 0.0)
        + (reasoning * weights[2] if most != 2 else 0.0)
        + (image * weights[3] if most != 3 else 0.0)
    )
    ratio = (reported - others) / own
    if ratio < _LEAST_FACTOR:
        ratio = _LEAST_FACTOR
    elif ratio > _MOST_FACTOR:
        ratio = _MOST_FACTOR
    key = f"{budget.model}|{KINDS[most]}"
    ratios = dict(budget.ratios)
    newest = ratios[key] = (*ratios.pop(key, ()), ratio)[-_RATIOS:]
    budget.ratios = ratios
    if len(ratios) > _MODELS_REMEMBERED:
        while len(ratios) > _MODELS_REMEMBERED:
            del ratios[next(iter(ratios))]
        budget.reweigh()
    else:
        weights[most] = _factor(newest)
        budget.weights = tuple(weights)


def _factor(ratios: tuple[float, ...]) -> float:
    """The median, as ``statistics.median`` at a tenth of its cost."""
    if len(ratios) < 2:
        return 1.0
    # A single odd report spoils two ratios, one up and one down: the median of three forgives it.
    numbers = sorted(ratios if len(ratios) > 2 else (*ratios, 1.0))
    middle = len(numbers) // 2
    return numbers[middle] if len(numbers) % 2 else (numbers[middle - 1] + numbers[middle]) / 2


def _learn_fixed(budget: Budget, difference: int) -> None:
    known = budget.differences
    if len(known) < _DIFFERENCES or difference < known[-1]:
        budget.differences = tuple(sorted((*known, max(0, difference))))[:_DIFFERENCES]


def count_ignored(budget: Budget, reason: Ignored) -> Ignored:
    budget.ignored = {**budget.ignored, reason: budget.ignored.get(reason, 0) + 1}
    return reason
