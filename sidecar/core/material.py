"""What a summariser is shown of a range: every message, call and result as text, tool output shortened.

The first line of a call is ``call <call id> <tool>``, of a result ``result <call id> <status>``; what follows
is the recorded text. Pure; the bound of a request is the summariser's window, never the run's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from protocol.codec import canonical, encode
from protocol.events import Event, Message, ToolCalled, ToolReturned, type_of
from protocol.summary import Exchange
from sidecar.core.excerpt import content_text, cut_note
from sidecar.core.exchanges import TailItem
from sidecar.core.tokens import bytes_tokens

RESULT_CHARS: Final = 2_000
"""Of one tool result, or the arguments of one call."""
MESSAGE_CHARS: Final = 24_000
ARGUMENT_CHARS: Final = 600
"""Of one text among a call's arguments, so that names and paths beside it survive."""
_LEAST_ITEM_TOKENS = 64
_WORD_CHARS = 240


def exchange_items(items: Sequence[TailItem]) -> tuple[Exchange, ...]:
    """The messages, calls and results among the items, in order; anything else is in the ledger's view.

    ``event_id`` is empty for a message of another channel: only ``pos:<position>`` names it.
    """
    return tuple(found for item in items if (found := _exchange(item)) is not None)


def event_text(event: Event) -> str | None:
    """The whole text of a message, call or result, as ``exchange_items`` writes it but not shortened."""
    match event:
        case Message():
            return content_text(event.content)
        case ToolCalled():
            return f"call {event.call_id} {event.tool}\n{_arguments(event)}"
        case ToolReturned():
            return f"{_result_head(event)}\n{content_text(event.content)}"
        case _:
            return None


def parts(
    items: Sequence[Exchange], window_tokens: int, *, overhead_tokens: int = 0
) -> Iterator[tuple[Exchange, ...]]:
    """Split a range so that each part fits the summariser's window; at least one part, in order, all of it.

    ``overhead_tokens``: instructions, ledger, previous summary and the reply, which share the window. Parts
    begin at a message where that costs at most a quarter of the room. One item larger than the room is cut in
    its middle. The parts are worked through in turn, each with the summary of the last one as previous; each is
    made when it is asked for.
    """
    room = part_room(window_tokens, overhead_tokens)
    first = True
    part: list[Exchange] = []
    size = 0
    for item in items:
        fitted = _fit(item, room)
        cost = item_tokens(fitted)
        if part and size + cost > room:
            rest = _from_last_message(part, room)
            yield tuple(part[: len(part) - len(rest)])
            first = False
            part = rest
            size = sum(map(item_tokens, part))
            if part and size + cost > room:
                yield tuple(part)
                part, size = [], 0
        part.append(fitted)
        size += cost
    if part or first:
        yield tuple(part)


def part_room(window_tokens: int, overhead_tokens: int) -> int:
    """Tokens of history that one request has room for."""
    return max(_LEAST_ITEM_TOKENS, window_tokens - overhead_tokens)


def item_tokens(item: Exchange) -> int:
    """What one item takes in a summariser's request: as the JSON it is sent as, the comma included."""
    return bytes_tokens(len(encode(item)) + 1)


def shorten(text: str, limit: int, ref: str) -> str:
    """Beginning and end of a text over ``limit`` characters, and between them how long it is and where."""
    if len(text) <= limit:
        return text
    note = f"\n[… {len(text)} characters in all, the whole: {ref} …]\n"
    room = max(0, limit - len(note))
    head = room * 2 // 3
    return f"{_head(text, head)}{note}{_tail(text, room - head)}"


def _head(text: str, size: int) -> str:
    """About the first ``size`` characters, ended between words where one ends near."""
    piece = text[:size]
    if size < len(text) and not text[size].isspace():
        end = max(piece.rfind(" "), piece.rfind("\n"))
        if end >= size - _WORD_CHARS:
            return piece[: max(end, 0)]
    return piece


def _tail(text: str, size: int) -> str:
    start = len(text) - size
    piece = text[start:]
    if start > 0 and not text[start - 1].isspace():
        ends = [end for end in (piece.find(" "), piece.find("\n")) if 0 <= end <= _WORD_CHARS]
        if ends:
            return piece[min(ends) :]
    return piece


def _exchange(item: TailItem) -> Exchange | None:
    event = item.event
    ref = ref_of(item)
    role: str | UnsetType = UNSET
    match event:
        case Message():
            role = event.role
            text = shorten(_told(event, ref), MESSAGE_CHARS, ref)
        case ToolCalled():
            text = f"call {event.call_id} {event.tool}\n{shorten(_short_arguments(event), RESULT_CHARS, ref)}"
        case ToolReturned():
            text = f"{_result_head(event)}\n{shorten(_told(event, ref), RESULT_CHARS, ref)}"
        case _:
            return None
    return Exchange(
        position=item.position,
        event_id=event.id if item.channel == "event" else "",
        type=type_of(event),
        role=role,
        text=text,
        tokens=item.tokens,
    )


def ref_of(item: TailItem) -> str:
    """The ref that names the item's message: ids belong to the event channel."""
    return f"event:{item.event.id}" if item.channel == "event" else f"pos:{item.position}"


def _told(event: Message | ToolReturned, ref: str) -> str:
    text = content_text(event.content)
    return text + cut_note(event, text, ref)


def _arguments(event: ToolCalled) -> str:
    try:
        return canonical(event.arguments).decode()
    except (ValueError, msgspec.DecodeError):
        return bytes(event.arguments).decode("utf-8", "replace")


def _short_arguments(event: ToolCalled) -> str:
    if len(bytes(event.arguments)) <= ARGUMENT_CHARS:
        return _arguments(event)
    try:
        return canonical(_shortened(msgspec.json.decode(event.arguments))).decode()
    except (ValueError, msgspec.DecodeError):
        return _arguments(event)


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= ARGUMENT_CHARS else f"{_head(value, ARGUMENT_CHARS)} …"
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    if isinstance(value, dict):
        return {name: _shortened(item) for name, item in value.items()}
    return value


def _result_head(event: ToolReturned) -> str:
    head = f"result {event.call_id} {event.status}"
    if event.artifact_id is not None:
        head += f" artifact:{event.artifact_id}"
    if event.conclusion:
        head += f"\nconclusion {json.dumps(event.conclusion, ensure_ascii=False)}"
    return head


def _fit(item: Exchange, room: int) -> Exchange:
    if item_tokens(item) <= room:
        return item
    ref = f"event:{item.event_id}" if item.event_id else f"pos:{item.position}"
    limit = len(item.text)
    fitted = item
    while item_tokens(fitted) > room and limit > 1:
        limit //= 2
        fitted = msgspec.structs.replace(item, text=_cut(item.text, limit, ref))
    return fitted


def _cut(text: str, limit: int, ref: str) -> str:
    short = shorten(text, limit, ref)
    return short if len(short) <= max(limit, 1) else _head(text, limit)


def _from_last_message(part: list[Exchange], room: int) -> list[Exchange]:
    """What of a full part had better begin the next one."""
    size = 0
    for index in range(len(part) - 1, 0, -1):
        size += item_tokens(part[index])
        if size * 4 > room:
            return []
        if part[index].type == "message":
            return part[index:]
    return []
