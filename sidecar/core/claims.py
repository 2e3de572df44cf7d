"""What a statement claims that can be checked without understanding it: figures, forbidden names, raw content.

Deterministic text rules over one statement, shared by the deterministic summariser (which leaves such
statements out) and by validation (which removes or rejects them). Nothing here judges whether prose is true.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from msgspec import Struct

from protocol.codec import encode
from protocol.summary import Statement, Summary
from sidecar.core.globs import any_matches
from sidecar.core.tokens import bytes_tokens

STATEMENT_CHARS: Final = 600
"""A statement longer than this is raw content, whatever it says."""
RAW_RUN: Final = 200
"""So many characters in a row taken from a tool's output are raw content."""

_PATH = re.compile(r"(?:~|\.{1,2})?/?[\w.@+~-]+(?:/[\w.@+~-]+)+|(?<![\w/])/[\w.@+~-]{2,}")
_HASH = re.compile(r"(?<![\w-])(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,64}(?![\w-])")
_NUMBER = re.compile(r"\d+(?:[.,_:]\d+)*")
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
_ESCAPED_SPACE = re.compile(r"\\[nrtfb]")

_MARKUP = re.compile(
    r"<\|[^|>\n]{1,40}\|>|\[/?INST\]|<</?SYS>>"
    r"|</?(?:system|assistant|user|human|developer|tool_result|tool_use|function_calls|function_results)\b[^>]{0,80}>",
    re.IGNORECASE,
)
_BLOB = re.compile(r"[A-Za-z0-9+/=_-]{100,}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)?")
_SENTENCES = re.compile(r"[.!?;\n]+(?:\s|$)|[\n]")
_NEGATIONS: Final = frozenset(
    (
        *(
            "not",
            "never",
            "no",
            "none",
            "nobody",
            "nothing",
            "neither",
            "nor",
            "without",
            "cannot",
            "refrain",
        ),
        *(
            "avoid",
            "avoids",
            "avoided",
            "forbidden",
            "forbid",
            "forbids",
            "forbade",
            "prohibited",
            "prohibit",
        ),
        *("prohibits", "banned", "disallowed", "can't", "don't", "doesn't", "didn't", "won't", "wouldn't"),
        *("shouldn't", "mustn't", "isn't", "aren't", "dont", "nicht", "nie", "niemals", "kein", "keine"),
        *("keinen", "ohne", "pas", "jamais", "nunca"),
    )
)
_LEAST_WORDS = 2
_LEAST_CHARS = 8
_STRIPPED = "\"'`“”‘’()[]{}<>,.;:!?"


class Figure(Struct, frozen=True):
    """A number, version, hash or path as the statement writes it."""

    text: str
    number: bool


class Rules:
    """The active constraints of a run, ready to be held against texts."""

    def __init__(self, constraints: Iterable[Mapping[str, Any]]) -> None:
        self._forbidden: list[list[tuple[str, ...]]] = []
        self._denied: list[list[str]] = []
        for constraint in constraints:
            forbids = constraint.get("forbids") or {}
            lists = [tuple(forbids.get(name) or ()) for name in ("kinds", "tools", "targets")]
            given = [patterns for patterns in lists if patterns]
            # A list of tools alone says nothing about what a sentence names.
            if given and (lists[0] or lists[2]):
                self._forbidden.append(given)
            self._denied += _what_is_denied(str(constraint.get("text", "")))

    def names_forbidden(self, text: str) -> bool:
        """Whether words of the text match every list of what one constraint forbids.

        Patterns of wildcards only match anything and name nothing: at least one list must match by a name.
        """
        words = {word.strip(_STRIPPED) for word in text.split()} - {""}
        for lists in self._forbidden:
            named = False
            for patterns in lists:
                literal = [pattern for pattern in patterns if pattern.strip("*?")]
                if any(any_matches(literal, word) for word in words):
                    named = True
                elif len(literal) == len(patterns):
                    break
            else:
                if named:
                    return True
        return False

    def turned_around(self, text: str) -> bool:
        """Whether the text says a constraint's words with its negation left out."""
        if not self._denied:
            return False
        for sentence in _SENTENCES.split(text):
            words = _words(sentence)
            for denied in self._denied:
                at = _position(words, denied)
                around = words[:at] + words[at + len(denied) :]
                if at >= 0 and not _NEGATIONS.intersection(around):
                    return True
        return False

    def contradicted(self, text: str, *, done: bool) -> bool:
        """Whether a statement contradicts a constraint; ``done``: it says that something was completed."""
        return self.turned_around(text) or (done and self.names_forbidden(text))


def _what_is_denied(text: str) -> Iterator[list[str]]:
    for sentence in _SENTENCES.split(text):
        words = _words(sentence)
        for index, word in enumerate(words):
            if word in _NEGATIONS:
                rest = words[index + 1 :]
                if len(rest) >= _LEAST_WORDS and len(" ".join(rest)) >= _LEAST_CHARS:
                    yield rest
                break


def _words(text: str) -> list[str]:
    return [word.lower().replace("’", "'") for word in _WORD.findall(text)]


