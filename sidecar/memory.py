"""Giving memory back to the system.

What one start reads and lets go lies scattered over the allocator's own stock, which keeps it: 20 MiB after a
start beside ten thousand runs. It frees nothing that is in use and decides nothing.
"""

from __future__ import annotations

import ctypes
import sys


def give_back() -> bool:
    """Hand back what is free; whether the C library can. Takes milliseconds: call it on a thread, and seldom."""
    if not sys.platform.startswith("linux"):
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and trim(0) >= 0
