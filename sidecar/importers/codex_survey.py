"""First look at one Codex rollout: who it is, what started it, and where its own part begins.

A fork repeats its parent's items before its own. The seam shows as a second `session_meta`, the parent's, and
the first task started after the fork; without both nothing is taken for a copy. Publishes nothing.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Any

from sidecar.importers import lines
from sidecar.importers.content import plain_text
from sidecar.importers.model import ImportFailure, count, utc

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
            raise ImportFailure(self.path, first, "no Codex line; expected {timestamp, type, payload}")
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
            if self._seam_open and isinstance(started, int | float) and started >= self._fork_second:
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
