"""``authorize`` from outside: every code in its documented order, acts against looks, races, refusals."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import nats
import pytest

from tests.support.blackbox import MODEL, Answer, Box, Json, blackbox, event, new_run
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.anyio

SHA = "sha256:" + "ab" * 32
OTHER_SHA = "sha256:" + "cd" * 32
RACES = 100


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as started:
        yield started


@pytest.fixture(scope="module")
async def box(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Box]:
    settings = {"authority.approval_kinds": ["db.*"], "authority.forbidden_kinds": ["rm.*"]}
    async with blackbox(server, tmp_path_factory.mktemp("authorize"), settings) as opened:
        yield opened


def declared(name: str, kind: str = "note.write", **fields: Any) -> Json:
    known = {"idempotency_key": f"key-{name}", **fields}
    return event("operation.declared", operation_id=name, kind=kind, **known)


def requested(name: str, action: str = "db.write", **fields: Any) -> Json:
    return event("approval.requested", approval_id=name, action=action, **fields)


def granted(name: str, outcome: str = "granted", action: str = "db.write", **fields: Any) -> Json:
    return event("approval.resolved", approval_id=name, outcome=outcome, by="ann", action=action, **fields)


async def approve(box: Box, run: str, name: str, **fields: Any) -> None:
    uses = {"uses": fields.pop("uses")} if "uses" in fields else {}
    await box.tell(run, requested(name, **fields))
    told = {key: value for key, value in fields.items() if key in ("action", "payload_digest", "expires_at")}
    await box.tell(run, granted(name, **told, **uses), channel="authority")


def in_past(seconds: float = 5) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


# --- order ------------------------------------------------------------------------------------------------


async def test_causes_pile_up_and_the_first_of_the_documented_order_is_told(box: Box) -> None:
    run = await box.start(session="s1", seq=1, scope={"tools": ["psql"]})
    await box.tell(
        run,
        declared("op", "db.write", tool="psql", payload_digest=SHA, idempotency_key="k", nonessential=True),
        declared("beyond", "db.write", tool="rm", idempotency_key="k2"),
    )

    async def codes(name: str = "op") -> str:
        look = await box.look(run, operation_id=name)
        act = await box.authorize(run, name)
        assert look["code"] == act["code"]
        for answer in (look, act):
            assert answer["allowed"] is False
            assert answer["reserved"] is False
            assert answer["reason"]
        return str(look["code"])

    assert await codes() == "approval_missing"
    await box.tell(run, requested("ap", payload_digest=OTHER_SHA, operation_id="op"))
    assert await codes() == "approval_pending"
    await box.tell(run, granted("ap", payload_digest=OTHER_SHA), channel="authority")
    assert await codes() == "payload_mismatch"
    await box.tell(run, granted("ap", "revoked", payload_digest=OTHER_SHA), channel="authority")
    assert await codes() == "approval_revoked"
    forbids = {"kinds": ["db.w*"], "tools": ["psql", "rm"]}
    await box.tell(
        run, event("constraint.set", constraint_id="c", text="Never.", source="user", forbids=forbids)
    )
    assert await codes() == "constraint_forbids"
    assert await codes("beyond") == "out_of_scope"
    await box.tell(run, event("policy.released", version="p1"), channel="authority")
    assert await codes() == "policy_stale"
    assert await codes("beyond") == "policy_stale"
    # Others with the same key: unknown, then one under way, then one that succeeded.
    await box.tell(run, event("operation.settled", operation_id="ghost", state="unknown"))
    await box.tell(run, declared("ghost", "a.b", idempotency_key="k"))
    assert await codes() == "outcome_unknown"
    # One nobody allowed still is under way.
    await box.tell(run, declared("busy", "a.b", idempotency_key="k"))
    await box.tell(run, event("operation.dispatched", operation_id="busy"))
    assert await codes() == "in_flight"
    await box.tell(run, declared("done", "a.b", idempotency_key="k"))
    await box.tell(run, event("operation.settled", operation_id="done", state="succeeded"))
    assert await codes() == "already_succeeded"
    # Its own state comes before that of others.
    await box.tell(run, event("operation.dispatched", operation_id="op"))
    assert await codes() == "in_flight"
    await box.tell(run, event("operation.settled", operation_id="op", state="failed"))
    assert await codes() == "already_failed"
    await box.tell(run, event("message", role="user", content="?", session="s1", seq=3))
    assert await codes() == "history_gap"
    await box.tell(run, event("run.paused", reason="wait"))
    assert await codes() == "run_paused"
    await box.tell(run, event("run.finished", outcome="cancelled"))
    assert await codes() == "run_finished"
    assert await codes("nobody") == "unknown_operation"


async def test_a_run_goes_on_where_each_cause_is_cleared(box: Box) -> None:
    run = await box.start(policy_version="p0")
    await box.tell(run, declared("op", "db.write", payload_digest=SHA, approval_id="ap"))
    await box.tell(run, event("run.paused", reason="x"), event("run.finished", outcome="failed"))
    assert (await box.authorize(run, "op"))["code"] == "run_finished"
    await box.tell(run, event("run.resumed"))
    assert (await box.authorize(run, "op"))["code"] == "run_finished"
    await box.tell(run, event("run.resumed"), channel="authority")
    assert (await box.authorize(run, "op"))["code"] == "approval_missing"
    await box.tell(run, event("run.paused", reason="stop"), channel="authority")
    await box.tell(run, event("run.resumed"))
    assert (await box.authorize(run, "op"))["code"] == "run_paused"
    await box.tell(run, event("run.resumed"), channel="authority")
    await box.tell(run, event("policy.released", version="p1"), channel="authority")
    assert (await box.authorize(run, "op"))["code"] == "policy_stale"
    await box.tell(run, event("policy.loaded", version="p1"))
    assert (await box.authorize(run, "op", policy_version="p0"))["code"] == "policy_stale"
    await approve(box, run, "ap", payload_digest=SHA, operation_id="op")
    answer = await box.authorize(run, "op", policy_version="p1")
    assert (answer["code"], answer["allowed"], answer["reserved"]) == ("ok", True, True)
    assert answer["operation"]["state"] == "pending"
    assert answer["operation"]["approval_id"] == "ap"


@pytest.mark.parametrize("outcome", ["denied", "revoked", "expired", "consumed"])
async def test_an_approval_that_is_over_permits_nothing(box: Box, outcome: str) -> None:
    run = await box.start()
    await box.tell(run, declared("op", "db.write", payload_digest=SHA, approval_id="ap"))
    if outcome == "denied":
        await box.tell(run, requested("ap", payload_digest=SHA))
        await box.tell(run, granted("ap", "denied", payload_digest=SHA), channel="authority")
    elif outcome == "revoked":
        await approve(box, run, "ap", payload_digest=SHA)
        await box.tell(run, granted("ap", "revoked", payload_digest=SHA), channel="authority")
    elif outcome == "expired":
        await approve(box, run, "ap", payload_digest=SHA, expires_at=in_past())
    else:
        await box.tell(run, declared("first", "db.write", payload_digest=SHA, approval_id="ap"))
        await approve(box, run, "ap", payload_digest=SHA)
        assert (await box.authorize(run, "first"))["code"] == "ok"
    for answer in (await box.look(run, operation_id="op"), await box.authorize(run, "op")):
        assert answer["code"] == f"approval_{outcome}"
        assert answer["clears_when"]


@pytest.mark.parametrize(
    ("mine", "approved", "code"),
    [
        (SHA, SHA, "ok"),
        (SHA, OTHER_SHA, "payload_mismatch"),
        (SHA, None, "payload_mismatch"),
        (None, SHA, "payload_mismatch"),
        (None, None, "payload_mismatch"),
    ],
)
async def test_what_was_approved_is_what_may_be_done(
    box: Box, mine: str | None, approved: str | None, code: str
) -> None:
    run = await box.start()
    await box.tell(run, declared("op", "db.write", **({} if mine is None else {"payload_digest": mine})))
    told = {} if approved is None else {"payload_digest": approved}
    await approve(box, run, "ap", operation_id="op", **told)
    assert (await box.authorize(run, "op"))["code"] == code


async def test_an_approval_of_a_kind_that_needs_none_needs_no_digest(box: Box) -> None:
    run = await box.start()
    await box.tell(run, declared("op", "note.write", approval_id="ap"))
    assert (await box.authorize(run, "op"))["code"] == "approval_missing"
    await approve(box, run, "ap", action="note.write")
    assert (await box.authorize(run, "op"))["code"] == "ok"


async def test_a_grant_that_says_something_else_changes_nothing(box: Box) -> None:
    run = await box.start()
    await box.tell(run, declared("op", "db.write", payload_digest=SHA), requested("ap", payload_digest=SHA))
    for other in ({"action": "db.drop", "payload_digest": SHA}, {"payload_digest": OTHER_SHA}, {}):
        await box.tell(run, granted("ap", **other), channel="authority")
        assert (await box.look(run, operation_id="op"))["code"] == "approval_pending"
    assert (await box.status(run))["violations"] == {"illegal_transition": 3}
    await box.tell(run, granted("ap", payload_digest=SHA), channel="authority")
    assert (await box.authorize(run, "op"))["code"] == "ok"


async def test_a_grant_before_its_request_waits_for_one_that_equals_it(box: Box) -> None:
    run = await box.start()
    await box.tell(run, declared("op", "db.write", payload_digest=SHA))
    await box.tell(run, granted("ap", payload_digest=SHA), channel="authority")
    assert (await box.look(run, operation_id="op"))["code"] == "approval_missing"
    await box.tell(run, requested("ap", payload_digest=SHA))
    assert (await box.authorize(run, "op"))["code"] == "ok"


async def test_uses_are_counted_down(box: Box) -> None:
    run = await box.start()
    names = [f"op-{number}" for number in range(3)]
    await box.tell(run, *(declared(name, "db.write", payload_digest=SHA) for name in names))
    await approve(box, run, "ap", payload_digest=SHA, uses=2)
    assert [(await box.authorize(run, name))["code"] for name in names] == ["ok", "ok", "approval_consumed"]
    packet = await box.packet(run)
    assert packet["approvals"] == []
    assert [item["state"] for item in packet["operations"]] == ["pending", "pending", "not_started"]


async def test_forbidden_kinds_come_from_settings_and_policy(box: Box) -> None:
    run = await box.start()
    await box.tell(run, declared("rm", "rm.all"), declared("x", "x.y"))
    assert (await box.look(run, operation_id="rm"))["code"] == "constraint_forbids"
    assert (await box.look(run, operation_id="x"))["code"] == "ok"
    released = event("policy.released", version="p", forbidden_kinds=["x.*"], approval_kinds=["y.*"])
    await box.tell(run, released, channel="authority")
    await box.tell(run, event("policy.loaded", version="p"))
    assert (await box.look(run, operation_id="rm"))["code"] == "ok"
    assert (await box.look(run, operation_id="x"))["code"] == "constraint_forbids"
    assert (await box.look(run, kind="y.z", idempotency_key="n"))["code"] == "approval_missing"
    assert (await box.look(run, kind="db.z", idempotency_key="n"))["code"] == "ok"
    # An absent list keeps the old one.
    await box.tell(run, event("policy.released", version="p2"), channel="authority")
    await box.tell(run, event("policy.loaded", version="p2"))
    assert (await box.look(run, operation_id="x"))["code"] == "constraint_forbids"


@pytest.mark.parametrize(
    ("forbids", "fields", "code"),
    [
        ({"kinds": ["deploy"]}, {"kind": "deploy"}, "constraint_forbids"),
        ({"kinds": ["deploy"]}, {"kind": "Deploy"}, "ok"),
        ({"kinds": ["d?ploy"]}, {"kind": "deploy"}, "constraint_forbids"),
        ({"kinds": ["d[e]ploy"]}, {"kind": "deploy"}, "ok"),
        ({"targets": ["prod/*"]}, {"target": "prod/a/b.c"}, "constraint_forbids"),
        ({"targets": ["prod/*"]}, {"target": "test/a"}, "ok"),
        ({"targets": ["prod/*"]}, {}, "constraint_forbids"),
        ({"kinds": ["deploy"], "tools": ["kubectl"]}, {"kind": "deploy", "tool": "helm"}, "ok"),
        ({"kinds": ["deploy"], "tools": ["kubectl"]}, {"kind": "deploy"}, "constraint_forbids"),
        ({"kinds": []}, {"kind": "deploy"}, "ok"),
        ({}, {"kind": "deploy"}, "ok"),
    ],
)
async def test_what_a_constraint_forbids(box: Box, forbids: Json, fields: Json, code: str) -> None:
    run = await box.start(
        constraints=[{"id": "c", "text": "Not that.", "source": "user", "forbids": forbids}]
    )
    look = await box.look(run, **{"kind": "other", "idempotency_key": "k", **fields})
    assert look["code"] == code
    await box.tell(run, declared("op", **{"kind": "other", **fields}))
    assert (await box.authorize(run, "op"))["code"] == code


@pytest.mark.parametrize(
    ("scope", "fields", "code"),
    [
        ({"kinds": ["db.*"]}, {"kind": "web.post"}, "out_of_scope"),
        ({"kinds": []}, {"kind": "web.post"}, "out_of_scope"),
        ({"kinds": ["web.*"]}, {"kind": "web.post"}, "ok"),
        ({"tools": ["sh"]}, {"kind": "web.post", "tool": "curl"}, "out_of_scope"),
        ({"tools": []}, {"kind": "web.post", "tool": "curl"}, "out_of_scope"),
        ({"tools": ["sh"]}, {"kind": "web.post"}, "ok"),
        ({}, {"kind": "web.post", "tool": "curl"}, "ok"),
    ],
)
async def test_what_the_scope_holds(box: Box, scope: Json, fields: Json, code: str) -> None:
    run = await box.start(scope=scope)
    assert (await box.look(run, idempotency_key="k", **fields))["code"] == code


# --- acts and looks ---------------------------------------------------------------------------------------


async def test_a_look_never_reserves(box: Box) -> None:
    run = await box.start()
    await box.tell(run, declared("op", "db.write", payload_digest=SHA))
    await approve(box, run, "ap", payload_digest=SHA)
    before = await box.status(run)
    for _ in range(3):
        dry = await box.look(run, operation_id="op")
        assert (dry["code"], dry["allowed"], dry["reserved"]) == ("ok", True, False)
        look = await box.look(run, kind="db.write", idempotency_key="new", payload_digest=SHA)
        assert (look["code"], look["reserved"]) == ("ok", False)
        assert "operation" not in look
    after = await box.status(run)
    assert after["ledger_version"] == before["ledger_version"]
    assert await box.records(run) == []
    assert [item["uses_left"] for item in (await box.packet(run))["approvals"]] == [1]


async def test_a_look_by_key_finds_the_operation_that_has_it(box: Box) -> None:
    run = await box.start()
    await box.tell(run, declared("op"), event("operation.dispatched", operation_id="op"))
    look = await box.look(run, kind="note.write", idempotency_key="key-op")
    assert look["code"] == "in_flight"
    assert look["operation"]["id"] == "op"
    await box.tell(run, event("operation.settled", operation_id="op", state="succeeded", receipt="r-1"))
    look = await box.look(run, kind="note.write", idempotency_key="key-op")
    assert look["code"] == "already_succeeded"
    assert look["operation"]["receipt"] == "r-1"


async def test_an_act_is_a_record_of_the_run_and_makes_it_pending_there(box: Box) -> None:
    run = await box.start()
    await box.tell(run, declared("op"))
    answer = await box.authorize(run, "op", "rq", policy_version=None)
    records = await box.records(run)
    assert [item["type"] for item in records] == ["authorization.requested"]
    assert records[0]["operation_id"] == "op"
    assert records[0]["request_id"] == "rq"
    assert records[0]["epoch"] == answer["epoch"]
    assert answer["operation"] == {**answer["operation"], "id": "op", "state": "pending"}
    packet = await box.packet(run)
    assert packet["operations"][0]["state"] == "pending"
    assert packet["operations"][0]["may"] == "wait"
    assert (await box.look(run, operation_id="op"))["code"] == "in_flight"


async def test_the_same_request_has_the_same_answer_while_pending_by_it(box: Box) -> None:
    run = await box.start()
    await box.tell(run, declared("op", "db.write", payload_digest=SHA))
    await approve(box, run, "ap", payload_digest=SHA)
    first = await box.authorize(run, "op", "rq")
    again = [await box.authorize(run, "op", "rq") for _ in range(3)]
    assert {item["code"] for item in [first, *again]} == {"ok"}
    assert all(item["reserved"] and item["allowed"] for item in again)
    assert (await box.authorize(run, "op", "other"))["code"] == "in_flight"
    await box.tell(run, event("operation.settled", operation_id="op", state="succeeded"))
    assert (await box.authorize(run, "op", "rq"))["code"] == "already_succeeded"
    assert len((await box.packet(run))["violations"]) == 0


async def test_the_same_request_sent_at_once_many_times_folds_once(box: Box) -> None:
    run = await box.start()
    await box.tell(run, declared("op", "db.write", payload_digest=SHA))
    await approve(box, run, "ap", payload_digest=SHA)
    codes: list[str] = []

    async def one() -> None:
        codes.append((await box.authorize(run, "op", "rq"))["code"])

    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(one)
    assert codes == ["ok"] * 20


async def test_a_denial_is_judged_anew(box: Box) -> None:
    run = await box.start()
    await box.tell(run, declared("op", "db.write", payload_digest=SHA))
    assert (await box.authorize(run, "op", "rq"))["code"] == "approval_missing"
    await approve(box, run, "ap", payload_digest=SHA)
    assert (await box.authorize(run, "op", "rq"))["code"] == "ok"


async def test_a_request_id_of_another_operation_is_an_error(box: Box) -> None:
    run = await box.start()
    await box.tell(run, declared("a"), declared("b"))
    assert (await box.authorize(run, "a", "rq"))["code"] == "ok"
    answer = await box.ask(run, "authorize", operation_id="b", request_id="rq")
    assert answer.code == "invalid_request"
    check_error(answer)
    assert (await box.look(run, operation_id="b"))["code"] == "ok"


async def test_a_failure_frees_the_key_for_a_new_operation_only(box: Box) -> None:
    run = await box.start()
    await box.tell(run, declared("op"))
    assert (await box.authorize(run, "op"))["code"] == "ok"
    await box.tell(run, event("operation.settled", operation_id="op", state="failed"))
    assert (await box.authorize(run, "op"))["code"] == "already_failed"
    await box.tell(run, declared("again", idempotency_key="key-op"))
    assert (await box.authorize(run, "again"))["code"] == "ok"


async def test_an_unknown_outcome_is_found_out_before_anything_else(box: Box) -> None:
    run = await box.start()
    await box.tell(run, declared("op"), declared("twin", idempotency_key="key-op"))
    assert (await box.authorize(run, "op"))["code"] == "ok"
    await box.tell(
        run,
        event("tool.called", call_id="c", tool="t", arguments={}, operation_id="op"),
        event("tool.returned", call_id="c", status="timeout", content="no answer"),
    )
    packet = await box.packet(run)
    assert (packet["verdict"], packet["operations"][0]["may"]) == ("reconcile", "reconcile")
    for name in ("op", "twin"):
        assert (await box.authorize(run, name))["code"] == "outcome_unknown"
    assert (await box.status(run))["violations"] == {"repeated_operation": 1}
    await box.tell(
        run,
        event("evidence.recorded", evidence_id="guess", claim="no", kind="inferred", source="event:x"),
        event("operation.reconciled", operation_id="op", state="failed", evidence="evidence:guess"),
    )
    assert (await box.authorize(run, "op"))["code"] == "outcome_unknown"
    await box.tell(
        run,
        event("tool.called", call_id="c2", tool="look", arguments={}),
        event("tool.returned", id="seen", call_id="c2", status="ok", content="not there"),
        event("operation.reconciled", operation_id="op", state="failed", evidence="event:seen"),
    )
    assert (await box.authorize(run, "twin"))["code"] == "ok"


async def test_what_went_out_unasked_counts(box: Box) -> None:
    run = await box.start()
    await box.tell(run, declared("op", "db.write", payload_digest=SHA))
    await box.tell(run, event("operation.dispatched", operation_id="op"))
    status = await box.status(run)
    assert status["violations"] == {"unauthorized_write": 1}
    assert status["open_operations"] == [{"id": "op", "kind": "db.write", "state": "pending"}]
    await box.tell(run, event("operation.dispatched", operation_id="ghost"))
    status = await box.status(run)
    assert status["violations"] == {"unauthorized_write": 2, "illegal_transition": 1}
    assert {item["id"]: item["state"] for item in status["open_operations"]} == {
        "op": "pending",
        "ghost": "unknown",
    }


async def test_a_dispatch_that_would_be_allowed_uses_its_approval_up(box: Box) -> None:
    run = await box.start()
    await box.tell(run, declared("op", "db.write", payload_digest=SHA))
    await approve(box, run, "ap", payload_digest=SHA)
    await box.tell(run, event("operation.dispatched", operation_id="op"))
    packet = await box.packet(run)
    assert packet["operations"][0]["state"] == "pending"
    assert packet["approvals"] == []
    assert packet["violations"] == []


# --- races ------------------------------------------------------------------------------------------------


async def test_two_askers_at_the_same_instant_cannot_both_get_it(box: Box) -> None:
    run = await box.start()
    clients = [await box.connect() for _ in range(2)]
    try:
        for number in range(RACES):
            name = f"op-{number}"
            await box.tell(run, declared(name))
            answers: list[Json] = []

            async def one(which: int, name: str = name, answers: list[Json] = answers) -> None:
                client = clients[which]
                answer = await box.ask(
                    run, "authorize", client, operation_id=name, request_id=f"{name}/{which}"
                )
                answers.append(answer.body)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one, number % 2)
                tasks.start_soon(one, 1 - number % 2)
            assert sorted(item["code"] for item in answers) == ["in_flight", "ok"], (number, answers)
    finally:
        for client in clients:
            await client.close()


async def test_one_approval_serves_one_of_two_operations(box: Box) -> None:
    run = await box.start()
    clients = [await box.connect() for _ in range(2)]
    try:
        for number in range(20):
            digest = f"sha256:{number:064x}"
            names = [f"a-{number}", f"b-{number}"]
            kind = f"db.k{number}"
            await box.tell(run, *(declared(name, kind, payload_digest=digest) for name in names))
            await approve(box, run, f"ap-{number}", action=kind, payload_digest=digest)
            codes: list[str] = []

            async def one(which: int, names: list[str] = names, codes: list[str] = codes) -> None:
                answer = await box.ask(
                    run, "authorize", clients[which], operation_id=names[which], request_id=names[which]
                )
                codes.append(answer.body["code"])

            async with anyio.create_task_group() as tasks:
                for which in range(2):
                    tasks.start_soon(one, which)
            assert sorted(codes) == ["approval_consumed", "ok"]
    finally:
        for client in clients:
            await client.close()


async def test_parent_and_child_with_one_key_cannot_both_get_it(box: Box) -> None:
    for _ in range(10):
        parent = await box.start()
        child = new_run("child")
        await box.tell(parent, event("child.spawned", child_run=child, task="Help."))
        await box.tell(child, event("run.started", goal="Help.", model=MODEL, parent_run=parent))
        await box.tell(parent, declared("p", idempotency_key="one"))
        await box.tell(child, declared("c", idempotency_key="one"))
        codes: list[str] = []

        async def one(run: str, name: str, codes: list[str] = codes) -> None:
            codes.append((await box.authorize(run, name))["code"])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, parent, "p")
            tasks.start_soon(one, child, "c")
        assert sorted(codes) == ["in_flight", "ok"]


# --- refusals of the question -----------------------------------------------------------------------------


def check_error(answer: Answer) -> None:
    assert answer.status is not None
    assert int(answer.status) >= 400
    assert answer.code is not None
    assert answer.error is not None
    assert answer.code in answer.error
    assert answer.body["error"]["message"]


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("authorize", b"{"),
        ("authorize", b"[]"),
        ("authorize", b"\xff"),
        ("authorize", {}),
        ("authorize", {"operation_id": "op"}),
        ("authorize", {"operation_id": "op", "request_id": 7}),
        ("authorize", {"operation_id": "a b", "request_id": "r"}),
        ("authorize", {"kind": "x"}),
        ("authorize", {"idempotency_key": "x"}),
        ("packet", b"nonsense"),
        ("packet", {"after": "soon"}),
        ("packet", {"after": -1}),
        ("status", {"after": 1.5}),
        ("compact", {"reason": 5}),
        ("dance", {}),
    ],
)
async def test_a_question_that_is_none_is_refused(box: Box, verb: str, body: Json | bytes) -> None:
    run = await box.start()
    await box.status(run)
    answer = await box.ask_once(run, verb, body)
    check_error(answer)
    assert answer.code == "invalid_request"


@pytest.mark.parametrize("verb", ["packet", "status", "authorize", "compact"])
async def test_a_run_nobody_heard_of_is_unknown(box: Box, verb: str) -> None:
    body = {"operation_id": "op", "request_id": "r"} if verb == "authorize" else {}
    answer = await box.ask_once("nobody-here", verb, body)
    check_error(answer)
    assert answer.code == "run_unknown"


async def test_an_empty_question_is_an_empty_object(box: Box) -> None:
    run = await box.start()
    await box.status(run)
    assert (await box.ask_once(run, "status", b"")).body["position"] == 1


async def test_an_answer_includes_what_it_is_asked_to_wait_for(box: Box) -> None:
    run = await box.start()
    for number in range(50):
        sequence = await box.send(run, event("question.opened", question_id=f"q{number}", text="?"))
        answer = await box.ask_once(run, "packet", {"after": sequence})
        assert len(answer.body["questions"]) == number + 1


async def test_what_is_not_read_in_time_is_behind(box: Box) -> None:
    run = await box.start()
    await box.status(run)
    answer = await box.ask_once(run, "status", {"after": 10**9})
    check_error(answer)
    assert answer.code == "behind"


async def test_who_asks_in_another_lane_hears_nobody(box: Box) -> None:
    with pytest.raises(nats.errors.NoRespondersError):
        await box.client.request("wk.v1.ask.acme.elsewhere.run.status", b"{}", timeout=2)


async def test_the_service_can_be_found(box: Box) -> None:
    ping = json.loads((await box.client.request("$SRV.PING.watchkeeper", b"", timeout=2)).data)
    assert ping["type"] == "io.nats.micro.v1.ping_response"
    assert ping["name"] == "watchkeeper"
    info = json.loads((await box.client.request(f"$SRV.INFO.watchkeeper.{ping['id']}", b"", timeout=2)).data)
    assert info["type"] == "io.nats.micro.v1.info_response"
    assert info["id"] == ping["id"]
    assert any("wk.v1.ask.acme.main" in item["subject"] for item in info["endpoints"])
    stats = json.loads((await box.client.request("$SRV.STATS", b"", timeout=2)).data)
    assert stats["type"] == "io.nats.micro.v1.stats_response"


async def test_without_an_authority_the_agent_decides_and_every_packet_says_so(
    server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = {"authority.required": False, "tenant": "alone", "authority.approval_kinds": ["db.*"]}
    async with blackbox(server, tmp_path_factory.mktemp("alone"), settings) as box:
        box.tenant = "alone"
        run = await box.start(constraints=[{"id": "c", "text": "No.", "source": "user"}])
        await box.tell(
            run, declared("op", "db.write", payload_digest=SHA), requested("ap", payload_digest=SHA)
        )
        await box.tell(
            run, granted("ap", payload_digest=SHA), event("constraint.lifted", constraint_id="c", reason="r")
        )
        assert (await box.authorize(run, "op"))["code"] == "ok"
        packet = await box.packet(run)
        assert packet["authority"] == "agent"
        assert packet["task"]["constraints"] == []
        assert box.of(run, "rejected") == []


async def test_what_cannot_be_folded_is_unavailable_and_nothing_is_done(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with NatsServer() as own:
        async with blackbox(own, tmp_path_factory.mktemp("full")) as box:
            run = await box.start()
            await box.tell(run, declared("op"))
            before = await box.status(run)
            stream = (await box.js.stream_info("WK_IN")).config
            full = (await box.js.stream_info("WK_IN")).state.messages
            await box.js.update_stream(stream.evolve(max_msgs=full))
            answer = await box.ask_once(run, "authorize", {"operation_id": "op", "request_id": "rq"})
            assert answer.code == "unavailable"
            check_error(answer)
            assert (await box.status(run))["ledger_version"] == before["ledger_version"]
            assert (await box.look(run, operation_id="op"))["code"] == "ok"
            await box.js.update_stream(stream.evolve(max_msgs=-1))
            assert (await box.authorize(run, "op", "rq"))["code"] == "ok"


async def test_answers_are_counted_by_code(box: Box) -> None:
    run = await box.start()
    await box.tell(run, declared("op"))

    async def counts() -> list[float]:
        codes = ("ok", "in_flight", "unknown_operation")
        return [await box.metric("authorizations_total", code=code) for code in codes]

    before = await counts()
    prevented = await box.metric("duplicate_effects_prevented_total")
    await box.look(run, operation_id="op")
    await box.authorize(run, "op")
    await box.authorize(run, "op")
    await box.look(run, kind="note.write", idempotency_key="key-op")
    await box.authorize(run, "nobody")
    after = await counts()
    assert [new - old for new, old in zip(after, before, strict=True)] == [2, 2, 1]
    assert await box.metric("duplicate_effects_prevented_total") > prevented
