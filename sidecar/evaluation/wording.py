"""When a text stands in another one: word for word, but for white space and the case of letters.

The one rule of text that every strategy is measured by. It judges no meaning.
"""

from __future__ import annotations


def normal(text: str) -> str:
    """White space and case apart."""
    return " ".join(text.split()).casefold()


def holds(context: str, text: str) -> bool:
    """Whether the text stands in the context word for word, white space and case apart."""
    return normal(text) in normal(context)
