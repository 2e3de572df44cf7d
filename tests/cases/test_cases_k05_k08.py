"""Faults others reported, kinds K5 to K8: bad summaries accepted, compaction without progress, a summariser's own
window, and figures that are none.

What one event does to the figure, case by case: tests/unit/test_budget.py, tests/integration/test_blackbox_budget.py.
"""

from __future__ import annotations

import json
from typing import Any

import anyio
import msgspec
import pytest

from protocol.summary import SummarizeReply, SummarizeRequest
from sidecar.summarizers import SummarizerFailure
from sidecar.summarizers.digest import DigestSummarizer
from support.harness import Harness, Life
from support.summaries import BAD, Held, good
from support.voyages import Voyage, prove_coverage

pytestmark = pytest.mark.anyio


async def taken_up(life: Life) -> None:
    await life.relayed()
    packets = [item for item in life.harness.sent("packet") if item["reason"] in ("compacted", "trimmed")]
    life.harness.tell("context.replaced", by="agent", packet_id=packets[-1]["packet_id"])
    await life.read_all()


def open_matters(harness: Harness) -> None:
    """Six constraints, three open steps, two unfinished operations."""
    harness.start()
    for number in range(6):
        harness.tell(
            "constraint.set", constraint_id=f"c{number}", text=f"Rule number {number}.", source="user"
        )
    plan = [{"id": f"p{number}", "text": f"step {number}", "state": "todo"} for number in range(3)]
    harness.tell(
        "step.changed", phase="work", plan=plan, next_action={"verb": "reconcile", "operation_id": "o1"}
    )
    for name in ("o1", "o2"):
        harness.tell("operation.declared", operation_id=name, kind="mail", idempotency_key=f"key-{name}")
    harness.tell("operation.dispatched", operation_id="o1", id_="d1")
    harness.tell("operation.settled", operation_id="o1", state="unknown", id_="s1")


# --- K5 what is no summary (B09) --------------------------------------------------------------------------------

REASONS = {
    "nothing": ("invalid", "schema_invalid"),
    "no_json": ("invalid", "schema_invalid"),
    "text": ("invalid", "schema_invalid"),
    "half": ("invalid", "schema_invalid"),
    "empty": ("invalid", "empty_summary"),
    "hollow": ("invalid", "empty_summary"),
    "other_run": ("invalid", "objective_changed"),
    "echo": ("echo", None),
    "too_much": ("invalid", "over_budget"),
    "refused": ("refused", None),
    "finish_refusal": ("refused", None),
    "finish_length": ("truncated", None),
    "unavailable": ("unavailable", None),
    "crashed": ("invalid", None),
    "never": ("timeout", None),
}


def test_k05_every_bad_behaviour_has_its_reason() -> None:
    assert set(REASONS) == set(BAD)


@pytest.mark.parametrize("name", sorted(BAD))
async def test_k05_what_is_no_summary_replaces_nothing(harness: Harness, life: Life, name: str) -> None:
    """A good checkpoint stands; then the bad answer; then the old one is served, and the next may be good."""
    open_matters(harness)
    for _ in range(5):
        harness.turn(2_000, wordy=True)
    await life.read_all()
    await life.compact()
    await taken_up(life)
    before = await life.packet()
    for _ in range(5):
        harness.turn(2_000, wordy=True)
    await life.read_all()
    harness.script.then = [BAD[name]]
    answer = await life.compact()
    assert answer["state"] == "started"
    receipt = (await life.receipts())[-1]
    reason, violation = REASONS[name]
    assert (receipt["outcome"], receipt["reason"]) == ("failed", reason)
    assert violation is None or violation in receipt["violations"]
    assert harness.metrics.total("compaction_failures_total") == 1
    after = await life.packet()
    assert after["checkpoint"] == before["checkpoint"]
    assert after["tail"]["from_position"] == before["tail"]["from_position"]
    assert after["summary"] == before["summary"]
    assert after["protected_digest"] != ""
    assert len(after["task"]["constraints"]) == 6
    await life.relayed()
    assert [item["outcome"] for item in harness.sent("receipt")] == ["applied", "failed"]
    harness.wait(400)
    await life.compact()
    assert [row.version for row in await life.checkpoints()] == [1, 2]
    voyage = Voyage(harness)
    voyage.follow(life)
    await prove_coverage(life, voyage.truth, "r")


