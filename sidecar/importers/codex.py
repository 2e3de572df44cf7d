"""Codex rollout files (`{timestamp, type, payload}` a line) as runs.

A sub-agent's rollout given together with its parent's becomes a child run, placed where the parent started
it. A fork's copy of its parent's items is left out where the file shows the seam, and noted. Lines of a
thread that an earlier file had already are imported once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from sidecar.importers import lines
from sidecar.importers.codex_items import Thread
from sidecar.importers.codex_survey import Survey
from sidecar.importers.model import DEFAULT_WINDOW, Imported, Report, RunWriter, drain, token

SOURCE = "codex"


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
            writer = RunWriter(token(survey.thread), survey.thread, self._sink)
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
            yield from drain(self._sink)
            while thread.due:
                yield from self._children(thread, thread.due.pop(0))
        if survey.skip_through:
            self._report.note(
                survey.path, survey.skip_through, "up to here a copy of the parent's items, left out"
            )
        thread.imported |= fresh
        thread.writer.flush()
        yield from drain(self._sink)

    def _children(self, parent: Thread, thread: str) -> Iterator[Imported]:
        for child in [other for other in self._waiting if other.thread == thread]:
            if child in self._waiting:
                self._waiting.remove(child)
                yield from drain(self._sink)
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
