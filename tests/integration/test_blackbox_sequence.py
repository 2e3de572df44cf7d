"""Positions, duplicates, sessions, missing and late messages, as the wire protocol promises them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.support.blackbox import MODEL, Box, Json, blackbox, event, eventually, new_run
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as started:
        yield started


@pytest.fixture(scope="module")
async def box(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Box]:
    # No gap is declared while these tests look.
    async with blackbox(server, tmp_path_factory.mktemp("seq"), {"intake.gap_after_seconds": 3600}) as opened:
        yield opened


@pytest.fixture(scope="module")
async def quick(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Box]:
    settings = {"intake.gap_after_seconds": 1, "tenant": "quick"}
    async with blackbox(server, tmp_path_factory.mktemp("quick"), settings) as opened:
        opened.tenant = "quick"
        yield opened


def said(number: int, text: str = "word", session: str = "s1", **more: Any) -> Json:
    return event("message", role="user", content=text, session=session, seq=number, **more)


async def begun(box: Box, session: str = "s1", **fields: Any) -> str:
    """A run whose session has used number 1."""
    return await box.start(session=session, seq=1, **fields)


def gaps(status: Json) -> list[tuple[str | None, int, int, str]]:
    return [(gap.get("session"), gap["from"], gap["through"], gap["state"]) for gap in status["gaps"]]


def requests(packet: Json) -> list[str]:
    return [item["text"] for item in packet["task"]["current_request"]]


async def operation(box: Box, run: str, **fields: Any) -> str:
    """A declared operation nothing stands against."""
    message = event("operation.declared", kind="note.write", **fields)
    name = message["id"]
    await box.tell(run, {**message, "idempotency_key": f"key-{name}"})
    return str(name)


async def test_positions_count_messages_of_both_channels_and_versions_count_all(box: Box) -> None:
    run = await box.start()
    await box.tell(run, event("message", role="user", content="a"))
    await box.tell(run, event("policy.released", version="p"), channel="authority")
    await box.tell(run, event("policy.loaded", version="p"))
    packet = await box.packet(run)
    assert packet["tail"] == {**packet["tail"], "from_position": 1, "through_position": 4, "events": 4}
    assert packet["ledger_version"] == 4
    name = await operation(box, run)
    answer = await box.authorize(run, name)
    assert answer["code"] == "ok"
    status = await box.status(run)
    assert (status["position"], status["ledger_version"]) == (5, 6)
    assert answer["ledger_version"] == 6


async def test_the_same_message_again_changes_nothing(box: Box) -> None:
    run = await begun(box)
    messages = [said(2, "one"), said(3, "two"), said(4, "three")]
    await box.tell(run, *messages)
    before = await box.packet(run)
    await box.tell(run, *messages, *reversed(messages), messages[1])
    after = await box.packet(run)
    assert after["ledger_version"] == before["ledger_version"] == 4
    assert after["protected_digest"] == before["protected_digest"]
    assert (await box.status(run))["violations"] == {}


async def test_the_same_id_on_two_channels_is_two_messages(box: Box) -> None:
    run = await box.start()
    await box.tell(run, event("question.opened", id="same", text="Why?"))
    await box.tell(run, event("policy.released", id="same", version="p"), channel="authority")
    assert (await box.status(run))["position"] == 3
    assert box.of(run, "rejected") == []


async def test_a_broker_id_on_the_way_in_makes_no_difference(box: Box) -> None:
    run = await box.start()
    subject = f"wk.v1.in.{box.tenant}.{box.lane}.{run}.event"
    for text in ("one", "two"):
        message = event("message", role="user", content=text)
        payload = json.dumps(message).encode()
        ack = await box.js.publish(subject, payload, headers={"Nats-Msg-Id": f"x-{text}-{run}"})
        box.newest[run] = ack.seq
    assert requests(await box.packet(run)) == ["one", "two"]


async def test_a_run_that_does_not_begin_with_its_start_waits_for_it(box: Box) -> None:
    run = new_run()
    await box.tell(run, event("message", role="user", content="Go."), event("question.opened", text="What?"))
    packet = await box.packet(run)
    assert packet["verdict"] == "pause"
    assert packet["contract"] == "missing"
    assert packet["task"]["goal"] == ""
    assert "contract_missing" in {item["code"] for item in packet["blockers"]}
    await box.tell(run, event("run.started", goal="Go on.", model=MODEL))
    packet = await box.packet(run)
    assert packet["verdict"] == "continue"
    assert packet["task"]["goal"] == "Go on."
    assert len(packet["questions"]) == 1


async def test_a_missing_number_is_a_gap_until_it_comes(box: Box) -> None:
    run = await begun(box)
    name = await operation(box, run, session="s1", seq=2)
    await box.tell(run, said(3, "three"), said(6, "six"))
    status = await box.status(run)
    assert gaps(status) == [("s1", 4, 5, "open")]
    assert status["violations"] == {"history_gap": 1}
    await box.hear(run, "notice", kind="violation", code="history_gap")
    assert (await box.look(run, operation_id=name))["code"] == "history_gap"
    act = await box.authorize(run, name, "first")
    assert (act["code"], act["allowed"], act["reserved"]) == ("history_gap", False, False)
    packet = await box.packet(run)
    assert packet["verdict"] == "continue"
    await box.tell(run, said(5, "five"))
    assert gaps(await box.status(run)) == [("s1", 4, 4, "open")]
    await box.tell(run, said(4, "four"))
    status = await box.status(run)
    assert status["gaps"] == []
    assert status["violations"] == {"history_gap": 1, "late_event": 2}
    packet = await box.packet(run)
    assert requests(packet) == ["three", "six", "five", "four"]
    assert (await box.authorize(run, name, "first"))["code"] == "ok"


async def test_a_session_that_begins_above_one_misses_its_beginning(box: Box) -> None:
    run = await box.start(session="s1", seq=4)
    assert gaps(await box.status(run)) == [("s1", 1, 3, "open")]


async def test_numbers_count_by_channel_and_session(box: Box) -> None:
    run = await begun(box)
    await box.tell(
        run,
        event("policy.released", version="p", session="s1", seq=1, approval_kinds=[]),
        channel="authority",
    )
    await box.tell(run, said(2), event("run.resumed", session="s2", seq=1), said(2, session="s2"))
    assert (await box.status(run))["gaps"] == []
    await box.tell(run, event("task.changed", goal="x", reason="r", session="s1", seq=3), channel="authority")
    found = (await box.status(run))["gaps"]
    assert [(gap["channel"], gap["from"], gap["through"]) for gap in found] == [("authority", 2, 2)]


async def test_a_refused_message_is_not_a_missing_one(box: Box) -> None:
    run = await begun(box)
    sequence = await box.send(run, said(2, role_="boss"))
    await box.hear_rejected(run, sequence)
    sequence = await box.send(run, event("policy.released", version="x", session="s1", seq=3))
    await box.hear_rejected(run, sequence)
    await box.tell(run, said(4))
    assert (await box.status(run))["gaps"] == []


async def test_a_number_used_twice_is_a_conflict_and_both_messages_stand(box: Box) -> None:
    run = await begun(box)
    await box.tell(run, said(2, "one"), said(2, "other"))
    assert (await box.status(run))["violations"] == {"sequence_conflict": 1}
    assert requests(await box.packet(run)) == ["one", "other"]


async def test_an_authority_accepts_a_gap_in_parts(box: Box) -> None:
    run = await begun(box)
    name = await operation(box, run)
    await box.tell(run, said(6))
    first = event("gap.accepted", session="s1", from_=2, through=3, by="ann")
    await box.tell(run, first, channel="authority")
    assert gaps(await box.status(run)) == [("s1", 4, 5, "open")]
    assert (await box.look(run, operation_id=name))["code"] == "history_gap"
    rest = event("gap.accepted", session="s1", from_=4, through=9, by="ann")
    await box.tell(run, rest, channel="authority")
    assert (await box.status(run))["gaps"] == []
    assert (await box.look(run, operation_id=name))["code"] == "ok"
    # One that comes although it was given up is still folded, as late.
    await box.tell(run, said(3, "found"))
    status = await box.status(run)
    assert status["violations"] == {"history_gap": 1, "late_event": 1}
    assert "found" in requests(await box.packet(run))


LATE_AND_IDLE = {
    "step.changed": event("step.changed", phase="old"),
    "model.changed": event("model.changed", model={"name": "old", "context_window": 5_000}),
    "usage.reported": event("usage.reported", model="test-model", context_tokens=70_000, output_tokens=1),
    "input.pinned": event("input.pinned", name="repo", version="old"),
    "policy.loaded": event("policy.loaded", version="old"),
    "run.resumed": event("run.resumed", policy_version="old"),
    "run.started": event("run.started", goal="Old goal.", model={"name": "old", "context_window": 9_000}),
    "constraint.lifted": event("constraint.lifted", constraint_id="c-own", reason="old"),
}


@pytest.mark.parametrize("name", LATE_AND_IDLE)
async def test_a_late_message_sets_no_current_value(box: Box, name: str) -> None:
    run = await begun(box, policy_version="p1")
    await box.tell(
        run,
        event("constraint.set", constraint_id="c-own", text="Mine.", source="agent", session="s1", seq=2),
        event("step.changed", phase="new", session="s1", seq=3),
        event("input.pinned", name="repo", version="new", session="s1", seq=4),
        said(6),
    )
    before, level = await box.packet(run), (await box.status(run))["budget"]
    await box.tell(run, {**LATE_AND_IDLE[name], "session": "s1", "seq": 5})
    after = await box.packet(run)
    for part in ("task", "inputs", "policy", "progress"):
        assert after[part] == before[part], part
    assert (await box.status(run))["budget"] == level
    assert (await box.status(run))["violations"]["late_event"] == 1


@pytest.mark.parametrize(
    "message", [event("policy.released", version="old"), event("task.changed", goal="Old.", reason="r")]
)
async def test_a_late_word_of_an_authority_sets_no_current_value(box: Box, message: Json) -> None:
    run = await box.start()
    released = event("policy.released", version="new", session="a", seq=2)
    changed = event("task.changed", goal="New.", reason="r", session="a", seq=3)
    await box.tell(run, released, changed, channel="authority")
    before = await box.packet(run)
    await box.tell(run, {**message, "session": "a", "seq": 1}, channel="authority")
    after = await box.packet(run)
    assert after["policy"] == before["policy"] == {"released": "new", "loaded": None}
    assert after["task"]["goal"] == before["task"]["goal"] == "New."


async def test_a_late_fact_is_folded_where_it_comes(box: Box) -> None:
    run = await begun(box)
    await box.tell(run, said(5))
    await box.tell(
        run,
        event("decision.made", decision_id="d", summary="in batches", session="s1", seq=2),
        event("question.opened", question_id="q", text="Why?", session="s1", seq=3),
        event("constraint.set", constraint_id="c", text="Never.", source="user", session="s1", seq=4),
    )
    packet = await box.packet(run)
    assert [item["id"] for item in packet["decisions"]] == ["d"]
    assert [item["id"] for item in packet["questions"]] == ["q"]
    assert [item["id"] for item in packet["task"]["constraints"]] == ["c"]
    assert packet["blockers"] == []


async def test_a_gap_that_does_not_close_is_declared_and_stops_the_run(quick: Box) -> None:
    run = await begun(quick)
    name = await operation(quick, run)
    await quick.tell(run, said(4))

    async def declared() -> bool:
        return gaps(await quick.status(run)) == [("s1", 2, 3, "declared")]

    await eventually(declared, "declaration")
    records = [item for item in await quick.records(run) if item["type"] == "gap.declared"]
    assert [(item["session"], item["from"], item["through"]) for item in records] == [("s1", 2, 3)]
    assert records[0]["epoch"] >= 1
    notice = (await quick.hear(run, "notice", kind="history_gap"))[0]
    assert (notice["from"], notice["through"]) == (2, 3)
    packet = await quick.packet(run)
    assert packet["verdict"] == "pause"
    assert [item["code"] for item in packet["blockers"]] == ["history_gap"]
    assert packet["blockers"][0]["clears_when"]
    assert (await quick.look(run, operation_id=name))["code"] == "history_gap"
    await quick.hear(run, "packet", verdict="pause")
    # A late event closes its part at once; the authority takes the rest.
    await quick.tell(run, said(2))
    assert gaps(await quick.status(run)) == [("s1", 3, 3, "declared")]
    rest = event("gap.accepted", session="s1", from_=3, through=3, by="ann")
    await quick.tell(run, rest, channel="authority")
    packet = await quick.packet(run)
    assert (packet["verdict"], packet["blockers"]) == ("continue", [])
    await quick.hear(run, "packet", verdict="continue", reason="changed")


async def test_a_gap_that_closed_in_time_is_not_declared(quick: Box) -> None:
    run, other = await begun(quick), await begun(quick)
    await quick.tell(run, said(3), said(2))
    await quick.tell(other, said(3))
    await quick.hear(other, "notice", kind="history_gap")
    assert [item["type"] for item in await quick.records(run)] == []


# --- sessions ---------------------------------------------------------------------------------------------


async def test_another_session_moves_nothing_but_counts_as_evidence(box: Box) -> None:
    run = await begun(box)
    name = await operation(box, run)
    assert (await box.authorize(run, name))["code"] == "ok"
    before = await box.packet(run)
    await box.tell(
        run,
        said(1, "from elsewhere", session="s0"),
        event("step.changed", phase="elsewhere", session="s0"),
        event("constraint.set", constraint_id="cx", text="x", source="agent", session="s0"),
        event("run.paused", reason="x", session="s0"),
        event("question.opened", text="?", session="s0"),
    )
    after = await box.packet(run)
    assert after["protected_digest"] == before["protected_digest"]
    assert after["verdict"] == before["verdict"]
    assert (await box.status(run))["violations"] == {"foreign_session": 5}
    await box.tell(run, event("operation.settled", operation_id=name, state="failed", session="s0"))
    packet = await box.packet(run)
    assert packet["operations"][0]["state"] == "unknown"
    assert packet["verdict"] == "reconcile"
    await box.hear(run, "notice", kind="operation_unknown", operation_id=name)


async def test_a_new_session_abandons_the_open_calls_of_the_old(box: Box) -> None:
    run = await begun(box)
    name = await operation(box, run)
    assert (await box.authorize(run, name))["code"] == "ok"
    await box.tell(
        run,
        event("tool.called", call_id="c1", tool="sh", arguments={}, operation_id=name, session="s1", seq=2),
        event("tool.called", call_id="c2", tool="ls", arguments={}, session="s1", seq=3),
    )
    assert [call["call_id"] for call in (await box.packet(run))["open_calls"]] == ["c1", "c2"]
    await box.tell(run, event("run.resumed", session="s2", seq=1))
    packet = await box.packet(run)
    assert packet["open_calls"] == []
    assert packet["abandoned_calls"] == [{"call_id": "c1", "tool": "sh"}, {"call_id": "c2", "tool": "ls"}]
    assert packet["operations"][0]["state"] == "unknown"
    assert packet["operations"][0]["may"] == "reconcile"
    assert packet["verdict"] == "reconcile"
    assert (await box.look(run, operation_id=name))["code"] == "outcome_unknown"


async def test_resuming_without_a_session_or_with_the_same_one_goes_on(box: Box) -> None:
    run = await begun(box)
    call = event("tool.called", call_id="c1", tool="sh", arguments={}, session="s1", seq=2)
    await box.tell(run, call, event("run.resumed"), event("run.resumed", session="s1", seq=3))
    packet = await box.packet(run)
    assert [item["call_id"] for item in packet["open_calls"]] == ["c1"]
    assert packet["abandoned_calls"] == []


async def test_a_second_start_takes_model_and_policy_and_nothing_else(box: Box) -> None:
    run = await begun(box, policy_version="p1", done_when=["a"])
    bigger = {"name": "bigger", "context_window": 200_000}
    await box.tell(
        run, event("run.started", goal="Ship it.", model=bigger, policy_version="p2", session="s2", seq=1)
    )
    packet = await box.packet(run)
    assert packet["task"]["done_when"] == ["a"]
    assert packet["policy"]["loaded"] == "p2"
    assert packet["budget"]["window"] == 200_000
    assert packet["violations"] == []
    await box.tell(
        run, event("run.started", goal="Another.", done_when=["b"], model=bigger, session="s3", seq=1)
    )
    packet = await box.packet(run)
    assert packet["task"]["goal"] == "Ship it."
    assert packet["task"]["done_when"] == ["a"]
    assert packet["violations"] == [{"code": "contract_conflict", "count": 1}]


# --- calls ------------------------------------------------------------------------------------------------


async def test_calls_pair_by_their_newest_open_id(box: Box) -> None:
    run = await box.start()
    await box.tell(
        run,
        event("tool.called", call_id="c1", tool="sh", arguments={}),
        event("tool.returned", call_id="c1", status="pending", content="…"),
    )
    assert len((await box.status(run))["open_calls"]) == 1
    await box.tell(run, event("tool.returned", call_id="c1", status="ok", content="done"))
    await box.tell(run, event("tool.called", call_id="c1", tool="sh", arguments={}))
    assert (await box.status(run))["violations"] == {}
    await box.tell(run, event("tool.called", call_id="c1", tool="sh", arguments={}))
    assert (await box.status(run))["violations"] == {"duplicate_call": 1}
    for _ in range(2):
        await box.tell(run, event("tool.returned", call_id="c1", status="ok", content="done"))
    status = await box.status(run)
    assert status["open_calls"] == []
    await box.tell(run, event("tool.returned", call_id="c1", status="ok", content="done"))
    status = await box.status(run)
    assert status["violations"] == {"duplicate_call": 1, "orphan_result": 1}


async def test_a_child_stands_under_its_parent(box: Box) -> None:
    parent = await box.start(
        constraints=[
            {"id": "c-user", "text": "Never x.", "source": "user", "forbids": {"kinds": ["x.*"]}},
            {"id": "c-own", "text": "Mine.", "source": "agent"},
        ]
    )
    child = new_run("child")
    await box.tell(child, event("run.started", goal="Count.", model=MODEL, parent_run=parent))
    assert (await box.packet(child))["verdict"] == "pause"
    await box.tell(
        parent,
        event(
            "child.spawned",
            child_run=child,
            task="Count all.",
            done_when=["counted"],
            allowed_tools=["count"],
            required_artifacts=["table"],
        ),
    )
    await box.status(parent)
    packet = await box.packet(child)
    assert packet["verdict"] == "continue"
    assert packet["parent"] == {"run": parent}
    assert packet["task"]["goal"] == "Count all."
    assert packet["allowed_tools"] == ["count"]
    assert packet["required_artifacts"] == ["table"]
    assert [item["id"] for item in packet["task"]["constraints"]] == ["c-user"]
    assert (await box.packet(parent))["children"] == [
        {"run": child, "task": "Count all.", "status": "running"}
    ]
    look = await box.look(child, kind="x.y", idempotency_key="k1")
    assert look["code"] == "constraint_forbids"
    assert (await box.look(child, kind="y", idempotency_key="k1", tool="rm"))["code"] == "out_of_scope"
    await box.tell(parent, event("run.paused", reason="wait"))
    await box.status(parent)
    assert (await box.packet(child))["verdict"] == "pause"
    await box.tell(parent, event("run.resumed"), event("child.returned", child_run=child, status="failed"))
    assert (await box.packet(parent))["children"][0]["status"] == "failed"
