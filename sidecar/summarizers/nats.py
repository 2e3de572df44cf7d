"""A summariser that is a service on the broker: one request to ``wk.v1.summarize``, one reply, no stream.

It is handed a connection and knows no NATS client. It does not wait, retry or judge: a reply is decoded, a
failure is named, and what comes too late is counted and dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, Literal, Protocol

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from protocol import subjects
from protocol.codec import decode_struct, encode
from protocol.errors import ProtocolError
from protocol.handoff import Projector
from protocol.summary import SummarizeError, SummarizeReply, SummarizeRequest, Usage
from sidecar import tracing
from sidecar.core.tokens import BYTES_PER_TOKEN
from sidecar.core.validation import SUMMARY_BYTES
from sidecar.summarizers import FailureReason, SummarizerFailure, instructions
from sidecar.transport.errors import NoResponders, TimedOut, TooLarge, Unavailable
from sidecar.transport.wire import HEADER_RESERVE, Reply

_REPLY_BYTES: Final = SUMMARY_BYTES + 4_096
_LONGEST_WAIT: Final = 24 * 3_600.0
"""Seconds. The caller's limit ends the wait long before; this one only keeps it from lasting for ever."""
_CODES: Final[Mapping[str, FailureReason]] = {
    "rate_limited": "rate_limited",
    "overloaded": "unavailable",
    "unavailable": "unavailable",
    "timeout": "timeout",
    "refused": "refused",
    "refusal": "refused",
    "content_filter": "refused",
    "truncated": "truncated",
    "length": "truncated",
    "invalid": "invalid",
    "invalid_request": "invalid",
    "too_large": "invalid",
}
"""What an error's code comes to; any other is ``unavailable``: the service says that it has no summary."""
_STATUS: Final[Mapping[str, FailureReason]] = {"400": "invalid", "408": "timeout", "429": "rate_limited"}
"""The same for the error header of a service without an error in the body."""
_CODE = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class Wire(Protocol):
    """The connection, as far as it is needed here."""

    @property
    def max_payload(self) -> int:
        """Bytes a message may have."""

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = 5.0,  # noqa: ASYNC109
        on_late: Callable[[], None] | None = None,
    ) -> Reply:
        """One answer. Raises NoResponders, TimedOut, Unavailable, TooLarge."""


class _Reply(Struct, frozen=True, kw_only=True):
    """The reply as it may come: an answer or an error."""

    v: Literal[1] = 1
    must_understand: tuple[str, ...] = ()
    summary: Raw | UnsetType = UNSET
    finish_reason: Literal["stop", "length", "refusal"] | UnsetType | None = UNSET
    usage: Usage | UnsetType | None = UNSET
    error: Raw | UnsetType = UNSET


class NatsSummarizer:
    """Asks whoever answers the lane's subject. ``on_late`` is told of each answer that came too late."""

    name = "nats"
    instructions = instructions.INSTRUCTIONS

    def __init__(
        self,
        wire: Wire,
        tenant: str,
        lane: str,
        *,
        window_tokens: int,
        model: str | None = None,
        on_late: Callable[[], None] | None = None,
    ) -> None:
        self._wire = wire
        self._tenant = tenant
        self._lane = lane
        self._window = window_tokens
        self._on_late = on_late
        self.projector = Projector(
            version=instructions.VERSION,
            model=UNSET if model is None else model,
            instructions_digest=instructions.DIGEST,
        )

    @property
    def window_tokens(self) -> int:
        """The configured one, or what the broker takes in one message if that is less."""
        return min(self._window, (self._wire.max_payload - HEADER_RESERVE) // BYTES_PER_TOKEN)

    async def summarize(self, request: SummarizeRequest) -> SummarizeReply:
        """One request, one reply. Raises SummarizerFailure."""
        subject = subjects.summarize(self._tenant, self._lane, request.run)
        try:
            reply = await self._wire.request(
                subject,
                encode(request),
                headers=tracing.headers(),
                timeout=_LONGEST_WAIT,
                on_late=self._on_late,
            )
        except NoResponders as error:
            raise SummarizerFailure("unavailable", "nobody answers the subject") from error
        except TimedOut as error:
            raise SummarizerFailure("timeout", error.reason) from error
        except Unavailable as error:
            raise SummarizerFailure("unavailable", error.reason) from error
        except TooLarge as error:
            raise SummarizerFailure("unavailable", f"the request is too large: {error}") from error
        return decode_reply(reply.payload, reply.headers)


def decode_reply(payload: bytes, headers: Mapping[str, str]) -> SummarizeReply:
    """The answer in a reply. Raises SummarizerFailure: an error that was told, or a reply that is none."""
    status = headers.get("Nats-Service-Error-Code")
    try:
        reply = decode_struct(payload, _Reply, max_bytes=_REPLY_BYTES)
    except ProtocolError as error:
        if status is not None:
            raise _by_status(status) from error
        raise SummarizerFailure("invalid", f"the reply is not one: {error.code}") from error
    if isinstance(reply.error, Raw) and bytes(reply.error) != b"null":
        raise _told(reply.error)
    if status is not None:
        raise _by_status(status)
    unknown = set(reply.must_understand) - set(_Reply.__struct_fields__)
    if unknown:
        raise SummarizerFailure("invalid", "the reply must be understood in fields that are unknown here")
    cut = reply.finish_reason in ("length", "refusal")
    if not isinstance(reply.summary, Raw) and not cut:
        raise SummarizerFailure("invalid", "the reply holds neither a summary nor an error")
    return SummarizeReply(
        # What was cut or refused is never read: its cost and its end are all there is to know.
        summary=reply.summary if isinstance(reply.summary, Raw) else Raw(b"null"),
        finish_reason=UNSET if reply.finish_reason is None else reply.finish_reason,
        usage=UNSET if reply.usage is None else reply.usage,
    )


def _told(raw: Raw) -> SummarizerFailure:
    try:
        code = msgspec.json.decode(b'{"error":' + bytes(raw) + b"}", type=SummarizeError).error.code
    except msgspec.DecodeError:
        return SummarizerFailure("invalid", "the error has no code and message")
    # Not the message: it may quote the run.
    shown = code if _CODE.fullmatch(code) else "no name"
    return SummarizerFailure(_CODES.get(code, "unavailable"), f"the service says {shown}")


def _by_status(status: str) -> SummarizerFailure:
    shown = status if _CODE.fullmatch(status) else "no number"
    return SummarizerFailure(_STATUS.get(status, "unavailable"), f"the service says {shown}")
