"""What every importer speaks: the message to publish, the failure, and the writer of one run.

`RunWriter` gives ids, `session` and `seq`, joins the blocks of one assistant message, and keeps every event
under the broker's payload limit. It must not know a transcript format, and never makes up content.
"""

from __future__ import annotations

import hashlib
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from sidecar.importers.content import bounded

DEFAULT_WINDOW = 200_000
GOAL_CHARACTERS = 2_000

_NOT_TOKEN = re.compile(r"[^A-Za-z0-9_-]")
_NOT_ID = re.compile(r"[^A-Za-z0-9._:/@+=-]")


class ImportFailure(Exception):
    """A transcript cannot be imported. The text is one line: FILE:LINE: what is wrong; what is allowed.

    Retrying does not help: the file or the format has to be another one.
    """

    def __init__(self, path: Path, line: int | None, reason: str) -> None:
        self.path = path
        self.line = line
        self.reason = reason
        place = f"{path}:{line}" if line is not None else str(path)
        super().__init__(" ".join(f"{place}: {reason}".split()))


class Imported(msgspec.Struct, frozen=True):
    """One message to publish: the run's subject token, the channel, and the message of the wire protocol."""

    run: str
    channel: str
    event: dict[str, Any]

    def payload(self) -> bytes:
        """The message as bytes. What UTF-8 cannot hold (a lone surrogate in a file of our own format, kept as
        written) goes out escaped, so that the receiver can refuse it."""
        try:
            return msgspec.json.encode(self.event)
        except (UnicodeEncodeError, OverflowError, ValueError):
            return json.dumps(self.event, separators=(",", ":")).encode("ascii")


def drain(sink: list[Imported]) -> list[Imported]:
    """Take all messages out of the sink."""
    ready = list(sink)
    sink.clear()
    return ready


class Report:
    """What an import left out, for the user's eye: one line each, in file order."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, path: Path, line: int, text: str) -> None:
        """Keep one remark about a line."""
        self.notes.append(f"{path}:{line}: {text}")


def token(value: str) -> str:
    """A subject token (tenant, lane, run) made from any text; equal texts give equal tokens."""
    plain = _NOT_TOKEN.sub("-", value).lstrip("_")
    if plain == value and 0 < len(plain) <= 128:
        return plain
    return f"{plain[:110]}-{_short(value)}".lstrip("-")


def ident(value: str, room: int = 128) -> str:
    """An id of at most `room` characters made from any text; equal texts give equal ids, others differ."""
    plain = _NOT_ID.sub("-", value)
    if plain == value and 0 < len(plain) <= room:
        return plain
    return f"{plain[: room - 13]}-{_short(value)}"


def text_digest(text: str) -> str:
    """`sha256:<hex>` over the UTF-8 bytes."""
    return "sha256:" + hashlib.sha256(text.encode("utf-8")).hexdigest()


def plan_items(entries: list[tuple[str, str]]) -> list[dict[str, str]]:
    """Plan items for `step.changed` from (text, state) pairs; an item's id follows from its text alone."""
    seen: dict[str, int] = {}
    items = []
    for text, state in entries:
        seen[text] = seen.get(text, 0) + 1
        suffix = f"-{seen[text]}" if seen[text] > 1 else ""
        items.append({"id": f"todo-{_short(text)}{suffix}", "text": text, "state": state})
    return items


def goal_from(text: str) -> str:
    """The text as a goal: spaces trimmed, at most 2,000 characters, cut between words."""
    text = text.strip()
    if len(text) <= GOAL_CHARACTERS:
        return text
    return text[:GOAL_CHARACTERS].rsplit(maxsplit=1)[0] + " …"


