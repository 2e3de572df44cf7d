"""A scenario as messages: what each step puts on the wire, and the ordinary work between the steps.

Deterministic: the same steps give the same messages and ids. It knows the wire and no strategy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from protocol.codec import decode_event
from protocol.errors import ProtocolError
from protocol.events import AUTHORITY_ONLY_TYPES, RECORD_TYPES
from sidecar.evaluation.scenario import Scenario, ScenarioError, Step

RUN: Final = "case"
"""The run a scenario tells of, where a step names none."""
MODEL: Final = "scenario-model"
_AT = "2026-11-30T09:00:00Z"
_WORK_TOKENS = 500
_NOTED_EVERY = 4
_WORK_BEFORE = 8
"""Exchanges of ordinary work before each of several compactions in a row."""


class Tell(Struct, frozen=True, kw_only=True):
    """Put a message into the stream. ``step`` is the step's id, empty where it has none; ``number`` counts all."""

    number: int
    run: str
    channel: str
    event: dict[str, Any]
    step: str = ""


class Compact(Struct, frozen=True):
    """Shorten the history here."""


class Wait(Struct, frozen=True):
    """Time passes."""

    seconds: int


Act = Tell | Compact | Wait


def acts(scenario: Scenario, file: Path | None = None) -> list[Act]:
    """Everything that happens, in order. Raises ``ScenarioError`` for a step the protocol would refuse."""
    told = _Teller(scenario, file or Path(f"{scenario.name}.toml"))
    return list(told.all())


