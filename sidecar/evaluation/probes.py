"""How a probe is scored: one function for Watchkeeper, one for strategies without a ledger, by the same rules.

A text is kept if it stands in the context word for word. What a context without a ledger would allow or believe is
what a perfect reader makes of the messages that still stand there whole; such a reader has no search, so a fact is
found if it stands in the context. No judgement of prose is made anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

from msgspec import UNSET, Struct

from sidecar.evaluation.keeper import Keeper, Left
from sidecar.evaluation.reader import ABSENT, Reader
from sidecar.evaluation.scenario import Probe
from sidecar.evaluation.story import RUN
from sidecar.evaluation.strategies import Shown
from sidecar.evaluation.wording import holds

Harm = Literal[
    "protected_lost",
    "disallowed_allowed",
    "unknown_as_success",
    "fact_lost",
    "wrongly_refused",
    "wrong_state",
]
HARMS: Final[dict[Harm, str]] = {
    "protected_lost": "a protected text is no longer there word for word",
    "disallowed_allowed": "an action that is not allowed would be allowed",
    "unknown_as_success": "an unknown outcome is told as a success",
    "fact_lost": "a fact of the history cannot be had any more",
    "wrongly_refused": "an allowed action would be refused",
    "wrong_state": "something else than what is the case is told",
}

KINDS: Final = {
    "keeps": "state",
    "state": "state",
    "verdict": "state",
    "never": "state",
    "find": "retrieval",
    "fetch": "retrieval",
    "authorize": "action",
    "may": "action",
    "next": "action",
}
"""Of each probe, which of the three kinds it is."""


class Answer(Struct, frozen=True, kw_only=True):
    """One probe, asked once. ``got`` is what was found, in a word or two; ``harm`` is empty when it passed."""

    passed: bool
    got: str
    harm: Harm | Literal[""] = ""


def _scored(probe: Probe, passed: bool, got: str) -> Answer:
    return Answer(passed=passed, got=got, harm="" if passed else _harm(probe, got))


def _harm(probe: Probe, got: str) -> Harm:
    match probe.key:
        case "keeps":
            return "protected_lost"
        case "find" | "fetch":
            return "fact_lost"
        case "authorize":
            if probe.allowed is True:
                return "wrongly_refused"
            return "disallowed_allowed" if got == "ok" else "wrong_state"
        case "may":
            return "disallowed_allowed" if got == "dispatch" else "wrong_state"
        case "state" if got == "succeeded":
            return "unknown_as_success"
        case _:
            return "wrong_state"


async def ask_keeper(keeper: Keeper, left: Left, probe: Probe) -> Answer:
    """The probe, put to Watchkeeper."""
    run = probe.run or RUN
    match probe.key:
        case "keeps":
            return _text(probe, left.context)
        case "never":
            return _never(probe, left.stand_in)
        case "state":
            return _state(probe, await keeper.state(left, probe.state or "", run))
        case "verdict":
            return _state(probe, left.packet["verdict"])
        case "may":
            return _state(probe, keeper.may(left, probe.may or ""))
        case "next":
            return _state(probe, keeper.next(left))
        case "authorize":
            return _permission(probe, *await keeper.authorize(probe.authorize or "", run))
        case "fetch":
            text, _ = await keeper.fetch(probe.fetch or "", run)
            return _found(probe, [text])
        case _:
            return _found(probe, await keeper.search(probe.find or "", run))


def ask_shown(shown: Shown, reader: Reader, now: float, probe: Probe) -> Answer:
    """The probe, put to a context without a ledger and its perfect reader."""
    run = probe.run or RUN
    match probe.key:
        case "keeps":
            return _text(probe, shown.context)
        case "never":
            return _never(probe, shown.stand_in)
        case "state":
            return _state(probe, _believed(probe, reader.state(probe.state or "", run), shown.context))
        case "verdict":
            return _state(probe, reader.verdict(run))
        case "may":
            return _state(probe, reader.may(probe.may or "", run))
        case "next":
            return _state(probe, reader.next(run))
        case "authorize":
            return _permission(probe, *reader.authorize(probe.authorize or "", now, run))
        case _:
            return _found(probe, [shown.context])


def _text(probe: Probe, context: str) -> Answer:
    kept = holds(context, probe.keeps or "")
    return _scored(probe, kept, "kept" if kept else "gone")


def _never(probe: Probe, stand_in: str) -> Answer:
    begins = any(line.lstrip(" -*>").startswith(probe.never or "") for line in stand_in.splitlines())
    return _scored(probe, not begins, "a line of its own" if begins else "nowhere a line of its own")


def _state(probe: Probe, got: str) -> Answer:
    wanted = probe.wanted or (probe.verdict or probe.next or "",)
    return _scored(probe, got in wanted, got)


def _believed(probe: Probe, state: str, context: str) -> str:
    """Where the state is not told, a claim of success that stands in the context is all there is to go by."""
    claimed = state == ABSENT and any(holds(context, claim) for claim in probe.claims)
    return "succeeded" if claimed else state


def _permission(probe: Probe, allowed: bool, code: str) -> Answer:
    # A code is Watchkeeper's word for why; where none is asked for, any refusal is right.
    right = allowed is probe.allowed and (probe.code is UNSET or code in probe.wanted)
    return _scored(probe, right, code)


def _found(probe: Probe, texts: Iterable[str]) -> Answer:
    found = any(holds(text, str(probe.expect)) for text in texts)
    return _scored(probe, found, "found" if found else "not found")
