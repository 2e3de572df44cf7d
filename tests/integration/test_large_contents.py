"""Texts too large for a message: kept whole beside it, served in pages, gone with the run, and never believed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from protocol import subjects
from protocol.asks import FetchItem
from protocol.client import Run, connect
from protocol.content import MAX_BLOB_BYTES
from sidecar.transport.contents import STREAM, Contents, ensure_contents
from support.blackbox import LANE, TENANT, Box, Json, blackbox, event, eventually, new_run, stored
from support.links import linked
from support.nats_server import NatsServer

pytestmark = pytest.mark.anyio

MODEL = {"name": "m", "context_window": 100_000}
SECRET = "ghp_0123456789abcdefghijABCDEFGHIJ012345"
BIG = "".join(f"line {number} of a large größe 🦓 result\n" for number in range(30_000))


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as started:
        yield started


@pytest.fixture(scope="module")
async def box(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Box]:
    async with blackbox(server, tmp_path_factory.mktemp("large")) as opened:
        yield opened


def opened(box: Box, run: str | None = None, **options: Any) -> Any:
    return connect(box.url, tenant=TENANT, lane=LANE, run=run or new_run("large"), **options)


def digest(raw: bytes) -> str:
    return "sha256:" + hashlib.sha256(raw).hexdigest()


def blob(raw: bytes, **changes: Any) -> Json:
    return {"sha256": digest(raw), "bytes": len(raw), **changes}


async def put(box: Box, run: str, raw: bytes, *, under: str | None = None, piece: int = 128 * 1024) -> None:
    """Lay bytes on the pieces' subject of a run, as anybody with the broker's permission can."""
    subject = subjects.content_pieces(TENANT, LANE, run, under or digest(raw))
    for begin in range(0, len(raw), piece):
        await box.js.publish(subject, raw[begin : begin + piece])


async def one(run: Run, *refs: str, **more: Any) -> FetchItem:
    (item,) = [item async for item in run.fetch(*refs, **more)]
    return item


def content(item: FetchItem) -> str:
    assert item.event is not msgspec.UNSET
    return str(msgspec.json.decode(item.event)["content"])


async def told(run: Run, text: str, **more: Any) -> str:
    """A call and its result; the result's event id."""
    call = f"c-{run.newest}"
    await run.tool_called(call_id=call, tool="cat", arguments={})
    return (await run.tool_returned(call_id=call, status="ok", content=text, **more)).event_id


async def test_a_large_result_is_kept_whole_and_shown_short(box: Box) -> None:
    assert len(BIG.encode()) > box.client.max_payload
    async with opened(box) as run:
        await run.run_started(goal="g", model=MODEL)
        name = await told(run, BIG, media_type="text/plain")
        message = await run.message("user", BIG[::-1])
        ((_, payload, _),) = (await stored(box.js, "WK_IN", f"wk.v1.in.{TENANT}.{LANE}.{run.name}.event"))[
            2:3
        ]
        body = json.loads(payload)
        assert len(payload) < 40_000
        assert body["blob"] == blob(BIG.encode(), media_type="text/plain")
        assert body["content"].startswith(BIG[:1_000])
        assert f"the whole by fetch of event:{name}" in body["content"]
        assert "truncated" not in body
        # Every way of paging joins to the text, and no page is larger than the broker takes.
        for max_tokens in (None, 200_000, 20_000):
            item = await one(run, f"event:{name}", max_tokens=max_tokens)
            assert item.status == "found"
            assert content(item) == BIG
        assert content(await one(run, f"event:{message.event_id}")) == BIG[::-1]
        # Where the conversation goes on, it is short.
        context = await run.context("openai")
        shown = json.dumps(context.messages)
        assert len(shown) < 60_000
        assert "characters in all" in shown
        # The model was given all of it, as far as anybody said.
        assert (await run.status()).budget.used >= 2 * len(BIG.encode()) // 4
        # The object is one that other readers of the bucket can read as well.
        bucket = await box.js.object_store("WK_CONTENT")
        held = await bucket.get(subjects.content_object(TENANT, LANE, run.name, digest(BIG.encode())))
        assert held.data == BIG.encode()


