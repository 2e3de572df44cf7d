"""A model behind the chat interface of OpenAI, or of any server that speaks it, as a summariser.

The answer is asked for as JSON of the draft's schema. The library sends, authenticates and names errors; what
came back is read here, by types, so that an odd server cannot surprise anyone. A client lives for one request.
"""

from __future__ import annotations

from typing import Final

import anyio
import msgspec
import openai
from msgspec import UNSET, Struct, UnsetType
from openai import AsyncOpenAI

from protocol.content import Count
from protocol.handoff import Projector
from protocol.summary import SummarizeReply, SummarizeRequest, Usage
from sidecar import tracing
from sidecar.config_shape import Summarizer as Settings
from sidecar.summarizers import SummarizerFailure, drafting, instructions
from sidecar.summarizers.tries import Errors, tried

_ERRORS: Final = Errors(
    openai.APIStatusError, openai.APITimeoutError, openai.APIConnectionError, openai.OpenAIError
)
_NO_KEY: Final = "none"
"""Servers of one's own often ask for none; the library insists on a text."""


class _Message(Struct, frozen=True):
    content: str | None = None
    refusal: str | None = None


class _Choice(Struct, frozen=True):
    message: _Message
    finish_reason: str | None = None


class _Usage(Struct, frozen=True):
    prompt_tokens: Count = 0
    completion_tokens: Count = 0


class _Completion(Struct, frozen=True):
    choices: tuple[_Choice, ...]
    usage: _Usage | UnsetType | None = UNSET


class OpenAISummarizer:
    """Asks a model for one draft. ``settings`` name model, address and key; the key is shown nowhere."""

    name = "openai"
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

    def _client(self) -> AsyncOpenAI:
        # Its own tries do not know our time limit: a long Retry-After would end as a time-out.
        return AsyncOpenAI(api_key=self._key, base_url=self._base_url, timeout=self._timeout, max_retries=0)

    async def _ask(self, client: AsyncOpenAI, request: SummarizeRequest) -> SummarizeReply:
        raw = await client.chat.completions.with_raw_response.create(
            model=self._model,
            extra_headers=tracing.headers(),
            messages=[
                {"role": "system", "content": request.instructions},
                {"role": "user", "content": drafting.question(request)},
            ],
            max_completion_tokens=drafting.output_bound(request),
            response_format={
                "type": "json_schema",
                "json_schema": {
                    "name": drafting.SCHEMA_NAME,
                    "description": drafting.SCHEMA_TEXT,
                    "schema": drafting.draft_schema(),
                    "strict": True,
                },
            },
        )
        return _read(bytes(raw.content))


def _read(payload: bytes) -> SummarizeReply:
    """The draft in an answer. Raises SummarizerFailure ``invalid`` for an answer of another shape."""
    try:
        completion = msgspec.json.decode(payload, type=_Completion)
        choice = completion.choices[0]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError) as error:
        raise SummarizerFailure("invalid", "the answer is no completion") from error
    told = completion.usage if isinstance(completion.usage, _Usage) else _Usage()
    usage = Usage(input_tokens=told.prompt_tokens, output_tokens=told.completion_tokens)
    if choice.finish_reason == "content_filter" or choice.message.refusal:
        return drafting.cut("refusal", usage)
    if choice.finish_reason == "length":
        return drafting.cut("length", usage)
    return drafting.drafted_text(choice.message.content or "", usage)
