"""The loops the daemon is held against, each a process of its own. They keep nothing but rows.

``bare``: a pull pump of one's own without acknowledgements, batches of 256, decoding, one transaction with one
hop to the database's thread, ``synchronous=FULL``; event rows unique by (run, seq), one ledger row a run.
``plain``: the same without the unique index, which therefore knows no duplicate.
``needed``: ``bare`` with what the daemon's rules cannot do without, by the daemon's own functions: its decoder with
its checks, the digest and the chain of digests, the scan for secrets. No ledger, no budget: how fast a loop in one
interpreter could be if those cost nothing.
``obvious``: ``fetch(256)`` on a durable consumer, the same tables awaited statement by statement through
aiosqlite, then an acknowledgement for each message.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import resource
import sqlite3
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiosqlite
import msgspec
import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import api

from benchmarks.talking import Json, Marks, cpu_seconds, say, serve
from protocol.codec import decode_event
from protocol.detectors import all_hinted

BATCH = 256
_AHEAD = 2
_TABLES = """
CREATE TABLE IF NOT EXISTS event(
  pos INTEGER PRIMARY KEY, run TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL, at TEXT NOT NULL,
  body BLOB NOT NULL{unique});
CREATE TABLE IF NOT EXISTS ledger(
  run TEXT PRIMARY KEY, used INTEGER NOT NULL, n INTEGER NOT NULL, last INTEGER NOT NULL) WITHOUT ROWID;
