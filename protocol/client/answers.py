"""What the client hands back beside the messages of the protocol itself. Values only."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from protocol.asks import AuthorizeReply, OperationView


class Published(NamedTuple):
    """An event the broker has: its id, and its sequence in the stream, which answers can be asked to include."""

    event_id: str
    stream_seq: int


class Permission(Struct, frozen=True, kw_only=True):
    """May it be done? True in a condition only for an ``ok`` without any doubt.

    ``code`` is one of the protocol's answers of ``authorize``, or ``unavailable`` where there was none that counts.
    ``reserved``: the operation is pending by this very answer, which is the one permission there is. ``reply`` is
    what was answered, if anything was.
    """

    allowed: bool
    code: str
    reason: str
    request_id: str | None
    clears_when: str | None = None
    operation: OperationView | None = None
    reserved: bool = False
    reply: AuthorizeReply | None = None

    def __bool__(self) -> bool:
        return self.allowed
