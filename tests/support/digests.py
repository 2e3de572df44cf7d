"""Requests to the deterministic summariser, and the verdict on what it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from protocol.codec import encode
from protocol.summary import Exchange, Range, SummarizeRequest, Summary
from sidecar.core.protected import protected_view
from sidecar.core.state import Head, Ledger, Task
from sidecar.core.validation import Limits, Verdict, validate


def plain_ledger(goal: str = "mend the pump") -> Ledger:
    ledger = Ledger(Head(run="r", started=True))
    ledger.put("task", Task(goal=goal))
    return ledger


def ledger_fields(ledger: Ledger) -> dict[str, Any]:
    """The protected view with the items a request carries beside it, by the packet's names."""
    view = protected_view({"r": ledger}, "r")
    view["decisions"] = [
        {"id": item.id, "summary": item.summary} for item in ledger.active["decision"].values()
    ]
    view["evidence"] = [
        {"id": item.id, "claim": item.claim, "kind": item.kind, "source": item.source}
        for item in ledger.items["evidence"].values()
    ]
    return view


def request(
    exchanges: Sequence[Exchange],
    ledger: Ledger | None = None,
    *,
    max_tokens: int = 2_000,
    previous: Summary | None = None,
) -> SummarizeRequest:
    return SummarizeRequest(
        attempt_id="at-1",
        run="r",
        range=Range(from_=1, through=max([item.position for item in exchanges], default=1)),
        previous=previous,
        ledger=msgspec.Raw(encode(ledger_fields(ledger or plain_ledger()))),
        exchanges=tuple(exchanges),
        max_tokens=max_tokens,
        instructions="",
        instructions_digest="",
    )


def judged(
    summary: Summary,
    asked: SummarizeRequest,
    resolve: Callable[[str], str | None],
    ledger: Ledger | None = None,
) -> Verdict:
    ledger = ledger or plain_ledger()
    return validate(
        summary,
        ledger=ledger,
        protected=protected_view({"r": ledger}, "r"),
        covered=asked.exchanges,
        resolve=resolve,
        previous=asked.previous,
        limits=Limits(max_tokens=asked.max_tokens),
        tokens_before=100_000,
        tokens_after=10_000,
    )