"""
_EVENT = "INSERT INTO event VALUES(?,?,?,?,?,?) ON CONFLICT DO NOTHING"
_LEDGER = (
    "INSERT INTO ledger VALUES(?,?,?,?) ON CONFLICT(run) DO UPDATE SET "
    "used=used+excluded.used, n=n+excluded.n, last=max(last,excluded.last)"
)


class _Envelope(msgspec.Struct, tag_field="type", frozen=True):
    id: str
    at: str
    session: str
    seq: int


class Started(_Envelope, tag="run.started"):
    goal: str
    model: msgspec.Raw


class Said(_Envelope, tag="message"):
    role: str
    content: str


class Called(_Envelope, tag="tool.called"):
    call_id: str
    tool: str
    arguments: msgspec.Raw


class Returned(_Envelope, tag="tool.returned"):
    call_id: str
    status: str
    content: str


class Used(_Envelope, tag="usage.reported"):
    model: str
    context_tokens: int
    output_tokens: int


class Stepped(_Envelope, tag="step.changed"):
    phase: str
    plan: msgspec.Raw


class Declared(_Envelope, tag="operation.declared"):
    operation_id: str
    kind: str


class Dispatched(_Envelope, tag="operation.dispatched"):
    operation_id: str


class Settled(_Envelope, tag="operation.settled"):
    operation_id: str
    state: str


class Recorded(_Envelope, tag="evidence.recorded"):
    claim: str


class Decided(_Envelope, tag="decision.made"):
    summary: str


_DECODER = msgspec.json.Decoder(
    Started | Said | Called | Returned | Used | Stepped | Declared | Dispatched | Settled | Recorded | Decided
)
Stored = tuple[int, str, int, str, str, bytes]


def row(message: Msg) -> Stored:
    """One message decoded, as it is stored."""
    event = _DECODER.decode(message.data)
    # $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>
    position = int(message.reply.split(".")[5])
    kind = event.__struct_config__.tag
    return (position, message.subject.split(".")[-2], event.seq, str(kind), event.at, message.data)


class Needed:
    """What stands behind every rule, message by message; what comes of it is thrown away."""

    def __init__(self) -> None:
        self._chains: dict[str, bytes] = {}

    def look(self, messages: Sequence[Msg]) -> None:
        for message in messages:
            run = message.subject.split(".")[-2]
            decode_event(message.data, run=run, channel="event", max_bytes=1 << 20)
            digest = hashlib.sha256(message.data).digest()
            self._chains[run] = hashlib.sha256(self._chains.get(run, b"") + digest).digest()
        all_hinted([message.data for message in messages])


def ledger_rows(rows: Sequence[Stored]) -> list[tuple[str, int, int, int]]:
    """A batch folded to one row a run."""
    sums: dict[str, list[int]] = {}
    for _, run, seq, _, _, body in rows:
        of = sums.setdefault(run, [0, 0, 0])
        of[0] += len(body) // 4
        of[1] += 1
        of[2] = max(of[2], seq)
    return [(run, used, count, last) for run, (used, count, last) in sums.items()]


def write(connection: sqlite3.Connection, rows: Sequence[Stored]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.executemany(_EVENT, rows)
        connection.executemany(_LEDGER, ledger_rows(rows))
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


class Pump:
    """Pull requests kept ahead on one inbox; a callback fills a box; ``next`` takes what has arrived."""

    def __init__(self, client: Client, stream: str, subject: str, start: int) -> None:
        self._client, self._stream, self._subject, self._start = client, stream, subject, start
        self._box: deque[Msg] = deque()
        self._arrived = asyncio.Event()
        self._owed = 0

    async def open(self) -> None:
        info = await self._client.jetstream().add_consumer(
            self._stream,
            api.ConsumerConfig(
                deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=self._start,
                ack_policy=api.AckPolicy.NONE,
                filter_subject=self._subject,
                inactive_threshold=300,
                mem_storage=True,
                num_replicas=1,
            ),
        )
        self._pull = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{info.name}"
        self._inbox = self._client.new_inbox()
        await self._client.subscribe(
            self._inbox, cb=self._receive, pending_msgs_limit=-1, pending_bytes_limit=-1
        )
        await self._top_up()

    async def _receive(self, message: Msg) -> None:
        if message.reply:
            self._box.append(message)
            self._arrived.set()
        elif message.headers:
            self._owed -= int(message.headers.get("Nats-Pending-Messages", 0))
            self._arrived.set()

    async def _top_up(self) -> None:
        want = BATCH * _AHEAD - len(self._box) - self._owed
        if want >= BATCH:
            self._owed += want
            body = json.dumps({"batch": want, "expires": 30_000_000_000}).encode()
            await self._client.publish(self._pull, body, reply=self._inbox)

    async def next(self) -> list[Msg]:
        if not self._box:
            self._arrived.clear()
            await self._top_up()
            await self._arrived.wait()
        count = min(BATCH, len(self._box))
        taken = [self._box.popleft() for _ in range(count)]
        self._owed -= count
        await self._top_up()
        return taken


async def run_pump(client: Client, given: argparse.Namespace, database: Any, marks: Marks) -> None:
    """Receive, decode, one transaction, for ever."""
    needed = Needed() if given.kind == "needed" else None
    pump = Pump(client, given.stream, given.subject, given.start)
    await pump.open()
    # As the daemon does, which stores where it begins: the first transaction is part of what is measured.
    marks.mark(given.start - 1)
    while True:
        messages = await pump.next()
        if messages:
            if needed is not None:
                needed.look(messages)
            rows = [row(message) for message in messages]
            await database._execute(write, database._conn, rows)
            marks.mark(rows[-1][0])


async def run_obvious(client: Client, given: argparse.Namespace, database: Any, marks: Marks) -> None:
    """What one writes first, done without a mistake."""
    subscription = await client.jetstream().pull_subscribe(
        given.subject,
        durable="obvious",
        stream=given.stream,
        config=api.ConsumerConfig(
            ack_policy=api.AckPolicy.EXPLICIT,
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=given.start,
            max_ack_pending=20_000,
            ack_wait=60,
        ),
    )
    marks.mark(given.start - 1)
    while True:
        try:
            messages = await subscription.fetch(BATCH, timeout=1)
        except nats.errors.TimeoutError:
            continue
        rows = [row(message) for message in messages]
        await database.execute("BEGIN IMMEDIATE")
        await database.executemany(_EVENT, rows)
        await database.executemany(_LEDGER, ledger_rows(rows))
        await database.execute("COMMIT")
        marks.mark(rows[-1][0])
        for message in messages:
            await message.ack()


async def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.pump_child")
    parser.add_argument("kind", choices=["bare", "plain", "needed", "obvious"])
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stream", default="WK_IN")
    parser.add_argument("--subject", default="wk.v1.in.acme.main.*.event")
    parser.add_argument("--start", type=int, default=1)
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    client = await nats.connect(given.url, pending_size=64 * 1024 * 1024, max_reconnect_attempts=-1)
    database: Any = await aiosqlite.connect(given.folder / "events.db", isolation_level=None)
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "cache_size=-32768"):
        await database.execute(f"PRAGMA {pragma}")
    unique = "" if given.kind == "plain" else ", UNIQUE(run, seq)"
    await database.executescript(_TABLES.format(unique=unique))
    marks = Marks()

    async def act(message: Json) -> Json:
        match message["do"]:
            case "wait":
                return await marks.wait(message["sequence"], message["seconds"])
            case "marks":
                return marks.drain()
            case "cost":
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                return {"cpu": cpu_seconds(), "peak_mib": peak}
        raise ValueError(message["do"])

    work = asyncio.create_task(
        (run_obvious if given.kind == "obvious" else run_pump)(client, given, database, marks)
    )
    asked = asyncio.create_task(serve(act))
    done, _ = await asyncio.wait([work, asked], return_when=asyncio.FIRST_COMPLETED)
    for task in (work, asked):
        task.cancel()
    for task in done:
        if (error := task.exception()) is not None:
            say({"error": repr(error)})
    with contextlib.suppress(Exception):
        await client.close()
    await database.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
