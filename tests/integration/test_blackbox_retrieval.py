"""Original evidence by question: ``fetch``, ``search`` and ``context``, as the wire protocol has them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.blackbox import Box, Json, blackbox, event, new_run, words
from tests.support.conversation import Talk, talk
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as started:
        yield started


@pytest.fixture(scope="module")
async def box(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Box]:
    async with blackbox(server, tmp_path_factory.mktemp("retrieval")) as opened:
        yield opened


async def ask(it: Talk, verb: str, **body: object) -> Json:
    answer = await it.box.ask(it.run, verb, **body)
    assert answer.status is None, answer
    assert answer.body["epoch"] >= 1
    return answer.body


async def told(box: Box) -> Talk:
    it = await talk(box)
    await it.tell(
        event("message", id="u-1", role="user", content="Where does the zebra sleep?"),
        event("tool.called", id="tc", call_id="c", tool="grep", arguments={"q": "zebra"}),
        event("tool.returned", id="tr", call_id="c", status="ok", content="zebra sleeps in stable 7"),
        event("evidence.recorded", evidence_id="ev", claim="stable 7", kind="observed", source="event:tr"),
        event("decision.made", decision_id="d", summary="look there", refs=["evidence:ev"]),
        event("operation.declared", operation_id="op", kind="x", idempotency_key="k"),
        event("approval.requested", approval_id="ap", action="x"),
        event("question.opened", question_id="q", text="When?"),
        event("constraint.set", constraint_id="k", text="Quietly.", source="user"),
        event("artifact.saved", artifact_id="art", uri="s3://a", sha256="11" * 32, description="map"),
    )
    return it


async def test_every_kind_of_ref_is_found(box: Box) -> None:
    it = await told(box)
    refs = [
        *("event:tr", "pos:4", "evidence:ev", "decision:d", "operation:op", "approval:ap", "question:q"),
        *("constraint:k", "artifact:art"),
    ]
    answer = await ask(it, "fetch", refs=refs)
    assert [item["ref"] for item in answer["items"]] == refs
    assert {item["status"] for item in answer["items"]} == {"found"}
    assert answer["truncated"] is False
    first, second = answer["items"][:2]
    assert first["event"]["content"] == "zebra sleeps in stable 7"
    assert second["event"] == first["event"]
    assert first["position"] == second["position"] == 4
    missing = await ask(it, "fetch", refs=["event:none", "pos:999", "operation:none"])
    assert [item["status"] for item in missing["items"]] == ["not_found"] * 3


async def test_a_range_is_what_was_said_there(box: Box) -> None:
    it = await told(box)
    answer = await ask(it, "fetch", **{"from": 2, "through": 4})
    assert [item["position"] for item in answer["items"]] == [2, 3, 4]
    assert [item["event"]["id"] for item in answer["items"]] == ["u-1", "tc", "tr"]


async def test_pages_join_to_the_original(box: Box) -> None:
    it = await talk(box)
    text = words(6_000, "größe 🦓")
    await it.tell(
        event("tool.called", call_id="c", tool="cat", arguments={}),
        event("tool.returned", id="big", call_id="c", status="ok", content=text),
    )
    joined, cursor, pages = "", None, 0
    while True:
        more = {} if cursor is None else {"cursor": cursor}
        answer = await ask(it, "fetch", refs=["event:big"], max_tokens=1_000, **more)
        joined += "".join(item["event"]["content"] for item in answer["items"])
        pages += 1
        assert pages < 50
        if "next" not in answer:
            break
        cursor = answer["next"]
    assert joined == text
    assert pages > 3


async def test_other_runs_are_out_of_scope_unless_granted(box: Box) -> None:
    it = await told(box)
    stranger = await told(box)
    answer = await ask(it, "fetch", refs=[f"run:{stranger.run}/event:tr"])
    assert [item["status"] for item in answer["items"]] == ["out_of_scope"]
    child = new_run("kid")
    await it.tell(event("child.spawned", child_run=child, task="Help.", granted_refs=["event:tr"]))
    await box.status(it.run)
    kid = Talk(box, child)
    await kid.tell(event("run.started", goal="Help.", model={"name": "m", "context_window": 9_000}))
    answer = await ask(kid, "fetch", refs=[f"run:{it.run}/event:tr", f"run:{it.run}/event:u-1"])
    assert [item["status"] for item in answer["items"]] == ["found", "out_of_scope"]


async def test_words_are_searched_in_this_run_only(box: Box) -> None:
    it = await told(box)
    await told(box)
    answer = await ask(it, "search", query="zebra")
    assert {hit["event_id"] for hit in answer["hits"]} >= {"u-1", "tr"}
    for hit in answer["hits"]:
        assert set(hit) >= {"position", "event_id", "type", "snippet", "score"}
    one = await ask(it, "search", query="zebra", types=["tool.returned"])
    assert [hit["event_id"] for hit in one["hits"]] == ["tr"]
    assert (await ask(it, "search", query="giraffe"))["hits"] == []


@pytest.mark.parametrize("format", ["openai", "openai_responses", "anthropic"])
async def test_the_context_is_packet_and_tail_as_a_valid_list(box: Box, format: str) -> None:
    it = await talk(box)
    await it.fill(0.75)
    await box.hear(it.run, "receipt", outcome="applied")
    answer = await ask(it, "context", format=format)
    packet = await box.packet(it.run)
    shown = json.dumps(answer["messages"])
    assert "VERDICT" in shown
    assert answer["through_event_id"] == it.events[-1]["id"]
    assert answer["packet_id"]
    assert 0 < answer["tokens"] < packet["budget"]["used_before"]
    covered = packet["checkpoint"]["covers_through"]["position"]
    calls = {item["call_id"] for item in it.events[covered:] if item["type"] == "tool.called"}
    results = {item["call_id"] for item in it.events[covered:] if item["type"] == "tool.returned"}
    assert calls == results
    for call in calls:
        assert shown.count(f'"{call}"') == 2
    if format == "anthropic":
        assert {message["role"] for message in answer["messages"]} == {"user", "assistant"}
        assert answer["messages"][0]["role"] == "user"
    small = await it.box.ask(it.run, "context", format=format, max_tokens=50)
    assert small.code == "too_large"


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("fetch", {}),
        ("fetch", {"from": 1}),
        ("fetch", {"refs": ["event:x"], "from": 1, "through": 2}),
        ("search", {}),
        ("context", {}),
        ("context", {"format": "klingon"}),
    ],
)
async def test_a_question_that_is_none_is_refused(box: Box, verb: str, body: Json) -> None:
    it = await talk(box)
    answer = await box.ask(it.run, verb, **body)
    assert answer.code == "invalid_request"