def _position(words: list[str], wanted: list[str]) -> int:
    for index in range(len(words) - len(wanted) + 1):
        if words[index : index + len(wanted)] == wanted:
            return index
    return -1


# --- figures -----------------------------------------------------------------------------------------------


def figures(text: str) -> list[Figure]:
    """Numbers of three or more digits, decimals, versions, hashes and paths of a statement, in order."""
    flat = text.replace("\\", "")
    found: list[Figure] = []
    spans: list[tuple[int, int]] = []
    for match in _PATH.finditer(flat):
        path = match[0].rstrip(".")
        if _is_path(path):
            found.append(Figure(path, False))
            spans.append(match.span())
    for match in _HASH.finditer(flat):
        if not _inside(match.start(), spans):
            found.append(Figure(match[0], False))
            spans.append(match.span())
    for match in _NUMBER.finditer(flat):
        if _inside(match.start(), spans):
            continue
        digits = sum(character.isdigit() for character in match[0])
        if digits >= 3 or len(match[0]) > digits:
            found.append(Figure(match[0], True))
    return found


def _is_path(text: str) -> bool:
    """Rather a path than words with a slash between them."""
    return text[0] in "/.~" or text.count("/") >= 2 or "." in text.rsplit("/", 1)[1]


def _inside(start: int, spans: list[tuple[int, int]]) -> bool:
    return any(first <= start < end for first, end in spans)


class Sources:
    """The texts a statement's refs lead to, ready to be searched for its figures."""

    def __init__(self, texts: Iterable[str]) -> None:
        joined = "\n".join(texts)
        decoded = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), joined) if "\\u" in joined else joined
        variants = {joined.replace("\\", ""), _ESCAPED_SPACE.sub(" ", decoded).replace("\\", "")}
        self._variants = sorted(variants)

    def hold(self, figure: Figure) -> bool:
        """Whether the figure stands in one of the texts, whole: no part of a longer number, name or path."""
        return any(_occurs(figure, text) for text in self._variants)

    def unsupported(self, text: str) -> list[str]:
        """The figures of a statement that its sources do not hold."""
        return [figure.text for figure in figures(text) if not self.hold(figure)]


def _occurs(figure: Figure, text: str) -> bool:
    if _stands(figure.text, text, figure.number):
        return True
    if figure.number and re.fullmatch(r"\d{1,3}(?:[,_]\d{3})+|\d{4,}", figure.text):
        bare = figure.text.replace(",", "").replace("_", "")
        return any(_stands(form, text, True) for form in (bare, f"{int(bare):,}", f"{int(bare):_}"))
    return False


def _stands(wanted: str, text: str, number: bool) -> bool:
    start = text.find(wanted)
    while start >= 0:
        end = start + len(wanted)
        before, after = text[max(0, start - 2) : start], text[end : end + 2]
        if number:
            cut = before[-1:].isdigit() or (before[-1:] in (".", ",", "_") and before[:-1].isdigit())
            cut = cut or after[:1].isdigit() or (after[:1] in (".", ",", "_") and after[1:].isdigit())
        else:
            cut = before[-1:].isalnum() or after[:1].isalnum()
        if not cut:
            return True
        start = text.find(wanted, start + 1)
    return False


# --- content ----------------------------------------------------------------------------------------------


def looks_raw(text: str) -> bool:
    """Whether a text is content rather than a statement: lines, chat markup, encoded data, too long."""
    if len(text) > STATEMENT_CHARS or _CONTROL.search(text) is not None or _MARKUP.search(text) is not None:
        return True
    return any(match[0].count("/") * 20 <= len(match[0]) for match in _BLOB.finditer(text))


class RawOutput:
    """Which of some texts hold long verbatim runs of a range's tool output; the output is not kept."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._windows = {text: _windows(text) for text in texts}
        self._sought = {window for windows in self._windows.values() for window in windows}
        self._found: set[str] = set()

    @property
    def matters(self) -> bool:
        """Whether any output could still be found in the texts."""
        return bool(self._sought)

    def take(self, output: str) -> None:
        """Look for the texts in the output of one result."""
        flat = " ".join(output.split())
        found = [window for window in self._sought if window in flat]
        self._found.update(found)
        self._sought.difference_update(found)

    def quoted_by(self, text: str) -> bool:
        """Whether ``RAW_RUN`` characters in a row of one of the texts stand in the output (to within a few)."""
        return any(window in self._found for window in self._windows[text])


def _windows(text: str) -> tuple[str, ...]:
    flat = " ".join(text.split())
    stride = 20
    window = RAW_RUN - stride
    return tuple(flat[start : start + window] for start in range(0, len(flat) - window + 1, stride))


def statement_tokens(summary: Summary) -> int:
    """Tokens of what a packet shows of a summary: its statements with refs, and the narrative.

    The echoes of the ledger are not among them: the packet renders those from the ledger.
    """
    rendered = (summary.completed, summary.observations, summary.inferences, summary.narrative)
    return bytes_tokens(len(encode(rendered)))


def statements_of(summary: Summary) -> Iterator[Statement]:
    """Completed items, observations and inferences, in this order."""
    yield from summary.completed
    yield from summary.observations
    yield from summary.inferences
