"""Original evidence for an agent: ``fetch`` by ref or position, ``search`` by words.

What is asked for is named under the lane's lock, from memory; everything is read after that, from the store,
in bounded pieces and checked against its digest. It changes nothing but the search index.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final, Literal

import anyio
import anyio.to_thread
import msgspec
from msgspec import UNSET, Struct

from protocol import asks
from protocol.codec import digest_bytes, encode
from protocol.errors import AskRefused
from protocol.events import EVENT_TYPES
from sidecar.core import evidence
from sidecar.core.evidence import Wanted
from sidecar.core.paging import Cursor, question, read_cursor, write_cursor
from sidecar.core.tokens import value_tokens
from sidecar.desk import Desk
from sidecar.indexing import Indexing, search_rows
from sidecar.large_contents import LargeContents
from sidecar.lookup import READ_MESSAGES, Found, Lookup, Page, about
from storage.evidence import StoredMessage
from storage.records import SearchRow

MAX_REFS: Final = 1_000
MAX_QUERY_CHARS: Final = 10_000
MAX_HITS: Final = 100
DEFAULT_HITS: Final = 10
_ENVELOPE_BYTES: Final = 8_192
"""Kept free of a reply for everything that is not evidence."""
_UNINDEXED: Final = 200
"""So many messages are searched as they are; if more are not indexed, that is done first."""
_INDEX_SECONDS: Final = 1.5
_BESIDE: Final = 2_000
_BESIDE_BYTES: Final = 8 << 20


class _Span(Struct):
    """Positions ``first`` to ``last`` around the thing itself at ``focus`` (0: there is none)."""

    first: int
    last: int
    focus: int


class Retrieval:
    """One lane's evidence. Without ``large`` a content that is kept apart is shown as its message has it."""

    def __init__(self, desk: Desk, indexing: Indexing, large: LargeContents | None = None) -> None:
        self._desk = desk
        self._indexing = indexing
        self._lookup = Lookup(desk)
        self._large = large

    # --- fetch --------------------------------------------------------------------------------------------

    async def fetch(self, run: str, request: asks.AskFetch) -> bytes:
        """The reply to ``fetch``. Raises ``AskRefused``, ``StorageError``."""
        desk = self._desk
        bound = question(desk.tenant, desk.lane, run, request)
        cursor = Cursor()
        if request.cursor is not None:
            try:
                cursor = read_cursor(request.cursor, bound)
            except ValueError as error:
                raise AskRefused("invalid_request", f"cursor: {error}") from error
        things, newest = await self._asked(run, request)
        newest = min(newest, cursor.newest) if request.cursor is not None else newest
        cursor = msgspec.structs.replace(cursor, newest=newest)
        if cursor.index > len(things):
            raise AskRefused("invalid_request", "cursor: not of this question")
        room = desk.max_payload - _ENVELOPE_BYTES
        if request.max_tokens is not None:
            room = min(room, request.max_tokens * 4)
        page = Page(room)
        following = await self._fill(page, run, request, things, cursor)
        for item in page.items:
            desk.metrics.retrieved("fetch", item.status)
        return encode(
            asks.FetchReply(
                epoch=desk.voice.epoch,
                items=tuple(page.items),
                next=UNSET if following is None else write_cursor(following, bound),
                truncated=following is not None,
            )
        )

    async def _asked(self, run: str, request: asks.AskFetch) -> tuple[list[Wanted], int]:
        """What the question names, and the run's newest position."""
        desk = self._desk
        if request.refs is not None and len(request.refs) > MAX_REFS:
            raise AskRefused(
                "invalid_request", f"{len(request.refs)} refs; at most {MAX_REFS} in one question"
            )
        if request.from_ is not None and request.through is not None and request.through < request.from_:
            raise AskRefused("invalid_request", "through lies before from")
        async with desk.lock:
            await desk.runs.load([run])
            ledger = desk.runs.ledgers.get(run)
            if ledger is not None:
                newest = ledger.head.position
                if request.refs is None:
                    return self._range(run, request, newest), newest
                try:
                    return (
                        evidence.wanted(desk.runs.ledgers, run, request.refs, request.of_run),
                        newest,
                    )
                except ValueError as error:
                    raise AskRefused("invalid_request", str(error)) from error
        return await self._forgotten(run, request)

    def _range(self, run: str, request: asks.AskFetch, newest: int) -> list[Wanted]:
        assert request.from_ is not None
        name = f"pos:{request.from_}"
        if request.of_run not in (None, run):
            # Grants name things, never a stretch of another run.
            name = f"run:{request.of_run}/{name}"
            return [Wanted(ref=name, run=str(request.of_run), place="none", status="out_of_scope")]
        if request.from_ > newest:
            return [Wanted(ref=name, run=run, place="none")]
        return [Wanted(ref=name, run=run, place="position", position=request.from_)]

    async def _forgotten(self, run: str, request: asks.AskFetch) -> tuple[list[Wanted], int]:
        """A run without a ledger: the heads of a forgotten one still tell what was there, or its tombstone."""
        newest = await self._lookup.newest(run)
        if newest is None:
            raise AskRefused("run_unknown", f"no message of run {run} was read in this lane")
        heads = newest > 0
        if not heads:
            newest = await self._lookup.buried(run)
        if request.refs is None:
            return self._range(run, request, newest), newest
        try:
            things = evidence.forgotten(run, request.refs, newest, request.of_run, heads=heads)
            return things, newest
        except ValueError as error:
            raise AskRefused("invalid_request", str(error)) from error

    async def _fill(
        self,
        page: Page,
        run: str,
        request: asks.AskFetch,
        things: Sequence[Wanted],
        cursor: Cursor,
    ) -> Cursor | None:
        """Put items on the page from the cursor on; where the next page begins, None at the end."""
        at, offset, check = cursor.at, cursor.offset, cursor.check
        for index in range(cursor.index, len(things)):
            async with aclosing(self._thing(run, request, things[index], cursor.newest, at)) as found:
                async for place, item in found:
                    stopped = await page.take(item, offset, check)
                    if stopped is not None:
                        return Cursor(index, place, stopped[0], cursor.newest, stopped[1])
                    offset, check = 0, ""
            at = offset = 0
        return None

    async def _thing(
        self, run: str, request: asks.AskFetch, thing: Wanted, newest: int, start: int
    ) -> AsyncGenerator[tuple[int, Found], None]:
        """The thing itself and, in the asker's own run, the messages around it, from position ``start`` on."""
        thing, found = await self._lookup.position_of(thing)
        if found is not None:
            yield 0, found
            return
        span = _Span(thing.position, thing.position, thing.position)
        if request.refs is None:
            last = min(newest, request.through or newest)
            span = _Span(thing.position - request.before, last + request.after_events, 0)
        elif thing.run == run:
            span = _Span(
                thing.position - request.before, thing.position + request.after_events, thing.position
            )
        first, last = max(1, span.first, start), max(min(newest, span.last), span.focus)
        while first <= last:
            messages = await self._lookup.read(thing.run, first - 1, last)
            for message in messages:
                for missing in range(first, message.entry.position):
                    yield missing, self._gone(thing, missing, span.focus)
                first = message.entry.position + 1
                yield (
                    message.entry.position,
                    await self._whole(thing.run, message, self._item(thing, message, span.focus)),
                )
            if not messages:
                for missing in range(first, last + 1):
                    yield missing, self._gone(thing, missing, span.focus)
                return

    def _gone(self, thing: Wanted, position: int, focus: int) -> Found:
        ref = thing.ref if position == focus else f"pos:{position}"
        record = thing.record if position == focus else None
        return Found(asks.FetchItem(ref=ref, status="gone", position=position), record=record)

    def _item(self, thing: Wanted, message: StoredMessage, focus: int) -> Found:
        entry = message.entry
        its = entry.position == focus
        ref = thing.ref if its else f"pos:{entry.position}"
        record = thing.record if its else None
        if not entry.body:
            return self._gone(thing, entry.position, focus)
        if not message.sound:
            head = asks.FetchItem(ref=ref, status="digest_mismatch", position=entry.position)
            return Found(head, record=record)
        if its and thing.item and not about(message, thing.item):
            # What is granted is the item, not all that was said with it.
            return Found(asks.FetchItem(ref=ref, status="found"), record=record)
        status: Literal["redacted", "found"] = "redacted" if entry.redacted else "found"
        head = asks.FetchItem(
            ref=ref, status=status, position=entry.position, digest=digest_bytes(entry.body)
        )
        return Found(head, entry.body, record)

    async def _whole(self, run: str, message: StoredMessage, item: Found) -> Found:
        """The item with the whole of a content that is kept apart."""
        if item.event is None or self._large is None:
            return item
        whole = await self._large.whole(run, message)
        if whole is None:
            return item
        status = "redacted" if whole.status == "found" and message.entry.redacted else whole.status
        head = msgspec.structs.replace(item.head, status=status)
        return Found(head, whole.event, item.record, whole.content)

    # --- search -------------------------------------------------------------------------------------------

    async def search(self, run: str, request: asks.AskSearch) -> bytes:
        """The reply to ``search``. Raises ``AskRefused``, ``StorageError``."""
        desk = self._desk
        _check(request)
        limit = min(request.limit or DEFAULT_HITS, MAX_HITS)
        foreign = request.of_run not in (None, run)
        async with desk.lock:
            await desk.runs.load([run])
            ledger = desk.runs.ledgers.get(run)
            if ledger is None:
                raise AskRefused("run_unknown", f"no message of run {run} was read in this lane")
            newest = ledger.head.position
            things = evidence.readable(desk.runs.ledgers, run, str(request.of_run)) if foreign else []
        if foreign and not things:
            desk.metrics.retrieved("search", "out_of_scope")
            return encode(
                asks.SearchReply(epoch=desk.voice.epoch, hits=(), truncated=False, status="out_of_scope")
            )
        if foreign:
            beside, cut = await self._granted(things), len(things) > MAX_REFS
        else:
            beside, cut = await self._beside(run, newest)
        found = await desk.store.search(
            desk.tenant,
            desk.lane,
            run,
            request.query,
            limit=limit,
            types=request.types,
            first=request.from_ or 0,
            through=request.through,
            beside=beside,
            indexed=not foreign,
        )
        hits: list[asks.SearchHit] = []
        left = request.max_tokens
        for hit in found.hits:
            told = asks.SearchHit(
                position=hit.position,
                event_id=hit.event_id,
                type=hit.type,
                snippet=hit.snippet,
                score=hit.score,
            )
            if left is not None:
                left -= value_tokens(told)
                if left < 0:
                    cut = True
                    break
            hits.append(told)
        desk.metrics.retrieved("search", "found" if hits else "not_found", max(1, len(hits)))
        return encode(
            asks.SearchReply(epoch=desk.voice.epoch, hits=tuple(hits), truncated=cut or found.truncated)
        )

    async def _beside(self, run: str, newest: int) -> tuple[list[SearchRow], bool]:
        """Rows of what is not indexed, newest kept; whether some of it was too much."""
        desk = self._desk
        indexed = await desk.store.searchable_through(desk.tenant, desk.lane, run)
        if newest - indexed > _UNINDEXED:
            with anyio.move_on_after(_INDEX_SECONDS):
                await self._indexing.cover(run, newest)
            indexed = await desk.store.searchable_through(desk.tenant, desk.lane, run)
        first = max(indexed, newest - _BESIDE)
        cut = first > max(indexed, 0)
        rows: list[SearchRow] = []
        size, last = 0, newest
        while first < last and size < _BESIDE_BYTES:
            low = max(first, last - READ_MESSAGES)
            part: list[SearchRow] = []
            at = low
            while at < last:
                messages = await self._lookup.read(run, at, last)
                if not messages:
                    break
                part += await anyio.to_thread.run_sync(search_rows, run, messages)
                at = messages[-1].entry.position
            size += sum(len(row.text) for row in part)
            rows += part
            last = low
        return rows, cut or first < last

    async def _granted(self, things: Sequence[Wanted]) -> list[SearchRow]:
        """Rows of exactly what was granted."""
        rows: list[SearchRow] = []
        for thing in things[:MAX_REFS]:
            placed, item = await self._lookup.position_of(thing)
            if item is not None or placed.position < 1:
                continue
            messages = await self._lookup.read(placed.run, placed.position - 1, placed.position)
            told = [message for message in messages if not thing.item or about(message, thing.item)]
            rows += await anyio.to_thread.run_sync(search_rows, placed.run, told)
        return rows


def _check(request: asks.AskSearch) -> None:
    if not request.query.strip():
        raise AskRefused("invalid_request", "query is empty")
    if len(request.query) > MAX_QUERY_CHARS:
        raise AskRefused("invalid_request", f"query is longer than {MAX_QUERY_CHARS} characters")
    if request.from_ is not None and request.through is not None and request.through < request.from_:
        raise AskRefused("invalid_request", "through lies before from")
    for name in request.types or ():
        if name not in EVENT_TYPES:
            raise AskRefused("invalid_request", f"unknown type {name[:80]!a}")
