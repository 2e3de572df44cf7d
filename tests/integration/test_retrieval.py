"""Fetch, search and context of a running lane: statuses told apart, pages that join, scope, bad input, and over the
wire."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from protocol.asks import FetchReply
from protocol.codec import digest_bytes
from sidecar.indexing import Indexing
from storage.records import TombstoneRow, Unit
from support.harness import LANE, TENANT, Harness, Life, workplace
from support.providers import check, texts
from tests.support.blackbox import Box, blackbox, event, new_run
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.anyio

Json = dict[str, Any]
FORMATS = ("openai", "openai_responses", "anthropic")


@pytest.fixture
def harness() -> Iterator[Harness]:
    with workplace() as folder:
        yield Harness(folder)


async def fetch(life: Life, run: str = "r", **body: Any) -> FetchReply:
    answer = await life.parts.responder.answer(run, "fetch", json.dumps(body).encode())
    assert answer is not None
    assert answer.error_code is None, answer.error
    return msgspec.json.decode(answer.body, type=FetchReply)


async def all_items(life: Life, run: str = "r", **body: Any) -> list[Any]:
    """Every item of every page."""
    items: list[Any] = []
    for _ in range(10_000):
        reply = await fetch(life, run, **body)
        items += reply.items
        assert reply.truncated == (reply.next is not msgspec.UNSET)
        if not reply.truncated:
            return items
        body["cursor"] = reply.next
    raise AssertionError("paging does not end")


def value(raw: Any) -> Any:
    return json.loads(bytes(raw))


# --- fetch ------------------------------------------------------------------------------------------------


async def test_every_kind_of_ref_names_its_thing(harness: Harness) -> None:
    h = harness
    h.start(constraints=[{"id": "c0", "text": "no force", "source": "user"}])
    h.tell("constraint.set", constraint_id="c1", text="ask first", source="user")
    passed_over = [{"alternative": "the hose", "reason": "too short"}]
    h.tell("decision.made", decision_id="d1", summary="use the pump", rejected=passed_over)
    h.tell("question.opened", question_id="q1", text="which pump?")
    h.tell("question.answered", question_id="q1", answer="the left one")
    h.tell("evidence.recorded", evidence_id="ev1", claim="it leaks", kind="observed", source="event:e-1")
    h.tell("artifact.saved", artifact_id="a1", uri="file:///x", sha256="ab" * 32, description="a patch")
    h.tell("operation.declared", id_="op1", operation_id="op1", kind="ship", idempotency_key="k")
    h.tell("operation.dispatched", id_="op1", operation_id="op1")
    h.tell("operation.settled", id_="op1", operation_id="op1", state="succeeded", receipt="r-9")
    h.tell("approval.requested", approval_id="ap1", action="deploy")
    h.authority("approval.resolved", approval_id="ap1", outcome="granted", by="boss", action="deploy")
    kinds = ["constraint:c0", "constraint:c1", "decision:d1", "question:q1", "evidence:ev1", "artifact:a1"]
    kinds += ["operation:op1", "approval:ap1", "sha256:" + "ab" * 32]
    async with h.alive() as life:
        await life.read_all()
        items = {item.ref: item for item in (await fetch(life, refs=kinds)).items}
        assert list(items) == kinds
        records = {ref: value(item.record) for ref, item in items.items()}
        assert {item.status for item in items.values()} == {"found"}
        assert records["operation:op1"]["state"] == "succeeded"
        assert records["operation:op1"]["receipt"] == "r-9"
        assert records["approval:ap1"]["state"] == "granted"
        assert records["question:q1"]["answer"] == "the left one"
        assert records["sha256:" + "ab" * 32]["artifact_id"] == "a1"
        assert value(items["decision:d1"].event)["summary"] == "use the pump"
        assert records["decision:d1"]["rejected"] == passed_over
        # The last message with the id, whatever the messages about one item are called in the journal.
        (last,) = (await fetch(life, refs=["event:op1"])).items
        assert value(last.event)["type"] == "operation.settled"
        (entry,) = await life.store.tail(TENANT, LANE, "r", after=last.position - 1, through=last.position)
        assert last.digest == digest_bytes(entry.body)
        assert bytes(last.event) == entry.body
        (named,) = (await fetch(life, refs=[last.digest])).items
        assert named.position == last.position
        (missing,) = (await fetch(life, refs=["sha256:" + "0" * 64])).items
        assert missing.status == "not_found"


async def test_ranges_and_what_lies_around(harness: Harness) -> None:
    harness.start()
    for number in range(30):
        harness.tell("message", role="user", content=f"word {number}")
    async with harness.alive() as life:
        await life.read_all()

        async def positions(**body: Any) -> list[int]:
            return [item.position for item in await all_items(life, **body)]

        assert await positions(**{"from": 5, "through": 9}) == [5, 6, 7, 8, 9]
        assert await positions(**{"from": 5, "through": 6, "before": 2, "after_events": 1}) == [3, 4, 5, 6, 7]
        assert await positions(**{"from": 29, "through": 2**53 - 1}) == [29, 30, 31]
        assert await positions(refs=["pos:1"], before=10**9, after_events=2) == [1, 2, 3]
        assert await positions(refs=["pos:4", "pos:31"], before=1, after_events=1) == [3, 4, 5, 30, 31]
        beyond = await fetch(life, **{"from": 32, "through": 40})
        assert [(item.ref, item.status) for item in beyond.items] == [("pos:32", "not_found")]
        paged = await positions(**{"from": 1, "through": 31, "max_tokens": 200})
        assert paged == list(range(1, 32))
        assert (await fetch(life, refs=[])).items == ()


@pytest.mark.parametrize("max_tokens", [1, 40, 120, 900, 6_000])
async def test_pages_join_to_the_original_whatever_the_limit(harness: Harness, max_tokens: int) -> None:
    harness.start()
    said = "naïve “quotes” \\ \n\t \u2028 日本語 🚢 " * 9
    told = [
        harness.tell("message", role="user", content=said * 4),
        harness.tell(
            "tool.returned",
            call_id="c",
            status="ok",
            content=[{"kind": "text", "text": said}, {"kind": "data", "value": {"a": [1, 2.5, said * 3]}}],
        ),
        harness.tell(
            "step.changed", plan=[{"id": f"p{n}", "text": "x" * 20, "state": "todo"} for n in range(40)]
        ),
    ]
    async with harness.alive() as life:
        await life.read_all()
        for body in told:
            ref = f"event:{body['id']}"
            items = await all_items(life, refs=[ref], max_tokens=max_tokens)
            for item in items:
                if item.part is not msgspec.UNSET and max_tokens > 100:
                    assert len(msgspec.json.encode(item)) <= max_tokens * 4
            assert join([value(item.event) for item in items]) == body
            parts = [item.part for item in items if item.part is not msgspec.UNSET]
            if parts:
                assert sum(part.chars for part in parts) == parts[0].total_chars
                assert [part.offset for part in parts] == [
                    sum(before.chars for before in parts[:place]) for place in range(len(parts))
                ]


def join(pages: list[Any]) -> Any:
    """Pages of one event: pieces of its JSON text, or the event with the pieces of its long texts."""
    if isinstance(pages[0], str):
        return json.loads("".join(pages))
    whole = pages[0]
    for page in pages[1:]:
        whole = _joined(whole, page, pages)
    return whole


def _joined(before: Any, after: Any, pages: list[Any]) -> Any:
    if isinstance(before, str):
        return before if before == after and len(before) <= 128 and before else before + after
    if isinstance(before, dict):
        return {name: _joined(value, after[name], pages) for name, value in before.items()}
    if isinstance(before, list):
        return [_joined(one, other, pages) for one, other in zip(before, after, strict=True)]
    return before


async def test_no_reply_is_larger_than_the_broker_takes(harness: Harness) -> None:
    harness.start()
    for number in range(12):
        harness.tell("message", role="user", content=f"{number} " + '"\\' * 90_000)
    async with harness.alive() as life:
        life.desk.max_payload = 256 * 1024
        await life.read_all()
        body: Json = {"from": 1, "through": 13}
        content: dict[int, str] = {}
        while True:
            answer = await life.parts.responder.answer("r", "fetch", json.dumps(body).encode())
            assert answer is not None
            assert answer.error_code is None
            assert len(answer.body) + 1024 <= life.desk.max_payload
            reply = json.loads(answer.body)
            for item in reply["items"]:
                content[item["position"]] = content.get(item["position"], "") + item["event"].get(
                    "content", ""
                )
            if not reply["truncated"]:
                break
            body["cursor"] = reply["next"]
        assert [content[n + 2] for n in range(12)] == [f"{n} " + '"\\' * 90_000 for n in range(12)]


async def test_a_cursor_is_good_for_its_question_only(harness: Harness) -> None:
    harness.start()
    harness.start("other")
    for number in range(40):
        harness.tell("message", role="user", content=f"word {number}")
    async with harness.alive() as life:
        await life.read_all()
        body: Json = {"from": 1, "through": 41, "max_tokens": 100}
        good = (await fetch(life, **body)).next
        assert isinstance(good, str)
        forged = [good[:-1] + ("A" if good[-1] != "A" else "B"), good + "A", good[1:], "", "x" * 5_000, "é"]
        forged += ["".join(reversed(good)), good.lower(), "AAAAAAAAAAAAAAAAAAAAAAAA"]
        for cursor in forged:
            if cursor != good:
                answer = await life.ask("fetch", **body, cursor=cursor)
                assert answer["error"]["code"] == "invalid_request", cursor
        for change in ({"max_tokens": 101}, {"through": 40}, {"before": 1}):
            answer = await life.ask("fetch", **{**body, **change, "cursor": good})
            assert answer["error"]["code"] == "invalid_request"
        assert (await life.ask("fetch", "other", **body, cursor=good))["error"]["code"] == "invalid_request"
        assert (await fetch(life, **body, cursor=good, after=1)).items != ()


async def test_damage_and_forgetting_are_told(harness: Harness) -> None:
    harness.start()
    for number in range(4):
        harness.tell("message", role="user", content=f"word {number}")
    harness.tell("decision.made", id_="dec", decision_id="d1", summary="so be it")
    async with harness.alive() as life:
        await life.read_all()
    with closing(sqlite3.connect(harness.folder / "watchkeeper.db", isolation_level=None)) as raw:
        raw.execute("DROP TRIGGER bodies_no_update")
        raw.execute("UPDATE bodies SET body = CAST(replace(CAST(body AS TEXT), 'word 2', 'word 7') AS BLOB)")
    async with harness.alive() as life:
        items = await all_items(life, **{"from": 1, "through": 6})
        assert [item.status for item in items] == ["found"] * 3 + ["digest_mismatch"] + ["found"] * 2
        assert items[3].event is msgspec.UNSET
        assert "word 7" not in json.dumps((await life.ask("search", query='"word 7"'))["hits"])
        context = await life.ask("context", format="openai")
        assert context["error"]["code"] == "unavailable"
        await Indexing(life.desk).catch_up("r", 6)
        grave = TombstoneRow(run="r", forgotten_at="2026-12-30T00:00:00Z", body=b"gone")
        await life.store.commit(Unit(tenant=TENANT, lane=LANE, forget=(grave,)))
        life.desk.runs.discard()
        refs = ["pos:2", "event:dec", "decision:d1", "event:nobody", "pos:99", "run:x/pos:1"]
        items = await all_items(life, refs=refs)
        assert [item.status for item in items] == [
            *("gone", "gone", "gone", "not_found", "not_found", "out_of_scope")
        ]
        assert all(item.event is msgspec.UNSET for item in items)
        assert {item.status for item in await all_items(life, **{"from": 1, "through": 99})} == {"gone"}
        assert (await life.ask("search", query="word"))["error"]["code"] == "run_unknown"


async def test_secrets_are_shown_as_they_are_stored(harness: Harness) -> None:
    harness.start()
    told = harness.tell(
        "message", role="user", content="use password=hunter2-hunter2 for https://u:pw12345@host/"
    )
    async with harness.alive() as life:
        await life.read_all()
        (entry,) = await life.store.tail(TENANT, LANE, "r", after=1)
        (item,) = (await fetch(life, refs=[f"event:{told['id']}"])).items
        assert item.status == ("redacted" if entry.redacted else "found")
        assert bytes(item.event) == entry.body
        assert item.digest == digest_bytes(entry.body)
        assert entry.redacted
        assert "hunter2" not in json.dumps(await life.ask("search", query="password hunter2"))
        assert "hunter2" not in json.dumps(await life.ask("context", format="openai"))


BAD = [
    {},
    {"refs": ["nonsense"]},
    {"refs": ["pos:0"]},
    {"refs": ["event:" + "x" * 200]},
    {"refs": ["pos:1"] * 1_001},
    {"refs": "pos:1"},
    {"refs": ["pos:1"], "from": 1, "through": 2},
    {"from": 3, "through": 2},
    {"from": 0, "through": 2},
    {"from": 1},
    {"from": -1, "through": 2},
    {"refs": ["pos:1"], "max_tokens": 0},
    {"refs": ["pos:1"], "max_tokens": -5},
    {"refs": ["pos:1"], "before": -1},
    {"refs": ["pos:1"], "of_run": "a.b"},
    {"refs": ["pos:1"], "of_run": "_lane"},
    {"refs": ["run:a.b/pos:1"]},
    {"refs": ["pos:99999999999999999999"]},
]
BAD_SEARCH = [
    {},
    {"query": ""},
    {"query": " \n\t"},
    {"query": "x" * 10_001},
    {"query": "x", "limit": 0},
    {"query": "x", "limit": -1},
    {"query": "x", "from": 5, "through": 4},
    {"query": "x", "types": ["no.such"]},
    {"query": 5},
]


async def test_bad_input_is_refused_with_a_code(harness: Harness) -> None:
    harness.start()
    async with harness.alive() as life:
        await life.read_all()
        for verb, bodies in (("fetch", BAD), ("search", BAD_SEARCH)):
            for body in bodies:
                assert (await life.ask(verb, **body))["error"]["code"] == "invalid_request", body
        for payload in (b"[", b"[]", b"\xff", b'{"query":"\\ud800"}', b'{"query":"\\u0000"}', b"null"):
            answer = await life.parts.responder.answer("r", "search", payload)
            assert answer is not None
            assert json.loads(answer.body)["error"]["code"] == "invalid_request"
        for body in ({"format": "gemini"}, {}, {"format": "openai", "max_tokens": 0}):
            assert (await life.ask("context", **body))["error"]["code"] == "invalid_request"
        for verb, body in (
            ("fetch", {"refs": ["pos:1"]}),
            ("search", {"query": "x"}),
            ("context", {"format": "openai"}),
        ):
            assert (await life.ask(verb, "nobody", **body))["error"]["code"] == "run_unknown"


# --- scope ------------------------------------------------------------------------------------------------


async def test_a_child_reads_what_was_granted_and_nothing_else(harness: Harness) -> None:
    h = harness
    h.start("p", goal="the parent's secret goal")
    granted = h.tell("message", run="p", role="user", content="granted words", id_="g1")
    h.tell("message", run="p", role="user", content="private words", id_="g2")
    h.tell(
        "evidence.recorded",
        run="p",
        evidence_id="ev1",
        claim="granted claim",
        kind="observed",
        source="pos:2",
    )
    h.tell(
        "child.spawned",
        run="p",
        child_run="c",
        task="help",
        granted_refs=["event:g1", "run:p/evidence:ev1", "event:never"],
    )
    h.tell("child.spawned", run="p", child_run="s", task="help too")
    h.start("c", parent_run="p")
    h.start("s", parent_run="p")
    h.tell("message", run="c", role="assistant", content="the child's transcript", id_="cm")
    h.tell(
        "artifact.saved", run="c", artifact_id="a1", uri="file:///a", sha256="cd" * 32, description="result"
    )
    h.tell(
        "evidence.recorded",
        run="c",
        evidence_id="v1",
        claim="child claim",
        kind="observed",
        source="event:cm",
    )
    h.tell("child.returned", run="p", child_run="c", status="succeeded", artifacts=["a1"], evidence=["v1"])
    async with h.alive() as life:
        await life.read_all()

        async def statuses(run: str, *refs: str, **more: Any) -> list[str]:
            return [item.status for item in (await fetch(life, run, refs=list(refs), **more)).items]

        (item,) = (await fetch(life, "c", refs=["run:p/event:g1"])).items
        assert value(item.event)["content"] == granted["content"]
        assert await statuses("c", "event:g1", "run:p/evidence:ev1", "event:never") == [
            "found",
            "found",
            "not_found",
        ]
        assert await statuses("c", "event:g1", of_run="p") == ["found"]
        # What is there and what is not are answered alike.
        out = await fetch(
            life, "c", refs=["run:p/event:g2", "run:p/event:nothing", "run:s/pos:1", "run:zz/pos:1"]
        )
        assert [item.status for item in out.items] == ["out_of_scope"] * 4
        assert {msgspec.json.encode(item).decode().replace(item.ref, "") for item in out.items} == {
            '{"ref":"","status":"out_of_scope"}'
        }
        assert await statuses("c", "run:p/pos:2", "run:p/pos:1", "run:p/decision:d") == ["out_of_scope"] * 3
        around = await fetch(life, "c", refs=["run:p/event:g1"], before=5, after_events=5)
        assert len(around.items) == 1
        ranged = await fetch(life, "c", **{"from": 1, "through": 9, "of_run": "p"})
        assert [item.status for item in ranged.items] == ["out_of_scope"]
        # A parent gets what came back, not how it came about; siblings get nothing.
        assert await statuses("p", "run:c/artifact:a1", "run:c/evidence:v1") == ["found", "found"]
        assert (
            await statuses("p", "run:c/event:cm", "run:c/pos:1", "run:c/checkpoint:x") == ["out_of_scope"] * 3
        )
        assert await statuses("s", "run:c/artifact:a1", "run:p/event:g1") == ["out_of_scope"] * 2
        assert await statuses("s", "event:g1") == ["not_found"]

        async def found(run: str, query: str, of_run: str) -> list[Json]:
            reply = await life.ask("search", run, query=query, of_run=of_run)
            assert ("status" in reply) == (reply["hits"] == [] and run != "c")
            return list(reply["hits"])

        assert [hit["event_id"] for hit in await found("c", "words", "p")] == ["g1"]
        assert await found("s", "words", "p") == await found("s", "words", "zz") == []
        assert [hit["type"] for hit in await found("p", "child", "c")] == ["evidence.recorded"]
        assert await found("s", "child", "c") == []
        own = await life.ask("search", "c", query="words")
        assert own["hits"] == []


# --- search -----------------------------------------------------------------------------------------------


WRITTEN = {
    "src/app/main.py:42": "error in src/app/main.py:42, see there",
    "acct_8812": "customer acct_8812 has paid",
    "--no-verify": "never use git commit --no-verify here",
    "注文番号": "お客様の注文番号は８８１２です",
    "Straße": "die Straße ist gesperrt",
    "café": "meet at the café at nine",
    "C:\\Users\\dev": "it lies in C:\\Users\\dev now",
    "$1,234.56": "the bill is $1,234.56 in all",
    "getUserById": "call getUserById(7) first",
    "=>": "use x => y for it",
    "deadbeefcafe": "commit deadbeefcafe0123456789 is good",
    "a@b.example": "write to a@b.example soon",
    "won't fix": "status: won't fix",
    "🚢": "the ship 🚢 sails",
}


@pytest.mark.parametrize("indexed", [False, True])
async def test_what_is_written_is_found_as_written(harness: Harness, indexed: bool) -> None:
    harness.start()
    places = {}
    for fact, text in WRITTEN.items():
        places[fact] = harness.tell("message", role="user", content=text)["id"]
        harness.tell("message", role="assistant", content="nothing of the kind, commit and call and status")
    async with harness.alive() as life:
        await life.read_all()
        if indexed:
            await Indexing(life.desk).catch_up("r", (await life.ledger()).head.position)
            assert (
                await life.store.searchable_through(TENANT, LANE, "r") == (await life.ledger()).head.position
            )
        for fact, event_id in places.items():
            reply = await life.ask("search", query=fact)
            assert reply["hits"][0]["event_id"] == event_id, fact
            assert fact in reply["hits"][0]["snippet"]
        for query in ("STRASSE", "cafe", "CAFÉ", "main.py", "8812 acct", "userbyid", "beefcafe", "番号"):
            assert (await life.ask("search", query=query))["hits"], query
        for query in ('"', "x OR y NOT z", "NEAR(a b)", "text:foo*", "(((", "' ; DROP TABLE search; --", "*"):
            assert "error" not in await life.ask("search", query=query)
        assert (await life.ask("search", query="acct_8813"))["hits"] == []
        assert (await life.ask("search", query="run1"))["hits"] == []


async def test_filters_limits_and_bounds(harness: Harness) -> None:
    harness.start()
    for number in range(600):
        harness.tell("message", role="user", content=f"the pump number {number} " + "pump " * (number % 7))
    harness.tell("tool.called", call_id="c", tool="bash", arguments={"command": 'echo "pump\nstation"'})
    async with harness.alive() as life:
        await life.read_all()
        reply = await life.ask("search", query="pump", limit=5)
        assert len(reply["hits"]) == 5
        assert reply["truncated"]
        assert await life.store.searchable_through(TENANT, LANE, "r") == 602
        scores = [hit["score"] for hit in reply["hits"]]
        assert scores == sorted(scores, reverse=True)
        assert len((await life.ask("search", query="pump", limit=10**6))["hits"]) == 100
        (hit,) = (await life.ask("search", query="pump", types=["tool.called"]))["hits"]
        assert hit["position"] == 602
        hits = (await life.ask("search", query="pump", **{"from": 10, "through": 12}))["hits"]
        assert {hit["position"] for hit in hits} == {10, 11, 12}
        (hit,) = (await life.ask("search", query="number 17", limit=1))["hits"]
        assert hit["position"] == 19
        small = await life.ask("search", query="pump", max_tokens=60)
        assert small["truncated"]
        assert len(json.dumps(small["hits"], separators=(",", ":"))) <= 4 * 60 + 4
        assert (await life.ask("search", query="pump", types=[]))["hits"] == []
        with anyio.fail_after(20):
            for query in ("a " * 4_000, "pump " * 1_500, "é" * 9_000, '"' * 9_999, "p*" * 3_000):
                await life.ask("search", query=query)


async def test_search_goes_on_where_nothing_can_be_stored(harness: Harness) -> None:
    from support.harness import Fault

    harness.start()
    for number in range(300):
        harness.tell("message", role="user", content=f"word {number}")
    async with harness.alive() as life:
        await life.read_all()
        harness.fault = Fault("refused")
        reply = await life.ask("search", query="word 299")
        assert reply["hits"][0]["snippet"] == f"word 299\n{reply['hits'][0]['event_id']}"


# --- context ----------------------------------------------------------------------------------------------


async def test_context_after_a_compaction_is_the_published_packet_the_tail_and_what_changed(
    harness: Harness,
) -> None:
    h = harness
    h.start()
    h.tell("message", role="system", content="You mend pumps.")
    for number in range(14):
        h.turn(2_400)
        h.tell("usage.reported", model="m", context_tokens=2_500 * (number + 1), output_tokens=3)
    async with h.alive() as life:
        await life.read_all()
        await life.compact()
        await life.relayed()
        packets = [body for body in h.sent("packet") if body["reason"] in ("compacted", "trimmed")]
        newest = packets[-1]
        assert newest["checkpoint"] is not None
        for format in FORMATS:
            reply = await life.ask("context", format=format)
            check(format, reply)
            assert reply["packet_id"] == newest["packet_id"]
            told = "\n".join(texts(reply))
            assert newest["text"] in told
            assert "CHANGES since" not in told
            assert "You mend pumps." in told
        before = await life.ask("context", format="openai")
        h.tell("message", role="user", content="and now the other one")
        h.authority("constraint.set", constraint_id="c9", text="touch nothing red", source="operator")
        h.tell("tool.called", call_id="weird.id/1:2", tool="a tool", arguments="plain text")
        await life.read_all()
        after = await life.ask("context", format="openai")
        size = len(before["messages"])
        assert after["messages"][:size] == before["messages"]
        check("openai", after)
        assert "CHANGES since" in after["messages"][-1]["content"]
        assert "touch nothing red" in after["messages"][-1]["content"]
        assert "and now the other one" not in after["messages"][-1]["content"]
        assert "no result recorded yet" in after["messages"][-2]["content"]
        for format in FORMATS:
            check(format, await life.ask("context", format=format))
        exact = await life.ask("context", format="openai", max_tokens=after["tokens"])
        assert exact["messages"] == after["messages"]
        small = await life.ask("context", format="openai", max_tokens=after["tokens"] - 1)
        assert small["error"]["code"] == "too_large"
    # Another life on the same files says the same.
    async with h.alive() as life:
        again = await life.ask("context", format="openai")
        assert again["messages"] == after["messages"]


# --- over the wire ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as started:
        yield started


@pytest.fixture(scope="module")
async def box(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Box]:
    folder: Path = tmp_path_factory.mktemp("retrieval")
    async with blackbox(server, folder) as opened:
        yield opened


async def test_over_the_wire(box: Box) -> None:
    run = new_run("retrieve")
    begin = event("run.started", goal="g", model={"name": "m", "context_window": 50_000})
    said = event("message", role="user", content="look at src/app/main.py:42")
    await box.tell(run, begin, said)
    found = await box.ask(run, "search", query="src/app/main.py:42")
    assert found.status is None
    assert found.body["hits"][0]["event_id"] == said["id"]
    got = await box.ask(run, "fetch", refs=[f"event:{said['id']}"])
    assert got.body["items"][0]["event"] == said
    listed = await box.ask(run, "context", format="anthropic")
    check("anthropic", listed.body)
    refused = await box.ask(run, "fetch", refs=["nonsense"])
    assert refused.code == "invalid_request"
    late = await box.ask_once(run, "fetch", {"refs": ["pos:1"], "after": box.newest[run] + 10_000})
    assert late.code == "behind"
