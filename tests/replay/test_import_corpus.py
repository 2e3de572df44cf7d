"""Importers against real transcripts: counts taken anew from the raw lines, and what must hold of all."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from protocol.codec import decode_event
from sidecar.importers import Imported, ImportFailure, Report, detect, import_files

CLAUDE = [
    "claude-code-codemie/claude/-tmp-private/4c2ddfdc-b619-4525-8d03-1950fb1b0257.jsonl",
    "claude-code-codemie/claude/-tmp-private/agent-36541525.jsonl",
    "claude-code-codemie/claude/incremental-simple/turn-2.jsonl",
    "claude-code-codemie/claude/incremental-subagents/turn-2.jsonl",
    "claude-code-codemie/claude/incremental-subagents/turn-2/subagents/agent-a485154.jsonl",
    "claude-code-codemie/session-196820da.jsonl",
    "claude-code-codemie/session-9eda1058.jsonl",
    "claude-code-entire/fc-99c919b212-0-full.jsonl",
]
CODEX = [
    "codex-codemie/rollout-2026-05-11T11-26-55-019e1625-789d-76c0-80ab-3724b5ddb799.jsonl",
    "mixed-agent-sessions/codex/small.jsonl",
]
FOREIGN = [
    "cline/messages/success.messages.json",
    "cline/session/session.json",
    "cline/session/session.messages.json",
    "mixed-agentsview/testdata/visualstudio-copilot/redacted/sample-1_VSGitHubCopilot_traces.jsonl",
    "otel-langfuse-framework-traces/claude-agent-2025-12-22.trace.json",
    "otel-langfuse-framework-traces/openai-agents-2025-09-30.trace.json",
]


def raw(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def blocks(lines: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [
        block
        for line in lines
        if isinstance(line.get("message"), dict) and isinstance(line["message"]["content"], list)
        for block in line["message"]["content"]
        if block["type"] == kind
    ]


def counted(messages: list[Imported]) -> Counter[str]:
    return Counter(message.event["type"] for message in messages)


def check_all(messages: list[Imported]) -> None:
    """What holds of every import: readable by the daemon, ids unique, seq contiguous, no picture's bytes."""
    ids: set[tuple[str, str, str]] = set()
    sequences: dict[tuple[str, str], list[int]] = defaultdict(list)
    started = set()
    for message in messages:
        event = message.event
        payload = message.payload()
        decode_event(payload, run=message.run, channel=message.channel)
        place = (message.run, message.channel, event["id"])
        assert place not in ids
        ids.add(place)
        sequences[message.run, message.channel].append(event["seq"])
        if message.run not in started:
            assert event["type"] == "run.started"
            started.add(message.run)
        assert len(payload) <= 1_000_000
        assert not re.search(rb"[A-Za-z0-9+/]{4000}", payload)
        assert b"base64" not in payload or event["type"] not in ("message",)
    for numbers in sequences.values():
        assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("name", CLAUDE)
def test_claude_code_usage_calls_and_results_are_counted_once(corpus: Path, name: str) -> None:
    lines = raw(corpus / name)
    messages = list(import_files([corpus / name]))
    check_all(messages)
    last = {line["message"]["id"]: line["message"] for line in lines if line.get("type") == "assistant"}
    prompt = {
        key: sum(
            message["usage"].get(part) or 0
            for part in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        )
        for key, message in last.items()
    }
    reports = [message.event for message in messages if message.event["type"] == "usage.reported"]
    assert [event["context_tokens"] for event in reports] == [size for size in prompt.values() if size]
    assert sum(event["output_tokens"] for event in reports) == sum(
        message["usage"]["output_tokens"] for key, message in last.items() if prompt[key]
    )
    counts = counted(messages)
    assert counts["tool.called"] == len(blocks(lines, "tool_use"))
    assert counts["tool.returned"] == len(blocks(lines, "tool_result"))
    assert counts["context.replaced"] == sum(line.get("subtype") == "compact_boundary" for line in lines)
    failed = sum(bool(block.get("is_error")) for block in blocks(lines, "tool_result"))
    interrupted = sum(
        isinstance(line.get("toolUseResult"), dict) and line["toolUseResult"].get("interrupted") is True
        for line in lines
    )
    statuses = Counter(m.event["status"] for m in messages if m.event["type"] == "tool.returned")
    assert statuses["error"] + statuses["cancelled"] + statuses["timeout"] == failed + interrupted


