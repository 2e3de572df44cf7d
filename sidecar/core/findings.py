"""What a range shows on its face: files changed and read, commands with their outcome, what was said.

Reads the texts that ``material`` writes. Each finding is one line of our words with short quotes and the refs
they stand in. An outcome is never made better than recorded: no answer is no answer, an error stays one until
the same thing was done again and went well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from protocol.summary import Exchange
from sidecar.core.excerpt import (
    NOTE_CHARS,
    clip,
    cut_at_sentence,
    error_line,
    first_sentence,
    last_line,
    only_line,
    plain,
    printed,
    substance,
)

SUBJECT_CHARS: Final = 140
CONCLUSION_CHARS: Final = 320
"""Of what the agent said at the end of a turn."""
MOST_REFS: Final = 8
_LONGEST_ID = 16
"""A longer event id is not repeated: its position names the message as well."""
_LOOKED_AT = 2_000

_COMMANDS = ("command", "cmd", "script", "shell")
_PATHS = ("file_path", "path", "filepath", "file", "filename", "notebook_path", "target_file", "uri", "url")
_QUERIES = ("pattern", "query", "regex", "q", "search", "glob")
_WRITES = re.compile(
    r"write|edit|create|patch|apply|replace|insert|append|update|delete|remove|rename|move|save|put|add",
    re.IGNORECASE,
)
_READS = re.compile(r"read|view|cat|open|get|fetch|list|ls|show|head|tail|stat", re.IGNORECASE)
_TELLING = re.compile(
    r"\d.*\b(?:pass|fail|error|warning|test|ok|done|total|version|created|wrote|written|built|found|match|file"
    r"|line|second|commit|changed|insert|delet|success|complet|result|count)",
    re.IGNORECASE,
)
_PATCHED = re.compile(r"^\*\*\* (?:Add|Update|Delete) File: (.+)$", re.MULTILINE)
_TOOL = re.compile(r"[\w.:/-]{1,64}")
_PLANS = re.compile(r"todo|update_plan|task_?(?:create|update|list)", re.IGNORECASE)
"""Tools that keep the plan: it stands in the packet as a plan."""
_DESCRIBED = ("description", "title", "task", "prompt")
_SHOWN_BY = re.compile(
    r"^(?:cat|head|tail|nl|bat|sed -n)(?: -{1,2}[\w=]+| \d+)*(?: ['\"]?[\d,$]+p['\"]?)? "
    r"['\"]?((?:[\w.@~+-]*/)*[\w.@+-]+)['\"]?$"
)
"""A command that only shows one file."""
_ANNOUNCES = re.compile(
    r"^(?:(?:ok(?:ay)?|now|next|first|then|so|great|good|perfect|excellent|alright|sure)[,.!:]?\s+)*"
    r"(?:let me|let['’]s|i['’]ll|i will|i am going to|i['’]m (?:going|about) to|i need to|i should|next,? i|now,? i"
    r"|i['’]m now|next comes)\b",
    re.IGNORECASE,
)
_SESSION = re.compile(r"\bsession ID:? (\d{1,12})\b")
_SESSION_NAMES = ("session_id", "shell_id", "bash_id")


Verb = Literal["read", "ran", "searched"]
_VERBS: Final[dict[str, Verb]] = {"read": "read", "command": "ran", "search": "searched"}


class Alike(Struct, frozen=True):
    """Something of which several share a statement: a file ``read``, a command ``ran`` or a pattern ``searched``
    with nothing to tell."""

    verb: Verb
    subject: str
    refs: tuple[str, ...]


class Finding(Struct, frozen=True, kw_only=True):
    """One statement to be; ``rank`` is its worth, ``alike`` set where it may share one with others."""

    section: Literal["completed", "observations", "inferences"]
    text: str
    refs: tuple[str, ...]
    rank: int
    alike: Alike | None = None


class _Call(Struct, kw_only=True):
    """A call of the range with the result it got."""

    ref: str
    tool: str
    kind: Literal["command", "write", "read", "search", "other"]
    subject: str
    result_ref: str | None = None
    status: str = "none"
    conclusion: str = ""
    output: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.tool, self.kind, self.subject

    @property
    def bad(self) -> bool:
        return self.status not in ("ok", "none", "pending")


def findings(items: Sequence[Exchange]) -> list[Finding]:
    """In the order of the range; the outcome of what was done several times stands at the last time."""
    found: list[tuple[int, Finding]] = []
    open_calls: dict[str, list[_Call]] = {}
    sessions: dict[str, _Call] = {}
    done: dict[tuple[str, str, str], list[tuple[int, _Call]]] = {}
    for index, item in enumerate(items):
        ref = short_ref(item)
        match item.type:
            case "message":
                said = _said(item, ref, concludes=_concludes(items, index))
                if said is not None:
                    found.append((index, said))
            case "tool.called":
                call_id, call, arguments = _called(item, ref)
                earlier = _going_on(arguments, sessions)
                open_calls.setdefault(call_id, []).append(earlier or call)
                if earlier is None and not _PLANS.search(call.tool):
                    done.setdefault(call.key, []).append((index, call))
            case "tool.returned":
                _returned(item, ref, open_calls, sessions)
            case _:
                pass
    found += ((calls[-1][0], _outcome([call for _, call in calls])) for calls in done.values())
    found.sort(key=lambda pair: pair[0])
    return [finding for _, finding in found]


def short_ref(item: Exchange) -> str:
    """The ref that names an item's message: by its id, or by its position where that is much shorter."""
    if item.event_id and len(item.event_id) <= _LONGEST_ID:
        return f"event:{item.event_id}"
    return f"pos:{item.position}"


