"""The context figure from outside: window, levels and notices, which reports count, and when it drops."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.blackbox import Box, Json, blackbox, event, words
from tests.support.conversation import SMALL_MODEL, SMALL_USABLE, at, talk
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as started:
        yield started


@pytest.fixture(scope="module")
async def box(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Box]:
    # Nothing is compacted here: only the figure is looked at.
    async with blackbox(server, tmp_path_factory.mktemp("budget"), {"mode": "observe"}) as opened:
        yield opened


@pytest.mark.parametrize(
    ("model", "usable"),
    [
        ({"context_window": 200_000}, 200_000 - 8_192 - 8_000),
        ({"context_window": 200_000, "max_output_tokens": 64_000}, 200_000 - 50_000 - 8_000),
        ({"context_window": 200_000, "max_output_tokens": 1_000}, 200_000 - 1_000 - 8_000),
        ({"context_window": 16_000}, 16_000 - 4_000 - 1_600),
        ({"context_window": 1_000_000, "max_output_tokens": 100_000}, 1_000_000 - 100_000 - 8_000),
    ],
)
async def test_what_of_a_window_is_usable(box: Box, model: Json, usable: int) -> None:
    run = await box.start(model={"name": "m", **model})
    assert (await box.status(run))["budget"] == {
        "used": 0,
        "usable": usable,
        "window": model["context_window"],
    }


async def levels(box: Box, run: str, number: int) -> list[tuple[str, str, int, int]]:
    found = await box.hear(run, "notice", number, kind="level_changed")
    return [(item["from"], item["to"], item["used"], item["usable"]) for item in found]


async def test_each_level_is_told_once_when_it_is_reached_and_left_below(box: Box) -> None:
    it = await talk(box)
    expected: list[tuple[str, str, int, int]] = []

    async def report(tokens: int, level: str) -> None:
        before = expected[-1][1] if expected else "ok"
        status = await it.used(tokens)
        assert status["budget"]["used"] == tokens
        assert status["level"] == level, tokens
        if level != before:
            expected.append((before, level, tokens, SMALL_USABLE))
        assert await levels(box, it.run, len(expected)) == expected

    await report(at(0.60), "ok")
    await report(at(0.65), "checkpoint")
    await report(at(0.70), "checkpoint")
    await report(at(0.75), "compact")
    await report(at(0.90), "critical")
    await report(at(1.00), "overflow")
    await report(at(0.951), "overflow")
    await report(at(0.93), "critical")
    await report(at(0.851), "critical")
    await report(at(0.84), "compact")
    await report(at(0.701), "compact")
    await report(at(0.69), "checkpoint")
    await report(at(0.601), "checkpoint")
    await report(at(0.59), "ok")
    # Several at once, both ways.
    await report(at(1.01), "overflow")
    await report(at(0.30), "ok")


async def test_what_comes_after_a_report_is_estimated(box: Box) -> None:
    it = await talk(box)
    assert (await it.used(5_000))["budget"]["used"] == 5_000
    await it.tell(event("message", role="user", content=words(1_000)))
    assert (await box.status(it.run))["budget"]["used"] == 6_000
    await it.tell(
        event("tool.called", call_id="c", tool="t", arguments={"x": "y" * 400}),
        event("tool.returned", call_id="c", status="ok", content=words(2_000)),
    )
    used = (await box.status(it.run))["budget"]["used"]
    assert 8_050 <= used <= 8_150
    # Statements about the work are in no prompt.
    await it.tell(event("step.changed", phase="x" * 4_000), event("question.opened", text="y" * 4_000))
    assert (await box.status(it.run))["budget"]["used"] == used


IGNORED: dict[str, Json] = {
    "a sum over a turn": {"context_tokens": 15_000, "scope": "aggregate"},
    "another session's": {"context_tokens": 15_000, "session": "elsewhere"},
    "nothing": {"context_tokens": 0},
    "over twice the window": {"context_tokens": 40_001},
    "older than the newest": {"context_tokens": 15_000, "through": "early"},
}


@pytest.mark.parametrize("name", IGNORED)
async def test_reports_that_say_nothing_about_now_are_ignored(box: Box, name: str) -> None:
    it = await talk(box, session="s1")
    await it.tell(event("message", id="early", role="user", content="a"))
    await it.tell(event("message", id="then", role="user", content="b"))
    await it.used(6_000, through="then")
    before = await box.status(it.run)
    status = await it.used(**{"tokens": 0, **_renamed(IGNORED[name])})
    assert status["budget"] == before["budget"]
    assert status["level"] == "ok"
    assert status["position"] == before["position"] + 1


def _renamed(fields: Json) -> Json:
    return {"tokens" if key == "context_tokens" else key: value for key, value in fields.items()}


async def test_a_childs_usage_is_its_own(box: Box) -> None:
    it = await talk(box)
    await it.used(3_000)
    child = f"{it.run}-kid"
    await it.tell(event("child.spawned", child_run=child, task="Help."))
    await box.tell(
        child,
        event("run.started", goal="Help.", model=SMALL_MODEL, parent_run=it.run),
        event("usage.reported", model="small-model", context_tokens=16_000, output_tokens=1),
    )
    assert (await box.status(child))["budget"]["used"] == 16_000
    assert (await box.status(it.run))["budget"]["used"] == 3_000


async def test_a_smaller_window_raises_the_level_at_once(box: Box) -> None:
    it = await talk(box, model={"name": "big", "context_window": 200_000})
    await it.tell(event("usage.reported", model="big", context_tokens=17_000, output_tokens=1))
    assert (await box.status(it.run))["level"] == "ok"
    await it.tell(event("model.changed", model=SMALL_MODEL))
    status = await box.status(it.run)
    assert status["budget"] == {"used": 17_000, "usable": SMALL_USABLE, "window": 20_000}
    assert status["level"] == "overflow"


async def test_the_handoff_is_told_when_the_checkpoint_level_is_reached(server: NatsServer, box: Box) -> None:
    it = await talk(box)
    status = await it.used(at(0.66))
    assert status["level"] == "checkpoint"
    await box.hear(it.run, "notice", kind="level_changed")
    # In this mode nothing is handed over.
    assert box.of(it.run, "packet") == []


# --- taking up ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "used"),
    [
        ({"type": "context.replaced", "by": "agent", "context_tokens": 4_000}, 4_000),
        ({"type": "context.replaced", "by": "provider", "context_tokens": 2_500}, 2_500),
    ],
)
async def test_a_replaced_context_says_what_it_holds(box: Box, message: Json, used: int) -> None:
    it = await talk(box)
    await it.exchange()
    await it.used(at(0.8))
    await it.tell({**event("context.replaced"), **message})
    status = await box.status(it.run)
    assert (status["budget"]["used"], status["level"]) == (used, "ok")


async def test_resuming_without_a_packet_drops_nothing(box: Box) -> None:
    it = await talk(box, session="s1")
    await it.used(at(0.8))
    await it.tell(event("run.resumed", session="s1"), event("run.resumed"))
    assert (await box.status(it.run))["budget"]["used"] == at(0.8)


async def test_a_much_smaller_report_shows_a_replacement_and_a_slightly_smaller_one_does_not(
    box: Box,
) -> None:
    it = await talk(box)
    await it.used(10_000)
    assert (await it.used(9_000))["budget"]["used"] == 9_000
    assert (await it.used(3_000))["budget"]["used"] == 3_000


async def test_a_report_of_before_the_replacement_is_ignored(box: Box) -> None:
    it = await talk(box)
    await it.exchange()
    last = await it.exchange()
    await it.used(at(0.8))
    await it.tell(event("context.replaced", by="agent", context_tokens=4_000))
    await it.exchange(100)
    before = (await box.status(it.run))["budget"]["used"]
    status = await it.used(at(0.82), through=last)
    assert status["budget"]["used"] == before


async def test_one_odd_report_does_not_bend_the_estimates(box: Box) -> None:
    it = await talk(box)
    tokens = 1_000
    for step in range(6):
        await it.tell(event("message", role="user", content=words(500, f"m{step}")))
        tokens += 500
        await it.used(tokens)
    await it.tell(event("message", role="user", content=words(500, "odd")))
    await it.used(tokens + 1_900)
    await it.tell(event("message", role="user", content=words(500, "even")))
    tokens += 1_000
    await it.used(tokens)
    await it.tell(event("message", role="user", content=words(1_000, "next")))
    used = (await box.status(it.run))["budget"]["used"]
    assert abs(used - tokens - 1_000) <= 50


async def test_reports_are_told_as_metrics(box: Box) -> None:
    it = await talk(box)
    counted = await box.metric("context_used_ratio_count")
    await it.used(at(0.5))
    await it.tell(event("message", role="user", content=words(500)))
    await it.used(at(0.5) + 500)
    assert await box.metric("context_used_ratio_count") == counted + 2
    assert await box.metric("budget_estimate_error_ratio_count") >= 1
