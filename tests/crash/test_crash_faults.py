"""Faults from outside that a daemon in a process of its own lives through: a signal, a damaged log, a clock that
jumps, a disk that fills up in mid commit, a broker that comes back without its streams, a consumer deleted.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import anyio
import nats
import pytest

from sidecar.transport.jetstream import Link
from support.daemon import LANE, TENANT, DaemonProcess
from support.evidence import (
    Left,
    comparable,
    gather,
    prove_coverage,
    prove_journal,
    prove_output,
    prove_whole,
    stored,
)
from support.links import eventually, linked
from support.nats_server import NatsServer
from support.voyage import BRIEF, RUN, at_sea, laid_up, player, published, sail, voyage_events
from tests.support.blackbox import Box, Heard, event
from tests.support.conversation import talk

pytestmark = pytest.mark.anyio

SHORT_LEASE = {"LEASE__SECONDS": "1"}


@asynccontextmanager
async def boxed(daemon: DaemonProcess) -> AsyncIterator[Box]:
    """A plain client of a daemon in another process, which hears all it says."""
    client = await nats.connect(daemon.url)
    box = Box(
        daemon.url, cast(Any, None), client, client.jetstream(), daemon.data_dir, tenant=TENANT, lane=LANE
    )

    async def note(message: Any) -> None:
        body = json.loads(message.data)
        box.heard.append(Heard(message.subject, body, dict(message.headers or {}), message.data))

    try:
        for space in ("wk.v1.out.>", "wk.v1.state.>"):
            await client.subscribe(space, cb=note)
        await client.flush()
        yield box
    finally:
        await client.close()


# --- the configuration ----------------------------------------------------------------------------------------


class Rules:
    """The daemon's configuration file, changed while it runs."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._daemon = daemon
        self._file = daemon.folder / "watchkeeper.toml"

    def write(self, text: str) -> None:
        self._file.write_text(text)

    async def hang_up(self, answer: str) -> dict[str, Any]:
        """Send SIGHUP and wait until the daemon has logged this; the entry."""
        before = len(self._daemon.said(answer))
        os.kill(self._daemon.pid, signal.SIGHUP)
        await eventually(lambda: len(self._daemon.said(answer)) > before, f"{answer!r} in the log")
        return self._daemon.said(answer)[-1]


async def test_sighup_changes_mode_and_rules_of_a_running_process(tmp_path: Path) -> None:
    with NatsServer() as server, DaemonProcess(server.url, tmp_path / "daemon") as daemon:
        rules = Rules(daemon)
        rules.write("mode = 'observe'\n")
        daemon.start()
        await daemon.owning()
        async with boxed(daemon) as box:
            other = await talk(box)
            it = await talk(box, labels={"stage": "careful"})
            await it.fill(0.78)
            assert (await box.status(it.run))["mode"] == "observe"
            await box.hear(it.run, "notice", kind="compaction_deferred", reason="mode")
            assert box.of(it.run, "packet") == box.of(it.run, "receipt") == []

            # A wrong file: one line in the log, nothing changes.
            rules.write("mode = 'live'\n[[rules]]\nlabels = { stage = 'careful' }\nmode = 'loud'\n")
            lines = len(daemon.log.splitlines())
            told = await rules.hang_up("configuration not reloaded, the old one stays")
            assert "loud" in told["problems"]
            assert len(daemon.log.splitlines()) == lines + 1
            for run in (it.run, other.run):
                assert (await box.status(run))["mode"] == "observe"

            # The run labelled so goes live, without any other event; others stay as they were.
            rules.write("mode = 'observe'\n[[rules]]\nlabels = { stage = 'careful' }\nmode = 'live'\n")
            told = await rules.hang_up("rules reloaded")
            assert (told["mode"], told["rules"], told["ignored"]) == ("observe", 1, [])
            assert (await box.status(it.run))["mode"] == "live"
            assert (await box.status(other.run))["mode"] == "observe"
            await box.hear(it.run, "receipt", outcome="applied")
            (packet,) = await box.hear(it.run, "packet", reason="compacted")
            await it.tell(event("context.replaced", by="agent", packet_id=packet["packet_id"]))
            version = (await box.status(it.run))["checkpoint"]["version"]

            # What needs a restart is named and not taken over.
            rules.write("tenant = 'another'\n[[rules]]\nlabels = { stage = 'careful' }\nbypass = true\n")
            told = await rules.hang_up("rules reloaded")
            assert (told["mode"], told["ignored"]) == ("live", ["tenant"])

            # Bypassed: ledger and history go on, nothing is published or cut.
            await it.tell(event("question.opened", question_id="q", text="Which way?"))
            await it.tell(event("operation.declared", operation_id="op", kind="x", idempotency_key="k"))
            heard = len(box.of(it.run, "packet"))
            at = (await box.status(it.run))["ledger_version"]
            result = await it.exchange()
            await it.fill(0.92)
            await box.hear(it.run, "notice", 2, kind="compaction_deferred", reason="mode")
            assert (await box.authorize(it.run, "op"))["code"] == "ok"
            fresh = await box.packet(it.run)
            assert fresh["questions"] == [{"id": "q", "text": "Which way?"}]
            assert fresh["operations"][0]["state"] == "pending"
            found = (await box.ask(it.run, "fetch", refs=[f"event:{result}"])).body["items"]
            assert [item["status"] for item in found] == ["found"]
            status = await box.status(it.run)
            assert status["checkpoint"]["version"] == version
            assert len(box.of(it.run, "receipt")) == 1

            # Back to live: the first packet it publishes is of now, so none came in between.
            rules.write("mode = 'live'\n")
            await rules.hang_up("rules reloaded")
            await it.tell(event("question.opened", question_id="q2", text="And when?"))
            packets = await box.hear(it.run, "packet", heard + 1)
            assert packets[heard]["ledger_version"] >= status["ledger_version"] > at
        assert await daemon.stopped() == 0, daemon.log
        assert daemon.defects() == []


