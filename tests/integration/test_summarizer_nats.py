"""A summariser as a service on the broker: what it is asked, what its answers come to, and what failing costs."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.summary import Usage
from sidecar.summarizers import instructions
from sidecar.summarizers.digest import DigestSummarizer
from sidecar.summarizers.nats import NatsSummarizer, decode_reply
from support.harness import Harness
from support.links import linked
from tests.support.bad_summaries import (
    FAILURES,
    REJECTED,
    failing,
    finished,
    first_ref,
    much,
    only,
    open_matters,
)
from tests.support.blackbox import Box, Json, blackbox, event, eventually, words
from tests.support.conversation import Talk, talk
from tests.support.nats_server import NatsServer
from tests.support.summary_service import (
    Asked,
    Behaviour,
    Held,
    Service,
    altered,
    says,
    silent,
    summary_service,
    told,
    well,
)

pytestmark = pytest.mark.anyio

NATS: Json = {
    "summarizer.kind": "nats",
    "summarizer.timeout_seconds": 1.5,
    "summarizer.fallback": "none",
    "lease.seconds": 5,
}
FULL = 0.76
LARGE = 1_500
"""Tokens of one tool result: few messages, and none large enough to be trimmed."""


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as started:
        yield started


@pytest.fixture(scope="module")
async def box(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Box]:
    async with blackbox(server, tmp_path_factory.mktemp("nats"), NATS) as opened:
        yield opened


@pytest.fixture(scope="module")
async def service(server: NatsServer) -> AsyncIterator[Service]:
    async with summary_service(server.url, "wk.v1.summarize.acme.>") as opened:
        yield opened


async def full(box: Box, service: Service, behaviour: Behaviour, **fields: Any) -> Talk:
    """A run that has grown to where it is compacted; all its requests are answered so."""
    it = await talk(box, **fields)
    service.always[it.run] = behaviour
    await it.fill(FULL, LARGE)
    return it


async def ended(it: Talk, number: int = 1) -> Json:
    """Wait for that many receipts; the last of them. A failed run is tried again sooner or later."""
    return (await it.box.hear(it.run, "receipt", number))[number - 1]


async def take_up(it: Talk) -> None:
    packet = await it.box.packet(it.run)
    await it.tell(event("context.replaced", by="agent", packet_id=packet["packet_id"]))
    await it.tell(
        event("run.resumed", packet_id=packet["packet_id"], ledger_version=packet["ledger_version"])
    )


# --- a summary that is accepted ------------------------------------------------------------------------------


async def test_it_is_asked_by_the_protocol_and_its_summary_becomes_a_checkpoint(
    box: Box, service: Service
) -> None:
    it = await talk(box)
    await it.tell(
        event("question.opened", question_id="q", text="Which zone?"),
        event("operation.declared", operation_id="op", kind="mail.send", idempotency_key="k"),
    )
    tokens = [await box.metric("summarizer_tokens_total", direction=way) for way in ("in", "out")]
    asked_before = await box.metric("summarizer_requests_total", summarizer="nats", outcome="ok")
    await it.fill(FULL, LARGE)
    receipt = await ended(it)
    (asked,) = service.of(it.run)
    assert asked.subject == f"wk.v1.summarize.acme.main.{it.run}"
    body = asked.body
    assert set(body) == {
        *("v", "type", "attempt_id", "run", "range", "previous", "ledger", "exchanges", "max_tokens"),
        *("instructions", "instructions_digest"),
    }
    assert (body["v"], body["type"], body["run"]) == (1, "summarize.request", it.run)
    assert body["attempt_id"] == receipt["attempt_id"]
    assert body["range"] == receipt["range"]
    assert body["previous"] is None
    assert body["max_tokens"] > 0
    assert body["instructions"] == instructions.INSTRUCTIONS
    named = "sha256:" + hashlib.sha256(body["instructions"].encode()).hexdigest()
    assert body["instructions_digest"] == named
    assert [item["id"] for item in body["ledger"]["questions"]] == ["q"]
    assert {"task", "questions", "operations", "approvals", "progress", "contradictions"} <= set(
        body["ledger"]
    )
    assert {"decisions", "evidence", "artifacts"} <= set(body["ledger"])
    covered = [item for item in it.events[: receipt["range"]["through"]] if item["type"] in _SHOWN]
    assert [item["event_id"] for item in body["exchanges"]] == [item["id"] for item in covered]
    for item in body["exchanges"]:
        assert set(item) - {"role"} == {"position", "event_id", "type", "text", "tokens"}
        assert ("role" in item) == (item["type"] == "message")
    assert receipt["outcome"] == "applied"
    assert receipt["summarizer"] == "nats"
    assert receipt["projector"] == {"version": "1", "instructions_digest": named}
    assert (receipt["tokens"]["summarizer_in"], receipt["tokens"]["summarizer_out"]) == (1_000, 50)
    packet = (await box.hear(it.run, "packet", reason="compacted"))[0]
    assert packet["checkpoint"]["summarizer"] == "nats"
    assert packet["checkpoint"]["projector"] == receipt["projector"]
    assert packet["summary"]["narrative"] == asked.sound()["narrative"]
    assert [await box.metric("summarizer_tokens_total", direction=way) for way in ("in", "out")] == [
        tokens[0] + 1_000,
        tokens[1] + 50,
    ]
    assert await box.metric("summarizer_requests_total", summarizer="nats", outcome="ok") == asked_before + 1


_SHOWN = ("message", "tool.called", "tool.returned")


async def test_the_next_layer_gets_the_previous_summary_and_a_failed_one_leaves_the_old(
    box: Box, service: Service
) -> None:
    it = await full(box, service, well)
    first = await ended(it)
    await take_up(it)
    service.always[it.run] = says({"error": {"code": "overloaded", "message": "later"}})
    await it.fill(FULL, LARGE)
    second = await ended(it, 2)
    assert service.of(it.run)[1].body["previous"] == service.of(it.run)[0].sound()
    assert second["range"]["from"] == first["range"]["through"] + 1
    assert (second["outcome"], second["reason"]) == ("failed", "unavailable")
    assert second["parent_checkpoint_id"] == first["checkpoint_id"]
    packet = await box.packet(it.run)
    assert packet["checkpoint"]["id"] == first["checkpoint_id"]
    assert packet["tail"]["from_position"] == first["range"]["through"] + 1
    assert packet["summary"]["narrative"] == service.of(it.run)[0].sound()["narrative"]


# --- failures, each told apart ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAILURES)
async def test_a_failure_is_named_and_changes_nothing(box: Box, service: Service, name: str) -> None:
    behaviour, reason = FAILURES[name]
    failures = await box.metric("compaction_failures_total", reason=reason)
    outcomes = await box.metric("summarizer_requests_total", summarizer="nats", outcome=reason)
    it = await full(box, service, behaviour)
    receipt = await ended(it)
    assert (receipt["outcome"], receipt["reason"]) == ("failed", reason)
    assert (receipt["summarizer"], receipt["attempt"]) == ("nats", 1)
    assert receipt["projector"]["instructions_digest"] == instructions.DIGEST
    assert "checkpoint_id" not in receipt
    assert await box.metric("compaction_failures_total", reason=reason) > failures
    assert await box.metric("summarizer_requests_total", summarizer="nats", outcome=reason) > outcomes
    packet = await box.packet(it.run)
    assert packet["checkpoint"] is None
    assert packet["tail"]["from_position"] == 1
    assert box.of(it.run, "packet", reason="compacted") == []
    assert "said the provider" not in json.dumps(receipt)


async def test_what_a_cut_answer_cost_is_counted(box: Box, service: Service) -> None:
    it = await full(box, service, finished("length"))
    receipt = await ended(it)
    assert receipt["tokens"]["summarizer_in"] == 1_000


@pytest.mark.parametrize("usage", [{}, {"input_tokens": 5}, {"output_tokens": 7}])
def test_a_number_that_a_usage_does_not_tell_is_nought(usage: Json) -> None:
    reply = decode_reply(json.dumps({"v": 1, "summary": {}, "usage": usage}).encode(), {})
    assert reply.usage == Usage(**usage)
    assert Usage() == Usage(input_tokens=0, output_tokens=0)


async def test_nobody_who_answers_is_unavailable(
    server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = {**NATS, "tenant": "lonely", "summarizer.model": "m-1"}
    async with blackbox(server, tmp_path_factory.mktemp("lonely"), settings) as box:
        box.tenant = "lonely"
        it = await talk(box)
        await it.fill(FULL, LARGE)
        receipt = await ended(it)
        assert (receipt["outcome"], receipt["reason"]) == ("failed", "unavailable")
        assert receipt["projector"]["model"] == "m-1"


async def test_a_summariser_that_dies_on_the_way_is_a_time_out_and_then_unavailable(
    server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def die(asked: Asked) -> None:
        await asked.service.client.close()

    settings = {**NATS, "tenant": "dying"}
    async with (
        summary_service(server.url, "wk.v1.summarize.dying.>") as mortal,
        blackbox(server, tmp_path_factory.mktemp("dying"), settings) as box,
    ):
        box.tenant = "dying"
        it = await full(box, mortal, die)
        assert (await ended(it))["reason"] == "timeout"
        other = await full(box, mortal, die)
        assert (await ended(other))["reason"] == "unavailable"
        async with summary_service(server.url, "wk.v1.summarize.dying.>"):
            third = await talk(box)
            await third.fill(FULL, LARGE)
            assert (await ended(third))["outcome"] == "applied"


async def test_a_late_answer_is_counted_and_dropped(box: Box, service: Service) -> None:
    late = await box.metric("summarizer_late_replies_total", summarizer="nats")
    held = Held()
    it = await talk(box)
    service.script[it.run] = [held]
    service.always[it.run] = silent
    await it.fill(FULL, LARGE)
    receipt = await ended(it)
    assert (receipt["outcome"], receipt["reason"]) == ("failed", "timeout")
    held.release.set()

    async def counted() -> bool:
        return await box.metric("summarizer_late_replies_total", summarizer="nats") == late + 1

    await eventually(counted, "the late answer")
    assert (await box.packet(it.run))["checkpoint"] is None
    assert {item["outcome"] for item in box.of(it.run, "receipt")} == {"failed"}


# --- candidates that are rejected ------------------------------------------------------------------------------


@pytest.mark.parametrize("code", REJECTED)
async def test_a_rejected_candidate_says_why(box: Box, service: Service, code: str) -> None:
    broken = await box.metric("invariant_violations_total", code=code)
    it = await talk(box)
    service.always[it.run] = altered(REJECTED[code])
    await open_matters(it)
    await it.fill(FULL, LARGE)
    receipt = await ended(it)
    assert (receipt["outcome"], receipt["reason"]) == ("failed", "invalid"), receipt["violations"]
    assert code in receipt["violations"]
    assert await box.metric("invariant_violations_total", code=code) > broken
    assert receipt["tokens"]["summarizer_in"] == 1_000
    packet = await box.packet(it.run)
    assert packet["checkpoint"] is None
    assert [item["id"] for item in packet["questions"]] == ["q"]


async def test_the_same_unaltered_is_accepted(box: Box, service: Service) -> None:
    it = await talk(box)
    await open_matters(it)
    await it.fill(FULL, LARGE)
    receipt = await ended(it)
    assert (receipt["outcome"], receipt["violations"]) == ("applied", [])


def _one_in_ten(summary: Json, request: Json) -> None:
    ref = first_ref(request)
    good = [{"text": f"looked at part {letter} of it", "refs": [ref]} for letter in "abcdefghi"]
    summary.update(completed=[], inferences=[], observations=[*good, *only("It took 4711 steps.", ref)])


def _one_in_three(summary: Json, request: Json) -> None:
    _one_in_ten(summary, request)
    del summary["observations"][:7]


async def test_a_faulty_statement_among_many_is_removed_and_counted(box: Box, service: Service) -> None:
    it = await full(box, service, altered(_one_in_ten))
    receipt = await ended(it)
    assert (receipt["outcome"], receipt["removed_statements"]) == ("applied", 1)
    assert receipt["violations"] == ["unsupported_figure"]
    packet = (await box.hear(it.run, "packet", reason="compacted"))[0]
    assert len(packet["summary"]["observations"]) == 9
    assert "4711" not in json.dumps(packet)


async def test_more_than_a_fifth_removed_rejects(box: Box, service: Service) -> None:
    it = await full(box, service, altered(_one_in_three))
    receipt = await ended(it)
    assert (receipt["outcome"], receipt["reason"]) == ("failed", "invalid")
    assert (receipt["removed_statements"], receipt["violations"]) == (1, ["unsupported_figure"])


# --- one at a time, again and again ------------------------------------------------------------------------------


async def test_two_triggers_join_one_attempt(box: Box, service: Service) -> None:
    held = Held()
    it = await talk(box)
    service.always[it.run] = held
    await it.fill(0.5, LARGE)
    first = (await box.ask(it.run, "compact", reason="lunch")).body
    await held.reached.wait()
    second = (await box.ask(it.run, "compact")).body
    assert (first["state"], second["state"]) == ("started", "running")
    assert first["attempt_id"] == second["attempt_id"]
    await it.exchange(LARGE)
    assert (await box.status(it.run))["compaction"]["state"] == "running"
    held.release.set()
    receipt = await ended(it)
    assert (receipt["outcome"], receipt["reason"]) == ("applied", "lunch")
    assert len(service.of(it.run)) == 1
    again = (await box.ask(it.run, "compact")).body
    assert again["state"] == "deferred"


async def test_three_tries_then_the_fallback(server: NatsServer, tmp_path: Path) -> None:
    """The daemon's parts on a clock of the test's own, with the real service over the real broker."""
    async with linked(server.url) as link, summary_service(server.url, "wk.v1.summarize.t.>") as service:
        harness = Harness(tmp_path, {"summarizer.timeout_seconds": 10.0, "summarizer.fallback": "digest"})
        harness.script = NatsSummarizer(link, "t", "main", window_tokens=100_000)  # type: ignore[assignment]
        harness.fallback = DigestSummarizer()
        service.always["r"] = failing("overloaded")
        async with harness.alive() as life:
            harness.start()
            for _ in range(5):
                harness.turn(2_000, wordy=True)
            await life.read_all()
            for wait in (5, 20, 0, 0):
                assert (await life.compact())["state"] == "started"
                if wait:
                    harness.wait(wait - 1)
                    assert (await life.compact())["reason"] == "cool_down"
                    harness.wait(1)
            await life.relayed()
        receipts = harness.sent("receipt")
        assert [(item["outcome"], item["summarizer"], item["attempt"]) for item in receipts] == [
            ("failed", "nats", 1),
            ("failed", "nats", 2),
            ("failed", "nats", 3),
            ("applied", "digest", 4),
        ]
        assert len({item["attempt_id"] for item in receipts}) == 4
        assert "instructions_digest" not in receipts[3]["projector"]
        assert len(service.asked) == 3


async def test_an_open_breaker_is_shown_and_without_a_fallback_nothing_is_tried(
    server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = {**NATS, "tenant": "broken", "summarizer.max_attempts": 1}
    async with (
        summary_service(server.url, "wk.v1.summarize.broken.>") as service,
        blackbox(server, tmp_path_factory.mktemp("broken"), settings) as box,
    ):
        box.tenant = "broken"
        it = await full(box, service, failing("unavailable"))
        assert (await ended(it))["outcome"] == "failed"
        await box.hear(it.run, "notice", kind="compaction_deferred", reason="breaker")

        async def shown() -> bool:
            return await box.metric("summarizer_breaker_open", summarizer="nats") == 1

        await eventually(shown, "the open breaker")
        answer = (await box.ask(it.run, "compact")).body
        assert (answer["state"], answer["reason"]) == ("deferred", "breaker")
        assert len(service.asked) == len(box.of(it.run, "receipt")) == 1


async def test_behind_an_open_breaker_the_fallback_writes_the_summary(
    server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = {**NATS, "tenant": "falling", "summarizer.max_attempts": 1, "summarizer.fallback": "digest"}
    async with (
        summary_service(server.url, "wk.v1.summarize.falling.>") as service,
        blackbox(server, tmp_path_factory.mktemp("falling"), settings) as box,
    ):
        box.tenant = "falling"
        it = await full(box, service, failing("unavailable"))
        await ended(it, 2)
        receipts = box.of(it.run, "receipt")
        assert [(item["outcome"], item["summarizer"]) for item in receipts] == [
            ("failed", "nats"),
            ("applied", "digest"),
        ]
        packet = (await box.hear(it.run, "packet", reason="compacted"))[0]
        assert packet["checkpoint"]["summarizer"] == "digest"


async def test_a_stop_on_the_way_is_an_interruption(
    server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = {**NATS, "tenant": "stopped", "summarizer.timeout_seconds": 60}
    async with summary_service(server.url, "wk.v1.summarize.stopped.>") as service:
        held = Held()
        async with blackbox(server, tmp_path_factory.mktemp("stopped"), settings) as box:
            box.tenant = "stopped"
            it = await full(box, service, held)
            await held.reached.wait()
            box.daemon.stop.set()
            receipt = await ended(it)
            assert (receipt["outcome"], receipt["reason"]) == ("failed", "interrupted")
            assert receipt["summarizer"] == "nats"


# --- bounds ------------------------------------------------------------------------------------------------------


async def check_parts(it: Talk, service: Service, largest: int) -> None:
    """The range went in several requests of at most so many bytes, in order, each with the summary before it."""
    receipt = await ended(it)
    assert receipt["outcome"] == "applied", (receipt["reason"], receipt["violations"])
    asked = service.of(it.run)
    assert len(asked) > 1
    assert max(len(item.message.data) for item in asked) <= largest
    assert asked[0].body["previous"] is None
    for before, after in itertools.pairwise(asked):
        assert after.body["previous"] == before.sound()
    shown = [item["event_id"] for each in asked for item in each.body["exchanges"]]
    covered = [item["id"] for item in it.events[: receipt["range"]["through"]] if item["type"] in _SHOWN]
    assert shown == covered
    assert {item.body["attempt_id"] for item in asked} == {receipt["attempt_id"]}
    assert receipt["tokens"]["summarizer_in"] == 1_000 * len(asked)


async def test_a_range_over_the_window_goes_in_parts(
    server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = {**NATS, "tenant": "narrow", "summarizer.window_tokens": 5_000}
    async with (
        summary_service(server.url, "wk.v1.summarize.narrow.>") as service,
        blackbox(server, tmp_path_factory.mktemp("narrow"), settings) as box,
    ):
        box.tenant = "narrow"
        it = await full(box, service, well)
        await check_parts(it, service, 5_000 * 4)
        # A part that fails fails the attempt: nothing is covered by half a summary.
        other = await talk(box)
        service.script[other.run] = [well, failing("rate_limited")]
        await other.fill(FULL, LARGE)
        receipt = await ended(other)
        assert (receipt["outcome"], receipt["reason"]) == ("failed", "rate_limited")
        assert receipt["tokens"]["summarizer_in"] == 1_000
        third = await talk(box)
        service.script[third.run] = [told("no summary"), well]
        await third.fill(FULL, LARGE)
        assert (await ended(third))["reason"] == "invalid"
        assert len(service.of(third.run)) == 1
        fourth = await talk(box)
        service.script[fourth.run] = [altered(much), well]
        await fourth.fill(FULL, LARGE)
        assert (await ended(fourth))["reason"] == "invalid"
        assert len(service.of(fourth.run)) == 1


async def test_a_request_is_never_larger_than_the_broker_takes(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with NatsServer(config="max_payload: 24576") as small:
        async with (
            summary_service(small.url) as service,
            blackbox(small, tmp_path_factory.mktemp("small"), NATS) as box,
        ):
            it = await full(box, service, well)
            await check_parts(it, service, 24_576)


async def test_a_ledger_that_leaves_no_room_asks_nobody(
    server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = {**NATS, "tenant": "crowded", "summarizer.window_tokens": 4_000}
    async with (
        summary_service(server.url, "wk.v1.summarize.crowded.>") as service,
        blackbox(server, tmp_path_factory.mktemp("crowded"), settings) as box,
    ):
        box.tenant = "crowded"
        it = await talk(box)
        await it.tell(
            *(
                event("question.opened", question_id=f"q-{number}", text=words(100, f"why {number}"))
                for number in range(30)
            )
        )
        await it.fill(FULL, LARGE)
        receipt = await ended(it)
        assert (receipt["outcome"], receipt["reason"]) == ("failed", "unavailable")
        assert service.asked == []
