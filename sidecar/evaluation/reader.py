"""What a perfect reader would know from a set of messages: they are folded, and asked as Watchkeeper is asked.

Two uses. Over every message it is the truth that what a strategy leaves is measured against. Over the messages a
strategy without a ledger still shows it is the most such a context can tell: nothing visible is overlooked or
misread, and nothing invisible is known. It reads no packet, no summary and no storage.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from protocol.asks import AskAuthorize
from protocol.codec import decode_event, encode
from protocol.events import Settings
from protocol.handoff import PacketBlocker
from sidecar.core import gate, verdict
from sidecar.core.fold import Origin, fold
from sidecar.core.protected import protected_view
from sidecar.core.state import ITEM_TYPES, Head, Lane, Ledger
from sidecar.evaluation.scenario import Asked
from sidecar.evaluation.story import RUN, Tell

ABSENT: Final = "absent"
"""The state of an item that nobody told of."""

Items = dict[str, Any]
"""Protected items by ``kind:id``, as a packet writes them."""

_HOLDERS: Final = {
    "constraint": "constraint",
    "decision": "decision",
    "question": "question",
    "operation": "operation",
    "approval": "approval",
    "artifact": "artifact",
    "evidence": "evidence",
    "child": "child",
}


class Reader:
    """Ledgers of the runs told, by the messages seen so far."""

    def __init__(self, settings: Settings) -> None:
        self._lane = Lane(settings=settings)
        self._runs: dict[str, Ledger] = {}
        self._count = 0

    @classmethod
    def of(cls, settings: Settings, told: Iterable[Tell]) -> Reader:
        """A reader who has seen these messages, in order."""
        reader = cls(settings)
        for tell in told:
            reader.see(tell)
        return reader

    @classmethod
    def of_state(cls, settings: Settings, value: dict[str, Any]) -> Reader:
        """A reader who has a ledger as a run's state holds it. Raises ``msgspec.ValidationError``, ``KeyError``."""
        reader = cls(settings)
        ledger = Ledger(msgspec.convert(value["head"], Head))
        for kind, items in value["items"].items():
            for item in items:
                ledger.put(kind, msgspec.convert(item, ITEM_TYPES[kind]))
        reader._runs[ledger.head.run] = ledger
        return reader

    @property
    def runs(self) -> list[str]:
        """The runs anything was told of."""
        return list(self._runs)

    def operations(self, run: str) -> list[str]:
        """Ids of every operation of the run."""
        return sorted(self._runs[run].items["operation"])

    def blockers(self, run: str) -> list[PacketBlocker]:
        """Every cause of the verdict."""
        return verdict.blockers(self._lane, self._runs, run)

    def judge(self, operation: str, now: float, run: str) -> gate.Decision:
        """What `authorize` says of an operation."""
        moment = datetime.fromtimestamp(now, UTC)
        return gate.look(self._lane, self._runs, run, question(operation), now=moment)

    def see(self, tell: Tell) -> None:
        self._count += 1
        channel: Any = tell.channel
        event = decode_event(msgspec.json.encode(tell.event), run=tell.run, channel=channel)
        fold(self._lane, self._runs, tell.run, event, Origin(channel=channel, stream_seq=self._count))

    def protected(self, run: str = RUN) -> Items:
        return items_of(protected_view(self._runs, run)) if run in self._runs else {}

    def state(self, ref: str, run: str = RUN) -> str:
        """The state of an item by its ref; ``absent`` if nobody told of it."""
        kind, _, name = ref.partition(":")
        ledger = self._runs.get(run)
        item = None if ledger is None else ledger.get(_HOLDERS.get(kind, kind), name)
        return ABSENT if item is None else str(getattr(item, "state", getattr(item, "status", ABSENT)))

    def authorize(self, asked: str | Asked, now: float, run: str = RUN) -> tuple[bool, str]:
        """(allowed, code) for an operation id, or for an effect that was not declared."""
        decision = gate.look(
            self._lane, self._runs, run, question(asked), now=datetime.fromtimestamp(now, UTC)
        )
        return decision.allowed, decision.code

    def may(self, operation: str, run: str = RUN) -> str:
        ledger = self._runs.get(run)
        item = None if ledger is None else ledger.items["operation"].get(operation)
        if item is None:
            return ABSENT
        paused = self.verdict(run) == "pause"
        return gate.may(self._lane, self._runs, run, item, paused=paused, postpone=False)

    def verdict(self, run: str = RUN) -> str:
        if run not in self._runs:
            return "pause"
        return verdict.verdict(verdict.blockers(self._lane, self._runs, run))

    def next(self, run: str = RUN) -> str:
        """``verb``, or ``verb operation``; ``none`` where nothing is planned."""
        ledger = self._runs.get(run)
        action = None if ledger is None else ledger.progress.next_action
        return "none" if action is None else f"{action.verb} {action.operation_id or ''}".strip()


def question(asked: str | Asked) -> AskAuthorize:
    """The ask that only looks."""
    if isinstance(asked, str):
        return AskAuthorize(operation_id=asked, dry_run=True)
    return AskAuthorize(
        kind=asked.kind,
        idempotency_key=asked.idempotency_key,
        approval_id=asked.approval_id,
        payload_digest=asked.payload_digest,
        target=asked.target,
        tool=asked.tool,
    )


def items_of(view: dict[str, Any]) -> Items:
    """The protected view as single items; what may stand in a packet and its fields, one by one.

    Takes the ledger's protected view, or a packet's fields, which have the same names.
    """
    task, progress = view["task"], view["progress"]
    found: Items = {"goal": task["goal"]}
    found |= {f"done_when:{n}": text for n, text in enumerate(task["done_when"], 1)}
    if task["scope"] is not None:
        found["scope"] = task["scope"]
    found |= {f"constraint:{item['id']}": item for item in task["constraints"]}
    found |= {f"request:{item['event_id']}": item for item in task["current_request"]}
    found |= {f"policy:{name}": version for name, version in view["policy"].items() if version is not None}
    found |= {f"plan:{item['id']}": item for item in progress["plan"] if item["state"] in ("todo", "doing")}
    if progress["focus"]:
        found["focus"] = progress["focus"]
    if progress["next_action"] is not None:
        found["next_action"] = progress["next_action"]
    found |= {f"uncertain:{n}": text for n, text in enumerate(progress["uncertain"], 1)}
    found |= {f"question:{item['id']}": item for item in view["questions"]}
    live = ("not_started", "pending", "unknown")
    for item in view["operations"]:
        if item["state"] in live:
            found[f"operation:{item['id']}"] = {
                name: value for name, value in item.items() if name not in ("may", "receipt")
            }
    found |= {f"approval:{item['id']}": _dated(item) for item in view["approvals"]}
    found |= {f"contradiction:{'/'.join(pair)}": list(pair) for pair in view["contradictions"]}
    return msgspec.json.decode(encode(found))  # type: ignore[no-any-return]


def _dated(item: dict[str, Any]) -> dict[str, Any]:
    """One spelling of the moment an approval expires."""
    told = item.get("expires_at")
    if told is None:
        return item
    when = told if isinstance(told, datetime) else datetime.fromisoformat(str(told))
    return item | {"expires_at": when.astimezone(UTC).isoformat()}
