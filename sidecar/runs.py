"""Hot runs: the ledgers, budgets and compaction courses held in memory for one lane.

It decides what is loaded, what is written back and what is let go; it folds nothing and sends nothing.
Memory is true only after COMMIT: a caller whose commit failed calls ``discard`` and reads again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import structlog

from protocol.events import Settings
from sidecar.core import state
from sidecar.core.family import line
from sidecar.core.family import root as topmost
from sidecar.view import View, ViewUnreadable, decode_level, decode_view, encode_view
from storage.records import GENESIS, ItemRow, RunRow, RunSummary, StoredRun
from storage.store import Store

log = structlog.get_logger(__name__)


class HotRun:
    """One run in memory."""

    __slots__ = ("busy", "chain", "changed", "counted", "family", "ledger", "traceparent", "used_at", "view")

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

    ``capacity`` bounds how many runs stay in memory between batches.
    """

    def __init__(self, store: Store, tenant: str, lane: str, *, capacity: int = 2_000) -> None:
        self._store = store
        self._tenant = tenant
        self._lane = lane
        self._capacity = capacity
        self._clock = 0
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
            if name in self.hot or name in self._absent:
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
        self._add(row.run, hot)

    def _add(self, name: str, hot: HotRun) -> None:
        self.hot[name] = hot
        self.ledgers[name] = hot.ledger
        self._absent.discard(name)

    def of(self, name: str) -> HotRun:
        """The hot run whose ledger the fold has just made or found."""
        hot = self.hot.get(name)
        if hot is None:
            hot = HotRun(self.ledgers[name], View(), GENESIS, name)
            self._add(name, hot)
        self._clock += 1
        hot.used_at = self._clock
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

    def recount(self, unfinished: Iterable[RunSummary]) -> None:
        """Count the lane's runs by level from what is stored; hold the lock, with nothing uncommitted."""
        self.levels = Counter(decode_level(row.view) for row in unfinished)

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
            hot = self.hot.pop(name, None)
            if hot is not None:
                self._count(hot, None)
            self.ledgers.pop(name, None)
            self._absent.add(name)
            self.forgotten.add(name)

    def discard(self) -> None:
        """Forget everything in memory: what was folded was not committed."""
        if self.lane_stored:
            self.lane = msgspec.msgpack.decode(self.lane_stored, type=state.Lane)
        self.hot.clear()
        self.ledgers.clear()
        self._absent.clear()

    @property
    def crowded(self) -> bool:
        """Whether more runs are hot than may stay: ``trim`` is due as soon as nothing is on its way."""
        return len(self.hot) > self._capacity

    def trim(self) -> None:
        """Let the least recently used families go until at most ``capacity`` runs are hot."""
        if len(self._absent) > 10_000:
            self._absent.clear()
            self.forgotten.clear()
        if not self.crowded:
            return
        newest: dict[str, int] = {}
        busy: set[str] = set()
        members: dict[str, list[str]] = {}
        for name, hot in self.hot.items():
            newest[hot.family] = max(newest.get(hot.family, 0), hot.used_at)
            members.setdefault(hot.family, []).append(name)
            if hot.busy:
                busy.add(hot.family)
        for family in sorted(newest, key=newest.__getitem__):
            if len(self.hot) <= self._capacity * 3 // 4:
                break
            if family in busy:
                continue
            for name in members[family]:
                del self.hot[name]
                del self.ledgers[name]