def utc(value: object) -> str | None:
    """An RFC 3339 time in UTC with milliseconds, or None when `value` is no such time."""
    if not isinstance(value, str) or len(value) < 10:
        return None
    try:
        moment = datetime.fromisoformat(value)
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def count(value: object) -> int | None:
    """A token count: a whole number from 0 to 2**53 - 1, else None."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53:
        return value
    return None


def _short(value: str) -> str:
    return hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()[:12]


class RunWriter:
    """Turns what one run's transcript says into messages, in order, into `sink`.

    Every message carries the run's session and a contiguous `seq` per channel. Ids follow from the ids given
    (a line's uuid or number), so that a second import of the same file gives the same messages.
    """

    def __init__(self, run: str, session: str, sink: list[Imported]) -> None:
        self.run = run
        self.at = "1970-01-01T00:00:00.000Z"
        self._session = ident(session)
        self._sink = sink
        self._seq = {"event": 0, "authority": 0}
        self._ids: set[str] = set()
        self._last_event = ""
        self._through: dict[str, str] = {}
        self._open: tuple[str, str, str, list[dict[str, Any]]] | None = None
        self.model = ""
        self.window = DEFAULT_WINDOW
        self.started = False
        self.turn_open = False

    def clock(self, value: object) -> None:
        """Take a line's time; a line without one has the time of the line before it."""
        self.at = utc(value) or self.at

    def publish(self, event_type: str, key: str, *, channel: str = "event", **fields: Any) -> None:
        """Add one message whose id follows from `key`; fields that are None are left out."""
        self.flush()
        self._add(event_type, key, channel, fields)

    def start(
        self, goal: str, model: str, window: int, agent: str, source: str, parent_run: str | None = None
    ) -> None:
        """`run.started`, once."""
        self.started, self.model, self.window = True, model or "unknown", window
        self.publish(
            "run.started",
            "run.started",
            goal=goal_from(goal),
            model={"name": self.model, "context_window": window},
            agent=agent,
            labels={"imported_from": source},
            parent_run=parent_run,
        )

    def use_model(self, name: str, key: str, window: int | None = None) -> None:
        """`model.changed` when the name or the window differs from the current one."""
        name, window = name or self.model, window or self.window
        if (name, window) != (self.model, self.window):
            self.model, self.window = name, window
            self.publish("model.changed", key, model={"name": name, "context_window": window})

    def begin(self, message_id: str) -> None:
        """A request's answer starts: what was published so far is that request's prompt."""
        if message_id not in self._through:
            self.flush()
            self._through[message_id] = self._last_event

    def say(self, message_id: str, parts: list[dict[str, Any]], key: str) -> None:
        """Blocks of an assistant message; blocks of one message that follow each other become one event."""
        self.begin(message_id)
        if self._open is not None and self._open[0] == message_id:
            self._open[3].extend(parts)
            return
        self.flush()
        self._open = (message_id, key, self.at, list(parts))

    def message(
        self, role: str, content: str | list[dict[str, Any]], key: str, message_id: str | None = None
    ) -> None:
        """A message that is complete; an empty one says nothing and is left out."""
        if isinstance(content, str) and not content:
            return
        if isinstance(content, list):
            if not content:
                return
            if len(content) == 1 and content[0]["kind"] == "text":
                content = content[0]["text"]
        self.publish("message", key, role=role, content=content, message_id=message_id)
        self.turn_open = True

    def call(self, call_id: str, tool: str, arguments: Any, key: str, message_id: str | None = None) -> None:
        """`tool.called`, with the id of the message that asked for it."""
        if message_id is not None:
            self.begin(message_id)
        self.publish(
            "tool.called", key, call_id=ident(call_id), tool=tool, arguments=arguments, message_id=message_id
        )
        self.turn_open = True

    def result(self, call_id: str, status: str, content: str | list[dict[str, Any]], key: str) -> None:
        """`tool.returned`."""
        self.publish("tool.returned", key, call_id=ident(call_id), status=status, content=content)
        self.turn_open = True

    def usage(self, message_id: str | None, key: str, model: str, **counts: int | None) -> None:
        """`usage.reported` of one request, naming the last event of its prompt."""
        through = self._through.pop(message_id, None) if message_id is not None else None
        fields: dict[str, Any] = dict(counts, model=model, through=through or None)
        self.publish("usage.reported", key, **fields)

    def turn_ended(self, key: str) -> None:
        """`boundary.marked turn_ended`, once for a turn however often the transcript says so."""
        self.flush()
        if self.turn_open:
            self.turn_open = False
            self.publish("boundary.marked", key, kind="turn_ended")

    def flush(self) -> None:
        """Publish the assistant message whose blocks were being joined."""
        if self._open is not None:
            message_id, key, at, parts = self._open
            self._open = None
            now, self.at = self.at, at
            self.message("assistant", parts, key, message_id)
            self.at = now

    def _add(self, event_type: str, key: str, channel: str, fields: dict[str, Any]) -> None:
        self._seq[channel] += 1
        event_id = self._unused(ident(key, room=112))
        event: dict[str, Any] = {
            "v": 1,
            "id": event_id,
            "type": event_type,
            "at": self.at,
            "session": self._session,
            "seq": self._seq[channel],
            "run": self.run,
        }
        event.update((name, value) for name, value in fields.items() if value is not None)
        if "message_id" in event:
            event["message_id"] = ident(event["message_id"])
        if channel == "event":
            self._last_event = event_id
        self._sink.append(Imported(run=self.run, channel=channel, event=bounded(event)))

    def _unused(self, event_id: str) -> str:
        candidate, copies = event_id, 1
        while candidate in self._ids:
            copies += 1
            candidate = f"{event_id}+{copies}"
        self._ids.add(candidate)
        return candidate
