"""A run's state for the next owner, as the ``WK_STATE`` stream keeps it: one message per run, the newest.

Written at each checkpoint and trim, at drain and when a run finishes. Encoding only; when to write is others'.
"""

from __future__ import annotations

from datetime import datetime

import msgspec
import structlog
from msgspec import UNSET

from protocol import subjects
from protocol.codec import digest, encode
from protocol.state import Cursor, RunState, StateCheckpoint, StatePacket, Tombstone
from sidecar.core.ledger_form import ledger_digest, ledger_json
from sidecar.core.state import Ledger
from sidecar.desk import Desk
from sidecar.notices import derived_id
from sidecar.runs import HotRun
from storage.records import OutboxRow

MOST_STATE_BYTES = 64 * 1024 * 1024
"""A larger ledger is not written: only the stream of the run's own messages holds it."""
FOLD_VERSION = 3
"""Of the fold: raised when the same messages may come to another ledger, or to another form of it."""

log = structlog.get_logger(__name__)


def standing(
    desk: Desk, hot: HotRun, checkpoint: StateCheckpoint | None, packet: StatePacket | None
) -> RunState:
    """The run as it stands, but for its ledger, which ``filled`` puts in; hold the lock.

    ``packet``: the newest that shortened the context.
    """
    head = hot.ledger.head
    return RunState(
        epoch=desk.voice.epoch,
        fold_version=FOLD_VERSION,
        checkpoint=checkpoint,
        ledger=msgspec.Raw(b"{}"),
        ledger_version=head.version,
        ledger_digest="",
        cursor=Cursor(
            stream_seq=max(desk.cursor.stream_seq, hot.view.stream_seq),
            stream_created=datetime.fromisoformat(desk.cursor.stream_created),
            next_seq=dict(head.next_seq),
        ),
        trimmed_through=hot.view.course.trimmed_through,
        settings=desk.runs.lane.settings,
        hash_chain=f"sha256:{hot.chain.hex()}",
        packet=UNSET if packet is None else packet,
    )


def filled(state: RunState, ledger: Ledger) -> RunState | None:
    """The state with that ledger; ``None`` when it is over ``MOST_STATE_BYTES``. CPU only, linear in the ledger."""
    # Not the canonical form: that writes 1.0 as 1, and rounds what no double holds.
    form = ledger_json(ledger)
    if len(form) > MOST_STATE_BYTES:
        log.warning(
            "state too large to be kept for another owner, left out", run=ledger.head.run, bytes=len(form)
        )
        return None
    return msgspec.structs.replace(state, ledger=msgspec.Raw(form), ledger_digest=ledger_digest(ledger))


def state_row(
    desk: Desk, hot: HotRun, checkpoint: StateCheckpoint | None, packet: StatePacket | None = None
) -> OutboxRow | None:
    """The run's whole state as an outbox row; ``None`` when it is over ``MOST_STATE_BYTES``.

    What is too large for a message goes into the bucket when it is sent.
    """
    state = filled(standing(desk, hot, checkpoint, packet), hot.ledger)
    if state is None:
        return None
    return OutboxRow(
        stream="state",
        subject=subjects.state(desk.tenant, desk.lane, hot.ledger.head.run),
        msg_id=state_id(desk, hot.ledger.head.run, state),
        payload=encode(state),
    )


def state_id(desk: Desk, run: str, state: RunState, *more: object) -> str:
    """The id of a message with this state, derived from what it says."""
    packet = state.packet
    return derived_id(
        "st",
        desk.tenant,
        desk.lane,
        run,
        state.epoch,
        state.ledger_digest,
        state.ledger_version,
        state.checkpoint.id if state.checkpoint is not None else "",
        packet.packet_id if packet is not UNSET else "",
        *more,
    )


def tombstone_row(
    desk: Desk, run: str, *, version: int, position: int, hash_chain: str, reason: str, at: datetime
) -> OutboxRow:
    """What the state stream keeps of a forgotten run: how far it went and the end of its chain, no content."""
    grave = Tombstone(
        run=run, through=version, hash_chain=hash_chain, at=at, reason=reason, position=position
    )
    state = RunState(
        epoch=desk.voice.epoch,
        fold_version=FOLD_VERSION,
        checkpoint=None,
        ledger=msgspec.Raw(b"{}"),
        ledger_version=version,
        ledger_digest=digest({}),
        cursor=Cursor(
            stream_seq=desk.cursor.stream_seq,
            stream_created=datetime.fromisoformat(desk.cursor.stream_created),
            next_seq={},
        ),
        trimmed_through=0,
        settings=desk.runs.lane.settings,
        hash_chain=hash_chain,
        tombstones=(grave,),
    )
    return OutboxRow(
        stream="state",
        subject=subjects.state(desk.tenant, desk.lane, run),
        msg_id=derived_id("st", desk.tenant, desk.lane, run, desk.voice.epoch, "forgotten", at),
        payload=encode(state),
    )
