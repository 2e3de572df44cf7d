"""What to do where the stream no longer holds a run from its beginning: the last owner's state goes on.

While a lane that was another owner's is folded anew, each run is compared with its newest state just when the
state's cursor is reached. Where fewer messages were folded than the state counts, the state's ledger takes the place
of what was folded; where it cannot be read, the loss is declared as a gap. It folds nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from datetime import datetime

import anyio.to_thread
import msgspec
import structlog
from msgspec.structs import replace

from protocol import subjects
from protocol.codec import digest
from protocol.errors import ProtocolError
from protocol.state import RunState
from sidecar.core.ledger_form import ledger_digest, ledger_of
from sidecar.core.state import Head, Ledger
from sidecar.deadlines import Wait, note_changes
from sidecar.desk import Desk
from sidecar.large_states import version_told, whole_state
from sidecar.runs import HotRun, Runs
from sidecar.states import FOLD_VERSION
from sidecar.transport.blobs import Blobs
from sidecar.transport.inventory import runs_with_state
from sidecar.transport.jetstream import Link
from sidecar.transport.publisher import LanePublisher
from storage.records import JournalEntry, Rebase, Unit

log = structlog.get_logger(__name__)


def _open_key(desk: Desk) -> str:
    return f"takeover/{desk.tenant}/{desk.lane}"


async def takeover_open(desk: Desk) -> bool:
    """Whether a takeover was begun on this disk and not ended."""
    return await desk.store.meta(_open_key(desk)) is not None


async def takeover_begun(desk: Desk) -> None:
    """From here on a start on this disk is a takeover, until ``takeover_done``."""
    await desk.store.commit(Unit(tenant=desk.tenant, lane=desk.lane, meta={_open_key(desk): b"1"}))


async def takeover_done(desk: Desk) -> None:
    """All that the last owner left is ours."""
    await desk.store.commit(Unit(tenant=desk.tenant, lane=desk.lane, meta={_open_key(desk): None}))


class Heritage:
    """One takeover's: the states to be looked at, by their cursors."""

    def __init__(
        self,
        desk: Desk,
        link: Link,
        publisher: LanePublisher,
        watch: Callable[[str, Sequence[Wait]], None],
    ) -> None:
        self._desk = desk
        self._watch = watch
        self._link = link
        self._blobs = Blobs(link)
        self._publisher = publisher
        self._read = False
        self._first = 1
        self._waiting: list[tuple[int, str]] = []
        """(cursor, run), the next one last."""
        self._doubtful: dict[str, int] = {}
        """Runs whose state is of no use → the versions it counts, as far as that can be told."""

    @property
    def due(self) -> int | None:
        """The cursor beyond which nothing may be folded before ``settle`` was called."""
        return self._waiting[-1][0] if self._waiting else None

    async def read(self, first: int) -> None:
        """Learn which states there are; ``first``: the stream's first message. Raises Unavailable."""
        self._first = first
        if self._read:
            return
        desk, self._waiting = self._desk, []
        created = datetime.fromisoformat(desk.cursor.stream_created)
        for run in await runs_with_state(self._link, desk.tenant, desk.lane):
            state = await self._state(run)
            if state is None or state.tombstones:
                continue
            if state.cursor.stream_created != created:
                # What it says of the stream is of another one.
                self._doubtful[run] = state.ledger_version
            else:
                self._waiting.append((state.cursor.stream_seq, run))
        self._waiting.sort(reverse=True)
        self._read = True

    async def settle(self, through: int) -> None:
        """Look at the states up to this cursor; everything up to there is folded and on disk, and nothing
        beyond. Raises Unavailable, StorageError."""
        while self._waiting and self._waiting[-1][0] <= through:
            run = self._waiting[-1][1]
            state = await self._state(run)
            if state is not None:
                await self._compare(run, state)
            self._waiting.pop()

    async def finish(self) -> None:
        """Look at all that is left, and note the runs whose loss has to be declared."""
        if self._waiting:
            await self.settle(self._waiting[0][0])
        for run, version in self._doubtful.items():
            await self._doubt(run, version)

    async def _state(self, run: str) -> RunState | None:
        subject = subjects.state(self._desk.tenant, self._desk.lane, run)
        found = await self._publisher.get_last(subject)
        if found is None:
            return None
        try:
            return await whole_state(self._blobs, found[1])
        except ProtocolError:
            try:
                self._doubtful[run] = version_told(found[1])
            except ProtocolError:
                self._doubtful[run] = 0
            return None

    async def _compare(self, run: str, state: RunState) -> None:
        desk = self._desk
        async with desk.changing():
            await desk.runs.load([run])
            hot = desk.runs.hot.get(run)
            if run in desk.runs.forgotten or (hot is not None and await self._whole(run, hot, state)):
                return
            ledger = await anyio.to_thread.run_sync(_readable, run, state)
            if ledger is None:
                self._doubtful[run] = state.ledger_version
                return
            log.warning(
                "the stream does not hold this run from its beginning: its state goes on",
                run=run,
                folded=0 if hot is None else hot.ledger.head.version,
                version=state.ledger_version,
            )
            await self._go_on(run, state, ledger)

    async def _whole(self, run: str, hot: HotRun, state: RunState) -> bool:
        """Whether the stream holds all that the state rests on, as far as can be told."""
        ledger = hot.ledger
        if ledger.head.version != state.ledger_version:
            return ledger.head.version > state.ledger_version
        alone = ledger.head.parent is None and not ledger.items["child"]
        if alone or self._first == 1 or state.fold_version != FOLD_VERSION:
            return True
        # What a relative said of it may be what is lost.
        return await self._desk.aside(run, lambda: ledger_digest(ledger)) == state.ledger_digest

    async def _go_on(self, run: str, state: RunState, ledger: Ledger) -> None:
        desk, head = self._desk, ledger.head
        former, chain = desk.runs.hot.get(run), _chain(state.hash_chain)
        placed = former is not None and former.ledger.head.version == head.version and former.chain == chain
        kept = [] if placed else await self._kept(run, state, ledger)
        relatives = {*ledger.items["child"], *ledger.items["claim"]}
        await desk.runs.load(relatives | ({head.parent} if head.parent else set()))
        hot = _put(desk.runs, run, ledger, chain)
        view = hot.view
        # How long it waits already the state does not say.
        began = note_changes(hot, desk.wall())
        if head.model is not None:
            view.budget.model = head.model.name
            view.budget.window = head.model.context_window
            view.budget.max_output = head.model.max_output_tokens
        view.stream_seq = max(view.stream_seq, state.cursor.stream_seq)
        # The state is whole up to its cursor; what the stream lost behind that has still to be proven.
        lost = self._first > state.cursor.stream_seq + 1
        view.unproven_before = self._first if lost and head.finished is None else 0
        touched = {run} | desk.runs.join_families({run, *(relatives & desk.runs.hot.keys())})
        rebase = Rebase(
            run=run,
            version=kept[0].version - 1 if kept else head.version,
            position=kept[0].position if kept else head.position,
            chain=hot.chain,
        )
        await desk.commit(touched=touched, journal=kept, rebase=[] if placed else [rebase])
        self._watch(run, began)

    async def _kept(self, run: str, state: RunState, ledger: Ledger) -> list[JournalEntry]:
        """The stored messages whose places the state's chain proves: those from its checkpoint's last one on."""
        desk, checkpoint = self._desk, state.checkpoint
        if checkpoint is None or checkpoint.covers_through.event_id is None:
            return []
        heads = await desk.store.tail(desk.tenant, desk.lane, run, after=0, bodies=False)
        wanted, places = checkpoint.covers_through.event_id, []
        for at in range(len(heads) - 1, -1, -1):
            if heads[at].event_id == wanted and heads[at].channel == "event":
                places = _placed(heads[at:], state, ledger)
                break
        if not places:
            return []
        stored = await desk.store.tail(
            desk.tenant, desk.lane, run, after=0, after_version=heads[at].version - 1, bodies=True
        )
        return [
            replace(entry, version=version, position=position, chain=chain)
            for entry, (version, position, chain) in zip(stored, places, strict=True)
        ]

    async def _doubt(self, run: str, version: int) -> None:
        desk = self._desk
        async with desk.changing():
            await desk.runs.load([run])
            if run in desk.runs.forgotten:
                return
            hot = desk.runs.hot.get(run)
            if hot is None:
                desk.runs.ledgers[run] = Ledger(Head(run=run))
                hot = desk.runs.of(run)
            elif hot.ledger.head.finished is not None:
                return
            first = await desk.store.tail(desk.tenant, desk.lane, run, after=-1, limit=1, bodies=False)
            begun = (
                bool(first) and first[0].version == 1 and first[0].type in ("run.started", "child.spawned")
            )
            if hot.ledger.head.version >= version and begun:
                return
            log.error("a run is not whole and its state cannot be read: its loss is declared", run=run)
            hot.view.unproven_before = max(self._first, hot.view.stream_seq + 2)
            await desk.commit(touched=[run])


