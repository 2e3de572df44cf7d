"""A model behind Anthropic's messages interface as a summariser: the draft comes as the input of a tool.

The model must use the one tool there is, whose input has the draft's schema. The library sends, authenticates
and names errors; what came back is read here, by types. A client lives for one request.
"""

from __future__ import annotations

from typing import Any, Final

import anthropic
import anyio
import msgspec
from anthropic import AsyncAnthropic
from msgspec import Struct

from protocol.content import Count
from protocol.handoff import Projector
from protocol.summary import SummarizeReply, SummarizeRequest, Usage
from sidecar import tracing
from sidecar.config_shape import Summarizer as Settings
from sidecar.summarizers import SummarizerFailure, drafting, instructions
from sidecar.summarizers.tries import Errors, tried

_ERRORS: Final = Errors(
    anthropic.APIStatusError,
    anthropic.APITimeoutError,
    anthropic.APIConnectionError,
    anthropic.AnthropicError,
)
_NO_KEY: Final = "none"
_CUT: Final = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "refusal",
}


class _Block(Struct, frozen=True):
    type: str
    name: str = ""
    input: Any = None
    text: str = ""


class _Usage(Struct, frozen=True):
    input_tokens: Count = 0
    output_tokens: Count = 0
    cache_creation_input_tokens: Count | None = None
    cache_read_input_tokens: Count | None = None


class _Message(Struct, frozen=True):
    content: tuple[_Block, ...]
    stop_reason: str | None = None
    usage: _Usage = _Usage()


class AnthropicSummarizer:
    """Asks a model for one draft. ``settings`` name model, address and key; the key is shown nowhere."""

    name = "anthropic"
    instructions = instructions.INSTRUCTIONS

    def __init__(self, settings: Settings) -> None:
        self._model = settings.model or ""
        self._base_url = settings.base_url
        self._key = settings.api_key or _NO_KEY
        self._timeout = settings.timeout_seconds
        self.window_tokens = settings.window_tokens - drafting.schema_tokens()
        self.projector = Projector(
            version=instructions.VERSION, model=self._model, instructions_digest=instructions.DIGEST
        )

    async def summarize(self, request: SummarizeRequest) -> SummarizeReply:
        """One draft; a passing trouble is tried once more. Raises SummarizerFailure."""
        client = await anyio.to_thread.run_sync(self._client)
        async with client:
            return await tried(_ERRORS, lambda: self._ask(client, request))

    def _client(self) -> AsyncAnthropic:
        # Its own tries do not know our time limit: a long Retry-After would end as a time-out.
        return AsyncAnthropic(
            api_key=self._key,
            base_url=self._base_url,
            timeout=self._timeout,
            max_retries=0,
            # What a variable of the environment could turn on: the record in somebody's traces.
            open_telemetry=False,
        )

    async def _ask(self, client: AsyncAnthropic, request: SummarizeRequest) -> SummarizeReply:
        raw = await client.messages.with_raw_response.create(
            model=self._model,
            extra_headers=tracing.headers(),
            max_tokens=drafting.output_bound(request),
            system=request.instructions,
            messages=[{"role": "user", "content": drafting.question(request)}],
            tools=[
                {
                    "name": drafting.SCHEMA_NAME,
                    "description": drafting.SCHEMA_TEXT,
                    "input_schema": drafting.draft_schema(),
                }
            ],
            tool_choice={"type": "tool", "name": drafting.SCHEMA_NAME, "disable_parallel_tool_use": True},
        )
        return _read(await raw.read())


def _read(payload: bytes) -> SummarizeReply:
    """The draft in an answer. Raises SummarizerFailure ``invalid`` for an answer of another shape."""
    try:
        message = msgspec.json.decode(payload, type=_Message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SummarizerFailure("invalid", "the answer is no message") from error
    told = message.usage
    cached = (told.cache_creation_input_tokens or 0) + (told.cache_read_input_tokens or 0)
    usage = Usage(input_tokens=told.input_tokens + cached, output_tokens=told.output_tokens)
    if message.stop_reason in _CUT:
        return drafting.cut(_CUT[message.stop_reason], usage)
    for block in message.content:
        if block.type == "tool_use" and block.name == drafting.SCHEMA_NAME:
            return drafting.drafted(block.input, usage)
    # No tool was used: whatever was written instead is no summary, and is counted as one that is not.
    return drafting.drafted_text("".join(block.text for block in message.content), usage)
