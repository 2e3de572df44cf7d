"""What can go wrong between the daemon and its broker, in the daemon's own words.

These are the only errors that leave this package: no exception of the NATS client does. Each says what
to do now.
"""

from __future__ import annotations

import re

_USERINFO = re.compile(r"(?<=://)[^/@\s]*@")


ASK_FOR = (
    "the daemon must connect (nats.creds, nats.url) as a user with its own permissions; "
    "deploy/nats/credentials.py --show lists them"
)
"""What to do about a permission that is missing."""


def without_credentials(text: str) -> str:
    """The text with ``user:password@`` taken out of every URL in it."""
    return _USERINFO.sub("", text)


class TransportError(Exception):
    """Root of this package's errors."""


class Refused(TransportError):
    """The broker will not serve us: credentials, permissions, version, JetStream off, an unusable stream.

    Raised at start only. What now: give up with exit code 3, an operator must act.
    """

    def __init__(self, reason: str) -> None:
        self.reason = without_credentials(reason)
        super().__init__(self.reason)


class Unavailable(TransportError):
    """No answer, or none yet: connection, consumer, stream leader or JetStream is gone for now.

    What now: retry with back-off. For a publish the outcome is unknown: retry with the same message id.
    """

    def __init__(self, reason: str) -> None:
        self.reason = without_credentials(reason)
        super().__init__(self.reason)


class NoResponders(Unavailable):
    """Nobody listens on the subject of a request. What now: retry later; nothing was received."""


class TimedOut(Unavailable):
    """A request was sent and no reply came in time. What now: retry; it may have been received."""


class Denied(Unavailable):
    """The broker's permissions forbid a subject; nothing was delivered.

    What now: at start it ends in Refused; later retry slowly and show it, an operator must act.
    """


class Fenced(TransportError):
    """Another sidecar owns the lane. What now: stop the lane at once, publish nothing more for it."""

    def __init__(self, lane: str, detail: str = "") -> None:
        self.lane = lane
        super().__init__(f"lane {lane} is owned by another sidecar" + (f": {detail}" if detail else ""))


class StreamFull(TransportError):
    """A stream refuses for want of space; nothing was stored. What now: keep the message, retry slowly,
    alarm.
    """

    def __init__(self, stream: str, reason: str) -> None:
        self.stream = stream
        self.reason = reason
        super().__init__(f"stream {stream} is full: {reason}")


class TooLarge(TransportError):
    """A message is over the broker's limit; nothing was sent. What now: send less, the same bytes never
    pass.
    """

    def __init__(self, limit: int, size: int) -> None:
        self.limit = limit
        self.size = size
        super().__init__(f"message of {size} bytes is over the broker's limit of {limit}")


class ApiError(TransportError):
    """JetStream answered a request of its interface with an error. Handled inside this package, never
    leaves it.
    """

    def __init__(self, code: int, err_code: int, description: str) -> None:
        self.code = code
        self.err_code = err_code
        self.description = description
        super().__init__(f"{description} ({code}/{err_code})")


class Conflict(TransportError):
    """A compare-and-set found another sequence than expected. Handled inside this package, never leaves it.

    ``contended``: another write was in flight, try again; otherwise the expectation was wrong.
    """

    def __init__(self, contended: bool) -> None:
        self.contended = contended
        super().__init__("another write was in flight" if contended else "another sequence than expected")
