"""Subjects and stream names. Builders refuse what could address something else; nothing talks to a broker."""

from __future__ import annotations

import base64
from typing import Final, Literal, NamedTuple, get_args

from protocol.identifiers import is_digest, is_token

PREFIX: Final = "wk.v1"

STREAM_IN: Final = "WK_IN"
STREAM_OUT: Final = "WK_OUT"
STREAM_REJECTED: Final = "WK_REJECTED"
STREAM_STATE: Final = "WK_STATE"
BUCKET_BLOBS: Final = "WK_BLOBS"
BUCKET_CONTENT: Final = "WK_CONTENT"
CONTENT_PIECES: Final = f"$O.{BUCKET_CONTENT}.C."
CONTENT_DESCRIPTIONS: Final = f"$O.{BUCKET_CONTENT}.M."

LANE_TOKEN: Final = "_lane"
"""Stands in the run's place for what belongs to the lane itself."""
NO_RUN_TOKEN: Final = "_"
"""Stands in the run's place of a rejection when no run can be told."""

Channel = Literal["event", "authority", "record"]
OutKind = Literal["packet", "receipt", "notice", "rejected", "epoch"]
Verb = Literal["packet", "context", "fetch", "search", "authorize", "compact", "status"]
CHANNELS: Final[frozenset[str]] = frozenset(get_args(Channel))
OUT_KINDS: Final[frozenset[str]] = frozenset(get_args(OutKind))
VERBS: Final[frozenset[str]] = frozenset(get_args(Verb))

IN_SUBJECTS: Final = (f"{PREFIX}.in.*.*.*.*",)
OUT_SUBJECTS: Final = tuple(f"{PREFIX}.out.*.*.*.{kind}" for kind in ("packet", "receipt", "notice", "epoch"))
REJECTED_SUBJECTS: Final = (f"{PREFIX}.out.*.*.*.rejected",)
STATE_SUBJECTS: Final = (f"{PREFIX}.state.>",)


class Address(NamedTuple):
    """Where an inbound message was published. ``run`` may be ``_lane`` on the record channel."""

    tenant: str
    lane: str
    run: str
    channel: Channel


class OutAddress(NamedTuple):
    """Where an outbound message is published. ``run`` may be ``_lane`` (epoch) or ``_`` (rejected)."""

    tenant: str
    lane: str
    run: str
    kind: OutKind


class StateAddress(NamedTuple):
    """Whose state a message of the state stream is. ``run`` is ``_lane`` for the epoch record."""

    tenant: str
    lane: str
    run: str


class AskAddress(NamedTuple):
    """Who asks (the run) what (the verb)."""

    tenant: str
    lane: str
    run: str
    verb: Verb


def _token(name: str, value: str) -> str:
    if not is_token(value):
        raise ValueError(f"{name} is not a subject token: {value[:160]!r}")
    return value


def _run(value: str, *special: str) -> str:
    return value if value in special else _token("run", value)


def inbound(tenant: str, lane: str, run: str, channel: Channel) -> str:
    """Subject to publish on for a run's channel. ``_lane`` is a run on the record channel only.

    Raises ValueError for a bad token or channel.
    """
    if channel not in CHANNELS:
        raise ValueError(f"unknown channel {channel!r}")
    run = _run(run, LANE_TOKEN) if channel == "record" else _run(run)
    return f"{PREFIX}.in.{_token('tenant', tenant)}.{_token('lane', lane)}.{run}.{channel}"


def outbound(tenant: str, lane: str, run: str, kind: OutKind) -> str:
    """Subject of an outbound message. As a run ``rejected`` takes ``_`` and ``_lane``, ``epoch`` ``_lane``.

    Raises ValueError for a bad token or kind.
    """
    if kind not in OUT_KINDS:
        raise ValueError(f"unknown kind {kind!r}")
    special: tuple[str, ...] = ()
    if kind == "rejected":
        special = (NO_RUN_TOKEN, LANE_TOKEN)
    elif kind == "epoch":
        special = (LANE_TOKEN,)
    return f"{PREFIX}.out.{_token('tenant', tenant)}.{_token('lane', lane)}.{_run(run, *special)}.{kind}"


def state(tenant: str, lane: str, run: str) -> str:
    """Subject of a run's state. Raises ValueError for a bad token."""
    return f"{PREFIX}.state.{_token('tenant', tenant)}.{_token('lane', lane)}.{_token('run', run)}"


def ask(tenant: str, lane: str, run: str, verb: Verb) -> str:
    """Subject of a question by a run. Raises ValueError for a bad token or verb."""
    if verb not in VERBS:
        raise ValueError(f"unknown verb {verb!r}")
    return f"{PREFIX}.ask.{_token('tenant', tenant)}.{_token('lane', lane)}.{_token('run', run)}.{verb}"


def summarize(tenant: str, lane: str, run: str) -> str:
    """Subject of a request to a summariser over NATS. Raises ValueError for a bad token."""
    return f"{PREFIX}.summarize.{_token('tenant', tenant)}.{_token('lane', lane)}.{_token('run', run)}"


