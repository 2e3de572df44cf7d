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
)
from support.links import eventually, linked
from support.nats_server import NatsServer
from support.voyage import BRIEF, RUN, at_sea, laid_up, player, published, voyage_events
from tests.support.blackbox import Box, Heard, event
from tests.support.blackbox import stored as stored_in
from tests.support.conversation import talk
from tests.support.summary_service import summary_service

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


def flip(log: Path, place: float, length: int = 64) -> None:
    """Flip bytes at this share of the file."""
    content = bytearray(log.read_bytes())
    first = int(place * (len(content) - length))
    for at in range(first, first + length):
        content[at] ^= 0xFF
    log.write_bytes(content)


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
            flip(log, place)
            daemon.start()
            await daemon.owning()
            again = await gather(link, daemon.data_dir, RUN)
            assert again.ledger == before.ledger
            assert again.digest == before.digest
            assert again.told["hash_chain"] == before.told["hash_chain"]
            assert again.checkpoints[-1].checkpoint_id == before.checkpoints[-1].checkpoint_id
            assert await daemon.metric("ledger_mismatches_total") == 0
            await replay.feed(messages[230:])
            await replay.finish()
            left = await laid_up(daemon, link)
    prove_journal(left, published(messages))
    prove_said_once(left)
    versions = [packet["checkpoint"]["version"] for packet in left.sent("packet") if packet["checkpoint"]]
    assert versions == sorted(versions)
    assert left.checkpoints[-1].version > before.checkpoints[-1].version
    assert (left.outbox, left.open_attempts) == (0, [])
    assert left.digest == calm.digest
    assert comparable(left) == comparable(calm)


# --- the clock ------------------------------------------------------------------------------------------------

HOUR = 3600.0
SHA = "sha256:" + "ab" * 32
IMPATIENT = {
    "OPERATIONS__UNKNOWN_AFTER_SECONDS": "2",
    "CALLS__ABANDON_AFTER_SECONDS": "2",
    "INTAKE__GAP_AFTER_SECONDS": "2",
}
CLOCKED = {"AUTHORITY__APPROVAL_KINDS": "db.*", "SUMMARIZER__KIND": "nats", "SUMMARIZER__FALLBACK": "none"}


@asynccontextmanager
async def clocked(folder: Path, settings: dict[str, str], shift: float = 0.0) -> AsyncIterator[Clocked]:
    """A daemon whose clock can be set."""
    with NatsServer() as server, DaemonProcess(server.url, folder, {**CLOCKED, **settings}) as daemon:
        daemon.start_shifted(shift)
        await daemon.owning()
        async with boxed(daemon) as box:
            yield Clocked(daemon, box)
        assert await daemon.stopped() == 0, daemon.log
        assert daemon.defects() == []
        assert daemon.starts == 1


