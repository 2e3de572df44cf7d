"""Short, single-line pieces of recorded text: cut at words, cleaned of what hides or breaks a line.

Pieces are for quoting. Nothing here decides what a text means, and nothing is repaired: a piece is a part of
the text, with white space collapsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Final

from protocol.codec import canonical
from protocol.content import Content, DataPart, ImagePart, ReasoningPart, TextPart
from protocol.events import Message, ToolReturned

NOTE_CHARS: Final = 160
"""Longest quoted line."""
_LINE_CHARS = 2_000
_LINES_LOOKED_AT = 4_000
_ROOM_OF_A_WORD = 40

_NOTE_END = 250
"""Characters at the end of a text within which a note stands that the text is cut; an id has up to 128."""
_CUT_NOTE = re.compile(r" … \[cut: ([0-9,]{1,12}) bytes in all, the rest by fetch [^\s\]]+\]$")
_HIDDEN = re.compile(
    "[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff"
    "\ufff0-\uffff\ud800-\udfff\U000e0000-\U000e0fff]+"
)
_ERROR = re.compile(
    r"\b(?:\w*error|\w*exception|failed|failure|fatal|panic(?:ked)?|denied|refused|not found|no such|cannot"
    r"|unable|timed out|traceback|abort(?:ed)?|killed|assert)\b",
    re.IGNORECASE,
)
_EXIT_CODE = re.compile(r"^(?:process )?(?:exit(?:ed)?(?: with)?) (?:code|status)[: ]*-?\d+$", re.IGNORECASE)
"""A line that only repeats that it failed."""
_SESSION_HEAD = re.compile(r"^Chunk ID: [^\n]*\n(?:[^\n]*\n){0,6}?Output:\n")
"""What a terminal session writes before what the command printed."""
_HEADING = re.compile(r"^#{1,6} ")
_CRY = re.compile(r"^[\w’']++(?:[,\s]++[\w’']++){0,2}+[,\s]*+[!👍✅🎉]+\s*(?=\S)")
"""A short exclamation before what is said. Words are not given back: no shorter one has such a sign behind it."""
_TRACEBACK_HEAD = "Traceback (most recent call last)"
_SENTENCE_END = re.compile(r"[.!?…。！？](?=[\s\"')\]]|$)")


def plain(text: str) -> str:
    """The text on one line: hidden characters and white space become single blanks."""
    if text.isascii() and text.isprintable():
        # Nothing to hide, and no white space but blanks; looking at each character costs 15 µs for a thousand.
        return " ".join(text.split()) if "  " in text else text.strip()
    return " ".join(_HIDDEN.sub(" ", text).split())


def clip(text: str, limit: int) -> str:
    """At most ``limit`` characters of a one-line text, whole words only; ``…`` shows that some is left out.

    A word that does not fit is left out rather than cut, so that no figure, path or name changes.
    """
    if len(text) <= limit:
        return text
    room = text[: max(0, limit - 1)]
    end = room.rfind(" ") if not text[max(0, limit - 1)].isspace() else len(room)
    return f"{room[:end].rstrip()} …".lstrip() if end > 0 else "…"


def content_text(content: Content) -> str:
    """What a person reads of a content: text, data as canonical JSON, images by name; reasoning stays out."""
    if isinstance(content, str):
        return content
    pieces: list[str] = []
    for part in content:
        match part:
            case TextPart():
                pieces.append(part.text)
            case DataPart():
                pieces.append(canonical(part.value).decode())
            case ImagePart():
                pieces.append(f"[image {part.media_type}]")
            case ReasoningPart():
                pass
    return "\n".join(pieces)


def cut_note(event: Message | ToolReturned, shown: str, ref: str) -> str:
    """What follows ``shown``, a content's text or its beginning, where the event keeps more apart than that: how
    much there is and where. Nothing where all of it is shown, or where its end names ``ref`` already."""
    if event.blob is None or ref in shown[-_NOTE_END:]:
        return ""
    if event.blob.bytes <= len(shown.encode("utf-8", "surrogatepass")):
        return ""
    return f" … [cut: {event.blob.bytes:,} bytes in all, the rest by fetch {ref}]"


def told_bytes(text: str) -> int:
    """Bytes of UTF-8 of a text; of one that ends with ``cut_note``, of the whole it is the beginning of."""
    size = len(text.encode("utf-8", "surrogatepass"))
    noted = _CUT_NOTE.search(text[-_NOTE_END:])
    return max(size, int(noted[1].replace(",", ""))) if noted is not None else size


def error_line(text: str, limit: int = NOTE_CHARS) -> str:
    """The first line that tells of an error, else the first line that is not empty; clipped."""
    first = exit_code = ""
    for line in _lines(printed(text)):
        if _EXIT_CODE.match(line):
            exit_code = exit_code or line
            continue
        first = first or line
        if _ERROR.search(line) and not line.startswith(_TRACEBACK_HEAD):
            return clip(line, limit)
    return clip(first or exit_code, limit)


def printed(text: str) -> str:
    """The text without the head that a terminal session puts before a command's output."""
    head = _SESSION_HEAD.match(text)
    return text[head.end() :] if head is not None else text


