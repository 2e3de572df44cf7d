"""The daemon under a wall clock that is wrong by as many seconds as a file says, from the moment it says so.

Argument: that file. The monotonic clock stays right, as on a machine whose clock is set. The daemon's own code
knows nothing of this.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

OFFSET = Path(sys.argv[1])
_time = time.time


def shifted() -> float:
    return _time() + float(OFFSET.read_text())


if __name__ == "__main__":
    # Before anything of the daemon takes the clock's function for its own.
    time.time = shifted

    from sidecar import cli

    cli.main(["run"])
