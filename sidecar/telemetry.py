"""Spans by OpenTelemetry, sent by OTLP over HTTP: the optional extra ``tracing``.

On when the standard variables name an endpoint (``OTEL_EXPORTER_OTLP_ENDPOINT`` or ``…_TRACES_ENDPOINT``) and
``OTEL_SDK_DISABLED`` is not true; everything else of them is the library's to read. Spans hold ids, codes and
counts, never content.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import structlog

from sidecar.extras import how_to_install
from sidecar.tracing import CARRIER, HEADER, Attribute, Kind, Span, Tracer, carrying, current

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as Recorded

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_FLUSH_MILLISECONDS: Final = 3_000

log = structlog.get_logger(__name__)


def tracer_for(environment: Mapping[str, str], version: str) -> Tracer:
    """The tracer that the environment asks for; one that only carries trace ids on when it asks for none.

    An endpoint without the extra installed is told once: the daemon's work does not depend on tracing.
    """
    wanted = any(environment.get(name) for name in _ENDPOINTS)
    if not wanted or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return CARRIER
    if environment.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return CARRIER
    if importlib.util.find_spec("opentelemetry") is None:
        log.warning("tracing is not installed, no span is recorded", remedy=how_to_install("tracing"))
        return CARRIER
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = {} if environment.get("OTEL_SERVICE_NAME") else {"service.name": "watchkeeper"}
    provider = TracerProvider(resource=Resource.create({**named, "service.version": version}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return RecordingTracer(provider)


class RecordingTracer(Tracer):
    """Records spans with a provider."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("watchkeeper")
        self._wire = TraceContextTextMapPropagator()

    @contextmanager
    def span(
        self, name: str, *, kind: Kind = "internal", attributes: Mapping[str, Attribute] | None = None
    ) -> Iterator[Span]:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, set_span_in_context

        came = current()
        parent = Context() if came is None else self._wire.extract({HEADER: came}, Context())
        recorded = self._tracer.start_span(
            name, context=parent, kind=SpanKind[kind.upper()], attributes=dict(attributes or {})
        )
        carrier: dict[str, str] = {}
        self._wire.inject(carrier, context=set_span_in_context(recorded, parent))
        span = _Recording(recorded)
        try:
            with carrying(carrier.get(HEADER)):
                yield span
        except BaseException as error:
            # The class only: an error's words may quote what it was about.
            if not span.told:
                span.failed(type(error).__qualname__)
            raise
        finally:
            recorded.end()

    def close(self) -> None:
        self._provider.force_flush(_FLUSH_MILLISECONDS)
        self._provider.shutdown()


class _Recording(Span):
    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        self.told = False
        """Whether the work's own reason for failing is known."""

    def set(self, attributes: Mapping[str, Attribute]) -> None:
        self._recorded.set_attributes(dict(attributes))

    def failed(self, reason: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self.told = True
        self._recorded.set_attribute("error.type", reason)
        self._recorded.set_status(Status(StatusCode.ERROR, reason))