def _put(runs: Runs, run: str, ledger: Ledger, chain: bytes) -> HotRun:
    """Put this ledger in the place of what was folded of a loaded run; all of both is written with the next commit."""
    hot = runs.hot.get(run)
    if hot is None:
        runs.ledgers[run] = ledger
        hot = runs.of(run)
    hot.changed |= hot.ledger.changed
    for one in (hot.ledger, ledger):
        hot.changed.update((kind, key) for kind, items in one.items.items() for key in items)
    hot.ledger = runs.ledgers[run] = ledger
    ledger.changed |= hot.changed
    hot.chain = chain
    return hot


def _chain(text: str) -> bytes:
    return bytes.fromhex(text.removeprefix("sha256:"))


def _readable(run: str, state: RunState) -> Ledger | None:
    """The state's ledger, if it is what the state says it is and of a form that is known."""
    if state.fold_version > FOLD_VERSION:
        return None
    try:
        ledger = ledger_of(bytes(state.ledger))
        whole = digest(_plain(state)) == state.ledger_digest and len(_chain(state.hash_chain)) == 32
    except (ValueError, RecursionError) as error:
        log.error("the ledger of a state cannot be read", run=run, error=str(error))
        return None
    return ledger if whole and (ledger.head.run, ledger.head.version) == (run, state.ledger_version) else None


def _plain(state: RunState) -> object:
    return msgspec.json.decode(state.ledger)


def _placed(heads: list[JournalEntry], state: RunState, ledger: Ledger) -> list[tuple[int, int, bytes]]:
    """(version, position, chain) of these messages, the first of which the checkpoint ends with; [] if the chain
    does not lead from there to the state's end."""
    assert state.checkpoint is not None
    version = state.ledger_version - len(heads) + 1
    position = state.checkpoint.covers_through.position
    chain = _chain(state.checkpoint.range_digest)
    places = [(version, position, chain)]
    for entry in heads[1:]:
        version += 1
        position += entry.channel != "record"
        chain = hashlib.sha256(chain + entry.sha256).digest()
        places.append((version, position, chain))
    return places if chain == _chain(state.hash_chain) and position == ledger.head.position else []