async def test_a_result_whose_model_got_the_beginning_counts_as_that(box: Box) -> None:
    async with opened(box) as run:
        await run.run_started(goal="g", model=MODEL)
        name = await told(run, BIG, truncated=True)
        assert (await run.status()).budget.used < 15_000
        assert content(await one(run, f"event:{name}")) == BIG


async def test_a_request_that_carries_a_beginning_says_so(box: Box) -> None:
    whole = b"Clean up these tables. " + b"x" * 60_000 + b" Never touch billing."
    run = await box.start()
    body = event("message", role="user", content=whole.decode()[:500], blob=blob(whole))
    await box.tell(run, body)
    note = f" … [cut: {len(whole):,} bytes in all, the rest by fetch event:{body['id']}]"
    packet = await box.packet(run)
    assert packet["task"]["current_request"][0]["text"] == whole.decode()[:500] + note
    assert note in packet["text"]
    answer = await box.ask(run, "context", format="openai")
    assert answer.body["messages"][-1]["content"] == whole.decode()[:500] + note


async def test_pages_stay_within_their_bound(box: Box) -> None:
    async with opened(box) as run:
        await run.run_started(goal="g", model=MODEL)
        name = await told(run, BIG)
        cursor, joined, pages = None, "", 0
        while True:
            more = {} if cursor is None else {"cursor": cursor}
            subject = f"wk.v1.ask.{TENANT}.{LANE}.{run.name}.fetch"
            asked = {"refs": [f"event:{name}"], "max_tokens": 100_000, "after": run.newest, **more}
            reply = await box.client.request(subject, json.dumps(asked).encode(), timeout=30)
            assert len(reply.data) < 420_000
            answer = json.loads(reply.data)
            joined += answer["items"][0]["event"]["content"]
            pages += 1
            cursor = answer.get("next")
            if cursor is None:
                break
        assert joined == BIG
        assert pages >= 3


async def test_secrets_of_a_large_text_are_shown_to_nobody(box: Box) -> None:
    text = BIG + f"\nthe key is {SECRET}\n"
    async with opened(box) as run:
        await run.run_started(goal="g", model=MODEL)
        name = await told(run, text)
        assert content(await one(run, f"event:{name}")) == text.replace(SECRET, "[redacted:github_token]")
    async with opened(box, redaction=None) as run:
        await run.run_started(goal="g", model=MODEL)
        name = await told(run, text)
        item = await one(run, f"event:{name}")
        # The bucket holds what was sent; the daemon shows it like everything else.
        assert item.status == "redacted"
        assert content(item) == text.replace(SECRET, "[redacted:github_token]")


async def test_what_is_gone_or_another_text_is_told(box: Box) -> None:
    async with opened(box) as run:
        await run.run_started(goal="g", model=MODEL)
        for name, raw, laid, wanted in (
            ("missing", b"never put", None, "gone"),
            ("other", b"the right one", b"the wrong one", "digest_mismatch"),
            ("short", b"all of it", b"all", "digest_mismatch"),
            ("long", b"all of it", b"all of it and more", "digest_mismatch"),
            ("right", b"all of it, really", b"all of it, really", "found"),
        ):
            if laid is not None:
                await put(box, run.name, laid, under=digest(raw))
            await box.tell(
                run.name, event("message", id=name, role="user", content="the beginning …", blob=blob(raw))
            )
            await run.status(after=box.newest[run.name])
            item = await one(run, f"event:{name}", after=box.newest[run.name])
            assert item.status == wanted, name
            assert content(item) == (raw.decode() if wanted == "found" else "the beginning …")


async def test_no_run_reads_another_ones_text(box: Box) -> None:
    async with opened(box) as owner, opened(box) as thief:
        await owner.run_started(goal="g", model=MODEL)
        await thief.run_started(goal="g", model=MODEL)
        await told(owner, BIG)
        tricks: list[Json] = [
            {},
            {"name": f"{TENANT}/{LANE}/{owner.name}/{digest(BIG.encode())[7:]}"},
            {"name": f"../{owner.name}/{digest(BIG.encode())[7:]}", "bucket": "WK_CONTENT"},
            {"run": owner.name},
        ]
        for number, trick in enumerate(tricks):
            said = event(
                "message", id=f"x{number}", role="user", content="short", blob=blob(BIG.encode(), **trick)
            )
            await box.tell(thief.name, said)
            item = await one(thief, f"event:x{number}", after=box.newest[thief.name])
            assert (item.status, content(item)) == ("gone", "short")


