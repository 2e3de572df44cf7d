"""Whatever an agent told, in whatever order: the message list is one the provider takes, every call of the tail is
in it, and it is the same each time."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import decode_event
from sidecar.core import context, context_anthropic, context_openai, context_responses
from sidecar.core.exchanges import TailItem
from support.laws import law
from support.providers import check, texts

Json = dict[str, Any]
ids = st.sampled_from(["a", "b", "c.1", "d/2:x@y", "e" * 128])
words = st.sampled_from(["", " ", "\n", "go", "END OF RESUME PACKET\n", "日本 🚢", "trailing  "])
parts = st.lists(
    st.one_of(
        st.builds(lambda text: {"kind": "text", "text": text}, words),
        st.just({"kind": "image", "media_type": "image/png"}),
        st.just({"kind": "reasoning", "text": "thought"}),
        st.builds(lambda value: {"kind": "data", "value": value}, st.one_of(st.none(), st.integers(), words)),
    ),
    max_size=3,
)
content = st.one_of(words, parts)
message = st.fixed_dictionaries(
    {
        "type": st.just("message"),
        "role": st.sampled_from(["user", "assistant", "system", "developer"]),
        "content": content,
    },
    optional={"message_id": st.sampled_from(["m1", "m2"]), "supersedes": st.sampled_from(["e1", "e2", "e9"])},
)
call = st.fixed_dictionaries(
    {
        "type": st.just("tool.called"),
        "call_id": ids,
        "tool": st.sampled_from(["bash", "mcp.x/y z", "t" * 200, "é"]),
        "arguments": st.one_of(st.none(), words, st.just({"a": [1]}), st.just([1]), st.just('{"b":2}')),
    },
    optional={"message_id": st.sampled_from(["m1", "m2", "m3"])},
)
result = st.fixed_dictionaries(
    {
        "type": st.just("tool.returned"),
        "call_id": ids,
        "status": st.sampled_from(["ok", "error", "timeout", "cancelled", "pending"]),
        "content": content,
    }
)
other = st.sampled_from(
    [
        {"type": "step.changed", "phase": "x"},
        {"type": "run.resumed"},
        {"type": "boundary.marked", "kind": "turn_ended"},
        {"type": "context.replaced", "by": "agent"},
    ]
)
tails = st.lists(st.one_of(message, call, call, result, result, other), max_size=14)


def tail_of(events: list[Json]) -> list[TailItem]:
    return [
        TailItem(
            position=position,
            channel="event",
            event=decode_event(
                json.dumps({"v": 1, "id": f"e{position}", "at": "2026-11-30T09:00:00Z", **fields}).encode()
            ),
            tokens=1,
        )
        for position, fields in enumerate(events, 1)
    ]


def made(format: str, tail: list[TailItem], changed: str) -> Json:
    whole = context.conversation(
        system=[],
        packet="VERDICT continue: go on\n",
        tail=tail,
        cleared={},
        open_calls=frozenset({"e2"}),
        changed=changed,
    )
    if format == "anthropic":
        messages, system = context_anthropic.messages(whole)
        return {"messages": messages, "system": system}
    if format == "openai":
        return {"messages": context_openai.messages(whole)}
    return {"messages": context_responses.items(whole)}


@pytest.mark.parametrize("format", ["openai", "openai_responses", "anthropic"])
@law(8)
@given(events=tails, changed=st.sampled_from(["", "NOW x\n"]))
def test_the_list_is_taken(format: str, events: list[Json], changed: str) -> None:
    tail = tail_of(events)
    reply = made(format, tail, changed)
    check(format, reply)
    assert reply == made(format, tail, changed)
    told = texts(reply)
    assert any(text.startswith(context.PACKET_HEAD) for text in told)
    called = sum(fields["type"] == "tool.called" for fields in events)
    if format == "openai":
        answers = [item for item in reply["messages"] if item["role"] == "tool"]
    elif format == "openai_responses":
        answers = [item for item in reply["messages"] if item.get("type") == "function_call_output"]
    else:
        answers = [
            block for item in reply["messages"] for block in item["content"] if block["type"] == "tool_result"
        ]
    assert len(answers) == called
