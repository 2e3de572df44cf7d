"""Which tool results become references before any summary is made.

Nothing is covered by it and no exchange is torn: only the content of old, large results leaves the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from protocol.codec import digest
from protocol.events import ToolReturned
from sidecar.core.boundary import recent_from
from sidecar.core.excerpt import content_text, error_line, first_sentence
from sidecar.core.exchanges import TailItem

REFERENCE_TOKENS: Final = 60
"""About what a reference costs in place of a cleared result."""


class Cleared(Struct, frozen=True, kw_only=True):
    """A tool result that a reference takes the place of. ``note``: its conclusion or first error line."""

    call_id: str
    event_id: str
    position: int
    status: str
    note: str
    digest: str
    tokens: int


class Trimming(Struct, frozen=True, kw_only=True):
    """Results up to ``through`` that are cleared, the new ones only, and what that saves (estimate)."""

    through: int
    cleared: tuple[Cleared, ...]
    saved_tokens: int


def trim_plan(
    items: Sequence[TailItem],
    *,
    keep_recent: int,
    result_tokens: int,
    trimmed_through: int,
    inside: bool = False,
) -> Trimming:
    """Results older than the recent part and over ``result_tokens`` become references; the mark only rises.

    Positions up to ``trimmed_through`` were cleared before. Interim results are cleared like final ones.
    ``inside``: also within the last exchange, for when nothing else is left to win.
    """
    through = max(trimmed_through, recent_from(items, keep_recent, inside=inside) - 1)
    cleared: list[Cleared] = []
    saved = 0
    for item in items:
        event = item.event
        if item.position > through:
            break
        if not isinstance(event, ToolReturned):
            continue
        if item.position > trimmed_through and item.tokens > max(result_tokens, REFERENCE_TOKENS):
            cleared.append(clear(item, event))
            saved += item.tokens - REFERENCE_TOKENS
    return Trimming(through=through, cleared=tuple(cleared), saved_tokens=saved)


def clear(item: TailItem, event: ToolReturned) -> Cleared:
    """The reference for one result."""
    if event.conclusion:
        note = first_sentence(event.conclusion)
    elif event.status == "ok":
        note = ""
    else:
        note = error_line(content_text(event.content))
    return Cleared(
        call_id=event.call_id,
        event_id=event.id,
        position=item.position,
        status=event.status,
        note=note,
        digest=digest(event.content),
        tokens=item.tokens,
    )
