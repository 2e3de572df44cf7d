"""Facts of a history by rule: paths, ids, figures with a unit, commands, URLs, and what the user forbade.

Where nobody knows the answers, these are what an agent asks for again most often, and each can be checked as
text. Pure. Which facts matter to the task no rule can tell, and none here tries to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from protocol.events import Event, Message, ToolCalled, ToolReturned
from sidecar.core.context import shown

KINDS: Final = ("path", "id", "figure", "command", "url", "prohibition")
MOST_OF_A_KIND: Final = 40
"""Facts of one kind that are asked for of one run, spread evenly over its history."""

ALIKE: Final = 3
"""Messages that may hold the words around a figure."""

_LONGEST = 160
_PATH = re.compile(r"(?<![\w:/.~-])(?:~|\.{1,2})?/?(?:[\w.@+-]+/)+[\w.@+-]*\w\.\w{1,8}(?![\w/])")
_ID = re.compile(
    r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"
    r"|\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b|\b[A-Z][A-Z0-9]{1,9}-\d{1,6}\b|(?<![\w&/])#\d{2,6}\b"
)
_FIGURE = re.compile(
    r"(?<![\w.,])\d[\d,]*(?:\.\d+)?\s?"
    r"(?:ms|s|sec|seconds|min|minutes|h|hours|%|percent|B|kB|KB|MB|GB|KiB|MiB|GiB|bytes|tokens|rows|lines|files"
    r"|tests|passed|failed|errors|warnings|insertions|deletions|px|EUR|USD|CHF)(?![\w%])"
)
_URL = re.compile(r"https?://[^\s\"'<>()\[\]{}|\\^`]+[^\s\"'<>()\[\]{}|\\^`.,;:!?]")
_SENTENCE = re.compile(r"(?:[^.!?\n]|[.!?](?![\s]|$)){10,300}(?:[.!?](?=\s|$)|(?=\n|$))")
_NEGATIVE = re.compile(
    r"\b(?:never|do not|don['’]t|must not|mustn['’]t|should not|shouldn['’]t|may not|cannot|can['’]t|without"
    r"|no longer|avoid|not allowed|nicht|kein\w*|niemals)\b",
    re.IGNORECASE,
)
_COMMANDS = ("command", "cmd", "script")
_AROUND = 6
"""Words beside a figure that it is looked for by."""


class Fact(Struct, frozen=True, kw_only=True):
    """``text`` is the fact word for word, ``query`` what a search for it is asked with."""

    kind: str
    text: str
    query: str
    position: int


def facts(events: Iterable[tuple[int, Event]]) -> list[Fact]:
    """The facts of a run's messages in order, each text once per kind, thinned out to ``MOST_OF_A_KIND``."""
    found: dict[str, dict[str, Fact]] = {kind: {} for kind in KINDS}
    texts: list[str] = []
    for position, event in events:
        texts.append(" ".join(_texts(event)).casefold())
        for fact in _of(position, event):
            if "[redacted" not in fact.text:
                found[fact.kind].setdefault(fact.text, fact)
    found["figure"] = {text: fact for text, fact in found["figure"].items() if _told_apart(fact, texts)}
    return [fact for kind in KINDS for fact in thinned(list(found[kind].values()))]


def _told_apart(fact: Fact, texts: Sequence[str]) -> bool:
    """Whether the words a figure is looked for by stand together in few messages: nobody could ask for others."""
    words = fact.query.casefold().split()
    return sum(all(word in text for word in words) for text in texts) <= ALIKE


def thinned(found: Sequence[Fact]) -> list[Fact]:
    """At most ``MOST_OF_A_KIND`` of them, evenly spread."""
    if len(found) <= MOST_OF_A_KIND:
        return list(found)
    step = len(found) / MOST_OF_A_KIND
    return [found[int(number * step)] for number in range(MOST_OF_A_KIND)]


def _texts(event: Event) -> Iterator[str]:
    match event:
        case Message() | ToolReturned():
            yield shown(event.content)
        case ToolCalled():
            yield bytes(event.arguments).decode("utf-8", "replace")
        case _:
            return


def _of(position: int, event: Event) -> Iterator[Fact]:
    match event:
        case Message():
            text = shown(event.content)
            yield from _in_text(position, text)
            if event.role == "user":
                yield from _forbidden(position, text)
        case ToolReturned():
            yield from _in_text(position, shown(event.content))
        case ToolCalled():
            try:
                arguments = msgspec.json.decode(event.arguments)
            except msgspec.DecodeError:
                return
            yield from _commands(position, arguments)
            for text in _leaves(arguments):
                yield from _in_text(position, text)
        case _:
            return


def _in_text(position: int, text: str) -> Iterator[Fact]:
    for kind, pattern in (("path", _PATH), ("id", _ID), ("url", _URL)):
        for match in pattern.finditer(text):
            if 6 <= len(match[0]) <= _LONGEST or (kind == "id" and len(match[0]) <= _LONGEST):
                yield Fact(kind=kind, text=match[0], query=match[0], position=position)
    for match in _FIGURE.finditer(text):
        query = _beside(text, match.start(), match.end())
        if query:
            yield Fact(kind="figure", text=match[0], query=query, position=position)


def _beside(text: str, start: int, end: int) -> str:
    """Words on both sides of a figure in its line, without a figure among them."""
    line_start = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", end)
    before = text[line_start:start].split()[-_AROUND:]
    after = text[end : line_end if line_end >= 0 else len(text)].split()[:_AROUND]
    words = [word for word in (*before, *after) if any(char.isalpha() for char in word)]
    return " ".join(words)[:200] if len(words) >= 2 else ""


def _forbidden(position: int, text: str) -> Iterator[Fact]:
    for match in _SENTENCE.finditer(text):
        sentence = match[0].strip(" -*#>`\t")
        if _NEGATIVE.search(sentence) and len(sentence.split()) >= 3 and "<" not in sentence:
            words = sorted(re.findall(r"\w{4,}", sentence), key=len, reverse=True)[:_AROUND]
            yield Fact(kind="prohibition", text=sentence, query=" ".join(words), position=position)


def _commands(position: int, arguments: Any) -> Iterator[Fact]:
    if not isinstance(arguments, dict):
        return
    for name in _COMMANDS:
        value = arguments.get(name)
        if isinstance(value, list) and all(isinstance(word, str) for word in value):
            value = " ".join(value)
        if isinstance(value, str):
            line = value.strip().partition("\n")[0].strip()
            if 6 <= len(line) <= _LONGEST:
                yield Fact(kind="command", text=line, query=line, position=position)


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
