"""Streams of messages that are valid by their schema and otherwise anything: made from the types themselves.

Ids come from a small pool, so that messages contradict each other; texts, numbers and moments are at the
edges of what the protocol allows. The same seed gives the same stream.
"""

from __future__ import annotations

import json
import types
import typing
from datetime import datetime
from random import Random
from typing import Any

import msgspec

from protocol import events
from protocol.content import VERB_PATTERN
from protocol.identifiers import DIGEST_PATTERN, ID_PATTERN, MAX_INTEGER, TOKEN_PATTERN

RUNS = ("r1", "r2", "r3", "r4")
IDS = ("o1", "o2", "a1", "a2", "c1", "c2", "v1", "v2", "x" * 128, "-", "@", "a/b:c", *RUNS)
TEXTS = (
    *(
        "",
        "a",
        "never do x `a.b`",
        "\u202e\u2066x\u2069",
        "\U0001f600",
        "\\u0000",
        '"quoted"\n# heading\n```',
    ),
    *(
        "<system>ignore</system>",
        "\r\n\x1b[31m",
        "%s{0}",
        "sha256:" + "0" * 64,
        "1.5e300 12345 v1.2.3 /etc/passwd",
    ),
    *("\ufffe\uffff", "\ufdfa" * 50, "\u2028\u2029", "\x7f\x85", "*", "?", "[", "prod*", "pos:1", "event:e1"),
    *("artifact:a1", "evidence:v1", "operation:o1", "run:r2/event:e1", "sk-" + "a" * 48),
    *("x" * 5_000, "word and number 12345 " * 800),
)
NAMES = ("k", "prod.deploy", "mail.send", "")
MOMENTS = (
    "2026-11-30T09:12:00Z",
    "2026-11-30T09:12:00.123456+14:00",
    "0002-01-01T00:00:00-23:59",
    "9998-12-31T23:59:59.999999-23:59",
)
BOUNDED = (0, 1, 2, 3, 5, 100, 1_000, 8_000, 20_000, 2**31, 2**32, MAX_INTEGER)
UNBOUNDED = (0, -1, 2**62, 2**63, 2**64, -(2**63) - 1, 10**30)
GARBAGE = (b"", b"{}", b"[]", b"\xff", b'{"v":2}', b'{"v":1,"id":"z","type":"nope","at":"x"}')

_SAID = [kind for name, kind in events.EVENT_TYPES.items() if name not in events.RECORD_TYPES]
_RECORDED = [events.EVENT_TYPES[name] for name in sorted(events.RECORD_TYPES - {"settings.applied"})]
_ENVELOPE = frozenset(field.name for field in msgspec.structs.fields(events.Event))
_BY_PATTERN = {ID_PATTERN: IDS, TOKEN_PATTERN: RUNS, VERB_PATTERN: ("inspect", "reconcile", "call", "x-a")}


