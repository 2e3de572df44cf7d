"""What every part that serves one lane shares: address, storage, hot runs, voice, clocks, one lock.

The lock is held from folding to COMMIT and while an answer is read out of memory, so nobody ever sees
a ledger that is not on disk. Keep it short: no network call under it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import InitVar, dataclass, field
from datetime import UTC, datetime
from typing import Final, TypeVar

import anyio
import anyio.to_thread
import msgspec
from msgspec import UNSET

from protocol import subjects
from protocol.content import RedactionPattern, RedactionRules
from protocol.events import Settings
from protocol.redaction import DEFAULT, Redactor, redactor_for
from sidecar import tracing
from sidecar.config import Config
from sidecar.config_shape import Redaction
from sidecar.core.budget import BudgetSettings
from sidecar.core.carried import CHOSEN
from sidecar.health import Health
from sidecar.metrics import Metrics
from sidecar.notices import Voice
from sidecar.runs import Rows, Runs
from storage.errors import StorageError
from storage.records import (
    Adoption,
    AttemptRow,
    CheckpointRow,
    Cursor,
    JournalEntry,
    OutboxRow,
    PacketRow,
    Rebase,
    ReceiptRow,
    TombstoneRow,
    Unit,
)
from storage.store import Store

T = TypeVar("T")

_LARGE_LEDGER: Final = 200
"""Items, settled ones too, from which on building on a ledger takes longer than handing it to a thread."""

_HEADERS_BYTES: Final = 4096


def rfc3339(seconds: float) -> str:
    """Wall-clock seconds as the wire writes them: UTC, milliseconds, ``Z``."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment(seconds: float) -> datetime:
    """Wall-clock seconds as a moment in UTC, to the millisecond."""
    return datetime.fromisoformat(rfc3339(seconds))


def moment_of(text: str) -> datetime:
    """A moment from its RFC 3339 text."""
    return datetime.fromisoformat(text)


def budget_settings(config: Config) -> BudgetSettings:
    """The part of the configuration that the core's budget and compaction rules read."""
    b = config.budget
    return BudgetSettings(
        checkpoint_at=b.checkpoint_at,
        compact_at=b.compact_at,
        critical_at=b.critical_at,
        reserve_tokens=b.reserve_tokens,
        keep_recent_tokens=b.keep_recent_tokens,
        packet_tokens=b.packet_tokens,
        user_tokens=b.user_tokens,
        result_tokens=b.result_tokens,
        min_gain=b.min_gain,
        rebuild_every=config.summarizer.rebuild_every,
        max_attempts=config.summarizer.max_attempts,
        fallback=config.summarizer.fallback == "digest" and config.summarizer.kind != "digest",
    )


def fold_settings_of(config: Config) -> Settings:
    """The part of the configuration that the fold reads; it travels as ``settings.applied``."""
    return Settings(
        authority_required=config.authority.required,
        approval_kinds=tuple(config.authority.approval_kinds),
        forbidden_kinds=tuple(config.authority.forbidden_kinds),
        reconcile_by_authority_kinds=tuple(config.operations.reconcile_by_authority_kinds),
        redaction=UNSET if config.redaction == _PLAIN else _redaction(config),
    )


_PLAIN = Redaction()


def _redaction(config: Config) -> RedactionRules:
    return RedactionRules(
        enabled=config.redaction.enabled,
        patterns=tuple(
            RedactionPattern(name=pattern.name, regex=pattern.regex) for pattern in config.redaction.patterns
        ),
        allow=config.redaction.allow,
    )


