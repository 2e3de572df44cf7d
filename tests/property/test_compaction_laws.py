"""The law everything serves: ledger, answers and the protected part are functions of the stream alone.

Whatever is read in whatever batches, compacted by whatever summariser, killed at whatever commit and delivered
again: nothing of it may show. ``WATCHKEEPER_EXAMPLES`` sets how many examples each law is tried with.
"""

from __future__ import annotations

import os
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from protocol.summary import SummarizeReply, SummarizeRequest
from sidecar.core.digest import digest
from storage.records import Cursor
from support.harness import CREATED, Harness, Killed, Life, workplace
from support.summaries import reply
from support.voyages import BATCH, PIECES, STEPS, Voyage, prove_coverage

EXAMPLES = int(os.environ.get("WATCHKEEPER_EXAMPLES", "100"))
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)


def law(share: int = 1) -> settings:
    """So many examples by default over ``share``."""
    return settings(
        max_examples=max(10, EXAMPLES // share),
        deadline=None,
        phases=PHASES,
        suppress_health_check=list(HealthCheck),
    )


@law()
@given(STEPS)
def test_nothing_that_happens_to_the_daemon_shows_in_what_it_says(steps: Any) -> None:
    """After each step: ledger, answers, packets; at the end: coverage, pairs, and a quiet daemon's word."""
    with workplace() as folder, workplace() as other:
        voyage = Voyage(Harness(folder))
        voyage.begin()
        anyio.run(voyage.sail, steps)
        anyio.run(undisturbed, voyage, Harness(other, {"mode": "observe"}))


async def undisturbed(voyage: Voyage, harness: Harness) -> None:
    """One that never compacts and never dies reads the same stream at once and says the same."""
    harness.broker.stream[:] = voyage.harness.broker.stream
    async with harness.alive() as life:
        await life.read_all()
        voyage.follow(life)
        for run, value in voyage.truth.values().items():
            assert await life.value(run) == value
            assert await life.looks(run) == voyage.truth.looks(run)
            packet = await life.packet(run)
            assert packet["protected_digest"] == voyage.truth.protected_digest(run)
            assert packet["checkpoint"] is None


# --- delivered again ------------------------------------------------------------------------------------

_ACCEPTED = PIECES.map(lambda pieces: [piece for piece in pieces if piece[0] not in ("again", "other")])


@law(4)
@given(_ACCEPTED, BATCH, BATCH, st.randoms(use_true_random=False), st.booleans())
def test_what_comes_again_days_later_changes_nothing(
    pieces: Any, first: int, second: int, random: Any, reborn: bool
) -> None:
    """The whole stream once more, in any order, or as a stream made anew that is read from its beginning."""
    with workplace() as folder:
        voyage = Voyage(Harness(folder))
        voyage.begin()
        for piece in pieces:
            voyage.piece(piece)
        anyio.run(_twice, voyage, first, second, random, reborn)


async def _twice(voyage: Voyage, first: int, second: int, random: Any, reborn: bool) -> None:
    harness = voyage.harness
    async with harness.alive() as life:
        await life.read_all(first)
        await life.compact()
        await voyage.agree(life)
        before = await everything(life, voyage)
    refused = {item.body["stream_seq"] for item in harness.broker.sent if item.kind == "rejected"}
    accepted = [item for item in harness.broker.stream if item.stream_seq not in refused]
    harness.wait(3 * 86_400)
    async with harness.alive() as life:
        if reborn:
            harness.broker.stream[:] = [
                msgspec.structs.replace(item, stream_seq=seq) for seq, item in enumerate(accepted, 1)
            ]
            await life.desk.commit(cursor=Cursor(0, CREATED.replace("11-30", "12-03")))
        else:
            random.shuffle(accepted)
            for item in accepted:
                *_, run, channel = item.subject.split(".")
                harness.broker.put(run, channel, item.payload)
        await life.read_all(second)
        assert await everything(life, voyage) == before


async def everything(life: Life, voyage: Voyage) -> Any:
    return [
        (run, await life.value(run), await life.looks(run), (await life.packet(run))["protected_digest"])
        for run in voyage.truth.runs
    ]


# --- whatever the summariser says -----------------------------------------------------------------------

_JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-5, 5), st.sampled_from(["", "op1", "all is done", "\n"])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["id", "text", "refs", "verb", "op1", "ap1"]), inner, max_size=3),
    ),
    max_leaves=6,
)
_FIELDS = (
    *("accepted_decisions", "open_questions", "completed", "observations", "inferences", "contradictions"),
    *("evidence_refs", "pending_action_refs", "operations", "approvals", "objective", "next_action"),
    "narrative",
)
_STATES = (
    "not_started",
    "pending",
    "succeeded",
    "failed",
    "unknown",
    "granted",
    "denied",
    "consumed",
    "gone",
)
_CHANGE = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(_FIELDS), _JSON),
    st.tuples(st.just("lose"), st.sampled_from(_FIELDS), st.integers(0, 3)),
    st.tuples(st.just("say"), st.sampled_from(["operations", "approvals"]), st.sampled_from(_STATES)),
    st.tuples(
        st.just("state"),
        st.sampled_from(["completed", "observations", "inferences"]),
        st.tuples(
            st.sampled_from(["op1 has succeeded", "deploy is approved", "I never did x", "9 of 1234 files"]),
            st.lists(st.sampled_from(["event:e-1", "operation:op1", "evidence:none", "pos:2"]), max_size=2),
        ),
    ),
)


