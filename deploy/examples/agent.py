"""A small agent: a loop of model and tools that keeps its commitments while its context is shortened under it.

    watchkeeper run --embedded-nats                           # its log names the broker's address
    python deploy/examples/agent.py nats://127.0.0.1:PORT

The model is a script that reads files and at last sends one mail, so that this runs without a key. Put yours in the
place of ``model``; the rest is what an agent does beside it. Run it a second time: the mail is not sent again.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from protocol.client import NotAllowed, Run, connect

WINDOW = 20_000
FILES = 40
RULE = {
    "id": "c-quiet",
    "text": "Never write to customers.",
    "source": "user",
    "forbids": {"kinds": ["mail.customer"]},
}


async def model(messages: list[dict[str, Any]], turn: int) -> tuple[str, str, dict[str, str]]:
    """What to say, which tool to call, with what: here by a script, whatever the messages are."""
    await asyncio.sleep(0.05)
    if turn < FILES:
        return f"Now file {turn}.", "read_file", {"path": f"/logs/{turn}.txt"}
    return "All read, the summary can go out.", "send_mail", {"to": "ops@example.org"}


def tool(name: str, arguments: dict[str, str]) -> str:
    """Does what the model asked for: here, nothing but saying so."""
    if name == "send_mail":
        print("MAIL SENT to", arguments["to"])
        return "250 queued"
    return f"{arguments['path']}: " + "all quiet at this hour. " * 80


def tokens(messages: list[dict[str, Any]]) -> int:
    """Take the figure your provider reports instead."""
    return sum(len(str(message.get("content") or "")) for message in messages) // 4


async def renewed(run: Run, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Between two model requests: the shorter list, if the daemon has made one."""
    packet = run.context_due
    if packet is None:
        return messages
    context = await run.context("openai")
    await run.take_up(packet)
    print(f"context: {tokens(messages)} -> {context.tokens} tokens, verdict {packet.verdict}")
    return list(context.messages)


async def call(run: Run, number: int, name: str, arguments: dict[str, str]) -> str:
    """One tool call and its result. What has an effect in the world is done under guard, once."""
    call_id = f"{run.session}-{number}"
    if name != "send_mail":
        await run.tool_called(call_id=call_id, tool=name, arguments=arguments)
        result = tool(name, arguments)
        await run.tool_returned(call_id=call_id, status="ok", content=result)
        return result
    try:
        async with run.effect("mail.ops", "night-summary", target=arguments["to"], tool=name) as effect:
            await run.tool_called(
                call_id=call_id, tool=name, arguments=arguments, operation_id=effect.operation_id
            )
            result = tool(name, arguments)
            await run.tool_returned(call_id=call_id, status="ok", content=result)
            effect.succeeded(receipt=result)
            return result
    except NotAllowed as no:
        return f"not done: {no}"


async def main(url: str, name: str) -> None:
    async with connect(url, run=name) as run:
        await run.run_started(
            goal="Read the night's logs and mail a summary to ops.",
            model={"name": "scripted", "context_window": WINDOW, "max_output_tokens": 1_000},
            constraints=[RULE],
        )
        task = "Read all logs, then mail the summary to ops, once."
        await run.message("user", task)
        messages: list[dict[str, Any]] = [{"role": "user", "content": task}]
        for turn in range(FILES + 1):
            messages = await renewed(run, messages)
            said, tool_name, arguments = await model(messages, turn)
            asked = await run.message("assistant", said)
            await run.usage_reported(
                model="scripted", context_tokens=tokens(messages), output_tokens=10, through=asked.event_id
            )
            result = await call(run, turn, tool_name, arguments)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": result}]
        print("the last result:", messages[-1]["content"])
        print((await run.fresh_packet()).text.splitlines()[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", nargs="?", default="nats://127.0.0.1:4222")
    parser.add_argument("--run", default="night-logs", help="a name of your own for the run")
    given = parser.parse_args()
    asyncio.run(main(given.url, given.run))
