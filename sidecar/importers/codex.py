"""Codex rollout files (`{timestamp, type, payload}` a line) as runs.

The context is `response_item` alone; of the `event_msg` copies only token counts, the end of a task and the
life of sub-agents are read. A token count whose total equals the one before is the same count again. A fork
repeats its parent's items before its own: they are left out where the file shows the seam (a second
`session_meta` of the parent, and the first task started after the fork); otherwise all is kept.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from sidecar.importers import lines
from sidecar.importers.content import parts, plain_text, result_content, without_payloads
from sidecar.importers.model import (
    DEFAULT_WINDOW,
    Imported,
    ImportFailure,
    Report,
    RunWriter,
    count,
    plan_items,
    token,
    utc,
)

SOURCE = "codex"
RECORD_TYPES = frozenset(
    {
        "session_meta",
        "turn_context",
        "response_item",
        "event_msg",
        "compacted",
        "world_state",
        "inter_agent_communication_metadata",
    }
)
_STATES = {"pending": "todo", "in_progress": "doing", "completed": "done"}
_EXITED = re.compile(r"^(?:Process exited with code|Exit code:) (-?\d+)", re.M)
_FAILED = re.compile(r"(exec_command|write_stdin|apply_patch verification|apply_patch) failed")
_ABORTED = re.compile(r"\s*aborted( by user|$)")
_INJECTED = re.compile(r"\s*(<|# AGENTS\.md)")


class Survey:
    """The facts of one rollout: who it is, where its own part begins, and what started it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.thread = ""
        self.parent: str | None = None
        self.agent = "codex"
        self.instructions = ""
        self.model = ""
        self.window: int | None = None
        self.goal = ""
        self.at = ""
        self.skip_through = 0
        self.children: set[str] = set()
        self._forked_from: str | None = None
        self._fork_second = 0.0
        self._seam_open = False
        self._fallback_goal = ""
        self._read()

    def _read(self) -> None:
        first, known = None, False
        for number, line in lines.objects(self.path):
            first = first or number
            kind, payload = line.get("type"), line.get("payload")
            if not isinstance(kind, str) or kind not in RECORD_TYPES or not isinstance(payload, dict):
                continue
            known = True
            self.at = self.at or utc(line.get("timestamp")) or ""
            if kind == "session_meta":
                self._meta(payload)
            elif kind == "turn_context" and not self.model and isinstance(payload.get("model"), str):
                self.model = payload["model"]
            elif kind == "response_item" and not self._fallback_goal and payload.get("role") == "user":
                text = plain_text(payload.get("content"))
                self._fallback_goal = text if text.strip() and not _INJECTED.match(text) else ""
            elif kind == "event_msg":
                self._event(payload, number)
        if not known:
            raise ImportFailure(self.path, first, "no line of a Codex rollout; expected {timestamp, type, payload}")
        self.thread = self.thread or self.path.stem
        self.goal = self.goal or self._fallback_goal or f"Codex session {self.thread}"

    def _meta(self, payload: dict[str, Any]) -> None:
        thread = payload.get("id")
        if not isinstance(thread, str) or not thread:
            return
        if self.thread:
            self._seam_open = self._seam_open or thread == self._forked_from
            return
        self.thread = thread
        source = payload.get("source")
        subagent = source.get("subagent") if isinstance(source, dict) else None
        spawn = subagent.get("thread_spawn") if isinstance(subagent, dict) else None
        for holder in (payload, spawn):
            parent = holder.get("parent_thread_id") if isinstance(holder, dict) else None
            if isinstance(parent, str) and parent and parent != thread:
                self.parent = parent
        self.agent = "codex-subagent" if subagent is not None or self.parent else "codex"
        forked, started = payload.get("forked_from_id"), utc(payload.get("timestamp"))
        if isinstance(forked, str) and forked and forked != thread and started:
            self._forked_from = forked
            self._fork_second = float(int(datetime.fromisoformat(started).timestamp()))
        base = payload.get("base_instructions", payload.get("instructions"))
        text = base.get("text") if isinstance(base, dict) else base
        self.instructions = text if isinstance(text, str) else ""

    def _event(self, payload: dict[str, Any], number: int) -> None:
        kind = payload.get("type")
        if kind == "task_started":
            started = payload.get("started_at")
            own = isinstance(started, int | float) and not isinstance(started, bool) and started >= self._fork_second
            if self._seam_open and own:
                # what was noted from the parent's copy does not describe this run
                self._seam_open, self._forked_from, self.skip_through = False, None, number - 1
                self.goal = self._fallback_goal = ""
            self.window = self.window or count(payload.get("model_context_window")) or None
        elif kind == "token_count":
            info = payload.get("info")
            if isinstance(info, dict):
                self.window = self.window or count(info.get("model_context_window")) or None
        elif kind == "user_message" and not self.goal:
            text = payload.get("message")
            self.goal = text if isinstance(text, str) and text.strip() else ""
        elif kind == "collab_agent_spawn_end" and isinstance(payload.get("new_thread_id"), str):
            self.children.add(payload["new_thread_id"])


