"""The conversation to go on with: system texts, the packet, what came after it, and what changed since.

Pure, and of no provider's shape; ``context_openai``, ``context_responses`` and ``context_anthropic`` write
it down. Every call stands with a result: a call that has none yet gets a marked placeholder, since leaving the
call out would hide that it may have run, and nothing is ever made up in its place. What a provider cannot take
(reasoning without its signature, bytes of pictures that are not held) is left out or named.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from protocol.content import Content, DataPart, ImagePart, ReasoningPart, TextPart
from protocol.events import ContextReplaced, Message, RunResumed, RunStarted, ToolCalled, ToolReturned
from protocol.handoff import ClearedResult
from sidecar.core.excerpt import clip, cut_note
from sidecar.core.exchanges import TailItem
from sidecar.core.material import ref_of
from sidecar.core.text import quoted
from sidecar.core.tokens import text_tokens

PACKET_HEAD: Final = "RESUME PACKET (data recorded from the run, not a message of the user)\n"
PACKET_END: Final = "END OF RESUME PACKET\n"
CHANGES_HEAD: Final = (
    "CHANGES since the packet (data recorded from the run); a NOW line takes the place of its line there\n"
)
CHANGES_END: Final = "END OF CHANGES\n"
NO_RESULT_YET: Final = "[no result recorded yet: the call may or may not have run; assume neither]"
NO_RESULT: Final = "[no result was ever recorded: the call may or may not have run; assume neither]"
SUPERSEDED: Final = "[this message was replaced by a later one]"

Role = Literal["system", "developer", "user", "assistant"]

_MESSAGE_OVERHEAD: Final = 4
"""Tokens a message takes beside its text, about."""


class Call(Struct, kw_only=True):
    """One call and what came back. ``key`` is its event id; ``status`` None: nothing final."""

    key: str
    call_id: str
    tool: str
    arguments: bytes
    status: str | None = None
    texts: list[str] = []

    @property
    def failed(self) -> bool:
        return self.status not in (None, "ok")

    def result(self, open_calls: Collection[str]) -> str:
        """The result's text: what was recorded, its status before it where that is not ``ok``."""
        texts = list(self.texts)
        if self.status is None:
            texts.append(NO_RESULT_YET if self.key in open_calls else NO_RESULT)
        elif self.status != "ok":
            texts.insert(0, f"[{self.status}]")
        return "\n".join(texts)

    def value(self) -> Any:
        """The arguments as a JSON value; a text that is a JSON object is that object."""
        value = msgspec.json.decode(self.arguments)
        if isinstance(value, str):
            try:
                inner = json.loads(value)
            except (ValueError, RecursionError):
                return value
            return inner if isinstance(inner, dict) else value
        return value

    def object(self) -> dict[str, Any]:
        """The arguments as an object; any other value under the name ``arguments``."""
        value = self.value()
        return value if isinstance(value, dict) else {"arguments": value}


class Turn(Struct, kw_only=True):
    """One message: its text, and an assistant's calls with their results."""

    role: Role
    text: str
    calls: list[Call] = []
    answered: bool = False


class Conversation(Struct, kw_only=True):
    """System texts of what is covered, then the packet as a user's turn, the tail, and the changes."""

    system: list[Turn]
    turns: list[Turn]
    open_calls: frozenset[str]


def conversation(
    *,
    system: Sequence[Turn],
    packet: str,
    tail: Sequence[TailItem],
    cleared: Mapping[int, ClearedResult],
    open_calls: frozenset[str],
    changed: str = "",
) -> Conversation:
    """Put together. ``packet`` is the packet's text, ``cleared`` results by position, ``open_calls`` event ids
    of the calls that are open by the ledger, ``changed`` what ``changes`` made."""
    turns = [
        Turn(role="user", text=f"{PACKET_HEAD}{packet}{PACKET_END}"),
        *_Collector(cleared).turns_of(tail),
    ]
    if changed:
        turns.append(Turn(role="user", text=changed))
    return Conversation(system=list(system), turns=turns, open_calls=open_calls)


def system_turns(items: Iterable[TailItem]) -> list[Turn]:
    """The system and developer messages among covered ones that are still in force, each text once."""
    found: dict[str, Turn] = {}
    texts: set[tuple[str, str]] = set()
    for item in items:
        event = item.event
        if not isinstance(event, Message):
            continue
        if event.supersedes is not None:
            found.pop(event.supersedes, None)
        if event.role not in ("system", "developer"):
            continue
        text = _told(event, ref_of(item))
        if text.strip() and (event.role, text) not in texts:
            texts.add((event.role, text))
            found[event.id] = Turn(role=event.role, text=text)
    return list(found.values())


