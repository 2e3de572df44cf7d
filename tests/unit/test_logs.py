"""Logs: one line per entry, secrets masked, long values cut, no tracebacks for what was expected."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from sidecar.config import ConfigError
from sidecar.logs import configure, visible


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.reset_defaults()
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def entries(out: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_secrets_are_masked_and_figures_are_not() -> None:
    out = io.StringIO()
    configure("info", "json", stream=out)
    structlog.get_logger().info(
        "connected",
        url="nats://me:hunter2@host",
        password="hunter2",
        token="hunter2",
        packet_tokens=6000,
        headers={"authorization": "hunter2", "x": "Bearer hunter2hunter2"},
    )
    (entry,) = entries(out)
    assert "hunter2" not in out.getvalue()
    assert entry["packet_tokens"] == 6000
    assert entry["url"] == "nats://***@host"


def test_keys_in_the_words_of_others_are_redacted() -> None:
    out = io.StringIO()
    configure("info", "json", stream=out)
    key = "sk-" + "proj-" + "a1B2" * 10
    structlog.get_logger().warning(
        "summary failed", error=f"401: incorrect API key provided: {key}, see our page"
    )
    (entry,) = entries(out)
    assert key not in out.getvalue()
    assert entry["error"] == "401: incorrect API key provided: [redacted:openai_key], see our page"


def test_long_values_are_cut_and_lines_stay_lines() -> None:
    out = io.StringIO()
    configure("info", "console", stream=out)
    structlog.get_logger().info("x", long="a" * 501, hostile="a\n2026 [error] forged\x1b[2J\u202e")
    assert out.getvalue().count("\n") == 1
    assert "a" * 501 not in out.getvalue()
    assert "(501 characters)" in out.getvalue()
    assert "\x1b[2J" not in out.getvalue()


def test_an_expected_error_is_one_line_and_an_unexpected_one_keeps_its_traceback() -> None:
    out = io.StringIO()
    configure("info", "json", stream=out)
    log = structlog.get_logger()
    for error in (ConnectionRefusedError("gone"), ConfigError([]), ZeroDivisionError("bug")):
        try:
            raise error
        except Exception:
            log.exception("failed")
    expected, ours, bug = entries(out)
    assert expected["error"] == "ConnectionRefusedError: gone"
    assert "exception" not in expected
    assert "exception" not in ours
    assert "Traceback" in str(bug["exception"])


def test_libraries_speak_through_the_same_door() -> None:
    out = io.StringIO()
    configure("info", "json", stream=out)
    logging.getLogger("nats.aio.client").error("lost %s", "nats://u:hunter2@h", exc_info=ValueError("eof"))
    logging.getLogger("uvicorn.error").info("Started server process")
    logging.getLogger("elsewhere").debug("not at this level")
    (entry,) = entries(out)
    assert entry["logger"] == "nats.aio.client"
    assert entry["error"] == "ValueError: eof"
    assert "hunter2" not in out.getvalue()


def test_the_level_holds_and_configuring_again_replaces() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure("debug", "json", stream=first)
    configure("warning", "auto", stream=second)
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud")
    logging.getLogger("x").warning("loud too")
    assert first.getvalue() == ""
    assert [entry["event"] for entry in entries(second)] == ["loud", "loud too"]


def test_visible_leaves_ordinary_text_alone() -> None:
    assert visible("Zoë – 漢字 😀") == "Zoë – 漢字 😀"
    assert visible("a\tb\u2028") == "a\\u0009b\\u2028"
