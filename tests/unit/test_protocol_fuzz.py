"""Whatever the bytes: an event, or a ProtocolError. And what is accepted, other readers read the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol.codec import canonical, decode_event, encode
from protocol.errors import REJECTION_CODES, ProtocolError
from protocol.events import EVENT_TYPES, Event

VECTORS = Path(__file__).parent.parent / "vectors" / "v1"
SEEDS = [(VECTORS / f"{name}.json").read_bytes() for name in sorted(EVENT_TYPES)]
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.just(10**400)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
ENVELOPE = {"v": 1, "id": "e-1", "at": "2026-11-30T09:12:00Z"}


def attempt(payload: bytes) -> Event | None:
    refused: ProtocolError | None = None
    try:
        return decode_event(payload, run="r1", channel="event", max_bytes=1 << 20)
    except ProtocolError as error:
        refused = error
    assert refused.code in REJECTION_CODES
    assert refused.detail
    return None


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    return 0


def refuse_constant(text: str) -> None:
    raise AssertionError(f"{text} is no JSON")


def check_accepted(payload: bytes, event: Event) -> None:
    """An accepted message is JSON for a strict reader too, and survives a round trip."""
    plain = json.loads(payload.decode(), parse_constant=refuse_constant)
    assert depth(plain) <= 64
    text = json.dumps(plain, ensure_ascii=False)
    text.encode()
    assert "\\u0000" not in text.replace("\\\\", "")
    assert canonical(event)
    assert canonical(decode_event(encode(event))) == canonical(event)


@given(st.binary(max_size=200))
@example(b'{"v":1')
@example(b"\\ud800")
def test_any_bytes(payload: bytes) -> None:
    assert attempt(payload) is None


@given(JSON)
@settings(max_examples=200)
def test_any_json(value: Any) -> None:
    payload = json.dumps(value).encode()
    event = attempt(payload)
    if event is not None:
        check_accepted(payload, event)


@given(st.sampled_from(sorted(EVENT_TYPES)), st.data())
@settings(max_examples=400)
def test_any_values_in_known_fields(name: str, data: st.DataObject) -> None:
    fields = [*EVENT_TYPES[name].__struct_encode_fields__, "unknown"]
    chosen = data.draw(st.dictionaries(st.sampled_from(fields), JSON, max_size=6))
    payload = json.dumps(ENVELOPE | {"type": name} | chosen, ensure_ascii=data.draw(st.booleans())).encode(
        "utf-8", "surrogatepass"
    )
    event = attempt(payload)
    if event is not None:
        check_accepted(payload, event)


@given(st.sampled_from(SEEDS), st.data())
@settings(max_examples=600)
def test_damaged_messages(seed: bytes, data: st.DataObject) -> None:
    payload = bytearray(seed)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(payload)))
        size = data.draw(st.integers(0, 6))
        splice = st.binary(max_size=4) | st.sampled_from(
            [
                b"\\ud800",
                b"\\u0000",
                b'"',
                b"\\",
                b"{",
                b"}",
                b"[[",
                b"]]",
                b"1e999",
                b"-",
                b"\xed\xa0\x80",
                b"null",
            ]
        )
        payload[place : place + size] = data.draw(splice)
    event = attempt(bytes(payload))
    if event is not None:
        check_accepted(bytes(payload), event)


@given(JSON, st.text())
@settings(max_examples=200)
def test_any_value_as_arguments(value: Any, text: str) -> None:
    call = ENVELOPE | {"type": "tool.called", "call_id": "c", "tool": text, "arguments": value}
    payload = json.dumps(call).encode()
    event = attempt(payload)
    if event is not None:
        check_accepted(payload, event)


@pytest.mark.parametrize("seed", SEEDS, ids=sorted(EVENT_TYPES))
def test_every_beginning_of_every_message(seed: bytes) -> None:
    for length in range(len(seed)):
        assert attempt(seed[:length]) is None