class _Teller:
    def __init__(self, scenario: Scenario, file: Path) -> None:
        self._scenario = scenario
        self._file = file
        self._count = 0
        self._place = ""

    def all(self) -> Iterator[Act]:
        yield self._started()
        for number, step in enumerate(self._scenario.steps, 1):
            self._place = f"step[{number}]"
            yield from self._step(step)

    def _started(self) -> Tell:
        self._place = "task"
        task = self._scenario.task
        model = {"name": MODEL, "context_window": self._scenario.sizes.window}
        fields = {
            name: value for name, value in msgspec.to_builtins(task).items() if value not in (None, [], ())
        }
        return self._tell("run.started", RUN, "event", fields | {"model": model})

    def _step(self, step: Step) -> Iterator[Act]:
        run = step.run or RUN
        match step.key:
            case "compact":
                for turn in range(1, (step.compact or 0) + 1):
                    if step.work is not None or (step.compact or 0) > 1:
                        yield from self._turn(turn, step.work or _WORK_BEFORE, step.tokens, run)
                    yield Compact()
            case "work":
                yield from self._work(step.work or 0, step.tokens, run)
            case "wait":
                yield Wait(step.seconds)
            case "type":
                name = step.type or ""
                channel = step.channel or _channel(name)
                fields = {**step.fields, **({"epoch": 1} if channel == "record" else {})}
                yield self._tell(name, run, channel, fields, step.id)
            case "call":
                yield from self._call(step, run)
            case role:
                fields = {"role": role, "content": getattr(step, role)}
                if step.supersedes is not None:
                    fields["supersedes"] = step.supersedes
                yield self._tell("message", run, "event", fields, step.id)

    def _call(self, step: Step, run: str) -> Iterator[Act]:
        name = step.id or f"call-{self._count + 1}"
        fields: dict[str, Any] = {"call_id": name, "tool": step.call, "arguments": step.arguments or {}}
        if step.operation is not None:
            fields["operation_id"] = step.operation
        yield self._tell("tool.called", run, "event", fields, name)
        if step.result is None:
            return
        back: dict[str, Any] = {"call_id": name, "status": step.status or "ok", "content": step.result}
        if step.conclusion is not None:
            back["conclusion"] = step.conclusion
        yield self._tell("tool.returned", run, "event", back, f"{name}-result", step=name)

    def _turn(self, number: int, exchanges: int, tokens: int | None, run: str) -> Iterator[Act]:
        """A turn of ordinary work: the user says go on, the agent works and says that it is done."""
        seed = self._seed()
        said = f"Good. Please go on with {_PARTS[int(seed[:4], 16) % len(_PARTS)]}, part {number}."
        yield self._tell("message", run, "event", {"role": "user", "content": said})
        yield from self._work(exchanges, tokens, run)
        yield self._tell("message", run, "event", {"role": "assistant", "content": f"Part {number} is read."})

    def _seed(self) -> str:
        return hashlib.sha256(f"{self._scenario.name}/{self._count}".encode()).hexdigest()

    def _work(self, exchanges: int, tokens: int | None, run: str) -> Iterator[Act]:
        """Ordinary work: files read, findings noted, notes saved; nothing a later turn depends on."""
        for number in range(1, exchanges + 1):
            if number % _NOTED_EVERY == 0:
                yield from self._noted(run)
            seed = self._seed()
            name = f"work-{self._count}"
            part = _PARTS[int(seed[:4], 16) % len(_PARTS)]
            path = f"src/{part}/{_FILES[int(seed[4:8], 16) % len(_FILES)]}_{seed[8:10]}.py"
            said = f"Next I look at {path}, which belongs to the same part."
            yield self._tell("message", run, "event", {"role": "assistant", "content": said})
            yield self._tell(
                "tool.called",
                run,
                "event",
                {"call_id": name, "tool": "read_file", "arguments": {"path": path}},
            )
            text = _listing(seed, path, tokens or _WORK_TOKENS)
            yield self._tell(
                "tool.returned", run, "event", {"call_id": name, "status": "ok", "content": text}
            )

    def _noted(self, run: str) -> Iterator[Act]:
        """What an agent records along the way: a finding, a small choice, an effect that went well."""
        seed, name = self._seed(), f"note-{self._count}"
        part, number = _PARTS[int(seed[:4], 16) % len(_PARTS)], int(seed[4:8], 16)
        claim = f"{part} has {number} rows that nobody reads"
        found = {
            "evidence_id": f"ev-{name}",
            "claim": claim,
            "kind": "observed",
            "source": "agent",
            "value": number,
        }
        yield self._tell("evidence.recorded", run, "event", found)
        chosen = {"decision_id": f"d-{name}", "summary": f"Leave the {number} rows of {part} as they are."}
        yield self._tell("decision.made", run, "event", chosen)
        op = f"op-{name}"
        declared = {"operation_id": op, "kind": "note.save", "idempotency_key": op, "target": f"notes/{part}"}
        yield self._tell("operation.declared", run, "event", {**declared, "tool": "notes"})
        yield self._tell("operation.dispatched", run, "event", {"operation_id": op})
        yield self._tell("operation.settled", run, "event", {"operation_id": op, "state": "succeeded"})

    def _tell(
        self,
        type_: str,
        run: str,
        channel: str,
        fields: dict[str, Any],
        id_: str | None = None,
        *,
        step: str | None = None,
    ) -> Tell:
        self._count += 1
        event = {"v": 1, "id": id_ or f"n-{self._count}", "type": type_, "at": _AT, **fields}
        try:
            decode_event(msgspec.json.encode(event), run=run, channel=channel)
        except (ProtocolError, TypeError) as error:
            text = getattr(error, "detail", str(error))
            raise ScenarioError(
                self._file, self._place, f"{type_}: {text}; allowed: what `watchkeeper schema` lists for it"
            ) from error
        return Tell(
            number=self._count,
            run=run,
            channel=channel,
            event=event,
            step=step if step is not None else id_ or "",
        )


def _channel(type_: str) -> str:
    if type_ in RECORD_TYPES:
        return "record"
    return "authority" if type_ in AUTHORITY_ONLY_TYPES else "event"


_PARTS: Final = ("orders", "ledger", "search", "mail", "stock", "report", "users", "tax", "queue", "export")
_FILES: Final = ("rows", "views", "tasks", "codec", "rules", "index", "merge", "totals", "pages", "probe")


def _listing(seed: str, path: str, tokens: int) -> str:
    """A plausible source file of about so many tokens; other names and numbers for each seed."""
    lines = [f"# {path}"]
    size, number = 0, 0
    while size < tokens * 4:
        mark = hashlib.sha256(f"{seed}/{number}".encode()).hexdigest()
        line = f"def part_{mark[:5]}(rows, limit={int(mark[5:8], 16)}):  # used by {mark[8:12]}"
        body = f"    return [row for row in rows if row.weight > {int(mark[12:15], 16)}][:limit]"
        lines += [line, body]
        size += len(line) + len(body) + 2
        number += 1
    return "\n".join(lines)
