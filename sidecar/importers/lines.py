"""Reading a transcript line by line: JSON objects with their line numbers, cleaned for the wire.

Knows nothing of any one format. Must not guess: a line that cannot be read is a failure that names the line,
only a half line at the very end (a writer that died) is left out, and noted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sidecar.importers.model import ImportFailure, Report

_UNSENDABLE = re.compile("[\x00\ud800-\udfff]")
_EXACT_INT = 2**53 - 1
MAX_DEPTH = 48


def clean_text(text: str) -> str:
    """Replace what the wire refuses (NUL, lone surrogates) by U+FFFD; all else, ANSI codes too, stays."""
    return _UNSENDABLE.sub("�", text)


def clean(value: Any, depth: int = 0) -> Any:
    """Make any JSON value sendable: texts cleaned, integers beyond 2**53 - 1 as decimal text, and what lies
    deeper than 48 levels as one JSON text."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict | list) and depth >= MAX_DEPTH:
        return _as_text(value)
    if isinstance(value, dict):
        return {clean_text(key): clean(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [clean(item, depth + 1) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _EXACT_INT:
        return str(value)
    return value


def _as_text(value: Any) -> str:
    try:
        return clean_text(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        return "[nested too deeply]"


def _number(text: str) -> float | str:
    value = float(text)
    return value if math.isfinite(value) else text


def parse(text: str) -> Any:
    """Decode one JSON text; numbers no float can hold, NaN and infinities stay as their text.

    Raises ValueError when it is not JSON or too deeply nested to be read.
    """
    try:
        return json.loads(text, parse_float=_number, parse_constant=str)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_as_written(text: str) -> Any:
    """Like `parse`, with every number as JSON has it (not finite ones included)."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _reason(error: ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"not one JSON value ({error.msg.lower()}, column {error.colno})"
    return f"not readable JSON ({error})"


def raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Every line with its 1-based number, line end included. Raises ImportFailure for an unreadable file."""
    try:
        with path.open("rb") as file:
            yield from enumerate(file, 1)
    except OSError as error:
        raise ImportFailure(path, None, f"cannot be read ({error.strerror}); expected a file") from None


def values(
    path: Path,
    report: Report | None = None,
    decode: Callable[[str], Any] = parse,
    *,
    tail_may_be_cut: bool = True,
) -> Iterator[tuple[int, Any]]:
    """Every JSON value of the file with its line number; blank lines are passed over.

    Raises ImportFailure for a line that is not UTF-8 or not one JSON value. A last line without line end that
    does not parse is what a killed writer leaves: with `tail_may_be_cut` it is left out and noted.
    """
    found = False
    for number, raw in raw_lines(path):
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            if not text.strip():
                continue
            value = decode(text)
        except ValueError as error:
            if tail_may_be_cut and found and not raw.endswith(b"\n"):
                if report is not None:
                    report.note(path, number, "half a line at the end of the file left out")
                return
            raise ImportFailure(path, number, f"{_reason(error)}; allowed: one JSON object a line") from None
        found = True
        yield number, value


def objects(path: Path, report: Report | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects of the file, cleaned for the wire; other JSON values are left out and noted."""
    for number, value in values(path, report):
        if isinstance(value, dict):
            yield number, clean(value)
        elif report is not None:
            report.note(path, number, "left out: not a JSON object")
