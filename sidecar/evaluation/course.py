"""Takes one scenario through one strategy, step by step, and asks its probes where they are to be asked.

A probe is asked at the end; one with ``since`` also before the first compaction and after each one, from that step
on and until another, if it names one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from protocol.events import Settings
from sidecar.config import Config
from sidecar.evaluation.bench import BEGAN, STEP_SECONDS, bench
from sidecar.evaluation.keeper import Keeper
from sidecar.evaluation.outcome import Asked, CompactionCount, Moment
from sidecar.evaluation.probes import Answer, ask_keeper, ask_shown
from sidecar.evaluation.reader import Items, Reader
from sidecar.evaluation.scenario import Probe, Scenario
from sidecar.evaluation.story import Act, Compact, Tell, Wait
from sidecar.evaluation.strategies import Conversation, Strategy
from sidecar.summarizers import Summarizer

Summarizers = tuple[Summarizer, Summarizer | None]


class Found:
    """What was found so far; filled by both ways through a scenario."""

    def __init__(self) -> None:
        self.answers: list[Asked] = []
        self.moments: list[Moment] = []
        self.compactions: dict[str, CompactionCount] = {}

    def count(self, strategy: str, made: CompactionCount) -> None:
        before = self.compactions.get(strategy, CompactionCount())
        self.compactions[strategy] = CompactionCount(
            wanted=before.wanted + made.wanted,
            made=before.made + made.made,
            refused=before.refused + made.refused,
        )


class _Walk:
    """Where a scenario stands: steps seen, compactions made, the truth as of now."""

    def __init__(self, scenario: Scenario, strategy: str, found: Found) -> None:
        self.scenario = scenario
        self.strategy = strategy
        self.found = found
        self.truth = Reader(settings_of(scenario))
        self.after = 0
        self._seen: set[str] = set()

    def tell(self, tell: Tell) -> None:
        self.truth.see(tell)
        self._seen.add(tell.step)

    def probes(self, *, end: bool) -> list[Probe]:
        """Those to be asked now."""
        return [
            probe
            for probe in self.scenario.probes
            if (end or probe.since is not None)
            and (probe.since is None or probe.since in self._seen)
            and (probe.until is None or probe.until not in self._seen)
        ]

    def answer(self, probe: Probe, answer: Answer, *, end: bool) -> None:
        self.found.answers.append(
            Asked(
                scenario=self.scenario.name,
                covers=self.scenario.covers,
                strategy=self.strategy,
                probe=probe.name,
                key=probe.key,
                after=self.after,
                end=end,
                passed=answer.passed,
                got=answer.got,
                harm=answer.harm,
            )
        )

    def moment(self, items: Items, *, tokens: int, within: bool, end: bool) -> None:
        true = self.truth.protected()
        lost = tuple(sorted(key for key, item in true.items() if items.get(key) != item))
        self.found.moments.append(
            Moment(
                scenario=self.scenario.name,
                strategy=self.strategy,
                after=self.after,
                end=end,
                protected=len(true),
                kept=len(true) - len(lost),
                lost=lost,
                tokens=tokens,
                within=within,
            )
        )


def settings_of(scenario: Scenario) -> Settings:
    """The rules of the application, as the fold reads them."""
    rules = scenario.rules
    return Settings(
        authority_required=rules.authority_required,
        approval_kinds=rules.approval_kinds,
        forbidden_kinds=rules.forbidden_kinds,
        reconcile_by_authority_kinds=rules.reconcile_by_authority_kinds,
    )


def configured(config: Config, scenario: Scenario) -> Config:
    """The configuration with the scenario's rules and sizes."""
    replace, rules, sizes = msgspec.structs.replace, scenario.rules, scenario.sizes
    return replace(
        config,
        mode="live",
        authority=replace(
            config.authority,
            required=rules.authority_required,
            approval_kinds=rules.approval_kinds,
            forbidden_kinds=rules.forbidden_kinds,
        ),
        operations=replace(
            config.operations, reconcile_by_authority_kinds=rules.reconcile_by_authority_kinds
        ),
        budget=replace(
            config.budget,
            keep_recent_tokens=sizes.keep_recent_tokens,
            packet_tokens=sizes.packet_tokens,
        ),
    )


def without_ledger(scenario: Scenario, acts: Sequence[Act], strategy: Strategy, found: Found) -> None:
    """Take the scenario through a strategy that keeps no ledger."""
    walk = _Walk(scenario, strategy.name, found)
    conversation = Conversation()
    now = BEGAN
    room = scenario.sizes.keep_recent_tokens + scenario.sizes.packet_tokens

    def look(*, end: bool) -> None:
        shown = strategy.shown()
        reader = Reader.of(settings_of(scenario), shown.told)
        for probe in walk.probes(end=end):
            walk.answer(probe, ask_shown(shown, reader, now, probe), end=end)
        walk.moment(reader.protected(), tokens=shown.tokens, within=shown.tokens <= room, end=end)

    for act in acts:
        match act:
            case Tell():
                walk.tell(act)
                strategy.add(conversation.line(act))
                now += STEP_SECONDS
            case Wait():
                now += act.seconds
            case Compact():
                if walk.after == 0:
                    look(end=False)
                strategy.compact()
                walk.after += 1
                look(end=False)
    look(end=True)
    found.count(strategy.name, CompactionCount(wanted=walk.after, made=walk.after))


async def with_ledger(
    scenario: Scenario,
    acts: Sequence[Act],
    name: str,
    config: Config,
    summarizers: Summarizers,
    found: Found,
    *,
    begin: Callable[[Keeper], None] = lambda keeper: None,
    at_end: Callable[[Keeper], Awaitable[None]] | None = None,
) -> None:
    """Take the scenario through Watchkeeper. ``begin`` and ``at_end`` are called with the keeper before the first
    step and after the last probe."""
    walk = _Walk(scenario, name, found)
    made = 0
    async with bench(configured(config, scenario), summarizers) as lane:
        keeper = Keeper(lane, name, scenario.sizes.packet_tokens)
        begin(keeper)

        async def look(*, end: bool) -> None:
            left = await keeper.left()
            for probe in walk.probes(end=end):
                walk.answer(probe, await ask_keeper(keeper, left, probe), end=end)
            walk.moment(keeper.protected(left), tokens=left.tokens, within=left.within, end=end)

        waiting: list[Tell] = []
        for act in acts:
            match act:
                case Tell():
                    walk.tell(act)
                    waiting.append(act)
                case Wait():
                    await keeper.tell(waiting)
                    waiting = []
                    lane.wait(act.seconds)
                case Compact():
                    await keeper.tell(waiting)
                    waiting = []
                    if walk.after == 0:
                        await look(end=False)
                    made += await keeper.compact()
                    walk.after += 1
                    await look(end=False)
        await keeper.tell(waiting)
        await look(end=True)
        if at_end is not None:
            await at_end(keeper)
    refused = sum(receipt.get("outcome") == "failed" for receipt in keeper.attempts)
    found.count(name, CompactionCount(wanted=walk.after, made=made, refused=refused))
