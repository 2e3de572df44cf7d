"""The items of one Codex thread turned into messages of its run.

The context is `response_item` alone; of the `event_msg` copies only token counts, the end of a task and the
life of sub-agents are read. A token count whose total equals the one before is the same count again.
"""

from __future__ import annotations

import json
import re
from typing import Any

from sidecar.importers import lines
from sidecar.importers.content import parts, plain_text, result_content, without_payloads
from sidecar.importers.model import RunWriter, count, plan_items, token

_STATES = {"pending": "todo", "in_progress": "doing", "completed": "done"}
_EXITED = re.compile(r"^(?:Process exited with code|Exit code:) (-?\d+)", re.M)
_FAILED = re.compile(r"(exec_command|write_stdin|apply_patch verification|apply_patch) failed")
_ABORTED = re.compile(r"\s*aborted( by user|$)")


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
            told: list[dict[str, Any]] = [
                {"kind": "reasoning", "text": part["text"]} for part in made if part["kind"] == "text"
            ]
            if told or item.get("encrypted_content"):
                self.writer.say(self._answering(key), told or [{"kind": "reasoning"}], key)
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
        content = parts(item.get("content"))
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
            picture = kind == "image_generation_call" and isinstance(item.get("result"), str)
            content = [{"kind": "image", "media_type": "image/png"}] if picture else ""
            self.writer.result(call, "ok", content, f"{key}/output")

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
