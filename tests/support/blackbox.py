"""A daemon as an outsider meets it: a real broker, a daemon in this event loop, and a plain client.

Nothing here looks inside the daemon. What it publishes is heard by an ordinary subscription, what an agent
says goes out as bytes, and questions are ordinary requests.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import nats
from nats.aio.client import Client
from nats.js import JetStreamContext

from sidecar.app import Daemon, running
from sidecar.config import load_config
from sidecar.tracing import CARRIER, Tracer
from tests.support.nats_server import NatsServer

Json = dict[str, Any]
TENANT = "acme"
LANE = "main"
WAIT_SECONDS = 30.0
MODEL = {"name": "test-model", "context_window": 100_000, "max_output_tokens": 4_000}

_numbers = itertools.count(1)


def new_run(prefix: str = "run") -> str:
    """A run id nobody used before."""
    return f"{prefix}-{next(_numbers)}"


def now() -> str:
    """This moment as the wire writes it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def event(type: str, id: str | None = None, **fields: Any) -> Json:
    """One inbound message with a fresh id. A trailing underscore in a name is left away (``from_``)."""
    named = {name.rstrip("_"): value for name, value in fields.items()}
    return {"v": 1, "id": id or f"e-{next(_numbers)}", "type": type, "at": now(), **named}


@dataclass(frozen=True)
class Heard:
    """One message of the daemon."""

    subject: str
    body: Json
    headers: dict[str, str]
    raw: bytes

    @property
    def run(self) -> str:
        return self.subject.split(".")[5]

    @property
    def kind(self) -> str:
        """``packet``, ``receipt``, ``notice``, ``rejected``, ``epoch`` or ``state``."""
        parts = self.subject.split(".")
        return parts[6] if parts[2] == "out" else parts[2]


@dataclass(frozen=True)
class Answer:
    """A reply: its body, or the error its headers name."""

    body: Json
    status: str | None
    error: str | None

    @property
    def code(self) -> str | None:
        """The error code of the body, None for an answer."""
        return self.body["error"]["code"] if self.status is not None else None


