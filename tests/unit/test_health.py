"""Health: what counts against readiness and liveness, and when."""

from __future__ import annotations

import anyio
import pytest

from sidecar.health import NOT_YET, Health, loop_monitor

pytestmark = pytest.mark.anyio


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def ready_health(clock: Clock) -> Health:
    health = Health(clock)
    for name in ("nats", "storage", "lane main", "reading main"):
        health.set(name, True)
    return health


async def test_nothing_is_ready_before_it_was_reported() -> None:
    health = Health(Clock())
    assert health.ready().reasons == {"lane": NOT_YET["lane"], "nats": NOT_YET["nats"]}
    assert all(len(reason.split()) > 3 for reason in NOT_YET.values())
    assert not health.started()
    assert health.alive().alive


async def test_ready_when_every_condition_is_met() -> None:
    health = ready_health(Clock())
    assert health.ready().ready
    assert health.ready().reasons == {}
    assert health.started()


async def test_what_is_announced_must_come_first() -> None:
    health = Health(Clock())
    health.expect("lane a", "lane b")
    health.set("nats", True)
    health.set("lane a", True)
    assert health.ready().reasons == {"lane b": NOT_YET["lane"]}
    health.set("lane b", True)
    health.expect("lane a")
    assert health.ready().ready


async def test_each_lane_counts_and_a_dropped_one_does_not() -> None:
    health = ready_health(Clock())
    health.set("reading b", False, "12 events behind")
    assert health.ready().reasons == {"reading b": "12 events behind"}
    health.drop("reading b")
    health.drop("never known")
    assert health.ready().ready


async def test_a_short_broker_outage_is_tolerated_and_a_long_one_is_not() -> None:
    clock = Clock()
    health = ready_health(clock)
    health.set("nats", False, "disconnected")
    health.set("reading main", False, "no broker")
    clock.now += 19.9
    health.set("nats", False, "still disconnected")
    assert health.ready().ready
    assert health.ready().tolerated == {"nats": "still disconnected", "reading main": "no broker"}
    clock.now += 0.1
    assert not health.ready().ready
    assert set(health.ready().reasons) == {"nats", "reading main"}
    health.set("nats", True)
    health.set("reading main", True)
    assert health.ready().ready
    health.set("nats", False, "again")
    assert health.ready().ready


async def test_a_full_disk_and_a_drain_count_at_once() -> None:
    health = ready_health(Clock())
    health.set("storage", False, "database or disk is full")
    health.set("drain", False, "draining")
    assert health.ready().reasons == {"storage": "database or disk is full", "drain": "draining"}


async def test_a_broker_never_reached_has_no_patience_to_lose() -> None:
    health = Health(Clock())
    health.set("nats", False, "connecting")
    assert health.ready().reasons["nats"] == "connecting"


async def test_started_stays_once_everything_was_ready() -> None:
    health = Health(Clock())
    health.expect("lane main", "reading main")
    for name in ("nats", "lane main"):
        health.set(name, True)
    health.set("reading main", False, "500 events behind")
    assert not health.started()
    health.set("reading main", True)
    health.set("reading main", False, "lane taken over")
    assert health.started()


async def test_liveness_goes_with_a_silent_task_and_with_nothing_else() -> None:
    clock = Clock()
    health = Health(clock)
    health.beat("loop")
    health.beat("writer")
    clock.now += 30.0
    assert health.alive().alive
    clock.now += 0.5
    health.beat("loop")
    assert health.alive().stuck == {"writer": 30.5}
    assert not health.alive().alive
    health.unwatch("writer")
    assert health.alive().alive
    health.set("nats", False, "broken")
    health.set("storage", False, "broken")
    assert health.alive().alive


class Lag:
    """Stands where the metrics stand and tells when it was told something."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.told = anyio.Event()

    def loop_lag(self, seconds: float) -> None:
        self.seen.append(seconds)
        self.told.set()


async def test_the_monitor_beats_and_measures_the_loop() -> None:
    clock = Clock()
    health = Health(clock)
    lag = Lag()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: loop_monitor(health, lag, interval=0.001, clock=clock))
        with anyio.fail_after(10):
            await lag.told.wait()
        tasks.cancel_scope.cancel()
    # The injected clock stands still, so the loop was not late by it.
    assert set(lag.seen) == {0.0}
    clock.now += 31
    assert set(health.alive().stuck) == {"loop"}
