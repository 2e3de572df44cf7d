"""The bucket of texts too large for a message: made, read in bounded pieces, and emptied of a run.

The pieces of an object lie on the subject that follows from its run and digest (``subjects.content_pieces``); its
description, which is for other readers of the bucket, is never looked at. What lies there is not trusted: no more is
read than was announced, and whether it is the right text is for the caller to check. Nothing is written here but the
bucket itself.
"""

from __future__ import annotations

import base64
from functools import partial
from typing import Any, Final

import anyio
import structlog

from protocol import subjects
from sidecar.transport.errors import ApiError, Denied, StreamFull, Unavailable
from sidecar.transport.inventory import purge, subjects_held
from sidecar.transport.jetstream import Link
from sidecar.transport.retry import until_available
from sidecar.transport.topology import NOT_FOUND

STREAM: Final = f"OBJ_{subjects.BUCKET_CONTENT}"
_NO_MESSAGE: Final = 10037
_NAME_IN_USE: Final = 10058
_FULL: Final = frozenset({10002, 10023, 10028, 10047, 10077})
_SMALLER: Final = 8
_LEAST_PIECE: Final = 16 * 1024
"""More and smaller pieces than this on average are not read: a text is not to cost a request for every byte."""
_SECOND: Final = 1_000_000_000

log = structlog.get_logger(__name__)


async def ensure_contents(
    link: Link, *, max_bytes: int, replicas: int = 1, max_age_seconds: int = 30 * 24 * 3600
) -> bool:
    """Make the bucket if it is not there; an existing one is left as it is. Idempotent.

    Where the broker has not so much room a smaller one is made. False, told in the log, where there can be none:
    everything but large texts goes on. Raises Unavailable while JetStream does not answer.
    """
    wanted: dict[str, Any] = {
        "name": STREAM,
        "subjects": [f"{subjects.CONTENT_PIECES}>", f"{subjects.CONTENT_DESCRIPTIONS}>"],
        "retention": "limits",
        "storage": "file",
        "num_replicas": replicas,
        "discard": "new",
        "allow_rollup_hdrs": True,
        "allow_direct": True,
        "max_age": max_age_seconds * _SECOND,
    }
    reason = ""
    try:
        for size in (max_bytes, max_bytes // _SMALLER, max_bytes // _SMALLER**2):
            try:
                make = partial(_made, link, {**wanted, "max_bytes": size})
                await until_available(make, patience=5.0)
                return True
            except (ApiError, StreamFull) as error:
                reason = str(error)
    except Denied as error:
        reason = error.reason
    log.warning("no bucket for large texts", bucket=subjects.BUCKET_CONTENT, reason=reason)
    return False


async def _made(link: Link, wanted: dict[str, Any]) -> None:
    try:
        await link.api(f"STREAM.INFO.{STREAM}")
        return
    except ApiError as error:
        if error.err_code != NOT_FOUND:
            raise
    try:
        await link.api(f"STREAM.CREATE.{STREAM}", wanted)
    except ApiError as error:
        if error.err_code in _FULL:
            raise StreamFull(STREAM, error.description) from error
        if error.err_code != _NAME_IN_USE:
            raise
    else:
        log.info("bucket created", bucket=subjects.BUCKET_CONTENT, bytes=wanted["max_bytes"])


class Contents:
    """Reads and removes texts. A call the broker does not finish in time raises Unavailable."""

    def __init__(self, link: Link, *, seconds: float = 30.0) -> None:
        self._link = link
        self._seconds = seconds

    async def read(self, pieces: str, size: int) -> bytes | None:
        """What lies on the subject of an object's pieces, None where there is nothing (any more).

        Fewer or other bytes where it is not an object of ``size`` bytes; no more than these and a piece are read.
        Raises Unavailable.
        """
        with anyio.move_on_after(self._seconds):
            return await self._read(pieces, size)
        raise Unavailable(f"bucket {subjects.BUCKET_CONTENT}: not done within {self._seconds:g} s")

    async def _read(self, pieces: str, size: int) -> bytes | None:
        found = bytearray()
        following = 1
        for _ in range(size // _LEAST_PIECE + 2):
            piece = await self._piece(pieces, following)
            if piece is None:
                break
            following = piece[0] + 1
            found += piece[1]
            if len(found) >= size:
                break
        return bytes(found) if following > 1 else None

    async def _piece(self, subject: str, following: int) -> tuple[int, bytes] | None:
        """The first piece at or after a sequence: from the leader, since a replica may not have it yet."""
        query = {"seq": following, "next_by_subj": subject}
        try:
            answer = await self._link.api(f"STREAM.MSG.GET.{STREAM}", query)
        except ApiError as error:
            if error.err_code in (_NO_MESSAGE, NOT_FOUND):
                return None
            raise Unavailable(f"bucket {subjects.BUCKET_CONTENT}: {error}") from error
        message = answer["message"]
        return int(message["seq"]), base64.b64decode(message.get("data") or "")

    async def forget(self, tenant: str, lane: str, run: str) -> int:
        """Remove every object of a run; returns how many messages went. Idempotent. Raises Unavailable."""
        if await self._missing():
            return 0
        gone = await purge(self._link, STREAM, subjects.content_pieces_filter(tenant, lane, run))
        prefix = subjects.content_prefix(tenant, lane, run)
        for subject in await subjects_held(self._link, STREAM, f"{subjects.CONTENT_DESCRIPTIONS}>"):
            if _described(subject).startswith(prefix):
                gone += await purge(self._link, STREAM, subject)
        return gone

    async def _missing(self) -> bool:
        try:
            await self._link.api(f"STREAM.INFO.{STREAM}")
        except ApiError as error:
            if error.err_code == NOT_FOUND:
                return True
            raise Unavailable(f"bucket {subjects.BUCKET_CONTENT}: {error}") from error
        return False


def _described(subject: str) -> str:
    """The name of the object that a description is of; "" for what is none."""
    try:
        return base64.urlsafe_b64decode(subject.removeprefix(subjects.CONTENT_DESCRIPTIONS)).decode()
    except ValueError:
        return ""