@pytest.mark.parametrize("name", CLAUDE)
def test_claude_code_text_arrives_whole_and_in_file_order(corpus: Path, name: str) -> None:
    lines = raw(corpus / name)
    texts = [block["text"] for block in blocks(lines, "text")] + [
        line["message"]["content"]
        for line in lines
        if line.get("type") == "user" and isinstance(line["message"]["content"], str)
    ]
    told = [
        part["text"]
        for message in import_files([corpus / name])
        if message.event["type"] == "message"
        for part in (
            message.event["content"]
            if isinstance(message.event["content"], list)
            else [{"kind": "text", "text": message.event["content"]}]
        )
        if part["kind"] == "text"
    ]
    assert sorted(told) == sorted(texts)


def test_a_compaction_in_the_file_replaces_the_context_before_its_summary(corpus: Path) -> None:
    path = corpus / "claude-code-entire/fc-99c919b212-0-full.jsonl"
    summary = next(line for line in raw(path) if line.get("isCompactSummary"))
    events = [message.event for message in import_files([path])]
    place = next(index for index, event in enumerate(events) if event["type"] == "context.replaced")
    assert events[place]["by"] == "provider"
    assert "context_tokens" not in events[place]
    following = events[place + 1]
    assert (following["role"], following["content"]) == ("user", summary["message"]["content"])


def test_an_image_becomes_a_small_part(corpus: Path) -> None:
    path = corpus / "claude-code-entire/fc-99c919b212-0-full.jsonl"
    images = [
        message.event
        for message in import_files([path])
        if message.event["type"] == "message" and isinstance(message.event["content"], list)
        for part in message.event["content"]
        if part["kind"] == "image"
    ]
    assert len(images) == 1
    assert images[0]["content"] == [{"kind": "image", "media_type": "image/png"}]


def test_todo_lists_become_plans_with_stable_ids(corpus: Path) -> None:
    path = corpus / "claude-code-codemie/session-196820da.jsonl"
    written = [b["input"]["todos"] for b in blocks(raw(path), "tool_use") if b["name"] == "TodoWrite"]
    plans = [m.event["plan"] for m in import_files([path]) if m.event["type"] == "step.changed"]
    assert [[item["text"] for item in plan] for plan in plans] == [
        [todo["content"] for todo in todos] for todos in written
    ]
    names = defaultdict(set)
    for plan in plans:
        for item in plan:
            names[item["text"]].add(item["id"])
    assert all(len(ids) == 1 for ids in names.values())
    assert {item["state"] for plan in plans for item in plan} == {"todo", "doing", "done"}


def test_a_subagent_file_given_with_its_session_is_a_child_run(corpus: Path) -> None:
    folder = corpus / "claude-code-codemie/claude/incremental-subagents"
    session, agent = folder / "turn-2.jsonl", folder / "turn-2/subagents/agent-a485154.jsonl"
    for paths in ([session, agent], [agent, session]):
        messages = list(import_files(paths))
        check_all(messages)
        parent, child = dict.fromkeys(message.run for message in messages)
        spawned = next(i for i, m in enumerate(messages) if m.event["type"] == "child.spawned")
        first = next(i for i, m in enumerate(messages) if m.run == child)
        returned = next(i for i, m in enumerate(messages) if m.event["type"] == "child.returned")
        last = max(i for i, m in enumerate(messages) if m.run == child)
        assert spawned < first <= last < returned
        assert messages[spawned].event["child_run"] == child
        assert messages[first].event["parent_run"] == parent
        assert messages[returned].event["status"] == "succeeded"
        task = next(b["input"]["prompt"] for b in blocks(raw(session), "tool_use") if b["name"] == "Task")
        assert messages[spawned].event["task"] == task
    alone = list(import_files([agent]))
    assert "parent_run" not in alone[0].event
    assert [m.event["id"] for m in alone] == [m.event["id"] for m in messages if m.run == child]


def test_subagents_that_no_call_started_are_children_of_the_named_session(corpus: Path) -> None:
    messages = list(
        import_files(sorted((corpus / "claude-code-codemie/claude/-tmp-private").glob("*.jsonl")))
    )
    check_all(messages)
    assert counted(messages)["child.spawned"] == 2
    assert counted(messages)["child.returned"] == 0
    assert sum("parent_run" in message.event for message in messages) == 2


