"""The lines of one Claude Code conversation turned into messages of its run.

Blocks of one API message stay in line order and are joined; todo lists, answers to plans, compactions and
subagents become ledger events, since the lines carry them as data. Nothing is read out of prose: what a user
forbids in words stays a message.
"""

from __future__ import annotations

import json
import re
from typing import Any

from sidecar.importers.claude_survey import SYNTHETIC, Voice, prompt_tokens
from sidecar.importers.content import parts, plain_text, result_content
from sidecar.importers.model import RunWriter, count, ident, plan_items, text_digest, token

_STATES = {"pending": "todo", "in_progress": "doing", "completed": "done"}
_CALLS = frozenset({"tool_use", "server_tool_use", "mcp_tool_use"})
_REFUSED = re.compile(
    r"The user doesn't want to (proceed|take this action)|\[Request interrupted by user"
    r"|Error: Interrupted by user"
)


class Conversation:
    """One run's lines turned into messages. Knows its todo list, its open plan approvals and its children."""

    def __init__(self, writer: RunWriter, session: str, links: dict[str, str]) -> None:
        self.writer = writer
        self.due: list[str] = []
        self.spawned: set[str] = set()
        self._session = session
        self._links = links
        self._returned: set[str] = set()
        self._seen: dict[str, int] = {}
        self._calls: dict[str, tuple[str, dict[str, Any]]] = {}
        self._tasks: dict[str, dict[str, str]] = {}

    def line(self, line: dict[str, Any], number: int, voice: Voice) -> None:
        """Publish what one line says."""
        self.writer.clock(line.get("timestamp"))
        uuid = line.get("uuid")
        if isinstance(uuid, str) and uuid:
            content = hash(json.dumps([line.get(key) for key in ("type", "subtype", "message", "content")]))
            if self._seen.get(uuid) == content:
                return
            self._seen.setdefault(uuid, content)
        key = uuid if isinstance(uuid, str) and uuid else f"line-{number}"
        kind, message = line.get("type"), line.get("message")
        if kind == "system":
            self._system(line, key)
        elif kind == "attachment":
            self._attachment(line.get("attachment"), key)
        elif not isinstance(message, dict):
            return
        elif kind == "assistant":
            self._assistant(line, message, key, number, voice)
        elif kind == "user" and (line.get("isCompactSummary") or not line.get("isVisibleInTranscriptOnly")):
            self._blocks("user", message.get("content"), key, line.get("toolUseResult"))

    def spawn(self, agent: str, task: str, key: str) -> None:
        """`child.spawned`, once a child."""
        if agent not in self.spawned:
            self.spawned.add(agent)
            self.writer.publish("child.spawned", key, child_run=child_run(self._session, agent), task=task)

    def _system(self, line: dict[str, Any], key: str) -> None:
        subtype = line.get("subtype")
        if subtype == "compact_boundary":
            self.writer.publish("context.replaced", key, by="provider")
        elif subtype == "turn_duration" or (subtype == "stop_hook_summary" and not line.get("hookErrors")):
            self.writer.turn_ended(key)

    def _attachment(self, attachment: Any, key: str) -> None:
        if isinstance(attachment, dict) and attachment.get("type") == "queued_command":
            self.writer.message("user", parts(attachment.get("prompt")), key)

    def _assistant(
        self, line: dict[str, Any], message: dict[str, Any], key: str, number: int, voice: Voice
    ) -> None:
        model, message_id = message.get("model"), message.get("id")
        model = model if isinstance(model, str) else ""
        if line.get("isApiErrorMessage") is True:
            # the client's own words about a failed request: no answer of the model, so no end of the turn
            self.writer.message("system", parts(message.get("content")), key)
            return
        message_id = message_id if isinstance(message_id, str) and message_id else key
        if model and model != SYNTHETIC:
            self.writer.use_model(model, f"{key}/model")
        self._blocks("assistant", message.get("content"), key, None, message_id)
        if voice.usage_lines.get(message_id) == number and model != SYNTHETIC:
            self._usage(message["usage"], model, message_id, key)

    def _usage(self, usage: dict[str, Any], model: str, message_id: str, key: str) -> None:
        self.writer.usage(
            message_id,
            f"{key}/usage",
            model or self.writer.model,
            context_tokens=prompt_tokens(usage),
            output_tokens=count(usage.get("output_tokens")) or 0,
            input_tokens=count(usage.get("input_tokens")),
            cache_read_tokens=count(usage.get("cache_read_input_tokens")),
            cache_write_tokens=count(usage.get("cache_creation_input_tokens")),
        )

    def _blocks(self, role: str, content: Any, key: str, outcome: Any, message_id: str | None = None) -> None:
        if not isinstance(content, list):
            content = [content]
        kept: list[Any] = []
        for index, block in enumerate(content):
            kind = block.get("type") if isinstance(block, dict) else None
            call = isinstance(kind, str) and kind in _CALLS and isinstance(block.get("name"), str)
            result = isinstance(kind, str) and kind.endswith("tool_result")
            if not call and not result:
                kept.append(block)
                continue
            place = key if len(content) == 1 else f"{key}/{index}"
            self._text(role, kept, f"{place}/text", message_id)
            kept = []
            if call:
                self._call(block, place, message_id)
            else:
                self._result(block, place, outcome)
        self._text(role, kept, key if len(kept) == len(content) else f"{key}/text", message_id)

    def _text(self, role: str, blocks: list[Any], key: str, message_id: str | None) -> None:
        made = parts(blocks)
        if not made:
            return
        if message_id is not None:
            self.writer.say(message_id, made, key)
        else:
            self.writer.message(role, made, key)

    def _call(self, block: dict[str, Any], key: str, message_id: str | None) -> None:
        call, name, given = block.get("id"), block["name"], block.get("input")
        call = call if isinstance(call, str) and call else key
        arguments = given if isinstance(given, dict) else {}
        self._calls[call] = (name, arguments)
        self.writer.call(call, name, given if given is not None else {}, key, message_id)
        agent = self._links.get(call)
        if agent is not None and agent not in self.spawned:
            task = arguments.get("prompt") or arguments.get("description")
            self.spawn(agent, task if isinstance(task, str) and task else name, f"{key}/child")
            self.due.append(agent)
        if name == "ExitPlanMode":
            self._plan_request(call, arguments, key)

    def _result(self, block: dict[str, Any], key: str, outcome: Any) -> None:
        call = block.get("tool_use_id")
        call = call if isinstance(call, str) and call else key
        content = result_content(block.get("content"))
        status = _status(block, outcome, plain_text(block.get("content")))
        name, given = self._calls.get(call, ("", {}))
        self.writer.result(call, status, content, key)
        agent = self._links.get(call)
        running = isinstance(outcome, dict) and outcome.get("status") == "async_launched"
        if agent in self.spawned and agent not in self._returned and not running:
            self._returned.add(agent)
            said = {"ok": "succeeded", "cancelled": "cancelled"}.get(status, "failed")
            child = child_run(self._session, agent)
            self.writer.publish("child.returned", f"{key}/child", child_run=child, status=said)
        if name == "ExitPlanMode":
            self._plan_answer(call, given, status, block, key)
        elif status == "ok":
            self._todos(name, given, outcome, key)

    def _todos(self, name: str, given: dict[str, Any], outcome: Any, key: str) -> None:
        if name == "TodoWrite" and isinstance(given.get("todos"), list):
            entries = [
                (todo["content"], _STATES.get(str(todo.get("status")), "todo"))
                for todo in given["todos"]
                if isinstance(todo, dict) and isinstance(todo.get("content"), str) and todo["content"]
            ]
            self.writer.publish("step.changed", f"{key}/plan", plan=plan_items(entries))
        elif name in ("TaskCreate", "TaskUpdate") and self._task_changed(name, given, outcome):
            items = [dict(task, id=ident(f"task-{number}")) for number, task in self._tasks.items()]
            self.writer.publish("step.changed", f"{key}/plan", plan=items)

    def _task_changed(self, name: str, given: dict[str, Any], outcome: Any) -> bool:
        subject = given.get("subject")
        if name == "TaskCreate":
            made = outcome.get("task") if isinstance(outcome, dict) else None
            number = made.get("id") if isinstance(made, dict) else None
            if not isinstance(subject, str) or not isinstance(number, str):
                return False
            self._tasks[number] = {"text": subject, "state": "todo"}
            return True
        number, status = given.get("taskId"), given.get("status")
        if not isinstance(number, str) or number not in self._tasks:
            return False
        if status == "deleted":
            del self._tasks[number]
            return True
        task = self._tasks[number]
        task["state"] = _STATES.get(str(status), task["state"])
        task["text"] = subject if isinstance(subject, str) and subject else task["text"]
        return True

    def _plan_request(self, call: str, given: dict[str, Any], key: str) -> None:
        plan = given.get("plan")
        self.writer.publish(
            "approval.requested",
            f"{key}/approval",
            approval_id=plan_approval(call),
            action="plan",
            payload_digest=text_digest(plan) if isinstance(plan, str) and plan else None,
        )

    def _plan_answer(
        self, call: str, given: dict[str, Any], status: str, block: dict[str, Any], key: str
    ) -> None:
        approved = status == "ok" and "approved your plan" in plain_text(block.get("content"))[:400]
        if not approved and status != "cancelled":
            return
        plan = given.get("plan")
        self.writer.publish(
            "approval.resolved",
            f"{key}/approval",
            channel="authority",
            approval_id=plan_approval(call),
            outcome="granted" if approved else "denied",
            by="user",
            action="plan",
            payload_digest=text_digest(plan) if isinstance(plan, str) and plan else None,
        )


def _status(block: dict[str, Any], outcome: Any, text: str) -> str:
    if isinstance(outcome, dict) and outcome.get("interrupted") is True:
        return "cancelled"
    if block.get("is_error") is not True:
        return "ok"
    if _REFUSED.match(text):
        return "cancelled"
    return "timeout" if "Command timed out after" in text[:2_000] else "error"


def plan_approval(call: str) -> str:
    """The approval id of a plan put to the user by the call of that id."""
    return ident(f"plan-{call}")


def child_run(session: str, agent: str) -> str:
    """The run of a subagent of a session."""
    return token(f"{session}-agent-{agent}")
