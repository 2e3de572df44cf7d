"""Questions to whoever owns the run: asked again with the same bytes until somebody is sure, or patience ends.

A request id is part of the bytes, so an act that is asked for twice is decided once. Whatever is in doubt is not
allowed: an answer of a former owner, one that cannot be read, or none at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import anyio
import msgspec

from protocol import subjects
from protocol.asks import Ask, AskAuthorize, AskError, AskPacket, AuthorizeReply, Reply
from protocol.client.answers import Permission
from protocol.client.broker import HEADER_RESERVE, Broker, Denied, Trouble, pause_seconds
from protocol.client.errors import (
    AnswerTooLarge,
    AskFailed,
    InvalidRequest,
    Refused,
    RunUnknown,
    Unavailable,
)
from protocol.codec import decode_struct, encode
from protocol.errors import ASK_ERROR_CODES, AskErrorCode, ProtocolError
from protocol.handoff import Packet
from protocol.subjects import Verb

_ANSWER_SECONDS: Final = 5.0
"""The daemon waits up to two seconds itself."""
_ERROR_CODE: Final = "Nats-Service-Error-Code"
_ERROR: Final = "Nats-Service-Error"

_FAILURES: Final[Mapping[str, type[AskFailed]]] = {
    "run_unknown": RunUnknown,
    "invalid_request": InvalidRequest,
    "too_large": AnswerTooLarge,
    "unavailable": Unavailable,
    "behind": Unavailable,
}

R = TypeVar("R", bound=Reply)
A = TypeVar("A", bound=Reply | Packet)


class Asker:
    """Asks for one run. ``patience``: seconds to go on asking while nobody is sure."""

    def __init__(self, broker: Broker, tenant: str, lane: str, run: str, *, patience: float) -> None:
        self._broker = broker
        self._subject: Callable[[Verb], str] = lambda verb: subjects.ask(tenant, lane, run, verb)
        self._patience = patience
        self._epoch = 0

    async def ask(self, verb: Verb, request: Ask, kind: type[R], patience: float | None = None) -> R:
        """The answer. Raises RunUnknown, InvalidRequest, AnswerTooLarge, Unavailable, Refused."""

        def read(body: bytes) -> R:
            try:
                return decode_struct(body, kind)
            except ProtocolError as error:
                raise Unavailable("unavailable", f"the answer cannot be read: {error.detail}") from error

        return await self._ask(verb, request, read, patience)

    async def packet(self, request: AskPacket, read: Callable[[bytes], Packet]) -> Packet:
        """A packet; ``read`` decodes it. Raises what ``read`` raises too."""
        return await self._ask("packet", request, read, None)

    async def _ask(self, verb: Verb, request: Ask, read: Callable[[bytes], A], patience: float | None) -> A:
        deadline = anyio.current_time() + (self._patience if patience is None else patience)
        payload = encode(request)
        if len(payload) + HEADER_RESERVE > self._broker.max_payload:
            raise InvalidRequest("invalid_request", "the question is larger than the broker takes")
        failures = 0
        while True:
            left = deadline - anyio.current_time()
            try:
                answer = read(await self.once(verb, payload, max(0.05, min(left, _ANSWER_SECONDS))))
                self._seen(answer.epoch)
                return answer
            except Unavailable as error:
                trouble = error
            failures += 1
            wait = pause_seconds(failures)
            if anyio.current_time() + wait >= deadline:
                raise trouble
            await anyio.sleep(wait)
            with anyio.move_on_after(max(0.0, deadline - anyio.current_time())):
                await self._broker.connected()

    async def once(self, verb: Verb, payload: bytes, seconds: float) -> bytes:
        """One request; its answer's bytes, not looked at. Raises as ``ask``, Unavailable without one."""
        try:
            reply = await self._broker.request(self._subject(verb), payload, seconds=seconds)
        except Trouble as error:
            raise Unavailable("unavailable", str(error)) from error
        except Denied as error:
            raise Refused(str(error)) from error
        failed = _failure(reply.payload, reply.headers)
        if failed is not None:
            raise failed
        return reply.payload

    def _seen(self, epoch: int) -> None:
        """Take note of who answered. Raises Unavailable for a former owner."""
        if epoch < self._epoch:
            raise Unavailable("unavailable", f"answered by a former owner, epoch {epoch}")
        self._epoch = epoch

    async def authorize(self, request: AskAuthorize, patience: float | None = None) -> Permission:
        """The answer as a permission. Raises RunUnknown, InvalidRequest, Refused."""
        try:
            reply = await self.ask("authorize", request, AuthorizeReply, patience)
        except Unavailable as error:
            return Permission(
                allowed=False,
                code="unavailable",
                reason=str(error),
                request_id=request.request_id,
                clears_when="the daemon answers; ask again with the same request_id",
            )
        return _permission(request, reply)


def _permission(request: AskAuthorize, reply: AuthorizeReply) -> Permission:
    operation = None if reply.operation is msgspec.UNSET else reply.operation
    act = request.operation_id is not None and not request.dry_run
    doubt = ""
    if reply.allowed != (reply.code == "ok"):
        doubt = "the answer contradicts itself"
    elif reply.allowed and act and not reply.reserved:
        doubt = "nothing was reserved by the answer"
    elif reply.allowed and operation is not None and request.operation_id not in (None, operation.id):
        doubt = "the answer speaks of another operation"
    return Permission(
        allowed=reply.allowed and not doubt,
        code="unavailable" if doubt else reply.code,
        reason=doubt or reply.reason,
        request_id=request.request_id,
        clears_when=None if reply.clears_when is msgspec.UNSET else reply.clears_when,
        operation=operation,
        reserved=reply.reserved,
        reply=reply,
    )


def _failure(body: bytes, headers: Mapping[str, str]) -> AskFailed | None:
    """The error a reply's headers tell, worded by its body; None for an answer."""
    if _ERROR_CODE not in headers and _ERROR not in headers:
        return None
    code, _, message = headers.get(_ERROR, "").partition(": ")
    try:
        told = decode_struct(body, AskError).error
        code, message = told.code, told.message
    except ProtocolError:
        if code not in ASK_ERROR_CODES:
            code, message = "unavailable", f"refused with {headers.get(_ERROR_CODE, 'no code')[:40]}"
    known: AskErrorCode = code  # type: ignore[assignment]  # one of the protocol's, as just made sure of
    return _FAILURES[known](known, message)
