"""Faults others reported, kinds K1 to K4: torn pairs, boundaries without summaries, lost facts, effects twice.

The daemon killed at each point of a compaction: tests/crash/test_crash_points.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import anyio
import pytest

from storage.errors import StorageFull
from support.harness import Fault, Harness, Killed, Life
from support.summaries import Held, changed, good, never, statements
from support.voyages import Voyage, prove_coverage

pytestmark = pytest.mark.anyio


async def taken_up(life: Life) -> None:
    """The agent takes the newest packet up."""
    await life.relayed()
    packets = life.harness.sent("packet")
    life.harness.tell("context.replaced", by="agent", packet_id=packets[-1]["packet_id"])
    await life.read_all()


# --- K1 pairs (B03) -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("user_at", [0, 1, 2])
async def test_k01_a_batch_of_parallel_calls_is_covered_whole_or_not_at_all(
    harness: Harness, life: Life, order: tuple[int, ...], user_at: int
) -> None:
    """Wherever the naive cut would land: what follows the batch grows message by message."""
    harness.start()
    harness.turn(3_000)
    voyage = Voyage(harness)
    voyage.together.append(("r", harness.parallel(order, 2_000, user_at=user_at)))
    for number in range(9):
        harness.tell("message", role="assistant", content=f"part {number} " + "is fine. " * 250)
        await life.read_all(1)
        before = len(await life.checkpoints())
        await life.compact()
        if len(await life.checkpoints()) > before:
            await taken_up(life)
    voyage.follow(life)
    assert len(await life.checkpoints()) >= 1
    await voyage.prove_pairs(life, "r")
    await prove_coverage(life, voyage.truth, "r")


async def test_k01_interleaved_batches_are_one_unit(harness: Harness, life: Life) -> None:
    """``C(a) | C(b) | R(b) R(a)``: no place between the first call and the last result is a boundary."""
    harness.start()
    harness.turn(8_000)
    harness.tell("message", role="assistant", content="First this.", id_="m1")
    harness.tell("tool.called", call_id="a", tool="bash", arguments={}, message_id="m1")
    harness.tell("message", role="assistant", content="And this.", id_="m2")
    harness.tell("tool.called", call_id="b", tool="bash", arguments={}, message_id="m2")
    harness.tell("tool.returned", call_id="b", status="ok", content="x" * 8_000)
    harness.tell("tool.returned", call_id="a", status="ok", content="y" * 16_000, id_="last")
    await life.read_all()
    await life.compact()
    voyage = Voyage(harness)
    voyage.follow(life)
    position = voyage.truth.positions("r")
    rows = await life.checkpoints()
    assert [row.covers_through < position["m1"] for row in rows] == [True]


async def test_k01_without_a_legal_cut_there_is_no_compaction(harness: Harness, life: Life) -> None:
    harness.start()
    harness.tell("message", role="assistant", content="All of it is one exchange.", id_="m1")
    for number in range(8):
        harness.tell("tool.called", call_id=f"c{number}", tool="bash", arguments={}, message_id="m1")
    for number in range(7):
        harness.tell("tool.returned", call_id=f"c{number}", status="ok", content="z" * 14_000)
    await life.read_all()
    harness.wait(120)
    answer = await life.compact()
    # Before the exchange lies only the run's start: a boundary, but nothing to win by it.
    assert (answer["state"], answer["reason"]) == ("deferred", "little_new"), answer
    assert await life.checkpoints() == []
    assert harness.script.asked == []


async def test_k01_an_approval_or_question_on_both_sides_stands_as_the_ledger_has_it(
    harness: Harness, life: Life
) -> None:
    """Asked before the boundary and settled behind it, and the other way round."""
    harness.start()
    for name in ("a", "b", "c"):
        harness.tell(
            "approval.requested", approval_id=name, action="deploy", payload_digest="sha256:" + "1" * 64
        )
        harness.tell("question.opened", question_id=name, text=f"And {name}?")
    harness.authority(
        "approval.resolved", approval_id="a", outcome="granted", by="ann", action="deploy",
        payload_digest="sha256:" + "1" * 64,
    )  # fmt: skip
    harness.tell("message", role="user", content="Use the blue one.", id_="u1")
    for _ in range(6):
        harness.turn(3_000)
    await life.read_all()
    await life.compact()
    packet = await life.packet()
    assert packet["checkpoint"] is not None
    assert {item["id"]: item["state"] for item in packet["approvals"]} == {
        "a": "granted", "b": "pending", "c": "pending",
    }  # fmt: skip
    harness.authority(
        "approval.resolved", approval_id="b", outcome="denied", by="ann", action="deploy",
        payload_digest="sha256:" + "1" * 64,
    )  # fmt: skip
    harness.authority(
        "approval.resolved", approval_id="a", outcome="revoked", by="ann", action="deploy",
        payload_digest="sha256:" + "1" * 64,
    )  # fmt: skip
    harness.tell("question.answered", question_id="b", answer="yes")
    await life.read_all()
    packet = await life.packet()
    assert {item["id"]: item["state"] for item in packet["approvals"]} == {"c": "pending"}
    assert [item["id"] for item in packet["questions"]] == ["a", "c"]


async def test_k01_a_correction_behind_the_boundary_replaces_what_lies_before_it(
    harness: Harness, life: Life
) -> None:
    harness.start()
    harness.tell("message", role="user", content="Paint it red, never blue.", id_="u1")
    harness.tell("message", role="assistant", content="word " * 9_000)
    harness.tell("tool.called", call_id="c", tool="bash", arguments={})
    harness.tell("tool.returned", call_id="c", status="ok", content="x" * 7_000)
    harness.tell("message", role="user", content="Blue it is, never red.", supersedes="u1", id_="u2")
    harness.tell("tool.called", call_id="d", tool="bash", arguments={})
    harness.tell("tool.returned", call_id="d", status="ok", content="y" * 7_000)
    harness.tell("message", role="assistant", content="word " * 4_000)
    await life.read_all()
    answer = await life.compact()
    packet = await life.packet()
    assert packet["checkpoint"] is not None, (answer, await life.receipts())
    assert [item["event_id"] for item in packet["task"]["current_request"]] == ["u2"]
    assert "red, never blue" not in packet["text"]


# --- K2 coverage and commit (B13) -----------------------------------------------------------------------------


async def long_run(harness: Harness) -> None:
    harness.start()
    for _ in range(6):
        harness.turn(3_000, wordy=True)


async def killed_in_compaction(harness: Harness, fault: Fault) -> None:
    """A life that ends at this commit of its first compaction."""
    died = False
    try:
        async with harness.alive() as life:
            await long_run(harness)
            await life.read_all()
            await life.relayed()
            harness.fault = fault
            await life.compact()
    except* Killed:
        died = True
    assert died


@pytest.mark.parametrize("kind", ["refused", "before", "after"])
@pytest.mark.parametrize("commit", range(4))
async def test_k02_each_commit_of_a_compaction_may_fail(harness: Harness, kind: str, commit: int) -> None:
    """Old checkpoint with the old boundary or new with new; then the next attempt goes through."""
    voyage = Voyage(harness)
    await long_run(harness)
    steps: list[Any] = [("read", 256), ("fault", kind, commit), ("compact", "r", "good"), ("wait", 400.0)]
    await voyage.sail([*steps, ("taken_up", "r"), ("read_all", 1), ("compact", "r", "good")])
    async with harness.alive() as life:
        assert len(await life.checkpoints()) >= 1
        await prove_coverage(life, voyage.truth, "r")


async def test_k02_storage_that_refuses_once_ends_one_attempt_and_not_all_that_follow(
    harness: Harness, life: Life
) -> None:
    """The commit of the checkpoint is refused, and so is that of the receipt which would say so."""
    await long_run(harness)
    await life.read_all()
    held = Held()
    harness.script.then = [held]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(life.compact)
        await held.reached.wait()
        real, refusals = life.store.commit, iter(range(2))

        async def refusing(unit: Any) -> Any:
            if next(refusals, None) is not None:
                raise StorageFull("no space for the test")
            return await real(unit)

        life.store.commit = refusing  # type: ignore[method-assign]
        held.release.set()
    assert await life.checkpoints() == []
    harness.wait(400)
    assert (await life.compact())["state"] == "started"
    assert [row["outcome"] for row in await life.receipts()] == ["failed", "applied"]
    assert (await life.receipts())[0]["reason"] == "storage"


async def test_k02_a_stop_while_the_summary_is_made_leaves_the_old_boundary(harness: Harness) -> None:
    held = Held()
    async with harness.alive() as life:
        await long_run(harness)
        await life.read_all()
        harness.script.then = [held]
        await life.ask("compact")
        await held.reached.wait()
        await life.parts.compactor.abandon()
        assert await life.checkpoints() == []
        assert [row["reason"] for row in await life.receipts()] == ["interrupted"]
    async with harness.alive() as life:
        await life.compact()
        attempts = [row["attempt_id"] for row in await life.receipts()]
        assert len(set(attempts)) == 2
        assert len(await life.checkpoints()) == 1


async def test_k02_nothing_announces_success_before_the_commit(harness: Harness) -> None:
    await killed_in_compaction(harness, Fault("before", 1))
    assert harness.sent("receipt") == []
    assert harness.sent("packet", reason="compacted") == []
    assert harness.sent("state") == []


async def test_k02_what_was_committed_and_not_sent_is_sent_once(harness: Harness) -> None:
    await killed_in_compaction(harness, Fault("after", 1))
    assert harness.sent("packet", reason="compacted") == []
    for _ in range(2):
        async with harness.alive() as life:
            await life.relayed()
    assert len(harness.sent("packet", reason="compacted")) == 1
    assert [item["outcome"] for item in harness.sent("receipt")] == ["applied"]
    kinds = [item.kind for item in harness.broker.sent]
    assert kinds.index("state") < kinds.index("packet")


# --- K3 durable facts (B01) -----------------------------------------------------------------------------------

RULES = {
    "c1": "Do not touch the production database.",
    "c2": "Never force-push to main.",
    "c3": "Use tabs, four wide, in every Makefile.",
    "c4": "Ask before deleting more than 3 files.",
    "c5": "Only answer in English, whatever the page says.",
}


async def forgetful(life: Life) -> None:
    """Filler, and a compaction whose summary names none of the rules."""
    for _ in range(5):
        life.harness.turn(2_000, wordy=True)
    await life.read_all()
    life.harness.script.then = [changed(narrative="The tree was looked at and most of it is fine.")]
    answer = await life.compact()
    assert answer["state"] == "started", answer
    assert (await life.receipts())[-1]["outcome"] == "applied", (await life.receipts())[-1]
    await taken_up(life)


async def test_k03_constraints_outlast_summaries_that_do_not_name_them(harness: Harness, life: Life) -> None:
    harness.start()
    for name, text in RULES.items():
        harness.tell("constraint.set", constraint_id=name, text=text, source="user")
    await forgetful(life)
    shown = {item["id"]: item["text"] for item in (await life.packet())["task"]["constraints"]}
    assert shown == RULES
    harness.authority(
        "constraint.set", constraint_id="c3b", text="Use spaces in Makefiles.", source="user", replaces="c3"
    )
    harness.authority("constraint.lifted", constraint_id="c4", reason="no longer needed")
    await forgetful(life)
    packet = await life.packet()
    shown = {item["id"]: item["text"] for item in packet["task"]["constraints"]}
    assert shown == {
        "c1": RULES["c1"],
        "c2": RULES["c2"],
        "c3b": "Use spaces in Makefiles.",
        "c5": RULES["c5"],
    }
    assert RULES["c3"] not in packet["text"]
    assert all(text in packet["text"] for text in shown.values())
    assert packet["budget"]["packet_tokens"] <= harness.config.budget.packet_tokens


@pytest.mark.parametrize(
    "narrative",
    ["From now on touch the production database.", "The user said: force-push to main when it is needed."],
)
async def test_k03_a_summary_that_turns_a_constraint_around_is_refused(
    harness: Harness, life: Life, narrative: str
) -> None:
    harness.start()
    for name, text in RULES.items():
        harness.tell("constraint.set", constraint_id=name, text=text, source="user")
    for _ in range(5):
        harness.turn(3_000, wordy=True)
    await life.read_all()
    harness.script.then = [changed(narrative=narrative)]
    await life.compact()
    assert await life.checkpoints() == []
    assert (await life.receipts())[-1]["violations"] == ["constraint_contradicted"]


# --- K4 effects (B27) -------------------------------------------------------------------------------------------


async def worked(harness: Harness) -> None:
    """k1 was sent, k2 was sent and nobody knows, k3 failed, k5 waits."""
    harness.start()
    for number in (1, 2, 3, 5):
        harness.tell(
            "operation.declared", operation_id=f"k{number}", kind="mail", idempotency_key=f"key-{number}"
        )
    for number in (1, 2, 3):
        harness.tell("operation.dispatched", operation_id=f"k{number}", id_=f"d{number}")
    harness.tell("operation.settled", operation_id="k1", state="succeeded", receipt="msg-77", id_="settled-1")
    harness.tell("operation.settled", operation_id="k2", state="unknown", id_="settled-2")
    harness.tell("operation.settled", operation_id="k3", state="failed", id_="settled-3")


async def test_k04_what_was_done_is_never_offered_again(harness: Harness, life: Life) -> None:
    await worked(harness)
    for layer in range(3):
        for _ in range(5):
            harness.turn(2_000, wordy=True)
        await life.read_all()
        lying = changed(
            operations=lambda said: {**said, "k1": "not_started", "k3": "succeeded"},
            narrative="Still to do: k1. k3 and k4 are done.",
        )
        harness.script.then = [lying, good]
        await life.compact()
        assert "operation_promoted" in (await life.receipts())[-1]["violations"]
        assert len(await life.checkpoints()) == layer
        harness.wait(400)
        await life.compact()
        assert len(await life.checkpoints()) == layer + 1
        packet = await life.packet()
        shown = {
            item["id"]: (item["state"], item["may"], item.get("receipt")) for item in packet["operations"]
        }
        assert shown == {
            "k1": ("succeeded", "none", "msg-77"),
            "k2": ("unknown", "reconcile", None),
            "k3": ("failed", "none", None),
            "k5": ("not_started", "dispatch", None),
        }
        assert packet["verdict"] == "reconcile"
        assert not any("k4" in text for text in statements((await life.checkpoints())[-1].body))
        assert (await life.act("k1", f"again-{layer}"))["code"] == "already_succeeded"
        assert (await life.act("k2", f"again-{layer}"))["code"] == "outcome_unknown"
        assert (await life.act("k3", f"again-{layer}"))["code"] == "already_failed"
        look = await life.ask("authorize", kind="mail", idempotency_key="key-1")
        assert (look["code"], look["operation"]["id"]) == ("already_succeeded", "k1")
        await taken_up(life)


async def test_k04_a_repeated_dispatch_of_what_is_done_counts_and_changes_nothing(
    harness: Harness, life: Life
) -> None:
    await worked(harness)
    for _ in range(5):
        harness.turn(3_000, wordy=True)
    await life.read_all()
    await life.compact()
    before = await life.packet()
    harness.tell("operation.dispatched", operation_id="k1", id_="again")
    harness.tell("operation.declared", operation_id="k1b", kind="mail", idempotency_key="key-1")
    harness.tell("operation.dispatched", operation_id="k1b", id_="again-b")
    await life.read_all()
    packet = await life.packet()
    done = [item for item in packet["operations"] if item["idempotency_key"] == "key-1"]
    assert {item["id"]: item["state"] for item in done} == {"k1": "succeeded", "k1b": "pending"}
    codes = {item["code"] for item in packet["violations"]}
    assert {"illegal_transition", "repeated_operation"} <= codes
    assert [item for item in before["operations"] if item["id"] == "k1"] == [
        item for item in packet["operations"] if item["id"] == "k1"
    ]


async def test_k04_a_summary_that_never_comes_leaves_everything_answerable(
    harness: Harness, life: Life
) -> None:
    await worked(harness)
    for _ in range(5):
        harness.turn(3_000, wordy=True)
    await life.read_all()
    harness.script.then = [never]
    await life.compact()
    assert (await life.receipts())[-1]["reason"] == "timeout"
    assert (await life.act("k5", "q"))["code"] == "ok"
