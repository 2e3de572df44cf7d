"""What an evaluation found, as plain values: every answer, and the figures made from them.

The JSON of ``evaluate --json`` is these structs. Sums and shares only; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct

from sidecar.evaluation.probes import HARMS, KINDS

SCHEMA: Final = 1

_ENOUGH = 5


class Asked(Struct, frozen=True, kw_only=True):
    """One probe asked of one strategy at one moment: after so many compactions, or at the very end."""

    scenario: str
    covers: str
    strategy: str
    probe: str
    key: str
    after: int
    end: bool
    passed: bool
    got: str
    harm: str


class Moment(Struct, frozen=True, kw_only=True):
    """What a strategy left after so many compactions (0: before the first)."""

    scenario: str
    strategy: str
    after: int
    end: bool
    protected: int
    """Items that must survive."""
    kept: int
    """Of them, those that are there word for word."""
    lost: tuple[str, ...]
    tokens: int
    """Of the context."""
    within: bool
    """Watchkeeper: the packet keeps to its budget. Others: the context does, which is the room all have."""


class CompactionCount(Struct, frozen=True, kw_only=True):
    """Compactions asked for, made, and summaries refused on the way."""

    wanted: int = 0
    made: int = 0
    refused: int = 0


class Figures(Struct, frozen=True, kw_only=True):
    """One strategy over all scenarios."""

    strategy: str
    title: str
    watchkeeper: bool
    probes: int
    passed: int
    by_kind: dict[str, tuple[int, int]]
    """(passed, asked) of state, retrieval and action probes."""
    by_covers: dict[str, tuple[int, int]]
    harms: dict[str, int]
    protected: int
    kept: int
    cohort: int
    """Scenarios the three lines below are over: those compacted as often as the lines are long."""
    drift: tuple[float | None, ...]
    """Share of protected items kept after 0, 1, 2 … compactions."""
    right: tuple[float | None, ...]
    """Share of probes passed, likewise."""
    tokens: tuple[int, ...]
    """Mean tokens of the context, likewise."""
    outside: int
    """Moments at which it did not keep to its budget."""
    compactions: CompactionCount


class FactShares(Struct, frozen=True, kw_only=True):
    """Facts of one kind of one strategy over all transcripts, each counted once, in this order."""

    strategy: str
    kind: str
    facts: int
    in_packet: int
    by_ref: int
    by_search: int
    lost: int
    top3: int
    """Found among the first three hits, whether they are in the packet or not. -1: there is no search."""
    lost_facts: tuple[str, ...] = ()


class TranscriptRun(Struct, frozen=True, kw_only=True):
    """One run of a transcript."""

    run: str
    messages: int
    covered: int
    compactions: CompactionCount
    packet_tokens: int
    within: bool


class Evaluation(Struct, frozen=True, kw_only=True):
    """Everything."""

    schema: int
    scenarios: tuple[str, ...]
    transcripts: tuple[TranscriptRun, ...]
    figures: tuple[Figures, ...]
    facts: tuple[FactShares, ...]
    moments: tuple[Moment, ...]
    answers: tuple[Asked, ...]
    failures: tuple[str, ...]
    """What a Watchkeeper strategy got wrong, a line each; empty: exit code 0."""


def figures(
    strategy: str,
    title: str,
    *,
    watchkeeper: bool,
    answers: Sequence[Asked],
    moments: Sequence[Moment],
    compactions: CompactionCount,
) -> Figures:
    """The figures of one strategy from its answers and moments."""
    asked = [answer for answer in answers if answer.strategy == strategy]
    seen = [moment for moment in moments if moment.strategy == strategy]
    cohort, most = _cohort(seen)
    long = [moment for moment in seen if moment.scenario in cohort and not moment.end]
    told = [answer for answer in asked if answer.scenario in cohort and not answer.end]
    after = [moment for moment in seen if moment.after > 0]
    return Figures(
        strategy=strategy,
        title=title,
        watchkeeper=watchkeeper,
        probes=len(asked),
        passed=sum(answer.passed for answer in asked),
        by_kind={kind: _share(asked, KINDS, kind) for kind in ("state", "retrieval", "action")},
        by_covers={
            name: _count(a for a in asked if a.covers == name) for name in sorted({a.covers for a in asked})
        },
        harms={harm: sum(answer.harm == harm for answer in asked) for harm in HARMS},
        protected=sum(moment.protected for moment in after),
        kept=sum(moment.kept for moment in after),
        cohort=len(cohort),
        drift=tuple(_drift([moment for moment in long if moment.after == k]) for k in range(most + 1)),
        right=tuple(_right([answer for answer in told if answer.after == k]) for k in range(most + 1)),
        tokens=tuple(_mean([moment.tokens for moment in long if moment.after == k]) for k in range(most + 1)),
        outside=sum(not moment.within for moment in after),
        compactions=compactions,
    )


def _cohort(seen: Sequence[Moment]) -> tuple[frozenset[str], int]:
    """The scenarios with the most compactions, and how many: a line over changing scenarios shows no drift. At
    least ``_ENOUGH`` of them, where there are so many."""
    depth: dict[str, int] = {}
    for moment in seen:
        depth[moment.scenario] = max(depth.get(moment.scenario, 0), moment.after)
    ordered = sorted(depth.values(), reverse=True)
    most = ordered[min(len(ordered), _ENOUGH) - 1] if ordered else 0
    return frozenset(name for name, count in depth.items() if count >= most), most


def _share(asked: Iterable[Asked], kinds: dict[str, str], kind: str) -> tuple[int, int]:
    return _count(answer for answer in asked if kinds[answer.key] == kind)


def _count(asked: Iterable[Asked]) -> tuple[int, int]:
    found = list(asked)
    return sum(answer.passed for answer in found), len(found)


def _drift(moments: Sequence[Moment]) -> float | None:
    shares = [moment.kept / moment.protected for moment in moments if moment.protected]
    return round(sum(shares) / len(shares), 4) if shares else None


def _right(asked: Sequence[Asked]) -> float | None:
    return round(sum(answer.passed for answer in asked) / len(asked), 4) if asked else None


def _mean(values: Sequence[int]) -> int:
    return round(sum(values) / len(values)) if values else 0


def percent(part: int, whole: int) -> str:
    """A share in per cent; never rounded up to all, nor down to none."""
    if not whole:
        return "-"
    share = part / whole * 100
    return f"{share:.0f} %" if part in (0, whole) else f"{min(99.9, max(0.1, share)):.1f} %"


def mean_tokens(item: Figures) -> int:
    """Mean tokens of the context after compactions."""
    after = [value for value in item.tokens[1:] if value]
    return round(sum(after) / len(after)) if after else 0
