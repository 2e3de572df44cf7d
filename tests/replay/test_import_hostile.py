"""Importers against files nobody should write: one clear failure, or messages that are sound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.codec import decode_event
from sidecar.importers import Imported, ImportFailure, import_files

SETTINGS = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def claude(**fields: Any) -> dict[str, Any]:
    return {"sessionId": "s", "timestamp": "2026-01-01T00:00:00Z", **fields}


def assistant(uuid: str, message_id: str, block: Any, **usage: int) -> dict[str, Any]:
    message = {"id": message_id, "role": "assistant", "model": "m", "content": [block], "usage": usage}
    return claude(type="assistant", uuid=uuid, message=message)


def returned(uuid: str, call: str, content: Any, outcome: Any = None, **fields: Any) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": call, "content": content, **fields}
    line = claude(type="user", uuid=uuid, message={"role": "user", "content": [block]})
    return line if outcome is None else {**line, "toolUseResult": outcome}


def use(call: str, name: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call, "name": name, "input": given}


USER = claude(type="user", uuid="u0", message={"role": "user", "content": "do it"})


def sound(messages: list[Imported]) -> list[dict[str, Any]]:
    for message in messages:
        decode_event(message.payload(), run=message.run, channel=message.channel)
    assert len({(m.run, m.channel, m.event["id"]) for m in messages}) == len(messages)
    return [message.event for message in messages]


def run(folder: Path, lines: list[Any], name: str = "s.jsonl", **options: Any) -> list[dict[str, Any]]:
    path = folder / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return sound(list(import_files([path], **options)))


def test_a_plan_put_to_the_user_is_an_approval_of_the_authority(tmp_path: Path) -> None:
    lines = [
        USER,
        assistant("a1", "m1", use("c1", "ExitPlanMode", plan="first plan")),
        returned("r1", "c1", "The user doesn't want to proceed with this tool use.", is_error=True),
        assistant("a2", "m2", use("c2", "ExitPlanMode", plan="second plan")),
        returned("r2", "c2", "User has approved your plan. You can now start coding."),
        assistant("a3", "m3", use("c3", "ExitPlanMode", plan="third plan")),
    ]
    path = tmp_path / "s.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    messages = list(import_files([path]))
    sound(messages)
    asked = [m.event for m in messages if m.event["type"] == "approval.requested"]
    answered = [m for m in messages if m.event["type"] == "approval.resolved"]
    assert [m.channel for m in answered] == ["authority", "authority"]
    assert [m.event["outcome"] for m in answered] == ["denied", "granted"]
    assert [m.event["seq"] for m in answered] == [1, 2]
    for request, answer in zip(asked, answered, strict=False):
        for field in ("approval_id", "action", "payload_digest"):
            assert request[field] == answer.event[field]
    assert len(asked) == 3


def test_a_repeated_uuid_is_imported_once_and_never_as_the_same_id_with_other_content(tmp_path: Path) -> None:
    text = {"type": "text", "text": "one"}
    lines: list[Any] = [USER, USER, assistant("a1", "m1", text), assistant("a1", "m1", text, input_tokens=5)]
    lines.append(
        claude(type="user", uuid="u0", message={"role": "user", "content": "another text, same uuid"})
    )
    events = run(tmp_path, lines)
    assert [event["id"] for event in events if event.get("role") == "user"] == ["u0", "u0+2"]
    assert sum(event["type"] == "usage.reported" for event in events) == 1


def test_subagents_inside_the_session_file_are_child_runs(tmp_path: Path) -> None:
    def progress(number: int, inner: dict[str, Any]) -> dict[str, Any]:
        data = {
            "type": "agent_progress",
            "agentId": "x1",
            "message": inner,
            "normalizedMessages": [inner, inner],
        }
        return claude(type="progress", uuid=f"p{number}", toolUseID="z", parentToolUseID="c1", data=data)

    inside = claude(type="user", uuid="i1", message={"role": "user", "content": "look"})
    lines = [
        USER,
        assistant("a1", "m1", use("c1", "Task", prompt="look", subagent_type="Explore"), input_tokens=9),
        progress(1, inside),
        progress(2, assistant("i2", "n1", use("d1", "Read", path="a"), input_tokens=4)),
        progress(3, returned("i3", "d1", "text")),
        returned("r1", "c1", "done", {"agentId": "x1", "status": "completed"}),
        assistant("a2", "m2", {"type": "text", "text": "ok"}, input_tokens=12),
    ]
    events = run(tmp_path, lines)
    assert [event["type"] for event in events if event["run"] == "s-agent-x1"] == [
        "run.started",
        "message",
        "tool.called",
        "usage.reported",
        "tool.returned",
    ]
    kinds = [event["type"] for event in events if event["run"] == "s"]
    assert kinds.count("child.spawned") == kinds.count("child.returned") == 1
    assert sum(event["type"] == "usage.reported" for event in events) == 3


def test_side_chains_without_an_agent_id_are_child_runs(tmp_path: Path) -> None:
    side = {"isSidechain": True}
    lines = [
        USER,
        assistant("a1", "m1", use("c1", "Task", prompt="look"), input_tokens=9),
        {
            **claude(type="user", uuid="i1", parentUuid=None, message={"role": "user", "content": "look"}),
            **side,
        },
        {
            **assistant("i2", "n1", {"type": "text", "text": "found"}, input_tokens=4),
            "parentUuid": "i1",
            **side,
        },
        returned("r1", "c1", "found"),
    ]
    events = run(tmp_path, lines)
    assert [event["type"] for event in events if event["run"] != "s"] == [
        "run.started",
        "message",
        "message",
        "usage.reported",
    ]
    assert [event["task"] for event in events if event["type"] == "child.spawned"] == ["look"]
    assert sum(event["type"] == "child.returned" for event in events) == 1


def test_statuses_timeouts_and_interrupts(tmp_path: Path) -> None:
    lines: list[Any] = [USER]
    lines += [assistant(f"a{n}", "m1", use(f"c{n}", "Bash", command="x")) for n in range(5)]
    lines += [
        returned("r0", "c0", "fine"),
        returned("r1", "c1", "Exit code 1", is_error=True),
        returned("r2", "c2", "Command timed out after 2m 0.0s", is_error=True),
        returned("r3", "c3", "", {"interrupted": True}),
    ]
    events = run(tmp_path, lines)
    assert [event["status"] for event in events if event["type"] == "tool.returned"] == [
        "ok",
        "error",
        "timeout",
        "cancelled",
    ]


def test_what_the_wire_refuses_is_replaced_and_ansi_stays(tmp_path: Path) -> None:
    bad = "a\x00b\ud800c\x1b[31mred"
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    lines = [
        {**USER, "message": {"role": "user", "content": bad}},
        assistant("a1", "m1", use("c1", "Bash", command=bad, big=10**30, deep=deep)),
    ]
    events = run(tmp_path, lines)
    assert events[1]["content"] == "a�b�c\x1b[31mred"
    assert events[2]["arguments"]["big"] == str(10**30)


def test_an_event_over_the_broker_limit_is_cut_and_says_so(tmp_path: Path) -> None:
    lines = [
        USER,
        assistant("a1", "m1", use("c1", "Bash", command="\x01" * 2_000_000)),
        returned("r1", "c1", "é" * 3_000_000),
        returned("r2", "c1", [{"type": "text", "text": "x"}] * 60_000),
    ]
    events = run(tmp_path, lines)
    assert all(len(json.dumps(event, ensure_ascii=False).encode()) < 1_000_000 for event in events)
    assert [event.get("truncated") for event in events[-2:]] == [True, True]
    assert "left out]" in events[-2]["content"]


def test_codex_forks_leave_out_the_copied_part(tmp_path: Path) -> None:
    def line(kind: str, **payload: Any) -> dict[str, Any]:
        return {"timestamp": "2026-01-01T10:00:05Z", "type": kind, "payload": payload}

    def say(text: str) -> dict[str, Any]:
        content = [{"type": "output_text", "text": text}]
        return line("response_item", type="message", role="assistant", content=content)

    fork = line("session_meta", id="child", forked_from_id="parent", timestamp="2026-01-01T10:00:00Z")
    parent = line("session_meta", id="parent", timestamp="2026-01-01T08:00:00Z")
    old = line("event_msg", type="task_started", started_at=1767254400, model_context_window=1000)
    own = line("event_msg", type="task_started", started_at=1767261601, model_context_window=1000)
    copied = [fork, parent, old, say("the parent's"), say("the parent's too")]
    events = run(tmp_path, [*copied, own, say("its own")])
    assert [event["content"] for event in events if event["type"] == "message"] == ["its own"]
    events = run(tmp_path, copied)
    assert sum(event["type"] == "message" for event in events) == 1


def test_codex_statuses_and_repeated_counts(tmp_path: Path) -> None:
    def item(**payload: Any) -> dict[str, Any]:
        return {"timestamp": "2026-01-01T10:00:05Z", "type": "response_item", "payload": payload}

    def tokens(total: int, last: Any) -> dict[str, Any]:
        info = {"total_token_usage": {"input_tokens": total}, "last_token_usage": {"input_tokens": last}}
        return {"type": "event_msg", "payload": {"type": "token_count", "info": info}}

    outputs = [
        "Chunk ID: 1\nWall time: 1 s\nProcess exited with code 3\nOutput:\nx",
        "Chunk ID: 1\nProcess running with session ID 4\nOutput:\nProcess exited with code 9",
        '{"output":"x","metadata":{"exit_code":1}}',
        '{"output":"x","metadata":{"exit_code":0}}',
        "aborted by user after 2.0s",
        [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}],
    ]
    lines: list[Any] = [
        item(type="function_call", name="f", call_id=f"c{n}", arguments="{}") for n in range(6)
    ]
    lines += [item(type="function_call_output", call_id=f"c{n}", output=o) for n, o in enumerate(outputs)]
    lines += [tokens(5, 5), tokens(5, 5), tokens(11, 6), tokens(11, "6")]
    lines += [{"type": "event_msg", "payload": {"type": "token_count", "info": None}}]
    lines += [item(type="web_search_call", status="completed", action={"query": "q"})]
    lines += [item(type="web_search_call", status="in_progress", action={"query": "q"})]
    events = run(tmp_path, lines)
    results = [event for event in events if event["type"] == "tool.returned"]
    assert [event["status"] for event in results] == ["error", "ok", "error", "ok", "cancelled", "ok", "ok"]
    assert results[5]["content"] == [{"kind": "image", "media_type": "image/png"}]
    assert [e["context_tokens"] for e in events if e["type"] == "usage.reported"] == [5, 6]
    first = [event["message_id"] for event in events if event["type"] == "tool.called"][:6]
    assert len(set(first)) == 1


def test_an_unreadable_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    for broken in (b'{"type": }', b"{} {}", b"\xff\xfe", b"[" * 100_000):
        path.write_bytes(
            json.dumps(USER).encode() + b"\n\n" + broken + b"\n" + json.dumps(USER).encode() + b"\n"
        )
        with pytest.raises(ImportFailure) as caught:
            list(import_files([path]))
        assert caught.value.line == 3
        assert str(caught.value).startswith(f"{path}:3: ")
        assert "\n" not in str(caught.value)


def test_missing_empty_and_unknown_files_are_failures(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    for path in (tmp_path / "none.jsonl", tmp_path, empty):
        with pytest.raises(ImportFailure):
            list(import_files([path]))
    with pytest.raises(ImportFailure, match="allowed: auto, claude-code, codex, events"):
        list(import_files([empty], format="otel"))
    with pytest.raises(ImportFailure, match="no file"):
        list(import_files([]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize(
    "name",
    [
        "claude-code-codemie/claude/-tmp-private/4c2ddfdc-b619-4525-8d03-1950fb1b0257.jsonl",
        "claude-code-codemie/session-9eda1058.jsonl",
        "claude-code-entire/fc-99c919b212-0-full.jsonl",
        "codex-codemie/rollout-2026-05-11T11-26-55-019e1625-789d-76c0-80ab-3724b5ddb799.jsonl",
        "mixed-agent-sessions/codex/small.jsonl",
    ],
)
def test_any_changed_field_gives_sound_messages_or_one_failure(
    corpus: Path, tmp_path: Path, name: str
) -> None:
    whole = [json.loads(line) for line in (corpus / name).read_text(encoding="utf-8").splitlines()]
    lines = [line for line in whole if len(str(line)) < 20_000][:120]
    kind = "codex" if "codex" in name.split("/")[-2] else "claude-code"

    @SETTINGS
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        changed = list(lines)
        for _ in range(data.draw(st.integers(1, 6))):
            index = data.draw(st.integers(0, len(changed) - 1))
            place = data.draw(st.sampled_from(places(changed[index])))
            changed[index] = replaced(changed[index], place, data.draw(JSON))
        changed += data.draw(st.lists(st.sampled_from(changed), max_size=3))
        path = tmp_path / "changed.jsonl"
        path.write_text("\n".join(json.dumps(line) for line in changed) + "\n", encoding="utf-8")
        try:
            messages = list(import_files([path], format=kind))
        except ImportFailure:
            return
        sound(messages)

    check()


@SETTINGS
@given(content=st.binary(max_size=300), kind=st.sampled_from(["auto", "claude-code", "codex", "events"]))
def test_any_bytes_give_messages_or_one_failure(tmp_path: Path, content: bytes, kind: str) -> None:
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(content)
    try:
        for message in import_files([path], format=kind):
            message.payload()
    except ImportFailure as failure:
        said = str(failure)
    else:
        said = ""
    assert "\n" not in said
