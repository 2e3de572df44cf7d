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


def state_row(
    desk: Desk,
    hot: HotRun,
    checkpoint: StateCheckpoint | None,
    packet: StatePacket | None = None,
    handed: tuple[Ledger, str] | None = None,
) -> OutboxRow | None:
    """The run's state as an outbox row; ``None`` when it is over ``MOST_STATE_BYTES``. ``packet``: the newest that
    shortened the context. ``handed``: the ledger as it was earlier, and its digest.

    What is too large for a message goes into the bucket when it is sent.
    """
    head = hot.ledger.head
    ledger = ledger_json(hot.ledger)
    if len(ledger) > MOST_STATE_BYTES:
        # Told before its digest is taken, which costs more than everything else together.
        _say_too_large(head.run, len(ledger))
        return None
    state = RunState(
        epoch=desk.voice.epoch,
        fold_version=FOLD_VERSION,
        checkpoint=checkpoint,
        ledger=msgspec.Raw(ledger),
        ledger_version=head.version,
        ledger_digest=_digest(hot.ledger, handed),
        cursor=Cursor(
            stream_seq=max(desk.cursor.stream_seq, hot.view.stream_seq),
            stream_created=datetime.fromisoformat(desk.cursor.stream_created),
            next_seq=head.next_seq,
        ),
        trimmed_through=hot.view.course.trimmed_through,
        settings=desk.runs.lane.settings,
        hash_chain=f"sha256:{hot.chain.hex()}",
        packet=UNSET if packet is None else packet,
    )
    payload = encode(state)
    return OutboxRow(
        stream="state",
        subject=subjects.state(desk.tenant, desk.lane, head.run),
        msg_id=derived_id(
            "st",
            desk.tenant,
            desk.lane,
            head.run,
            desk.voice.epoch,
            state.ledger_digest,
            head.version,
            checkpoint.id if checkpoint is not None else "",
            packet.packet_id if packet is not None else "",
        ),
        payload=payload,
    )


def _digest(ledger: Ledger, handed: tuple[Ledger, str] | None) -> str:
    # Items are replaced whole: to see that they are the same ones costs little beside digesting them.
    if handed is not None and handed[0].head == ledger.head and handed[0].items == ledger.items:
        return handed[1]
    return ledger_digest(ledger)


def _say_too_large(run: str, size: int) -> None:
    log.warning("state too large to be kept for another owner, left out", run=run, bytes=size)


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
