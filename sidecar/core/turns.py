"""The conversation as far as the ledger keeps it: the current request, and user messages worth keeping near.

Messages are never read for permission. A late one may add to the current request and never ends it.
"""

from __future__ import annotations

import re
from typing import Final

from protocol.events import BoundaryMarked, Message
from sidecar.core import calls
from sidecar.core.entry import Entry
from sidecar.core.excerpt import content_text, cut_note
from sidecar.core.state import Corrected, Request, UserMessage

KEPT_BYTES: Final = 32 * 1024
"""Text of the kept user messages together, in bytes of UTF-8."""
KEPT_CHARS: Final = 4_000
"""Of one kept user message; a note that it is cut comes after them."""
_COST_OF_ONE: Final = 64
"""Bytes a kept message counts beyond its text, so that short ones are bounded in number."""

FIRST: Final = 3
MARKED: Final = 2
OTHER: Final = 1

_PROHIBITION = re.compile(
    r"\b(?:never|do\s+not|don['’]?t|must\s+not|mustn['’]?t|may\s+not|should\s+not|shouldn['’]?t|shall\s+not"
    r"|cannot|can['’]?t|won['’]?t|not\s+allowed|no\s+longer|forbid(?:den)?|prohibit(?:ed)?|avoid|without|unless"
    r"|except|only|instead\s+of|leave\s+\S+\s+alone|hands\s+off|stop|nicht|kein(?:e|en|er)?|niemals)\b",
    re.IGNORECASE,
)
_IDENTIFIER = re.compile(
    r"`[^`\n]+`"
    r"|https?://\S+"
    r"|(?:[\w.-]+)?/[\w.-]+/[\w./-]+"
    r"|\b[\w-]+\.[A-Za-z]{1,6}\b(?!\s)"
    r"|\b(?=\w*\d)(?=\w*[A-Za-z_])\w{3,}\b"
    r"|\b[A-Za-z]+-\d+\b"
    r"|\b\d{3,}\b"
    r"|\b\d+\.\d+"
    r"|\b[0-9a-f]{7,64}\b"
    r"|\b\w+_\w+\b"
)


def said(entry: Entry, event: Message) -> None:
    """A message of the conversation; only user and assistant move the turn."""
    if event.supersedes is not None:
        entry.ledger.put("corrected", Corrected(id=event.supersedes, position=entry.position))
    if event.role == "user":
        _user(entry, event)
    elif event.role == "assistant" and not entry.late:
        entry.head.turn = "assistant"


def marked(entry: Entry, event: BoundaryMarked) -> None:
    """The turn is over by the agent's own word."""
    if event.kind == "turn_ended" and not entry.late:
        _end_turn(entry)


def _user(entry: Entry, event: Message) -> None:
    ledger, head = entry.ledger, entry.head
    if head.turn == "assistant" and not entry.late and not calls.any_open(entry):
        _end_turn(entry)
    first = not ledger.items["user"]
    if event.supersedes is not None:
        ledger.drop("request", event.supersedes)
        corrected = ledger.items["user"].get(event.supersedes)
        if corrected is not None:
            first = first or corrected.rank == FIRST
            ledger.drop("user", event.supersedes)
    text = content_text(event.content)
    whole = text + cut_note(event, text, entry.ref)
    ledger.put("request", Request(id=entry.free_key("request"), text=whole, position=entry.position))
    rank = FIRST if first else MARKED if _is_marked(text[:KEPT_CHARS]) else OTHER
    near = text[:KEPT_CHARS]
    near += cut_note(event, near, entry.ref)
    kept = UserMessage(id=entry.free_key("user"), text=near, position=entry.position, rank=rank)
    ledger.put("user", kept)
    _bound(entry, kept.id)


def _end_turn(entry: Entry) -> None:
    for key in list(entry.ledger.items["request"]):
        entry.ledger.drop("request", key)
    entry.head.turn = "none"


def _bound(entry: Entry, newest: str) -> None:
    """Let go the least worth keeping, oldest first, until the rest fits. First and newest always stay."""
    kept = entry.ledger.items["user"]
    size = sum(_cost(item) for item in kept.values())
    for item in sorted(kept.values(), key=lambda item: (item.rank, item.position, item.id)):
        if size <= KEPT_BYTES:
            return
        if item.id != newest and item.rank != FIRST:
            entry.ledger.drop("user", item.id)
            size -= _cost(item)


def _cost(item: UserMessage) -> int:
    return len(item.text.encode(errors="replace")) + _COST_OF_ONE


def _is_marked(text: str) -> bool:
    return _PROHIBITION.search(text) is not None or _IDENTIFIER.search(text) is not None
