"""Transcripts of other tools, and our own event files, as messages to publish.

`detect` names a file's format by its lines, never by its name; `import_files` yields the messages of all runs
in publishing order. No network, no clock: the same files give the same messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sidecar.importers import events_jsonl, lines
from sidecar.importers.claude_code import ClaudeImport
from sidecar.importers.codex import CodexImport
from sidecar.importers.codex_survey import RECORD_TYPES
from sidecar.importers.model import Imported, ImportFailure, Report

__all__ = ["FORMATS", "SAMPLE", "ImportFailure", "Imported", "Report", "detect", "import_files"]

FORMATS = ("claude-code", "codex", "events")
"""The formats that can be imported; `auto` lets each file say which it is."""

SAMPLE = Path(__file__).parent.parent / "samples" / "night_watch.jsonl"
"""A run of our own making in the `events` format, part of the package."""

_ALLOWED = (
    "allowed: claude-code (Claude Code session JSONL), codex (Codex rollout JSONL), "
    "events (one Watchkeeper event a line)"
)
_DOTTED = re.compile(r"[a-z]{2,20}\.[a-z_]{2,30}")
_CLAUDE = frozenset({"user", "assistant", "system", "progress", "attachment", "queue-operation", "pr-link"})
_LOOKED_AT = 200


def detect(path: Path) -> str:
    """The format of a file: "claude-code", "codex" or "events".

    Raises ImportFailure, naming the line and what is allowed, for a file that cannot be read, is empty, or is
    of another format.
    """
    first: tuple[int, dict[str, Any]] | None = None
    for seen, (number, value) in enumerate(_readable(path)):
        if not isinstance(value, dict):
            raise ImportFailure(path, number, f"not a JSON object; {_ALLOWED}")
        found = _format_of(value)
        if found is not None:
            return found
        first = first or (number, value)
        if seen >= _LOOKED_AT:
            break
    if first is None:
        raise ImportFailure(path, None, f"holds no line; {_ALLOWED}")
    names = ", ".join(str(key)[:40] for key in list(first[1])[:6]) or "none"
    raise ImportFailure(path, first[0], f"unknown format (fields: {lines.clean_text(names)}); {_ALLOWED}")


def _readable(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        yield from lines.values(path)
    except ImportFailure as failure:
        if failure.line is None:
            raise
        reason = failure.reason.split(";", 1)[0]
        reason = f"unknown format, {reason}" if failure.line == 1 else reason
        raise ImportFailure(path, failure.line, f"{reason}; {_ALLOWED}") from None


def _format_of(line: dict[str, Any]) -> str | None:
    kind = line.get("type")
    named = kind if isinstance(kind, str) else ""
    if named in RECORD_TYPES and isinstance(line.get("payload"), dict):
        return "codex"
    claude = (
        (named in _CLAUDE and isinstance(line.get("sessionId"), str))
        or (named == "summary" and "leafUuid" in line)
        or (named == "file-history-snapshot" and "snapshot" in line)
    )
    if claude:
        return "claude-code"
    if ("v" in line and "type" in line) or _DOTTED.fullmatch(named):
        return "events"
    return None


def import_files(
    paths: Sequence[Path], *, format: str = "auto", window: int | None = None, report: Report | None = None
) -> Iterator[Imported]:
    """The messages of all files, to be published in this order; read as they are asked for.

    Files follow each other as given (those of one format together); a subagent's file given together with its
    session's is a child run, placed where it was started. `window` (tokens, above 0) overrides the context
    window of Claude Code and Codex runs. `report` takes remarks about what was left out.

    Raises ImportFailure before the first message: for a file that cannot be read, is of an unknown format, or
    holds a line that is not JSON.
    """
    report = report if report is not None else Report()
    unique = list(dict.fromkeys(paths))
    if not unique:
        raise ImportFailure(Path("."), None, "no file given; expected at least one")
    if format != "auto" and format not in FORMATS:
        raise ImportFailure(unique[0], None, f"format {format!r:.60}; allowed: auto, {', '.join(FORMATS)}")
    if window is not None and window <= 0:
        raise ImportFailure(unique[0], None, f"context window {window}; allowed: a number of tokens above 0")
    kinds = [detect(path) if format == "auto" else format for path in unique]
    return _read(list(zip(kinds, unique, strict=True)), window, report)


def _read(files: list[tuple[str, Path]], window: int | None, report: Report) -> Iterator[Imported]:
    together: dict[str, list[Path]] = {}
    for kind, path in files:
        together.setdefault(kind, []).append(path)
    # every file is read once before the first message is handed out: a broken one leaves nothing half done
    streams = [_stream(kind, paths, window, report) for kind, paths in together.items()]
    for stream in streams:
        yield from stream


def _stream(kind: str, paths: list[Path], window: int | None, report: Report) -> Iterator[Imported]:
    if kind == "claude-code":
        return ClaudeImport(paths, window, report).messages()
    if kind == "codex":
        return CodexImport(paths, window, report).messages()
    for path in paths:
        for _ in events_jsonl.messages(path):
            pass
    return (message for path in paths for message in events_jsonl.messages(path))
