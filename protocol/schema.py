"""JSON Schema of every message, generated from the types that decode them.

Nothing is written by hand here but the list of messages, so the schema says only what the decoder does.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from protocol.asks import (
    ASKS,
    AskError,
    AuthorizeReply,
    CompactReply,
    ContextReply,
    FetchReply,
    SearchReply,
    StatusReply,
)
from protocol.events import EVENT_TYPES
from protocol.handoff import LaneEpoch, Notice, Packet, Receipt, Rejected
from protocol.state import RunState, RunStateReference
from protocol.summary import SummarizeError, SummarizeReply, SummarizeRequest, Summary

Area = Literal["in", "out", "ask", "reply", "summarize", "state"]

MESSAGES: Final[dict[Area, dict[str, type[msgspec.Struct]]]] = {
    "in": dict(EVENT_TYPES),
    "out": {
        "resume.packet": Packet,
        "compaction.receipt": Receipt,
        "run.notice": Notice,
        "message.rejected": Rejected,
        "lane.epoch": LaneEpoch,
    },
    "ask": {f"ask.{verb}": kind for verb, kind in ASKS.items()},
    "reply": {
        "reply.context": ContextReply,
        "reply.fetch": FetchReply,
        "reply.search": SearchReply,
        "reply.authorize": AuthorizeReply,
        "reply.compact": CompactReply,
        "reply.status": StatusReply,
        "reply.error": AskError,
    },
    "summarize": {
        "summary": Summary,
        "summarize.request": SummarizeRequest,
        "summarize.reply": SummarizeReply,
        "summarize.error": SummarizeError,
    },
    "state": {"run.state": RunState, "run.state.reference": RunStateReference},
}
"""Every message by its part of the protocol and by name. The reply to ``ask.packet`` is a packet."""


def json_schema() -> dict[str, Any]:
    """A JSON Schema (2020-12) document: the types under ``$defs``, the messages by area and name.

    ``x-messages`` maps area and name to the definition, ``anyOf`` accepts any one message. Every call gives
    the same.
    """
    kinds = [kind for area in MESSAGES.values() for kind in area.values()]
    refs, components = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    by_kind = dict(zip(kinds, refs, strict=True))
    document: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:watchkeeper:wire:v1",
        "title": "Watchkeeper wire protocol, version 1",
        "anyOf": list(refs),
        "x-messages": {
            area: {name: by_kind[kind] for name, kind in messages.items()}
            for area, messages in MESSAGES.items()
        },
        "$defs": components,
    }
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(document))
    return plain
