"""The bucket of texts too large for a message: made, read in bounded pieces, and emptied of a run.

An object is only ever asked for by the name that follows from its run and digest (``subjects.content_object``).
What others put there is not trusted: no more is read than was announced, and whether it is the right text is for
the reader to check. Nothing is written here but the bucket itself.
"""

from __future__ import annotations

import base64
import re
from functools import partial
from typing import Any, Final

import anyio
import msgspec
import structlog

from protocol.subjects import BUCKET_CONTENT
from sidecar.transport.errors import ApiError, Denied, StreamFull, Unavailable
from sidecar.transport.inventory import purge, subjects_held
from sidecar.transport.jetstream import Link
from sidecar.transport.retry import until_available
from sidecar.transport.topology import NOT_FOUND

STREAM: Final = f"OBJ_{BUCKET_CONTENT}"
_META: Final = f"$O.{BUCKET_CONTENT}.M."
_CHUNKS: Final = f"$O.{BUCKET_CONTENT}.C."
_NO_MESSAGE: Final = 10037
_NAME_IN_USE: Final = 10058
_FULL: Final = frozenset({10002, 10023, 10028, 10047, 10077})
_SMALLER: Final = 8
_LEAST_CHUNK: Final = 16 * 1024
"""More and smaller pieces than this on average are not read: a text is not to cost a request for every byte."""
_NUID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SECOND: Final = 1_000_000_000

log = structlog.get_logger(__name__)


class _Meta(msgspec.Struct):
    """What of an object's description is looked at."""

    nuid: str = ""
    size: int = 0
    deleted: bool = False


async def ensure_contents(
    link: Link, *, max_bytes: int, replicas: int = 1, max_age_seconds: int = 30 * 24 * 3600
) -> bool:
    """Make the bucket if it is not there; an existing one is left as it is. Idempotent.

    Where the broker has not so much room a smaller one is made. False, told in the log, where there can be none:
    everything but large texts goes on. Raises Unavailable while JetStream does not answer.
    """
    wanted: dict[str, Any] = {
        "name": STREAM,
        "subjects": [f"{_CHUNKS}>", f"{_META}>"],
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
    log.warning("no bucket for large texts", bucket=BUCKET_CONTENT, reason=reason)
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
        log.info("bucket_created", bucket=BUCKET_CONTENT, bytes=wanted["max_bytes"])


class Contents:
    """Reads and removes texts. A call the broker does not finish in time raises Unavailable."""

    def __init__(self, link: Link, *, seconds: float = 30.0) -> None:
        self._link = link
        self._seconds = seconds

    async def read(self, name: str, size: int) -> bytes | None:
        """The object's bytes, None where there is none (any more).

        Fewer or other bytes where the object is not one of ``size`` bytes; never more than these and a chunk are
        read. Raises Unavailable.
        """
        with anyio.move_on_after(self._seconds):
            return await self._read(name, size)
        raise Unavailable(f"bucket {BUCKET_CONTENT}: not done within {self._seconds:g} s")

    async def _read(self, name: str, size: int) -> bytes | None:
        meta = await self._meta(f"{_META}{_named(name)}")
        if meta is None or meta.deleted:
            return None
        if meta.size != size or _NUID.fullmatch(meta.nuid) is None:
            return b""
        found = bytearray()
        subject, following = f"{_CHUNKS}{meta.nuid}", 1
        for _ in range(size // _LEAST_CHUNK + 2):
            chunk = await self._chunk(subject, following)
            if chunk is None:
                break
            following = chunk[0] + 1
            found += chunk[1]
            if len(found) >= size:
                break
        return bytes(found)

    async def forget(self, prefix: str) -> int:
        """Remove every object whose name begins so; returns how many. Idempotent. Raises Unavailable."""
        try:
            held = await subjects_held(self._link, STREAM, f"{_META}>")
        except Unavailable:
            if await self._missing():
                return 0
            raise
        gone = 0
        for subject in held:
            if not _name_of(subject).startswith(prefix):
                continue
            meta = await self._meta(subject)
            if meta is not None and _NUID.fullmatch(meta.nuid) is not None:
                await purge(self._link, STREAM, f"{_CHUNKS}{meta.nuid}")
            await purge(self._link, STREAM, subject)
            gone += 1
        return gone

    async def _missing(self) -> bool:
        try:
            await self._link.api(f"STREAM.INFO.{STREAM}")
        except ApiError as error:
            return error.err_code == NOT_FOUND
        return False

    async def _meta(self, subject: str) -> _Meta | None:
        """An object's description; one that cannot be read counts as an empty one."""
        message = await self._message({"last_by_subj": subject})
        if message is None:
            return None
        try:
            return msgspec.json.decode(_data(message), type=_Meta)
        except msgspec.DecodeError:
            return _Meta()

    async def _chunk(self, subject: str, following: int) -> tuple[int, bytes] | None:
        """The first piece at or after a sequence: from the leader, since a replica may not have it yet."""
        message = await self._message({"seq": following, "next_by_subj": subject})
        return None if message is None else (int(message["seq"]), _data(message))

    async def _message(self, query: dict[str, Any]) -> dict[str, Any] | None:
        try:
            answer = await self._link.api(f"STREAM.MSG.GET.{STREAM}", query)
        except ApiError as error:
            if error.err_code in (_NO_MESSAGE, NOT_FOUND):
                return None
            raise Unavailable(f"bucket {BUCKET_CONTENT}: {error}") from error
        message: dict[str, Any] = answer["message"]
        return message


def _data(message: dict[str, Any]) -> bytes:
    return base64.b64decode(message.get("data") or "")


def _named(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode()


def _name_of(subject: str) -> str:
    """The name a description stands under; "" for what is none."""
    try:
        return base64.urlsafe_b64decode(subject.removeprefix(_META)).decode()
    except ValueError:
        return ""
