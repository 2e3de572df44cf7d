"""How the process ends for an error: an exit code and one line for a person.

An error that is not listed here is a defect: it keeps its traceback and ends with exit code 1.
"""

from __future__ import annotations

from protocol.errors import ExitCode
from sidecar.admin import ListenError
from sidecar.config import ConfigError
from sidecar.embedded_nats import EmbeddedServerError
from sidecar.transport.errors import Refused, TransportError
from storage.errors import StorageError

_CODES: tuple[tuple[type[BaseException], ExitCode], ...] = (
    (ConfigError, ExitCode.USAGE),
    (Refused, ExitCode.REFUSED),
    (TransportError, ExitCode.FAILURE),
    (StorageError, ExitCode.FAILURE),
    (ListenError, ExitCode.FAILURE),
    (EmbeddedServerError, ExitCode.FAILURE),
    (TimeoutError, ExitCode.FAILURE),
    (KeyboardInterrupt, ExitCode.FAILURE),
)


def explain(error: BaseException) -> tuple[ExitCode | None, str]:
    """The exit code and line of the first expected error in ``error`` (a group is looked into); else None."""
    for single in _leaves(error):
        for kind, code in _CODES:
            if isinstance(single, kind):
                return code, str(single) or type(single).__name__
    return None, ""


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
