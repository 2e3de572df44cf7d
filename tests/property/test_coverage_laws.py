"""Coverage: checkpoints tile the history without hole or overlap, and no boundary moves without an accepted
summary, whatever the summariser does: nothing, rubbish, half, another run's, a refusal, too much, late, never.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
from hypothesis import given

from protocol.summary import SummarizeReply, SummarizeRequest
from sidecar.core.digest import digest
from sidecar.core.state import Lane, Ledger
from sidecar.desk import fold_settings_of
from support import one_thread
from support.harness import Harness, Killed, Life, workplace
from support.laws import law
from support.summaries import BAD, Behaviour, good, reply
from support.tellings import Deal, words
from support.truth import Truth
from support.voyages import METRICS, SEEDS, Voyage, prove_coverage

Change = tuple[Any, ...]

# --- what a summariser may answer -----------------------------------------------------------------------

_FIELDS = (
    *("accepted_decisions", "open_questions", "completed", "observations", "inferences", "contradictions"),
    *("evidence_refs", "pending_action_refs", "operations", "approvals", "objective", "next_action"),
    "narrative",
)
_LEAVES: tuple[Any, ...] = (None, True, 0, -5, "", "op1", "all is done", "\n", [], {})
_NAMES = ("id", "text", "refs", "verb", "op1", "ap1")
_STATES = (
    *("not_started", "pending", "succeeded", "failed", "unknown"),
    *("granted", "denied", "consumed", "gone"),
)
_CLAIMS = ("op1 has succeeded", "deploy is approved", "I never did x", "9 of 1234 files")
_REFS = ("event:e-1", "operation:op1", "evidence:none", "pos:2")


def _value(deal: Deal) -> Any:
    """Any small value of JSON."""
    match deal.pick(("leaf", "list", "object", "objects")):
        case "leaf":
            return deal.pick(_LEAVES)
        case "list":
            return [deal.pick(_LEAVES) for _ in range(deal.below(3))]
        case "object":
            return {deal.pick(_NAMES): deal.pick(_LEAVES) for _ in range(deal.below(3))}
        case _:
            return [{deal.pick(_NAMES): deal.pick(_LEAVES)} for _ in range(deal.below(3))]


def _change(deal: Deal) -> Change:
    match deal.pick(("put", "lose", "say", "state")):
        case "put":
            return ("put", deal.pick(_FIELDS), _value(deal))
        case "lose":
            return ("lose", deal.pick(_FIELDS), deal.below(4))
        case "say":
            return ("say", deal.pick(("operations", "approvals")), deal.pick(_STATES))
        case _:
            section = deal.pick(("completed", "observations", "inferences"))
            refs = [deal.pick(_REFS) for _ in range(deal.below(3))]
            return ("state", section, deal.pick(_CLAIMS), refs)


def _changed(changes: Sequence[Change], cut: bool) -> Behaviour:
    """A good answer changed so, and perhaps broken off."""

    async def answer(request: SummarizeRequest) -> SummarizeReply:
        summary: dict[str, Any] = msgspec.to_builtins(digest(request))
        for change in changes:
            _apply(summary, change)
        whole = reply(summary)
        return (
            msgspec.structs.replace(whole, summary=msgspec.Raw(bytes(whole.summary)[:-9])) if cut else whole
        )

    return answer


def _apply(summary: dict[str, Any], change: Change) -> None:
    match change:
        case ("put", name, value):
            summary[name] = value
        case ("lose", name, place):
            value = summary.get(name)
            if isinstance(value, list) and value:
                value.pop(place % len(value))
            elif isinstance(value, dict) and value:
                value.pop(sorted(value)[place % len(value)])
            else:
                summary.pop(name, None)
        case ("say", name, state):
            if isinstance(summary.get(name), dict):
                summary[name] = dict.fromkeys(
                    [*summary[name], "op1" if name == "operations" else "ap1"], state
                )
        case ("state", name, text, refs):
            if isinstance(summary.get(name), list):
                summary[name].append({"text": text, "refs": refs})


def _late(behaviour: Behaviour, seconds: float) -> Behaviour:
    async def answer(request: SummarizeRequest) -> SummarizeReply:
        await anyio.sleep(seconds)
        return await behaviour(request)

    return answer


_BAD = tuple(sorted(BAD))
_WAITS = (0.0, 0.0, 0.0, 0.003, 0.003, 5.0)
"""Seconds until the answer; the last is beyond the time-out."""


class _Attempt:
    """One compaction that is asked for: what the summariser does, and what happens meanwhile."""

    def __init__(self, word: int) -> None:
        deal = Deal(word)
        self.tokens = 3_000 + 1_000 * deal.below(4)
        self.kind = deal.pick(("good", "good", "changed", "bad"))
        self.name = deal.pick(_BAD)
        self.changes = [_change(deal) for _ in range(1 + deal.below(2))]
        self.cut = deal.below(8) == 7
        self.wait = deal.pick(_WAITS)
        self.meanwhile = deal.pick(
            (*("nothing",) * 4, "told", "asked again", "settled", "mode", "killed", "stopped")
        )

    @property
    def behaviour(self) -> Behaviour:
        match self.kind:
            case "good":
                plain: Behaviour = good
            case "bad":
                plain = BAD[self.name]
            case _:
                plain = _changed(self.changes, self.cut)
        return _late(plain, self.wait) if self.wait else plain

    @property
    def hopeless(self) -> bool:
        """Nothing of this may ever move the boundary."""
        too_late = self.wait == _WAITS[-1] or (self.wait > 0 and self.meanwhile == "mode")
        ended = self.meanwhile in ("killed", "stopped")
        return self.kind == "bad" or too_late or (self.kind == "changed" and self.cut and not ended)


# --- the law --------------------------------------------------------------------------------------------


@law()
@given(words(1, 3).map(lambda drawn: [_Attempt(word) for word in drawn]), SEEDS)
def test_the_boundary_moves_with_an_accepted_summary_and_with_nothing_else(
    attempts: list[_Attempt], seed: int
) -> None:
    with workplace(prepared=True) as folder:
        voyage = Voyage(Harness(folder, metrics=METRICS))
        voyage.harness.start()
        voyage.harness.tell("operation.declared", operation_id="op1", kind="deploy", idempotency_key="k")
        voyage.harness.tell("approval.requested", approval_id="ap1", action="deploy")
        voyage.harness.tell("question.opened", question_id="q1", text="Which one?")
        one_thread.run(_Course(voyage, attempts).run, seed=seed)


class _Course:
    def __init__(self, voyage: Voyage, attempts: list[_Attempt]) -> None:
        self.voyage = voyage
        self.harness = voyage.harness
        self.left = list(attempts)

    async def run(self) -> None:
        over = False
        while not over:
            try:
                async with self.harness.alive() as life:
                    while self.left:
                        await self._attempt(life, self.left.pop(0))
                    await life.read_all()
                    await self.voyage.agree(life)
                    await prove_coverage(life, self.voyage.truth, "r", self.voyage.newest["r"])
                    over = True
            except* Killed:
                pass

    async def _attempt(self, life: Life, attempt: _Attempt) -> None:
        harness = self.harness
        for number in range(1 if await life.checkpoints() else 2):
            harness.turn(attempt.tokens, wordy=bool(number))
        # What is read may be compacted by itself, as the summariser did before.
        await life.read_all()
        before = await life.checkpoints()
        harness.script.always = attempt.behaviour
        await life.ask("compact", reason="wanted")
        await self._meanwhile(life, attempt.meanwhile)
        await life.settled()
        rows = await life.checkpoints()
        assert rows[: len(before)] == before
        if attempt.hopeless:
            assert rows == before, vars(attempt)
        for row in rows[len(before) :]:
            await self._true(row, life)
        harness.tell("context.replaced", by="agent")
        harness.wait(400)

    async def _meanwhile(self, life: Life, what: str) -> None:
        harness = self.harness
        match what:
            case "told":
                harness.turn(500)
                await life.read()
            case "asked again":
                await life.ask("compact", reason="once more")
            case "settled":
                harness.tell("question.answered", question_id="q1", answer="the first")
                harness.authority(
                    "approval.resolved", approval_id="ap1", outcome="granted", by="ann", action="deploy"
                )
                await life.read()
            case "mode":
                # Whoever runs the daemon takes the run out of compaction, and puts it back.
                life.desk.reconfigure(msgspec.structs.replace(harness.config, mode="observe"))
                await life.settled()
                life.desk.reconfigure(harness.config)
            case "killed":
                await anyio.sleep(0.001)
                life.kill()
            case "stopped":
                await anyio.sleep(0.001)
                await life.stop()

    async def _true(self, row: Any, life: Life) -> None:
        """A summary that was accepted says of what was open what the ledger said when it was asked for."""
        summary = msgspec.json.decode(row.body)["summary"]
        (receipt,) = [
            item for item in await life.receipts() if item.get("checkpoint_id") == row.checkpoint_id
        ]
        ledger = self._ledger_at(receipt["handoff"]["position"])
        for kind, name in (("operation", "operations"), ("approval", "approvals")):
            wanted = {item.id: item.state for item in ledger.active[kind].values()}
            said = summary[name]
            assert {key: said[key] for key in wanted} == wanted
            assert all(said[key] == ledger.items[kind][key].state for key in said)
        assert {f"question:{key}" for key in ledger.active["question"]} <= set(summary["open_questions"])
        assert summary["objective"].split() == ledger.task.goal.split()
        for section in ("completed", "observations"):
            assert all(item["refs"] for item in summary[section])

    def _ledger_at(self, position: int) -> Ledger:
        truth = Truth(Lane(settings=fold_settings_of(self.harness.config)))
        stream = iter(self.harness.broker.stream)
        while "r" not in truth.runs or truth.runs["r"].head.position < position:
            truth.take([next(stream)])
        return truth.runs["r"]
