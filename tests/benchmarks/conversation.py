"""A conversation that goes on after a history: turns of one run, and taking packets up as an agent does."""

from __future__ import annotations

import itertools
import json
from typing import Any

from benchmarks.material import LANE, TENANT, Material
from sidecar.transport.pump import Delivery
from support.bench import Bench

Json = dict[str, Any]
_AT = "2026-11-30T10:00:00.000Z"
_BATCH = 256


class Conversation:
    """More turns of the run ``material`` calls its first, told to one lane. About 1 KiB a turn's message."""

    def __init__(self, made: Bench, run: str) -> None:
        self._made = made
        self.run = run
        self._numbers = itertools.count(1)
        self._text = Material(1)

    async def tell(self, *bodies: Json) -> None:
        """These messages, in batches, after everything the lane has seen."""
        deliveries = []
        for sequence, body in enumerate(bodies, self._made.desk.cursor.stream_seq + 1):
            subject = f"wk.v1.in.{TENANT}.{LANE}.{self.run}.event"
            deliveries.append(
                Delivery(subject, json.dumps(body).encode(), sequence, 0, None, 1_764_500_000.0)
            )
        for start in range(0, len(deliveries), _BATCH):
            await self._made.intake.take(deliveries[start : start + _BATCH])

    def turns(self, count: int) -> list[Json]:
        """So many turns: user, assistant, call, result; the same for every conversation that is as long."""
        told = []
        for _ in range(count):
            n = next(self._numbers)
            name = {"message_id": f"more-m-{n}"}
            call = {"call_id": f"more-c-{n}"}
            told += [
                self._body("message", role="user", content=f"Go on with number {n}. {self._words(n, 300)}"),
                self._body(
                    "message", role="assistant", content=f"Number {n}. {self._words(n + 7, 900)}", **name
                ),
                self._body(
                    "tool.called", tool="read_file", arguments={"path": f"/src/{n}.py"}, **call, **name
                ),
                self._body("tool.returned", status="ok", content=self._words(n + 13, 2_000), **call),
            ]
        return told

    async def take_up(self) -> None:
        """What an agent says once it goes on from the newest packet."""
        packet = await self._made.ask(self.run, "packet")
        known = {"packet_id": packet["packet_id"], "ledger_version": packet["ledger_version"]}
        await self.tell(self._body("run.resumed", **known))

    def _body(self, type_: str, **fields: Any) -> Json:
        return {"v": 1, "id": f"more-{next(self._numbers)}", "type": type_, "at": _AT, **fields}

    def _words(self, n: int, size: int) -> str:
        return self._text.words(n, size)
