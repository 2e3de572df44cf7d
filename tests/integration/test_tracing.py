"""A trace goes on through compaction, model call, packet and question; its spans hold ids and codes, no content."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sidecar import tracing
from sidecar.telemetry import RecordingTracer, tracer_for
from tests.support.blackbox import Box, Heard, Json, blackbox, event, eventually
from tests.support.conversation import Talk, talk
from tests.support.nats_server import NatsServer
from tests.support.summary_service import Service, says, summary_service

pytestmark = pytest.mark.anyio

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
CAME = f"00-{TRACE}-{SPAN}-01"
NATS: Json = {"summarizer.kind": "nats", "summarizer.model": "m-7", "summarizer.fallback": "none"}


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as started:
        yield started


@asynccontextmanager
async def traced(
    server: NatsServer, folder: Path, tracer: tracing.Tracer
) -> AsyncIterator[tuple[Box, Service]]:
    async with (
        summary_service(server.url, "wk.v1.summarize.acme.>") as service,
        blackbox(server, folder, NATS, tracer=tracer) as box,
    ):
        yield box, service


def recording() -> tuple[RecordingTracer, InMemorySpanExporter]:
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    return RecordingTracer(provider), kept


async def grown(box: Box, traceparent: str = CAME) -> Talk:
    """A run that is compacted; one message before that came with the trace context."""
    it = await talk(box)
    await it.tell(event("message", role="user", content="Go on with SECRETWORD.", traceparent=traceparent))
    await it.fill(0.76, 1_500)
    return it


def sent(box: Box, it: Talk, kind: str, **wanted: object) -> Heard:
    (found,) = [
        item
        for item in box.heard
        if (item.run, item.kind) == (it.run, kind)
        and all(item.body.get(name) == value for name, value in wanted.items())
    ]
    return found


def named(kept: InMemorySpanExporter, name: str, run: str) -> ReadableSpan:
    (found,) = [
        span
        for span in kept.get_finished_spans()
        if span.name == name and (span.attributes or {}).get("gen_ai.conversation.id") == run
    ]
    return found


def header(span: ReadableSpan) -> str:
    """The span as a header."""
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"


async def test_a_compaction_goes_on_from_the_event_to_model_receipt_and_packet(
    server: NatsServer, tmp_path: Path
) -> None:
    tracer, kept = recording()
    async with traced(server, tmp_path, tracer) as (box, service):
        it = await grown(box)
        receipt = (await box.hear(it.run, "receipt", outcome="applied"))[0]
        await eventually(
            lambda: any(s.name == "watchkeeper.compaction" for s in kept.get_finished_spans()), "the span"
        )
        (asked,) = service.of(it.run)
        packet = sent(box, it, "packet", reason="compacted")
        told_receipt = sent(box, it, "receipt", outcome="applied")
    whole = named(kept, "watchkeeper.compaction", it.run)
    model = named(kept, "chat m-7", it.run)
    assert whole.context.trace_id == int(TRACE, 16)
    assert whole.parent is not None
    assert whole.parent.span_id == int(SPAN, 16)
    assert model.parent is not None
    assert model.parent.span_id == whole.context.span_id
    assert asked.message.headers["traceparent"] == header(model)
    assert packet.headers["traceparent"] == told_receipt.headers["traceparent"] == header(whole)
    assert dict(whole.attributes or {}) == {
        "gen_ai.conversation.id": it.run,
        "gen_ai.conversation.compacted": True,
        "watchkeeper.lane": "main",
        "watchkeeper.mode": "live",
        "watchkeeper.trigger": "threshold",
        "watchkeeper.attempt_id": receipt["attempt_id"],
        "watchkeeper.outcome": "applied",
        "watchkeeper.summarizer": "nats",
        "watchkeeper.tokens_before": receipt["tokens"]["before"],
        "watchkeeper.tokens_after": receipt["tokens"]["after"],
    }
    assert dict(model.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "nats",
        "gen_ai.request.model": "m-7",
        "gen_ai.conversation.id": it.run,
        "gen_ai.usage.input_tokens": 1_000,
        "gen_ai.usage.output_tokens": 50,
        "watchkeeper.attempt_id": receipt["attempt_id"],
    }
    assert "SECRETWORD" not in "".join(span.to_json() for span in kept.get_finished_spans())


async def test_a_failed_compaction_says_so_and_never_that_it_compacted(
    server: NatsServer, tmp_path: Path
) -> None:
    tracer, kept = recording()
    async with traced(server, tmp_path, tracer) as (box, service):
        it = await talk(box)
        service.always[it.run] = says({"v": 1, "error": {"code": "refused", "message": "no"}})
        await it.fill(0.76, 1_500)
        await box.hear(it.run, "receipt", outcome="failed")
        await eventually(
            lambda: any(s.name == "watchkeeper.compaction" for s in kept.get_finished_spans()), "the span"
        )
    whole = next(s for s in kept.get_finished_spans() if s.name == "watchkeeper.compaction")
    assert not whole.status.is_ok
    assert whole.attributes is not None
    assert whole.attributes["error.type"] == "refused"
    assert "gen_ai.conversation.compacted" not in whole.attributes


async def test_a_question_goes_on_from_its_header_to_the_record_it_makes(
    server: NatsServer, tmp_path: Path
) -> None:
    tracer, kept = recording()
    async with traced(server, tmp_path, tracer) as (box, _):
        run = await box.start()
        await box.tell(
            run, event("operation.declared", operation_id="op", kind="mail.send", idempotency_key="k")
        )
        await box.status(run)
        subject = f"wk.v1.ask.acme.main.{run}.authorize"
        body = json.dumps({"operation_id": "op", "request_id": "rq"}).encode()
        reply = await box.client.request(subject, body, timeout=5, headers={"traceparent": CAME})
        assert json.loads(reply.data)["code"] == "ok"
        (record,) = [item for item in await box.records(run) if item["type"] == "authorization.requested"]
        refused = f"wk.v1.ask.acme.main.{run}.nonsense"
        await box.client.request(refused, b"{}", timeout=5, headers={"traceparent": "00-rubbish"})
    span = named(kept, "watchkeeper.ask authorize", run)
    assert span.parent is not None
    assert (span.context.trace_id, span.parent.span_id) == (int(TRACE, 16), int(SPAN, 16))
    assert record["traceparent"] == header(span)
    unknown = named(kept, "watchkeeper.ask unknown", run)
    assert unknown.parent is None
    assert unknown.attributes is not None
    assert unknown.attributes["error.type"] == "invalid_request"


async def test_without_a_tracing_library_the_context_that_came_is_carried_on(
    server: NatsServer, tmp_path: Path
) -> None:
    async with traced(server, tmp_path, tracing.CARRIER) as (box, service):
        it = await grown(box)
        await box.hear(it.run, "receipt", outcome="applied")
        await box.hear(it.run, "packet", reason="compacted")
        assert sent(box, it, "packet", reason="compacted").headers["traceparent"] == CAME
        (asked,) = service.of(it.run)
        assert asked.message.headers["traceparent"] == CAME
        packet = sent(box, it, "packet", reason="compacted")
    assert "traceparent" not in packet.body


NO_CONTEXT = (
    "",
    "rubbish",
    f"00-{TRACE}-{SPAN}-01\r\nNats-Msg-Id: x",
    f"00-{'0' * 32}-{SPAN}-01",
    f"ff-{TRACE}-{SPAN}-01",
    f"00-{TRACE.upper()}-{SPAN}-01",
)


async def test_what_is_no_trace_context_goes_nowhere(server: NatsServer, tmp_path: Path) -> None:
    async with blackbox(server, tmp_path) as box:
        for came in NO_CONTEXT:
            run = await box.start(traceparent=came)
            await box.tell(run, event("run.paused", reason="wait"))
            await box.hear(run, "packet", reason="paused")
            assert tracing.valid(came) is None
            assert all("traceparent" not in item.headers for item in box.heard if item.run == run)


class Collector:
    """Takes spans as a collector does, over HTTP."""

    def __init__(self) -> None:
        got: list[ExportTraceServiceRequest] = []

        class Taking(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                got.append(
                    ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
                )
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.got = got
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Taking)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> Collector:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def test_spans_leave_to_the_endpoint_that_the_standard_variables_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        tracer = tracer_for({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}, "1.2.3")
        with tracing.carrying(CAME), tracer.span("watchkeeper.compaction"):
            pass
        tracer.close()
    (sent,) = collector.got
    (of,) = sent.resource_spans
    said = {item.key: item.value.string_value for item in of.resource.attributes}
    assert (said["service.name"], said["service.version"]) == ("watchkeeper", "1.2.3")
    (span,) = of.scope_spans[0].spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, SPAN)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_nothing_is_recorded_unless_it_is_asked_for(environment: dict[str, str]) -> None:
    assert tracer_for(environment, "1") is tracing.CARRIER


def test_a_collector_that_is_not_there_costs_a_bounded_wait_and_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    tracer = tracer_for({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, "1")
    with tracer.span("watchkeeper.compaction"):
        pass
    tracer.close()
