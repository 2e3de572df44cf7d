"""Rebuilding a lane whose store is not the last owner's: what the state stream knows beyond the messages.

The ledger needs nothing from it, since the fold of the run's own messages is the truth. Checkpoints do:
another owner's newest one is taken as it is, with the packet that was published on it, and ours that are none of its
ancestors are dropped.
"""

from __future__ import annotations

from datetime import datetime

import structlog
from msgspec import UNSET

from protocol import subjects
from protocol.codec import encode
from protocol.errors import ProtocolError
from protocol.state import RunState, StateCheckpoint
from sidecar.core.course import inherited
from sidecar.core.ledger_form import ledger_digest
from sidecar.core.tail import Tail
from sidecar.core.trimming import REFERENCE_TOKENS, Cleared, clearing
from sidecar.desk import Desk
from sidecar.large_states import cursor_told, newest_state, whole_state
from sidecar.packets import Packets, StoredBody, adopted_packet
from sidecar.ranges import Reading, range_digest, tail_items
from sidecar.retention import adopt_tombstone
from sidecar.states import FOLD_VERSION
from sidecar.transport.blobs import Blobs
from sidecar.transport.inventory import runs_with_state
from sidecar.transport.jetstream import Link
from sidecar.transport.publisher import LanePublisher
from storage.records import Adoption, CheckpointRow

log = structlog.get_logger(__name__)


async def adopt_states(desk: Desk, link: Link, publisher: LanePublisher, packets: Packets) -> int:
    """Take over the checkpoints the state stream holds for this lane; returns how many runs had one.

    Call once everything up to now is folded. A state that cannot be read is left alone and told.
    """
    adopted, blobs = 0, Blobs(link)
    for run in await runs_with_state(link, desk.tenant, desk.lane):
        found = await publisher.get_last(subjects.state(desk.tenant, desk.lane, run))
        if found is None:
            continue
        try:
            state = await newest_state(blobs, found[1])
            if not await _covers_ours(desk, run, state.checkpoint):
                # Said on an older object, whose ledger the run goes on from; the stream lost what lies between.
                log.error("a checkpoint covers messages that are lost: the one before it stands", run=run)
                state = await whole_state(blobs, found[1])
        except ProtocolError as error:
            log.error("state of a run cannot be read", run=run, error=str(error))
            continue
        if state.tombstones:
            await adopt_tombstone(desk, run, state)
            continue
        adopted += await _adopt(desk, run, state, packets)
    return adopted


async def _covers_ours(desk: Desk, run: str, checkpoint: StateCheckpoint | None) -> bool:
    """Whether the messages a checkpoint covers are those we have under their positions, as far as can be told."""
    if checkpoint is None:
        return True
    through = checkpoint.covers_through.position
    digest = await range_digest(desk, run, through)
    if digest is not None:
        return digest == checkpoint.range_digest
    async with desk.lock:
        await desk.runs.load([run])
        hot = desk.runs.hot.get(run)
        # Of what came before the run's ledger was taken over, the journal has nothing.
        return hot is None or through <= hot.ledger.head.position


async def disk_is_behind(desk: Desk, link: Link, publisher: LanePublisher) -> bool:
    """Whether the lane's states tell of messages our disk does not know: it has lost commits since.

    What we published after them, checkpoints above all, is known to agents and no more to us.
    """
    cursor = desk.cursor
    if not cursor.stream_created:
        return False
    stream, blobs = datetime.fromisoformat(cursor.stream_created), Blobs(link)
    ended = set(await desk.store.each_run(desk.tenant, desk.lane, lambda row: row.run, finished=True))
    for run in await runs_with_state(link, desk.tenant, desk.lane):
        if run in ended:
            continue
        found = await publisher.get_last(subjects.state(desk.tenant, desk.lane, run))
        try:
            told = None if found is None else await cursor_told(blobs, found[1])
        except ProtocolError:
            continue
        if told is not None and told.stream_created == stream and told.stream_seq > cursor.stream_seq:
            log.error(
                "the disk has lost commits: what the streams hold is taken up as after another owner",
                lane=desk.lane,
                cursor=cursor.stream_seq,
                published=told.stream_seq,
            )
            return True
    return False


async def drop_unsent(desk: Desk) -> int:
    """Messages of ours that never left while another owned the lane must not leave any more."""
    dropped = 0
    while True:
        rows = await desk.store.outbox(desk.tenant, desk.lane, limit=1_000)
        if not rows:
            return dropped
        dropped += await desk.store.outbox_sent([row.id for row in rows])