@dataclass
class Box:
    """The broker, the daemon beside it, and one client of each kind of speaker."""

    url: str
    daemon: Daemon
    client: Client
    js: JetStreamContext
    data_dir: Path
    tenant: str = TENANT
    lane: str = LANE
    heard: list[Heard] = field(default_factory=list)
    newest: dict[str, int] = field(default_factory=dict)
    """By run: stream sequence of the newest message sent."""

    # --- speaking ---------------------------------------------------------------------------------------

    async def send(self, run: str, message: Json | bytes, channel: str = "event") -> int:
        """Publish one message; returns its stream sequence."""
        payload = message if isinstance(message, bytes) else json.dumps(message).encode()
        ack = await self.js.publish(f"wk.v1.in.{self.tenant}.{self.lane}.{run}.{channel}", payload)
        self.newest[run] = ack.seq
        return ack.seq

    async def tell(self, run: str, *messages: Json, channel: str = "event") -> int:
        """Publish in order; returns the last sequence."""
        last = 0
        for message in messages:
            last = await self.send(run, message, channel)
        return last

    async def start(self, run: str | None = None, **fields: Any) -> str:
        """Begin a run; returns its id."""
        run = run or new_run()
        await self.tell(run, event("run.started", **{"goal": "Ship it.", "model": MODEL, **fields}))
        return run

    # --- asking -----------------------------------------------------------------------------------------

    async def ask_once(
        self, run: str, verb: str, body: Json | bytes | None = None, client: Client | None = None
    ) -> Answer:
        """One request, as it is answered."""
        payload = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        subject = f"wk.v1.ask.{self.tenant}.{self.lane}.{run}.{verb}"
        reply = await (client or self.client).request(subject, payload, timeout=5)
        headers = dict(reply.headers or {})
        return Answer(
            body=json.loads(reply.data),
            status=headers.get("Nats-Service-Error-Code"),
            error=headers.get("Nats-Service-Error"),
        )

    async def ask(self, run: str, verb: str, client: Client | None = None, **body: Any) -> Answer:
        """A question about everything sent to the run so far; asked again as the protocol says."""
        if run in self.newest:
            body.setdefault("after", self.newest[run])
        with anyio.fail_after(WAIT_SECONDS):
            while True:
                with contextlib.suppress(nats.errors.NoRespondersError, nats.errors.TimeoutError):
                    answer = await self.ask_once(run, verb, body, client)
                    if answer.code not in ("unavailable", "behind"):
                        return answer
                await anyio.sleep(0.02)

    async def packet(self, run: str) -> Json:
        """The run's fresh packet, with everything sent so far in it."""
        return (await self.ask(run, "packet")).body

    async def status(self, run: str) -> Json:
        """How the run stands, with everything sent so far in it."""
        return (await self.ask(run, "status")).body

    async def authorize(self, run: str, operation: str, request: str | None = None, **more: Any) -> Json:
        """An act, with a request id of its own unless one is given."""
        more |= {"operation_id": operation, "request_id": request or f"rq-{next(_numbers)}"}
        answer = await self.ask(run, "authorize", **more)
        assert answer.status is None, answer
        return answer.body

    async def look(self, run: str, **more: Any) -> Json:
        """A look: ``dry_run`` for an operation, else by kind and key."""
        if "operation_id" in more:
            more["dry_run"] = True
        answer = await self.ask(run, "authorize", **more)
        assert answer.status is None, answer
        return answer.body

    async def settled(self, run: str) -> Json:
        """Wait until the run is read and no compaction of it is due or under way; its status then."""
        found: list[Json] = []

        async def quiet() -> bool:
            found.append(await self.status(run))
            return found[-1]["compaction"]["state"] not in ("due", "running")

        await eventually(quiet, f"run {run} settles")
        return found[-1]

    # --- hearing ----------------------------------------------------------------------------------------

    def of(self, run: str, kind: str, /, **wanted: Any) -> list[Json]:
        """Bodies heard so far of that run and kind whose fields have these values."""
        return [
            item.body
            for item in self.heard
            if item.run == run
            and item.kind == kind
            and all(item.body.get(name) == value for name, value in wanted.items())
        ]

    async def hear(self, run: str, kind: str, number: int = 1, /, **wanted: Any) -> list[Json]:
        """Wait for that many such messages."""
        what = f"{number} {kind} of {run} with {wanted}"
        await eventually(lambda: len(self.of(run, kind, **wanted)) >= number, what)
        return self.of(run, kind, **wanted)

    async def hear_rejected(self, run: str, sequence: int) -> Json:
        """Wait for the answer to the message with this stream sequence."""
        return (await self.hear(run, "rejected", stream_seq=sequence))[0]

    async def records(self, run: str) -> list[Json]:
        """The record messages of a run in the stream, oldest first."""
        subject = f"wk.v1.in.{self.tenant}.{self.lane}.{run}.record"
        return [json.loads(data) for _, data, _ in await stored(self.js, "WK_IN", subject)]

    async def connect(self) -> Client:
        """Another connection; close it yourself."""
        return await nats.connect(self.url)

    # --- operating --------------------------------------------------------------------------------------

    async def get(self, path: str) -> httpx.Response:
        """One page of the admin port."""
        async with httpx.AsyncClient() as http:
            return await http.get(f"http://{self.daemon.listening}{path}")

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of the series of that name (without the prefix) that carry these labels."""
        total = 0.0
        for line in (await self.get("/metrics")).text.splitlines():
            match = re.fullmatch(rf"watchkeeper_{name}(?:\{{(.*)\}})? (\S+)", line)
            if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
                total += float(match[2])
        return total


async def stored(js: JetStreamContext, stream: str, subject: str) -> list[tuple[int, bytes, dict[str, str]]]:
    """Every stored message of a subject: sequence, payload, headers."""
    found: list[tuple[int, bytes, dict[str, str]]] = []
    following = 1
    while True:
        try:
            message = await js.get_msg(stream, seq=following, subject=subject, next=True)
        except nats.js.errors.NotFoundError:
            return found
        assert message.seq is not None
        found.append((message.seq, message.data or b"", dict(message.headers or {})))
        following = message.seq + 1


async def eventually(condition: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS) -> None:
    """Poll until the condition (a function, or one to be awaited) holds. Raises AssertionError."""
    deadline = anyio.current_time() + seconds
    while True:
        held = condition()
        if not isinstance(held, bool):
            held = await held
        if held:
            return
        assert anyio.current_time() < deadline, f"{what} did not happen within {seconds:g} s"
        await anyio.sleep(0.01)


def overrides(url: str, folder: Path, settings: Json) -> Json:
    """The settings every box has, and those of this one."""
    return {
        "nats.url": url,
        "data_dir": str(folder / "data"),
        "tenant": TENANT,
        "lanes": LANE,
        "admin.listen": "127.0.0.1:0",
        "mode": "live",
        **settings,
    }


@asynccontextmanager
async def blackbox(
    server: NatsServer,
    folder: Path,
    settings: Json | None = None,
    rules: Iterable[Json] = (),
    tracer: Tracer = CARRIER,
) -> AsyncIterator[Box]:
    """A daemon on this broker with these settings (dotted keys), and a client that hears all it says."""
    file = None
    if rules:
        file = folder / "watchkeeper.toml"
        file.write_text("".join(_rule(rule) for rule in rules))
    config = load_config(file, {}, overrides(server.url, folder, settings or {}))
    client = await nats.connect(server.url)
    heard: list[Heard] = []

    async def note(message: Any) -> None:
        body = json.loads(message.data)
        heard.append(Heard(message.subject, body, dict(message.headers or {}), message.data))

    try:
        for space in ("wk.v1.out.>", "wk.v1.state.>"):
            await client.subscribe(space, cb=note)
        await client.flush()
        async with running(config, tracer) as daemon:
            box = Box(server.url, daemon, client, client.jetstream(), folder / "data", heard=heard)
            await eventually(lambda: bool(daemon.listening) and daemon.health.ready().ready, "readiness")
            yield box
    finally:
        await client.close()


def _rule(rule: Json) -> str:
    lines = ["[[rules]]"]
    for name, value in rule.items():
        shown = json.dumps(value)
        if isinstance(value, dict):
            shown = "{" + ", ".join(f"{key} = {json.dumps(text)}" for key, text in value.items()) + "}"
        lines.append(f"{name} = {shown}")
    return "\n".join(lines) + "\n"


def words(tokens: int, seed: str = "w") -> str:
    """Prose of that many tokens by the estimate of four bytes each, different for each seed."""
    lines = []
    size = 0
    for number in itertools.count():
        line = f"{seed} line {number} says what was seen.\n"
        lines.append(line)
        size += len(line)
        if size >= tokens * 4:
            return "".join(lines)[: tokens * 4]
    raise AssertionError


def decoded(raw: bytes) -> Json:
    """A JSON object of the wire."""
    value: Json = msgspec.json.decode(raw)
    return value
