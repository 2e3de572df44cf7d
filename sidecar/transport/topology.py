"""The four streams: made as the wire protocol says, read back, and refused where a difference would
break correctness.

An operator's larger limits, more replicas and byte limits are left alone. Nothing here changes an
existing stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import structlog

from protocol import subjects
from sidecar.transport.errors import ASK_FOR, ApiError, Denied, Refused, Unavailable
from sidecar.transport.jetstream import Link
from sidecar.transport.retry import until_available

log = structlog.get_logger(__name__)

_SECOND: Final = 1_000_000_000
NOT_FOUND: Final = 10059
_NAME_IN_USE: Final = 10058
_OVERLAP: Final = 10065
MAX_PER_SUBJECT: Final = 100_000_000
"""A stream that refuses new messages per subject needs a number; this one is a run's messages on one
channel.
"""


class StreamFacts(msgspec.Struct, frozen=True):
    """Where a stream stands. ``created`` (RFC 3339) names its incarnation: a recreated stream has
    another one.
    """

    first_seq: int
    last_seq: int
    created: str
    messages: int


def desired_streams(replicas: int, max_age_seconds: int) -> dict[str, dict[str, Any]]:
    """Each stream's settings as they must be, by name."""
    common: dict[str, Any] = {"retention": "limits", "storage": "file", "num_replicas": replicas}
    return {
        subjects.STREAM_IN: {
            **common,
            "subjects": list(subjects.IN_SUBJECTS),
            "discard": "new",
            "discard_new_per_subject": True,
            "max_msgs_per_subject": MAX_PER_SUBJECT,
            "duplicate_window": _SECOND // 10,
            "max_age": max_age_seconds * _SECOND,
        },
        subjects.STREAM_OUT: {
            **common,
            "subjects": list(subjects.OUT_SUBJECTS),
            "discard": "old",
            "duplicate_window": 3600 * _SECOND,
            "allow_direct": True,
        },
        subjects.STREAM_REJECTED: {**common, "subjects": list(subjects.REJECTED_SUBJECTS), "discard": "old"},
        # Discard new: a full state stream must refuse, not drop another run's only state. Per subject
        # the limit of one still replaces.
        subjects.STREAM_STATE: {
            **common,
            "subjects": list(subjects.STATE_SUBJECTS),
            "discard": "new",
            "max_msgs_per_subject": 1,
            "max_age": 0,
        },
    }


async def ensure_streams(
    link: Link, *, replicas: int = 1, max_age_seconds: int = 30 * 24 * 3600, patience: float = 20.0
) -> dict[str, StreamFacts]:
    """Create the streams that are missing and check all four. Idempotent; two sidecars may do it at once.

    ``max_age_seconds`` is how long ``WK_IN`` keeps messages. Retries for ``patience`` seconds while
    JetStream is not ready, then raises Unavailable. Raises Refused naming stream and setting when one is
    unusable or may not be made.
    """
    facts: dict[str, StreamFacts] = {}
    for name, wanted in desired_streams(replicas, max_age_seconds).items():

        async def one(name: str = name, wanted: dict[str, Any] = wanted) -> dict[str, Any]:
            return await _ensure(link, name, wanted)

        try:
            info = await until_available(one, patience=patience)
        except Denied as error:
            raise Refused(f"stream {name}: {error.reason}: {ASK_FOR}") from error
        _check(name, wanted, info["config"])
        facts[name] = facts_of(info)
    return facts


async def missing_streams(link: Link) -> list[str]:
    """Which of the four the broker says it does not have, each asked for once. Raises Unavailable."""
    missing = []
    for name in desired_streams(1, 0):
        try:
            await link.api(f"STREAM.INFO.{name}")
        except ApiError as error:
            if error.err_code != NOT_FOUND:
                raise Unavailable(f"stream {name}: {error}") from error
            missing.append(name)
    return missing


