"""What the providers ask of a message list: their own types where their libraries are installed, and the rules
their servers hold requests to, written down here."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest

Json = dict[str, Any]
OPENAI_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
ANTHROPIC_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
ANTHROPIC_ID = re.compile(r"[A-Za-z0-9_-]+")


def check(format: str, reply: Json) -> None:
    """All rules of the format hold for the reply to ``context``."""
    {"openai": check_openai, "openai_responses": check_responses, "anthropic": check_anthropic}[format](reply)


def check_types(format: str, reply: Json) -> None:
    """The provider's own types take the messages. Skips visibly where its library is not installed."""
    pytest.importorskip("pydantic")
    adapter = _adapter(format)
    exhaust(adapter.validate_python(reply["messages"], strict=False))


@cache
def _adapter(format: str) -> Any:
    from pydantic import TypeAdapter

    if format == "anthropic":
        types = pytest.importorskip("anthropic.types")
        return TypeAdapter(list[types.MessageParam])
    if format == "openai":
        chat = pytest.importorskip("openai.types.chat")
        return TypeAdapter(list[chat.ChatCompletionMessageParam])
    responses = pytest.importorskip("openai.types.responses")
    return TypeAdapter(responses.ResponseInputParam)


def exhaust(value: Any) -> None:
    """Look at all of it: iterables in the types are checked only as they are read."""
    if isinstance(value, dict):
        for item in value.values():
            exhaust(item)
    elif hasattr(value, "__iter__") and not isinstance(value, (str, bytes)):
        for item in value:
            exhaust(item)


def check_openai(reply: Json) -> None:
    messages = reply["messages"]
    assert "system" not in reply
    waiting: list[str] = []
    used: set[str] = set()
    for message in messages:
        role = message["role"]
        if role == "tool":
            assert message["tool_call_id"] in waiting
            waiting.remove(message["tool_call_id"])
            assert isinstance(message["content"], str)
            continue
        assert waiting == [], "a call was not answered right away"
        if role == "assistant" and "tool_calls" in message:
            assert message["tool_calls"]
            assert message["content"] is None or message["content"].strip()
            for call in message["tool_calls"]:
                assert len(call["id"]) <= 40
                assert call["id"] not in used
                used.add(call["id"])
                waiting.append(call["id"])
                assert call["type"] == "function"
                assert OPENAI_NAME.fullmatch(call["function"]["name"])
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
        else:
            assert role in ("system", "developer", "user", "assistant")
            assert message["content"].strip()
    assert waiting == []


def check_responses(reply: Json) -> None:
    calls: list[str] = []
    outputs: list[str] = []
    for item in reply["messages"]:
        kind = item.get("type", "message")
        if kind == "function_call":
            assert len(item["call_id"]) <= 64
            assert OPENAI_NAME.fullmatch(item["name"])
            assert isinstance(json.loads(item["arguments"]), dict)
            calls.append(item["call_id"])
        elif kind == "function_call_output":
            assert item["call_id"] in calls
            assert isinstance(item["output"], str)
            outputs.append(item["call_id"])
        else:
            assert item["role"] in ("system", "developer", "user", "assistant")
            assert item["content"].strip()
    assert len(set(calls)) == len(calls)
    assert sorted(calls) == sorted(outputs)


def check_anthropic(reply: Json) -> None:
    messages = reply["messages"]
    assert isinstance(reply["system"], str)
    assert messages[0]["role"] == "user"
    waiting: list[str] = []
    used: set[str] = set()
    for before, message in zip([None, *messages], messages, strict=False):
        assert message["role"] in ("user", "assistant")
        assert before is None or before["role"] != message["role"]
        assert message["content"]
        results_over = False
        for block in message["content"]:
            if block["type"] == "tool_result":
                assert message["role"] == "user"
                assert not results_over, "results stand before anything else"
                waiting.remove(block["tool_use_id"])
                assert block.get("content", "x").strip()
                continue
            results_over = True
            if message["role"] == "user":
                assert waiting == [], "a call was not answered in the next message"
            if block["type"] == "text":
                assert block["text"].strip()
            else:
                assert block["type"] == "tool_use"
                assert message["role"] == "assistant"
                assert ANTHROPIC_ID.fullmatch(block["id"])
                assert block["id"] not in used
                used.add(block["id"])
                waiting.append(block["id"])
                assert ANTHROPIC_NAME.fullmatch(block["name"])
                assert isinstance(block["input"], dict)
        if message["role"] == "user":
            assert waiting == []
    assert waiting == []
    last = messages[-1]
    if last["role"] == "assistant":
        assert last["content"][-1]["text"] == last["content"][-1]["text"].rstrip()


def texts(value: Any) -> list[str]:
    """Every text in a message list."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.values() for text in texts(item)]
    if isinstance(value, list):
        return [text for item in value for text in texts(item)]
    return []
