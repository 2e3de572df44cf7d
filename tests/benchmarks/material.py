"""The events that are measured: about 1 KiB each, five kinds in turn, spread over so many runs.

Event ``i`` is a function of ``i`` and the number of runs alone, so that a history can be gone on with from
its cursor. Every twentieth turn of a run speaks of an operation, a decision and evidence, unless ``items`` is
false. The window is set so large that no compaction falls due by itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from sidecar.transport.pump import Delivery

TENANT: Final = "acme"
LANE: Final = "main"
SIZE: Final = 1024
WINDOW: Final = 4_000_000_000
KINDS: Final = 5
_AT: Final = "2026-11-30T09:12:00.000Z"
_PROSE: Final = (
    "agent context window budget checkpoint tool result search file read write plan step error retry "
    "limit memory summary branch commit test pass fail build deploy query index row pump harbour watch"
)

Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode


class Material:
    """Messages number 0, 1, 2 … of ``runs`` interleaved runs. Message ``i`` is that of run ``i % runs``."""

    def __init__(
        self, runs: int, *, size: int = SIZE, prefix: str = "run", window: int = WINDOW, items: bool = True
    ) -> None:
        self.runs = runs
        self._items = items
        self._size = size
        self._prefix = prefix
        self._window = window
        dice, words = random.Random(7), _PROSE.split()
        self._text = " ".join(dice.choice(words) for _ in range(20_000))

    def run(self, i: int) -> str:
        return f"{self._prefix}-{i % self.runs:05d}"

    def subject(self, i: int) -> str:
        return f"wk.v1.in.{TENANT}.{LANE}.{self.run(i)}.event"

    def payload(self, i: int) -> bytes:
        run, k = i % self.runs, i // self.runs
        body: Json = {
            "v": 1,
            "id": f"e-{k:08d}-{run:05d}",
            "type": "",
            "at": _AT,
            "session": "s1",
            "seq": k + 1,
        }
        slot = self._started(body) if k == 0 else self._turn(body, k - 1)
        room = self._size - len(_encode(body))
        if room > 0:
            body[slot] = self.words(i, room)
        return _encode(body)

    def words(self, i: int, size: int) -> str:
        """So many letters of prose, others for each ``i``."""
        begin = (i * 131) % (len(self._text) - size)
        return self._text[begin : begin + size]

    def deliveries(self, first: int, count: int, sequence: int | None = None) -> list[Delivery]:
        """Messages ``first`` … as the pump hands them on; stream sequences from ``sequence``, else those of a
        stream that holds nothing but these."""
        ahead = 1 if sequence is None else sequence - first
        return [
            Delivery(self.subject(i), self.payload(i), i + ahead, 0, None, 1_764_493_920.0 + i / 1000)
            for i in range(first, first + count)
        ]

    def batches(self, first: int, count: int, batch: int) -> Iterator[list[Delivery]]:
        """``count`` messages from ``first`` on, ``batch`` at a time, made as they are asked for."""
        for start in range(first, first + count, batch):
            yield self.deliveries(start, min(batch, first + count - start))

    def _started(self, body: Json) -> str:
        body |= {
            "type": "run.started",
            "goal": "bring the pump station back into service",
            "constraints": [{"id": "c-1", "text": "never write to the ledger", "source": "user"}],
            "model": {"name": "m-1", "context_window": self._window, "max_output_tokens": 4_000},
            "note": "",
        }
        return "note"

    def _turn(self, body: Json, k: int) -> str:
        """Fill in the ``k``-th message after the start; the field that takes what is left of the size."""
        turn, kind = divmod(k, KINDS)
        if self._items and turn % 20 == 19:
            return self._item(body, turn, kind)
        match kind:
            case 0:
                body |= {"type": "message", "role": "assistant", "message_id": f"m-{turn}", "content": ""}
                return "content"
            case 1:
                arguments = {"path": f"/src/part_{turn}.py", "lines": [1, 200], "deep": {"a": True}}
                body |= {"type": "tool.called", "call_id": f"c-{turn}", "tool": "read_file"}
                body |= {"arguments": arguments, "message_id": f"m-{turn}", "note": ""}
                return "note"
            case 2:
                body |= {"type": "tool.returned", "call_id": f"c-{turn}", "status": "ok", "content": ""}
                return "content"
            case 3:
                # What it would have been told: about what the messages before it come to.
                used = min(self._window // 2, 300 * (k + 2))
                body |= {
                    "type": "usage.reported",
                    "model": "m-1",
                    "context_tokens": used,
                    "output_tokens": 120,
                }
                body |= {"cache_read_tokens": used - 1, "note": ""}
                return "note"
        plan = [{"id": f"p{n}", "text": f"part {turn + n} of the way", "state": "todo"} for n in range(3)]
        body |= {"type": "step.changed", "phase": f"part {turn}", "plan": plan, "note": ""}
        body |= {"next_action": {"verb": "edit", "detail": f"part {turn}"}}
        return "note"

    def _item(self, body: Json, turn: int, kind: int) -> str:
        match kind:
            case 0:
                body |= {"type": "operation.declared", "operation_id": f"op-{turn}", "kind": "git.commit"}
                body |= {"idempotency_key": f"key-{turn}", "description": ""}
                return "description"
            case 1:
                body |= {"type": "operation.dispatched", "operation_id": f"op-{turn}", "note": ""}
                return "note"
            case 2:
                body |= {"type": "operation.settled", "operation_id": f"op-{turn}", "state": "succeeded"}
                body["detail"] = ""
                return "detail"
            case 3:
                body |= {
                    "type": "evidence.recorded",
                    "evidence_id": f"ev-{turn}",
                    "claim": "",
                    "kind": "observed",
                }
                body["source"] = f"event:{body['id']}"
                return "claim"
        body |= {"type": "decision.made", "decision_id": f"d-{turn}", "summary": f"go on with part {turn}"}
        body["reason"] = ""
        if turn >= 40:
            body["supersedes"] = f"d-{turn - 20}"
        return "reason"