async def _adopt(desk: Desk, run: str, state: RunState, packets: Packets) -> bool:
    async with desk.changing():
        await desk.runs.load([run])
        hot = desk.runs.hot.get(run)
        if hot is None:
            log.warning("a state without messages: the stream does not hold this run any more", run=run)
            return False
        ledger = hot.ledger
        if (
            # A fold of another version may come to another ledger: no cause for alarm.
            state.fold_version == FOLD_VERSION
            and ledger.head.version == state.ledger_version
            and await desk.aside(run, lambda: ledger_digest(ledger)) != state.ledger_digest
        ):
            desk.metrics.ledger_mismatch()
            log.error(
                "the ledger folded anew differs from the last owner's", run=run, version=state.ledger_version
            )
        view, course, checkpoint = hot.view, hot.view.course, state.checkpoint
        known = checkpoint is None or checkpoint.id == course.checkpoint_id
        packet = None if state.packet is UNSET else state.packet
        told = packet is None or packet.packet_id == view.published.shortening_id
        if known and told and state.trimmed_through <= course.trimmed_through:
            return False
        covered = course.covers_through if checkpoint is None else checkpoint.covers_through.position
        if covered > ledger.head.position:
            log.error("a checkpoint covers more than the stream holds: left alone", run=run)
            return False
        # Read before anything is changed: a failure must leave no course that knows of a checkpoint which
        # the store does not have.
        trimmed_through = max(course.trimmed_through, state.trimmed_through)
        tail_tokens, cleared = await _tail(desk, run, covered, trimmed_through)
        standing = checkpoint if checkpoint is not None else await packets.checkpoint(run)
        course.trimmed_through = trimmed_through
        view.cleared = []
        view.note_cleared(cleared)
        view.tail_tokens = tail_tokens
        view.tail_total = view.budget.total
        adopted, kept, said_at = [], None, 0
        if checkpoint is not None and not known:
            course.checkpoint_version = checkpoint.version
            course.checkpoint_id = checkpoint.id
            course.covers_through = covered
            course.compactions = max(course.compactions, checkpoint.version)
            adopted.append(Adoption(run=run, chain="live", checkpoint=_row(run, checkpoint)))
        if packet is not None:
            # What the last owner's message list began with, ours begins with as well.
            view.published.shortening_id, said_at = packet.packet_id, packet.position
            kept = adopted_packet(run, packet)
        if adopted or not told:
            # What the next compaction takes the place of beside the tail.
            text_tokens = (
                0 if standing is None else packets.build_with(run, "takeover", standing, view).text_tokens
            )
            inherited(
                course,
                view.budget,
                desk.budget,
                "compaction" if adopted else "trim",
                said_at=said_at,
                packet_tokens=text_tokens,
                tail_tokens=tail_tokens,
            )
        await desk.commit(touched=[run], adopt=adopted, packet=kept)
        if adopted:
            packets.forget(run)
        return bool(adopted)


async def _tail(desk: Desk, run: str, covered: int, trimmed_through: int) -> tuple[int, tuple[Cleared, ...]]:
    """Estimated tokens of what follows the checkpoint, from the journal, and the results cleared in it."""
    hot = desk.runs.hot[run]
    tail = Tail(clearing=clearing(desk.budget.result_tokens, covered))
    await Reading(desk, run, covered, hot.ledger.head.position).pages(
        lambda entries: tail.extend(tail_items(entries))
    )
    cleared = tail.cleared(trimmed_through)
    tokens = tail.tokens - sum(item.tokens - REFERENCE_TOKENS for item in cleared)
    return round(tokens * hot.view.budget.scale()), cleared


def _row(run: str, checkpoint: StateCheckpoint) -> CheckpointRow:
    body = StoredBody(
        summarizer=checkpoint.summarizer,
        projector=checkpoint.projector,
        attempt_id="",
        parent_checkpoint_id=checkpoint.parent_checkpoint_id,
        summary=checkpoint.summary,
    )
    return CheckpointRow(
        checkpoint_id=checkpoint.id,
        run=run,
        chain="live",
        version=checkpoint.version,
        parent_id=checkpoint.parent_checkpoint_id,
        covers_through=checkpoint.covers_through.position,
        event_id=checkpoint.covers_through.event_id or "",
        range_digest=checkpoint.range_digest,
        created_at="",
        body=encode(body),
    )