# --- the database's log ---------------------------------------------------------------------------------------


def flip(log: Path, place: float, length: int = 64) -> int:
    """Flip bytes at this share of the file; its size."""
    content = bytearray(log.read_bytes())
    first = int(place * (len(content) - length))
    for at in range(first, first + length):
        content[at] ^= 0xFF
    log.write_bytes(content)
    return len(content)


def prove_said_once(left: Left) -> None:
    """No message stands twice in the output under one id, whatever it says."""
    prove_output(left)
    for kind, name in (("packet", "packet_id"), ("receipt", "attempt_id"), ("notice", "notice_id")):
        by_id: dict[str, set[str]] = {}
        for body in left.sent(kind):
            by_id.setdefault(body[name], set()).add(json.dumps(body, sort_keys=True))
        assert {name for name, said in by_id.items() if len(said) > 1} == set()


@pytest.mark.parametrize("place", [0.0, 0.25, 0.5, 0.99])
async def test_what_a_damaged_log_lost_comes_again_from_the_stream(
    place: float, calm: Left, tmp_path: Path
) -> None:
    messages = voyage_events()
    with NatsServer() as server:
        async with at_sea(server, tmp_path / "daemon", SHORT_LEASE) as (daemon, link):
            replay = player(link)
            await replay.feed(messages[:230])
            before = await gather(link, daemon.data_dir, RUN)
            daemon.kill9()
            log = daemon.data_dir / "watchkeeper.db-wal"
            size = flip(log, place)
            print(f"log of {size} bytes, database of {(daemon.data_dir / 'watchkeeper.db').stat().st_size}")
            daemon.start()
            await daemon.owning()
            again = await gather(link, daemon.data_dir, RUN)
            for l in (before, again):
                print([(c.version, c.covers_through, c.checkpoint_id[:8]) for c in l.checkpoints], len(l.receipts), [(p["reason"], p["checkpoint"] and p["checkpoint"]["version"], p["epoch"]) for p in l.sent("packet")])
            assert again.ledger == before.ledger
            assert again.digest == before.digest
            assert again.told["hash_chain"] == before.told["hash_chain"]
            await replay.feed(messages[230:])
            await replay.finish()
            left = await laid_up(daemon, link)
    for l in (left, calm):
                print([(c.version, c.covers_through, c.checkpoint_id[:8]) for c in l.checkpoints], len(l.receipts), [(p["reason"], p["checkpoint"] and p["checkpoint"]["version"], p["epoch"]) for p in l.sent("packet")])
    prove_journal(left, published(messages))
    prove_coverage(left)
    prove_said_once(left)
    assert (left.outbox, left.open_attempts) == (0, [])
    assert left.digest == calm.digest
    assert comparable(left) == comparable(calm)
