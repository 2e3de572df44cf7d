"""Ways to shorten a history that keep no ledger: none, the last messages, trimmed tool output, a rolling summary.

Each works on the same messages, at the same moments, within the same room: what Watchkeeper may use for its packet
and its recent part. Everything the ledger would be told (approvals, operations, constraints, …) stands in their
conversation as a line of text, so nothing is kept from them. Deterministic; no model is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from msgspec import Struct

from protocol.codec import canonical
from sidecar.core.excerpt import clip, error_line, first_sentence, last_line, plain
from sidecar.core.tokens import bytes_tokens
from sidecar.evaluation.scenario import Sizes
from sidecar.evaluation.story import RUN, Tell
from sidecar.evaluation.wording import normal

_KEPT_ALWAYS: Final = frozenset({"run.started"})
"""The task is an agent's system prompt; no strategy drops that."""
_PLACEHOLDER: Final = "[old tool output removed]"
_LEAST_TRIMMED = 100


class Line(Struct, frozen=True, kw_only=True):
    """One message as it stands in a conversation. ``exchange`` is equal for what may not be torn apart."""

    tell: Tell
    text: str
    tokens: int
    exchange: int


class Shown(Struct, frozen=True, kw_only=True):
    """What a strategy leaves to go on with. ``told``: the messages that still stand there whole."""

    context: str
    stand_in: str
    """The text that stands for what was left out; empty where nothing does."""
    tokens: int
    told: tuple[Tell, ...]


class Strategy(Protocol):
    """Shortens one run's conversation, again and again."""

    name: str
    """As it is asked for and stands in the JSON."""
    title: str
    """As it stands in tables."""

    def add(self, line: Line) -> None:
        """One message more."""

    def compact(self) -> None:
        """Shorten now."""

    def shown(self) -> Shown:
        """The context as it is."""


class Conversation:
    """Turns messages into lines; ids of one exchange go together."""

    def __init__(self) -> None:
        self._exchange = 0

    def line(self, tell: Tell) -> Line:
        type_ = tell.event["type"]
        if type_ not in ("tool.called", "tool.returned", "usage.reported"):
            self._exchange += 1
        text = line_text(tell)
        return Line(tell=tell, text=text, tokens=bytes_tokens(len(text.encode())), exchange=self._exchange)


def line_text(tell: Tell) -> str:
    """The message as a framework without a ledger would write it into the conversation."""
    event = tell.event
    whose = f"{tell.run} " if tell.run != RUN else ""
    match event["type"]:
        case "message":
            return f"{whose}{event['role']}: {content_text(event['content'])}"
        case "tool.called":
            return f"{whose}call {event['tool']} {_plain(event['arguments'])}"
        case "tool.returned":
            said = event.get("conclusion")
            head = f"{whose}result {event['status']}" + (f" ({said})" if said else "")
            return f"{head}: {content_text(event['content'])}"
        case name:
            fields = {
                key: value for key, value in event.items() if key not in ("v", "at", "type", "model", "epoch")
            }
            return f"{whose}{name}: " + "; ".join(f"{key}: {_plain(value)}" for key, value in fields.items())


def content_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text") or part.get("value") or "") for part in content)


