"""The port every summariser implements: one request in, one candidate out, failures told apart.

A summariser never decides whether its candidate is accepted. Time limits, retries and cancellation are the
caller's; its own request is bounded by ``window_tokens``.
"""

from __future__ import annotations

from typing import Final, Literal, Protocol, get_args

from protocol.handoff import Projector
from protocol.summary import SummarizeReply, SummarizeRequest

__all__ = ["FAILURE_REASONS", "FailureReason", "Summarizer", "SummarizerFailure"]

FailureReason = Literal[
    "timeout",
    "refused",
    "truncated",
    "echo",
    "invalid",
    "unavailable",
    "rate_limited",
    "interrupted",
    "storage",
]
FAILURE_REASONS: Final[frozenset[str]] = frozenset(get_args(FailureReason))


class SummarizerFailure(Exception):
    """No candidate. What now: the attempt has failed with this reason; back off, later open the breaker.

    ``detail`` is for logs and holds no content of the run.
    """

    def __init__(self, reason: FailureReason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason: FailureReason = reason
        self.detail = detail


class Summarizer(Protocol):
    """One way to make summaries."""

    @property
    def name(self) -> str:
        """Its kind, as receipts and metrics say it."""

    @property
    def projector(self) -> Projector:
        """What made a summary: version, and where a model is asked, which and with what instructions."""

    @property
    def window_tokens(self) -> int:
        """Most tokens one request may hold, everything included."""

    async def summarize(self, request: SummarizeRequest) -> SummarizeReply:
        """One candidate for the request. Raises SummarizerFailure; cancelling leaves nothing behind."""
