"""A model provider on a loopback port: the wire of the two interfaces, answering as a test says.

Real HTTP to the real client libraries. Where nothing is said it answers with a sound draft.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from protocol.codec import encode
from protocol.summary import SummarizeRequest
from sidecar.core.digest import digest

Json = dict[str, Any]
PATHS = {"openai": "/v1/chat/completions", "anthropic": "/v1/messages"}


@dataclass
class Call:
    """One request: its headers and body, and the record it brings."""

    kind: str
    headers: dict[str, str]
    body: Json

    @property
    def question(self) -> str:
        content = self.body["messages"][-1]["content"]
        assert isinstance(content, str)
        return content

    @property
    def record(self) -> Json:
        """The data after the one line that says it is data."""
        value: Json = json.loads(self.question.split("\n", 1)[1])
        return value

    def summary(self) -> Json:
        """A sound summary of the record."""
        record = self.record
        fields = {"attempt_id": "", "run": "r", "instructions": "", "instructions_digest": "", **record}
        request = msgspec.json.decode(json.dumps(fields).encode(), type=SummarizeRequest)
        value: Json = json.loads(encode(digest(request)))
        return value

    def draft(self) -> Json:
        """The same as a model writes it: states as lists."""
        value = self.summary()
        for name in ("operations", "approvals"):
            value[name] = [{"id": key, "state": state} for key, state in value[name].items()]
        return value


Behaviour = Callable[[Call], Awaitable[Response]]


@dataclass
class Provider:
    """``then`` are the behaviours of the next requests, ``always`` that of all others."""

    url: str
    then: list[Behaviour] = field(default_factory=list)
    always: Behaviour | None = None
    calls: list[Call] = field(default_factory=list)

    async def answer(self, call: Call) -> Response:
        self.calls.append(call)
        behaviour = self.then.pop(0) if self.then else self.always or sound
        return await behaviour(call)

    def base_url(self, kind: str) -> str:
        """The address as this provider's users write it."""
        return f"{self.url}/v1" if kind == "openai" else self.url


def completion(content: Any, finish: str = "stop", refusal: str | None = None) -> Json:
    """An answer of the chat interface."""
    message = {"role": "assistant", "content": content, "refusal": refusal}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": {"prompt_tokens": 900, "completion_tokens": 80, "total_tokens": 980},
    }


def message(blocks: list[Json], stop: str = "tool_use") -> Json:
    """An answer of the messages interface."""
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": blocks,
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": {
            "input_tokens": 500,
            "cache_read_input_tokens": 300,
            "cache_creation_input_tokens": 100,
            "output_tokens": 80,
        },
    }


def tool_use(value: Any, name: str = "handover_summary") -> Json:
    return {"type": "tool_use", "id": "toolu_1", "name": name, "input": value}


def drafted(kind: str, value: Any) -> Response:
    """An answer whose draft is this."""
    if kind == "openai":
        return JSONResponse(completion(value if isinstance(value, str) else json.dumps(value)))
    return JSONResponse(message([tool_use(value)]))


async def sound(call: Call) -> Response:
    return drafted(call.kind, call.draft())


def gives(*, openai: Any, anthropic: Any, status: int = 200, **headers: str) -> Behaviour:
    """Answer with these bodies, by the interface that is spoken."""
    bodies = {"openai": openai, "anthropic": anthropic}
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    async def behaviour(call: Call) -> Response:
        body = bodies[call.kind]
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return Response(raw, status, named, media_type="application/json")

    return behaviour


def fails(status: int, code: str = "trouble", **headers: str) -> Behaviour:
    """Answer with the provider's shape of an error."""
    return gives(
        openai={"error": {"message": "words of the provider", "type": code, "param": None, "code": code}},
        anthropic={"type": "error", "error": {"type": code, "message": "words of the provider"}},
        status=status,
        **headers,
    )


async def never(call: Call) -> Response:
    await anyio.sleep_forever()
    raise AssertionError


class _Server(uvicorn.Server):
    """Without its own signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def provider() -> AsyncIterator[Provider]:
    """Both interfaces on a free port, until the block ends."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        found = Provider(f"http://127.0.0.1:{sock.getsockname()[1]}")

        def route(kind: str) -> Route:
            async def take(request: Request) -> Response:
                return await found.answer(Call(kind, dict(request.headers), await request.json()))

            return Route(PATHS[kind], take, methods=["POST"])

        app = Starlette(routes=[route(kind) for kind in PATHS])
        config = uvicorn.Config(
            app, loop="none", lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1
        )
        server = _Server(config)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve, [sock])
            with anyio.fail_after(30):
                while not server.started:
                    await anyio.sleep(0.005)
            try:
                yield found
            finally:
                server.should_exit = True
