"""One request to a provider: what passes by itself is tried once more, and each of its errors gets one name.

The two providers' libraries name their errors alike, so that one place serves both. Nothing of an error's text
is ever read or shown: it may quote the run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import anyio
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt
from tenacity.wait import wait_base, wait_random_exponential

from protocol.summary import SummarizeReply
from sidecar.summarizers import FailureReason, SummarizerFailure

LONGEST_PATIENCE: Final = 5.0
"""Seconds that a provider may ask us to wait before the one further try; a longer wait is the caller's matter."""
_TRIES: Final = 2
_MAY_PASS: Final = frozenset({408, 409, 429})

_STATUS: Final[Mapping[int, FailureReason]] = {
    400: "invalid",
    408: "timeout",
    413: "invalid",
    422: "invalid",
    429: "rate_limited",
    504: "timeout",
}
_WORDS: Final[Mapping[int, str]] = {
    401: "the key is not accepted",
    403: "the key may not do this",
    404: "no such model or address",
    429: "too many requests",
    529: "overloaded",
}
_FILTERED: Final = frozenset({"content_filter", "content_policy_violation"})


@dataclass(frozen=True)
class Errors:
    """A library's error classes: an answer with a status, no answer in time, no connection, any of its own."""

    status: type[Exception]
    timeout: type[Exception]
    connection: type[Exception]
    any: type[Exception]


async def tried(errors: Errors, once: Callable[[], Awaitable[SummarizeReply]]) -> SummarizeReply:
    """The reply; a passing trouble is tried once more after a pause with jitter. Raises SummarizerFailure."""
    tries = AsyncRetrying(
        stop=stop_after_attempt(_TRIES),
        wait=_AsTold(),
        retry=retry_if_exception(lambda error: isinstance(error, errors.status) and _passes(error)),
        sleep=anyio.sleep,
        reraise=True,
    )

    async def attempt() -> SummarizeReply:
        # The library looks whether it is handed a coroutine function.
        return await once()

    try:
        return await tries(attempt)
    except errors.status as error:
        raise _status_failure(error) from error
    except errors.timeout as error:
        raise SummarizerFailure("timeout", "no answer in time") from error
    except errors.connection as error:
        raise SummarizerFailure("unavailable", "no connection") from error
    except errors.any as error:
        raise SummarizerFailure("invalid", type(error).__name__) from error


class _AsTold(wait_base):
    """What the provider asks for, but half a second at least, and up to as much again."""

    def __call__(self, retry_state: RetryCallState) -> float:
        error = retry_state.outcome.exception() if retry_state.outcome is not None else None
        least = max(_asked_for(error) or 0.0, 0.5)
        return least + wait_random_exponential(multiplier=least, max=least)(retry_state)


def _asked_for(error: Any) -> float | None:
    """Seconds of ``Retry-After``, 0 where none is said; None for one that is no number of seconds."""
    try:
        return float(error.response.headers.get("retry-after", "0"))
    except ValueError:
        return None


def _passes(error: Any) -> bool:
    """Whether another try is worth it, and soon."""
    if error.status_code not in _MAY_PASS and error.status_code < 500:
        return False
    told = _asked_for(error)
    return told is not None and 0 <= told <= LONGEST_PATIENCE


def _status_failure(error: Any) -> SummarizerFailure:
    """What an answer's status comes to. ``code``: the provider's own word for it."""
    status: int = error.status_code
    if getattr(error, "code", None) in _FILTERED:
        return SummarizerFailure("refused", f"HTTP {status}: content filter")
    words = f": {_WORDS[status]}" if status in _WORDS else ""
    return SummarizerFailure(_STATUS.get(status, "unavailable"), f"HTTP {status}{words}")
