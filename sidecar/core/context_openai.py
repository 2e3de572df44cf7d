"""A conversation as messages of OpenAI's Chat Completions API.

An assistant message with calls is followed at once by one ``tool`` message for each of them.
"""

from __future__ import annotations

from typing import Any, Final

from protocol.codec import encode
from sidecar.core.context import Conversation, Names, Turn

LONGEST_ID: Final = 40
LONGEST_TOOL: Final = 64


def messages(conversation: Conversation) -> list[dict[str, Any]]:
    """The message list."""
    names = Names(LONGEST_ID, LONGEST_TOOL)
    found: list[dict[str, Any]] = [{"role": turn.role, "content": turn.text} for turn in conversation.system]
    for turn in conversation.turns:
        found += _turn(turn, names, conversation.open_calls)
    return found


def _turn(turn: Turn, names: Names, open_calls: frozenset[str]) -> list[dict[str, Any]]:
    if not turn.calls:
        return [{"role": turn.role, "content": turn.text}] if turn.text.strip() else []
    ids = [names.call(call) for call in turn.calls]
    said: dict[str, Any] = {
        "role": "assistant",
        "content": turn.text if turn.text.strip() else None,
        "tool_calls": [
            {
                "id": name,
                "type": "function",
                "function": {"name": names.tool(call.tool), "arguments": encode(call.object()).decode()},
            }
            for name, call in zip(ids, turn.calls, strict=True)
        ],
    }
    results = [
        {"role": "tool", "tool_call_id": name, "content": call.result(open_calls)}
        for name, call in zip(ids, turn.calls, strict=True)
    ]
    return [said, *results]
