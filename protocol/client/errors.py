"""What can go wrong for an agent, each with what to do about it. No error of the broker's library leaves the client.

Whatever is raised, nothing was allowed: only an answer of ``authorize`` that says so allows anything.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from protocol.errors import AskErrorCode

if TYPE_CHECKING:
    from protocol.client.answers import Permission

_USERINFO: Final = re.compile(r"(?<=://)[^/@\s]*@")


class WatchkeeperError(Exception):
    """Root of the client's errors."""

    def __init__(self, message: str) -> None:
        super().__init__(_USERINFO.sub("", message))


class NotConnected(WatchkeeperError):
    """No broker was reached in the time given. What now: start it, or correct the address."""


class Refused(WatchkeeperError):
    """The broker does not let us in, or forbids a subject; nothing was stored. What now: correct credentials or
    permissions, the same will not pass."""


class InvalidEvent(WatchkeeperError):
    """An event is not one of the protocol; nothing was sent and no number used. What now: correct the event."""


class EventTooLarge(WatchkeeperError):
    """An event is over the broker's limit even with its content kept apart; nothing was sent and no number used.
    What now: shorten it, or save what it holds as an artifact."""


class Unsent(WatchkeeperError):
    """The run was left before the broker had these events. What now: tell them again in a new session, or let an
    authority accept the gap."""

    def __init__(self, event_ids: tuple[str, ...]) -> None:
        super().__init__(f"not known to be stored: {', '.join(event_ids[:20])}")
        self.event_ids = event_ids


class AskFailed(WatchkeeperError):
    """A question got no answer but a refusal; ``code`` is the wire's."""

    def __init__(self, code: AskErrorCode, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code: AskErrorCode = code


class RunUnknown(AskFailed):
    """The daemon has read nothing of this run. What now: publish ``run.started`` first."""


class InvalidRequest(AskFailed):
    """The question is malformed. What now: correct it, the same will not pass."""


class AnswerTooLarge(AskFailed):
    """What was asked for does not fit ``max_tokens`` or a message. What now: ask for less, or compact first."""


class Unavailable(AskFailed):
    """Nobody who owns the lane answered for so long. What now: do nothing that needs permission, ask again later."""


class PacketRefused(WatchkeeperError):
    """A packet that must not be continued from.

    ``code``: ``malformed``, ``unsupported_version``, ``must_understand``, ``run_mismatch``, ``digest_mismatch``.
    What now: keep the old context; ``must_understand`` and ``unsupported_version``: a newer client is needed.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code


class StalePacket(WatchkeeperError):
    """A packet of a newer checkpoint is there. What now: take that one up."""


class NotAllowed(WatchkeeperError):
    """An effect may not be done. What now: ``permission.clears_when`` says what has to happen first."""

    def __init__(self, permission: Permission) -> None:
        super().__init__(f"{permission.code}: {permission.reason}")
        self.permission = permission


class ContentChanged(WatchkeeperError):
    """The pages of one answer do not belong together: something changed between them. What now: fetch again."""
