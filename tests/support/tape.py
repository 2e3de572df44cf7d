"""A run in a row, as the budget and the compaction rules meet it: positions, estimates, figures."""

from __future__ import annotations

from typing import Any

from protocol.events import Event
from protocol.summary import Exchange
from sidecar.core.boundary import TailItem
from sidecar.core.budget import Budget, BudgetSettings, Observed, observe
from sidecar.core.material import event_text, exchange_items
from sidecar.core.tokens import estimate
from support.story import event

SETTINGS = BudgetSettings()


class Tape:
    """Records messages, keeps a budget up to date; ``text`` of so many tokens is spelled by ``words``."""

    def __init__(self, window: int = 100_000, settings: BudgetSettings = SETTINGS) -> None:
        self.settings = settings
        self.budget = Budget()
        self.items: list[TailItem] = []
        self.seen: list[Observed] = []
        self.count = 0
        self.add("run.started", goal="g", model={"name": "m", "context_window": window})

    def add(
        self, type_: str, channel: str = "event", *, current: bool = True, late: bool = False, **fields: Any
    ) -> Observed:
        self.count += 1
        told: Event = event(type_, fields.pop("id_", f"e-{self.count}"), channel, **fields)
        item = TailItem(position=self.count, channel=channel, event=told, tokens=estimate(told).tokens)
        self.items.append(item)
        observed = observe(
            self.budget,
            told,
            position=self.count,
            current=current,
            late=late,
            settings=self.settings,
            channel=channel,
        )
        self.seen.append(observed)
        return observed

    def user(self, content: str = "do it", **fields: Any) -> Observed:
        return self.add("message", role="user", content=content, **fields)

    def said(self, content: str = "I do it", **fields: Any) -> Observed:
        return self.add("message", role="assistant", content=content, **fields)

    def call(self, call_id: str, tool: str = "bash", **arguments: Any) -> Observed:
        return self.add("tool.called", call_id=call_id, tool=tool, arguments=arguments)

    def result(self, call_id: str, content: str = "fine", status: str = "ok", **fields: Any) -> Observed:
        return self.add("tool.returned", call_id=call_id, status=status, content=content, **fields)

    def usage(self, tokens: int, model: str = "m", **fields: Any) -> Observed:
        return self.add("usage.reported", model=model, context_tokens=tokens, output_tokens=10, **fields)

    def turn(self, tokens: int, name: str = "") -> None:
        """User, assistant, call, result: about so many tokens, nearly all of them in the result."""
        call_id = f"c-{self.count}{name}"
        self.user()
        self.said()
        self.call(call_id, command="make")
        self.result(call_id, words(tokens))

    def exchanges(self) -> tuple[Exchange, ...]:
        return exchange_items(self.items)

    def resolve(self, ref: str) -> str | None:
        """The whole text of a message of this tape, by ``event:`` or ``pos:``."""
        for item in self.items:
            named = ref == f"pos:{item.position}" or (
                item.channel == "event" and ref == f"event:{item.event.id}"
            )
            if named:
                return event_text(item.event) or item.event.id
        return None


def words(tokens: int) -> str:
    """A text of that many tokens by estimate, in lines."""
    return ("lorem ipsum dolor\n" * (tokens * 4 // 18 + 1))[: tokens * 4]
