"""Search rows of a run: what compaction covered is indexed off the hot path, what came since is read anew.

Idempotent and safe to stop anywhere: how far a run is indexed is stored with the rows. It holds no lock, and a
refused commit costs speed only, since whatever is not indexed is searched as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import anyio
import anyio.to_thread
import structlog

from protocol.codec import decode_event
from protocol.errors import ProtocolError
from protocol.events import ToolCalled, ToolReturned
from sidecar.core.searchable import searchable
from sidecar.desk import Desk
from storage.errors import StorageError
from storage.evidence import StoredMessage
from storage.records import SearchRow, Unit

PAGE_MESSAGES: Final = 256
PAGE_BYTES: Final = 512 * 1024
"""About what one commit of search rows holds: the writer is shared with the intake."""
_LONGEST_REST: Final = 0.25
"""Seconds after a page, before the next one is read."""
_CALL_CHARS: Final = 240
"""Of a call's words behind its result: the tool and how its arguments begin."""

log = structlog.get_logger(__name__)


class Indexing:
    """One lane's search rows."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def cover(self, run: str, through: int) -> None:
        """Index the run's messages up to a position. Storage trouble is told and left for the next time."""
        try:
            await self.catch_up(run, through)
        except StorageError as error:
            log.warning("history not indexed yet", run=run, error=str(error))

    async def catch_up(self, run: str, through: int) -> None:
        """The same; raises ``StorageError``."""
        desk = self._desk
        at = await desk.store.searchable_through(desk.tenant, desk.lane, run)
        while at < through:
            began = desk.mono()
            messages = await desk.store.evidence(
                desk.tenant,
                desk.lane,
                run,
                after=at,
                through=through,
                limit=PAGE_MESSAGES,
                max_bytes=PAGE_BYTES,
            )
            if not messages:
                return
            rows = await anyio.to_thread.run_sync(search_rows, run, messages)
            at = messages[-1].entry.position
            if not rows or rows[-1].position < at:
                # How far the index goes is told by its last row.
                last = messages[-1].entry
                rows.append(_row(run, last.position, last.event_id, last.type, ""))
            await desk.store.commit(Unit(tenant=desk.tenant, lane=desk.lane, search=tuple(rows)))
            if at < through:
                # Half of the writer's time, and of the interpreter's, is the intake's at least.
                await anyio.sleep(min(max(0.0, desk.mono() - began), _LONGEST_REST))


def search_rows(run: str, messages: Sequence[StoredMessage]) -> list[SearchRow]:
    """The rows of what can be searched for; CPU only, run it off the loop.

    A result has the words of its call behind its own, where the call is among the messages: whoever looks for
    what a command printed knows the command.
    """
    rows = []
    calls: dict[str, str] = {}
    for message in messages:
        entry = message.entry
        if not entry.body or not message.sound:
            continue
        try:
            event = decode_event(entry.body, channel=entry.channel)
        except ProtocolError:
            continue
        text = searchable(event)
        match event:
            case ToolCalled():
                calls[event.call_id] = text[:_CALL_CHARS]
            case ToolReturned() if event.call_id in calls:
                text = f"{text}\n{calls[event.call_id]}"
            case _:
                pass
        if text:
            rows.append(_row(run, entry.position, entry.event_id, entry.type, text))
    return rows


def _row(run: str, position: int, event_id: str, type_: str, text: str) -> SearchRow:
    # Behind # stands what tells messages about one item apart; the id is what stands before it.
    return SearchRow(run=run, position=position, event_id=event_id.split("#")[0], type=type_, text=text)
