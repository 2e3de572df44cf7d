"""The daemon, changed from outside so that it dies, holds still, or meets a full disk at one named point.

Arguments: point, file to create when it is reached. The daemon's own code knows nothing of this.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import anyio

from sidecar import __main__ as entry
from sidecar import cli
from sidecar.summarizers.digest import DigestSummarizer
from sidecar.transport.publisher import LanePublisher
from storage import units
from storage.store import Store

MARK = Path(sys.argv[2])


def die() -> None:
    """As kill -9 from outside: nothing runs any more."""
    MARK.touch()
    os.kill(os.getpid(), signal.SIGKILL)


async def hold() -> None:
    """Never comes back; cancelling works."""
    MARK.touch()
    await anyio.sleep_forever()


def before_summary() -> None:
    async def summarize(self: Any, request: Any) -> Any:
        die()

    DigestSummarizer.summarize = summarize  # type: ignore[method-assign]


def after_summary() -> None:
    original = DigestSummarizer.summarize

    async def summarize(self: Any, request: Any) -> Any:
        await original(self, request)
        die()

    DigestSummarizer.summarize = summarize  # type: ignore[method-assign]


def in_commit() -> None:
    """Every row is written, COMMIT is not."""
    original = units.apply

    def apply(unit: Any, tx: Any) -> Any:
        result = original(unit, tx)
        if unit.checkpoint is not None:
            die()
        return result

    units.apply = apply


def after_commit() -> None:
    """Committed; nobody was told, nothing is sent."""
    original: Callable[..., Awaitable[Any]] = Store.commit

    async def commit(self: Any, unit: Any) -> Any:
        done = await original(self, unit)
        if unit.checkpoint is not None:
            die()
        return done

    Store.commit = commit  # type: ignore[method-assign]
    hold_output()


def hold_output() -> None:
    """The relay never gets to a compaction's messages before the commit's own task goes on."""
    original = LanePublisher.publish

    async def publish(self: Any, stream: Any, subject: str, payload: bytes, *told: Any) -> None:
        if is_of_compaction(payload):
            await anyio.sleep_forever()
        await original(self, stream, subject, payload, *told)

    LanePublisher.publish = publish  # type: ignore[method-assign]


def full_before_rows() -> None:
    """The disk has no byte left when the first checkpoint's rows are to be written."""
    original = units.apply

    def apply(unit: Any, tx: Any) -> Any:
        if unit.checkpoint is not None and not MARK.exists():
            fill_disk()
        return original(unit, tx)

    units.apply = apply


def full_before_commit() -> None:
    """The same, when they are written and COMMIT is not."""
    original = units.apply

    def apply(unit: Any, tx: Any) -> Any:
        result = original(unit, tx)
        if unit.checkpoint is not None and not MARK.exists():
            fill_disk()
        return result

    units.apply = apply


def fill_disk() -> None:
    """Take every byte the data directory's file system has left, in a file named ``filler`` beside it."""
    with (Path(os.environ["WATCHKEEPER_DATA_DIR"]).parent / "filler").open("wb", buffering=0) as filler:
        for size in (1 << 16, 1):
            with suppress(OSError):
                while filler.write(bytes(size)):
                    pass
    MARK.touch()


def after_publish() -> None:
    """The packet is in the stream, its row is still in the outbox."""
    original = LanePublisher.publish

    async def publish(self: Any, stream: Any, subject: str, payload: bytes, *told: Any) -> None:
        await original(self, stream, subject, payload, *told)
        if is_of_compaction(payload):
            die()

    LanePublisher.publish = publish  # type: ignore[method-assign]


def slow_summary() -> None:
    async def summarize(self: Any, request: Any) -> Any:
        await hold()

    DigestSummarizer.summarize = summarize  # type: ignore[method-assign]


def signalled_early() -> None:
    """SIGTERM arrives when the command has begun and the daemon does not listen for signals yet."""
    original = cli.load_config

    def load_config(*args: Any, **named: Any) -> Any:
        MARK.touch()
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **named)

    cli.load_config = load_config


def signalled_while_loading() -> None:
    """SIGTERM arrives when the process has begun and its command line is not loaded yet."""
    del sys.modules["sidecar.cli"]

    class Signalling(MetaPathFinder):
        def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
            if fullname == "sidecar.cli":
                MARK.touch()
                os.kill(os.getpid(), signal.SIGTERM)

    sys.meta_path.insert(0, Signalling())


def is_of_compaction(payload: bytes) -> bool:
    """Whether this is the packet that a checkpoint's commit sends."""
    return b'"type":"resume.packet"' in payload and b'"reason":"compacted"' in payload


POINTS: dict[str, Callable[[], None]] = {
    "before_summary": before_summary,
    "after_summary": after_summary,
    "in_commit": in_commit,
    "after_commit": after_commit,
    "after_publish": after_publish,
    "full_before_rows": full_before_rows,
    "full_before_commit": full_before_commit,
    "slow_summary": slow_summary,
    "signalled_early": signalled_early,
    "signalled_while_loading": signalled_while_loading,
}

if __name__ == "__main__":
    POINTS[sys.argv[1]]()
    sys.argv = ["watchkeeper", "run"]
    entry.main()
