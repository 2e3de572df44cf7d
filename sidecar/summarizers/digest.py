"""The deterministic summariser behind the port: runs the core's function off the event loop, asks no one."""

from __future__ import annotations

from typing import Final

import anyio.to_thread
import msgspec

from protocol.codec import encode
from protocol.handoff import Projector
from protocol.summary import SummarizeReply, SummarizeRequest
from sidecar.core import digest as core
from sidecar.summarizers import SummarizerFailure

WINDOW_TOKENS: Final = 4_000_000
"""A bound for memory and time only: there is no model whose window could be exceeded."""


class DigestSummarizer:
    """Quotes from the range; never fails for lack of a network."""

    @property
    def name(self) -> str:
        return "digest"

    @property
    def projector(self) -> Projector:
        return Projector(version=core.VERSION)

    @property
    def instructions(self) -> str:
        return ""

    @property
    def window_tokens(self) -> int:
        return WINDOW_TOKENS

    async def summarize(self, request: SummarizeRequest) -> SummarizeReply:
        """The deterministic summary. Raises SummarizerFailure ``invalid`` for a broken ledger."""
        try:
            summary = await anyio.to_thread.run_sync(core.digest, request, abandon_on_cancel=True)
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            raise SummarizerFailure(
                "invalid", f"the request's ledger is not of the packet's shape: {error}"
            ) from error
        return SummarizeReply(summary=msgspec.Raw(encode(summary)), finish_reason="stop")
