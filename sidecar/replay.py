"""Replays transcripts against a running daemon over NATS, playing the agent's part.

It publishes events in file order, takes every packet up that shortens the context, and from then on
reports usage as the shortened prompt would have had it. It sees the daemon only through the wire
protocol, so it works the same beside a daemon in this process, in another one, or one that is killed
and started again. It decides nothing about compaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import anyio
import msgspec

from protocol import subjects
from sidecar.importers import Imported
from sidecar.transport.errors import TransportError
from sidecar.transport.jetstream import Link
from sidecar.transport.publisher import publish_inbound

_PUT_OFF = ("compaction_deferred", "ineffective")
_POLL_SECONDS = 0.005
_ASK_SECONDS = 2.5


class RunReport(msgspec.Struct, kw_only=True):
    """What one run went through, as ``replay --json`` prints it."""

    run: str
    events: int = 0
    tool_calls: int = 0
    usage_reports: int = 0
    levels: list[str] = []
    compactions: list[dict[str, Any]] = []
    deferrals: dict[str, int] = {}
    """Reasons why a compaction that was due was put off, and how often each was told."""
    trims: int = 0
    violations: dict[str, int] = {}
    rejected: int = 0
    packet: dict[str, Any] | None = None


class Status(msgspec.Struct, kw_only=True):
    """The parts of an ``ask.status`` reply that the replay looks at."""

    level: str = "ok"
    budget: dict[str, Any] = {}
    checkpoint: dict[str, Any] | None = None
    trimmed_through: int = 0
    compaction: dict[str, Any] = {}
    outbox_pending: int = 0
    stream_seq: int = 0
    lag: int = 0
    violations: dict[str, int] = {}
    packet_id: str = ""


_STATUS = msgspec.json.Decoder(Status)


class Turn:
    """One run as the replayed agent sees it."""

    def __init__(self, run: str) -> None:
        self.report = RunReport(run=run)
        self.sequence = 0
        """Stream sequence of the newest message published for it."""
        self.taken = (0, 0)
        """(checkpoint version, trimmed through) of the newest packet taken up."""
        self.removed = 0
        """Tokens the cuts and trims taken up so far removed, packets already added back."""
        self.floor = 0
        """Tokens of the newest packet: a shortened prompt is never smaller."""
        self.taken_up = 0
        self.status = Status()
        self.at = "1970-01-01T00:00:00Z"
        """Time of the newest event published for it: what the replay says of its own has no other clock."""


class Replay:
    """Feeds a daemon that owns ``tenant``/``lane``; ``progress`` is called after each event.

    ``patient`` waits after every event until the daemon has settled, so that nothing is published while
    a compaction runs and the same input gives the same coverage.
    """

    def __init__(
        self,
        link: Link,
        *,
        tenant: str,
        lane: str,
        patient: bool = True,
        progress: Callable[[Turn], None] = lambda turn: None,
        give_up_after: float = 120.0,
    ) -> None:
        self._link = link
        self._tenant = tenant
        self._lane = lane
        self._patient = patient
        self._progress = progress
        self._give_up_after = give_up_after
        self.turns: dict[str, Turn] = {}
        self.packets: dict[str, dict[str, Any]] = {}

    async def feed(self, messages: Iterable[Imported]) -> None:
        """Publish everything in order; returns when the last message is stored in the stream."""
        for message in messages:
            turn = self.turns.setdefault(message.run, Turn(message.run))
            event = self._as_shortened(turn, message.event)
            await self._publish(turn, message.channel, msgspec.json.encode(event))
            report = turn.report
            report.events += 1
            turn.at = event["at"] if isinstance(event.get("at"), str) else turn.at
            report.tool_calls += event.get("type") == "tool.called"
            report.usage_reports += event.get("type") == "usage.reported"
            if event.get("type") == "context.replaced":
                turn.removed = 0
            if self._patient:
                await self.settle(turn)
            elif message.event.get("type") == "usage.reported":
                await self._look(turn)
            self._progress(turn)

    async def settle(self, turn: Turn) -> None:
        """Wait until the daemon read everything of the run and no compaction of it runs; take packets up."""
        deadline = anyio.current_time() + self._give_up_after
        while True:
            status = await self._status(turn, deadline)
            if status.compaction.get("state") not in ("running", "due") and not await self._take_up(
                turn, status
            ):
                return
            if anyio.current_time() > deadline:
                raise TimeoutError(f"run {turn.report.run}: compaction did not end")
            await anyio.sleep(_POLL_SECONDS)

    async def _look(self, turn: Turn) -> None:
        """Without waiting for anything: take up what there is."""
        await self._take_up(turn, await self._status(turn, anyio.current_time() + self._give_up_after))

    async def _status(self, turn: Turn, deadline: float) -> Status:
        request = {"after": turn.sequence} if self._patient else {}
        turn.status = _STATUS.decode(await self.ask(turn.report.run, "status", request, deadline))
        return turn.status

    async def ask(self, run: str, verb: subjects.Verb, request: dict[str, Any], deadline: float) -> bytes:
        """One question, asked again until it is answered; raises ``TimeoutError`` at the deadline."""
        subject = subjects.ask(self._tenant, self._lane, run, verb)
        while True:
            problem = "no answer"
            try:
                reply = await self._link.request(subject, msgspec.json.encode(request), timeout=_ASK_SECONDS)
                code = reply.headers.get("Nats-Service-Error-Code")
                if code is None:
                    return reply.payload
                problem = reply.headers.get("Nats-Service-Error", code)
            except TransportError as error:
                problem = str(error)
            if anyio.current_time() > deadline:
                raise TimeoutError(f"run {run}: {verb} was not answered: {problem}")
            await anyio.sleep(0.05)

    async def _take_up(self, turn: Turn, status: Status) -> bool:
        """Take up the packet that shortens the context further, if there is one; whether there was."""
        version = status.checkpoint["version"] if status.checkpoint is not None else 0
        newest = (version, status.trimmed_through)
        if newest == turn.taken:
            return False
        deadline = anyio.current_time() + self._give_up_after
        packet = msgspec.json.decode(await self.ask(turn.report.run, "packet", {}, deadline))
        budget = packet["budget"]
        turn.removed += max(0, budget["used_before"] - budget["used_after"])
        turn.floor = budget["packet_tokens"]
        turn.taken = newest
        turn.taken_up += 1
        event = {
            "v": 1,
            "id": f"replay-take-up-{turn.taken_up}",
            "type": "context.replaced",
            "at": turn.at,
            "by": "agent",
            "packet_id": status.packet_id or packet["packet_id"],
        }
        await self._publish(turn, "event", msgspec.json.encode(event))
        return True

    def _as_shortened(self, turn: Turn, event: dict[str, Any]) -> dict[str, Any]:
        """The event as an agent that took the packets up would have reported it."""
        recorded = event.get("context_tokens")
        if event.get("type") != "usage.reported" or not turn.removed or not isinstance(recorded, int):
            return event
        return {**event, "context_tokens": max(recorded - turn.removed, min(turn.floor, recorded))}

    async def _publish(self, turn: Turn, channel: str, payload: bytes) -> None:
        subject = f"{subjects.PREFIX}.in.{self._tenant}.{self._lane}.{turn.report.run}.{channel}"
        turn.sequence = await publish_inbound(self._link, subject, payload, give_up_after=self._give_up_after)

    async def finish(self) -> list[RunReport]:
        """Wait until everything is settled and sent, and fetch each run's packet and figures."""
        deadline = anyio.current_time() + self._give_up_after
        for turn in self.turns.values():
            self._patient = True
            await self.settle(turn)
        for turn in self.turns.values():
            while (await self._status(turn, deadline)).outbox_pending:
                if anyio.current_time() > deadline:
                    raise TimeoutError("the daemon's outbox did not empty")
                await anyio.sleep(_POLL_SECONDS)
            turn.report.violations = dict(sorted(turn.status.violations.items()))
            turn.report.packet = msgspec.json.decode(await self.ask(turn.report.run, "packet", {}, deadline))
        return [turn.report for turn in self.turns.values()]


