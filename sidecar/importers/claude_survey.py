"""First look at one Claude Code session file: whose lines it holds and where each API message ends.

A file's lines may belong to the session itself and to several subagents. The survey tells them apart, finds
which Task call started which subagent, and the last line of every API message, so that the second reading can
go straight through the file. It publishes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sidecar.importers import lines
from sidecar.importers.content import plain_text
from sidecar.importers.model import ImportFailure, count, utc

SYNTHETIC = "<synthetic>"
TASK_TOOLS = frozenset({"Task", "Agent"})
_CONTEXT = frozenset({"user", "assistant", "system", "attachment"})
_KNOWN = _CONTEXT | {"progress", "summary", "file-history-snapshot", "queue-operation", "pr-link"}
_CLIENT_TEXT = re.compile(
    r"\s*(<command-|<local-command|<bash-|<system-reminder>|<task-notification>|<user-memory-input>|Caveat:"
    r"|\[Request interrupted)"
)
_COMMAND = re.compile(
    r"<command-name>\s*(\S+?)\s*</command-name>(?:.*?<command-args>(.*?)</command-args>)?", re.S
)


class Voice:
    """What one conversation of the file (the session or a subagent) says about itself."""

    def __init__(self) -> None:
        self.model = ""
        self.goal = ""
        self.command = ""
        self.at = ""
        self.usage_lines: dict[str, int] = {}

    def hear(self, line: dict[str, Any], number: int) -> None:
        """Take note of one line."""
        self.at = self.at or utc(line.get("timestamp")) or ""
        message = line.get("message")
        if not isinstance(message, dict):
            return
        if line.get("type") == "assistant":
            model = message.get("model")
            if not self.model and isinstance(model, str) and model != SYNTHETIC:
                self.model = model
            if isinstance(message.get("id"), str) and prompt_tokens(message.get("usage")) is not None:
                self.usage_lines[message["id"]] = number
        elif line.get("type") == "user" and not self.goal and not line.get("isMeta"):
            self._prompt(line, plain_text(message.get("content")))

    def _prompt(self, line: dict[str, Any], text: str) -> None:
        if line.get("isCompactSummary") or not text.strip():
            return
        if not _CLIENT_TEXT.match(text):
            self.goal = text
        elif not self.command and (found := _COMMAND.search(text)):
            self.command = " ".join(part.strip() for part in found.groups() if part)


class Survey:
    """The facts of one file. `session` is the parent's id in a subagent's own file, where `agent` is set."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.session = ""
        self.agent: str | None = None
        self.voices: dict[str, Voice] = {}
        self.links: dict[str, str] = {}
        self.prompts: dict[str, str] = {}
        self._sessions: list[str] = []
        self._roots: dict[str, str] = {}
        self._tasks: set[str] = set()
        self._read()

    def attribute(self, line: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """Whose line it is ("" = the file's own conversation) and the message line; None: no context."""
        kind = line.get("type")
        if kind == "progress":
            data = line.get("data")
            if not isinstance(data, dict) or data.get("type") != "agent_progress":
                return None
            agent, inner = data.get("agentId"), data.get("message")
            if not isinstance(agent, str) or not agent or not isinstance(inner, dict):
                return None
            return agent, inner
        if not isinstance(kind, str) or kind not in _CONTEXT:
            return None
        if line.get("isSidechain") is not True:
            return "", line
        agent = line.get("agentId")
        if not isinstance(agent, str) or not agent:
            agent = self._root(line)
        return ("" if agent == self.agent else agent), line

    def agents(self) -> Iterator[str]:
        """The subagents whose lines are in this file."""
        return (voice for voice in self.voices if voice)

    def _root(self, line: dict[str, Any]) -> str:
        uuid, parent = line.get("uuid"), line.get("parentUuid")
        uuid = uuid if isinstance(uuid, str) else ""
        root = self._roots.get(parent, uuid) if isinstance(parent, str) else uuid
        self._roots[uuid] = root
        return root or "unnamed"

    def _read(self) -> None:
        first, known = None, False
        for number, line in lines.objects(self.path):
            first = first or number
            kind = line.get("type")
            known = known or (isinstance(kind, str) and kind in _KNOWN)
            session = line.get("sessionId")
            if isinstance(session, str) and session and session not in self._sessions:
                self._sessions.append(session)
            whose = self.attribute(line)
            if whose is None:
                continue
            agent, inner = whose
            self.voices.setdefault(agent, Voice()).hear(inner, number)
            self._task(agent, line, inner)
        if not known:
            raise ImportFailure(self.path, first, "no Claude Code line; expected session JSONL")
        if "" not in self.voices and self.voices:
            self.agent = next(iter(self.voices))
            self.voices[""] = self.voices.pop(self.agent)
        stem = self.path.stem
        self.session = stem if stem in self._sessions else next(iter(self._sessions), stem)
        self._join_by_prompt()

    def _task(self, agent: str, line: dict[str, Any], inner: dict[str, Any]) -> None:
        call = line.get("parentToolUseID")
        if line.get("type") == "progress" and isinstance(call, str):
            self.links.setdefault(call, agent)
        message, outcome = inner.get("message"), inner.get("toolUseResult")
        content = message.get("content") if isinstance(message, dict) else None
        for block in content if isinstance(content, list) else ():
            if not isinstance(block, dict):
                continue
            kind, name, given = block.get("type"), block.get("name"), block.get("input")
            task = isinstance(name, str) and name in TASK_TOOLS
            if kind == "tool_use" and task and isinstance(given, dict):
                call = block.get("id")
                if isinstance(call, str):
                    self._tasks.add(call)
                    if isinstance(given.get("prompt"), str):
                        self.prompts[call] = given["prompt"]
            elif kind == "tool_result" and isinstance(outcome, dict):
                call, child = block.get("tool_use_id"), outcome.get("agentId")
                if isinstance(call, str) and call in self._tasks and isinstance(child, str) and child:
                    self.links[call] = child

    def _join_by_prompt(self) -> None:
        linked = set(self.links.values())
        for agent in self.agents():
            if agent not in linked:
                self.link_by_prompt(agent, self.voices[agent].goal)

    def link_by_prompt(self, agent: str, prompt: str) -> bool:
        """Join a subagent to the Task call that was given exactly its first text; False if there is none."""
        for call, text in self.prompts.items():
            if call not in self.links and text.strip() == prompt.strip():
                self.links[call] = agent
                return True
        return False


def prompt_tokens(usage: Any) -> int | None:
    """The whole prompt of one request, cached or not; None if the counts are missing, wrong, or all zero."""
    if not isinstance(usage, dict):
        return None
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    counts = [0 if usage.get(name) is None else count(usage[name]) for name in names]
    if any(number is None for number in counts):
        return None
    return sum(number for number in counts if number is not None) or None