async def _ensure(link: Link, name: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return await link.api(f"STREAM.INFO.{name}")
    except ApiError as error:
        if error.err_code != NOT_FOUND:
            raise
    try:
        created = await link.api(f"STREAM.CREATE.{name}", {"name": name, **wanted})
    except ApiError as error:
        if error.err_code == _NAME_IN_USE:
            return await link.api(f"STREAM.INFO.{name}")
        if error.err_code == _OVERLAP:
            raise Refused(f"stream {name}: its subjects belong to another stream already") from error
        if error.code == 503:
            raise
        raise Refused(f"stream {name} cannot be created: {error.description}") from error
    log.info("stream created", stream=name)
    return created


def facts_of(info: Mapping[str, Any]) -> StreamFacts:
    """The facts in a stream's information."""
    state = info["state"]
    return StreamFacts(
        int(state["first_seq"]), int(state["last_seq"]), str(info["created"]), int(state["messages"])
    )


def covers(pattern: str, subject: str) -> bool:
    """Whether every subject that matches ``subject`` (itself a pattern) also matches ``pattern``."""
    left, right = pattern.split("."), subject.split(".")
    for index, token in enumerate(left):
        if token == ">":
            return index < len(right)
        if index >= len(right) or right[index] == ">":
            return False
        if token not in ("*", right[index]):
            return False
    return len(left) == len(right)


def _check(name: str, wanted: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise Refused for what breaks correctness, log what only falls short."""

    def refuse(setting: str, reason: str) -> None:
        raise Refused(f"stream {name}: {setting} is {config.get(setting)!r}: {reason}")

    def warn(setting: str, reason: str) -> None:
        log.warning("stream setting", stream=name, setting=setting, value=config.get(setting), reason=reason)

    have = config.get("subjects") or []
    for subject in wanted["subjects"]:
        if not any(covers(pattern, subject) for pattern in have):
            refuse("subjects", f"{subject} is not covered")
    if config.get("retention") != "limits":
        refuse("retention", "only limits lets a new owner read again")
    for setting in ("mirror", "subject_transform"):
        if config.get(setting):
            refuse(setting, "messages must be stored here under their own subject")
    if config.get("sealed"):
        refuse("sealed", "nothing can be stored")
    if config.get("no_ack"):
        refuse("no_ack", "a publish could not be confirmed")
    if config.get("storage") != "file":
        warn("storage", "messages do not survive a restart of the broker")
    if config.get("num_replicas", 1) < wanted["num_replicas"]:
        warn("num_replicas", "fewer than configured")

    limited = any(int(config.get(limit, -1) or -1) > 0 for limit in ("max_msgs", "max_bytes"))
    per_subject = int(config.get("max_msgs_per_subject", -1) or -1)
    if name == subjects.STREAM_IN:
        if config.get("discard") != "new" and (limited or per_subject > 0):
            refuse("discard", "a full stream would drop messages nobody has read")
        if per_subject > 0 and not config.get("discard_new_per_subject"):
            refuse("discard_new_per_subject", "a full subject would drop messages nobody has read")
        if 0 < int(config.get("max_age", 0)) < int(wanted["max_age"]):
            warn("max_age", "runs that live longer cannot be rebuilt")
        if int(config.get("duplicate_window", 0)) > int(wanted["duplicate_window"]):
            warn(
                "duplicate_window", "a message id set by anyone can suppress another's message for this long"
            )
    elif name == subjects.STREAM_STATE:
        if int(config.get("max_age", 0)) > 0:
            refuse("max_age", "ownership and states must not age out")
        if config.get("discard") != "new" and limited:
            refuse("discard", "a full stream would drop another run's only state")
        if limited:
            warn("max_bytes", "once full, leases may not be renewed")
        if per_subject != 1:
            warn("max_msgs_per_subject", "old states are kept")
        if per_subject > 0 and config.get("discard_new_per_subject"):
            refuse("discard_new_per_subject", "a state could never be replaced")
    elif name == subjects.STREAM_OUT:
        if int(config.get("duplicate_window", 0)) < int(wanted["duplicate_window"]):
            warn("duplicate_window", "a message published again later is stored twice")
        if not config.get("allow_direct"):
            warn("allow_direct", "agents cannot read the newest packet directly")