@dataclass
class Desk:
    """One lane's shared state. ``wall`` and ``mono`` are the only clocks its parts may read."""

    tenant: str
    lane: str
    configured: InitVar[Config]
    store: Store
    runs: Runs
    voice: Voice
    metrics: Metrics
    health: Health
    wall: Callable[[], float] = time.time
    mono: Callable[[], float] = time.monotonic
    lock: anyio.Lock = field(default_factory=lambda: anyio.Lock(fast_acquire=True))
    """Taken without a turn of the loop while it is free: whoever holds it awaits the disk anyway."""
    cursor: Cursor = field(default_factory=lambda: Cursor(stream_seq=0, stream_created=""))
    lag: int = 0
    taken_over: bool = False
    """The lane was another owner's before, or ours on a disk that is gone."""
    quiet_through: int = 0
    """Up to this stream sequence the last owner has said what there was to say."""
    caught_up: bool = False
    max_payload: int = 1 << 20
    lease_valid: Callable[[], bool] = lambda: False
    tracer: tracing.Tracer = tracing.CARRIER
    config: Config = field(init=False)
    """Change it by ``reconfigure`` only."""
    budget: BudgetSettings = field(init=False)
    _moved: anyio.Event | None = None
    """Somebody waits for the cursor to move."""
    _outgoing: anyio.Event = field(default_factory=anyio.Event)
    _leaving: dict[str, tuple[float, str | None]] = field(default_factory=dict)
    """Id of a packet on its way → when it was committed, and its trace."""

    def __post_init__(self, configured: Config) -> None:
        self.reconfigure(configured)

    def reconfigure(self, config: Config) -> None:
        """Take over a configuration that was read again."""
        self.config = config
        self.budget = budget_settings(config)

    @property
    def redactor(self) -> Redactor:
        """What takes secrets out of texts under the settings the lane folds by now."""
        rules = self.runs.lane.settings.redaction
        return DEFAULT if rules is UNSET else redactor_for(rules)

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Hold the lock to change what is in memory and commit it.

        Whatever ends the block early, cancellation too, finds memory discarded: a part of a change must not
        go to disk with the next commit. Objects read from memory before are void then.
        """
        async with self.lock:
            try:
                yield
            except BaseException:
                self.runs.discard()
                raise
            self.runs.trim()

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for the lock."""
        return self.lock.statistics().tasks_waiting > 0

    async def aside(self, run: str, work: Callable[[], T], *, shown: bool = False) -> T:
        """What ``work`` makes of a run's ledger; hold the lock, so that nothing changes under it.

        Of a large ledger on a thread: the loop serves other lanes, and the lease, meanwhile. ``shown``: it looks
        at what a packet must show, and not at all there is.
        """
        ledger = self.runs.ledgers[run]
        kinds = ledger.active if shown else ledger.items
        if sum(len(items) for kind, items in kinds.items() if not (shown and kind in CHOSEN)) < _LARGE_LEDGER:
            return work()
        return await anyio.to_thread.run_sync(work)

    @property
    def message_room(self) -> int:
        """Bytes a message's body may have: the broker's limit less what headers and protocol take."""
        return self.max_payload - _HEADERS_BYTES

    def now(self) -> datetime:
        """The wall clock, UTC, to the millisecond."""
        return moment(self.wall())

    def now_text(self) -> str:
        """The same as the wire writes it."""
        return rfc3339(self.wall())

    async def commit(
        self,
        *,
        touched: Sequence[str] | set[str] = (),
        journal: Sequence[JournalEntry] = (),
        outbox: Sequence[OutboxRow] = (),
        cursor: Cursor | None = None,
        open_attempt: AttemptRow | None = None,
        close_attempt: str | None = None,
        checkpoint: CheckpointRow | None = None,
        receipt: ReceiptRow | None = None,
        packet: PacketRow | None = None,
        adopt: Sequence[Adoption] = (),
        forget: Sequence[TombstoneRow] = (),
        rebase: Sequence[Rebase] = (),
        meta: Mapping[str, bytes] | None = None,
        rows: Rows | None = None,
    ) -> None:
        """Write the touched runs and everything that speaks of them in one transaction; hold the lock.

        ``rows``: the runs as they were to be written, where more is folded while this is on its way; who does
        that (within ``changing``) also discards it.
        On failure the memory of this lane is discarded, since it may be ahead of the disk; the error
        goes on to the caller (``StorageError``). Whoever is cancelled meanwhile still waits for its end.
        """
        behind = rows is not None
        try:
            rows = self.runs.rows(touched) if rows is None else rows
            unit = Unit(
                tenant=self.tenant,
                lane=self.lane,
                journal=tuple(journal),
                runs=tuple(rows.runs),
                items=tuple(rows.items),
                outbox=tuple(map(self._traced, outbox)),
                cursor=cursor,
                open_attempt=open_attempt,
                close_attempt=close_attempt,
                checkpoint=checkpoint,
                receipt=receipt,
                packet=packet,
                adopt=tuple(adopt),
                forget=tuple(forget),
                rebase=tuple(rebase),
                meta=dict(meta or {}),
            )
            # The writer commits it or not whoever waits: leaving before that is known, memory could be on
            # either side of the disk.
            with anyio.CancelScope(shield=True):
                await self.store.commit(unit)
        except BaseException as error:
            if not behind:
                self.runs.discard()
            if isinstance(error, StorageError) and error.answer != "reject":
                self.metrics.storage_failed(type(error).__name__)
            raise
        self.runs.committed(rows)
        if cursor is not None:
            self.cursor = cursor
        if outbox:
            self._outgoing.set()
        if self._moved is not None:
            self._moved.set()
            self._moved = None

    def _traced(self, row: OutboxRow) -> OutboxRow:
        """The row with the trace context of the work it comes from, else of the run's newest message that had
        one."""
        if row.stream != "out":
            return row
        found = tracing.current()
        if found is None:
            hot = self.runs.hot.get(subjects.parse_outbound(row.subject).run)
            found = None if hot is None else hot.traceparent
        return row if found is None else msgspec.structs.replace(row, traceparent=found)

    async def reached(self, stream_seq: int, seconds: float) -> bool:
        """Whether the cursor reaches ``stream_seq`` within ``seconds``."""
        with anyio.move_on_after(seconds):
            while self.cursor.stream_seq < stream_seq:
                if self._moved is None:
                    self._moved = anyio.Event()
                await self._moved.wait()
        return self.cursor.stream_seq >= stream_seq

    async def wait_outgoing(self) -> None:
        """Until something was put into the outbox since the last call returned."""
        await self._outgoing.wait()
        self._outgoing = anyio.Event()

    def wake_relay(self) -> None:
        self._outgoing.set()

    def leaving(self, msg_id: str) -> None:
        """The packet of a compaction was committed just now: its way to the broker is the last phase."""
        self._leaving[msg_id] = (self.mono(), tracing.current())

    def left(self, msg_id: str) -> None:
        """The broker has this message."""
        began = self._leaving.pop(msg_id, None)
        if began is not None:
            self.metrics.phase_took("publish", self.mono() - began[0], began[1])
