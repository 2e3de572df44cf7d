"""Hot runs: the ledgers, budgets and compaction courses held in memory for one lane.

It decides what is loaded, what is written back and what is let go; it folds nothing and sends nothing.
Memory is true only after COMMIT: a caller whose commit failed calls ``discard`` and reads again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

import msgspec
import structlog

from protocol.events import Settings
from sidecar.core import state
from sidecar.core.family import line
from sidecar.core.family import root as topmost
from sidecar.memory import ITEM_BYTES, RUN_BYTES, weight_of_ledger, weight_of_row
from sidecar.view import View, ViewUnreadable, decode_level, decode_view, encode_view
from storage.records import GENESIS, ItemRow, RunRow, StoredRun
from storage.store import Store

log = structlog.get_logger(__name__)


class HotRun:
    """One run in memory."""

    __slots__ = (
        "busy",
        "chain",
        "changed",
        "counted",
        "family",
        "ledger",
        "traceparent",
        "used_at",
        "view",
        "weighed",
        "weight",
    )

    def __init__(self, ledger: state.Ledger, view: View, chain: bytes, family: str) -> None:
        self.ledger = ledger
        self.view = view
        self.chain = chain
        self.family = family
        self.changed: set[tuple[str, str]] = set()
        """Items to be written, beside those that ``ledger.changed`` still names."""
        self.used_at = 0
        self.busy = 0
        """Compactions and answers that hold on to it; it is not let go meanwhile."""
        self.counted: str | None = None
        """The level under which ``Runs.levels`` holds it; None while it is not committed, or finished."""
        self.traceparent: str | None = None
        """Of the newest message that had one; tracing is a matter of the moment and is stored nowhere."""
        self.weight = RUN_BYTES
        """Bytes it is reckoned to take in memory; never less than its texts, until it is weighed again."""
        self.weighed = RUN_BYTES
        """The same when every item was looked at last."""


KEPT: Final = 50
"""Runs that stay in memory, and come there at a start, whether or not anything is due."""
_MOST_BYTES: Final = 128 * 1024 * 1024


def _stays(item: ItemRow) -> bool:
    return item.body is not None


class Rows(NamedTuple):
    """Runs as they were when ``Runs.rows`` was called, whatever is folded into them meanwhile."""

    runs: list[RunRow]
    items: list[ItemRow]
    levels: list[tuple[HotRun, str | None]]
    """The level each run counts under once this is committed; None: finished."""

    def extend(self, more: Rows) -> None:
        """Take the rows of other runs in."""
        self.runs.extend(more.runs)
        self.items.extend(more.items)
        self.levels.extend(more.levels)


class Runs:
    """The hot runs of one lane, whole families at a time, least recently used let go first.

    ``capacity`` bounds how many runs stay in memory between batches, ``most_bytes`` what they are reckoned to
    take, but for the family used last.
    """

    def __init__(
        self,
        store: Store,
        tenant: str,
        lane: str,
        *,
        capacity: int = 2_000,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        self._store = store
        self._tenant = tenant
        self._lane = lane
        self._capacity = capacity
        self._most_bytes = most_bytes
        self._allowed_bytes = most_bytes
        self.bytes = 0
        """What the hot runs are reckoned to take."""
        self._clock = 0
        self._rested_at = 0
        self.resting: dict[str, None] = {}
        """Unfinished runs that ``rest`` let go and nobody spoke of since, at most ``capacity``."""
        self.hot: dict[str, HotRun] = {}
        self.ledgers: dict[str, state.Ledger] = {}
        self._absent: set[str] = set()
        self.forgotten: set[str] = set()
        """Of the runs asked for by ``load`` those that were finished and forgotten: they begin no more."""
        self.lane = state.Lane(settings=Settings())
        """The lane's own fold state; set by ``begin`` before the first message is folded."""
        self.lane_stored = b""
        """The same as of the newest commit."""
        self.levels: Counter[str] = Counter()
        """Unfinished runs by level, hot or not, as of the newest commit; exact once ``recount`` was called."""

    def begin(self, lane: state.Lane) -> None:
        """Start the fold with this lane state; it counts as stored."""
        self.lane = lane
        self.lane_stored = self.lane_bytes()

    def lane_bytes(self) -> bytes:
        """The lane's fold state as it is stored."""
        return msgspec.msgpack.encode(self.lane)

    async def load(self, names: Iterable[str]) -> None:
        """Make sure that every named run that is known at all is in memory with its whole family."""
        for name in names:
            hot = self.hot.get(name)
            if hot is not None:
                self._use(hot)
            if hot is not None or name in self._absent:
                continue
            stored = await self._store.load_family(self._tenant, self._lane, name)
            for row in stored:
                # Of a forgotten run there is no ledger any more.
                if not row.head:
                    self.forgotten.add(row.run)
                elif row.run not in self.hot:
                    self._adopt(row, await self._view(row))
            if name not in self.hot:
                self._absent.add(name)

    async def _view(self, row: StoredRun) -> View:
        """The run's view; one written by another version is begun anew on the checkpoints there are."""
        try:
            return decode_view(row.view)
        except ViewUnreadable as error:
            log.warning("the view of a run is of another version, begun anew", run=row.run, error=str(error))
        view = View()
        head = state.decode_head(row.head)
        if head.model is not None:
            view.budget.model = head.model.name
            view.budget.window = head.model.context_window
            view.budget.max_output = head.model.max_output_tokens
        for mode in ("live", "shadow"):
            newest = await self._store.newest_checkpoint(
                self._tenant, self._lane, row.run, chain="live" if mode == "live" else "shadow"
            )
            if newest is not None:
                course = view.course_of(mode)
                course.checkpoint_version = course.compactions = newest.version
                course.checkpoint_id = newest.checkpoint_id
                course.covers_through = newest.covers_through
        return view

    def _adopt(self, row: StoredRun, view: View) -> None:
        ledger = state.Ledger(state.decode_head(row.head))
        decoded = [(item.kind, state.decode_item(item.kind, item.body)) for item in row.items]
        decoded.sort(key=lambda pair: (getattr(pair[1], "position", 0), pair[1].id))
        for kind, item in decoded:
            ledger.put(kind, item)
        ledger.changed.clear()
        hot = HotRun(ledger, view, row.chain, row.family)
        hot.counted = None if row.finished else decode_level(row.view)
        hot.weight = hot.weighed = weight_of_row(row)
        self._add(row.run, hot)

    def _add(self, name: str, hot: HotRun) -> None:
        self.hot[name] = hot
        self.ledgers[name] = hot.ledger
        self.bytes += hot.weight
        self._use(hot)
        self._absent.discard(name)
        self.resting.pop(name, None)

    def _remove(self, name: str) -> HotRun | None:
        hot = self.hot.pop(name, None)
        self.ledgers.pop(name, None)
        if hot is not None:
            self.bytes -= hot.weight
        return hot

    def _use(self, hot: HotRun) -> None:
        self._clock += 1
        hot.used_at = self._clock

    def _grow(self, hot: HotRun, by: int) -> None:
        """More was written of it, which may have taken the place of something."""
        self.bytes -= hot.weight
        hot.weight += by
        if hot.weight > 2 * hot.weighed + _MOST_BYTES // 1024:
            hot.weight = hot.weighed = weight_of_ledger(hot.ledger)
        self.bytes += hot.weight

    def of(self, name: str) -> HotRun:
        """The hot run whose ledger the fold has just made or found."""
        hot = self.hot.get(name)
        if hot is None:
            hot = HotRun(self.ledgers[name], View(), GENESIS, name)
            self._add(name, hot)
        self._use(hot)
        return hot

    def family(self, name: str) -> Iterator[str]:
        """The run and everyone of its family that is in memory."""
        hot = self.hot.get(name)
        root = hot.family if hot is not None else name
        return (other for other, held in self.hot.items() if held.family == root)

    def received(self, name: str) -> int:
        """How often others of the family changed what the run has from them; grows, and says nothing else."""
        return sum(
            self.hot[ledger.head.run].view.handed_down
            if ledger.head.run != name
            else self.hot[name].view.spawned
            for ledger in line(self.ledgers, name)
        )

    def rows(self, names: Iterable[str]) -> Rows:
        """What of these runs has to be written now; call inside the same unit as their journal entries."""
        levels: list[tuple[HotRun, str | None]] = []
        runs: list[RunRow] = []
        items: list[ItemRow] = []
        for name in names:
            hot = self.of(name)
            ledger = hot.ledger
            written = len(items)
            for kind, key in hot.changed | ledger.changed:
                item = ledger.items[kind].get(key)
                items.append(
                    ItemRow(
                        run=name,
                        kind=kind,
                        key=key,
                        body=None if item is None else state.encode_item(item),
                        live=item is not None and bool(item.live),
                    )
                )
            if len(items) > written:
                bodies = (row.body for row in items[written:] if row.body is not None)
                self._grow(hot, sum(ITEM_BYTES + len(body) for body in bodies))
            hot.changed.clear()
            ledger.changed.clear()
            finished = ledger.head.finished is not None
            levels.append((hot, None if finished else hot.view.budget.level))
            runs.append(
                RunRow(
                    run=name,
                    family=hot.family,
                    parent=ledger.head.parent,
                    head=state.encode_head(ledger.head),
                    view=encode_view(hot.view),
                    finished=finished,
                )
            )
        # Those that go first: the storage writes neighbours of one kind in one statement.
        items.sort(key=_stays)
        return Rows(runs, items, levels)

    def recount(self, levels: Counter[str]) -> None:
        """Take over how many unfinished runs of each level are stored; hold the lock, with nothing uncommitted."""
        self.levels = levels

    def committed(self, rows: Rows) -> None:
        """These rows are on disk: keep the count by level. Cost: the runs named."""
        for hot, level in rows.levels:
            self._count(hot, level)

    def _count(self, hot: HotRun, level: str | None) -> None:
        if hot.counted is not None:
            self.levels[hot.counted] -= 1
        if level is not None:
            self.levels[level] += 1
        hot.counted = level

    def join_families(self, names: Iterable[str]) -> set[str]:
        """Give runs whose parent link changed the family of their root; returns those that moved."""
        moved: set[str] = set()
        for name in names:
            if self.ledgers[name].head.parent is None and self.of(name).family == name:
                # A root of its own, as nearly every run.
                continue
            root = self.root(name)
            if self.of(name).family == root:
                continue
            old = self.of(name).family
            for other, hot in self.hot.items():
                if hot.family == old and self.root(other) == root:
                    hot.family = root
                    moved.add(other)
        return moved

    def root(self, name: str) -> str:
        """The topmost ancestor that is known."""
        return topmost(self.ledgers, name).head.run

    def drop(self, names: Iterable[str]) -> None:
        """These runs are forgotten, on disk already."""
        for name in names:
            hot = self._remove(name)
            if hot is not None:
                self._count(hot, None)
            self.resting.pop(name, None)
            self._absent.add(name)
            self.forgotten.add(name)

    def discard(self) -> None:
        """Forget everything in memory: what was folded was not committed."""
        if self.lane_stored:
            self.lane = msgspec.msgpack.decode(self.lane_stored, type=state.Lane)
        self.hot.clear()
        self.ledgers.clear()
        self._absent.clear()
        self.bytes = 0

    @property
    def crowded(self) -> bool:
        """Whether more runs are hot than may stay: ``trim`` is due as soon as nothing is on its way."""
        return len(self.hot) > self._capacity or self.bytes > self._allowed_bytes

    def trim(self) -> None:
        """Let the least recently used families go until at most ``capacity`` runs of ``most_bytes`` are hot."""
        if len(self._absent) > 10_000:
            self._absent.clear()
            self.forgotten.clear()
        if not self.crowded:
            return
        families = self._families()
        for count, (_, members) in enumerate(families, 1):
            if len(self.hot) <= self._capacity * 3 // 4 and (
                self.bytes <= self._most_bytes * 3 // 4 or count == len(families)
            ):
                break
            if not self._busy(members):
                self._let_go(members)
        # What stays although it is too much must not be tried to let go with every batch.
        self._allowed_bytes = max(self._most_bytes, self.bytes * 5 // 4)

    def rest(self, stays: Callable[[HotRun], bool]) -> int:
        """Let go the families nobody used since the last call, but where a run ``stays``; how many runs went.

        The last ``KEPT`` of them stay, so that whoever looks sees something. Hold the lock, with nothing uncommitted.
        """
        before, self._rested_at = self._rested_at, self._clock
        gone = 0
        for _, members in self._families():
            if len(self.hot) <= KEPT:
                break
            if any(self.hot[name].used_at > before or stays(self.hot[name]) for name in members):
                continue
            if not self._busy(members):
                resting = [name for name in members if self.hot[name].ledger.head.finished is None]
                self._let_go(members)
                gone += len(members)
                self.resting.update(dict.fromkeys(resting))
        for name in list(self.resting)[: max(0, len(self.resting) - self._capacity)]:
            del self.resting[name]
        return gone

    def _families(self) -> list[tuple[str, list[str]]]:
        """Those in memory and their runs, the least recently used first."""
        newest: dict[str, int] = {}
        members: dict[str, list[str]] = {}
        for name, hot in self.hot.items():
            newest[hot.family] = max(newest.get(hot.family, 0), hot.used_at)
            members.setdefault(hot.family, []).append(name)
        return [(family, members[family]) for family in sorted(newest, key=newest.__getitem__)]

    def _busy(self, members: Iterable[str]) -> bool:
        return any(self.hot[name].busy for name in members)

    def _let_go(self, members: Iterable[str]) -> None:
        for name in members:
            self._remove(name)
