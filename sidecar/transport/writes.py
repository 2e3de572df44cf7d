"""Storing one message in a stream and reading one back from its leader, with JetStream's answers sorted out.

No retry and no ownership here: one request, one outcome.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final

from protocol import subjects
from sidecar.transport.errors import ApiError, Conflict, StreamFull, TooLarge, Unavailable
from sidecar.transport.jetstream import Link
from sidecar.transport.wire import HEADER_RESERVE, decode_api, headers_size

MSG_ID: Final = "Nats-Msg-Id"
EXPECTED_STREAM: Final = "Nats-Expected-Stream"
EXPECTED_SEQUENCE: Final = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_SUBJECT: Final = "Nats-Expected-Last-Subject-Sequence-Subject"

_WRONG_SEQUENCE: Final = 10071
_CONTENDED: Final = 10164
_NO_MESSAGE: Final = 10037
_FULL: Final = frozenset({10002, 10028, 10047, 10077})
_TOO_LARGE: Final = frozenset({10054, 10097})

_STREAMS: Final = {
    "in": subjects.STREAM_IN,
    "out": subjects.STREAM_OUT,
    "state": subjects.STREAM_STATE,
}


def stream_of(subject: str) -> str:
    """The stream that holds a subject of ours. Raises ValueError when none does."""
    area = subject.split(".", 3)[2] if subject.startswith(f"{subjects.PREFIX}.") else ""
    if area == "out" and subject.endswith(".rejected"):
        return subjects.STREAM_REJECTED
    try:
        return _STREAMS[area]
    except KeyError:
        raise ValueError(f"no stream holds {subject[:160]!r}") from None


async def store(
    link: Link,
    stream: str,
    subject: str,
    payload: bytes,
    headers: Mapping[str, str],
    *,
    timeout: float,  # noqa: ASYNC109
) -> int:
    """Publish once and return the stream sequence; a duplicate returns the first one's.

    Raises Conflict, StreamFull, TooLarge (nothing was stored), Unavailable (unknown).
    """
    sent = {**headers, EXPECTED_STREAM: stream}
    reply = await link.request(subject, payload, headers=sent, timeout=timeout)
    try:
        ack = decode_api(reply.payload)
    except ApiError as error:
        if error.err_code in (_WRONG_SEQUENCE, _CONTENDED):
            raise Conflict(error.err_code == _CONTENDED) from error
        if error.err_code in _FULL:
            raise StreamFull(stream, error.description) from error
        if error.err_code in _TOO_LARGE:
            size = len(payload) + headers_size(sent) + HEADER_RESERVE
            raise TooLarge(min(link.max_payload, size - 1), size) from error
        raise Unavailable(f"stream {stream} refuses for now: {error}") from error
    return int(ack["seq"])


async def last_message(
    link: Link,
    stream: str,
    subject: str,
    *,
    timeout: float = 5.0,  # noqa: ASYNC109
) -> tuple[int, bytes] | None:
    """Sequence and payload of the newest message of a subject, as the stream's leader says. Raises
    Unavailable.
    """
    return await _get(link, stream, {"last_by_subj": subject}, timeout)


async def first_message(
    link: Link,
    stream: str,
    subject: str,
    *,
    timeout: float = 5.0,  # noqa: ASYNC109
) -> tuple[int, bytes] | None:
    """Sequence and payload of the oldest message of a subject, as the stream's leader says. Raises
    Unavailable.
    """
    return await _get(link, stream, {"seq": 1, "next_by_subj": subject}, timeout)


async def _get(link: Link, stream: str, query: Mapping[str, Any], seconds: float) -> tuple[int, bytes] | None:
    try:
        answer = await link.api(f"STREAM.MSG.GET.{stream}", query, timeout=seconds)
    except ApiError as error:
        if error.err_code == _NO_MESSAGE:
            return None
        raise Unavailable(f"stream {stream} cannot be read: {error}") from error
    message = answer["message"]
    return int(message["seq"]), base64.b64decode(message.get("data") or "")
