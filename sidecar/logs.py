"""Structured logs on standard error: one line per entry, as JSON or for the eye.

It shapes and guards what others say: secrets are masked, long values cut, control characters made visible.
It writes no files and keeps nothing. Content of conversations must not be handed to it in the first place.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from typing import Any, Final, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from protocol.detectors import hinted
from protocol.redaction import DEFAULT

MAX_VALUE_CHARS: Final = 500
_MAX_DEPTH: Final = 4
_MASK: Final = "***"
_SECRET_NAME = re.compile(
    r"secret|password|passwd|credential|api_?key|private_?key|(^|_)(token|jwt|seed|nkey|cookie|authorization)$",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"(?<=://)[^\s/@]+@")
_BEARER = re.compile(r"\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
# C0, DEL, C1, line and paragraph separators, bidirectional controls.
_INVISIBLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
# Loggers that log an exception for what is a matter of course: the broker went away, a client hung up.
_CALM_LOGGERS: Final = ("nats", "uvicorn")
# Packages whose error classes are expected outcomes, each with its own words.
_EXPECTED_FROM: Final = ("protocol", "storage", "sidecar", "nats")
_QUIET: Final = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi", "aiosqlite", "asyncio")


def visible(text: str) -> str:
    """The text with control and bidirectional characters as `\\uXXXX`, so that it stays on its line."""
    return _INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def guard(_logger: WrappedLogger, _method: str, event_dict: EventDict) -> EventDict:
    """Mask what a secret's name holds, logins in URLs and bearer tokens; cut values over 500 characters."""
    for name, value in event_dict.items():
        if name == "exception":
            event_dict[name] = _masked(str(value))
        elif not name.startswith("_"):
            event_dict[name] = _guarded(name, value, 0)
    first = {name: event_dict[name] for name in ("timestamp", "level", "event") if name in event_dict}
    return first | dict(event_dict)


def _guarded(name: str, value: Any, depth: int) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if _SECRET_NAME.search(name):
        return _MASK
    if isinstance(value, Mapping) and depth < _MAX_DEPTH:
        return {str(key): _guarded(str(key), inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)) and depth < _MAX_DEPTH:
        return [_guarded(name, inner, depth + 1) for inner in list(value)[:50]]
    text = visible(_masked(str(value)))
    if len(text) > MAX_VALUE_CHARS:
        return f"{text[:MAX_VALUE_CHARS]}… ({len(text)} characters)"
    return text


def _masked(text: str) -> str:
    masked = _BEARER.sub(rf"\1 {_MASK}", _LOGIN.sub(f"{_MASK}@", text))
    # Words of others stand in errors: of a provider that repeats the key it refused, for one.
    return DEFAULT.text(masked) if hinted(masked.encode(errors="replace")) else masked


def one_line_errors(_logger: WrappedLogger, _method: str, event_dict: EventDict) -> EventDict:
    """Turn the traceback of an expected error into the field `error`; others keep theirs."""
    given = event_dict.get("exc_info")
    if not given:
        return event_dict
    if isinstance(given, tuple):
        error = given[1]
    else:
        error = given if isinstance(given, BaseException) else sys.exc_info()[1]
    record = event_dict.get("_record")
    calm = record is not None and record.name.partition(".")[0] in _CALM_LOGGERS
    if error is not None and (calm or _expected(error)):
        del event_dict["exc_info"]
        event_dict.setdefault("error", f"{type(error).__name__}: {error}")
    return event_dict


def _expected(error: BaseException) -> bool:
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _EXPECTED_FROM


def configure(level: str = "info", format: str = "auto", *, stream: TextIO | None = None) -> None:
    """Send our logs and those of the libraries to `stream` (standard error). Calling it again replaces it.

    `level`: debug, info, warning, error. `format`: json, console, or auto (console on a terminal).
    """
    out = stream if stream is not None else sys.stderr
    threshold = logging.getLevelNamesMapping()[level.upper()]
    console = format == "console" or (format == "auto" and out.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: Processor = (
        structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback)
        if console
        else structlog.processors.JSONRenderer(ensure_ascii=False)
    )
    last: list[Processor] = [one_line_errors, structlog.processors.format_exc_info, guard, renderer]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(out),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[
                *last[:-1],
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(threshold)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(threshold, logging.WARNING))
    logging.captureWarnings(True)
