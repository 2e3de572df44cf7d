"""The port every summariser implements: one request in, one candidate out, failures told apart.

A summariser never decides whether its candidate is accepted. The time limit, the tries of one need and
cancellation are the caller's, which bounds a request by ``window_tokens`` before it is made.
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
    def instructions(self) -> str:
        """What a model is told with every request; empty where none is asked."""

    @property
    def window_tokens(self) -> int:
        """Most tokens (bytes / 4 of its JSON) one request may hold, everything and the reply included."""

    async def summarize(self, request: SummarizeRequest) -> SummarizeReply:
        """One candidate for the request; one that was cut or refused says so in ``finish_reason``, so that its
        cost is known. Raises SummarizerFailure; cancelling leaves nothing behind."""
