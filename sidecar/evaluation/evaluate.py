"""The whole of `watchkeeper evaluate`: which strategies, over which scenarios and transcripts, and what came of it.

Order and results depend on the input alone. It prints nothing: what is shown is ``terminal``'s and ``page``'s.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import msgspec
from msgspec import Struct

from sidecar.config import Config
from sidecar.evaluation.course import Found, Summarizers, with_ledger, without_ledger
from sidecar.evaluation.outcome import SCHEMA, Asked, Evaluation, Figures, Moment, TranscriptRun, figures
from sidecar.evaluation.scenario import Scenario, read_scenario
from sidecar.evaluation.scripted import ScriptedSummarizer
from sidecar.evaluation.story import Act, acts
from sidecar.evaluation.strategies import WITHOUT_LEDGER
from sidecar.evaluation.transcripts import SIZES, FactCount, families, keep, read_transcripts, shorten
from sidecar.summarizers.choice import build_summarizers
from sidecar.summarizers.digest import DigestSummarizer
from sidecar.transport.jetstream import Link, LinkSettings

Progress = Callable[[str, int, int], None]
"""Called with what is being done, steps done, steps in all."""

TITLES: Final = {make.name: make.title for make in WITHOUT_LEDGER} | {
    "digest": "Watchkeeper, digest",
    "scripted": "Watchkeeper, rash model",
    "model": "Watchkeeper, your model",
}
"""Every strategy by the name it is asked for."""
WITH_LEDGER: Final = ("digest", "scripted", "model")


class Request(Struct, frozen=True, kw_only=True):
    """What is to be evaluated. ``compactions``: of each transcript; ``window``: of each transcript, in tokens."""

    scenarios: tuple[Path, ...] = ()
    transcripts: tuple[Path, ...] = ()
    format: str = "auto"
    strategies: tuple[str, ...] = ()
    """Empty: all, the configured model only if one is configured."""
    compactions: int = 5
    window: int | None = None


def strategies_of(request: Request, config: Config) -> tuple[str, ...]:
    """The strategies asked for, in the order they are told."""
    modelled = config.summarizer.kind != "digest"
    wanted = request.strategies or tuple(name for name in TITLES if name != "model" or modelled)
    return tuple(name for name in TITLES if name in wanted)


async def evaluate(
    request: Request, config: Config, progress: Progress = lambda what, done, total: None
) -> Evaluation:
    """Everything asked for. Raises ``ScenarioError`` and ``ImportFailure`` before anything is run."""
    read = [(scenario := read_scenario(file), acts(scenario, file)) for file in request.scenarios]
    groups = (
        families(read_transcripts(request.transcripts, format=request.format)) if request.transcripts else []
    )
    names = strategies_of(request, config)
    found, count = Found(), FactCount()
    runs: list[TranscriptRun] = []
    failures: list[str] = []
    kept = [name for name in names if name in WITH_LEDGER]
    total, done = len(read) * len(names) + len(groups) * (len(kept) + 1), 0

    def step(what: str) -> None:
        nonlocal done
        progress(what, done, total)
        done += 1

    async with _summarizers(config, names) as summarizers:
        for name in names:
            for scenario, told in read:
                step(f"{TITLES[name]}: {scenario.name}")
                await _one(scenario, told, name, config, summarizers, found)
        for tells in groups:
            covered = None
            sizes = msgspec.structs.replace(SIZES, window=request.window or SIZES.window)
            for name in kept:
                step(f"{TITLES[name]}: {tells[0].run}")
                made, facts, wrong = await keep(
                    tells, name, _asking(config, name), summarizers[name], sizes, request.compactions, count
                )
                covered = covered or facts
                runs += made if name == kept[0] else []
                failures += wrong
            step(f"others: {tells[0].run}")
            shorten(tells, sizes, request.compactions, covered or {}, count, names)
    progress("done", total, total)
    return Evaluation(
        schema=SCHEMA,
        scenarios=tuple(scenario.name for scenario, _ in read),
        transcripts=tuple(runs),
        figures=tuple(_figures(found, names)) if read else (),
        facts=count.shares(),
        moments=tuple(found.moments),
        answers=tuple(found.answers),
        failures=(*_failures(found), *failures),
    )


async def _one(
    scenario: Scenario,
    told: Sequence[Act],
    name: str,
    config: Config,
    summarizers: dict[str, Summarizers],
    found: Found,
) -> None:
    for make in WITHOUT_LEDGER:
        if make.name == name:
            without_ledger(scenario, told, make(scenario.sizes), found)
            # So that a signal is heard between two of them: nothing in it waits.
            await anyio.lowlevel.checkpoint()
            return
    if name == "scripted":
        # Its mistakes come in turn: a scenario's results must not depend on the ones before it.
        summarizers = {name: (ScriptedSummarizer(), DigestSummarizer())}
    await with_ledger(scenario, told, name, _asking(config, name), summarizers[name], found)


def _asking(config: Config, name: str) -> Config:
    """The configuration as it is when this summariser is the configured one."""
    kinds = {"digest": "digest", "scripted": "nats"}
    if name not in kinds:
        return config
    summarizer = msgspec.structs.replace(config.summarizer, kind=kinds[name], fallback="digest")
    return msgspec.structs.replace(config, summarizer=summarizer)


@asynccontextmanager
async def _summarizers(config: Config, names: Sequence[str]) -> AsyncIterator[dict[str, Summarizers]]:
    """A summariser for each Watchkeeper strategy; for one over NATS with a connection."""
    made: dict[str, Summarizers] = {
        "digest": (DigestSummarizer(), None),
        "scripted": (ScriptedSummarizer(), DigestSummarizer()),
    }
    if "model" not in names:
        yield made
        return
    if config.summarizer.kind != "nats":
        yield made | {"model": build_summarizers(config)}
        return
    async with anyio.create_task_group() as tasks:
        settings = LinkSettings(url=config.nats.url, creds=config.nats.creds, name="watchkeeper-evaluate")
        link = Link(settings, lambda connected, reason: None)
        await tasks.start(link.run)
        yield made | {"model": build_summarizers(config, link, config.lanes[0] if config.lanes else "main")}
        tasks.cancel_scope.cancel()


def _figures(found: Found, names: Sequence[str]) -> list[Figures]:
    return [
        figures(
            name,
            TITLES[name],
            watchkeeper=name in WITH_LEDGER,
            answers=found.answers,
            moments=found.moments,
            compactions=found.compactions[name],
        )
        for name in names
    ]


def _failures(found: Found) -> list[str]:
    """What a Watchkeeper strategy got wrong, a line each, in order."""
    lines = [
        _answer_line(answer)
        for answer in found.answers
        if answer.strategy in WITH_LEDGER and not answer.passed
    ]
    for moment in found.moments:
        if moment.strategy in WITH_LEDGER and moment.lost:
            lines.append(f"{_where(moment)}: protected and not there word for word: {', '.join(moment.lost)}")
        if moment.strategy in WITH_LEDGER and not moment.within:
            lines.append(f"{_where(moment)}: the packet is over its budget")
    return lines


def _answer_line(answer: Asked) -> str:
    return f"{_where(answer)}: {answer.probe}: got {answer.got}"


def _where(item: Asked | Moment) -> str:
    when = "at the end" if item.end else f"after {item.after} compaction{'' if item.after == 1 else 's'}"
    return f"{item.strategy}: {item.scenario}, {when}"
