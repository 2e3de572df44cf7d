"""Secrets that agents say never reach the disk, the log, the metrics, nor anybody who listens or asks."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from support.blackbox import blackbox, event, eventually
from support.daemon import DaemonProcess
from support.nats_server import NatsServer
from support.planted import Planted, planted

pytestmark = pytest.mark.anyio

RUN = "leaky"
COUNT = 200
DIGEST = "sha256:" + "ab" * 32
FILLER = "\nnothing to be done for this part of the tree" * 250
MODEL = {"name": "m", "context_window": 60_000}


def pieces(item: Planted) -> list[bytes]:
    """The secret, and every part of it long enough to be told from others."""
    parts = re.findall(r"[A-Za-z0-9]{12,}", item.secret)
    # The head of a JWT says only how it is signed.
    return [item.secret.encode(), *(part.encode() for part in parts if not part.startswith("eyJhbG"))]


def spoken(items: list[Planted]) -> list[dict[str, Any]]:
    """One message a secret, in every kind of field that takes free text."""
    numbers = itertools.count(1)

    def told(text: str, turn: int) -> list[dict[str, Any]]:
        name = f"n{next(numbers)}"
        forms: list[list[dict[str, Any]]] = [
            [event("message", role="user", content=text)],
            [event("message", role="assistant", content=[{"kind": "text", "text": text}])],
            [
                event("tool.called", call_id=name, tool="sh", arguments={"command": text, "env": [text]}),
                event("tool.returned", call_id=name, status="error", content=text + FILLER, conclusion=text),
            ],
            [event("step.changed", phase=text[:80], plan=[{"id": "p", "text": text, "state": "todo"}])],
            [event("step.changed", next_action={"verb": "edit", "detail": text}, uncertain=[text])],
            [event("decision.made", decision_id=name, summary=text, rejected=[{"alternative": text, "reason": text}])],
            [event("question.opened", question_id=name, text=text)],
            [event("constraint.set", constraint_id=name, text=f"Never say {text}", source="user")],
            [
                event("operation.declared", operation_id=name, kind="mail", idempotency_key=name, target=text,
                      description=text),
                event("operation.dispatched", operation_id=name),
                event("operation.settled", operation_id=name, state="unknown", receipt=text, detail=text),
            ],
            [event("approval.requested", approval_id=name, action="deploy", scope=text)],
            [event("artifact.saved", artifact_id=name, uri=f"file:///x?{text[:200]}", sha256=DIGEST, description=text)],
            [event("evidence.recorded", evidence_id=name, claim=text, kind="observed", source="event:e-1", value=text)],
            [event("message", role="tool", content=text)],
            [event("message", role="user", content="a field of a later version", note={"tool": text})],
        ]  # fmt: skip
        return forms[turn % len(forms)]

    return [message for turn, item in enumerate(items) for message in told(item.text, turn)]


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    client = await nats.connect(url)
    try:
        yield client
    finally:
        await client.close()


async def send(client: Client, run: str, message: dict[str, Any] | bytes) -> int:
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    ack = await client.jetstream().publish(f"wk.v1.in.default.main.{run}.event", body)
    return ack.seq


async def test_two_hundred_secrets_are_seen_nowhere(tmp_path: Path) -> None:
    items = planted(COUNT, seed=11)
    seen: list[bytes] = []
    async with AsyncExitStack() as stack:
        server = stack.enter_context(NatsServer())
        daemon = stack.enter_context(DaemonProcess(server.url, tmp_path, {"LOGS__LEVEL": "debug"}))
        daemon.start()
        client = await stack.enter_async_context(connected(server.url))

        async def note(message: Any) -> None:
            seen.append(message.subject.encode() + message.data)

        for space in ("wk.v1.out.>", "wk.v1.state.>"):
            await client.subscribe(space, cb=note)
        await client.flush()
        await daemon.owning()
        goal = f"Find out who said {items[0].text}"
        await send(client, RUN, event("run.started", goal=goal, done_when=[items[1].text], model=MODEL))
        last = 0
        for number, message in enumerate(spoken(items)):
            last = await send(client, RUN, message)
            if number == 220:
                # The window is full: packets, summaries and receipts are made of what was said.
                await send(client, RUN, event("boundary.marked", kind="turn_ended"))
                used = event("usage.reported", model="m", context_tokens=38_000 + number, output_tokens=10)
                last = await send(client, RUN, used)
        await send(client, RUN, json.dumps(event("message", role=items[2].secret, content="x")).encode())
        last = await send(client, RUN, event(items[3].secret.lower(), content="x"))

        async def ask(verb: str, **body: Any) -> bytes:
            subject = f"wk.v1.ask.default.main.{RUN}.{verb}"
            reply = await client.request(subject, json.dumps({"after": last, **body}).encode(), timeout=10)
            return reply.data

        async def caught_up() -> bool:
            return b'"error"' not in await ask("status")

        await eventually(caught_up, "everything read")

        async def taken_on() -> bool:
            # While old results are being cleared, which is no compaction, it is answered ``running``.
            seen.append(await ask("compact", reason=items[4].text))
            return bool(json.loads(seen[-1])["state"] != "running")

        await eventually(taken_on, "a compaction is taken on")
        seen.append(await ask("packet"))
        seen.append(await ask("status"))
        seen.append(await ask("context", format="openai"))
        for start in range(1, last, 20):
            span = {"from": start, "through": start + 19, "max_tokens": 8_000}
            seen += [await ask("fetch", **span)]
        for word in ("redacted", "password", "github", "key", items[5].secret):
            seen += [await ask("search", query=word)]
        metrics = await daemon.get("/metrics")
        assert metrics is not None
        counted = {
            kind: int(float(number))
            for kind, number in re.findall(r'redactions_total\{kind="(\w+)"\} (\S+)', metrics.text)
        }

        def receipts() -> int:
            return sum(b".receipt" in item[:80] for item in seen)

        await eventually(lambda: receipts() > 0, "a compaction")
        running = [path.read_bytes() for path in daemon.data_dir.glob("watchkeeper.db*")]
        assert await daemon.stopped() == 0, daemon.log
        places = {
            "what was sent and answered": b"\n".join(seen),
            "the files beside the running daemon": b"\n".join(running),
            "the files it left": b"\n".join(path.read_bytes() for path in daemon.data_dir.glob("watchkeeper.db*")),
            "the log": daemon.log.encode(),
            "the metrics": metrics.text.encode(),
        }  # fmt: skip
    assert b"[redacted:github_token]" in places["what was sent and answered"]
    assert b"[redacted:github_token]" in places["the files it left"]
    leaked = {
        (where, item.kind, number)
        for where, content in places.items()
        for number, item in enumerate(items)
        for part in pieces(item)
        if part in content
    }
    assert leaked == set()
    assert {kind for kind, number in counted.items() if number} >= {item.kind for item in items}
    assert sum(counted.values()) >= COUNT


async def test_rules_of_the_configuration_hold_and_the_message_is_known_again(tmp_path: Path) -> None:
    settings = {
        "redaction.patterns": [{"name": "badge", "regex": "BADGE-([0-9]{6})"}],
        "redaction.allow": "hunter2",
    }
    said = event("message", role="user", content="BADGE-123456, password=hunter2, password=hunter3")
    with NatsServer() as server:
        async with blackbox(server, tmp_path, settings) as box:
            run = await box.start()
            await box.send(run, said)
            await box.send(run, said)
            task = (await box.packet(run))["task"]
            assert [item["text"] for item in task["current_request"]] == [
                "BADGE-[redacted:badge], password=hunter2, password=[redacted:password]"
            ]
            assert await box.metric("events_duplicate_total") == 1
            assert await box.metric("redactions_total", kind="custom") == 1
            other = event(
                "message", said["id"], role="user", content="BADGE-654321, password=hunter2, password=hunter3"
            )
            sequence = await box.send(run, other)
            assert (await box.hear_rejected(run, sequence))["code"] == "duplicate_conflict"


async def test_a_new_owner_folds_the_same_texts_whatever_its_own_rules_are(tmp_path: Path) -> None:
    rules = {"redaction.patterns": [{"name": "badge", "regex": "BADGE-([0-9]{6})"}]}
    with NatsServer() as server:
        async with blackbox(server, tmp_path / "one", rules) as box:
            run = await box.start(goal="Let BADGE-123456 in")
            await box.tell(run, event("decision.made", decision_id="d", summary="BADGE-654321 stays out"))
            first = await box.packet(run)
        async with blackbox(server, tmp_path / "two", {"redaction.enabled": False}) as box:
            second = await box.packet(run)
            assert await box.metric("ledger_mismatches_total") == 0
            assert second["protected_digest"] == first["protected_digest"]
            assert second["task"]["goal"] == "Let BADGE-[redacted:badge] in"
            # From its own settings on its own rules hold.
            await box.tell(run, event("decision.made", decision_id="d2", summary="BADGE-111111 stays out"))
            decided = {item["id"]: item["summary"] for item in (await box.packet(run))["decisions"]}
            assert decided == {"d": "BADGE-[redacted:badge] stays out", "d2": "BADGE-111111 stays out"}
