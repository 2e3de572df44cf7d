"""Why a message or a question is refused, and how the daemon's process ends.

The codes are part of the wire protocol: never rename one, never raise one that is not listed.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, Literal, get_args

RejectionCode = Literal[
    "malformed",
    "unknown_type",
    "unsupported_version",
    "must_understand",
    "invalid_field",
    "run_mismatch",
    "too_large",
    "not_authorized",
    "duplicate_conflict",
]
"""Codes of a ``.rejected`` message."""

AskErrorCode = Literal["run_unknown", "invalid_request", "too_large", "unavailable", "behind"]
"""Codes of an error reply to an ask. ``unavailable``, ``behind``: ask again with the same ``request_id``."""

REJECTION_CODES: Final[frozenset[str]] = frozenset(get_args(RejectionCode))
ASK_ERROR_CODES: Final[frozenset[str]] = frozenset(get_args(AskErrorCode))
RETRYABLE_ASK_CODES: Final[frozenset[str]] = frozenset({"unavailable", "behind"})

MAX_DETAIL_CHARS: Final = 300


class ExitCode(IntEnum):
    """How the process ends."""

    CLEAN = 0
    FAILURE = 1
    USAGE = 2
    REFUSED = 3


class ProtocolError(Exception):
    """A message that cannot be accepted. What now: reject it, count it, go on with the next one.

    ``detail`` says what is wrong for a person, at most 300 characters, and quotes no content beyond names.
    ``event_id`` is the message's own id where it could be read.
    """

    def __init__(self, code: RejectionCode, detail: str, event_id: str | None = None) -> None:
        if len(detail) > MAX_DETAIL_CHARS:
            detail = detail[: MAX_DETAIL_CHARS - 1] + "…"
        super().__init__(f"{code}: {detail}")
        self.code: RejectionCode = code
        self.detail = detail
        self.event_id = event_id


class AskRefused(Exception):
    """A question that gets an error reply instead of an answer.

    What now, for the asker: with a code in ``RETRYABLE_ASK_CODES`` ask again with the same ``request_id``;
    otherwise correct the request.
    """

    def __init__(self, code: AskErrorCode, message: str) -> None:
        if len(message) > MAX_DETAIL_CHARS:
            message = message[: MAX_DETAIL_CHARS - 1] + "…"
        super().__init__(f"{code}: {message}")
        self.code: AskErrorCode = code
        self.message = message

    @property
    def retryable(self) -> bool:
        """Whether the same request may be sent again."""
        return self.code in RETRYABLE_ASK_CODES
