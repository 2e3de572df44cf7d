"""What runs take in memory, as far as it can be told from their rows, and giving memory back to the system.

What a start reads and lets go lies scattered over the allocator's own stock, which keeps it: 20 MiB after a
start beside ten thousand runs. How often the garbage collector looks is set here too. Nothing here frees what
is in use, or decides what is let go.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Final

from sidecar.core import state
from storage.records import StoredRun

RUN_BYTES: Final = 16 * 1024
ITEM_BYTES: Final = 700
"""What a run and an item take beside their texts."""
_YOUNG: Final = 10_000
"""Containers made and not freed that make the collector look: those of about two batches on their way."""


def weight_of_row(row: StoredRun) -> int:
    """Bytes that a run just read is reckoned to take."""
    texts = len(row.head) + len(row.view) + sum(len(item.body) for item in row.items)
    return RUN_BYTES + texts + ITEM_BYTES * len(row.items)


def weight_of_ledger(ledger: state.Ledger) -> int:
    """The same of a run in memory. Cost: all its items."""
    items = [item for of_kind in ledger.items.values() for item in of_kind.values()]
    return RUN_BYTES + sum(ITEM_BYTES + len(state.encode_item(item)) for item in items)


def collect_seldom() -> None:
    """Once, when all is loaded: what is there by now is looked through no more, and the rest less often.

    The way of a message makes no cycles, a refused one's neither, so that collecting finds nothing to free: at
    Python's own threshold it took a twentieth of the time. What may lie about until the next one is bounded by
    the number of containers made since the last, not by time.
    """
    gc.collect()
    # Looking through it again took the collector 30 ms each time.
    gc.freeze()
    gc.set_threshold(_YOUNG)


def give_back() -> bool:
    """Hand back what is free; whether the C library can. Takes milliseconds: call it on a thread, and seldom."""
    if not sys.platform.startswith("linux"):
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and trim(0) >= 0


_MOST_ARENAS_OPTION: Final = -8
"""M_ARENA_MAX of malloc.h."""
_MOST_SPARE_BYTES: Final = 12 * 1024 * 1024


class _Allocator(ctypes.Structure):
    """What glibc's mallinfo2 tells of all its arenas."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
                     "fordblks", "keepcost")
    )  # fmt: skip


def few_arenas() -> bool:
    """Have the allocator keep one stock for all threads beside the first; whether it can. Before they begin.

    It would keep one for each of them, each with what its busiest moment took: under a steady load that grew for
    half an hour. One thread at a time holds the interpreter, so that they hardly wait for each other.
    """
    if not sys.platform.startswith("linux"):
        return False
    choose = getattr(ctypes.CDLL(None), "mallopt", None)
    return choose is not None and choose(_MOST_ARENAS_OPTION, 2) == 1


def much_is_spare() -> bool:
    """Whether the allocator keeps so much that is free that it should be given back."""
    return allocated()[1] > _MOST_SPARE_BYTES


def allocated() -> tuple[int, int]:
    """Bytes that the C library has handed out, and those it keeps although they are free; zeros where it cannot
    be asked. The interpreter's small objects are in neither.

    Under a steady load the second grows by a MiB a minute, in the arenas of the threads.
    """
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform.startswith("linux") else None
    if ask is None:
        return 0, 0
    ask.restype = _Allocator
    told = ask()
    return int(told.uordblks), int(told.fordblks)
