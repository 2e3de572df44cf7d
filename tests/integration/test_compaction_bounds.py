"""A compaction holds one page of history at a time, however much there is to cover, and so does a rebuilt layer."""

from __future__ import annotations

import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from protocol.codec import decode_state, digest
from protocol.state import RunState
from protocol.summary import SummarizeReply, SummarizeRequest
from sidecar import ranges
from sidecar.summarizers.digest import DigestSummarizer
from storage.evidence import StoredMessage
from support.bench import Bench, bench, event, started

pytestmark = pytest.mark.anyio

RUN = "long-watch"
BATCH = 250
WINDOW = 40_000
"""Of the summariser, in tokens: far less than the range, which goes in parts."""
LONGEST_SECONDS = 60.0


class Narrow(DigestSummarizer):
    """The deterministic summariser with a small window; counts what it is shown."""

    def __init__(self) -> None:
        self.requests = 0
        self.shown = 0

    @property
    def window_tokens(self) -> int:
        return WINDOW

    async def summarize(self, request: SummarizeRequest) -> SummarizeReply:
        self.requests += 1
        self.shown += len(request.exchanges)
        return await super().summarize(request)


class Live(bytes):
    """A stored body that is counted as long as it is in memory."""

    now = 0
    most = 0

    def __new__(cls, body: bytes) -> Live:
        made = super().__new__(cls, body)
        Live.now += 1
        Live.most = max(Live.most, Live.now)
        return made

    def __del__(self) -> None:
        Live.now -= 1


def turns(first: int, count: int) -> list[dict[str, Any]]:
    """So many messages from number ``first`` on: an assistant's message, its call and the result, in turn."""
    told = []
    for number in range(first, first + count):
        turn, kind = divmod(number, 3)
        match kind:
            case 0:
                fields: dict[str, Any] = {
                    "type": "message",
                    "role": "assistant",
                    "content": f"Step {turn} is next.",
                }
            case 1:
                fields = {"type": "tool.called", "call_id": f"c-{turn}", "tool": "read"}
                fields |= {"arguments": {"path": f"/src/part_{turn}.py"}}
            case _:
                fields = {"type": "tool.returned", "call_id": f"c-{turn}", "status": "ok"}
                fields |= {"content": f"part {turn} " + "stern light " * 60}
        told.append(event(fields.pop("type"), f"e-{number}", **fields))
    return told


async def told(made: Bench, first: int, count: int) -> None:
    for start in range(first, first + count, BATCH):
        await made.tell(RUN, *turns(start, min(BATCH, first + count - start)))


async def compacted(made: Bench) -> None:
    """Ask for a compaction and wait until its task is done."""
    before = len(await made.store.receipts("acme", "main", RUN))
    answer = await made.ask(RUN, "compact", reason="room is wanted")
    assert answer["state"] == "started", answer

    async def ended() -> bool:
        done = len(await made.store.receipts("acme", "main", RUN)) > before
        return done and RUN not in made.compactor.running

    with anyio.fail_after(LONGEST_SECONDS):
        while not await ended():
            await anyio.sleep(0.01)
    receipt = (await made.store.receipts("acme", "main", RUN))[-1]
    assert receipt.outcome == "applied"


async def peak(folder: Path, messages: int) -> tuple[int, Narrow]:
    """Bytes that compacting so many messages took at most."""
    narrow = Narrow()
    async with bench(folder, summarizers=(narrow, None)) as made:
        await made.tell(RUN, started(model={"name": "m", "context_window": 4_000_000_000}))
        await told(made, 0, messages)
        tracemalloc.start()
        try:
            await compacted(made)
            return tracemalloc.get_traced_memory()[1], narrow
        finally:
            tracemalloc.stop()


async def test_memory_grows_far_less_than_what_is_covered(tmp_path: Path) -> None:
    small, few = await peak(tmp_path / "small", 1_500)
    large, many = await peak(tmp_path / "large", 6_000)
    assert many.requests > 3 * few.requests
    assert many.shown > 5_500
    assert large < 2 * small, (small, large)


@pytest.mark.parametrize("rebuild", [False, True])
async def test_no_more_than_one_page_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rebuild: bool
) -> None:
    async with bench(
        tmp_path,
        summarizers=(Narrow(), None),
        SUMMARIZER__REBUILD_EVERY="2" if rebuild else "0",
    ) as made:
        await made.tell(RUN, started(model={"name": "m", "context_window": 4_000_000_000}))
        await told(made, 0, 1_998)
        if rebuild:
            await compacted(made)
            await made.tell(RUN, event("context.replaced", "e-taken", by="agent"))
            await told(made, 1_998, 600)
        monkeypatch.setattr(made.desk, "store", _Counted(made.store))
        monkeypatch.setattr(Live, "now", 0)
        monkeypatch.setattr(Live, "most", 0)
        await compacted(made)
    assert Live.most > 0
    # The page that is read, and the one before it until the first is there.
    assert Live.most <= 3 * ranges.PAGE_MESSAGES


def _alive(message: Any) -> Any:
    if isinstance(message, StoredMessage):
        return StoredMessage(_alive(message.entry), message.sound)
    return msgspec.structs.replace(message, body=Live(message.body))


class _Counted:
    """The store, whose bodies are counted as long as they live."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return self._counting(found) if name in ("tail", "evidence") else found

    def _counting(self, read: Callable[..., Awaitable[list[Any]]]) -> Callable[..., Awaitable[list[Any]]]:
        async def counted(*args: Any, **fields: Any) -> list[Any]:
            return [_alive(message) for message in await read(*args, **fields)]

        return counted


@pytest.mark.parametrize("meanwhile", [False, True])
async def test_a_state_says_the_digest_of_the_ledger_it_holds(tmp_path: Path, meanwhile: bool) -> None:
    class Interrupted(Narrow):
        async def summarize(self, request: SummarizeRequest) -> SummarizeReply:
            if meanwhile and not self.requests:
                decided = {"decision_id": "d-1", "summary": "the lock opens at noon"}
                await made.tell(RUN, event("decision.made", "e-meanwhile", **decided))
            return await super().summarize(request)

    async with bench(tmp_path, summarizers=(Interrupted(), None)) as made:
        await made.tell(RUN, started(model={"name": "m", "context_window": 4_000_000_000}))
        await told(made, 0, 600)
        await compacted(made)
        rows = await made.store.outbox("acme", "main", limit=1_000)
        state = decode_state([row.payload for row in rows if row.stream == "state"][-1])
        assert isinstance(state, RunState)
        assert state.ledger_digest == digest(msgspec.json.decode(state.ledger))
        assert ("the lock opens at noon" in bytes(state.ledger).decode()) is meanwhile
