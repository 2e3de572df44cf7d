"""Trace ids on their way through the daemon: from an event or a question to what is made of it.

Without a tracing library a trace id is still carried on, to packets, records, model calls and logs; with one
(``telemetry``) spans are recorded as well. Nothing here holds content of a run, and nothing decides by it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Literal

import structlog

HEADER: Final = "traceparent"
"""Of W3C Trace Context, in messages of the broker and in requests to models."""

Kind = Literal["internal", "server", "client"]
Attribute = str | bool | int | float

_SHAPE: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_CURRENT: ContextVar[str | None] = ContextVar("traceparent", default=None)


def valid(traceparent: str | None) -> str | None:
    """The value if it has the shape that W3C Trace Context gives it, else None: it goes into headers."""
    return traceparent if traceparent is not None and _SHAPE.fullmatch(traceparent) else None


def trace_id(traceparent: str) -> str:
    """The 32 hex digits that all spans of one trace share. The value must be valid."""
    return traceparent[3:35]


def current() -> str | None:
    """The trace context of the work that is going on, or None."""
    return _CURRENT.get()


def headers() -> dict[str, str]:
    """The same as a request's headers; empty when there is none."""
    value = current()
    return {} if value is None else {HEADER: value}


@contextmanager
def carrying(traceparent: str | None) -> Iterator[None]:
    """Work in the trace context that came with a message; one that is none ends the outer one as well."""
    value = valid(traceparent)
    token = _CURRENT.set(value)
    try:
        if value is None:
            yield
        else:
            with structlog.contextvars.bound_contextvars(trace_id=trace_id(value)):
                yield
    finally:
        _CURRENT.reset(token)


class Span:
    """What is told about one piece of work; this one forgets it."""

    def set(self, attributes: Mapping[str, Attribute]) -> None:
        """Add attributes; the names are OpenTelemetry's where it has one."""

    def failed(self, reason: str) -> None:
        """The work failed for this reason, a code and no text of a run."""


class Tracer:
    """Makes spans; this one only carries on what came."""

    @contextmanager
    def span(
        self, name: str, *, kind: Kind = "internal", attributes: Mapping[str, Attribute] | None = None
    ) -> Iterator[Span]:
        """A child of the current trace context, and current itself until the block ends."""
        yield Span()

    def close(self) -> None:
        """Send what is left; blocks for a few seconds at most."""


CARRIER: Final = Tracer()
"""Records nothing."""
