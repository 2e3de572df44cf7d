"""How the process ends for an error: an exit code and one line for a person.

2: the same command fails again until something it was given is changed: an argument, a key, a path, whose a file
is, what else runs there. 3: the broker refuses us. 1: everything else. An error that is not listed here is a
defect: it keeps its traceback and ends with 1.
"""

from __future__ import annotations

import os

from protocol.errors import ExitCode
from sidecar.admin import ListenError
from sidecar.config import ConfigError
from sidecar.embedded_nats import EmbeddedServerError, EmbeddedServerUnusable
from sidecar.transport.errors import Refused, TransportError
from storage.errors import (
    AlreadyOpen,
    AlreadyThere,
    DamagedCopy,
    NotOurs,
    NotPermitted,
    NotThere,
    SchemaTooNew,
    StorageError,
)

# What was given has to change before the same command can work. The first kind that fits counts.
_USAGE: tuple[type[BaseException], ...] = (
    ConfigError,
    ListenError,
    EmbeddedServerUnusable,
    AlreadyOpen,
    AlreadyThere,
    DamagedCopy,
    NotOurs,
    NotPermitted,
    NotThere,
    SchemaTooNew,
    PermissionError,
)
_CODES: tuple[tuple[type[BaseException], ExitCode], ...] = (
    *((kind, ExitCode.USAGE) for kind in _USAGE),
    (Refused, ExitCode.REFUSED),
    (TransportError, ExitCode.FAILURE),
    (StorageError, ExitCode.FAILURE),
    (EmbeddedServerError, ExitCode.FAILURE),
    (TimeoutError, ExitCode.FAILURE),
    (KeyboardInterrupt, ExitCode.FAILURE),
)


def explain(error: BaseException) -> tuple[ExitCode | None, str]:
    """The exit code and line of the first expected error in ``error`` (a group is looked into); else None."""
    for single in _leaves(error):
        for kind, code in _CODES:
            if isinstance(single, kind):
                return code, _line(single)
    return None, ""


def _line(error: BaseException) -> str:
    if isinstance(error, PermissionError) and isinstance(error.filename, str | os.PathLike):
        return f"{os.fspath(error.filename)}: {error.strerror} for user {os.getuid()}"
    return str(error) or type(error).__name__


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
