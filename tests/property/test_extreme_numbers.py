"""Numbers at the ends of what the wire allows and beyond: what the daemon says and keeps can be read again.

Numbers over 2**53 - 1 lose their digits in many JSON readers and have no canonical form; no count, position or
figure of ours reaches them, whatever an agent tells. A value that was told as such is shown as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anyio
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.asks import StatusReply
from protocol.codec import canonical, decode_state, decode_struct
from protocol.events import EVENT_TYPES
from protocol.handoff import Notice, Packet, Receipt, Rejected
from protocol.identifiers import MAX_INTEGER
from support.harness import Harness, Life, workplace
from support.laws import law
from support.voyages import METRICS

NUMBERS = (-1, 0, 1, 3, 2**31, 2**48, MAX_INTEGER - 1, MAX_INTEGER, 2**53, 2**63 - 1, 2**63, 2**64, 10**30)
AS_TOLD = ("value", "event")
"""Fields that repeat what was told."""

Tell = tuple[str, str, Callable[[int], dict[str, Any]]]
_CALL = {"call_id": "c", "tool": "sh"}
_SHA = f"sha256:{'a' * 64}"
TELLS: tuple[Tell, ...] = (
    ("run.started", "event", lambda n: {"goal": "g", "model": _model(n, n)}),
    ("run.started", "event", lambda n: {"goal": "g", "model": _model(64_000, n)}),
    ("run.resumed", "event", lambda n: {"session": "s2", "packet_id": "pk", "ledger_version": n}),
    ("context.replaced", "event", lambda n: {"by": "agent", "context_tokens": n}),
    ("context.replaced", "event", lambda n: {"by": "agent", "packet_id": "pk", "kept_from": "e-2"}),
    ("model.changed", "event", lambda n: {"model": _model(n, None)}),
    ("usage.reported", "event", lambda n: {"model": "m", "context_tokens": n, "output_tokens": n}),
    (
        "usage.reported",
        "event",
        lambda n: {"model": "o", "context_tokens": 9, "output_tokens": 1} | _parts(n),
    ),
    ("message", "event", lambda n: {"role": "user", "content": "do", "session": "s1", "seq": n}),
    ("message", "authority", lambda n: {"role": "user", "content": "do", "session": "s1", "seq": n}),
    ("message", "event", lambda n: {"role": "user", "content": "do", "blob": {"sha256": _SHA, "bytes": n}}),
    ("message", "event", lambda n: {"role": "assistant", "content": _image(n)}),
    ("message", "event", lambda n: {"role": "assistant", "content": [{"kind": "data", "value": {"n": n}}]}),
    ("tool.called", "event", lambda n: _CALL | {"arguments": {"n": n}}),
    ("tool.returned", "event", lambda n: _CALL | {"status": "ok", "content": "x", "session": "s1", "seq": n}),
    ("tool.returned", "event", lambda n: {"call_id": "c", "status": "ok", "content": _image(n)}),
    ("approval.requested", "event", lambda n: {"approval_id": "ap", "action": "deploy"}),
    ("approval.resolved", "authority", lambda n: _grant() | {"uses": n}),
    ("artifact.saved", "event", lambda n: {"artifact_id": "ar", "uri": "u", "description": "d"} | _file(n)),
    (
        "evidence.recorded",
        "event",
        lambda n: (
            {"evidence_id": f"ev{n}", "claim": "c", "kind": "observed"} | {"source": f"pos:{n}", "value": n}
        ),
    ),
    (
        "decision.made",
        "event",
        lambda n: {"decision_id": f"d{n}", "summary": "s", "refs": [f"evidence:ev{n}"]},
    ),
    ("gap.accepted", "authority", lambda n: {"session": "s1", "from": 1, "through": n, "by": "ann"}),
    ("gap.accepted", "authority", lambda n: {"from": n, "through": n, "by": "ann"}),
    ("gap.declared", "record", lambda n: {"epoch": 2, "session": "s1", "from": 1, "through": n}),
    ("gap.declared", "record", lambda n: {"epoch": 2, "stream_from": 1, "stream_through": n}),
    ("gap.accepted", "authority", lambda n: {"from": 1, "through": n, "by": "ann"}),
    ("policy.released", "event", lambda n: {"version": "v", "session": "s1", "seq": n}),
)
"""Every field with a number, by what tells it; a refused message's number counts as well."""


