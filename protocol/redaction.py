"""Secrets out of texts and messages, before anything stores or shows them.

A secret becomes a mark of its kind, ``[redacted:github_token]``, which tells neither its value nor its length.
Only texts are touched: contents, arguments, goals, claims, descriptions, reasons and the like; never ids, keys,
digests, refs, or names of tools and kinds. What counts as a secret: ``protocol.detectors``. The same message
under the same rules always gives the same bytes, and a redacted message gives itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec import Struct

from protocol import detectors
from protocol.codec import decode_event, encode
from protocol.content import RedactionRules
from protocol.events import EVENT_TYPES
from protocol.identifiers import is_ref
from protocol.named_values import named_number, named_secret

_ROUNDS: Final = 4

_NAMES_AND_IDS: Final = """
    v id type at session seq run traceparent must_understand epoch
    call_id operation_id approval_id question_id constraint_id decision_id artifact_id evidence_id packet_id
    message_id event_id request_id in_reply_to supersedes replaces kept_from through from child_run parent_run
    continues refs evidence artifacts contradicts granted_refs required_artifacts payload_ref
    digest sha256 payload_digest idempotency_key media_type
    kind name version policy_version model tool tools kinds channels allowed_tools approval_kinds forbidden_kinds
    action role state status outcome verb expires_at
"""
_NO_TEXT: Final = frozenset(_NAMES_AND_IDS.split())
"""Fields that are no text, in whatever part of whatever message: ids, keys, digests, refs, times, names."""
_ANY_JSON: Final = frozenset({"arguments", "value", "labels"})
"""Fields that hold what the sender likes: every text in them is one, and their names are the sender's."""

_FIELDS: Final = {name: frozenset(cls.__struct_encode_fields__) for name, cls in EVENT_TYPES.items()}
_DECODE: Final = msgspec.json.Decoder().decode


class Redacted(Struct, frozen=True):
    """A message without its secrets, and how many of each kind there were."""

    payload: bytes
    counts: Mapping[str, int]


class Redactor:
    """Redacts under one set of rules. Values only: safe to share. See ``redactor_for``.

    Configured patterns cost a look at every text of every message; without any, an ordinary message costs
    one pass over its bytes.
    """

    def __init__(self, rules: RedactionRules) -> None:
        self._enabled = rules.enabled
        self._allowed = frozenset(text.encode() for text in rules.allow)
        patterns = []
        for given in rules.patterns:
            # What came by the stream was refused where it was configured; here it must not stop the fold.
            try:
                patterns.append(detectors.compiled(given.name, given.regex))
            except ValueError:
                continue
        self._patterns = tuple(patterns)

    def text(self, text: str) -> str:
        """The text with a mark in place of every secret. Idempotent."""
        return self._text(text, detectors.EVERY, Counter()) if self._enabled else text

    def utf8(self, text: bytes) -> bytes:
        """The same of a text in UTF-8; the same object where it holds none. A configured pattern may leave
        what is no UTF-8."""
        return self._bytes(text, detectors.EVERY, Counter()) if self._enabled else text

    def message(self, payload: bytes, hints: tuple[int, ...] | None = None) -> Redacted | None:
        """A message of ``wk.v1.in`` (JSON that decodes as an event) without its secrets; None: it holds none.

        ``hints``: what ``detectors.hinted`` says of it, where that is known.

        The rest of the message stays as it was sent: fields, their order, unknown ones too; white space and
        the spelling of numbers and escapes need not, and of a field given twice the last stays.
        """
        if not self._enabled:
            return None
        numbers = detectors.hinted(payload) if hints is None else hints
        if not numbers and not self._patterns:
            return None
        try:
            value = _DECODE(payload)
        except msgspec.DecodeError:
            # Only a field nobody knows can hold what the event's own decoder did not mind; it goes.
            value = _DECODE(encode(decode_event(payload)))
        counts: Counter[str] = Counter()
        known = _FIELDS.get(value.get("type"), frozenset())
        walk = _Walk(lambda text: self._text(text, numbers, counts), self._named(counts))
        for name, inner in value.items():
            if name not in known and name != "type":
                value[name] = walk.anything(inner, name)
            elif name not in _NO_TEXT or isinstance(inner, dict):
                value[name] = walk.field(name, inner)
        return Redacted(encode(value), counts) if counts else None

    def _text(self, text: str, numbers: tuple[int, ...], counts: Counter[str]) -> str:
        raw = text.encode(errors="replace")
        shown = self._bytes(raw, numbers, counts)
        return text if shown is raw else shown.decode(errors="replace")

    def _bytes(self, raw: bytes, numbers: tuple[int, ...], counts: Counter[str]) -> bytes:
        for _ in range(_ROUNDS):
            found = detectors.find(raw, numbers, self._patterns)
            if self._allowed:
                found = [item for item in found if raw[item.start : item.end] not in self._allowed]
            if not found:
                break
            pieces = []
            at = 0
            for item in found:
                pieces += [raw[at : item.start], f"[redacted:{item.kind}]".encode()]
                at = item.end
                counts[item.kind] += 1
            raw = b"".join((*pieces, raw[at:]))
        return raw

    def _named(self, counts: Counter[str]) -> Callable[[str, Any], Any]:
        """Redacts the value of a name in JSON of the sender's own shape."""

        def judge(name: str, value: Any) -> Any:
            kind = None
            if isinstance(value, str) and value.encode() not in self._allowed:
                kind = named_secret(name, value)
            elif isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1000:
                kind = named_number(name)
            if kind is None:
                return value
            counts[kind] += 1
            return f"[redacted:{kind}]"

        return judge


class _Walk:
    """Goes through the texts of one message. No recursion deeper than a message may be nested."""

    def __init__(self, text: Callable[[str], str], named: Callable[[str, Any], Any]) -> None:
        self._text = text
        self._named = named

    def field(self, name: str, value: Any) -> Any:
        """A field of the protocol."""
        if name in _ANY_JSON:
            return self.anything(value, "")
        match value:
            case str():
                return (
                    value if name in _NO_TEXT or (name == "source" and is_ref(value)) else self._text(value)
                )
            case dict():
                return {key: self.field(key, inner) for key, inner in value.items()}
            case list() if name not in _NO_TEXT:
                return [self.field(name, inner) for inner in value]
        return value

    def anything(self, value: Any, name: str) -> Any:
        """JSON of the sender's own shape, found under ``name``; its names may hold secrets as well."""
        value = self._named(name, value)
        match value:
            case str():
                return self._text(value)
            case list():
                return [self.anything(inner, name) for inner in value]
            case dict():
                # The shape {"name": "API_TOKEN", "value": "…"} of environments and headers.
                told = value.get("name", value.get("key"))
                named = told if isinstance(told, str) else ""
                found: dict[str, Any] = {}
                for key, inner in value.items():
                    shown = self._text(key)
                    while shown in found:
                        shown += "_"
                    found[shown] = self.anything(inner, named if key == "value" and named else key)
                return found
        return value


@lru_cache(maxsize=16)
def redactor_for(rules: RedactionRules) -> Redactor:
    """The redactor of these rules; made once."""
    return Redactor(rules)


DEFAULT: Final = redactor_for(RedactionRules())
"""What is redacted where nothing is configured."""


def holds_secret(text: str) -> bool:
    """Whether a credential stands in the text, by the detectors alone."""
    return bool(detectors.find(text.encode(errors="replace")))
