"""Takes transcripts through the strategies, and asks afterwards for the facts of what was covered.

Nobody knows the right answers here, so the facts are taken by rule (``facts``) from the part of the history that
Watchkeeper's newest checkpoint covers; every strategy is asked for the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from protocol.codec import decode_event
from protocol.errors import ProtocolError
from sidecar.config import Config
from sidecar.evaluation.bench import bench
from sidecar.evaluation.course import Summarizers
from sidecar.evaluation.facts import Fact, facts
from sidecar.evaluation.keeper import TOP, Keeper, Left
from sidecar.evaluation.outcome import CompactionCount, FactShares, TranscriptRun
from sidecar.evaluation.scenario import Sizes
from sidecar.evaluation.story import Tell
from sidecar.evaluation.strategies import WITHOUT_LEDGER, Conversation, Strategy
from sidecar.evaluation.wording import normal
from sidecar.importers import import_files

SIZES = Sizes(window=200_000, keep_recent_tokens=2_000, packet_tokens=8_000)
_LOST_SHOWN = 20


class Tally:
    """Facts of one strategy and kind, counted."""

    def __init__(self) -> None:
        self.facts = self.in_packet = self.by_ref = self.by_search = self.top3 = 0
        self.lost: list[str] = []

    def shares(self, strategy: str, kind: str, *, searches: bool) -> FactShares:
        return FactShares(
            strategy=strategy,
            kind=kind,
            facts=self.facts,
            in_packet=self.in_packet,
            by_ref=self.by_ref,
            by_search=self.by_search,
            lost=len(self.lost),
            top3=self.top3 if searches else -1,
            lost_facts=tuple(self.lost[:_LOST_SHOWN]),
        )


class FactCount:
    """Every strategy's tallies over all transcripts."""

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._searching: set[str] = set()

    def of(self, strategy: str, kind: str) -> Tally:
        return self._tallies.setdefault((strategy, kind), Tally())

    def searching(self, strategy: str) -> None:
        """The strategy has a search to ask."""
        self._searching.add(strategy)

    def shares(self) -> tuple[FactShares, ...]:
        return tuple(
            tally.shares(strategy, kind, searches=strategy in self._searching)
            for (strategy, kind), tally in self._tallies.items()
        )


def read_transcripts(files: Sequence[Path], *, format: str = "auto") -> list[Tell]:
    """The messages of transcripts, without what the protocol refuses. Raises ``ImportFailure``."""
    found: list[Tell] = []
    for message in import_files(files, format=format):
        try:
            channel = message.channel
            decode_event(message.payload(), run=message.run, channel=channel)
        except ProtocolError:
            continue
        found.append(
            Tell(number=len(found) + 1, run=message.run, channel=message.channel, event=message.event)
        )
    return found


def families(tells: Sequence[Tell]) -> list[list[Tell]]:
    """The messages of each run together with those of its children, as they came."""
    root: dict[str, str] = {}

    def of(run: str) -> str:
        while root.setdefault(run, run) != run:
            run = root[run]
        return run

    for tell in tells:
        of(tell.run)
        if tell.event["type"] == "child.spawned":
            root[of(tell.event["child_run"])] = of(tell.run)
        elif tell.event["type"] == "run.started" and tell.event.get("parent_run"):
            root[of(tell.run)] = of(tell.event["parent_run"])
    groups: dict[str, list[Tell]] = {}
    for tell in tells:
        groups.setdefault(of(tell.run), []).append(tell)
    return list(groups.values())


