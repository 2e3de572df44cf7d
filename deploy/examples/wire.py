"""An agent with nothing but nats-py: it publishes what happens, asks before it acts, and takes packets up.

    watchkeeper run --embedded-nats                           # its log names the broker's address
    python deploy/examples/wire.py nats://127.0.0.1:PORT

For a language without a client of ours. Run it a second time: the tag is not made again.
"""

from __future__ import annotations

import asyncio
import datetime
import itertools
import json
import sys
import uuid
from typing import Any

import nats

WHERE = "default.main.first-watch"  # tenant, lane, run
RULE = {"id": "c-1", "text": "Never push to main.", "source": "user", "forbids": {"kinds": ["git.push_main"]}}


async def main(url: str) -> None:
    broker, numbers, session = await nats.connect(url), itertools.count(1), uuid.uuid4().hex[:8]

    async def tell(what: str, **fields: Any) -> int:
        """Publish one event; returns its place in the stream."""
        n, at = next(numbers), datetime.datetime.now(datetime.UTC).isoformat()
        head = {"v": 1, "id": f"{session}-{n}", "type": what, "at": at, "session": session, "seq": n}
        event = json.dumps(head | fields).encode()
        return (await broker.jetstream().publish(f"wk.v1.in.{WHERE}.event", event)).seq

    async def ask(verb: str, **fields: Any) -> Any:
        body = json.dumps(fields).encode()
        return json.loads((await broker.request(f"wk.v1.ask.{WHERE}.{verb}", body, timeout=5)).data)

    model = {"name": "any", "context_window": 32_000}
    await tell("run.started", goal="Tag 1.4", constraints=[RULE], model=model)
    last = await tell("message", role="user", content="Tag the release, please.")

    async def may(after: int) -> Any:
        """The same question is asked again under the same request_id until it is answered."""
        return await ask("authorize", operation_id="op-tag", request_id=f"{session}-{after}", after=after)

    if (answer := await may(last))["code"] == "unknown_operation":  # declare it once
        last = await tell(
            "operation.declared", operation_id="op-tag", kind="git.tag", idempotency_key="tag-1.4"
        )
        answer = await may(last)
    print("may I?", answer["code"])
    if answer["allowed"]:  # this `ok` is the one permission: act now, then say what came of it
        call_id = f"{session}-t1"
        await tell("tool.called", call_id=call_id, tool="git", arguments="tag 1.4", operation_id="op-tag")
        await tell("tool.returned", call_id=call_id, status="ok", content="created tag 1.4")
        last = await tell("operation.settled", operation_id="op-tag", state="succeeded")

    packet = await ask("packet", after=last)  # packets also come by themselves, on wk.v1.out.<WHERE>.packet
    print(packet["text"])  # the model reads this instead of the messages the checkpoint covers
    last = await tell("run.resumed", packet_id=packet["packet_id"], ledger_version=packet["ledger_version"])
    print("again?", (await may(last))["code"])
    await broker.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
