"""Middlewares of other frameworks as strategies, over the same scenarios: `python -m benchmarks.peer_strategies`.

Run it under an interpreter that has `langchain` beside this project's own requirements, from the folder `tests`,
with the project on the path. What is measured is what the middleware leaves, with a scripted model in the place of
a real one: it copies each message of its prompt, long ones cut, within the room that Watchkeeper has for its packet.
So nothing is lost by a bad summary; what is missing is what the middleware did not show its model, or dropped.
"""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

from langchain.agents.middleware import ClearToolUsesEdit, SummarizationMiddleware
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.utils import count_tokens_approximately
from langchain_core.outputs import ChatGeneration, ChatResult

from sidecar.core.tokens import bytes_tokens
from sidecar.evaluation.course import Found, without_ledger
from sidecar.evaluation.outcome import figures, mean_tokens, percent
from sidecar.evaluation.scenario import Sizes, read_scenario, shipped
from sidecar.evaluation.story import Tell, acts
from sidecar.evaluation.strategies import Line, Shown, _shown, content_text
from sidecar.evaluation.wording import normal

_CUT = 400
_COPIED = re.compile(r"^(?:human|ai|tool|system): ", re.MULTILINE)
_MESSAGE = re.compile(r"<message type=\"(\w+)\"[^>]*>(.*?)</message>", re.DOTALL)


class Copying(BaseChatModel):
    """Follows any summary prompt by copying the messages it is shown, each cut, the newest within its room."""

    room: int = 24_000

    @property
    def _llm_type(self) -> str:
        return "copying"

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        prompt = "\n".join(str(message.content) for message in messages)
        lines: list[str] = []
        size = 0
        for kind, text in reversed(_MESSAGE.findall(prompt)):
            plain = html.unescape(re.sub(r"<[^>]+>", " ", text))
            # A summary shown once more, or what is left of it, is copied whole: its lines are short ones already.
            again = len(_COPIED.findall(plain)) > 1
            line = plain.strip() if again else f"{kind}: {' '.join(plain.split())[:_CUT]}"
            size += len(line)
            if size > self.room:
                break
            lines.append(line)
        said = "\n".join(reversed(lines)) or "Nothing to tell."
        return ChatResult(generations=[ChatGeneration(message=AIMessage(content=said))])


class _Peer:
    """Messages as LangChain keeps them; each knows the message it was made of by its id."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.messages: list[BaseMessage] = []
        self.lines: dict[str, Line] = {}

    def add(self, line: Line) -> None:
        id_ = f"m-{line.tell.number}"
        self.lines[id_] = line
        event = line.tell.event
        match event["type"]:
            case "run.started":
                made: BaseMessage = SystemMessage(content=line.text, id=id_)
            case "message" if event["role"] == "assistant":
                made = AIMessage(content=content_text(event["content"]), id=id_)
            case "message":
                made = HumanMessage(content=content_text(event["content"]), id=id_)
            case "tool.called":
                arguments = event["arguments"] if isinstance(event["arguments"], dict) else {}
                call = {"name": event["tool"], "args": arguments, "id": event["call_id"]}
                made = AIMessage(content="", tool_calls=[call], id=id_)
            case "tool.returned":
                text = content_text(event["content"])
                status = "success" if event["status"] == "ok" else "error"
                made = ToolMessage(content=text, tool_call_id=event["call_id"], status=status, id=id_)
            case _:
                made = HumanMessage(content=line.text, id=id_)
        self.messages.append(made)

    def shown(self) -> Shown:
        kept, stand_in = [], []
        there = {message.id for message in self.messages}
        gone: list[Tell] = [line.tell for id_, line in self.lines.items() if id_ not in there]
        for message in self.messages:
            line = self.lines.get(message.id or "")
            if line is None:
                stand_in.append(str(message.content))
            elif isinstance(message, ToolMessage) and message.content != content_text(
                line.tell.event["content"]
            ):
                text = str(message.content)
                kept.append(
                    Line(tell=line.tell, text=text, tokens=bytes_tokens(len(text)), exchange=line.exchange)
                )
            else:
                kept.append(line)
        words = normal("\n".join(stand_in))
        # A line that the summary repeats whole is as good as the message itself.
        told = [tell for tell in gone if normal(_wording(self.lines[f"m-{tell.number}"])) in words]
        return _shown(kept, "\n".join(stand_in), told=told, gone=gone)


def _wording(line: Line) -> str:
    """What of a message must stand there: of what somebody said, the words without who said it."""
    event = line.tell.event
    return content_text(event["content"]) if event["type"] == "message" else line.text


class LangChainSummary(_Peer):
    name, title = "langchain", "LangChain SummarizationMiddleware, as it comes"
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self._middleware: Any = SummarizationMiddleware(
            Copying(room=sizes.packet_tokens * 4),
            trigger=("messages", 2),
            keep=("tokens", sizes.keep_recent_tokens),
            **self.options,
        )

    def compact(self) -> None:
        # As an agent has it: the system prompt is not among the messages of the state.
        head = [message for message in self.messages if isinstance(message, SystemMessage)]
        rest = [message for message in self.messages if not isinstance(message, SystemMessage)]
        update = self._middleware.before_model({"messages": rest}, None)
        if update is not None:
            self.messages = head + [
                item for item in update["messages"] if not isinstance(item, RemoveMessage)
            ]


class LangChainWhole(LangChainSummary):
    name, title = "langchain-whole", "LangChain SummarizationMiddleware, its model shown everything"
    options: ClassVar[dict[str, Any]] = {"trim_tokens_to_summarize": None}


class LangChainClearing(_Peer):
    name, title = "langchain-clear", "LangChain ClearToolUsesEdit"

    def compact(self) -> None:
        edit: Any = ClearToolUsesEdit(trigger=1, keep=3)
        edit.apply(self.messages, count_tokens=lambda messages: count_tokens_approximately(messages))


PEERS = (LangChainSummary, LangChainWhole, LangChainClearing)


def compared(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Every peer over every scenario."""
    rows = []
    for make in PEERS:
        found = Found()
        for file in files:
            scenario = read_scenario(file)
            without_ledger(scenario, acts(scenario, file), make(scenario.sizes), found)  # type: ignore[arg-type]
        item = figures(
            make.name,
            make.title,
            watchkeeper=False,
            answers=found.answers,
            moments=found.moments,
            compactions=found.compactions[make.name],
        )
        rows.append(
            {
                "strategy": item.title,
                "version": metadata.version("langchain"),
                "right": percent(item.passed, item.probes),
                "kept": [item.drift[number] for number in (1, 5, 10) if number < len(item.drift)],
                "harms": item.harms,
                "tokens": mean_tokens(item),
            }
        )
    return rows


if __name__ == "__main__":
    chosen = [Path(name) for name in sys.argv[1:]] or sorted(shipped().glob("*.toml"))
    print(json.dumps(compared(chosen), indent=1))
