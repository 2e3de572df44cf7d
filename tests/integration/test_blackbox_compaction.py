"""Compaction from outside: when, up to where, what is published, what it waits for, and when it is over."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from typing import Any

import anyio
import pytest
import rfc8785

from tests.support.blackbox import Box, Json, blackbox, event, eventually, stored, words
from tests.support.conversation import Talk, at, talk
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.anyio

RULES: list[Json] = [
    {"labels": {"kind": "watched"}, "mode": "observe"},
    {"labels": {"kind": "tried"}, "mode": "shadow"},
    {"labels": {"kind": "passed"}, "bypass": True},
]


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as started:
        yield started


@pytest.fixture(scope="module")
async def box(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Box]:
    settings = {"intake.gap_after_seconds": 3600, "lease.seconds": 3}
    async with blackbox(server, tmp_path_factory.mktemp("compaction"), settings, RULES) as opened:
        yield opened


def sha256(value: Any) -> str:
    return "sha256:" + hashlib.sha256(rfc8785.dumps(value)).hexdigest()


RECEIPT = {
    *("v", "type", "tenant", "lane", "run", "at", "epoch", "must_understand", "receipt_id", "attempt_id"),
    *("trigger", "outcome", "reason", "summarizer", "projector", "range", "range_digest", "handoff"),
    *("protected", "artifacts", "tokens", "omitted", "removed_statements", "violations", "attempt"),
    *("started_at", "finished_at"),
}
RECEIPT_OPTIONAL = {"source_session", "checkpoint_id", "parent_checkpoint_id"}


def check_receipt(receipt: Json) -> None:
    assert set(receipt) >= RECEIPT
    assert set(receipt) - RECEIPT <= RECEIPT_OPTIONAL
    assert receipt["type"] == "compaction.receipt"
    assert receipt["trigger"] in ("threshold", "critical", "overflow", "requested", "model_changed")
    assert receipt["outcome"] in ("applied", "shadow", "failed", "stale", "skipped")
    assert 1 <= receipt["range"]["from"] <= receipt["range"]["through"] <= receipt["handoff"]["position"]
    assert receipt["range_digest"].startswith("sha256:")
    assert receipt["handoff"]["ledger_digest"].startswith("sha256:")
    assert receipt["protected"]["total"] == sum(receipt["protected"]["by_kind"].values())
    assert {"before", "after", "packet"} <= set(receipt["tokens"])
    assert set(receipt["omitted"]) == {"drop", "reference", "summarise"}
    assert receipt["attempt"] >= 1
    assert datetime.fromisoformat(receipt["started_at"]) <= datetime.fromisoformat(receipt["finished_at"])


async def compacted(it: Talk, number: int = 1) -> Json:
    """Wait for the receipt of that many applied compactions; the newest."""
    receipts = await it.box.hear(it.run, "receipt", number, outcome="applied")
    for receipt in receipts:
        check_receipt(receipt)
    return receipts[-1]


async def take_up(it: Talk) -> Json:
    """Take the newest packet up as an agent does; the packet."""
    packet = await it.box.packet(it.run)
    await it.tell(event("context.replaced", by="agent", packet_id=packet["packet_id"]))
    await it.tell(
        event("run.resumed", packet_id=packet["packet_id"], ledger_version=packet["ledger_version"])
    )
    return packet


# --- one compaction ----------------------------------------------------------------------------------------


async def test_at_the_threshold_history_is_covered_and_everything_is_told(box: Box) -> None:
    it = await talk(box, session="s1")
    await it.tell(event("question.opened", question_id="q", text="Which zone?"))
    before = await it.fill(0.75)
    receipt = await compacted(it)
    assert receipt["trigger"] == "threshold"
    assert receipt["reason"] is None
    assert receipt["summarizer"] == "digest"
    assert receipt["range"]["from"] == 1
    assert receipt["source_session"] == "s1"
    assert "parent_checkpoint_id" not in receipt
    assert receipt["tokens"]["before"] == before["budget"]["used"]
    assert receipt["tokens"]["after"] < 0.7 * receipt["tokens"]["before"]
    assert receipt["violations"] == []
    assert (receipt["attempt"], receipt["removed_statements"]) == (1, 0)
    assert receipt["protected"]["by_kind"]["question"] == 1
    started = await box.hear(it.run, "notice", kind="compaction_started")
    assert [item["attempt_id"] for item in started] == [receipt["attempt_id"]]
    through = receipt["range"]["through"]
    it.check_untorn(through)
    packet = (await box.hear(it.run, "packet", reason="compacted"))[0]
    checkpoint = packet["checkpoint"]
    assert checkpoint["id"] == receipt["checkpoint_id"]
    assert (checkpoint["version"], checkpoint["schema"]) == (1, 1)
    assert checkpoint["summarizer"] == "digest"
    assert checkpoint["projector"]["version"]
    assert checkpoint["covers_through"] == {"position": through, "event_id": it.events[through - 1]["id"]}
    assert checkpoint["range_digest"] == receipt["range_digest"]
    assert packet["tail"]["from_position"] == through + 1
    assert packet["tail"]["through_position"] == len(it.events)
    assert packet["tail"]["through_event_id"] == it.events[-1]["id"]
    assert packet["tail"]["events"] == len(it.events) - through
    assert packet["budget"]["used_before"] == receipt["tokens"]["before"]
    assert packet["budget"]["used_after"] == receipt["tokens"]["after"]
    assert packet["budget"]["level"] == "compact"
    # The recent part stays verbatim: a tenth of the window or more.
    assert packet["tail"]["tokens"] >= 0.9 * 2_000
    summary = packet["summary"]
    assert set(summary) == {"completed", "observations", "inferences", "narrative"}
    known = {f"event:{item['id']}" for item in it.events[:through]}
    for name in ("completed", "observations", "inferences"):
        for statement in summary[name]:
            assert set(statement["refs"]) <= known
            assert statement["refs"]
    assert packet["questions"] == [{"id": "q", "text": "Which zone?"}]
    # State first, then the packet.
    order = [item.kind for item in box.heard if item.run == it.run]
    assert order.index("state") < order.index("packet", order.index("state"))
    state = box.of(it.run, "state")[-1]
    assert state["checkpoint"]["id"] == checkpoint["id"]
    assert (await box.status(it.run))["checkpoint"] == {
        "id": checkpoint["id"],
        "version": 1,
        "covers_through": checkpoint["covers_through"],
    }


async def test_the_range_digest_is_the_chain_of_the_messages(box: Box) -> None:
    """``sha256`` over the previous link and the sha256 of the message as received, from a link of zeroes
    or of nothing: whatever it starts from, the same history gives the same digest."""
    one = await talk(box)
    await one.fill(0.75)
    digest = (await compacted(one))["range_digest"]
    other = Talk(box, f"{one.run}-again")
    for item in one.events:
        await other.tell(item)
    receipt = await compacted(other)
    assert receipt["range_digest"] == digest
    assert receipt["range"] == (await compacted(one))["range"]
    packets = [(await box.hear(run, "packet", reason="compacted"))[0] for run in (one.run, other.run)]
    assert packets[0]["summary"] == packets[1]["summary"]
    assert packets[0]["protected_digest"] == packets[1]["protected_digest"]
    assert packets[0]["text"] == packets[1]["text"]


async def test_the_state_is_what_a_new_owner_needs(box: Box) -> None:
    it = await talk(box)
    await it.fill(0.75)
    receipt = await compacted(it)
    found = await stored(box.js, "WK_STATE", f"wk.v1.state.{box.tenant}.{box.lane}.{it.run}")
    assert len(found) == 1
    state = json.loads(found[0][1])
    assert state["type"] == "run.state"
    assert state["checkpoint"]["range_digest"] == receipt["range_digest"]
    assert state["checkpoint"]["summary"]["objective"] == "Read it all."
    assert state["checkpoint"]["parent_checkpoint_id"] is None
    assert state["ledger_version"] >= receipt["handoff"]["position"]
    assert state["ledger_digest"] == sha256(state["ledger"])
    assert state["cursor"]["stream_seq"] >= 1
    assert state["cursor"]["stream_created"]
    assert state["settings"]["authority_required"] is True
    assert state["hash_chain"].startswith("sha256:")
    assert state["tombstones"] == []
    assert state["trimmed_through"] >= 0
    headers = found[0][2]
    assert (
        headers["Nats-Expected-Last-Subject-Sequence-Subject"] == f"wk.v1.state.{box.tenant}.{box.lane}._lane"
    )


async def test_the_figure_drops_when_the_agent_takes_the_packet_up_and_not_before(box: Box) -> None:
    it = await talk(box)
    before = await it.fill(0.75)
    receipt = await compacted(it)
    status = await box.status(it.run)
    assert status["budget"] == before["budget"]
    assert status["level"] == "compact"
    packet = await take_up(it)
    status = await box.status(it.run)
    assert status["level"] == "ok"
    assert abs(status["budget"]["used"] - receipt["tokens"]["after"]) <= 0.1 * receipt["tokens"]["after"]
    assert packet["checkpoint"]["version"] == 1
    assert (await box.status(it.run))["violations"] == {}


@pytest.mark.parametrize("way", ["context.replaced", "run.resumed", "a smaller report"])
async def test_each_way_of_taking_up_lets_the_next_compaction_follow(box: Box, way: str) -> None:
    it = await talk(box)
    await it.fill(0.75)
    first = await compacted(it)
    packet = await box.packet(it.run)
    if way == "context.replaced":
        await it.tell(event("context.replaced", by="agent", packet_id=packet["packet_id"]))
    elif way == "run.resumed":
        await it.tell(event("run.resumed", packet_id=packet["packet_id"]))
    else:
        await it.used(packet["budget"]["used_after"])
    assert (await box.status(it.run))["level"] == "ok"
    await it.fill(0.75)
    second = await compacted(it, 2)
    assert second["range"]["from"] == first["range"]["through"] + 1
    assert second["parent_checkpoint_id"] == first["checkpoint_id"]
    assert second["attempt_id"] != first["attempt_id"]
    it.check_untorn(second["range"]["through"])
    assert (await box.packet(it.run))["checkpoint"]["version"] == 2


async def test_until_it_is_taken_up_there_is_no_other_and_after_three_reports_that_is_said_once(
    box: Box,
) -> None:
    it = await talk(box)
    status = await it.fill(0.75)
    await compacted(it)
    used = status["budget"]["used"]
    for _ in range(4):
        await it.exchange(100)
        used += 300
        await it.used(used)
    await box.settled(it.run)
    assert len(await box.hear(it.run, "notice", kind="not_applied")) == 1
    assert box.of(it.run, "receipt") == box.of(it.run, "receipt", outcome="applied")
    assert len(box.of(it.run, "receipt")) == 1
    status = await box.status(it.run)
    assert status["compaction"] == {"state": "deferred", "reason": "not_applied"}
    reasons = [item["reason"] for item in box.of(it.run, "notice", kind="compaction_deferred")]
    assert reasons == ["not_applied"]
    await take_up(it)
    assert (await box.status(it.run))["compaction"]["state"] == "idle"


async def test_a_rebuilt_layer_reads_from_the_beginning(
    server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = {"summarizer.rebuild_every": 2, "tenant": "layers"}
    async with blackbox(server, tmp_path_factory.mktemp("layers"), settings) as box:
        box.tenant = "layers"
        it = await talk(box)
        ranges = []
        for number in range(1, 5):
            await it.fill(0.75)
            receipt = await compacted(it, number)
            ranges.append(receipt["range"])
            it.check_untorn(receipt["range"]["through"])
            await take_up(it)
        assert [item["from"] for item in ranges] == [1, 1, ranges[1]["through"] + 1, 1]
        through = [item["through"] for item in ranges]
        assert through == sorted(set(through))


# --- waiting -----------------------------------------------------------------------------------------------


async def deferred(it: Talk, reason: str) -> None:
    """Wait until compaction of the run waits for that; said once per change."""
    await eventually(lambda: _waits(it, reason), f"deferral {reason}")
    await it.box.hear(it.run, "notice", kind="compaction_deferred", reason=reason)
    told = [item["reason"] for item in it.box.of(it.run, "notice", kind="compaction_deferred")]
    assert all(before != after for before, after in itertools.pairwise(told))
    assert it.box.of(it.run, "receipt") == []


async def _waits(it: Talk, reason: str) -> bool:
    found = (await it.box.status(it.run))["compaction"]
    return bool(found == {"state": "deferred", "reason": reason})


async def test_work_in_flight_is_waited_for_below_critical(box: Box) -> None:
    it = await talk(box)
    await it.fill(0.70)
    await it.tell(event("tool.called", call_id="long", tool="build", arguments={}, message_id="mm"))
    await it.used(at(0.76))
    await deferred(it, "in_flight")
    await it.tell(event("boundary.marked", kind="other"), event("boundary.marked", kind="other"))
    await deferred(it, "in_flight")
    await it.tell(event("tool.returned", call_id="long", status="ok", content="built"))
    receipt = await compacted(it)
    assert receipt["trigger"] == "threshold"


async def test_at_critical_the_cut_comes_before_the_oldest_open_call(box: Box) -> None:
    it = await talk(box)
    await it.fill(0.65)
    call = event("tool.called", call_id="long", tool="build", arguments={}, message_id="m-long")
    answer = event("message", role="assistant", message_id="m-long", content="Building.")
    await it.tell(answer, call)
    await it.exchange()
    await it.used(at(0.91))
    receipt = await compacted(it)
    assert receipt["trigger"] == "critical"
    assert receipt["range"]["through"] < it.position(answer["id"])
    packet = (await box.hear(it.run, "packet", reason="compacted"))[0]
    assert packet["open_calls"] == [{"call_id": "long", "tool": "build"}]


async def test_at_critical_with_everything_behind_an_open_call_there_is_no_boundary(box: Box) -> None:
    it = await talk(box)
    await it.tell(
        event("message", role="assistant", message_id="m-long", content="Building."),
        event("tool.called", call_id="long", tool="build", arguments={}, message_id="m-long"),
    )
    await it.fill(0.91)
    await deferred(it, "no_boundary")


async def test_an_open_operation_holds_below_critical_only(box: Box) -> None:
    it = await talk(box)
    await it.tell(
        event("operation.declared", operation_id="op", kind="x", idempotency_key="k"),
        event("operation.dispatched", operation_id="op"),
    )
    await it.fill(0.76)
    await deferred(it, "in_flight")
    await it.fill(0.91)
    receipt = await compacted(it)
    assert receipt["protected"]["by_kind"]["operation"] == 1
    assert (await box.packet(it.run))["operations"][0]["state"] == "pending"


async def test_an_open_gap_is_waited_for(box: Box) -> None:
    it = await talk(box, session="s1", seq=1)
    await it.tell(event("message", role="user", content="?", session="s1", seq=3))
    await it.fill(0.76)
    await deferred(it, "open_gap")
    await box.tell(
        it.run, event("gap.accepted", session="s1", from_=2, through=2, by="ann"), channel="authority"
    )
    await it.exchange()
    await compacted(it)


async def test_an_artifact_that_is_named_is_saved_first_or_listed(box: Box) -> None:
    it = await talk(box)
    await it.exchange(artifact_id="report-1")
    await it.fill(0.76)
    await deferred(it, "artifact_unsaved")
    await it.tell(
        event("artifact.saved", artifact_id="report-1", uri="s3://r", sha256="11" * 32, description="report")
    )
    receipt = await compacted(it)
    assert receipt["artifacts"] == 1
    other = await talk(box)
    await other.exchange(artifact_id="report-2")
    await other.fill(0.76)
    await deferred(other, "artifact_unsaved")
    await other.fill(0.92)
    await compacted(other)
    packet = await box.packet(other.run)
    missing = [item for item in packet["blockers"] if item["code"] == "artifact_missing"]
    assert [item["ref"] for item in missing] == ["artifact:report-2"]


async def test_a_window_full_of_fixed_cost_is_told_once_to_be_beyond_help(box: Box) -> None:
    it = await talk(box)
    await it.exchange()
    await it.used(at(0.95))
    found = await box.hear(it.run, "notice", kind="ineffective")
    assert found[0]["reason"]
    await it.exchange(50)
    await it.used(at(0.96))
    await box.settled(it.run)
    assert len(box.of(it.run, "notice", kind="ineffective")) == 1
    assert box.of(it.run, "receipt") == []


# --- trimming ----------------------------------------------------------------------------------------------


async def test_large_old_results_become_references_before_anything_is_covered(box: Box) -> None:
    it = await talk(box)
    large = [await it.exchange(2_500), await it.exchange(2_600)]
    await it.fill(0.75)
    packet = (await box.hear(it.run, "packet", reason="trimmed"))[0]
    assert box.of(it.run, "receipt") == []
    assert packet["checkpoint"] is None
    assert [item["event_id"] for item in packet["cleared"]] == large
    for number, item in enumerate(packet["cleared"]):
        assert set(item) == {"call_id", "event_id", "ref", "status", "note"}
        assert item["call_id"] == f"c-{number}"
        assert item["ref"] == f"event:{item['event_id']}"
        assert item["status"] == "ok"
    status = await box.status(it.run)
    assert status["trimmed_through"] >= it.position(large[1])
    assert status["checkpoint"] is None
    assert packet["budget"]["used_after"] <= packet["budget"]["used_before"] - 4_000
    await take_up(it)
    assert (await box.status(it.run))["budget"]["used"] <= status["budget"]["used"] - 4_000
    # A packet lists all cleared results still in the tail, until a checkpoint covers them.
    assert [item["event_id"] for item in (await box.packet(it.run))["cleared"]] == large
    await it.fill(0.75)
    receipt = await compacted(it)
    packet = await box.packet(it.run)
    assert all(it.position(item["event_id"]) > receipt["range"]["through"] for item in packet["cleared"])


async def test_a_failed_result_keeps_its_first_error_line(box: Box) -> None:
    it = await talk(box)
    await it.tell(
        event("message", role="assistant", message_id="m-x", content="Testing."),
        event("tool.called", call_id="x", tool="pytest", arguments={}, message_id="m-x"),
        event(
            "tool.returned",
            id="failed",
            call_id="x",
            status="error",
            content="collected 5 items\nE   AssertionError: 3 != 4\n" + words(4_000),
        ),
    )
    await it.fill(0.75)
    packet = (await box.hear(it.run, "packet", reason="trimmed"))[0]
    assert [(item["event_id"], item["status"]) for item in packet["cleared"]] == [("failed", "error")]
    assert "AssertionError: 3 != 4" in packet["cleared"][0]["note"]


# --- asking for one -----------------------------------------------------------------------------------------


async def test_one_may_be_asked_for(box: Box) -> None:
    it = await talk(box)
    await it.fill(0.5)
    answer = await box.ask(it.run, "compact", reason="before lunch")
    assert answer.status is None
    assert answer.body["state"] == "started"
    receipt = await compacted(it)
    assert receipt["attempt_id"] == answer.body["attempt_id"]
    assert receipt["trigger"] == "requested"
    assert receipt["reason"] == "before lunch"
    again = (await box.ask(it.run, "compact")).body
    assert again["state"] == "deferred"
    assert again["reason"]
    texts = json.dumps([item.body for item in box.heard if item.run == it.run and item.kind != "receipt"])
    assert "before lunch" not in texts


async def test_asking_with_nothing_to_gain_is_answered_with_why(box: Box) -> None:
    it = await talk(box)
    await it.exchange(50)
    answer = (await box.ask(it.run, "compact")).body
    assert answer == {**answer, "state": "deferred", "reason": "little_new"}
    assert box.of(it.run, "receipt") == []


async def test_many_who_ask_at_once_start_one(box: Box) -> None:
    it = await talk(box)
    await it.fill(0.5)
    answers: list[Json] = []

    async def one() -> None:
        answers.append((await box.ask(it.run, "compact")).body)

    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(one)
    assert {item["state"] for item in answers} <= {"started", "running", "deferred"}
    assert len({item["attempt_id"] for item in answers if "attempt_id" in item}) == 1
    await compacted(it)
    await box.settled(it.run)
    assert len(box.of(it.run, "receipt")) == 1


async def test_asked_for_while_something_is_in_flight_it_waits(box: Box) -> None:
    it = await talk(box)
    await it.fill(0.5)
    await it.tell(event("tool.called", call_id="long", tool="build", arguments={}))
    answer = (await box.ask(it.run, "compact")).body
    assert answer == {**answer, "state": "deferred", "reason": "in_flight"}


# --- modes --------------------------------------------------------------------------------------------------


async def test_observed_runs_are_measured_and_left_alone(box: Box) -> None:
    it = await talk(box, labels={"kind": "watched"})
    await it.fill(0.92)
    await deferred(it, "mode")
    assert (await box.status(it.run))["mode"] == "observe"
    assert (await box.ask(it.run, "compact")).body == {
        **(await box.ask(it.run, "compact")).body,
        "state": "deferred",
        "reason": "mode",
    }
    await box.hear(it.run, "notice", kind="level_changed", to="critical")
    assert box.of(it.run, "packet") == []
    assert (await box.packet(it.run))["task"]["goal"] == "Read it all."


async def test_a_bypassed_run_keeps_ledger_and_history(box: Box) -> None:
    it = await talk(box, labels={"kind": "passed"})
    await it.tell(event("operation.declared", operation_id="op", kind="x", idempotency_key="k"))
    await it.fill(0.80)
    await deferred(it, "mode")
    assert box.of(it.run, "packet") == []
    assert (await box.authorize(it.run, "op"))["code"] == "ok"


async def test_a_shadow_compacts_in_a_chain_of_its_own(box: Box) -> None:
    it = await talk(box, labels={"kind": "tried"})
    before = await it.fill(0.75)
    receipt = (await box.hear(it.run, "receipt"))[0]
    check_receipt(receipt)
    assert receipt["outcome"] == "shadow"
    assert receipt["tokens"]["before"] == before["budget"]["used"]
    assert receipt["tokens"]["after"] < receipt["tokens"]["before"]
    it.check_untorn(receipt["range"]["through"])
    status = await box.status(it.run)
    assert status["mode"] == "shadow"
    assert status["checkpoint"] is None
    assert status["budget"] == before["budget"]
    # It goes on as if it had been real.
    await it.fill(1.45)
    await box.hear(it.run, "receipt", 2)
    second = box.of(it.run, "receipt")[1]
    assert second["range"]["from"] == receipt["range"]["through"] + 1
    assert second["parent_checkpoint_id"] == receipt["checkpoint_id"]
    assert box.of(it.run, "packet") == []
    assert (await box.packet(it.run))["checkpoint"] is None


# --- owner and state ----------------------------------------------------------------------------------------


async def test_the_lane_has_one_epoch_on_both_streams_and_it_is_renewed(box: Box) -> None:
    epoch = (await box.status((await talk(box)).run))["epoch"]
    for stream, subject in (
        ("WK_STATE", f"wk.v1.state.{box.tenant}.{box.lane}._lane"),
        ("WK_OUT", f"wk.v1.out.{box.tenant}.{box.lane}._lane.epoch"),
    ):
        message = await box.js.get_last_msg(stream, subject)
        assert message.data is not None
        record = json.loads(message.data)
        assert record["type"] == "lane.epoch"
        assert record["epoch"] == epoch
        assert record["owner"]
        assert datetime.fromisoformat(record["at"])
        assert not record.get("released")
    subject = f"wk.v1.state.{box.tenant}.{box.lane}._lane"

    def records() -> list[Json]:
        return [item.body for item in box.heard if item.subject == subject]

    number = len(records())
    await eventually(lambda: len(records()) > number, "a renewal")
    assert {(item["epoch"], item["owner"]) for item in records()} == {(epoch, records()[0]["owner"])}


async def test_a_finished_run_and_a_drained_daemon_leave_state_and_a_released_lane(
    server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with blackbox(server, tmp_path_factory.mktemp("drain"), {"tenant": "drained"}) as box:
        box.tenant = "drained"
        done, going = await box.start(), await box.start()
        await box.tell(done, event("run.finished", outcome="succeeded"))
        await box.hear(done, "state")
        assert box.of(going, "state") == []
        await box.tell(going, event("question.opened", question_id="q", text="?"))
        going_status = await box.status(going)
        js = box.js
        box.daemon.stop.set()
        await eventually(lambda: bool(box.of(going, "state")), "state at drain")
        state = box.of(going, "state")[-1]
        assert state["ledger_version"] == going_status["ledger_version"]
        assert state["ledger_digest"] == sha256(state["ledger"])
        assert state["cursor"]["stream_seq"] >= box.newest[going]

        async def released() -> bool:
            message = await js.get_last_msg("WK_STATE", "wk.v1.state.drained.main._lane")
            return json.loads(message.data or b"{}").get("released") is True

        await eventually(released, "release")


async def test_runs_end_in_numbers(box: Box) -> None:
    it = await talk(box)
    applied = await box.metric("compactions_total", outcome="applied", trigger="threshold")
    trims = await box.metric("trims_total")
    packets = await box.metric("packets_published_total")
    await it.fill(0.75)
    await compacted(it)
    await box.settled(it.run)
    assert await box.metric("compactions_total", outcome="applied", trigger="threshold") == applied + 1
    assert await box.metric("trims_total") == trims
    assert await box.metric("packets_published_total") > packets
    await take_up(it)
    before = await box.metric("runs_finished_total", outcome="succeeded", compacted="true")
    await it.tell(event("run.finished", outcome="succeeded"))
    await box.status(it.run)
    assert await box.metric("runs_finished_total", outcome="succeeded", compacted="true") == before + 1
    assert await box.metric("resumes_total", outcome="ok") >= 1
