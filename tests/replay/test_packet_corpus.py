"""Every packet of real transcripts is to the byte the one that looking at every item gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.codec import encode
from sidecar import packets
from sidecar.core.packet import Built, PacketInputs
from tests.support.plain_packet import plain_packet
from tests.support.replayed import replayed

pytestmark = pytest.mark.anyio

FILES = [
    "claude-code-codemie/session-196820da.jsonl",
    "codex-codemie/rollout-2026-05-11T11-26-55-019e1625-789d-76c0-80ab-3724b5ddb799.jsonl",
]


@pytest.mark.parametrize("name", FILES)
async def test_each_packet_of_a_transcript_is_the_plain_one(
    name: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, seen = packets.build_packet, []

    def both(inputs: PacketInputs) -> Built:
        built, plain = quick(inputs), plain_packet(inputs)
        seen.append((encode(built.packet) == encode(plain.packet), built[1:] == plain[1:]))
        return built

    monkeypatch.setattr(packets, "build_packet", both)
    await replayed(tmp_path, [corpus / name], 32_000)
    assert seen
    assert set(seen) == {(True, True)}