@pytest.mark.parametrize("name", CODEX)
def test_codex_usage_calls_and_results(corpus: Path, name: str) -> None:
    lines = raw(corpus / name)
    messages = list(import_files([corpus / name]))
    check_all(messages)
    expected, before = [], None
    for line in lines:
        info = line["payload"].get("info") if line["payload"].get("type") == "token_count" else None
        if info and info["total_token_usage"] != before and info["last_token_usage"]["input_tokens"]:
            before = info["total_token_usage"]
            expected.append(info["last_token_usage"])
    reports = [message.event for message in messages if message.event["type"] == "usage.reported"]
    assert [event["context_tokens"] for event in reports] == [usage["input_tokens"] for usage in expected]
    assert [event["output_tokens"] for event in reports] == [usage["output_tokens"] for usage in expected]
    items = Counter(line["payload"]["type"] for line in lines if line["type"] == "response_item")
    counts = counted(messages)
    calls = sum(number for kind, number in items.items() if kind.endswith("_call"))
    assert counts["tool.called"] == calls
    hosted = [
        line["payload"]
        for line in lines
        if line["payload"].get("type", "").endswith("_call") and "call_id" not in line["payload"]
    ]
    outputs = sum(number for kind, number in items.items() if kind.endswith(("_output", "_call_output")))
    assert counts["tool.returned"] == outputs + sum(item["status"] == "completed" for item in hosted)
    assert counts["context.replaced"] == sum(line["type"] == "compacted" for line in lines)


def test_codex_exit_codes_and_window_come_from_the_file(corpus: Path) -> None:
    path = corpus / CODEX[0]
    messages = list(import_files([path]))
    assert messages[0].event["model"] == {"name": "gpt-5.5", "context_window": 258400}
    assert next(import_files([path], window=32_000)).event["model"]["context_window"] == 32_000
    wrong = sum(
        bool(re.search(r"^Process exited with code [1-9]", str(line["payload"].get("output")), re.M))
        for line in raw(path)
        if line["payload"].get("type") == "function_call_output"
    )
    failed = [m.event for m in messages if m.event.get("status") == "error"]
    assert sum("Process exited" in event["content"] for event in failed) == wrong
    assert all("Process running with session ID" not in event["content"] for event in failed)


def test_usage_names_the_last_event_of_its_prompt(corpus: Path) -> None:
    for name in (CLAUDE[-1], CODEX[0]):
        order: dict[str, int] = {}
        answers: dict[str, int] = {}
        for message in import_files([corpus / name]):
            event = message.event
            if event["type"] == "usage.reported":
                assert event["through"] in order
                assert all(place > order[event["through"]] for place in answers.values())
                answers.clear()
            elif event.get("role") == "assistant" or event["type"] == "tool.called":
                answers[event["id"]] = len(order)
            order[event["id"]] = len(order)


@pytest.mark.parametrize("name", CLAUDE + CODEX)
def test_a_second_import_gives_the_same_bytes(corpus: Path, name: str) -> None:
    first = [message.payload() for message in import_files([corpus / name])]
    assert first == [message.payload() for message in import_files([corpus / name, corpus / name])]


def test_the_same_session_in_two_files_is_imported_once(corpus: Path, tmp_path: Path) -> None:
    for name in (CLAUDE[5], CODEX[0]):
        whole = corpus / name
        half = tmp_path / "earlier.jsonl"
        kept = whole.read_bytes().splitlines(keepends=True)
        half.write_bytes(b"".join(kept[: len(kept) // 2]))
        once = [m.payload() for m in import_files([whole])]
        twice = list(import_files([half, whole]))
        check_all(twice)
        content = [{k: v for k, v in m.event.items() if k not in ("model", "window")} for m in twice]
        assert len(content) == len(once)


@pytest.mark.parametrize("name", FOREIGN)
def test_other_formats_are_refused_with_line_and_what_is_allowed(corpus: Path, name: str) -> None:
    path = corpus / name
    with pytest.raises(ImportFailure) as caught:
        detect(path)
    assert str(caught.value).startswith(f"{path}:1: unknown format")
    for allowed in ("claude-code", "codex", "events"):
        assert allowed in caught.value.reason
    with pytest.raises(ImportFailure):
        list(import_files([path], format="claude-code"))


def test_every_known_file_is_detected(corpus: Path) -> None:
    assert {detect(corpus / name) for name in CLAUDE} == {"claude-code"}
    assert {detect(corpus / name) for name in CODEX} == {"codex"}


def test_a_cut_last_line_is_left_out_and_noted(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_bytes((corpus / CLAUDE[0]).read_bytes()[:-40])
    report = Report()
    messages = list(import_files([path], report=report))
    check_all(messages)
    assert len(report.notes) == 1
    assert "half a line" in report.notes[0]