def spoken(text: str, limit: int = NOTE_CHARS) -> str:
    """The first sentences of a message that say something, as many as fit into a quote."""
    said = substance(text[:_LOOKED_AT])
    return cut_at_sentence(plain(said), limit) or clip(plain(said), limit)


def announces(text: str) -> bool:
    """Whether a message only says what comes next."""
    said = plain(substance(text[:_LOOKED_AT]))
    return len(said) <= NOTE_CHARS and _ANNOUNCES.match(said) is not None


def _concludes(items: Sequence[Exchange], index: int) -> bool:
    """Whether a message is the last of its turn."""
    following = items[index + 1] if index + 1 < len(items) else None
    return following is None or (following.type == "message" and following.role == "user")


def _said(item: Exchange, ref: str, *, concludes: bool) -> Finding | None:
    """What the agent said. What the user said stands in the packet by itself, in the user's words."""
    if item.role != "assistant" or announces(item.text):
        return None
    quote = spoken(item.text, CONCLUSION_CHARS if concludes else NOTE_CHARS)
    rank = 55 if concludes else 25
    told = Finding(section="inferences", text=f"the agent wrote {_q(quote)}", refs=(ref,), rank=rank)
    return told if quote else None


def _going_on(arguments: Any, sessions: dict[str, _Call]) -> _Call | None:
    """The earlier call whose output a call only waits for."""
    if not isinstance(arguments, dict) or arguments.get("chars"):
        return None
    named = next((str(arguments[name]) for name in _SESSION_NAMES if name in arguments), None)
    return None if named is None else sessions.get(named)


def _called(item: Exchange, ref: str) -> tuple[str, _Call, Any]:
    head, _, rest = item.text.partition("\n")
    words = head.split(" ", 2)
    call_id, tool = (words[1], words[2]) if len(words) == 3 and words[0] == "call" else ("", plain(head))
    arguments = _decode(rest)
    kind, subject = _subject(tool, arguments, rest)
    return call_id, _Call(ref=ref, tool=tool, kind=kind, subject=subject), arguments


def _returned(
    item: Exchange, ref: str, open_calls: dict[str, list[_Call]], sessions: dict[str, _Call]
) -> None:
    head, _, rest = item.text.partition("\n")
    words = head.split(" ")
    if len(words) < 3 or words[0] != "result":
        return
    calls = open_calls.get(words[1])
    if not calls:
        return
    call = calls[-1]
    call.status, call.result_ref = words[2], ref
    if rest.startswith("conclusion "):
        line, _, rest = rest.partition("\n")
        conclusion = _decode(line.removeprefix("conclusion "))
        call.conclusion = first_sentence(conclusion) if isinstance(conclusion, str) else ""
    call.output = printed(rest)
    session = _SESSION.search(rest[:_LOOKED_AT])
    if session is not None:
        sessions[session[1]] = call
    if call.status != "pending":
        calls.pop()