def substance(text: str) -> str:
    """A message up to its first block of code, without headings and exclamations before its first sentence; the
    whole if nothing is left then."""
    rest = text.partition("\n```")[0]
    while True:
        line, _, after = rest.lstrip().partition("\n")
        if not after.strip() or not _HEADING.match(line):
            break
        rest = after
    rest = rest.lstrip()
    # Not ``sub``: it would look for the beginning of the text at each of its characters.
    cry = _CRY.match(rest)
    return (rest[cry.end() :] if cry is not None else rest) or rest or text


def last_line(text: str, limit: int = NOTE_CHARS) -> str:
    """The last line that is not empty, clipped."""
    tail = text[-_LINE_CHARS:]
    found = ""
    for line in tail.splitlines():
        found = plain(line) or found
    return clip(found, limit)


def only_line(text: str, limit: int = NOTE_CHARS) -> str | None:
    """The text if it is one short line, else None."""
    stripped = text.strip()
    if not stripped or len(stripped) > limit or len(stripped.splitlines()) > 1:
        return None
    return plain(stripped)


def first_sentence(text: str, limit: int = NOTE_CHARS) -> str:
    """The beginning of a text up to the end of its first sentence or line, clipped."""
    for line in islice(_split(substance(text)), _LINES_LOOKED_AT):
        cleaned = _beginning(line[:_LINE_CHARS], limit)
        if cleaned:
            # One letter more than may be shown, so that what follows the last one is seen.
            found = _SENTENCE_END.search(cleaned, 0, limit + 1)
            if found is not None and found.end() <= limit:
                return cleaned[: found.end()]
            return clip(cleaned, limit)
    return ""


def cut_at_sentence(text: str, limit: int) -> str:
    """At most ``limit`` characters, ended after a whole sentence; nothing if not even one fits."""
    if len(text) <= limit:
        return text
    end = 0
    for match in _SENTENCE_END.finditer(text, 0, limit):
        end = match.end()
    return text[:end]


def _beginning(line: str, limit: int) -> str:
    """``plain(line)``, or of a long line whole words at its beginning, more than ``limit`` characters: all that a
    piece of it can show."""
    head = line[: limit + _ROOM_OF_A_WORD]
    cleaned = plain(head)
    if len(head) < len(line):
        cleaned = cleaned[: cleaned.rfind(" ") + 1]
        if len(cleaned) <= limit:
            return plain(line)
    return cleaned


def _split(text: str) -> Iterator[str]:
    """As ``splitlines``, but one after the other: mostly the first one is all that is asked for."""
    start = 0
    while start < len(text):
        end = text.find("\n", start) + 1 or len(text)
        yield from text[start:end].splitlines()
        start = end


def _lines(text: str) -> Iterator[str]:
    for line in islice(_split(text), _LINES_LOOKED_AT):
        cleaned = plain(line[:_LINE_CHARS])
        if cleaned:
            yield cleaned