@law(2)
@given(PIECES, st.lists(_CHANGE, max_size=4), st.integers(0, 3))
def test_no_candidate_changes_what_the_ledger_says(pieces: Any, changes: Any, cut: int) -> None:
    """A good summary changed at random: it is refused, or what it may not say is not said."""
    with workplace() as folder:
        voyage = Voyage(Harness(folder))
        voyage.begin()
        voyage.harness.tell("operation.declared", operation_id="op1", kind="deploy", idempotency_key="k")
        voyage.harness.tell("approval.requested", approval_id="ap1", action="deploy")
        voyage.harness.tell("question.opened", question_id="q1", text="Which one?")
        for piece in pieces:
            voyage.piece(piece)
        anyio.run(_answered, voyage, changes, cut)


async def _answered(voyage: Voyage, changes: Any, cut: int) -> None:
    harness = voyage.harness

    async def answer(request: SummarizeRequest) -> SummarizeReply:
        summary: dict[str, Any] = msgspec.to_builtins(digest(request))
        for change in changes:
            _apply(summary, change)
        given_ = reply(summary)
        if cut == 3:
            return msgspec.structs.replace(given_, summary=msgspec.Raw(bytes(given_.summary)[:-9]))
        return given_

    async with harness.alive() as life:
        await life.read_all()
        harness.script.always = answer
        before = await life.checkpoints()
        await life.compact()
        await voyage.agree(life)
        rows = await life.checkpoints()
        await prove_coverage(life, voyage.truth, "r")
        ledger = voyage.truth.runs["r"]
        for row in rows[len(before) :]:
            summary = msgspec.json.decode(row.body)["summary"]
            for kind, name in (("operation", "operations"), ("approval", "approvals")):
                wanted = {item.id: item.state for item in ledger.active[kind].values()}
                said = summary[name]
                assert {key: said[key] for key in wanted} == wanted
                assert all(said[key] == ledger.items[kind][key].state for key in said)
            assert {f"question:{key}" for key in ledger.active["question"]} <= set(summary["open_questions"])
            assert summary["objective"].split() == ledger.task.goal.split()
            for section in ("completed", "observations"):
                assert all(item["refs"] for item in summary[section])


def _apply(summary: dict[str, Any], change: Any) -> None:
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
        case ("state", name, (text, refs)):
            if isinstance(summary.get(name), list):
                summary[name].append({"text": text, "refs": refs})


# --- any commit may be the last one -----------------------------------------------------------------------


@law(4)
@given(PIECES, st.integers(0, 12), st.sampled_from(["before", "after", "refused"]), st.booleans())
def test_any_commit_of_a_compaction_may_be_the_last(pieces: Any, after: int, kind: str, asked: bool) -> None:
    """Old checkpoint and old boundary, or new checkpoint and new boundary; and the next attempt succeeds."""
    with workplace() as folder:
        voyage = Voyage(Harness(folder))
        voyage.begin()
        for piece in pieces:
            voyage.piece(piece)
        voyage.harness.tell("boundary.marked", kind="turn_ended")
        steps = [
            ("read_all", 256),
            ("taken_up", "r"),
            ("read_all", 256),
            ("fault", kind, after),
            ("compact", "r", "good"),
            ("wait", 400.0),
            ("compact", "r", "good") if asked else ("crash",),
            ("publish", "r"),
        ]
        anyio.run(voyage.sail, steps)


def test_the_kill_of_the_harness_is_a_kill() -> None:
    """The laws above prove nothing if a dead daemon still stores."""
    with workplace() as folder:
        harness = Harness(folder)
        harness.start()

        async def die() -> None:
            async with harness.alive() as life:
                life.dead = True
                await life.read()

        async def look() -> None:
            async with harness.alive() as life:
                assert life.desk.cursor.stream_seq == 0

        with pytest.raises(BaseExceptionGroup) as died:
            anyio.run(die)
        assert died.value.subgroup(Killed) is not None
        anyio.run(look)
