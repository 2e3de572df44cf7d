"""Which tool results become references before any summary is made.

Nothing is covered by it and no exchange is torn: only the content of old, large results leaves the context.
"""

from __future__ import annotations

from msgspec import Struct

from sidecar.core.boundary import recent_from
from sidecar.core.references import REFERENCE_TOKENS, Cleared, clear
from sidecar.core.tail import Clearing, Tailed, tail_of

__all__ = ["REFERENCE_TOKENS", "Cleared", "Trimming", "clear", "clearing", "trim_plan"]


class Trimming(Struct, frozen=True, kw_only=True):
    """Results up to ``through`` that are cleared, the new ones only, and what that saves (estimate)."""

    through: int
    cleared: tuple[Cleared, ...]
    saved_tokens: int


def clearing(result_tokens: int, trimmed_through: int) -> Clearing:
    """Which results may be cleared: those over ``result_tokens``, of positions that were not looked at before."""
    return Clearing(after=trimmed_through, over=max(result_tokens, REFERENCE_TOKENS))


def trim_plan(
    items: Tailed,
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
    tail = tail_of(items, clearing=clearing(result_tokens, trimmed_through))
    through = max(trimmed_through, recent_from(tail, keep_recent, inside=inside) - 1)
    cleared = tail.cleared(through)
    saved = sum(item.tokens - REFERENCE_TOKENS for item in cleared)
    return Trimming(through=through, cleared=cleared, saved_tokens=saved)
