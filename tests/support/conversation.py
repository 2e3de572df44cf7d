"""An agent's conversation of known size, told over the wire: exchanges, usage, taking packets up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.support.blackbox import Box, Json, event, words

SMALL_MODEL = {"name": "small-model", "context_window": 20_000, "max_output_tokens": 1_000}
SMALL_USABLE = 20_000 - 1_000 - 2_000
"""Of the window, the output and a tenth of the window are kept free."""


def at(share: float) -> int:
    """Tokens of that share of the small model's usable window, rounded up."""
    return int(share * SMALL_USABLE) + 1


@dataclass
class Talk:
    """One run with a small window. ``events`` is everything told on the event channel, in order."""

    box: Box
    run: str
    events: list[Json] = field(default_factory=list)
    turns: int = 0

    async def tell(self, *messages: Json) -> None:
        self.events.extend(messages)
        await self.box.tell(self.run, *messages)

    async def exchange(self, tokens: int = 400, **result: Any) -> str:
        """A word of the user, a call, its result of that size, the answer; the result's event id."""
        number = self.turns
        self.turns += 1
        told = event(
            "tool.returned", call_id=f"c-{number}", status="ok", content=words(tokens, f"r{number}"), **result
        )
        await self.tell(
            event("message", role="user", content=words(50, f"user {number}")),
            event(
                "message", role="assistant", message_id=f"m-{number}", content=words(100, f"said {number}")
            ),
            event(
                "tool.called",
                call_id=f"c-{number}",
                tool="read_file",
                arguments={"path": f"/src/file_{number}.py"},
                message_id=f"m-{number}",
            ),
            told,
            event("message", role="assistant", content=words(20, f"done {number}")),
        )
        return str(told["id"])

    async def used(self, tokens: int, **more: Any) -> Json:
        """Report a prompt of that size; the status after it."""
        told = event("usage.reported", model="small-model", context_tokens=tokens, output_tokens=1, **more)
        await self.tell(told)
        return await self.box.status(self.run)

    async def fill(self, share: float, tokens: int = 400) -> Json:
        """Exchanges until the figure is at that share of what is usable; the status then."""
        status = await self.box.status(self.run)
        while status["budget"]["used"] < share * SMALL_USABLE:
            await self.exchange(tokens)
            status = await self.box.status(self.run)
        return status

    def position(self, event_id: str) -> int:
        """Position of an event, where nothing came on the authority channel."""
        return 1 + next(place for place, item in enumerate(self.events) if item["id"] == event_id)

    def check_untorn(self, covers_through: int) -> None:
        """No call and result, and no answer and its calls, on two sides of the cut."""
        sides: dict[str, set[bool]] = {}
        for place, item in enumerate(self.events, 1):
            names = {item.get("call_id"), item.get("message_id")} - {None}
            for name in names:
                sides.setdefault(str(name), set()).add(place <= covers_through)
        assert all(len(found) == 1 for found in sides.values())


async def talk(box: Box, **fields: Any) -> Talk:
    """Begin a run with the small model."""
    begin = event("run.started", **{"goal": "Read it all.", "model": SMALL_MODEL, **fields})
    found = Talk(box, fields.pop("run", None) or f"talk-{begin['id']}")
    await found.tell(begin)
    return found
