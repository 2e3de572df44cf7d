"""Claude Code session files (one JSON object a line) as runs.

File order is the truth, whatever the times say. Subagents become child runs: from `agent_progress` lines,
side chains in the file, and their own files when these are given together with the session's; then the
child's messages stand where its parent's Task call does. A subagent's file alone is a run of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from sidecar.importers import lines
from sidecar.importers.claude_lines import Conversation, child_run
from sidecar.importers.claude_survey import Survey, Voice
from sidecar.importers.model import DEFAULT_WINDOW, Imported, Report, RunWriter, drain, token

SOURCE = "claude-code"


class ClaudeImport:
    """Several session files read together; a subagent's file is placed where its parent's Task call is."""

    def __init__(self, paths: Sequence[Path], window: int | None, report: Report) -> None:
        self._window = window or DEFAULT_WINDOW
        self._report = report
        self._sink: list[Imported] = []
        self._speaker: Conversation | None = None
        self._conversations: dict[str, Conversation] = {}
        self._links: dict[str, dict[str, str]] = {}
        self._surveys = [Survey(path) for path in paths]
        roots = [survey for survey in self._surveys if survey.agent is None]
        sessions = {survey.session for survey in roots}
        self._files: dict[tuple[str, str], Survey] = {}
        for survey in self._surveys:
            self._links.setdefault(survey.session, {}).update(survey.links)
            if survey.agent is not None and survey.session in sessions:
                self._files.setdefault((survey.session, survey.agent), survey)
        self._in_own_file = frozenset(self._files)
        for (session, agent), child in self._files.items():
            if agent not in self._links[session].values():
                for root in roots:
                    if root.session == session and root.link_by_prompt(agent, child.voices[""].goal):
                        self._links[session].update(root.links)
                        break

    def messages(self) -> Iterator[Imported]:
        """All runs' messages: files in order, children inside their parents."""
        children = {id(survey) for survey in self._files.values()}
        for survey in self._surveys:
            if id(survey) not in children:
                yield from self._file(survey, None)
        for session, agent in list(self._files):
            # a child whose Task call was not met, for example in a line that was only a repetition
            yield from self._child_file(self._conversation(token(session), session), session, agent)

    def _file(self, survey: Survey, parent: Conversation | None) -> Iterator[Imported]:
        session, voice = survey.session, survey.voices.get("", Voice())
        run = token(session) if survey.agent is None else child_run(session, survey.agent)
        conversation = self._conversation(run, session)
        self._start(conversation, voice, survey, survey.agent is not None, parent)
        yield from drain(self._sink)
        if survey.agent is None:
            for owner, agent in list(self._files):
                if owner == session and agent not in self._links[session].values():
                    yield from self._child_file(conversation, session, agent)
        for number, line in lines.objects(survey.path, self._report):
            whose = survey.attribute(line)
            if whose is None:
                continue
            agent, inner = whose
            if (session, agent) in self._in_own_file:
                continue
            speaker = self._child(conversation, survey, agent) if agent else conversation
            self._take_turn(speaker)
            speaker.line(inner, number, survey.voices[agent])
            yield from drain(self._sink)
            while conversation.due:
                yield from self._child_file(conversation, session, conversation.due.pop(0))
        self._take_turn(conversation)
        conversation.writer.flush()
        yield from drain(self._sink)

    def _child_file(self, parent: Conversation, session: str, agent: str) -> Iterator[Imported]:
        survey = self._files.pop((session, agent), None)
        if survey is None:
            return
        if parent.writer.started:
            parent.spawn(agent, survey.voices[""].goal or agent, f"child-{agent}")
        yield from self._file(survey, parent)

    def _take_turn(self, speaker: Conversation) -> None:
        if self._speaker is not None and self._speaker is not speaker:
            self._speaker.writer.flush()
        self._speaker = speaker

    def _child(self, parent: Conversation, survey: Survey, agent: str) -> Conversation:
        voice = survey.voices[agent]
        child = self._conversation(child_run(survey.session, agent), survey.session)
        if not child.writer.started:
            parent.spawn(agent, voice.goal or agent, f"child-{agent}")
            self._start(child, voice, survey, True, parent)
        return child

    def _conversation(self, run: str, session: str) -> Conversation:
        if run not in self._conversations:
            writer = RunWriter(run, run if run != token(session) else session, self._sink)
            self._conversations[run] = Conversation(writer, session, self._links.setdefault(session, {}))
        return self._conversations[run]

    def _start(
        self,
        conversation: Conversation,
        voice: Voice,
        survey: Survey,
        subagent: bool,
        parent: Conversation | None,
    ) -> None:
        if conversation.writer.started:
            return
        conversation.writer.clock(voice.at or None)
        conversation.writer.start(
            goal=voice.goal or voice.command or f"Claude Code session {survey.session}",
            model=voice.model,
            window=self._window,
            agent="claude-code-subagent" if subagent else "claude-code",
            source=SOURCE,
            parent_run=parent.writer.run if parent is not None else None,
        )