def _decode(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None


def _subject(
    tool: str, arguments: Any, raw: str
) -> tuple[Literal["command", "write", "read", "search", "other"], str]:
    """What the call was about, by the names of its arguments."""
    fields = arguments if isinstance(arguments, dict) else {}
    patched = _PATCHED.findall(arguments if isinstance(arguments, str) else " ".join(_texts(fields)))
    if patched:
        return "write", clip(plain(" ".join(patched)), SUBJECT_CHARS)
    command = _first(fields, _COMMANDS)
    path = _first(fields, _PATHS)
    if command and path and " " not in command:
        # An editor's verb, not a shell's command.
        tool, command = command, ""
    if command:
        shows = _SHOWN_BY.match(command)
        return ("read", clip(shows[1], SUBJECT_CHARS)) if shows else ("command", clip(command, SUBJECT_CHARS))
    query = _first(fields, _QUERIES)
    if path and _WRITES.search(tool):
        return "write", clip(path, SUBJECT_CHARS)
    if query:
        return "search", clip(query, SUBJECT_CHARS)
    if path:
        return ("read" if _READS.search(tool) else "other"), clip(path, SUBJECT_CHARS)
    described = _first(fields, _DESCRIBED)
    if described:
        return "other", clip(described, SUBJECT_CHARS)
    return "other", clip(plain(raw[:1_000]), SUBJECT_CHARS) if fields or arguments is None else ""


def _texts(fields: dict[str, Any]) -> Iterator[str]:
    for value in fields.values():
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield from (word for word in value if isinstance(word, str))


def _first(fields: dict[str, Any], names: Sequence[str]) -> str:
    for name in names:
        value = fields.get(name)
        if isinstance(value, list) and value and all(isinstance(word, str) for word in value):
            value = " ".join(value)
        if isinstance(value, str) and value.strip():
            return plain(value[:_LOOKED_AT])
    return ""


def _outcome(calls: Sequence[_Call]) -> Finding:
    """One finding for all calls that did the same thing."""
    last = calls[-1]
    what = _what(last)
    how, rank = _how(last)
    refs = [last.ref, *([last.result_ref] if last.result_ref else [])]
    earlier = next((call for call in reversed(calls[:-1]) if call.bad), None)
    if earlier is not None and last.status == "ok":
        line = error_line(earlier.output, 80)
        if line and earlier.result_ref:
            how = f"{how}; before that {_word(earlier.status)}: {_q(line)}"
            refs.append(earlier.result_ref)
            rank += 5
    done = last.kind == "write" and last.status == "ok"
    alike = None
    if last.status == "ok" and how == "ok" and last.kind in _VERBS:
        alike = Alike(_VERBS[last.kind], last.subject, tuple(dict.fromkeys(refs)))
    return Finding(
        section="completed" if done else "observations",
        text=f"{what}: {how}",
        refs=tuple(dict.fromkeys(refs))[:MOST_REFS],
        rank=rank,
        alike=alike,
    )


def _what(call: _Call) -> str:
    tool = call.tool if _TOOL.fullmatch(call.tool) else _q(clip(plain(call.tool), 64))
    if not call.subject:
        return f"called {tool}"
    verbs = {
        "command": "ran",
        "write": f"{tool} changed",
        "read": "read",
        "search": f"searched with {tool} for",
    }
    return f"{verbs.get(call.kind, f'called {tool} with')} {_q(call.subject)}"


def _how(call: _Call) -> tuple[str, int]:
    """The outcome in words, and its worth."""
    if call.status == "ok":
        if call.conclusion:
            return f"ok, {_q(call.conclusion)}", 50
        if call.kind in ("write", "read"):
            return "ok", 50 if call.kind == "write" else 20
        line = only_line(call.output, 120)
        if line is None:
            line = last_line(call.output, 120)
            line = line if _TELLING.search(line) else ""
        if call.kind == "search":
            return (f"ok, {_q(line)}" if line else "ok"), 20
        if not line:
            return "ok", 18 if call.kind == "command" else 15
        return f"ok, {_q(line)}", 40
    if call.status in ("none", "pending"):
        return "no result recorded", 45
    line = call.conclusion or error_line(call.output, 120)
    return (f"{_word(call.status)}: {_q(line)}" if line else _word(call.status)), 60


def _word(status: str) -> str:
    return {
        "error": "error",
        "timeout": "no answer in time, outcome unknown",
        "cancelled": "cancelled, outcome unknown",
    }.get(status, "no final result")


def _q(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