def _model(window: int, output: int | None) -> dict[str, Any]:
    return {"name": "m", "context_window": window} | ({} if output is None else {"max_output_tokens": output})


def _parts(number: int) -> dict[str, Any]:
    return dict.fromkeys(("input_tokens", "cache_read_tokens", "cache_write_tokens"), number)


def _image(number: int) -> list[dict[str, Any]]:
    return [
        {"kind": "image", "media_type": "image/png", "tokens": number},
        {"kind": "reasoning", "tokens": number},
    ]


def _grant() -> dict[str, Any]:
    return {"approval_id": "ap", "outcome": "granted", "by": "ann", "action": "deploy"}


def _file(number: int) -> dict[str, Any]:
    return {"sha256": "a" * 64, "bytes": number}


@law(20)
@given(st.lists(st.tuples(st.integers(0, len(TELLS) - 1), st.sampled_from(NUMBERS)), min_size=1, max_size=40))
@example([(8, MAX_INTEGER)])
@example([(8, MAX_INTEGER - 1), (8, MAX_INTEGER - 1), (8, 5), (21, MAX_INTEGER)])
@example([(26, MAX_INTEGER), (9, MAX_INTEGER)])
@example([(5, MAX_INTEGER), (6, MAX_INTEGER), (11, MAX_INTEGER), (3, MAX_INTEGER), (0, MAX_INTEGER)])
@example([(index, MAX_INTEGER) for index in range(len(TELLS))])
@example([(index, MAX_INTEGER - 1) for index in range(len(TELLS))])
def test_all_that_is_said_and_kept_can_be_read_again(drawn: list[tuple[int, int]]) -> None:
    with workplace(prepared=True) as folder:
        harness = Harness(folder, metrics=METRICS)
        harness.start(session="s1", seq=1)
        for number in range(3):
            harness.turn(900, say=f"part {number}")
        for index, number in drawn:
            type_, channel, fields = TELLS[index]
            assert type_ in EVENT_TYPES
            harness.tell(type_, channel=channel, **fields(number))
        anyio.run(_life, harness)


async def _life(harness: Harness) -> None:
    async with harness.alive() as life:
        await life.read_all()
        await life.compact()
        await life.publish()
        await _asked(life)
        harness.authority("run.finished", outcome="succeeded")
        await life.read_all()
        await _asked(life)
        await life.relayed()
    states = 0
    for sent in harness.broker.sent:
        _fits(sent.body)
        canonical(sent.body)
        match sent.kind:
            case "packet":
                decode_struct(sent.payload, Packet)
            case "receipt":
                decode_struct(sent.payload, Receipt)
            case "state":
                states += sent.run == "r"
                decode_state(sent.payload)
            case "rejected":
                decode_struct(sent.payload, Rejected)
            case "notice":
                decode_struct(sent.payload, Notice)
    assert states


async def _asked(life: Life) -> None:
    packet = await life.packet()
    decode_struct(json.dumps(packet).encode(), Packet)
    status = await life.ask("status")
    decode_struct(json.dumps(status).encode(), StatusReply)
    for body in (packet, status, await life.ask("context", format="openai")):
        assert "error" not in body or body["error"]["code"] == "too_large", body
        _fits(body)
        canonical(body)


def _fits(body: Any) -> None:
    large = [number for number in _numbers(body) if abs(number) > MAX_INTEGER]
    assert not large, large


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        for name, item in value.items():
            if name not in AS_TOLD:
                yield from _numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int):
        yield value