async def test_k05_nothing_new_is_put_off_and_not_applied(harness: Harness, life: Life) -> None:
    open_matters(harness)
    for _ in range(5):
        harness.turn(2_000, wordy=True)
    await life.read_all()
    while (answer := await life.compact())["state"] == "started":
        assert (await life.receipts())[-1]["outcome"] == "applied"
        await taken_up(life)
    assert (answer["state"], answer["reason"]) == ("deferred", "little_new")
    assert len(harness.script.asked) == len(await life.receipts()) == len(await life.checkpoints()) <= 2


async def test_k05_the_breaker_opens_and_the_fallback_takes_over(harness: Harness) -> None:
    harness.config = msgspec.structs.replace(
        harness.config, summarizer=msgspec.structs.replace(harness.config.summarizer, fallback="digest")
    )
    harness.fallback = DigestSummarizer()
    harness.script.always = BAD["unavailable"]
    async with harness.alive() as life:
        open_matters(harness)
        for _ in range(5):
            harness.turn(2_000, wordy=True)
        await life.read_all()
        states = []
        for _ in range(4):
            states.append((await life.compact())["state"])
            harness.wait(65)
        assert states == ["started"] * 4
        outcomes = [(row["outcome"], row["summarizer"]) for row in await life.receipts()]
        assert outcomes == [("failed", "script")] * 3 + [("applied", "digest")]


# --- K6 no progress (B15) ---------------------------------------------------------------------------------------


async def test_k06_a_threshold_that_can_never_be_met_stops_the_attempts(harness: Harness, life: Life) -> None:
    """23,000 tokens of fixed cost: each report is above the trigger again, whatever is covered."""
    harness.start()
    for number in range(50):
        harness.tell("message", role="user", content=f"small {number}")
        harness.tell("message", role="assistant", content=f"answer {number} " + "is fine. " * 20)
        harness.tell("usage.reported", model="m", context_tokens=23_000 + number, output_tokens=10)
        await life.read_all(1)
        harness.wait(5)
    await life.relayed()
    assert len(harness.script.asked) <= 2
    told = harness.sent("notice", kind="ineffective")
    assert [item["reason"] for item in told] == ["fixed_cost"]
    assert (await life.view()).course.ineffective == "fixed_cost"


async def test_k06_a_larger_window_clears_it(harness: Harness, life: Life) -> None:
    harness.start()
    for number in range(10):
        harness.tell("message", role="assistant", content=f"answer {number} " + "is fine. " * 20)
        harness.tell("usage.reported", model="m", context_tokens=23_000, output_tokens=10)
        await life.read_all(1)
    assert (await life.view()).course.ineffective == "fixed_cost"
    harness.tell("model.changed", model={"name": "big", "context_window": 400_000})
    await life.read_all()
    assert (await life.view()).course.ineffective == ""


async def test_k06_without_gain_the_same_input_triggers_once(harness: Harness, life: Life) -> None:
    """An agent that never takes a packet up is told so once, and nothing is summarised again meanwhile."""
    harness.start()
    used = 0
    for number in range(40):
        harness.tell("message", role="user", content=f"go on {number}")
        harness.tell("message", role="assistant", content=f"part {number}: " + "it is fine. " * 250)
        used = min(27_000, used + 900)
        harness.tell("usage.reported", model="m", context_tokens=used, output_tokens=10)
        await life.read_all()
        harness.wait(5)
    await life.relayed()
    assert len(await life.checkpoints()) == 1
    assert len(harness.script.asked) == 1
    assert len(harness.sent("notice", kind="not_applied")) == 1