class Thread:
    """One rollout's items turned into messages."""

    def __init__(self, writer: RunWriter, fixed_window: bool) -> None:
        self.writer = writer
        self.due: list[str] = []
        self.spawned: set[str] = set()
        self.imported: set[bytes] = set()
        self._fixed_window = fixed_window
        self._returned: set[str] = set()
        self._calls: dict[str, tuple[str, Any]] = {}
        self._answer: str | None = None
        self._total: Any = None
        self._model_seen = False

    def line(self, line: dict[str, Any], key: str) -> None:
        """Publish what one line says; `key` is the line's id."""
        self.writer.clock(line.get("timestamp"))
        kind, payload = line.get("type"), line.get("payload")
        if not isinstance(payload, dict):
            return
        if kind == "response_item":
            self.item(payload, key)
        elif kind == "compacted":
            self._compacted(payload, key)
        elif kind == "turn_context":
            model = payload.get("model")
            if isinstance(model, str) and model:
                self.writer.use_model(model, f"{key}/model")
        elif kind == "event_msg":
            self._event(payload, key)

    def spawn(self, thread: str, task: str, key: str) -> None:
        """`child.spawned`, once a child."""
        if thread not in self.spawned:
            self.spawned.add(thread)
            self.writer.publish("child.spawned", key, child_run=token(thread), task=task)

    def item(self, item: dict[str, Any], key: str) -> None:
        """Publish one Responses item."""
        kind = item.get("type")
        if kind == "message":
            self._message(item, key)
        elif kind == "reasoning":
            made = parts(item.get("summary")) + parts(item.get("content"))
            thoughts = [{"kind": "reasoning", "text": part["text"]} for part in made if part["kind"] == "text"]
            if thoughts or item.get("encrypted_content"):
                self.writer.say(self._answering(key), thoughts or [{"kind": "reasoning"}], key)
        elif kind == "compaction":
            self.writer.say(self._answering(key), [{"kind": "reasoning"}], key)
        elif kind == "agent_message":
            # another agent's words reach the model here: no user, so no request
            self._prompt("developer", parts(item.get("content")), key)
        elif isinstance(kind, str) and kind.endswith("_call"):
            self._call(item, kind, key)
        elif isinstance(kind, str) and (kind.endswith("_call_output") or kind == "tool_search_output"):
            self._output(item, kind, key)

    def _message(self, item: dict[str, Any], key: str) -> None:
        role = item.get("role")
        content = [part for part in parts(item.get("content")) if part is not None]
        if role == "assistant":
            if content:
                self.writer.say(self._answering(key), content, key)
        elif role in ("user", "system", "developer"):
            self._prompt(str(role), content, key)

    def _prompt(self, role: str, content: list[dict[str, Any]], key: str) -> None:
        self._answer = None
        self.writer.message(role, content, key)

    def _answering(self, key: str) -> str:
        """The id of the model answer that is being read; the first item of an answer names it."""
        if self._answer is None:
            self._answer = f"answer-{key}"
            self.writer.begin(self._answer)
        return self._answer

    def _call(self, item: dict[str, Any], kind: str, key: str) -> None:
        answer = self._answering(key)
        call, name = item.get("call_id"), item.get("name")
        hosted = not isinstance(call, str) or not call
        call = f"{kind}/{key}" if hosted else str(call)
        tool = name if isinstance(name, str) and name else kind.removesuffix("_call")
        space = item.get("namespace")
        tool = f"{space}.{tool}" if isinstance(space, str) and space else tool
        given = _arguments(item)
        self._calls[call] = (tool, given)
        self.writer.call(call, tool, given, key, answer)
        if hosted and item.get("status") == "completed":
            made = parts({"type": "input_image", "data": item["result"]}) if isinstance(item.get("result"), str) else ""
            self.writer.result(call, "ok", made, f"{key}/output")

    def _output(self, item: dict[str, Any], kind: str, key: str) -> None:
        call, output = item.get("call_id"), item.get("output")
        call = call if isinstance(call, str) and call else f"{kind}/{key}"
        self._answer = None
        if kind == "tool_search_output":
            output = {"type": "tools", "tools": item.get("tools")}
        success = output.get("success") if isinstance(output, dict) else None
        if isinstance(output, dict) and "content" in output and "type" not in output:
            output = output["content"]
        content = result_content(output)
        status = _status(content if isinstance(content, str) else plain_text(output), success)
        self.writer.result(call, status, content, key)
        tool, given = self._calls.get(call, ("", None))
        if tool == "update_plan" and status == "ok" and isinstance(given, dict):
            self._plan(given.get("plan"), key)

    def _plan(self, plan: Any, key: str) -> None:
        if isinstance(plan, list):
            entries = [
                (step["step"], _STATES.get(str(step.get("status")), "todo"))
                for step in plan
                if isinstance(step, dict) and isinstance(step.get("step"), str) and step["step"]
            ]
            self.writer.publish("step.changed", f"{key}/plan", plan=plan_items(entries))

    def _compacted(self, payload: dict[str, Any], key: str) -> None:
        self._answer = None
        self.writer.publish("context.replaced", key, by="provider")
        history, summary = payload.get("replacement_history"), payload.get("message")
        if isinstance(history, list):
            for index, item in enumerate(history):
                if isinstance(item, dict):
                    self.item(item, f"{key}/{index}")
        elif isinstance(summary, str):
            self.writer.message("user", summary, f"{key}/summary")
        self.writer.flush()
        self._answer = None

    def _event(self, payload: dict[str, Any], key: str) -> None:
        kind = payload.get("type")
        if kind == "token_count":
            self._tokens(payload.get("info"), key)
        elif kind == "task_complete":
            self._answer = None
            self.writer.turn_ended(key)
        elif kind == "task_started" and not self._fixed_window:
            self.writer.use_model("", f"{key}/model", count(payload.get("model_context_window")))
        elif kind == "collab_agent_spawn_end" and isinstance(payload.get("new_thread_id"), str):
            task, thread = payload.get("prompt"), payload["new_thread_id"]
            self.spawn(thread, task if isinstance(task, str) and task else thread, key)
            self.due.append(thread)
        elif kind == "collab_close_end":
            self._child_ended(payload.get("receiver_thread_id"), payload.get("status"), key)
        elif kind == "collab_waiting_end" and isinstance(payload.get("agent_statuses"), list):
            for index, entry in enumerate(payload["agent_statuses"]):
                if isinstance(entry, dict):
                    self._child_ended(entry.get("thread_id"), entry.get("status"), f"{key}/{index}")

    def _child_ended(self, thread: Any, status: Any, key: str) -> None:
        said = next(iter(status), None) if isinstance(status, dict) else status
        outcome = {"completed": "succeeded", "errored": "failed", "shutdown": "cancelled"}.get(str(said))
        if isinstance(thread, str) and thread in self.spawned and thread not in self._returned and outcome:
            self._returned.add(thread)
            self.writer.publish("child.returned", key, child_run=token(thread), status=outcome)

    def _tokens(self, info: Any, key: str) -> None:
        answer, self._answer = self._answer, None
        if not isinstance(info, dict):
            return
        total, last = info.get("total_token_usage"), info.get("last_token_usage")
        if not isinstance(last, dict) or (total is not None and total == self._total):
            return
        self._total = total
        prompt = count(last.get("input_tokens"))
        if not prompt:
            return
        if not self._fixed_window:
            self.writer.use_model("", f"{key}/model", count(info.get("model_context_window")))
        self.writer.usage(
            answer,
            key,
            self.writer.model,
            context_tokens=prompt,
            output_tokens=count(last.get("output_tokens")) or 0,
            input_tokens=prompt,
            cache_read_tokens=count(last.get("cached_input_tokens")),
            cache_write_tokens=count(last.get("cache_write_input_tokens")),
        )