class Clocked:
    """A daemon whose clock can be set, and runs whose permissions and waits depend on it."""

    def __init__(self, daemon: DaemonProcess, box: Box) -> None:
        self.daemon = daemon
        self.box = box

    async def approved(self, seconds: float) -> str:
        """A run with an operation whose approval expires so many seconds from now, by the right clock."""
        expires_at = (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")
        what = {"approval_id": "ap", "action": "db.x", "payload_digest": SHA, "expires_at": expires_at}
        run = await self.box.start()
        await self.box.tell(
            run,
            event(
                "operation.declared", operation_id="op", kind="db.x", idempotency_key="k", payload_digest=SHA
            ),
            event("approval.requested", operation_id="op", **what),
        )
        granted = event("approval.resolved", outcome="granted", by="ann", **what)
        await self.box.tell(run, granted, channel="authority")
        return run

    async def recorded(self, run: str, type: str) -> dict[str, Any]:
        """Wait until a record of this type stands in the run, and let the next answers include it."""
        found: list[dict[str, Any]] = []

        async def there() -> bool:
            found[:] = [item for item in await self.box.records(run) if item["type"] == type]
            return bool(found)

        await eventually(there, f"{type} of {run}")
        newest = await self.box.js.get_last_msg("WK_IN", f"wk.v1.in.{TENANT}.{LANE}.{run}.record")
        self.box.newest[run] = max(self.box.newest[run], newest.seq or 0)
        return found[0]

    async def flows(self) -> None:
        """A run that begins now is packed, and packed anew when it changes."""
        run = await self.box.start()
        await self.box.tell(run, event("question.opened", question_id="q", text="Still there?"))

        async def packed() -> bool:
            return any(packet["questions"] for packet in self.box.of(run, "packet"))

        await eventually(packed, "the packet with the question")

    async def may(self, run: str) -> str:
        """The code of an act on the run's operation; a look says the same before."""
        look = (await self.box.look(run, operation_id="op"))["code"]
        answer = await self.box.authorize(run, "op")
        assert answer["code"] == look
        assert answer["allowed"] == (look == "ok")
        return str(look)


@pytest.mark.parametrize("shift", [-HOUR, HOUR])
async def test_a_clock_that_jumps_gives_no_permission_and_holds_nothing_up(
    shift: float, tmp_path: Path
) -> None:
    async with clocked(tmp_path / "daemon", {}) as it:
        box, daemon = it.box, it.daemon
        epochs = await epochs_of(box)
        expired, soon = await it.approved(1), await it.approved(HOUR / 2)
        later = await it.approved(2 * HOUR)
        await it.recorded(expired, "approval.expired")
        waiting = await box.start()
        await box.tell(
            waiting,
            event("operation.declared", operation_id="op", kind="x", idempotency_key="k"),
            event("operation.dispatched", operation_id="op"),
            event("tool.called", call_id="c", tool="slow", arguments={}),
        )
        await box.status(waiting)

        daemon.set_clock(shift)
        await it.flows()
        assert await it.may(expired) == "approval_expired"
        if shift > 0:
            # The rule is the clock's: it takes away. What waits for an outcome has not waited for an hour.
            await it.recorded(soon, "approval.expired")
        assert await it.may(later) == "ok"
        assert await box.records(waiting) == []

        daemon.set_clock(0)
        await it.flows()
        assert await it.may(expired) == "approval_expired"
        assert await it.may(soon) == ("approval_expired" if shift > 0 else "ok")
        assert await it.may(later) == "in_flight"
        assert await box.records(waiting) == []
        assert [item["type"] for item in await box.records(expired)].count("approval.expired") == 1
        assert set(await epochs_of(box)) == set(epochs)
        await daemon.ready()


async def epochs_of(box: Box) -> list[int]:
    """Of the lane's records in the output, oldest first."""
    found = await stored_in(box.js, "WK_OUT", f"wk.v1.out.{TENANT}.{LANE}._lane.epoch")
    return [json.loads(payload)["epoch"] for _, payload, _ in found]


@pytest.mark.parametrize("shift", [-HOUR, HOUR])
@pytest.mark.parametrize("jumps", [True, False])
async def test_what_never_comes_is_given_up_in_its_time_whatever_the_clock_says(
    shift: float, jumps: bool, tmp_path: Path
) -> None:
    async with clocked(tmp_path / "daemon", IMPATIENT, 0 if jumps else shift) as it:
        box = it.box
        run = await box.start()
        await box.tell(
            run,
            event("operation.declared", operation_id="op", kind="x", idempotency_key="k"),
            event("operation.dispatched", operation_id="op"),
            event("tool.called", id="call", call_id="c", tool="slow", arguments={}),
            event("message", role="user", content="One.", session="s", seq=1),
            event("message", role="user", content="Three.", session="s", seq=3),
        )
        await box.status(run)
        if jumps:
            it.daemon.set_clock(shift)
        for type in ("operation.timed_out", "call.abandoned", "gap.declared"):
            await it.recorded(run, type)
        assert (await box.packet(run))["verdict"] == "pause"
        types = sorted(item["type"] for item in await box.records(run))
        assert types == ["call.abandoned", "gap.declared", "operation.timed_out"]


async def test_a_clock_set_back_makes_no_back_off_longer(tmp_path: Path) -> None:
    async with clocked(tmp_path / "daemon", {}) as it:
        told = await talk(it.box)
        await told.fill(0.8)
        # Nobody summarises yet.
        await it.box.hear(told.run, "receipt", outcome="failed", reason="unavailable")
        it.daemon.set_clock(-HOUR)
        async with summary_service(it.box.url):
            await it.box.hear(told.run, "receipt", outcome="applied")


# --- the disk -------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of this size; skips where it cannot be had."""
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("mounting a small tmpfs is not permitted here: run as root to test a full disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("point", ["full_before_rows", "full_before_commit"])
async def test_a_disk_full_while_a_checkpoint_commits_leaves_the_old_one_or_the_new(
    point: str, brief: Left, tmp_path: Path
) -> None:
    messages = voyage_events(BRIEF)
    with (
        small_disk(tmp_path / "disk", "32m") as disk,
        NatsServer() as server,
        DaemonProcess(server.url, tmp_path / "daemon", {"DATA_DIR": str(disk / "data")}) as daemon,
    ):
        daemon.data_dir = disk / "data"
        daemon.start_doomed(point)
        async with linked(server.url) as link:
            replay = player(link)
            with anyio.fail_after(200):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(replay.feed, messages)
                    await daemon.reached()
                    reason = await daemon.unready(f"storage {LANE}")
                    assert "space" in reason or "full" in reason
                    held = await gather(link, daemon.data_dir, RUN)
                    prove_one_side(held)
                    (disk / "filler").unlink()
                await replay.finish()
            await daemon.ready()
            assert daemon.starts == 1
            left = await laid_up(daemon, link)
    assert left.checkpoints[: len(held.checkpoints)] == held.checkpoints
    prove_whole(left, published(messages))
    assert left.digest == brief.digest
    assert comparable(left) == comparable(brief)


def prove_one_side(held: Left) -> None:
    """The commit of the first checkpoint is there as a whole, or nothing of it."""
    assert held.broken is None
    course = held.told["compaction"]
    if held.checkpoints:
        prove_coverage(held)
        (checkpoint,) = held.checkpoints
        assert course["checkpoint_id"] == checkpoint.checkpoint_id
        assert course["covers_through"] == checkpoint.covers_through
        assert held.open_attempts == []
    else:
        assert (course["checkpoint_id"], course["covers_through"]) == ("", 0)
        assert [item for item in held.receipts if item["outcome"] == "applied"] == []
        assert held.sent("packet", reason="compacted") == []


# --- the broker -----------------------------------------------------------------------------------------------


async def test_a_broker_that_comes_back_without_its_streams_is_waited_for(
    brief: Left, tmp_path: Path
) -> None:
    messages = voyage_events(BRIEF)
    with NatsServer() as server:
        async with at_sea(server, tmp_path / "daemon") as (daemon, link):
            replay = player(link)
            with anyio.fail_after(240):
                await replay.feed(messages[:70])
                server.kill9()
                server.jetstream = False
                server.start()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(replay.feed, messages[70:])
                    assert "JetStream" in await daemon.unready("nats")
                    answer = await daemon.get("/healthz")
                    assert answer is not None
                    assert answer.status_code == 200
                    server.kill9()
                    server.jetstream = True
                    server.start()
                    await daemon.owning()
                await replay.finish()
            assert daemon.starts == 1
            left = await laid_up(daemon, link)
    prove_whole(left, published(messages))
    assert left.digest == brief.digest
    assert comparable(left) == comparable(brief)


async def consumers(link: Link) -> list[str]:
    answer = await link.api("CONSUMER.NAMES.WK_IN")
    return [str(name) for name in answer.get("consumers") or []]


async def test_a_consumer_deleted_on_the_server_is_made_anew(brief: Left, tmp_path: Path) -> None:
    messages = voyage_events(BRIEF)
    marks = {10, 40, 41, 90, 120}
    with NatsServer() as server:
        async with at_sea(server, tmp_path / "daemon") as (daemon, link):
            replay = player(link)
            for place, message in enumerate(messages):
                if place in marks:
                    before = await consumers(link)
                    assert len(before) == 1
                    await link.api(f"CONSUMER.DELETE.WK_IN.{before[0]}")
                with anyio.fail_after(30):
                    await replay.feed([message])
            await replay.finish()
            assert await daemon.metric("consumer_restarts_total") == len(marks)
            assert daemon.starts == 1
            await daemon.ready()
            left = await laid_up(daemon, link)
    prove_whole(left, published(messages))
    assert left.digest == brief.digest
    assert comparable(left) == comparable(brief)
