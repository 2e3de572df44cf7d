"""The shapes of what passes through the client, in our own types, and how JetStream's interface answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from sidecar.transport.errors import ApiError, Unavailable

API: Final = "$JS.API"
HEADER_RESERVE: Final = 256
"""Bytes left free below the broker's limit: it counts more than payload and headers."""


class Incoming(Protocol):
    """What a subscription's callback gets. ``headers`` is None without any; ``reply`` is empty when none
    is wanted.
    """

    @property
    def subject(self) -> str: ...
    @property
    def reply(self) -> str: ...
    @property
    def data(self) -> bytes: ...
    @property
    def headers(self) -> Mapping[str, str] | None: ...


class Reply(msgspec.Struct, frozen=True):
    """Answer to a request."""

    payload: bytes
    headers: Mapping[str, str]


class LinkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach the broker. Times in seconds.

    ``url`` may list several servers, separated by commas. The files are read anew at each connection: ``creds``,
    the authorities ``ca`` to trust instead of the system's, and our own certificate ``cert`` with its ``key``
    (None: it is in ``cert``).
    """

    url: str
    creds: Path | None
    name: str
    connect_timeout: float = 5.0
    start_timeout: float = 20.0
    ping_interval: float = 10.0
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @property
    def servers(self) -> list[str]:
        """The servers of ``url``, in their order."""
        return [part.strip() for part in self.url.split(",") if part.strip()]


def decode_api(payload: bytes) -> dict[str, Any]:
    """The JSON object JetStream answered. Raises ApiError when it is an error, Unavailable when it is
    none.
    """
    try:
        answer: dict[str, Any] = msgspec.json.decode(payload, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise Unavailable("JetStream's answer is not JSON") from error
    error_field = answer.get("error")
    if isinstance(error_field, dict):
        raise ApiError(
            int(error_field.get("code", 0)),
            int(error_field.get("err_code", 0)),
            str(error_field.get("description", "")),
        )
    return answer


def headers_size(headers: Mapping[str, str] | None) -> int:
    """Bytes the headers take on the wire."""
    if not headers:
        return 0
    return 14 + sum(len(name) + len(value.encode()) + 4 for name, value in headers.items())
