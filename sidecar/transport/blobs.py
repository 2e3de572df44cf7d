"""The bucket for what is too large for a message. Names are the caller's, contents are never looked at."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import anyio
import nats.errors
from nats.js import errors as js_errors
from nats.js.object_store import ObjectStore

from protocol.subjects import BUCKET_BLOBS
from sidecar.transport.errors import StreamFull, Unavailable
from sidecar.transport.jetstream import Link

_FULL: Final = frozenset({10002, 10028, 10047, 10077})


class Blobs:
    """Put, get and delete whole values. A call the broker does not finish in time raises Unavailable."""

    def __init__(self, link: Link, *, replicas: int = 1, seconds: float = 30.0) -> None:
        self._link = link
        self._replicas = replicas
        self._seconds = seconds

    async def put(self, name: str, payload: bytes) -> None:
        """Store the value under the name, replacing an older one. Raises Unavailable, StreamFull."""
        async with self._bucket() as bucket:
            await bucket.put(name, payload)

    async def get(self, name: str) -> bytes | None:
        """The value, None where there is none. Raises Unavailable."""
        async with self._bucket() as bucket:
            with suppress(js_errors.NotFoundError, js_errors.ObjectNotFoundError):
                return (await bucket.get(name)).data or b""
        return None

    async def delete(self, name: str) -> None:
        """Delete the value. Idempotent. Raises Unavailable."""
        async with self._bucket() as bucket:
            with suppress(js_errors.NotFoundError, js_errors.ObjectNotFoundError):
                await bucket.delete(name)

    @asynccontextmanager
    async def _bucket(self) -> AsyncIterator[ObjectStore]:
        context = self._link.session().jetstream()
        with anyio.move_on_after(self._seconds) as scope:
            try:
                try:
                    bucket = await context.object_store(BUCKET_BLOBS)
                except js_errors.NotFoundError:
                    bucket = await context.create_object_store(BUCKET_BLOBS, replicas=self._replicas)
                yield bucket
            except js_errors.APIError as error:
                if error.err_code in _FULL:
                    raise StreamFull(BUCKET_BLOBS, str(error.description)) from error
                raise Unavailable(f"bucket {BUCKET_BLOBS}: {error}") from error
            except (nats.errors.Error, js_errors.Error, OSError) as error:
                raise Unavailable(f"bucket {BUCKET_BLOBS}: {error or type(error).__name__}") from error
        if scope.cancelled_caught:
            raise Unavailable(f"bucket {BUCKET_BLOBS}: not done within {self._seconds:g} s")
