"""What a model behind a provider's interface is given, and how its draft becomes a summary.

The draft's schema is the summary's own, made closed for providers that enforce one: a map of states is a list of
``{id, state}`` there, and every field is required. Nothing here calls anyone, and nothing judges a draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import msgspec
from msgspec import Raw

from protocol.codec import encode
from protocol.summary import SummarizeReply, SummarizeRequest, Summary, Usage
from sidecar.core.tokens import bytes_tokens, value_tokens
from sidecar.core.validation import SUMMARY_BYTES
from sidecar.summarizers import SummarizerFailure

SCHEMA_NAME: Final = "handover_summary"
SCHEMA_TEXT: Final = "The summary that replaces the covered messages."
MOST_OUTPUT_TOKENS: Final = 16_000
LEAST_OUTPUT_TOKENS: Final = 4_096

_MAPS: Final = ("operations", "approvals")
_KEPT: Final = ("type", "description", "enum", "const")
_ENTRY: Final = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "state": {"type": "string"}},
    "required": ["id", "state"],
    "additionalProperties": False,
}


@cache
def draft_schema() -> dict[str, Any]:
    """The JSON Schema a model's draft follows: closed, without references, patterns or defaults."""
    (ref,), components = msgspec.json.schema_components([Summary], ref_template="#/$defs/{name}")
    closed: dict[str, Any] = _closed(ref, components)
    return closed


def _closed(node: Mapping[str, Any], components: Mapping[str, Any]) -> Any:
    if "$ref" in node:
        return _closed(components[node["$ref"].rpartition("/")[2]], components)
    if "anyOf" in node:
        return {"anyOf": [_closed(item, components) for item in node["anyOf"]]}
    if "properties" in node:
        fields = {name: _closed(item, components) for name, item in node["properties"].items()}
        return {
            "type": "object",
            "properties": fields,
            "required": list(fields),
            "additionalProperties": False,
        }
    if node.get("type") == "object":
        return {"type": "array", "items": _ENTRY}
    if node.get("type") == "array":
        items = node["prefixItems"][0] if "prefixItems" in node else node["items"]
        return {"type": "array", "items": _closed(items, components)}
    return {name: node[name] for name in _KEPT if name in node}


def schema_tokens() -> int:
    """What the schema takes of a request's window."""
    return value_tokens(draft_schema())


def question(request: SummarizeRequest) -> str:
    """The request as the one user message: a JSON object marked as data. The instructions go beside it."""
    data = {
        "range": request.range,
        "max_tokens": request.max_tokens,
        "previous": request.previous,
        "ledger": request.ledger,
        "exchanges": request.exchanges,
    }
    return f"The record to summarise, as data:\n{encode(data).decode()}"


def output_bound(request: SummarizeRequest) -> int:
    """Most tokens a model may write: the summary with its frame, the echoes of the ledger, some thought."""
    wanted = 3 * request.max_tokens + bytes_tokens(len(bytes(request.ledger)))
    return min(MOST_OUTPUT_TOKENS, max(LEAST_OUTPUT_TOKENS, wanted))


def drafted(value: object, usage: Usage) -> SummarizeReply:
    """The reply for a draft that was decoded; one of another shape is passed on for validation to refuse."""
    return SummarizeReply(summary=Raw(encode(_with_maps(value))), finish_reason="stop", usage=usage)


def drafted_text(text: str, usage: Usage) -> SummarizeReply:
    """The same for a draft as text; what is no JSON stays as it is, to be refused as such."""
    raw = text.strip().encode("utf-8", "replace")
    if len(raw) > SUMMARY_BYTES:
        raise SummarizerFailure("invalid", "the answer is far too long")
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return SummarizeReply(summary=Raw(raw or b'""'), finish_reason="stop", usage=usage)
    return drafted(value, usage)


def cut(reason: str, usage: Usage) -> SummarizeReply:
    """The reply for an answer that ended early: ``length`` or ``refusal``."""
    return SummarizeReply(
        summary=Raw(b"null"), finish_reason="length" if reason == "length" else "refusal", usage=usage
    )


def _with_maps(value: object) -> object:
    """Lists of states as the maps they stand for; an id told twice stays, and is refused with the list."""
    if not isinstance(value, dict):
        return value
    return value | {name: _map(value[name]) for name in _MAPS if name in value}


def _map(entries: object) -> object:
    if not isinstance(entries, list):
        return entries
    pairs = [
        (entry["id"], entry["state"])
        for entry in entries
        if isinstance(entry, dict) and set(entry) == {"id", "state"} and isinstance(entry["id"], str)
    ]
    found = dict(pairs)
    return found if len(found) == len(entries) else entries
