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
    from sidecar.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
