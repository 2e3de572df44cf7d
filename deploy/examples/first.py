import asyncio
import sys

from protocol.client import NotAllowed, connect


async def main(url: str) -> None:
    async with connect(url, run="second-watch") as run:  # tenant "default", lane "main"
        await run.run_started(goal="Tag 1.4", model={"name": "any", "context_window": 32_000})
        await run.message("user", "Tag the release, please.")
        try:
            async with run.effect("git.tag", "tag-1.4") as effect:  # entered once, whoever asks
                operation = effect.operation_id
                await run.tool_called(call_id="t-1", tool="git", arguments="tag 1.4", operation_id=operation)
                await run.tool_returned(call_id="t-1", status="ok", content="created tag 1.4")
                effect.succeeded(receipt="refs/tags/1.4")  # left by an error it is `unknown`
        except NotAllowed as no:  # done before, forbidden, not approved, or nobody could say
            print("not allowed:", no.permission.code)
        if packet := run.context_due:  # look here between two model requests
            messages = (await run.context("openai")).messages  # take the place of your own list
            print(len(messages), "messages instead of the whole history")
            await run.take_up(packet)
        print((await run.fresh_packet()).text)


asyncio.run(main(sys.argv[1]))
