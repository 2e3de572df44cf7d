"""A sample agent: brings a run to its end, asking before the one act that has an effect.

It needs nothing but nats-py. Started again for the same run, it goes on from the packet and repeats nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import uuid
from datetime import UTC, datetime
from typing import Any

import nats
from nats.aio.client import Client

TENANT = os.environ.get("TENANT", "default")
LANE = os.environ["LANE"]


class Run:
    """One run in one session: a process that starts again is another session of the same run."""

    def __init__(self, broker: Client, name: str) -> None:
        self._broker = broker
        self._where = f"{TENANT}.{LANE}.{name}"
        self._session = uuid.uuid4().hex
        self._numbers = itertools.count(1)

    async def tell(self, what: str, **fields: Any) -> int:
        """Publish one event; its place in the stream."""
        number = next(self._numbers)
        event = {
            "v": 1,
            "id": f"{self._session}-{number}",
            "type": what,
            "at": datetime.now(UTC).isoformat(),
            "session": self._session,
            "seq": number,
            **fields,
        }
        subject = f"wk.v1.in.{self._where}.event"
        return (await self._broker.jetstream().publish(subject, json.dumps(event).encode())).seq

    async def ask(self, verb: str, **fields: Any) -> dict[str, Any] | None:
        """Ask the lane's owner; None for a run it does not know. Anything else unclear: ask the same again."""
        subject = f"wk.v1.ask.{self._where}.{verb}"
        while True:
            try:
                reply = await self._broker.request(subject, json.dumps(fields).encode(), timeout=5)
            except (nats.errors.TimeoutError, nats.errors.NoRespondersError):
                await asyncio.sleep(1)
                continue
            answer: dict[str, Any] = json.loads(reply.data)
            if "error" not in answer:
                return answer
            if answer["error"]["code"] == "run_unknown":
                return None
            await asyncio.sleep(1)

    async def live(self) -> None:
        packet = await self.ask("packet")
        if packet is None:
            model = {"name": "sample", "context_window": 32_000}
            await self.tell("run.started", goal="Tag the release", model=model)
            await self.tell("message", role="user", content="Tag the release, please.")
            last = await self.tell(
                "operation.declared", operation_id="op-tag", kind="git.tag", idempotency_key="tag-1.4"
            )
        else:
            known = {"packet_id": packet["packet_id"], "ledger_version": packet["ledger_version"]}
            last = await self.tell("run.resumed", **known)
        # Another id in each session: what a dead process was allowed, it may have done.
        asked = f"{self._session}-tag"
        answer = await self.ask("authorize", operation_id="op-tag", request_id=asked, after=last)
        print("may I tag?", answer and answer["code"], flush=True)
        if answer and answer["allowed"]:
            await self.tell("tool.called", call_id="t-1", tool="git", arguments="tag", operation_id="op-tag")
            await self.tell("tool.returned", call_id="t-1", status="ok", content="created tag 1.4")
            await self.tell("operation.settled", operation_id="op-tag", state="succeeded")
            last = await self.tell("run.finished", outcome="succeeded")
        packet = await self.ask("packet", after=last)
        print("where the run stands:", packet and packet["verdict"], flush=True)


async def main() -> None:
    every = float(os.environ.get("EVERY_SECONDS", "0"))
    # A prefix of its own, so that it cannot read the answers given to others.
    broker = await nats.connect(
        os.environ["NATS_URL"],
        user_credentials=os.environ.get("NATS_CREDS"),
        inbox_prefix=f"_INBOX.{LANE}".encode(),
        max_reconnect_attempts=-1,
    )
    for number in itertools.count(1):
        name = os.environ["RUN"]
        await Run(broker, f"{name}-{number}" if every else name).live()
        if not every:
            break
        await asyncio.sleep(every)
    await broker.close()


asyncio.run(main())