@pytest.mark.parametrize(
    "changes",
    [
        {"bytes": 10 << 30},
        {"bytes": MAX_BLOB_BYTES + 1},
        {"bytes": 0},
        {"bytes": -1},
        {"sha256": "../../etc/passwd"},
        {"sha256": "sha256:" + "*" * 64},
        {"sha256": "sha256:" + "A" * 64},
    ],
)
async def test_a_claim_beyond_reason_is_refused_when_it_is_made(box: Box, changes: Json) -> None:
    run = await box.start(new_run("claim"))
    said = event("message", role="user", content="x", blob={**blob(b"x"), **changes})
    refused = await box.hear_rejected(run, await box.send(run, said))
    assert refused["code"] == "invalid_field"


async def test_a_hostile_object_costs_no_more_than_was_announced(box: Box) -> None:
    async with opened(box) as run:
        await run.run_started(goal="g", model=MODEL)
        # Far more lies there than was announced, and in far smaller pieces.
        subject = subjects.content_pieces(TENANT, LANE, run.name, digest(b"y" * 40_000))
        for _ in range(300):
            await box.js.publish(subject, b"y")
        said = event("message", id="m", role="user", content="x", blob=blob(b"y" * 40_000))
        await box.tell(run.name, said)
        item = await one(run, "event:m", after=box.newest[run.name])
        assert item.status == "digest_mismatch"
        async with linked(box.url) as link:
            assert await Contents(link).read(subject, 40_000) == b"y" * 4
            assert await Contents(link).read(subject, 3) == b"y" * 2


async def test_without_a_bucket_the_event_says_that_the_rest_is_missing(tmp_path: Path) -> None:
    with NatsServer() as server:
        async with blackbox(server, tmp_path, {"intake.content_mib": 0}) as box, opened(box) as run:
            await run.run_started(goal="g", model=MODEL)
            name = await told(run, BIG)
            item = await one(run, f"event:{name}")
            assert msgspec.json.decode(item.event)["truncated"] is True
            assert content(item).endswith("the rest was not kept]")
            assert item.status == "found"


async def test_forgetting_takes_large_texts_along(tmp_path: Path) -> None:
    soon = {"retention.succeeded_days": 1e-6}
    with NatsServer() as server:
        async with blackbox(server, tmp_path, soon) as box, opened(box) as stays, opened(box) as goes:
            for run in (stays, goes):
                await run.run_started(goal="g", model=MODEL)
                await told(run, BIG)
            await goes.run_finished(outcome="succeeded")

            async def lying(run: Run) -> int:
                pieces = subjects.content_pieces_filter(TENANT, LANE, run.name)
                name = subjects.content_object(TENANT, LANE, run.name, digest(BIG.encode()))
                found = await stored(box.js, STREAM, pieces)
                return len(found) + len(await stored(box.js, STREAM, subjects.content_description(name)))

            async def forgotten() -> bool:
                return await lying(goes) == 0

            await eventually(forgotten, "forgetting the text")
            assert await lying(stays) > 2


async def test_the_bucket_is_made_once_and_smaller_where_there_is_no_room(server: NatsServer) -> None:
    async with linked(server.url) as link:
        assert await ensure_contents(link, max_bytes=1 << 20)
        assert await ensure_contents(link, max_bytes=1 << 30)
    small = "jetstream { max_file_store: 200MB }"
    with NatsServer(config=small) as narrow:
        async with linked(narrow.url) as link:
            assert await ensure_contents(link, max_bytes=1 << 30)
            info = await link.api(f"STREAM.INFO.{STREAM}")
            assert info["config"]["max_bytes"] == 1 << 27
            with anyio.fail_after(30):
                assert await Contents(link).forget("t", "l", "r") == 0
