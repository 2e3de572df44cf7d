"""A broker's side of requests, scripted: what is answered to each, in order. It takes the place of a connection."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import anyio
import anyio.lowlevel

from protocol.client.broker import Broker, Credentials, Reply

ANSWER = Reply | Exception


class ScriptedBroker(Broker):
    """Answers with the script; past its end nobody ever answers. ``asked`` holds subject and bytes of each request."""

    def __init__(self, *script: ANSWER) -> None:
        super().__init__(Credentials(url="nats://none.invalid"), connect_seconds=1)
        self.script = list(script)
        self.asked: list[tuple[str, bytes]] = []

    async def connected(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def request(
        self, subject: str, payload: bytes, *, seconds: float, headers: Mapping[str, str] | None = None
    ) -> Reply:
        self.asked.append((subject, payload))
        if not self.script:
            await anyio.sleep_forever()
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def body(**fields: Any) -> Reply:
    """An answer without headers."""
    return Reply(json.dumps(fields).encode(), {})


def refusal(code: str, message: str = "no", *, number: str = "503") -> Reply:
    """An error reply as the daemon makes them."""
    return Reply(
        json.dumps({"error": {"code": code, "message": message}}).encode(),
        {"Nats-Service-Error-Code": number, "Nats-Service-Error": f"{code}: {message}"},
    )
