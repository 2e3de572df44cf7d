"""The reference that takes the place of a tool result which leaves the context: what it was, and how to get it back.

What is cleared, and when, is ``trimming``'s.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from protocol.codec import digest
from protocol.events import ToolReturned
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