@pytest.mark.parametrize("go_on", [False, True], ids=["", "auto-continue"])
async def test_k06_passes_that_win_nothing_stop_themselves(harness: Harness, life: Life, go_on: bool) -> None:
    """Each packet is taken up, and the next request is half a percent smaller than before."""
    harness.start()
    used, taken = 3_000, 0
    for number in range(50):
        harness.tell("message", role="user", content="continue" if go_on else f"part {number}")
        harness.tell("message", role="assistant", content=f"answer {number} " + "is fine. " * 400)
        used = min(27_000, used + 1_000)
        harness.tell("usage.reported", model="m", context_tokens=used, output_tokens=10)
        await life.read_all()
        await life.relayed()
        packets = [item for item in harness.sent("packet") if item["reason"] in ("compacted", "trimmed")]
        if len(packets) > taken:
            taken = len(packets)
            used = used * 995 // 1000
            packet_id = packets[-1]["packet_id"]
            harness.tell("context.replaced", by="agent", packet_id=packet_id, context_tokens=used)
            if go_on:
                harness.tell("message", role="user", content="continue")
            await life.read_all()
        harness.wait(5)
    await life.relayed()
    assert 0 < len(harness.script.asked) <= 6
    assert "no_gain" in [item["reason"] for item in harness.sent("notice", kind="ineffective")]
    assert (await life.view()).course.ineffective


# --- K7 the summariser's own window (B18) -------------------------------------------------------------------------


def size_of(request: SummarizeRequest) -> int:
    return len(msgspec.json.encode(request)) // 4