def state_epoch(tenant: str, lane: str) -> str:
    """Subject of the lane's epoch record on the state stream."""
    return f"{PREFIX}.state.{_token('tenant', tenant)}.{_token('lane', lane)}.{LANE_TOKEN}"


def out_epoch(tenant: str, lane: str) -> str:
    """Subject of the lane's epoch record on the out stream."""
    return outbound(tenant, lane, LANE_TOKEN, "epoch")


def inbound_filter(tenant: str, lane: str) -> str:
    """Every inbound subject of one lane, its own record included."""
    return f"{PREFIX}.in.{_token('tenant', tenant)}.{_token('lane', lane)}.>"


def run_inbound_filter(tenant: str, lane: str, run: str) -> str:
    """Every channel of one run."""
    return f"{PREFIX}.in.{_token('tenant', tenant)}.{_token('lane', lane)}.{_token('run', run)}.*"


def run_outbound_filter(tenant: str, lane: str, run: str) -> str:
    """Everything that was said about one run."""
    return f"{PREFIX}.out.{_token('tenant', tenant)}.{_token('lane', lane)}.{_token('run', run)}.*"


def outbound_filter(tenant: str, lane: str) -> str:
    """Every outbound subject of one lane."""
    return f"{PREFIX}.out.{_token('tenant', tenant)}.{_token('lane', lane)}.>"


def state_filter(tenant: str, lane: str) -> str:
    """Every state subject of one lane, the epoch record included."""
    return f"{PREFIX}.state.{_token('tenant', tenant)}.{_token('lane', lane)}.*"


def ask_filter(tenant: str, lane: str) -> str:
    """Every question of the runs of one lane."""
    return f"{PREFIX}.ask.{_token('tenant', tenant)}.{_token('lane', lane)}.*.*"


def summarize_filter(tenant: str, lane: str) -> str:
    """Every summarise request of one lane."""
    return f"{PREFIX}.summarize.{_token('tenant', tenant)}.{_token('lane', lane)}.*"


def content_object(tenant: str, lane: str, run: str, digest: str) -> str:
    """Name of the object that holds the text with this digest (``sha256:<hex>``) of a run.

    Raises ValueError for a bad token or digest.
    """
    return f"{content_prefix(tenant, lane, run)}{_hex(digest)}"


def content_prefix(tenant: str, lane: str, run: str) -> str:
    """How the names of a run's objects begin. Raises ValueError for a bad token."""
    return f"{_token('tenant', tenant)}/{_token('lane', lane)}/{_token('run', run)}/"


def content_pieces(tenant: str, lane: str, run: str, digest: str) -> str:
    """Subject of the object's pieces: it follows from the name, so that permissions can be given by lane.

    Raises ValueError for a bad token or digest.
    """
    return content_pieces_filter(tenant, lane, run)[:-1] + _hex(digest)


def content_pieces_filter(tenant: str, lane: str, run: str) -> str:
    """Every piece of every object of a run. Raises ValueError for a bad token."""
    whose = f"{_token('tenant', tenant)}.{_token('lane', lane)}.{_token('run', run)}"
    return f"{CONTENT_PIECES}{whose}.*"


def content_description(name: str) -> str:
    """Subject of an object's description, which the daemon does not read."""
    return CONTENT_DESCRIPTIONS + base64.urlsafe_b64encode(name.encode()).decode()


def _hex(digest: str) -> str:
    if not is_digest(digest):
        raise ValueError(f"not a digest: {digest[:160]!r}")
    return digest.removeprefix("sha256:")


def _split(subject: str, area: str, count: int) -> list[str]:
    parts = subject.split(".")
    if len(parts) != 3 + count or parts[0] != "wk" or parts[1] != "v1" or parts[2] != area:
        raise ValueError(f"not a {PREFIX}.{area} subject: {subject[:160]!r}")
    return parts[3:]


def parse_inbound(subject: str) -> Address:
    """The address an inbound subject names. Raises ValueError when it is none."""
    tenant, lane, run, channel = _split(subject, "in", 4)
    address = Address(tenant, lane, run, channel)  # type: ignore[arg-type]  # checked by the builder
    inbound(*address)
    return address


def parse_outbound(subject: str) -> OutAddress:
    """The address an outbound subject names. Raises ValueError when it is none."""
    tenant, lane, run, kind = _split(subject, "out", 4)
    address = OutAddress(tenant, lane, run, kind)  # type: ignore[arg-type]  # checked by the builder
    outbound(*address)
    return address


def parse_state(subject: str) -> StateAddress:
    """Whose state a state subject names. Raises ValueError when it is none."""
    tenant, lane, run = _split(subject, "state", 3)
    _token("tenant", tenant)
    _token("lane", lane)
    _run(run, LANE_TOKEN)
    return StateAddress(tenant, lane, run)


def parse_ask(subject: str) -> AskAddress:
    """Who asks what. Raises ValueError when the subject is no question."""
    tenant, lane, run, verb = _split(subject, "ask", 4)
    address = AskAddress(tenant, lane, run, verb)  # type: ignore[arg-type]  # checked by the builder
    ask(*address)
    return address
