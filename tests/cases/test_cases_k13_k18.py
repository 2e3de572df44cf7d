"""Faults others reported, kinds K13 to K18, as far as they need no broker, no second process and no full disk.

Tested with the real thing, under tests/: K13 liveness (a broker restarted, gone, half open, slow) in
integration/test_transport_pump.py and test_transport_link.py; K14 limits of the broker itself in
integration/test_transport_publisher.py; K15 foreign locks and K16 a disk that is really full in
integration/test_storage_faults.py; K17 every way to stop in crash/test_crash_stop.py.
"""

from __future__ import annotations

import anyio
import pytest

from storage.errors import StorageFull
from support.harness import LANE, TENANT, Fault, Harness, Life
from support.voyages import Voyage, prove_coverage

pytestmark = pytest.mark.anyio


# --- K14 nothing leaves that the broker would refuse (B40) ---------------------------------------------------------


def burdened(harness: Harness, count: int, size: int) -> None:
    """A run with so many open matters of so many characters that no packet can hold them whole."""
    harness.start()
    for number in range(count):
        text = f"rule {number}: " + "never do that. " * (size // 15)
        harness.tell("constraint.set", constraint_id=f"c{number}", text=text, source="user")
        harness.tell("question.opened", question_id=f"q{number}", text=text)
        harness.tell(
            "operation.declared",
            operation_id=f"o{number}",
            kind="mail",
            idempotency_key=f"k{number}",
            target=text,
        )


@pytest.mark.parametrize(("count", "size"), [(20, 30_000), (900, 300), (2_500, 30)])
async def test_k14_what_is_sent_and_answered_fits_the_limit(
    harness: Harness, life: Life, count: int, size: int
) -> None:
    limit = 256 * 1024
    life.desk.max_payload = limit
    burdened(harness, count, size)
    for _ in range(5):
        harness.turn(2_000, wordy=True)
    await life.read_all()
    await life.compact()
    await life.publish()
    await life.relayed()
    headers = 1_024
    assert max(len(item.payload) for item in harness.broker.sent) + headers <= limit
    answer = await life.parts.responder.answer("r", "packet", b"{}")
    assert len(answer.body) + headers <= limit
    status = await life.parts.responder.answer("r", "status", b"{}")
    assert len(status.body) + headers <= limit
    ledger = await life.ledger()
    assert len(ledger.active["operation"]) == count
    assert (await life.act("o1", "q"))["code"] in ("ok", "postponed")


async def test_k14_too_much_for_one_answer_is_a_typed_error(harness: Harness, life: Life) -> None:
    life.desk.max_payload = 2_000
    harness.start()
    for number in range(400):
        harness.tell(
            "operation.declared", operation_id=f"o{number}", kind="mail", idempotency_key=f"k{number}"
        )
    await life.read_all()
    answer = await life.ask("status")
    assert answer["error"]["code"] == "too_large"


# --- K15, K16 a commit that is refused loses nothing (B48, B49) -------------------------------------------------------


async def test_k16_a_disk_that_is_full_for_a_while_loses_nothing(harness: Harness, life: Life) -> None:
    """Refused again and again at every place; then there is room, and everything is there once, in order."""
    harness.start()
    for number in range(5):
        harness.turn(2_000, wordy=True)
        for _ in range(3):
            harness.fault = Fault("refused", number % 3)
            await life.read(3)
        await life.compact()
        harness.wait(400)
    harness.fault = None
    await life.read_all(3)
    assert life.refused >= 5
    await life.compact()
    voyage = Voyage(harness)
    await voyage.agree(life)
    await prove_coverage(life, voyage.truth, "r")
    entries = await life.store.tail(TENANT, LANE, "r", after=0)
    assert [entry.position for entry in entries] == list(range(1, len(entries) + 1))
    assert await life.store.verify_chain(TENANT, LANE, "r") is None


async def test_k16_while_it_is_full_questions_are_answered(harness: Harness, life: Life) -> None:
    harness.start()
    harness.tell("operation.declared", operation_id="o1", kind="mail", idempotency_key="k")
    await life.read_all()

    async def full(unit: object) -> None:
        raise StorageFull("no space for the test")

    life.store.commit = full  # type: ignore[method-assign, assignment]
    harness.tell("question.opened", question_id="q1", text="And now?")
    await life.read()
    packet = await life.packet()
    assert packet["questions"] == []
    assert (await life.ask("authorize", operation_id="o1", dry_run=True))["code"] == "ok"
    answers = []
    async with anyio.create_task_group() as tasks:

        async def act() -> None:
            answers.append(await life.ask("authorize", operation_id="o1", request_id="q"))

        tasks.start_soon(act)
        while not answers:
            await life.read()
            await anyio.sleep(0.05)
    assert answers[0]["error"]["code"] == "unavailable"


# --- K18 metrics ---


async def test_k18_the_number_of_series_does_not_depend_on_the_number_of_runs(
    harness: Harness, life: Life
) -> None:
    def series() -> set[tuple[str, tuple[str, ...]]]:
        found = set()
        for family in harness.metrics.registry.collect():
            for sample in family.samples:
                found.add((sample.name, tuple(sorted(sample.labels.items()))))
        return found

    async def work(run: str) -> None:
        harness.start(run)
        for _ in range(5):
            harness.turn(2_000, run=run, wordy=True)
        harness.tell("tool.returned", run=run, call_id="none", status="ok", content="x")
        await life.read_all()
        await life.compact(run)
        await life.packet(run)

    await work("first")
    before = series()
    for number in range(12):
        await work(f"run-{number}")
    assert series() == before
    assert harness.metrics.total("compactions_total") == 13
