"""Our own event files, and the sample run that comes with the package."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from protocol.codec import decode_event
from protocol.errors import ProtocolError
from sidecar.importers import SAMPLE, ImportFailure, detect, import_files


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_the_sample_is_sound_and_has_something_to_resume() -> None:
    assert detect(SAMPLE) == "events"
    messages = list(import_files([SAMPLE]))
    for message in messages:
        decode_event(message.payload(), run=message.run, channel=message.channel)
    events = [message.event for message in messages]
    kinds = Counter(event["type"] for event in events)
    assert 300 <= len(events) <= 450
    assert events[0]["type"] == "run.started"
    assert not kinds["run.finished"]
    assert {message.run for message in messages} == {"night-watch"}
    assert len({(message.channel, message.event["id"]) for message in messages}) == len(messages)
    told = [m.event["seq"] for m in messages if m.channel == "event"]
    assert told == list(range(1, len(told) + 1))
    usage = [event["context_tokens"] for event in events if event["type"] == "usage.reported"]
    assert usage == sorted(usage)
    assert usage[-1] > 2 * events[0]["model"]["context_window"]
    assert kinds["usage.reported"] == sum(event.get("role") == "assistant" for event in events)
    assert [event["at"] for event in events] == sorted(event["at"] for event in events)


def test_the_samples_approvals_and_operations_hang_together() -> None:
    messages = list(import_files([SAMPLE]))
    asked: dict[str, dict[str, Any]] = {}
    granted: set[str] = set()
    declared: dict[str, dict[str, Any]] = {}
    open_calls: set[str] = set()
    for message in messages:
        event = message.event
        match event["type"]:
            case "approval.requested":
                asked[event["approval_id"]] = event
            case "approval.resolved":
                request = asked[event["approval_id"]]
                assert message.channel == "authority"
                assert (event["action"], event["payload_digest"]) == (
                    request["action"],
                    request["payload_digest"],
                )
                granted.add(event["approval_id"])
            case "operation.declared":
                declared[event["operation_id"]] = event
            case "tool.called":
                open_calls.add(event["call_id"])
                operation = declared[event["operation_id"]] if "operation_id" in event else {}
                if "approval_id" in operation:
                    assert operation["approval_id"] in granted
                    assert operation["payload_digest"] == asked[operation["approval_id"]]["payload_digest"]
            case "tool.returned":
                open_calls.remove(event["call_id"])
    assert not open_calls
    assert set(asked) - granted == {"ap-deploy"}
    opened = {m.event["question_id"] for m in messages if m.event["type"] == "question.opened"}
    answered = {m.event["question_id"] for m in messages if m.event["type"] == "question.answered"}
    assert opened - answered == {"q-retention"}


def test_events_are_published_as_written(tmp_path: Path) -> None:
    good = {
        "v": 1,
        "id": "e1",
        "type": "message",
        "at": "2026-01-01T00:00:00Z",
        "role": "user",
        "content": "x",
    }
    wrong = {"v": 1, "id": "e2", "type": "nonsense.event", "text": "\ud800", "seq": -1}
    path = write(tmp_path / "my run.jsonl", good, {**wrong, "channel": "authority"}, {**good, "run": "other"})
    messages = list(import_files([path]))
    assert [message.event for message in messages] == [good, wrong, {**good, "run": "other"}]
    assert [message.channel for message in messages] == ["event", "authority", "event"]
    assert messages[0].run == messages[1].run
    assert messages[2].run == "other"
    with pytest.raises(ProtocolError):
        decode_event(messages[1].payload(), run=messages[1].run, channel="authority")
    assert next(import_files([write(tmp_path / "plain-run_1.jsonl", good)])).run == "plain-run_1"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"v":1,"type":', "not one JSON value"),
        ("[1]", "not a JSON object"),
        ('{"v":1,"type":"message","channel":"record"}', "allowed: event, authority"),
        ('{"v":1,"type":"message","run":"a b"}', "not starting with _"),
        ('{"v":1,"type":"message","run":5}', "not starting with _"),
    ],
)
def test_a_line_that_cannot_be_published_is_named_before_anything_is(
    tmp_path: Path, line: str, said: str
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"v":1,"id":"e1","type":"run.paused","reason":"x"}\n' + line, encoding="utf-8")
    messages = import_files([path])
    with pytest.raises(ImportFailure, match=said) as caught:
        next(messages)
    assert caught.value.line == 2
