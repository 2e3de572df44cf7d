"""The exact bytes of every message of version 1: still read, and still written the same."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from protocol.codec import decode_ask, decode_event, decode_state, decode_struct, encode
from protocol.events import RECORD_TYPES, type_of
from protocol.schema import MESSAGES

VECTORS = Path(__file__).parent.parent / "vectors" / "v1"
EARLIER = sorted((VECTORS / "earlier").glob("*.json"))
KINDS = {name: (area, kind) for area, messages in MESSAGES.items() for name, kind in messages.items()}


def test_every_message_has_a_vector_and_every_vector_a_message() -> None:
    assert {path.name.removesuffix(".json") for path in VECTORS.glob("*.json")} == set(KINDS)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_vector_is_read_and_written_back_the_same(name: str) -> None:
    read_and_written(name, (VECTORS / f"{name}.json").read_bytes())


@pytest.mark.parametrize("path", EARLIER, ids=lambda path: path.stem)
def test_what_was_written_before_a_field_was_added_is_read_still(path: Path) -> None:
    """``<type>.<n>.json``: the vector as it was before; an optional field that is absent stays absent."""
    read_and_written(path.stem.rpartition(".")[0], path.read_bytes())


def read_and_written(name: str, payload: bytes) -> None:
    area, kind = KINDS[name]
    value: object
    match area:
        case "in":
            event = decode_event(payload, channel="record" if name in RECORD_TYPES else "event")
            assert type_of(event) == name
            value = event
        case "ask":
            value = decode_ask(name.removeprefix("ask."), payload)  # type: ignore[arg-type]
        case "state":
            value = decode_state(payload)
        case _:
            value = decode_struct(payload, kind)
    assert type(value) is kind
    assert encode(value) == payload


@pytest.mark.parametrize("name", sorted(MESSAGES["in"]))
def test_the_vectors_together_show_nearly_every_field(name: str) -> None:
    """A vector that left a field out would not notice when the field changes its name."""
    kind = MESSAGES["in"][name]
    shown = set(msgspec.json.decode((VECTORS / f"{name}.json").read_bytes()))
    own = set(kind.__struct_encode_fields__) - {
        "run",
        "traceparent",
        "must_understand",
        "epoch",
        "session",
        "seq",
    }
    alternatives = {"stream_from", "stream_through"}
    assert own - alternatives <= shown


@pytest.mark.parametrize(
    "name", [name for area in ("out", "reply", "state", "summarize") for name in MESSAGES[area]]
)
def test_the_outgoing_vectors_show_every_required_field_in_order(name: str) -> None:
    kind = KINDS[name][1]
    shown = list(msgspec.json.decode((VECTORS / f"{name}.json").read_bytes()))
    fields = [field for field in kind.__struct_encode_fields__ if field in shown]
    assert shown == fields
