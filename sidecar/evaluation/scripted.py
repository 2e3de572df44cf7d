"""A summariser that stands in for a model: prose of its own, and in turn the mistakes models make.

Deterministic, asks nobody. It is for evaluation only: whether Watchkeeper's checks hold against a careless writer.
Its good summaries are sound; every third one has one of the mistakes, which validation must refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from protocol.codec import encode
from protocol.handoff import Projector
from protocol.summary import SummarizeReply, SummarizeRequest
from sidecar.core import digest as core
from sidecar.core.excerpt import clip, plain

NAME: Final = "scripted"
_EVERY: Final = 3
_QUOTED = 3
_CHARS = 200

Fields = dict[str, Any]


def _promotes(fields: Fields) -> None:
    """Tells every open operation as done."""
    fields["operations"] = dict.fromkeys(fields["operations"], "succeeded")
    fields["narrative"] = "Everything that was started has been completed."


def _grants(fields: Fields) -> None:
    """Tells every pending approval as granted."""
    fields["approvals"] = dict.fromkeys(fields["approvals"], "granted")
    fields["objective"] += " (approved)"


def _forgets(fields: Fields) -> None:
    """Leaves open questions and operations out."""
    fields["open_questions"], fields["operations"], fields["pending_action_refs"] = [], {}, []
    fields["objective"] = "Finish the work."


def _invents(fields: Fields) -> None:
    """Claims what nothing shows."""
    fields["completed"] = [{"text": "all 9,999 checks passed in 3.75 s", "refs": []}]
    fields["observations"], fields["inferences"], fields["narrative"] = [], [], ""


MISTAKES: Final[tuple[Callable[[Fields], None], ...]] = (_promotes, _grants, _forgets, _invents)


class ScriptedSummarizer:
    """The port of a summariser; counts its requests."""

    window_tokens = 200_000
    instructions = ""

    def __init__(self) -> None:
        self._requests = 0

    @property
    def name(self) -> str:
        return NAME

    @property
    def projector(self) -> Projector:
        return Projector(version="1", model="scripted")

    async def summarize(self, request: SummarizeRequest) -> SummarizeReply:
        """A sound summary in prose, or every third time a wrong one."""
        self._requests += 1
        fields: Fields = msgspec.to_builtins(core.digest(request))
        fields["completed"], fields["observations"] = fields["completed"][-2:], fields["observations"][-4:]
        fields["narrative"] = _prose(request)
        if self._requests % _EVERY == 0:
            MISTAKES[(self._requests // _EVERY - 1) % len(MISTAKES)](fields)
        return SummarizeReply(summary=msgspec.Raw(encode(fields)), finish_reason="stop")


def _prose(request: SummarizeRequest) -> str:
    """Sentences about the range, without a figure that would need a ref."""
    said = [plain(item.text) for item in request.exchanges if item.role == "user"][-_QUOTED:]
    tools = sorted(
        {
            item.text.partition("\n")[0].split(" ")[-1]
            for item in request.exchanges
            if item.type == "tool.called"
        }
    )
    parts = ["The work went on as asked."]
    if said:
        parts.append(f"The user last said: {clip(said[-1], _CHARS)}")
    if tools:
        parts.append(f"Tools used: {clip(', '.join(tools), _CHARS)}.")
    return " ".join(parts)
