"""The client's methods for events say what the protocol's structs say, and the protocol alone needs no broker."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from protocol import events
from protocol.client.run import Run
from protocol.client.speech import Speech
from protocol.events import EVENT_TYPES, RECORD_TYPES, Event

ENVELOPE = {field.name for field in msgspec.structs.fields(Event)}
OF_ITEMS = {
    "constraint_id",
    "decision_id",
    "question_id",
    "operation_id",
    "approval_id",
    "artifact_id",
    "evidence_id",
}
TEXTS = {"message", "tool.returned"}
"""Their contents may be kept apart, with a media type."""
TOLD = sorted(set(EVENT_TYPES) - RECORD_TYPES)


class Heard(Exception):
    pass


class Ear(Run):
    """Hands an event back instead of sending it."""

    def __init__(self) -> None:
        pass

    async def _tell(self, name: str, id: str | None, /, **fields: Any) -> Any:
        raise Heard(name, id, fields)

    async def _tell_text(self, name: str, id: str | None, media_type: str | None, /, **fields: Any) -> Any:
        raise Heard(name, id, fields)


@pytest.mark.parametrize("name", TOLD)
def test_every_event_has_its_method_with_its_fields(name: str) -> None:
    method = getattr(Run, name.replace(".", "_"))
    kind = EVENT_TYPES[name]
    given = dict(inspect.signature(method).parameters)
    for own in ("self", "id", *(("media_type",) if name in TEXTS else ())):
        given.pop(own)
    # A large text is kept apart by the client itself; of ``gap.accepted`` the session is the agent's.
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    expected = {field for field in fields if field not in ENVELOPE and field != "blob"}
    if name == "gap.accepted":
        expected.add("session")
    assert set(given) == expected
    for field, parameter in given.items():
        must = fields[field].required or (field in OF_ITEMS and issubclass(kind, _owner(field)))
        assert (parameter.default is inspect.Parameter.empty) == must, field


def _owner(field: str) -> type[Event]:
    return getattr(events, f"Of{field.removesuffix('_id').title()}")  # type: ignore[no-any-return]


async def _handed_over(name: str) -> dict[str, Any]:
    method = getattr(Ear(), name.replace(".", "_"))
    own = ("media_type",) if name in TEXTS else ()
    given = {key: key for key in inspect.signature(method).parameters if key not in own}
    try:
        await method(**given)
    except Heard as heard:
        told, event_id, fields = heard.args
        assert (told, event_id) == (name, "id")
        return dict(fields)
    raise AssertionError


@pytest.mark.anyio
@pytest.mark.parametrize("name", TOLD)
async def test_a_method_hands_over_what_it_was_given_under_its_name(name: str) -> None:
    fields = await _handed_over(name)
    assert all(key == value for key, value in fields.items())
    known = set(EVENT_TYPES[name].__struct_encode_fields__)
    assert {key.rstrip("_") for key in fields} <= known


def test_speech_is_abstract() -> None:
    with pytest.raises(TypeError):
        Speech()  # type: ignore[abstract]


def test_the_protocol_alone_loads_no_broker_client() -> None:
    program = (
        "import sys, protocol, protocol.events, protocol.codec, protocol.redaction, protocol.schema\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'nats', 'anyio', 'storage', 'sidecar'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_client_loads_nothing_of_the_daemon() -> None:
    program = (
        "import sys, protocol.client\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'storage', 'sidecar', 'sqlite3'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
