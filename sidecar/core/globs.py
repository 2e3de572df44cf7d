"""The globs of constraints, scopes and approval kinds: ``*`` any characters, ``?`` exactly one, nothing else.

``*`` matches ``/`` and ``.`` too, case counts, brackets and backslashes are plain characters. The work is at
most the product of both lengths, whatever the pattern.
"""

from __future__ import annotations

from collections.abc import Iterable


def matches(pattern: str, text: str) -> bool:
    """Whether the whole text matches the pattern."""
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


def any_matches(patterns: Iterable[str], text: str) -> bool:
    """Whether one of the patterns matches the text."""
    return any(matches(pattern, text) for pattern in patterns)
