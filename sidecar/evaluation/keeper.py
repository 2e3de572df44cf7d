"""Watchkeeper as a strategy: one run on a lane of its own, seen only as an agent sees it.

What it leaves is the message list that ``ask.context`` gives; what it knows are the fields of a fresh packet and
the answers to ``authorize``, ``fetch`` and ``search``. It reads no ledger and no table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from sidecar.core.tokens import bytes_tokens
from sidecar.evaluation.bench import Bench, Json
from sidecar.evaluation.reader import ABSENT, Items, items_of, question
from sidecar.evaluation.scenario import Asked
from sidecar.evaluation.story import RUN, Tell
from sidecar.evaluation.wording import normal

TOP: Final = 3
"""Hits of a search that count as found."""
_LISTS: Final = {
    "constraint": ("constraints", "active"),
    "question": ("questions", "open"),
    "decision": ("decisions", "in_force"),
    "operation": ("operations", ""),
    "approval": ("approvals", ""),
    "child": ("children", ""),
}
_FETCH_TOKENS = 200_000
_TRIES = 4
_BACK_OFF_SECONDS = 61.0


class Left(Struct, frozen=True, kw_only=True):
    """What one moment leaves: the packet, the list of messages, and all texts that stand in it, quotes undone."""

    packet: Json
    context: str
    stand_in: str
    tokens: int
    within: bool
    """The packet keeps to its budget."""


class Keeper:
    """One run on a bench."""

    def __init__(self, bench: Bench, name: str, packet_tokens: int) -> None:
        self.bench = bench
        self.name = name
        self.attempts: list[Json] = []
        """Receipts of the run's compactions, whatever their end."""
        self._packet_tokens = packet_tokens

    async def tell(self, tells: Iterable[Tell]) -> None:
        runs: set[str] = set()
        for tell in tells:
            self.bench.put(tell.run, tell.channel, tell.event)
            runs.add(tell.run)
        await self.bench.read()
        for run in sorted(runs):
            await self.bench.take_up(run)

    async def compact(self, run: str = RUN, *, tries: int = _TRIES) -> bool:
        """Whether one was made since the last time, by itself or now that it is asked for. What was refused or has
        to wait is asked for again later, as the daemon does."""
        for _ in range(tries):
            if await self._made(run):
                return True
            await self.bench.compact(run)
            if await self._made(run):
                return True
            self.bench.wait(_BACK_OFF_SECONDS)
        return False

    async def _made(self, run: str) -> bool:
        """Whether receipts tell of one that was applied, beyond those looked at before."""
        receipts = await self.bench.receipts(run)
        fresh = receipts[len(self.attempts) :]
        self.attempts = receipts
        return any(receipt["outcome"] == "applied" for receipt in fresh)

    async def left(self, run: str = RUN) -> Left:
        packet = await self.bench.ask("packet", run)
        reply = await self.bench.ask("context", run, format="openai")
        text = packet["text"]
        said = [message["content"] for message in reply.get("messages", [{"content": text}])]
        context = "\n".join(item if isinstance(item, str) else " ".join(_texts(item)) for item in said)
        calls = [
            " ".join(_texts(call))
            for message in reply.get("messages", [])
            for call in message.get("tool_calls") or []
        ]
        whole = "\n".join([context, *calls])
        budget = packet["budget"]
        reduced = bytes_tokens(len(text.encode())) * 4 <= budget["usable"]
        return Left(
            packet=packet,
            context="\n".join(
                [whole, *unquoted(text), *(piece for call in calls for piece in _arguments(call))]
            ),
            stand_in=text,
            tokens=bytes_tokens(len(whole.encode())),
            within=budget["packet_tokens"] <= self._packet_tokens or reduced,
        )

    async def state(self, left: Left, ref: str, run: str = RUN) -> str:
        """The state of an item: as the packet has it, else as one fetch tells it."""
        kind, _, name = ref.partition(":")
        place, implied = _LISTS.get(kind, ("", ""))
        task = left.packet["task"]
        listed = task.get(place, left.packet.get(place, []))
        for item in listed:
            if item.get("id", item.get("run")) == name:
                return str(item.get("state", item.get("status", implied)))
        record = (await self.fetch(ref, run))[1]
        return str(record.get("state", record.get("status", ABSENT)))

    def may(self, left: Left, operation: str) -> str:
        return next((item["may"] for item in left.packet["operations"] if item["id"] == operation), ABSENT)

    def next(self, left: Left) -> str:
        action = left.packet["progress"]["next_action"]
        return "none" if action is None else f"{action['verb']} {action.get('operation_id') or ''}".strip()

    def protected(self, left: Left) -> Items:
        """The protected items of the packet that also stand in its text, word for word."""
        texts = normal(left.context)
        return {
            key: item
            for key, item in items_of(left.packet).items()
            if all(normal(text) in texts for text in _texts(_without_time(item)))
        }

    async def authorize(self, asked: str | Asked, run: str = RUN) -> tuple[bool, str]:
        ask = question(asked)
        body = {
            name: value
            for name in ask.__struct_fields__
            if (value := getattr(ask, name)) not in (None, False)
        }
        body.pop("after", None)
        reply = await self.bench.ask("authorize", run, **body)
        if "error" in reply:
            return False, str(reply["error"]["code"])
        return bool(reply["allowed"]), str(reply["code"])

    async def fetch(self, ref: str, run: str = RUN) -> tuple[str, Json]:
        """(text of the evidence, its ledger view): empty where the ref leads nowhere."""
        texts = await self.fetch_all([ref], run)
        return texts.get(ref, ("", {}))

    async def fetch_all(self, refs: Sequence[str], run: str = RUN) -> dict[str, tuple[str, Json]]:
        """The same of many refs; pages are joined."""
        found: dict[str, tuple[list[str], Json]] = {}
        for start in range(0, len(refs), 100):
            body: Json = {"refs": list(refs[start : start + 100]), "max_tokens": _FETCH_TOKENS}
            while True:
                reply = await self.bench.ask("fetch", run, **body)
                for item in reply.get("items", []):
                    if item["status"] in ("found", "redacted"):
                        texts, _record = found.setdefault(item["ref"], ([], item.get("record") or {}))
                        texts += list(_texts(item.get("event") or {})) + list(
                            _texts(item.get("record") or {})
                        )
                if not reply.get("truncated"):
                    break
                body["cursor"] = reply["next"]
        return {ref: ("\n".join(texts), record) for ref, (texts, record) in found.items()}

    async def search(self, query: str, run: str = RUN, limit: int = TOP) -> list[str]:
        """The evidence behind the first hits, whole; what an agent gets by search and fetch."""
        reply = await self.bench.ask("search", run, query=query, limit=limit)
        hits = reply.get("hits", [])
        refs = [f"pos:{hit['position']}" for hit in hits]
        told = await self.fetch_all(refs, run)
        return [
            f"{hit['snippet']}\n{told.get(ref, ('', {}))[0]}" for hit, ref in zip(hits, refs, strict=True)
        ]


_DECODER = json.JSONDecoder()


def unquoted(text: str) -> Iterator[str]:
    """Every JSON string of a packet's text, as it was recorded."""
    at = text.find('"')
    while at >= 0:
        try:
            value, end = _DECODER.raw_decode(text, at)
        except ValueError:
            return
        if isinstance(value, str):
            yield value
        at = text.find('"', end)


def _without_time(item: Any) -> Any:
    """A packet's text spells a moment in its own way."""
    return (
        {name: value for name, value in item.items() if name != "expires_at"}
        if isinstance(item, dict)
        else item
    )


def _arguments(call: str) -> Iterator[str]:
    """Texts of a call's arguments, which providers take as a string of JSON."""
    at = call.find("{")
    if at >= 0:
        try:
            yield from _texts(_DECODER.raw_decode(call, at)[0])
        except ValueError:
            return


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value
