"""A summariser that does what a test says: good work, bad work, none, too late, or never.

Each behaviour answers one request. Where nothing is said the deterministic summary is given.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import msgspec

from protocol.codec import encode
from protocol.handoff import Projector
from protocol.summary import SummarizeReply, SummarizeRequest, Summary
from sidecar.core.digest import digest
from sidecar.summarizers import SummarizerFailure

Behaviour = Callable[[SummarizeRequest], Awaitable[SummarizeReply]]


class Script:
    """The summariser's port. ``then`` are the behaviours of the next requests, in order."""

    name = "script"
    projector = Projector(version="1")
    instructions = ""

    def __init__(self, window_tokens: int = 1_000_000) -> None:
        self.window_tokens = window_tokens
        self.then: list[Behaviour] = []
        self.always: Behaviour = good
        self.asked: list[SummarizeRequest] = []

    async def summarize(self, request: SummarizeRequest) -> SummarizeReply:
        self.asked.append(request)
        behaviour = self.then.pop(0) if self.then else self.always
        return await behaviour(request)


def reply(summary: Any, finish: Any = "stop") -> SummarizeReply:
    """An answer with this in the place of the summary."""
    return SummarizeReply(summary=msgspec.Raw(encode(summary)), finish_reason=finish)


async def good(request: SummarizeRequest) -> SummarizeReply:
    return reply(digest(request))


def changed(**fields: Any) -> Behaviour:
    """A good summary but for these fields; a function is given the good value."""

    async def answer(request: SummarizeRequest) -> SummarizeReply:
        summary = msgspec.to_builtins(digest(request))
        for name, value in fields.items():
            summary[name] = value(summary[name]) if callable(value) else value
        return reply(summary)

    return answer


def without(*fields: str) -> Behaviour:
    """A good summary that lacks these fields altogether."""

    async def answer(request: SummarizeRequest) -> SummarizeReply:
        summary = msgspec.to_builtins(digest(request))
        return reply({name: value for name, value in summary.items() if name not in fields})

    return answer


def said(value: Any) -> Behaviour:
    """This in the place of a summary."""

    async def answer(request: SummarizeRequest) -> SummarizeReply:
        return reply(value)

    return answer


def bare(raw: bytes) -> Behaviour:
    """These bytes in the place of a summary, JSON or not."""

    async def answer(request: SummarizeRequest) -> SummarizeReply:
        return SummarizeReply(summary=msgspec.Raw(raw))

    return answer


def fails(error: type[Exception], *args: Any) -> Behaviour:
    async def answer(request: SummarizeRequest) -> SummarizeReply:
        raise error(*args)

    return answer


async def never(request: SummarizeRequest) -> SummarizeReply:
    await anyio.sleep_forever()
    raise AssertionError


class Held:
    """A behaviour that answers when it is let go; ``reached`` tells that it was asked."""

    def __init__(self, behaviour: Behaviour = good) -> None:
        self.reached = anyio.Event()
        self.release = anyio.Event()
        self._behaviour = behaviour

    async def __call__(self, request: SummarizeRequest) -> SummarizeReply:
        self.reached.set()
        await self.release.wait()
        return await self._behaviour(request)


def empty(request: SummarizeRequest | None = None) -> Summary:
    """The right shape with nothing in it."""
    return Summary(
        accepted_decisions=(),
        open_questions=(),
        completed=(),
        observations=(),
        inferences=(),
        contradictions=(),
        evidence_refs=(),
        pending_action_refs=(),
        operations={},
        approvals={},
        objective="",
        next_action=None,
        narrative="",
    )


async def of_another_run(request: SummarizeRequest) -> SummarizeReply:
    """A sound summary of something else."""
    fields = msgspec.to_builtins(empty())
    fields["objective"] = "paint the fence"
    fields["narrative"] = "The fence is painted on one side."
    fields["operations"] = {"paint-1": "succeeded"}
    return reply(fields)


async def echoed(request: SummarizeRequest) -> SummarizeReply:
    """The newest assistant message in the place of a narrative."""
    texts = [item.text for item in request.exchanges if item.role == "assistant"]
    fields = msgspec.to_builtins(digest(request))
    return reply(fields | {"narrative": texts[-1] if texts else "I do it"})


async def too_much(request: SummarizeRequest) -> SummarizeReply:
    """A good one that was never told when to stop."""
    fields = msgspec.to_builtins(digest(request))
    first = request.exchanges[0]
    ref = f"event:{first.event_id}" if first.event_id else f"pos:{first.position}"
    more = [{"text": f"looked at part {name} of the tree, " * 14, "refs": [ref]} for name in _names(120)]
    return reply(fields | {"observations": [*fields["observations"], *more]})


def _names(count: int) -> list[str]:
    return ["".join(chr(97 + int(digit)) for digit in str(number)) for number in range(count)]


BAD: dict[str, Behaviour] = {
    "nothing": bare(b"null"),
    "no_json": bare(b'{"objective": '),
    "text": said("All is well."),
    "empty": said(empty()),
    "half": without("operations", "approvals", "narrative"),
    "hollow": changed(completed=[], observations=[], inferences=[], narrative=" \n"),
    "other_run": of_another_run,
    "echo": echoed,
    "too_much": too_much,
    "refused": fails(SummarizerFailure, "refused", "no"),
    "finish_refusal": said({}),
    "unavailable": fails(SummarizerFailure, "unavailable", "gone"),
    "crashed": fails(RuntimeError, "the summariser's own fault"),
    "never": never,
}
"""What no boundary may ever move for."""


async def _refusing(request: SummarizeRequest) -> SummarizeReply:
    return reply(digest(request), finish="refusal")


async def _cut_short(request: SummarizeRequest) -> SummarizeReply:
    return reply(digest(request), finish="length")


BAD["finish_refusal"] = _refusing
BAD["finish_length"] = _cut_short


def statements(raw: bytes) -> list[str]:
    """The texts a stored checkpoint's summary holds."""
    summary = json.loads(raw)["summary"]
    told = [*summary["completed"], *summary["observations"], *summary["inferences"]]
    return [item["text"] for item in told] + [summary["narrative"]]