def _told(event: Message | ToolReturned, ref: str) -> str:
    """What it says, with a note where the rest is kept apart."""
    text = shown(event.content)
    return text + cut_note(event, text, ref)


def shown(content: Content) -> str:
    """A content as one text. Pictures are named; reasoning is left out, since no provider takes it unsigned."""
    if isinstance(content, str):
        return content
    pieces: list[str] = []
    for part in content:
        match part:
            case TextPart():
                pieces.append(part.text)
            case DataPart():
                pieces.append(bytes(part.value).decode())
            case ImagePart():
                where = f", artifact:{part.artifact_id}" if part.artifact_id is not None else ""
                pieces.append(f"[image {part.media_type}{where}: its bytes are not held here]")
            case ReasoningPart():
                pass
    return "\n".join(pieces)


class _Collector:
    """Sorts the tail's messages into turns."""

    def __init__(self, cleared: Mapping[int, ClearedResult]) -> None:
        self._cleared = cleared
        self._turns: list[Turn] = []
        self._messages: dict[str, Turn] = {}
        self._named: dict[str, Turn] = {}
        """Assistant turns by their ``message_id``."""
        self._newest: Turn | None = None
        self._running: dict[str, list[tuple[Call, Turn, str | None]]] = {}
        self._session: str | None = None
        self._ended: set[str] = set()

    def turns_of(self, tail: Sequence[TailItem]) -> list[Turn]:
        for item in tail:
            self._take(item)
        return self._turns

    def _take(self, item: TailItem) -> None:
        event = item.event
        if isinstance(event, (RunStarted, RunResumed)):
            if event.session is not None and event.session not in (self._session, *self._ended):
                if self._session is not None:
                    self._ended.add(self._session)
                self._session = event.session
            self._newest = None
        elif event.session is not None and event.session in self._ended:
            # What an ended session still says moves nothing, so it is no part of what goes on.
            return
        elif self._session is None and item.channel == "event":
            self._session = event.session
        match event:
            case Message():
                self._message(item, event)
            case ToolCalled():
                self._called(event)
            case ToolReturned():
                self._returned(item, event)
            case ContextReplaced():
                self._newest = None
            case _:
                pass

    def _message(self, item: TailItem, event: Message) -> None:
        replaced = self._messages.get(event.supersedes or "")
        if replaced is not None:
            replaced.text = SUPERSEDED
        turn = Turn(role=event.role, text=_told(event, ref_of(item)))
        self._turns.append(turn)
        self._messages[event.id] = turn
        self._newest = turn if event.role == "assistant" else None
        if event.role == "assistant":
            self._named[event.message_id or event.id] = turn

    def _called(self, event: ToolCalled) -> None:
        owner = self._named.get(event.message_id) if event.message_id is not None else None
        if owner is None:
            owner = self._newest
            if owner is None or owner.answered:
                # The model was asked again and answered with calls only.
                owner = Turn(role="assistant", text="")
                self._turns.append(owner)
                if event.message_id is not None:
                    self._named[event.message_id] = owner
        self._newest = owner
        call = Call(key=event.id, call_id=event.call_id, tool=event.tool, arguments=bytes(event.arguments))
        owner.calls.append(call)
        self._running.setdefault(event.call_id, []).append((call, owner, event.session))

    def _returned(self, item: TailItem, event: ToolReturned) -> None:
        text = self._result(item, event)
        calls = self._running.get(event.call_id, [])
        for index in reversed(range(len(calls))):
            call, owner, session = calls[index]
            if session is not None and event.session is not None and session != event.session:
                continue
            call.texts.append(text)
            if event.status != "pending":
                call.status = event.status
                owner.answered = True
                del calls[index]
            return
        note = f"TOOL RESULT without a call here, call {quoted(event.call_id)} {event.status}: {quoted(text)}"
        self._turns.append(Turn(role="user", text=note))
        self._newest = None

    def _result(self, item: TailItem, event: ToolReturned) -> str:
        cleared = self._cleared.get(item.position)
        if cleared is None:
            return _told(event, ref_of(item))
        note = f"; note: {quoted(cleared.note)}" if cleared.note else ""
        return f"[result left out, status {cleared.status}; the whole by ask.fetch {ref_of(item)}{note}]"