class Narrow:
    """A summariser that refuses what is over its real limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.sizes: list[int] = []

    async def __call__(self, request: SummarizeRequest) -> SummarizeReply:
        self.sizes.append(size_of(request))
        if self.sizes[-1] > self.limit:
            raise SummarizerFailure("invalid", "too long")
        return await good(request)


async def test_k07_a_range_over_the_summarisers_window_goes_in_parts(harness: Harness, life: Life) -> None:
    """From 60 % to far over the window in one event; the summariser takes a quarter of it at a time."""
    narrow = Narrow(10_000)
    harness.script.window_tokens = 10_000
    harness.script.always = narrow
    harness.start()
    for _ in range(4):
        harness.turn(3_000, wordy=True)
    harness.tell("message", role="user", content="read this")
    harness.tell("message", role="assistant", content="It says: " + "the tree is green. " * 6_000)
    harness.turn(500)
    await life.read_all()
    harness.tell("message", role="assistant", content="so far so good " * 400)
    await life.read_all()
    assert len(await life.checkpoints()) == 1
    assert len(narrow.sizes) >= 2
    assert max(narrow.sizes) <= 10_000
    covered = (await life.checkpoints())[0].covers_through
    told = {item.position for request in harness.script.asked for item in request.exchanges}
    voyage = Voyage(harness)
    voyage.follow(life)
    assert told <= set(range(1, covered + 1))
    await prove_coverage(life, voyage.truth, "r")
    for layer in range(2, 5):
        await taken_up(life)
        if (await life.ask("status"))["level"] in ("ok", "checkpoint"):
            break
        await life.compact()
        assert len(await life.checkpoints()) == layer
    assert (await life.ask("status"))["level"] in ("ok", "checkpoint")
    assert max(narrow.sizes) <= 10_000


async def test_k07_a_window_smaller_than_told_ends_in_a_stated_failure(harness: Harness, life: Life) -> None:
    narrow = Narrow(2_000)
    harness.script.window_tokens = 100_000
    harness.script.always = narrow
    harness.start()
    for _ in range(6):
        harness.turn(3_000, wordy=True)
        await life.read_all()
        harness.wait(1)
    answers = []
    for _ in range(20):
        answers.append(await life.compact())
        harness.wait(20)
    assert await life.checkpoints() == []
    assert len(narrow.sizes) <= 6
    assert "breaker" in {answer.get("reason") for answer in answers}
    packet = await life.packet()
    assert packet["checkpoint"] is None
    assert packet["verdict"] == "continue"


async def test_k07_one_failure_then_a_timeout_then_it_goes_through(harness: Harness, life: Life) -> None:
    harness.script.then = [BAD["unavailable"], BAD["never"]]
    harness.start()
    for _ in range(5):
        harness.turn(2_000, wordy=True)
    await life.read_all()
    for _ in range(3):
        await life.compact()
        harness.wait(65)
    rows = await life.receipts()
    assert [(row["outcome"], row["attempt"]) for row in rows] == [
        ("failed", 1),
        ("failed", 2),
        ("applied", 3),
    ]


# --- K8 the figure (B20) --------------------------------------------------------------------------------------------


async def used(life: Life) -> int:
    await life.read_all()
    return int((await life.ask("status"))["budget"]["used"])


async def test_k08_sums_children_and_old_reports_never_move_the_figure(harness: Harness, life: Life) -> None:
    harness.start(model={"name": "m", "context_window": 300_000})
    harness.tell("child.spawned", child_run="c", task="look")
    harness.start("c", model={"name": "m", "context_window": 300_000})
    request: dict[str, Any] = {
        "model": "m", "context_tokens": 76_000, "output_tokens": 1_200,
        "input_tokens": 12, "cache_read_tokens": 68_000, "cache_write_tokens": 7_500,
    }  # fmt: skip
    for number in range(12):
        harness.tell("message", role="assistant", content=f"call {number}")
        harness.tell("usage.reported", **request)
        assert 75_000 <= await used(life) <= 78_500
    harness.tell("usage.reported", **request | {"context_tokens": 912_000, "scope": "aggregate"})
    assert 75_000 <= await used(life) <= 78_500
    harness.tell("usage.reported", run="c", model="m", context_tokens=290_000, output_tokens=1)
    assert 75_000 <= await used(life) <= 78_500
    harness.tell("usage.reported", **request | {"context_tokens": 1_200_000})
    assert 75_000 <= await used(life) <= 78_500
    harness.tell("message", role="assistant", content="newer", id_="newer")
    harness.tell("usage.reported", **request | {"context_tokens": 90_000, "through": "newer"})
    assert 90_000 <= await used(life) <= 92_000
    harness.tell("usage.reported", **request | {"context_tokens": 50_000, "through": "e-2"})
    assert 90_000 <= await used(life) <= 92_000


async def test_k08_the_figure_falls_with_the_take_up_and_not_with_the_commit(
    harness: Harness, life: Life
) -> None:
    harness.start()
    for _ in range(5):
        harness.turn(2_000, wordy=True)
    harness.tell("usage.reported", model="m", context_tokens=19_000, output_tokens=10)
    before = await used(life)
    await life.compact()
    assert len(await life.checkpoints()) == 1
    assert await used(life) == before
    await taken_up(life)
    assert await used(life) < before * 0.7


async def test_k08_a_summary_that_comes_late_measures_what_is_there_then(
    harness: Harness, life: Life
) -> None:
    """What was said while the summary was made is tail, counted and shown."""
    harness.start()
    for _ in range(5):
        harness.turn(2_000, wordy=True)
    await life.read_all()
    held = Held()
    harness.script.then = [held]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(life.compact)
        await held.reached.wait()
        harness.turn(1_500, wordy=True)
        while life.unread:
            await life.read()
        held.release.set()
    packet = await life.packet()
    row = (await life.checkpoints())[0]
    assert packet["tail"]["through_position"] == (await life.ledger()).head.position
    assert packet["tail"]["events"] == packet["tail"]["through_position"] - row.covers_through
    assert packet["tail"]["tokens"] >= 1_500
    assert json.loads(row.body)["summary"]["objective"] == "mend the pump"
