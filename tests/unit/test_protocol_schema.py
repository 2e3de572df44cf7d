"""The schema document says of every message what the decoder does."""

from __future__ import annotations

import json
import re
from typing import Any

from protocol.schema import MESSAGES, json_schema


def strings(value: Any, key: str) -> list[str]:
    if isinstance(value, dict):
        found = [value[key]] if isinstance(value.get(key), str) else []
        return found + [text for item in value.values() for text in strings(item, key)]
    if isinstance(value, list):
        return [text for item in value for text in strings(item, key)]
    return []


def test_every_message_is_there_and_every_reference_leads_somewhere() -> None:
    schema = json_schema()
    assert {area: set(names) for area, names in schema["x-messages"].items()} == {
        area: set(names) for area, names in MESSAGES.items()
    }
    for ref in strings(schema, "$ref"):
        assert ref.removeprefix("#/$defs/") in schema["$defs"]


def test_it_is_plain_json_and_always_the_same() -> None:
    assert json.loads(json.dumps(json_schema())) == json_schema()


def test_every_message_and_field_is_described() -> None:
    for name, definition in json_schema()["$defs"].items():
        assert definition.get("description"), name


def test_patterns_are_anchored_and_closed_against_a_trailing_newline() -> None:
    patterns = set(strings(json_schema()["$defs"], "pattern"))
    assert patterns
    for pattern in patterns:
        assert pattern.startswith("^")
        assert pattern.endswith(r"$(?!\n)")
        assert re.compile(pattern)
