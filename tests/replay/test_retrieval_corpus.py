"""Real transcripts through compaction: every result can be fetched back as it was, facts are found again, and
what there is to go on with is a list the providers take."""

from __future__ import annotations

import json
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from protocol.asks import FetchReply
from protocol.codec import decode_event, digest_bytes
from protocol.events import Message, ToolReturned
from sidecar.core.context import shown
from sidecar.importers import import_files
from sidecar.indexing import Indexing
from support.harness import LANE, TENANT, Harness, Life, workplace
from support.providers import check, check_types

pytestmark = pytest.mark.anyio

Json = dict[str, Any]
FILES = [
    ["claude-code-codemie/claude/-tmp-private/4c2ddfdc-b619-4525-8d03-1950fb1b0257.jsonl"],
    ["claude-code-codemie/claude/-tmp-private/agent-36541525.jsonl"],
    ["claude-code-codemie/claude/-tmp-private/agent-50243ee8.jsonl"],
    ["claude-code-codemie/claude/incremental-simple/turn-2.jsonl"],
    [
        "claude-code-codemie/claude/incremental-subagents/turn-2.jsonl",
        "claude-code-codemie/claude/incremental-subagents/turn-2/subagents/agent-a485154.jsonl",
    ],
    ["claude-code-codemie/session-196820da.jsonl"],
    ["claude-code-codemie/session-9eda1058.jsonl"],
    ["claude-code-entire/fc-99c919b212-0-full.jsonl"],
    ["codex-codemie/rollout-2026-05-11T11-26-55-019e1625-789d-76c0-80ab-3724b5ddb799.jsonl"],
    ["mixed-agent-sessions/codex/small.jsonl"],
]
NAMES = [files[0].rsplit("/", 1)[1][:24] for files in FILES]
FORMATS = ("openai", "openai_responses", "anthropic")
FACT = re.compile(
    r"(?:[\w.-]+/)+[\w.-]+(?::\d+)?|\b[0-9a-f]{7,40}\b|\b\w+_\w+\b|--[a-z][\w-]+|\b\w+\.(?:py|ts|tsx|js|md|json)\b"
)


