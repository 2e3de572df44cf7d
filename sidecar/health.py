"""Whether the daemon is alive, ready and started, and why not.

Others report facts here; this module only weighs them by the clock. Liveness looks at nothing outside the
process: a broker that is away must never get us restarted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

import anyio
from msgspec import Struct

EXPECTED: Final = ("nats", "lane")
"""Kinds of condition that must have been reported before we can be ready."""

NOT_YET: Final = {
    "lane": "not taken up yet: that comes once the broker and its streams answer",
    "nats": "not connected to the broker yet",
}
"""What is said of a kind of condition that was never reported."""

TOLERANCES: Final[Mapping[str, float]] = {"nats": 20.0, "reading": 20.0}
"""Seconds a kind of condition may be broken before readiness goes, once it was met. Others: at once."""

BEAT_BOUND_SECONDS: Final = 30.0
"""A heartbeat older than this means its task is stuck."""


class Readiness(Struct, frozen=True):
    """`reasons`: why not ready, by condition. `tolerated`: broken, but not for long enough to count."""

    ready: bool
    reasons: dict[str, str]
    tolerated: dict[str, str]


class Liveness(Struct, frozen=True):
    """`stuck`: heartbeat names with their age in seconds."""

    alive: bool
    stuck: dict[str, float]


class _Condition(Struct):
    ok: bool
    reason: str
    since: float
    met_before: bool = False


class Health:
    """Conditions and heartbeats. `clock` is monotonic, in seconds.

    A condition's name is its kind, or kind and subject: `nats`, `drain`, `lane main`, `reading main`.
    Ready is: every kind of `expected` was reported, every condition known is met or tolerated, and no task is
    stuck. Facts are reported from one thread; the questions may be asked from any.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        expected: Iterable[str] = EXPECTED,
        tolerances: Mapping[str, float] = TOLERANCES,
        beat_bound: float = BEAT_BOUND_SECONDS,
    ) -> None:
        self._clock = clock
        self._expected = frozenset(expected)
        self._tolerances = dict(tolerances)
        self._bound = beat_bound
        self._conditions: dict[str, _Condition] = {}
        self._beats: dict[str, float] = {}
        self._started = False

    def expect(self, *names: str) -> None:
        """Conditions to be reported later, until then not met. Those already known stay as they are."""
        for name in names:
            self._conditions.setdefault(name, _Condition(False, _not_yet(name), self._clock()))

    def set(self, name: str, ok: bool, reason: str = "") -> None:
        """Report a condition; the moment it broke is kept while it stays broken. Idempotent, cheap."""
        condition = self._conditions.get(name)
        if condition is None:
            condition = self._conditions[name] = _Condition(ok, reason, self._clock())
        if condition.ok != ok:
            condition.since = self._clock()
        condition.met_before |= condition.ok or ok
        condition.ok = ok
        condition.reason = reason
        if ok and not self._started:
            self._started = self.ready().ready

    def drop(self, name: str) -> None:
        """The condition is no matter any more, such as reading a lane that is another's now."""
        self._conditions.pop(name, None)

    def beat(self, name: str) -> None:
        """A sign of life of a task; it is watched from its first one on."""
        self._beats[name] = self._clock()

    def unwatch(self, name: str) -> None:
        """The task has ended as it should; its silence means nothing any more."""
        self._beats.pop(name, None)

    def ready(self) -> Readiness:
        """Whether work may be expected of us now."""
        now = self._clock()
        # A copy is made in one step; the thread that reports may add to the original meanwhile.
        conditions = self._conditions.copy()
        kinds = {name.partition(" ")[0] for name in conditions}
        reasons = {kind: _not_yet(kind) for kind in sorted(self._expected - kinds)}
        reasons |= {
            f"task {name}": f"no sign of life for {age} s" for name, age in self.alive().stuck.items()
        }
        tolerated: dict[str, str] = {}
        for name, condition in conditions.items():
            if condition.ok:
                continue
            patience = self._tolerances.get(name.partition(" ")[0], 0.0) if condition.met_before else 0.0
            if now - condition.since < patience:
                tolerated[name] = condition.reason
            else:
                reasons[name] = condition.reason
        return Readiness(not reasons, reasons, tolerated)

    def alive(self) -> Liveness:
        """Whether every watched task gave a sign of life within the bound."""
        now = self._clock()
        beats = self._beats.copy()
        stuck = {name: round(now - at, 1) for name, at in beats.items() if now - at > self._bound}
        return Liveness(not stuck, stuck)

    def started(self) -> bool:
        """Whether everything was ready at once for the first time, first recovery included; it stays so."""
        return self._started


def _not_yet(name: str) -> str:
    return NOT_YET.get(name.partition(" ")[0], "not reported yet")


class _LagMetrics(Protocol):
    def loop_lag(self, seconds: float) -> None: ...


async def loop_monitor(
    health: Health,
    metrics: _LagMetrics,
    *,
    interval: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Beat as `loop` every `interval` seconds and measure how late the loop wakes us; until cancelled."""
    while True:
        health.beat("loop")
        asked = clock()
        await anyio.sleep(interval)
        metrics.loop_lag(max(0.0, clock() - asked - interval))