def _plain(value: Any) -> str:
    """Every text of a value as written, after the name it stands under."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_plain(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value)
    return canonical(value).decode()


_SAYS: Final = {"constraint.set": "text", "question.opened": "text", "decision.made": "summary"}
"""What of a message makes it known: who reads these words anywhere knows of it."""


def _shown(
    lines: Sequence[Line],
    stand_in: str = "",
    *,
    told: Sequence[Tell] = (),
    gone: Sequence[Tell] = (),
) -> Shown:
    """``told``: messages that stand whole in the stand-in. ``gone``: all others that were left out."""
    head = [line for line in lines if line.tell.event["type"] in _KEPT_ALWAYS]
    rest = [line for line in lines if line.tell.event["type"] not in _KEPT_ALWAYS]
    texts = [*(line.text for line in head), *([stand_in] if stand_in else []), *(line.text for line in rest)]
    context = "\n".join(texts)
    known = {tell.number: tell for tell in (*told, *(line.tell for line in lines))}
    words = normal(context)
    for tell in gone:
        said = tell.event.get(_SAYS.get(tell.event["type"], ""))
        if isinstance(said, str) and normal(said) in words:
            known.setdefault(tell.number, tell)
    return Shown(
        context=context,
        stand_in=stand_in,
        tokens=bytes_tokens(len(context.encode())),
        told=tuple(known[number] for number in sorted(known)),
    )


def newest(lines: Sequence[Line], room: int) -> int:
    """Index from which on the newest whole exchanges fit into ``room`` tokens; the last one always stays."""
    start, size, index = len(lines), 0, len(lines)
    while index > 0:
        first = index - 1
        while first > 0 and lines[first - 1].exchange == lines[first].exchange:
            first -= 1
        size += sum(line.tokens for line in lines[first:index])
        if size > room and start < len(lines):
            break
        start = index = first
    return start


class NoCompaction:
    """Everything stays. What it costs is in its tokens."""

    name = "none"
    title = "no compaction"

    def __init__(self, sizes: Sizes) -> None:
        self._lines: list[Line] = []

    def add(self, line: Line) -> None:
        self._lines.append(line)

    def compact(self) -> None:
        pass

    def shown(self) -> Shown:
        return _shown(self._lines)


class LastMessages:
    """The task and the newest exchanges that fit."""

    name = "last"
    title = "last messages"

    def __init__(self, sizes: Sizes) -> None:
        self._room = sizes.keep_recent_tokens + sizes.packet_tokens
        self._lines: list[Line] = []
        self._gone: list[Tell] = []

    def add(self, line: Line) -> None:
        self._lines.append(line)

    def compact(self) -> None:
        always = [line for line in self._lines if line.tell.event["type"] in _KEPT_ALWAYS]
        rest = [line for line in self._lines if line.tell.event["type"] not in _KEPT_ALWAYS]
        room = self._room - sum(line.tokens for line in always)
        start = newest(rest, room)
        self._gone += [line.tell for line in rest[:start]]
        self._lines = always + rest[start:]

    def shown(self) -> Shown:
        return _shown(self._lines, gone=self._gone)


class TrimmedOutput:
    """Old tool output becomes a placeholder; all else stays, however much it is."""

    name = "trim"
    title = "trimmed tool output"

    def __init__(self, sizes: Sizes) -> None:
        self._recent = sizes.keep_recent_tokens
        self._lines: list[Line] = []
        self._gone: set[int] = set()

    def add(self, line: Line) -> None:
        self._lines.append(line)

    def compact(self) -> None:
        for index, line in enumerate(self._lines[: newest(self._lines, self._recent)]):
            if line.tell.event["type"] == "tool.returned" and line.tokens > _LEAST_TRIMMED:
                self._gone.add(index)

    def shown(self) -> Shown:
        lines = [
            Line(tell=line.tell, text=_PLACEHOLDER, tokens=8, exchange=line.exchange)
            if index in self._gone
            else line
            for index, line in enumerate(self._lines)
        ]
        # That a call came back, and how, can still be seen; what it said cannot.
        return _shown(lines)


_SECTIONS: Final = {
    "user": (12, 400),
    "events": (16, 400),
    "files": (20, 120),
    "errors": (8, 200),
    "agent": (6, 240),
}
"""Lines a section keeps, newest first to stay, and characters of a line."""
_TITLES: Final = {
    "user": "What the user asked",
    "events": "What happened",
    "files": "Files",
    "errors": "Errors",
    "agent": "Where the work stands",
}


class RollingSummary:
    """A summary in sections as prompts for it usually ask, made over again at each compaction: from its last text
    and what came since. A stand-in for a model that follows such a prompt to the letter within its length."""

    name = "rolling"
    title = "rolling summary"

    def __init__(self, sizes: Sizes) -> None:
        self._recent = sizes.keep_recent_tokens
        self._lines: list[Line] = []
        self._gone: list[Tell] = []
        self._sections: dict[str, list[tuple[str, Tell | None]]] = {name: [] for name in _SECTIONS}

    def add(self, line: Line) -> None:
        self._lines.append(line)

    def compact(self) -> None:
        always = [line for line in self._lines if line.tell.event["type"] in _KEPT_ALWAYS]
        rest = [line for line in self._lines if line.tell.event["type"] not in _KEPT_ALWAYS]
        start = newest(rest, self._recent)
        for line in rest[:start]:
            self._take(line)
            self._gone.append(line.tell)
        for name, (most, _) in _SECTIONS.items():
            kept = dict.fromkeys(text for text, _ in self._sections[name])
            whole = dict(self._sections[name])
            self._sections[name] = [(text, whole[text]) for text in list(kept)[-most:]]
        self._lines = always + rest[start:]

    def _take(self, line: Line) -> None:
        event, text = line.tell.event, plain(line.text)
        match event["type"]:
            case "message":
                role = "user" if event["role"] == "user" else "agent"
                said = text if role == "user" else first_sentence(line.text, _SECTIONS["agent"][1])
                self._put(role, said, line)
            case "tool.called":
                arguments = event["arguments"]
                path = (
                    arguments.get("path") or arguments.get("file_path")
                    if isinstance(arguments, dict)
                    else None
                )
                if isinstance(path, str):
                    self._put("files", path, line)
                else:
                    self._put("events", text, line)
            case "tool.returned":
                said = content_text(event["content"])
                if event["status"] != "ok":
                    self._put("errors", f"{event['status']}: {error_line(said)}", line)
                elif len(said) < 400:
                    self._put("events", f"result: {last_line(said)}", line)
            case _:
                self._put("events", text, line)

    def _put(self, section: str, text: str, line: Line) -> None:
        cut = clip(text, _SECTIONS[section][1])
        whole = cut == plain(line.text)
        self._sections[section].append((cut, line.tell if whole else None))

    def shown(self) -> Shown:
        parts = []
        told: list[Tell] = []
        for name, title in _TITLES.items():
            if self._sections[name]:
                parts += [f"{title}:", *(f"- {text}" for text, _ in self._sections[name])]
                told += [tell for _, tell in self._sections[name] if tell is not None]
        stand_in = "\n".join(["Summary of the conversation so far.", *parts]) if parts else ""
        return _shown(self._lines, stand_in, told=told, gone=self._gone)


WITHOUT_LEDGER: Final = (NoCompaction, LastMessages, TrimmedOutput, RollingSummary)
