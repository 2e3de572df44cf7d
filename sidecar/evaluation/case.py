"""Restores one saved case and tells what is still forbidden in it, and whether that is what was expected.

A case is a scenario file, a run's messages in the `events` format, or a run's state as the state stream keeps it.
Scenarios and messages go through the real lane and are asked as an agent asks; a state is judged as it stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from protocol.events import Settings
from protocol.state import RunState
from sidecar.config import Config
from sidecar.desk import fold_settings_of
from sidecar.evaluation.bench import Json, bench
from sidecar.evaluation.course import Found, with_ledger
from sidecar.evaluation.keeper import Keeper
from sidecar.evaluation.reader import Reader
from sidecar.evaluation.scenario import read_scenario
from sidecar.evaluation.story import RUN, acts
from sidecar.evaluation.transcripts import SIZES, read_transcripts
from sidecar.importers import ImportFailure
from sidecar.summarizers.digest import DigestSummarizer

_STATE = msgspec.json.Decoder(RunState)


class Forbidden(Struct, frozen=True, kw_only=True):
    """Something that may not be done now."""

    what: str
    code: str
    reason: str
    clears_when: str | None = None


class Check(Struct, frozen=True, kw_only=True):
    """One expectation, of the case itself or of the command line."""

    name: str
    passed: bool
    got: str


class Verified(Struct, frozen=True, kw_only=True):
    """One restored case."""

    case: str
    run: str
    verdict: str
    blockers: tuple[str, ...]
    forbidden: tuple[Forbidden, ...]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether everything is as expected."""
        return all(check.passed for check in self.checks)


async def verify_case(
    file: Path,
    config: Config,
    *,
    now: float,
    run: str | None = None,
    expected: Mapping[str, str] | None = None,
) -> Verified:
    """Restore and ask. ``expected``: operation id to the answer of `authorize` it must get. ``now``: the moment a
    state is judged at, in seconds; the others have a clock of their own.

    Raises ``ScenarioError``, ``ImportFailure``.
    """
    wanted = expected or {}
    plain = msgspec.structs.replace(
        config, mode="live", summarizer=msgspec.structs.replace(config.summarizer, kind="digest")
    )
    match file.suffix:
        case ".toml":
            return await _scenario(file, plain, run or RUN, wanted)
        case ".json":
            return _state(file, plain, now, wanted)
        case _:
            return await _messages(file, plain, run, wanted)


async def _scenario(file: Path, config: Config, run: str, expected: Mapping[str, str]) -> Verified:
    scenario = read_scenario(file)
    found = Found()
    looked: list[Verified | None] = []

    async def look(keeper: Keeper) -> None:
        looked.append(await _restored(keeper, file, run, expected, scenario.rules.approval_kinds))

    told = acts(scenario, file)
    await with_ledger(scenario, told, "digest", config, (DigestSummarizer(), None), found, at_end=look)
    probes = [
        Check(
            name=f"{answer.probe} ({_when(answer.after, answer.end)})", passed=answer.passed, got=answer.got
        )
        for answer in found.answers
    ]
    kept = [
        Check(
            name=f"what is protected is there word for word ({_when(moment.after, moment.end)})",
            passed=not moment.lost,
            got=", ".join(moment.lost) or f"{moment.kept} of {moment.protected}",
        )
        for moment in found.moments
    ]
    restored = _told(looked[0], file, run)
    return msgspec.structs.replace(restored, checks=(*probes, *kept, *restored.checks))


def _told(restored: Verified | None, file: Path, run: str) -> Verified:
    if restored is None:
        raise ImportFailure(file, None, f"run {run!r:.60} is not told of; allowed: a run of the file")
    return restored


def _when(after: int, end: bool) -> str:
    return "at the end" if end else f"after {after} compaction{'' if after == 1 else 's'}"


async def _messages(file: Path, config: Config, run: str | None, expected: Mapping[str, str]) -> Verified:
    tells = read_transcripts([file], format="events")
    runs = list(dict.fromkeys(tell.run for tell in tells))
    if not runs:
        raise ImportFailure(file, None, "holds no message; one Watchkeeper event a line is allowed")
    chosen = run or runs[0]
    if chosen not in runs:
        raise ImportFailure(file, None, f"run {chosen!r:.60}; allowed: {', '.join(runs[:20])}")
    async with bench(config, (DigestSummarizer(), None)) as lane:
        keeper = Keeper(lane, "digest", SIZES.packet_tokens)
        await keeper.tell(tells)
        restored = await _restored(keeper, file, chosen, expected, ())
    return _told(restored, file, chosen)


