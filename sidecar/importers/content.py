"""Content of messages and results: provider blocks to parts, and the bound on an event's size.

Pictures and other binary payloads never enter an event: their kind and size do. Encrypted reasoning becomes a
part without text, since its tokens are unknown.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

EVENT_BYTES = 900_000
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?[^,]{0,200},")
_TEXT_TYPES = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text"})
_IMAGE_TYPES = frozenset({"image", "input_image", "image_url"})
_HIDDEN_TYPES = frozenset({"redacted_thinking", "encrypted_content"})


def part(block: Any) -> dict[str, Any] | None:
    """One content block of Claude or OpenAI form as a part; None when it holds nothing."""
    if isinstance(block, str):
        return {"kind": "text", "text": block} if block else None
    if not isinstance(block, dict):
        return None
    kind = str(block.get("type"))
    if kind in _TEXT_TYPES:
        text = block.get("text")
        return {"kind": "text", "text": text} if isinstance(text, str) and text else None
    if kind == "thinking":
        text = block.get("thinking")
        told = isinstance(text, str) and text
        return {"kind": "reasoning", "text": text} if told else {"kind": "reasoning"}
    if kind in _HIDDEN_TYPES:
        return {"kind": "reasoning"}
    if kind in _IMAGE_TYPES:
        return _image(block)
    return {"kind": "data", "value": without_payloads(block)}


def parts(content: Any) -> list[dict[str, Any]]:
    """All parts of a content value: a text, one block, or a list of blocks; anything else gives none."""
    blocks = content if isinstance(content, list) else [content]
    return [made for made in map(part, blocks) if made is not None]


def result_content(content: Any) -> str | list[dict[str, Any]]:
    """A tool result's content: a text stays a text, blocks become parts, nothing is the empty text."""
    return content if isinstance(content, str) else parts(content) or ""


def plain_text(content: Any) -> str:
    """The text of a content value, its blocks joined by line ends."""
    return "\n".join(made["text"] for made in parts(content) if made["kind"] == "text")


def without_payloads(value: Any) -> Any:
    """The value with binary payloads (base64 sources, data URLs) replaced by a note of their size."""
    if isinstance(value, str):
        return f"[{len(value)} characters of data left out]" if _DATA_URL.match(value) else value
    if isinstance(value, list):
        return [without_payloads(item) for item in value]
    if isinstance(value, dict):
        opaque = {"encrypted_content", "signature"}
        if value.get("type") in ("base64", "image"):
            opaque.add("data")
        return {
            key: f"[{len(item)} characters of data left out]"
            if key in opaque and isinstance(item, str)
            else without_payloads(item)
            for key, item in value.items()
        }
    return value


def _image(block: dict[str, Any]) -> dict[str, Any] | None:
    source = block.get("source")
    if isinstance(source, dict):
        media_type = source.get("media_type")
    else:
        url = block.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
        if not isinstance(url, str) and not isinstance(block.get("data"), str):
            return None
        found = _DATA_URL.match(url) if isinstance(url, str) else None
        media_type = found.group(1) if found else block.get("mimeType")
    known = isinstance(media_type, str) and re.fullmatch(r"image/[\w.+-]{1,60}", media_type)
    return {"kind": "image", "media_type": media_type if known else "image/*"}


def bounded(event: dict[str, Any]) -> dict[str, Any]:
    """The event, or if its JSON is over 900,000 bytes a copy with long texts cut and `truncated` set."""
    if _size(event) <= EVENT_BYTES:
        return event
    limit = 400_000
    while limit >= 1_000:
        short: dict[str, Any] = {key: _cut(value, limit) for key, value in event.items()}
        short["truncated"] = True
        if _size(short) <= EVENT_BYTES:
            return short
        limit //= 2
    short = dict(event, truncated=True)
    for field in ("content", "arguments", "plan"):
        if field in short:
            whole = msgspec.json.encode(short[field]).decode()
            note = f"{whole[:200_000]}\n[{len(whole) - 200_000} characters of JSON left out]"
            short[field] = note if field != "plan" else short[field][:200]
    return short


def _cut(value: Any, limit: int) -> Any:
    if isinstance(value, str) and len(value) > limit:
        return f"{value[:limit]}\n[{len(value) - limit} characters left out]"
    if isinstance(value, list):
        return [_cut(item, limit) for item in value]
    if isinstance(value, dict):
        return {key: _cut(item, limit) for key, item in value.items()}
    return value


def _size(event: dict[str, Any]) -> int:
    return len(msgspec.json.encode(event))
