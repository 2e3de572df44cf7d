"""Asking a daemon from beside it how it is: one request to its admin port, for probes that run a command.

It reads the answer and nothing else; what counts as alive, ready or started the daemon decides.
"""

from __future__ import annotations

import http.client
import json
from typing import Any, Final

from msgspec import Struct

from sidecar.config import parse_listen

PATHS: Final = {"alive": "/healthz", "ready": "/readyz", "started": "/startupz"}
_ANY_ADDRESS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_MOST_BYTES: Final = 64 * 1024


class NoAnswer(Exception):
    """Nobody answers there; the text says where, why and what to look at."""


class Answer(Struct, frozen=True):
    """Whether the daemon says yes, and what it said."""

    fine: bool
    text: str


def ask(listen: str, question: str, seconds: float) -> Answer:
    """Ask the daemon that listens on `listen` (``admin.listen``) one of `PATHS`, waiting at most `seconds` for
    each step.

    Raises `NoAnswer` for a daemon that is away or answers too late, `ValueError` for port 0, which tells nobody
    where the daemon listens.
    """
    host, port = parse_listen(listen)
    if port == 0:
        raise ValueError("admin.listen has port 0: the port is known to the daemon alone")
    connection = http.client.HTTPConnection(_ANY_ADDRESS.get(host, host), port, timeout=seconds)
    try:
        connection.request("GET", PATHS[question])
        response = connection.getresponse()
        return Answer(response.status == 200, _words(response.read(_MOST_BYTES)))
    except (OSError, http.client.HTTPException) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        raise NoAnswer(
            f"no daemon answers on {listen} ({why}): start one (watchkeeper run), or set admin.listen "
            "(WATCHKEEPER_ADMIN__LISTEN, --config) to where it listens"
        ) from error
    finally:
        connection.close()


def _words(body: bytes) -> str:
    """The answer as one line of plain ASCII: what it says may have come from anywhere."""
    try:
        value: Any = json.loads(body)
    except ValueError:
        return "an answer that is not JSON"
    return json.dumps(value)
