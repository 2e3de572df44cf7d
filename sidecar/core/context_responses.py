"""A conversation as input items of OpenAI's Responses API.

Every ``function_call`` has its ``function_call_output``. Reasoning items are left out: they need the
provider's own ids or encrypted content, which no event holds.
"""

from __future__ import annotations

from typing import Any, Final

from protocol.codec import encode
from sidecar.core.context import Conversation, Names

LONGEST_ID: Final = 64
LONGEST_TOOL: Final = 64


def items(conversation: Conversation) -> list[dict[str, Any]]:
    """The input items."""
    names = Names(LONGEST_ID, LONGEST_TOOL)
    found: list[dict[str, Any]] = [{"role": turn.role, "content": turn.text} for turn in conversation.system]
    for turn in conversation.turns:
        if turn.text.strip():
            found.append({"role": turn.role, "content": turn.text})
        ids = [names.call(call) for call in turn.calls]
        found += [
            {
                "type": "function_call",
                "call_id": name,
                "name": names.tool(call.tool),
                "arguments": encode(call.object()).decode(),
            }
            for name, call in zip(ids, turn.calls, strict=True)
        ]
        found += [
            {
                "type": "function_call_output",
                "call_id": name,
                "output": call.result(conversation.open_calls),
            }
            for name, call in zip(ids, turn.calls, strict=True)
        ]
    return found
