"""What redaction costs on the way of an event, printed beside what decoding costs. Nothing is asserted of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from protocol.codec import decode_event
from protocol.detectors import hinted
from protocol.redaction import DEFAULT
from support.planted import planted

ROUNDS = 5
WORDS = "the pump runs and the token count of this turn is small, so nothing is to be done here; "


def ordinary(size: int) -> list[bytes]:
    """Messages of about so many bytes in which nothing looks like a secret."""
    made = []
    for number in range(400):
        text = (f"{number}: " + WORDS * (size // len(WORDS) + 1))[:size]
        body = {"v": 1, "id": f"e-{number}", "type": "message", "at": "2026-11-30T09:00:00Z", "role": "user",
                "content": text}  # fmt: skip
        made.append(json.dumps(body).encode())
    return made


def leaky() -> list[bytes]:
    return [
        json.dumps(
            {"v": 1, "id": "e", "type": "message", "at": "2026-11-30T09:00:00Z", "role": "user",
             "content": f"{WORDS * 8}{item.text}"}
        ).encode()
        for item in planted(400)
    ]  # fmt: skip


def cost(messages: list[bytes], work: Callable[[bytes], object]) -> float:
    """Microseconds per message, the best of some rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for message in messages:
            work(message)
        best = min(best, time.perf_counter() - began)
    return best / len(messages) * 1e6


def test_what_redaction_costs(capsys: pytest.CaptureFixture[str]) -> None:
    lines = []
    for size in (300, 1_024, 16_384):
        messages = ordinary(size)
        assert not any(hinted(message) for message in messages)
        redaction, decoding = cost(messages, DEFAULT.message), cost(messages, decode_event)
        lines.append(
            f"{size:>6} bytes: redaction {redaction:6.2f} us, decoding {decoding:6.2f} us, "
            f"ratio {redaction / decoding:.2f}"
        )
    with_secrets = leaky()
    lines.append(f"with a secret in 1 KiB: {cost(with_secrets, DEFAULT.message):.0f} us")
    with capsys.disabled():
        print("\nredaction per message\n  " + "\n  ".join(lines))
