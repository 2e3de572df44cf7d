"""The process's first lines: ``watchkeeper`` and ``python -m sidecar`` both start here.

A daemon told to stop while it still loads its own code has nothing to drain: it leaves with 0. That must be
arranged before anything large is imported, so this module imports nothing large at its top.
"""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line; SIGTERM during the start of ``run`` is a clean stop."""
    if "run" in sys.argv[1:]:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    _import_structlog()
    from sidecar.cli import main as command_line

    command_line()


def _import_structlog() -> None:
    """Import it as if rich were not there: it would bring it along, 4 MiB, for tracebacks nobody here draws."""
    if "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]


if __name__ == "__main__":
    main()
