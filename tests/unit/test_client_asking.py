"""Questions under doubt: asked again with the same bytes, and never a yes that is not certain."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.asks import AskAuthorize, AskStatus, StatusReply
from protocol.client.answers import Permission
from protocol.client.asking import Asker
from protocol.client.broker import Denied, NobodyListens, Trouble
from protocol.client.errors import (
    AnswerTooLarge,
    AskFailed,
    InvalidRequest,
    Refused,
    RunUnknown,
    Unavailable,
)
from support.scripted_broker import ANSWER, ScriptedBroker, body, refusal

pytestmark = pytest.mark.anyio

ACT = AskAuthorize(operation_id="op", request_id="r-1", after=7)
OPERATION = {"id": "op", "kind": "k", "idempotency_key": "key", "state": "pending"}


def answer(**changes: Any) -> ANSWER:
    said = {
        "v": 1,
        "epoch": 3,
        "allowed": True,
        "code": "ok",
        "reason": "go",
        "operation": OPERATION,
        "reserved": True,
    }
    return body(**{**said, "ledger_version": 5, **changes})


def asker(*script: ANSWER, patience: float = 30.0) -> tuple[Asker, ScriptedBroker]:
    broker = ScriptedBroker(*script)
    return Asker(broker, "t", "l", "r", patience=patience), broker


UNSURE: dict[str, ANSWER] = {
    "silence": Trouble("no answer within 5 s"),
    "nobody": NobodyListens("nobody listens"),
    "unavailable": refusal("unavailable"),
    "behind": refusal("behind"),
    "unknown code": refusal("a code nobody knows"),
    "empty": body(),
    "half": body(allowed=True),
    "wrong type": answer(epoch="high"),
}


@pytest.mark.parametrize("trouble", UNSURE.values(), ids=UNSURE)
async def test_an_unsure_answer_is_asked_for_again_with_the_same_bytes(trouble: ANSWER) -> None:
    asking, broker = asker(trouble, answer())
    permission = await asking.authorize(ACT)
    assert permission
    assert (permission.code, permission.request_id, permission.reserved) == ("ok", "r-1", True)
    first, second = broker.asked
    assert first == second
    assert first[0] == "wk.v1.ask.t.l.r.authorize"
    assert b'"request_id":"r-1"' in first[1]


@pytest.mark.parametrize("trouble", UNSURE.values(), ids=UNSURE)
async def test_in_the_end_doubt_is_a_no(trouble: ANSWER) -> None:
    asking, broker = asker(*[trouble] * 50, patience=0.3)
    permission = await asking.authorize(ACT)
    assert not permission
    assert permission.code == "unavailable"
    assert permission.clears_when
    assert len(set(broker.asked)) == 1
    with pytest.raises(Unavailable):
        await asker(trouble, patience=0)[0].ask("status", AskStatus(), StatusReply)


@pytest.mark.parametrize(
    "changes",
    [
        {"code": "in_flight"},
        {"allowed": False},
        {"reserved": False},
        {"operation": {**OPERATION, "id": "another"}},
    ],
)
async def test_an_answer_that_contradicts_itself_or_speaks_of_something_else_is_a_no(changes: Any) -> None:
    permission = await asker(answer(**changes))[0].authorize(ACT)
    assert not permission
    assert permission.code == "unavailable"


async def test_a_denial_is_a_no_with_its_reason() -> None:
    denied = answer(
        allowed=False, code="approval_pending", reason="it waits", clears_when="somebody resolves it"
    )
    permission = await asker(denied)[0].authorize(ACT)
    assert permission == Permission(
        allowed=False,
        code="approval_pending",
        reason="it waits",
        request_id="r-1",
        clears_when="somebody resolves it",
        operation=permission.operation,
        reserved=True,
        reply=permission.reply,
    )


async def test_a_former_owner_is_not_believed() -> None:
    asking, broker = asker(answer(epoch=4, allowed=False, code="in_flight"), answer(epoch=3), answer(epoch=4))
    assert not await asking.authorize(ACT)
    assert await asking.authorize(ACT)
    assert len(broker.asked) == 3


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("run_unknown", RunUnknown),
        ("invalid_request", InvalidRequest),
        ("too_large", AnswerTooLarge),
    ],
)
async def test_refusals_are_typed_and_asked_once(code: str, kind: type[AskFailed]) -> None:
    asking, broker = asker(refusal(code, "because", number="400"))
    with pytest.raises(kind, match="because") as refused:
        await asking.authorize(ACT)
    assert refused.value.code == code
    assert len(broker.asked) == 1


async def test_a_forbidden_question_is_told_at_once() -> None:
    asking, _ = asker(Denied("no permission"))
    with pytest.raises(Refused):
        await asking.authorize(ACT)