@asynccontextmanager
async def compacted(corpus: Path, files: list[str]) -> AsyncIterator[tuple[Life, list[str]]]:
    """The files' runs, folded, and asked to be compacted four times on the way."""
    paths = [corpus / name for name in files]
    messages = list(import_files(paths))
    with workplace() as folder:
        harness = Harness(folder, {"budget.keep_recent_tokens": 2_000, "budget.min_gain": 0.1})
        async with harness.alive() as life:
            step = max(1, len(messages) // 4)
            runs = list(dict.fromkeys(message.run for message in messages))
            for start in range(0, len(messages), step):
                for message in messages[start : start + step]:
                    harness.broker.put(message.run, message.channel, message.payload())
                await life.read_all()
                for run in runs:
                    if "error" not in await life.ask("status", run):
                        await life.compact(run)
                        harness.tell("context.replaced", run=run, by="agent")
                await life.read_all()
            yield life, runs


async def stored(life: Life, run: str) -> list[tuple[int, Any, bytes]]:
    entries = await life.store.tail(TENANT, LANE, run, after=0)
    return [
        (entry.position, decode_event(entry.body), entry.body)
        for entry in entries
        if entry.channel != "record"
    ]


@pytest.mark.parametrize("files", FILES, ids=NAMES)
async def test_every_result_comes_back_and_every_context_is_taken(corpus: Path, files: list[str]) -> None:
    async with compacted(corpus, files) as (life, runs):
        covered = 0
        for run in runs:
            told = await stored(life, run)
            refs = {f"event:{event.id}": body for _, event, body in told if isinstance(event, ToolReturned)}
            packet = await life.packet(run)
            covered += (packet["checkpoint"] or {"covers_through": {"position": 0}})["covers_through"][
                "position"
            ]
            for item in packet["cleared"]:
                assert item["ref"] in refs
            await check_fetched(life, run, refs)
            for format in FORMATS:
                reply = await life.ask("context", run, format=format)
                if "error" in reply:
                    assert reply["error"]["code"] == "too_large", reply
                    continue
                check(format, reply)
                check_types(format, reply)
                assert reply["through_event_id"] == packet["tail"]["through_event_id"]
        if len(files) == 1 and "small" not in files[0] and "turn-2" not in files[0]:
            print(f"\n{files[0]}: covered {covered} positions of {runs}")


async def check_fetched(life: Life, run: str, refs: dict[str, bytes]) -> None:
    names = list(refs)
    for start in range(0, len(names), 200):
        pieces: dict[str, Json] = {}
        request: Json = {"refs": names[start : start + 200], "max_tokens": 5_000}
        while True:
            answer = await life.parts.responder.answer(run, "fetch", json.dumps(request).encode())
            assert answer is not None
            reply = msgspec.json.decode(answer.body, type=FetchReply)
            for item in reply.items:
                assert item.status in ("found", "redacted")
                assert item.digest == digest_bytes(refs[item.ref])
                raw = bytes(item.event)  # type: ignore[arg-type]
                if item.part is UNSET:
                    assert raw == refs[item.ref]
                assert len(raw) <= 20_000
                event = json.loads(raw)
                whole = pieces.setdefault(item.ref, event)
                if event is not whole:
                    whole["content"] = joined(whole["content"], event["content"])
            if not reply.truncated:
                break
            request["cursor"] = reply.next
        assert list(pieces) == names[start : start + 200]
        for ref, event in pieces.items():
            assert event == json.loads(refs[ref])


def joined(before: Any, after: Any) -> Any:
    """Two pages of one content: long texts go on, all else is repeated."""
    if isinstance(before, str):
        return before + after
    return [
        {**part, "text": part["text"] + more["text"]} if part.get("text") != more.get("text") else part
        for part, more in zip(before, after, strict=True)
    ]


@pytest.mark.parametrize("indexed", [False, True], ids=["tail", "index"])
async def test_exact_facts_are_found_among_the_first_three(corpus: Path, indexed: bool) -> None:
    asked = found = shown_facts = phrases = phrases_found = 0
    missed: list[str] = []
    for files, name in zip(FILES, NAMES, strict=True):
        dice = random.Random(name)
        async with compacted(corpus, files) as (life, runs):
            for run in runs:
                if indexed:
                    newest = (await life.ledger(run)).head.position
                    await Indexing(life.desk).catch_up(run, newest)
                    assert await life.store.searchable_through(TENANT, LANE, run) == newest
                facts: dict[str, int] = {}
                spoken: dict[str, int] = {}
                for position, event, _ in await stored(life, run):
                    if isinstance(event, (Message, ToolReturned)):
                        for fact in FACT.findall(shown(event.content)):
                            if 6 <= len(fact) <= 120:
                                facts.setdefault(fact, position)
                        words = shown(event.content).split()
                        if len(words) > 12:
                            at = dice.randrange(len(words) - 5)
                            spoken.setdefault(" ".join(words[at : at + 5]), position)
                for phrase in dice.sample(sorted(spoken), min(20, len(spoken))):
                    reply = await life.ask("search", run, query=phrase, limit=3)
                    bodies = [await body(life, run, hit["position"]) for hit in reply["hits"]]
                    phrases += 1
                    phrases_found += any(phrase in " ".join(text.split()) for text in bodies)
                for fact in dice.sample(sorted(facts), min(40, len(facts))):
                    reply = await life.ask("search", run, query=fact, limit=3)
                    bodies = [await body(life, run, hit["position"]) for hit in reply["hits"]]
                    asked += 1
                    hit = any(fact in text for text in bodies)
                    found += hit
                    shown_facts += any(fact in item["snippet"] for item in reply["hits"])
                    if not hit:
                        missed.append(f"{name}: {fact}")
    print(
        f"\nexact facts: {found} of {asked} in the first three, {shown_facts} shown by a snippet; {missed[:5]}"
    )
    print(f"phrases of five words: {phrases_found} of {phrases} in the first three")
    assert phrases_found >= 0.95 * phrases
    assert found >= 0.95 * asked
    assert shown_facts >= 0.95 * asked


async def body(life: Life, run: str, position: int) -> str:
    entry = await life.store.entry(TENANT, LANE, run, position=position)
    assert entry is not None
    event = decode_event(entry.body)
    return shown(event.content) if isinstance(event, (Message, ToolReturned)) else entry.body.decode()
