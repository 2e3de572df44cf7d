"""A conversation as ``messages`` and ``system`` of Anthropic's Messages API.

Roles alternate and the first is the user's: turns of one role become one message. Each ``tool_use`` has its
``tool_result`` in the very next message, before anything else there. No text block is blank. Thinking is left
out, since it is only taken back with its signature; a request that continues a tool call therefore has to be
made without extended thinking.
"""

from __future__ import annotations

from typing import Any, Final

from sidecar.core.context import Conversation, Names, Turn

LONGEST_ID: Final = 64
LONGEST_TOOL: Final = 128


def messages(conversation: Conversation) -> tuple[list[dict[str, Any]], str]:
    """The message list, and all system texts in their order as one."""
    names = Names(LONGEST_ID, LONGEST_TOOL)
    system = [turn.text for turn in conversation.system]
    found: list[dict[str, Any]] = []
    for turn in conversation.turns:
        if turn.role in ("system", "developer"):
            if turn.text.strip():
                system.append(turn.text)
            continue
        text = [{"type": "text", "text": turn.text}] if turn.text.strip() else []
        if not turn.calls:
            _add(found, turn.role, text)
            continue
        _add_calls(found, turn, text, names, conversation.open_calls)
    if found[-1]["role"] == "assistant":
        # The last word of an assistant may not end in white space.
        last = found[-1]["content"][-1]
        last["text"] = last["text"].rstrip()
    return found, "\n\n".join(system)


def _add_calls(
    found: list[dict[str, Any]],
    turn: Turn,
    text: list[dict[str, Any]],
    names: Names,
    open_calls: frozenset[str],
) -> None:
    ids = [names.call(call) for call in turn.calls]
    uses = [
        {"type": "tool_use", "id": name, "name": names.tool(call.tool), "input": call.object()}
        for name, call in zip(ids, turn.calls, strict=True)
    ]
    _add(found, "assistant", [*text, *uses])
    results: list[dict[str, Any]] = []
    for name, call in zip(ids, turn.calls, strict=True):
        result: dict[str, Any] = {"type": "tool_result", "tool_use_id": name}
        content = call.result(open_calls)
        if content.strip():
            result["content"] = content
        if call.failed:
            result["is_error"] = True
        results.append(result)
    _add(found, "user", results)


def _add(found: list[dict[str, Any]], role: str, blocks: list[dict[str, Any]]) -> None:
    """Blocks at the end of the newest message, if it is of that role, else as a new one."""
    if not blocks:
        return
    if found and found[-1]["role"] == role:
        found[-1]["content"] += blocks
    else:
        found.append({"role": role, "content": blocks})
