"""What a stream holds of a lane, and taking a finished run's messages out of it. Nothing is decided here."""

from __future__ import annotations

from typing import Any

from protocol import subjects
from protocol.identifiers import is_token
from sidecar.transport.errors import ApiError, Unavailable
from sidecar.transport.jetstream import Link


async def subjects_held(link: Link, stream: str, filter_subject: str) -> dict[str, int]:
    """Every subject of the filter with a message in the stream, and how many it has. Raises Unavailable."""
    found: dict[str, int] = {}
    offset = 0
    while True:
        query = {"subjects_filter": filter_subject, "offset": offset}
        info = await _api(link, stream, f"STREAM.INFO.{stream}", query)
        page: dict[str, int] = info["state"].get("subjects") or {}
        found.update(page)
        offset += len(page)
        if not page or offset >= int(info.get("total", 0)):
            return found


async def runs_with_state(link: Link, tenant: str, lane: str) -> list[str]:
    """The lane's runs that have a state in the state stream, by name; a subject that names no run is passed
    over. Raises Unavailable."""
    held = await subjects_held(link, subjects.STREAM_STATE, f"{subjects.PREFIX}.state.{tenant}.{lane}.*")
    return sorted(filter(is_token, (subject.rpartition(".")[2] for subject in held)))


async def purge(link: Link, stream: str, subject: str, *, through: int | None = None) -> int:
    """Delete every message of the subject (or filter) from the stream, up to a sequence where one is given,
    and return how many. Idempotent.

    Raises Unavailable, Denied where it is not permitted.
    """
    query: dict[str, Any] = {"filter": subject}
    if through is not None:
        query["seq"] = through + 1
    answer = await _api(link, stream, f"STREAM.PURGE.{stream}", query)
    return int(answer.get("purged", 0))


async def _api(link: Link, stream: str, verb: str, query: dict[str, Any]) -> dict[str, Any]:
    try:
        return await link.api(verb, query, timeout=30.0)
    except ApiError as error:
        raise Unavailable(f"stream {stream}: {error.description}") from error