# --- what changed -----------------------------------------------------------------------------------------

_HEADING = re.compile(r'([A-Z][A-Z-]*)(?: ("(?:[^"\\]|\\.)*"|[a-z_]+))?')
_NOT_PROTECTED: Final = frozenset(
    {
        "READ",
        "CALL",
        "EARLIER-USER-MESSAGE",
        "SUMMARY-COMPLETED",
        "SUMMARY-OBSERVED",
        "SUMMARY-INFERRED",
        "SUMMARY-NARRATIVE",
        "RECENT",
        "LEFT-OUT",
    }
)
_ONE: Final = frozenset(
    {"VERDICT", "GOAL", "SCOPE", "PARENT", "CONTRACT", "AUTHORITY", "POLICY", "PHASE", "FOCUS", "NEXT"}
    | {"ALLOWED-TOOLS", "REQUIRED-ARTIFACTS", "GRANTED-REFS"}
)
"""Headings of which a packet has one line at most."""
_GONE_CHARS: Final = 120


def changes(before: str, now: str, told: Collection[str]) -> str:
    """The protected lines of a packet's text that are new or gone, as lines; ``""`` when there are none.

    ``told``: ids of messages that stand in the tail and need no line of their own.
    """
    old, new = before.splitlines(), now.splitlines()
    known, still = set(old), set(new)
    added = [line for line in new if line not in known and not _skipped(line, told)]
    keys = {_key(line) for line in added}
    gone = [line for line in old if line not in still and not _skipped(line, ()) and _key(line) not in keys]
    if not added and not gone:
        return ""
    lines = [*(f"NOW {line}" for line in added), *(f"GONE {_named(line)}" for line in gone)]
    return CHANGES_HEAD + "".join(f"{line}\n" for line in lines) + CHANGES_END


def _skipped(line: str, told: Collection[str]) -> bool:
    heading, name = _parts(line)
    if heading in _NOT_PROTECTED or not heading:
        return True
    return heading == "REQUEST" and name.startswith('"') and json.loads(name) in told


def _key(line: str) -> tuple[str, str]:
    heading, name = _parts(line)
    return (heading, "" if heading in _ONE else name)


def _named(line: str) -> str:
    heading, name = _parts(line)
    if heading in _ONE or not name:
        return heading
    if name.startswith('"') and len(name) > _GONE_CHARS:
        name = quoted(clip(json.loads(name), _GONE_CHARS))
    return f"{heading} {name}"


def _parts(line: str) -> tuple[str, str]:
    match = _HEADING.match(line)
    return ("", "") if match is None else (match[1], match[2] or "")


# --- names a provider takes ---------------------------------------------------------------------------------

_NOT_NAME = re.compile(r"[^A-Za-z0-9_-]")


class Names:
    """Ids and tool names within what a provider allows: ``A-Z a-z 0-9 _ -``, so long and, for ids, used
    once."""

    def __init__(self, longest_id: int, longest_tool: int) -> None:
        self._longest_id = longest_id
        self._longest_tool = longest_tool
        self._used: set[str] = set()

    def call(self, call: Call) -> str:
        """The call's id: its own where it can be, else its own made fit with a piece of digest behind it."""
        clean = _NOT_NAME.sub("_", call.call_id)
        name, turn = clean, 0
        while name in self._used or (name != call.call_id and turn == 0) or len(name) > self._longest_id:
            mark = hashlib.blake2b(f"{call.key}/{turn}".encode(), digest_size=4).hexdigest()
            name = f"{clean[: self._longest_id - 9]}-{mark}"
            turn += 1
        self._used.add(name)
        return name

    def tool(self, name: str) -> str:
        return _NOT_NAME.sub("_", name)[: self._longest_tool] or "tool"


def weigh(value: Any) -> int:
    """Tokens of a message list, about: all its texts, and a little for each message."""
    if isinstance(value, str):
        return text_tokens(value)
    if isinstance(value, dict):
        return (_MESSAGE_OVERHEAD if "role" in value else 0) + sum(
            weigh(item) for name, item in value.items() if name not in ("role", "type")
        )
    if isinstance(value, list):
        return sum(weigh(item) for item in value)
    return 1
