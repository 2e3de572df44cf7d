"""The globs of constraints, scopes and approval kinds: ``*`` any characters, ``?`` exactly one, nothing else.

``*`` matches ``/`` and ``.`` too, case counts, brackets and backslashes are plain characters. The work is at
most the product of both lengths, whatever the pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_WILD: Final = re.compile(r"[*?]")


def matches(pattern: str, text: str) -> bool:
    """Whether the whole text matches the pattern."""
    if "?" in pattern:
        return _matches_slowly(pattern, text)
    first, *others = pattern.split("*")
    if not others:
        return pattern == text
    *middle, last = others
    if not (text.startswith(first) and text.endswith(last)):
        return False
    at, end = len(first), len(text) - len(last)
    if end < at:
        return False
    for part in middle:
        at = text.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


def any_matches(patterns: Iterable[str], text: str) -> bool:
    """Whether one of the patterns matches the text."""
    for pattern in patterns:  # noqa: SIM110  (a generator costs more than most matches)
        if matches(pattern, text):
            return True
    return False


def beginning(pattern: str) -> tuple[bool, str]:
    """Whether only one text matches, and that text; else what every text that matches begins with."""
    wild = _WILD.search(pattern)
    return (True, pattern) if wild is None else (False, pattern[: wild.start()])


def _matches_slowly(pattern: str, text: str) -> bool:
    at = position = mark = 0
    star = -1
    while position < len(text):
        if at < len(pattern) and pattern[at] == "*":
            star, mark = at, position
            at += 1
        elif at < len(pattern) and pattern[at] in ("?", text[position]):
            at += 1
            position += 1
        elif star >= 0:
            at = star + 1
            mark += 1
            position = mark
        else:
            return False
    return all(rest == "*" for rest in pattern[at:])
