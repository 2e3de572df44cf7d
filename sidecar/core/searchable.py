"""What of an event can be searched for: its texts as they were written, names beside them, ids at the end.

Values are flattened, so that a command, a path or a line of output stands in the text as itself and not as
escaped JSON. What no one would look for (token counts, marks of the transport) is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from protocol.content import Content, DataPart, ImagePart, ReasoningPart, TextPart
from protocol.events import Event, Message, ToolCalled, ToolReturned, UsageReported

_ENVELOPE: Final = frozenset(
    {"v", "id", "type", "at", "session", "seq", "run", "traceparent", "must_understand", "epoch"}
)
_IDS: Final = ("call_id", "message_id", "in_reply_to", "supersedes", "operation_id", "artifact_id")


def searchable(event: Event) -> str:
    """The event's text for search; ``""`` for what holds none."""
    match event:
        case UsageReported():
            return ""
        case Message():
            said = _content(event.content)
        case ToolCalled():
            said = "\n".join([event.tool, *_leaves(_decoded(event.arguments), "")])
        case ToolReturned():
            said = "\n".join([*([event.conclusion] if event.conclusion else []), _content(event.content)])
        case _:
            fields = msgspec.to_builtins(event)
            return "\n".join(
                [
                    *_leaves({name: value for name, value in fields.items() if name not in _ENVELOPE}, ""),
                    event.id,
                ]
            )
    ids = [event.id, *(name for name in (getattr(event, field, None) for field in _IDS) if name)]
    return f"{said}\n{' '.join(ids)}"


def _content(content: Content) -> str:
    if isinstance(content, str):
        return content
    pieces: list[str] = []
    for part in content:
        match part:
            case TextPart():
                pieces.append(part.text)
            case ReasoningPart():
                pieces.append(part.text or "")
            case DataPart():
                pieces.extend(_leaves(_decoded(part.value), ""))
            case ImagePart():
                pieces.append(f"image {part.media_type} {part.artifact_id or ''}")
    return "\n".join(pieces)


def _decoded(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return bytes(raw).decode("utf-8", "replace")


def _leaves(value: Any, name: str) -> Iterator[str]:
    """Every text, number and truth of a value on lines of its own, after the name it stands under."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item, name)
    elif value is not None:
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        yield f"{name}: {text}" if name else text