def _arguments(item: dict[str, Any]) -> Any:
    """What was asked: decoded JSON arguments, a raw input as it stands, or a hosted tool's action."""
    given = item.get("arguments")
    if isinstance(given, str):
        try:
            return lines.clean(lines.parse(given)) if given.strip() else {}
        except ValueError:
            return given
    for name in ("arguments", "input", "action", "revised_prompt"):
        if item.get(name) is not None:
            return without_payloads(item[name])
    return {}


def _status(text: str, success: Any) -> str:
    head = text[:4_000].split("\nOutput:\n", 1)[0]
    found = _EXITED.search(head)
    code = int(found.group(1)) if found else _metadata_code(text)
    if code == 124 and "timed out after" in text[:4_000]:
        return "timeout"
    if _ABORTED.match(text):
        return "cancelled"
    return "error" if code or success is False or _FAILED.match(text) else "ok"


def _metadata_code(text: str) -> int:
    if not text.startswith('{"'):
        return 0
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return 0
    metadata = value.get("metadata") if isinstance(value, dict) else None
    code = metadata.get("exit_code") if isinstance(metadata, dict) else None
    return code if isinstance(code, int) else 0


class CodexImport:
    """Several rollouts read together: a sub-agent's file is placed where its parent started it."""

    def __init__(self, paths: Sequence[Path], window: int | None, report: Report) -> None:
        self._window = window
        self._report = report
        self._sink: list[Imported] = []
        self._threads: dict[str, Thread] = {}
        self._surveys = [Survey(path) for path in paths]
        known = {survey.thread for survey in self._surveys}
        spawned = {child: survey.thread for survey in self._surveys for child in survey.children}
        self._parents = {
            survey.thread: parent
            for survey in self._surveys
            if (parent := spawned.get(survey.thread, survey.parent)) in known and parent != survey.thread
        }
        self._linked = set(spawned)
        self._waiting = [survey for survey in self._surveys if survey.thread in self._parents]

    def messages(self) -> Iterator[Imported]:
        """All runs' messages: files in order, children inside their parents."""
        for survey in self._surveys:
            if survey.thread not in self._parents:
                yield from self._file(survey, None)
        while self._waiting:
            # threads that name each other as parents: none is told to have come first
            yield from self._file(self._waiting.pop(0), None)

    def _file(self, survey: Survey, parent: Thread | None) -> Iterator[Imported]:
        thread = self._threads.get(survey.thread)
        if thread is None:
            writer = RunWriter(token(survey.thread), survey.thread, self._sink, "1970-01-01T00:00:00.000Z")
            thread = self._threads[survey.thread] = Thread(writer, self._window is not None)
            self._start(thread, survey, parent)
        for child in [other for other in self._waiting if other.thread not in self._linked]:
            if self._parents[child.thread] == survey.thread:
                thread.spawn(child.thread, child.goal, f"child-{child.thread}")
                yield from self._children(thread, child.thread)
        earlier, fresh = frozenset(thread.imported), set()
        for number, line in lines.objects(survey.path, self._report):
            if number <= survey.skip_through:
                continue
            same = hashlib.sha256(json.dumps(line, sort_keys=True).encode()).digest()
            fresh.add(same)
            if same in earlier:
                continue
            thread.line(line, f"line-{number}")
            yield from self._drain()
            while thread.due:
                yield from self._children(thread, thread.due.pop(0))
        if survey.skip_through:
            self._report.note(survey.path, survey.skip_through, "up to here a copy of the parent's items, left out")
        thread.imported |= fresh
        thread.writer.flush()
        yield from self._drain()

    def _children(self, parent: Thread, thread: str) -> Iterator[Imported]:
        for child in [other for other in self._waiting if other.thread == thread]:
            if child in self._waiting:
                self._waiting.remove(child)
                yield from self._drain()
                yield from self._file(child, parent)

    def _start(self, thread: Thread, survey: Survey, parent: Thread | None) -> None:
        thread.writer.clock(survey.at or None)
        thread.writer.start(
            goal=survey.goal,
            model=survey.model,
            window=self._window or survey.window or DEFAULT_WINDOW,
            agent=survey.agent,
            source=SOURCE,
            parent_run=parent.writer.run if parent is not None else None,
        )
        thread.writer.message("system", survey.instructions, "instructions")

    def _drain(self) -> Iterator[Imported]:
        ready = list(self._sink)
        self._sink.clear()
        return iter(ready)
