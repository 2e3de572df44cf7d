"""How a run goes, one method for each event: session, conversation, usage, progress, children.

What a field means is said where the event is defined (``protocol.events``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from protocol.client.answers import Published
from protocol.client.speech import Fields, Speech
from protocol.events import (
    Blocker,
    CallStatus,
    CompletedStep,
    Constraint,
    ContentPart,
    Focus,
    InputRef,
    Model,
    NextAction,
    Outcome,
    PlanItem,
    Scope,
)


class RunEvents(Speech):
    """Events of a run and its conversation."""

    async def run_started(
        self,
        *,
        goal: str,
        model: Model | Fields,
        done_when: Sequence[str] | None = None,
        constraints: Sequence[Constraint | Fields] | None = None,
        scope: Scope | Fields | None = None,
        policy_version: str | None = None,
        inputs: Sequence[InputRef | Fields] | None = None,
        parent_run: str | None = None,
        continues: str | None = None,
        agent: str | None = None,
        owner: str | None = None,
        labels: Mapping[str, str] | None = None,
        id: str | None = None,
    ) -> Published:
        """The run's contract, or (a second time) a new session of it."""
        return await self._tell(
            "run.started",
            id,
            goal=goal,
            model=model,
            done_when=done_when,
            constraints=constraints,
            scope=scope,
            policy_version=policy_version,
            inputs=inputs,
            parent_run=parent_run,
            continues=continues,
            agent=agent,
            owner=owner,
            labels=labels,
        )

    async def run_paused(self, *, reason: str, id: str | None = None) -> Published:
        """Nothing may be done until ``run.resumed``; if an authority paused, until an authority's."""
        return await self._tell("run.paused", id, reason=reason)

    async def run_finished(
        self,
        *,
        outcome: Outcome,
        accepted: bool | None = None,
        detail: str | None = None,
        id: str | None = None,
    ) -> Published:
        """The run's end."""
        return await self._tell("run.finished", id, outcome=outcome, accepted=accepted, detail=detail)

    async def run_resumed(
        self,
        *,
        packet_id: str | None = None,
        ledger_version: int | None = None,
        policy_version: str | None = None,
        first_action: NextAction | Fields | None = None,
        id: str | None = None,
    ) -> Published:
        """A session begins or goes on, usually from a packet."""
        return await self._tell(
            "run.resumed",
            id,
            packet_id=packet_id,
            ledger_version=ledger_version,
            policy_version=policy_version,
            first_action=first_action,
        )

    async def context_replaced(
        self,
        *,
        by: Literal["agent", "framework", "provider"],
        packet_id: str | None = None,
        kept_from: str | None = None,
        context_tokens: int | None = None,
        id: str | None = None,
    ) -> Published:
        """The agent's message list was shortened. ``kept_from`` is the first event kept verbatim."""
        return await self._tell(
            "context.replaced",
            id,
            by=by,
            packet_id=packet_id,
            kept_from=kept_from,
            context_tokens=context_tokens,
        )

    async def model_changed(self, *, model: Model | Fields, id: str | None = None) -> Published:
        """Another model, or another window."""
        return await self._tell("model.changed", id, model=model)

    async def message(
        self,
        role: Literal["user", "assistant", "system", "developer"],
        content: str | Sequence[ContentPart],
        *,
        message_id: str | None = None,
        in_reply_to: str | None = None,
        supersedes: str | None = None,
        media_type: str | None = None,
        id: str | None = None,
    ) -> Published:
        """One message of the conversation. ``supersedes`` is the event id of the message it corrects.

        A text too large for a message is kept apart, with its ``media_type``; the event carries its beginning.
        """
        return await self._tell_text(
            "message",
            id,
            media_type,
            role=role,
            content=content,
            message_id=message_id,
            in_reply_to=in_reply_to,
            supersedes=supersedes,
        )

    async def tool_called(
        self,
        *,
        call_id: str,
        tool: str,
        arguments: object,
        operation_id: str | None = None,
        repeatable: bool | None = None,
        message_id: str | None = None,
        id: str | None = None,
    ) -> Published:
        """A call goes out. ``arguments`` are the JSON bytes as received."""
        return await self._tell(
            "tool.called",
            id,
            call_id=call_id,
            tool=tool,
            arguments=arguments,
            operation_id=operation_id,
            repeatable=repeatable,
            message_id=message_id,
        )

    async def tool_returned(
        self,
        *,
        call_id: str,
        status: CallStatus,
        content: str | Sequence[ContentPart],
        conclusion: str | None = None,
        artifact_id: str | None = None,
        truncated: bool | None = None,
        media_type: str | None = None,
        id: str | None = None,
    ) -> Published:
        """A call's result; ``pending`` is interim, any other status final.

        A text too large for a message is kept apart, with its ``media_type``; the event carries its beginning.
        Say ``truncated`` where the model gets no more than that: else all of it counts as in its context.
        """
        return await self._tell_text(
            "tool.returned",
            id,
            media_type,
            call_id=call_id,
            status=status,
            content=content,
            conclusion=conclusion,
            artifact_id=artifact_id,
            truncated=truncated,
        )

    async def usage_reported(
        self,
        *,
        model: str,
        context_tokens: int,
        output_tokens: int,
        input_tokens: int | None = None,
        cache_read_tokens: int | None = None,
        cache_write_tokens: int | None = None,
        through: str | None = None,
        scope: Literal["request", "aggregate"] | None = None,
        id: str | None = None,
    ) -> Published:
        """Tokens of one request. ``context_tokens`` is the whole prompt, ``through`` the last event in it."""
        return await self._tell(
            "usage.reported",
            id,
            model=model,
            context_tokens=context_tokens,
            output_tokens=output_tokens,
            input_tokens=input_tokens,
            cache_read_tokens=cache_read_tokens,
            cache_write_tokens=cache_write_tokens,
            through=through,
            scope=scope,
        )

    async def step_changed(
        self,
        *,
        phase: str | None = None,
        completed: Sequence[CompletedStep | Fields] | None = None,
        plan: Sequence[PlanItem | Fields] | None = None,
        focus: Focus | Fields | None = None,
        next_action: NextAction | Fields | None = None,
        blockers: Sequence[Blocker | Fields] | None = None,
        uncertain: Sequence[str] | None = None,
        id: str | None = None,
    ) -> Published:
        """Where the work stands. An absent field is unchanged, an empty list clears."""
        return await self._tell(
            "step.changed",
            id,
            phase=phase,
            completed=completed,
            plan=plan,
            focus=focus,
            next_action=next_action,
            blockers=blockers,
            uncertain=uncertain,
        )

    async def input_pinned(
        self, *, name: str, version: str | None = None, digest: str | None = None, id: str | None = None
    ) -> Published:
        """An input of the task has this version now."""
        return await self._tell("input.pinned", id, name=name, version=version, digest=digest)

    async def policy_loaded(self, *, version: str, id: str | None = None) -> Published:
        """The agent works under this policy version now."""
        return await self._tell("policy.loaded", id, version=version)

    async def boundary_marked(
        self,
        *,
        kind: Literal["turn_ended", "tests_finished", "patch_saved", "approval_pause", "other"],
        id: str | None = None,
    ) -> Published:
        """A good place to cut: preferred, never required nor sufficient."""
        return await self._tell("boundary.marked", id, kind=kind)

    async def child_spawned(
        self,
        *,
        child_run: str,
        task: str,
        done_when: Sequence[str] | None = None,
        inputs: Sequence[InputRef | Fields] | None = None,
        allowed_tools: Sequence[str] | None = None,
        required_artifacts: Sequence[str] | None = None,
        granted_refs: Sequence[str] | None = None,
        id: str | None = None,
    ) -> Published:
        """A sub-agent gets a task. ``allowed_tools`` absent: every tool; empty: none."""
        return await self._tell(
            "child.spawned",
            id,
            child_run=child_run,
            task=task,
            done_when=done_when,
            inputs=inputs,
            allowed_tools=allowed_tools,
            required_artifacts=required_artifacts,
            granted_refs=granted_refs,
        )

    async def child_returned(
        self,
        *,
        child_run: str,
        status: Outcome,
        artifacts: Sequence[str] | None = None,
        evidence: Sequence[str] | None = None,
        id: str | None = None,
    ) -> Published:
        """A sub-agent's end and what it brings."""
        return await self._tell(
            "child.returned", id, child_run=child_run, status=status, artifacts=artifacts, evidence=evidence
        )
