"""Back-off for requests that may be repeated. Knows nothing of what it repeats."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import anyio

from sidecar.transport.errors import ApiError, Denied, Unavailable

_FIRST: Final = 0.02
_LONGEST: Final = 2.0

T = TypeVar("T")


def pause_seconds(failures: int, *, first: float = _FIRST, longest: float = _LONGEST) -> float:
    """Seconds to wait after so many failures in a row (1, 2, …): doubling, capped, half of it at random."""
    ceiling: float = min(longest, first * 2.0 ** min(failures - 1, 20))
    return ceiling * (0.5 + 0.5 * random.random())


async def until_available(attempt: Callable[[], Awaitable[T]], *, patience: float) -> T:
    """Repeat while JetStream is unavailable, for ``patience`` seconds. Raises Unavailable then.

    A denied subject is raised at once. An error of JetStream's interface with status 503 or 408 counts as
    unavailable, any other is raised as it is.
    """
    began = time.monotonic()
    failures = 0
    while True:
        try:
            return await attempt()
        except Denied:
            raise
        except Unavailable as error:
            trouble = error
        except ApiError as error:
            if error.code not in (408, 503):
                raise
            trouble = Unavailable(f"JetStream is not ready: {error}")
        failures += 1
        wait = pause_seconds(failures)
        if time.monotonic() - began + wait > patience:
            raise trouble
        await anyio.sleep(wait)