async def _restored(
    keeper: Keeper, file: Path, run: str, expected: Mapping[str, str], kinds: Sequence[str]
) -> Verified | None:
    """What the lane answers now; None if it does not know the run."""
    lane = keeper.bench
    packet = await lane.ask("packet", run)
    if "error" in packet:
        return None
    answers: dict[str, Json] = {}
    for name in dict.fromkeys([*(str(item["id"]) for item in packet["operations"]), *expected]):
        answers[name] = await lane.ask("authorize", run, operation_id=name, dry_run=True)
    return Verified(
        case=str(file),
        run=run,
        verdict=packet["verdict"],
        blockers=tuple(_blocker(item) for item in packet["blockers"]),
        forbidden=(*_constraints(packet["task"]["constraints"]), *_refused(answers), *_need_approval(kinds)),
        checks=_expected(answers, expected),
    )


def _state(file: Path, config: Config, now: float, expected: Mapping[str, str]) -> Verified:
    """What the fold's own ledger, as the state stream keeps it, forbids."""
    try:
        state = _STATE.decode(file.read_bytes())
        settings: Settings = state.settings or fold_settings_of(config)
        reader = Reader.of_state(settings, msgspec.json.decode(state.ledger))
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
        text = f"is no run's state: {error}; allowed: a scenario (.toml), messages (.jsonl), a run's state (.json)"
        raise ImportFailure(file, None, text) from error
    run = reader.runs[0]
    answers: dict[str, Json] = {}
    for name in dict.fromkeys([*reader.operations(run), *expected]):
        decision = reader.judge(name, now, run)
        answers[name] = {
            "allowed": decision.allowed,
            "code": decision.code,
            "reason": decision.reason,
            "clears_when": decision.clears_when,
        }
    items = reader.protected(run)
    constraints = [item for key, item in items.items() if key.startswith("constraint:")]
    return Verified(
        case=str(file),
        run=run,
        verdict=reader.verdict(run),
        blockers=tuple(_blocker(msgspec.to_builtins(item)) for item in reader.blockers(run)),
        forbidden=(*_constraints(constraints), *_refused(answers), *_need_approval(settings.approval_kinds)),
        checks=_expected(answers, expected),
    )


def _blocker(item: Mapping[str, Any]) -> str:
    ref = f" {item['ref']}" if item["ref"] else ""
    return f"{item['code']}{ref}: {item['text']}; clears when {item['clears_when']}"


def _refused(answers: Mapping[str, Json]) -> list[Forbidden]:
    return [
        Forbidden(
            what=f"operation {name}",
            code=str(reply["code"]),
            reason=str(reply["reason"]),
            clears_when=reply.get("clears_when"),
        )
        for name, reply in answers.items()
        if not reply["allowed"]
    ]


def _constraints(items: Iterable[Mapping[str, Any]]) -> list[Forbidden]:
    return [
        Forbidden(
            what="; ".join(f"{name} {', '.join(globs)}" for name, globs in item["forbids"].items() if globs),
            code="constraint_forbids",
            reason=f"{item['id']} ({item['source']}): {item['text']}",
            clears_when="an authority lifts or replaces the constraint",
        )
        for item in items
        if item.get("forbids")
    ]


def _need_approval(kinds: Sequence[str]) -> list[Forbidden]:
    return [
        Forbidden(
            what=f"kind {kind}",
            code="approval_missing",
            reason="an operation of this kind needs an approval",
            clears_when="an approval for it is requested and granted",
        )
        for kind in kinds
    ]


def _expected(answers: Mapping[str, Json], expected: Mapping[str, str]) -> tuple[Check, ...]:
    return tuple(
        Check(
            name=f"operation {name} is answered {code}",
            passed=answers[name]["code"] == code,
            got=str(answers[name]["code"]),
        )
        for name, code in expected.items()
    )