def steps_of(tells: Sequence[Tell], compactions: int) -> list[Sequence[Tell]]:
    """The messages in as many equal parts; after each of them the history is shortened."""
    size = max(1, -(-len(tells) // compactions))
    return [tells[start : start + size] for start in range(0, len(tells), size)]


async def keep(
    tells: Sequence[Tell],
    name: str,
    config: Config,
    summarizers: Summarizers,
    sizes: Sizes,
    compactions: int,
    count: FactCount,
    progress: Callable[[], None] = lambda: None,
) -> tuple[list[TranscriptRun], dict[str, list[Fact]], list[str]]:
    """Take the runs through Watchkeeper: what became of each, the facts it covered, and what went wrong."""
    replace = msgspec.structs.replace
    budget = replace(
        config.budget,
        keep_recent_tokens=sizes.keep_recent_tokens,
        packet_tokens=sizes.packet_tokens,
        min_gain=0.1,
    )
    runs: list[TranscriptRun] = []
    covered: dict[str, list[Fact]] = {}
    failures: list[str] = []
    count.searching(name)
    async with bench(replace(config, mode="live", budget=budget), summarizers) as lane:
        keepers: dict[str, Keeper] = {}
        for part in steps_of(tells, compactions):
            keeper = Keeper(lane, name, sizes.packet_tokens)
            await keeper.tell(part)
            for run in dict.fromkeys(tell.run for tell in part):
                keepers.setdefault(run, Keeper(lane, name, sizes.packet_tokens))
            for run, its in keepers.items():
                await its.compact(run, tries=1)
            progress()
        for run, its in keepers.items():
            left = await its.left(run)
            receipts = await lane.receipts(run)
            checkpoint = left.packet["checkpoint"]
            through = 0 if checkpoint is None else checkpoint["covers_through"]["position"]
            messages = await lane.messages(run)
            covered[run] = facts((at, event) for at, _, event in messages if at <= through)
            runs.append(
                TranscriptRun(
                    run=run,
                    messages=len(messages),
                    covered=through,
                    compactions=CompactionCount(
                        wanted=len(receipts),
                        made=sum(receipt["outcome"] == "applied" for receipt in receipts),
                        refused=sum(receipt["outcome"] == "failed" for receipt in receipts),
                    ),
                    packet_tokens=left.packet["budget"]["packet_tokens"],
                    within=left.within,
                )
            )
            if not left.within:
                failures.append(f"{name}: run {run}: the packet is over its budget")
            await _ask(its, left, run, covered[run], count)
            progress()
    return runs, covered, failures


async def _ask(keeper: Keeper, left: Left, run: str, wanted: Sequence[Fact], count: FactCount) -> None:
    """Put every fact to the run's packet, the refs it names, and its search."""
    context = normal(left.context)
    near = normal("\n".join(text for text, _ in (await keeper.fetch_all(refs_in(left.packet), run)).values()))
    for fact in wanted:
        tally = count.of(keeper.name, fact.kind)
        tally.facts += 1
        words = normal(fact.text)
        hits = await keeper.search(fact.query, run, TOP)
        found = any(words in normal(hit) for hit in hits)
        tally.top3 += found
        if words in context:
            tally.in_packet += 1
        elif words in near:
            tally.by_ref += 1
        elif found:
            tally.by_search += 1
        else:
            tally.lost.append(f"{run}: {fact.text}")


def refs_in(packet: dict[str, object]) -> list[str]:
    """Every ref to a message that the packet names."""
    found: dict[str, None] = {}

    def look(value: object, name: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                look(item, key)
        elif isinstance(value, list):
            for item in value:
                look(item, name)
        elif isinstance(value, str):
            if name == "event_id":
                found[f"event:{value}"] = None
            elif value.startswith(("event:", "pos:")) and " " not in value:
                found[value] = None

    look({key: value for key, value in packet.items() if key != "text"}, "")
    return list(found)


def shorten(
    tells: Sequence[Tell],
    sizes: Sizes,
    compactions: int,
    covered: dict[str, list[Fact]],
    count: FactCount,
    names: Sequence[str],
) -> None:
    """Take the runs through the named strategies without a ledger, and look for the same facts in what they leave."""
    for make in (make for make in WITHOUT_LEDGER if make.name in names):
        strategies: dict[str, tuple[Strategy, Conversation]] = {}
        for part in steps_of(tells, compactions):
            for tell in part:
                if tell.run not in strategies:
                    strategies[tell.run] = (make(sizes), Conversation())
                strategy, conversation = strategies[tell.run]
                strategy.add(conversation.line(tell))
            for strategy, _ in strategies.values():
                strategy.compact()
        for run, (strategy, _) in strategies.items():
            context = normal(strategy.shown().context)
            for fact in covered.get(run, []):
                tally = count.of(strategy.name, fact.kind)
                tally.facts += 1
                if normal(fact.text) in context:
                    tally.in_packet += 1
                else:
                    tally.lost.append(f"{run}: {fact.text}")