class Listener:
    """Collects what the daemon publishes about the replayed runs: receipts, levels, rejections."""

    def __init__(self, link: Link, *, tenant: str, lane: str) -> None:
        self._link = link
        self._filter = f"{subjects.PREFIX}.out.{tenant}.{lane}.>"
        self.receipts: dict[str, dict[str, dict[str, Any]]] = {}
        self.levels: dict[str, dict[str, str]] = {}
        self.deferrals: dict[str, dict[str, str]] = {}
        self.rejected: dict[str, set[int]] = {}
        self.trims: dict[str, set[str]] = {}

    async def listen(self) -> None:
        """Subscribe; call before the first event is published."""
        await self._link.subscribe(self._filter, self._heard)

    def _heard(self, message: Any) -> None:
        run = message.subject.split(".")[5]
        kind = message.subject.rsplit(".", 1)[1]
        if kind == "receipt":
            receipt = msgspec.json.decode(message.data)
            self.receipts.setdefault(run, {})[receipt["receipt_id"]] = receipt
        elif kind == "packet":
            packet = msgspec.json.decode(message.data)
            if packet["reason"] == "trimmed":
                self.trims.setdefault(run, set()).add(packet["packet_id"])
        elif kind == "rejected":
            self.rejected.setdefault(run, set()).add(msgspec.json.decode(message.data)["stream_seq"])
        elif kind == "notice":
            notice = msgspec.json.decode(message.data)
            if notice["kind"] == "level_changed":
                self.levels.setdefault(run, {})[notice["notice_id"]] = notice["to"]
            elif notice["kind"] in _PUT_OFF:
                why = notice.get("reason", notice["kind"])
                self.deferrals.setdefault(run, {})[notice["notice_id"]] = why

    def fill(self, reports: list[RunReport]) -> None:
        """Add what was heard to the reports."""
        for report in reports:
            report.levels = list(self.levels.get(report.run, {}).values())
            report.deferrals = dict(Counter(self.deferrals.get(report.run, {}).values()))
            report.rejected = len(self.rejected.get(report.run, ()))
            report.trims = len(self.trims.get(report.run, ()))
            report.compactions = [
                {
                    "from": receipt["range"]["from"],
                    "through": receipt["range"]["through"],
                    "trigger": receipt["trigger"],
                    "outcome": receipt["outcome"],
                    "reason": receipt["reason"],
                    "violations": receipt["violations"],
                    "tokens_before": receipt["tokens"]["before"],
                    "tokens_after": receipt["tokens"]["after"],
                }
                for receipt in self.receipts.get(report.run, {}).values()
            ]