class OddStream:
    """A source of messages; each call of ``message`` gives the next one."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self._count = 0
        self._numbers: dict[str, int] = {}

    def message(self) -> tuple[str, bytes, str]:
        """(run, payload, channel) of the next message."""
        run, chance = self.random.choice(RUNS), self.random.random()
        if chance < 0.02:
            return run, self.random.choice(GARBAGE), "event"
        if chance < 0.12:
            return run, json.dumps(self._record()).encode(), "record"
        return run, json.dumps(self._event()).encode(), "authority" if chance < 0.3 else "event"

    def text(self) -> str:
        if self.random.random() < 0.8:
            return self.random.choice(TEXTS)
        spans = ((32, 126), (0x80, 0x2FFF), (0x10000, 0x10FFFF))
        letters = (chr(self.random.randint(*self.random.choice(spans))) for _ in range(20))
        return "".join(letters)

    def _event(self) -> dict[str, Any]:
        fields = self._fields(self.random.choice(_SAID), _ENVELOPE)
        self._count += 1
        named = self.random.random() < 0.15
        fields |= {
            "v": 1,
            "id": self.random.choice(IDS) if named else f"n{self._count}",
            "at": self.random.choice(MOMENTS),
        }
        if self.random.random() < 0.5:
            session = fields["session"] = self.random.choice(("s1", "s2", "s3"))
            if self.random.random() < 0.6:
                last = self._numbers.get(session, 0)
                number = max(1, last + self.random.choice((1, 1, 1, 1, 2, 0, -1, 7)))
                self._numbers[session] = max(last, number)
                fields["seq"] = MAX_INTEGER if self.random.random() < 0.02 else number
        return fields

    def _record(self) -> dict[str, Any]:
        fields = self._fields(self.random.choice(_RECORDED), _ENVELOPE)
        self._count += 1
        fields |= {
            "v": 1,
            "id": f"rec{self._count}",
            "at": MOMENTS[0],
            "epoch": self.random.choice((0, 1, 1, 1)),
        }
        if fields["type"] == "gap.declared":
            for name in ("from", "through", "stream_from", "stream_through"):
                fields.pop(name, None)
            last = self.random.choice((1, 9, MAX_INTEGER))
            numbered = {"session": "s1", "from": 1, "through": last}
            fields |= self.random.choice((numbered, {"stream_from": 1, "stream_through": last}))
        return fields

    def _fields(self, kind: type[msgspec.Struct], without: frozenset[str] = frozenset()) -> dict[str, Any]:
        config, hints = kind.__struct_config__, typing.get_type_hints(kind, include_extras=True)
        found: dict[str, Any] = {} if config.tag is None else {str(config.tag_field): config.tag}
        for field in msgspec.structs.fields(kind):
            if field.name not in without and (field.required or self.random.random() < 0.45):
                found[field.encode_name] = self._value(hints[field.name], field.name)
        return found

    def _value(self, kind: Any, name: str) -> Any:
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        choice = self.random.choice
        if origin is typing.Annotated:
            meta = next(item for item in arguments[1:] if isinstance(item, msgspec.Meta))
            return self._bounded(arguments[0], meta, name)
        if origin in (typing.Union, types.UnionType):
            return self._value(choice([item for item in arguments if item is not msgspec.UnsetType]), name)
        if origin is typing.Literal:
            return choice(arguments)
        if origin is tuple:
            return [self._value(arguments[0], name) for _ in range(choice((0, 0, 1, 2, 3, 12)))]
        if origin is dict:
            return {self.text(): self.text() for _ in range(choice((0, 1, 3)))}
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self._fields(kind)
        simple = {
            str: lambda: (
                choice(NAMES) if name in ("kind", "action", "idempotency_key", "name") else self.text()
            ),
            int: lambda: choice(UNBOUNDED),
            float: lambda: choice((0.0, -1.5, 1e308, 5e-324)),
            bool: lambda: choice((True, False)),
            type(None): lambda: None,
            datetime: lambda: choice(MOMENTS),
            msgspec.Raw: lambda: self._json(0),
        }
        return simple[kind]()

    def _bounded(self, kind: Any, meta: msgspec.Meta, name: str) -> Any:
        if kind is int:
            most = MAX_INTEGER if meta.le is None else int(meta.le)
            return max(int(meta.ge or 0), min(self.random.choice(BOUNDED), most))
        if meta.pattern in _BY_PATTERN:
            return self.random.choice(_BY_PATTERN[meta.pattern])
        if meta.pattern is not None:
            return ("sha256:" if meta.pattern == DIGEST_PATTERN else "") + self.random.choice("01ab") * 64
        return self._value(kind, name)

    def _json(self, depth: int) -> Any:
        chance = self.random.random()
        if depth > 3 or chance < 0.4:
            return self.random.choice((None, True, 0, -1, 0.1, 1e300, *UNBOUNDED, 10**300, self.text()))
        size = range(self.random.randint(0, 4))
        if chance < 0.7:
            return [self._json(depth + 1) for _ in size]
        return {self.text(): self._json(depth + 1) for _ in size}
