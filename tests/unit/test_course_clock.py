"""A wall clock that was set back makes no wait of a compaction longer than it was."""

from __future__ import annotations

import pytest

from sidecar.core.budget import BudgetSettings
from sidecar.core.course import BACK_OFF_SECONDS, BREAKER_SECONDS, Course, bounded, failed

NOW = 1_000_000.0
HOUR = 3_600.0
SETTINGS = BudgetSettings(max_attempts=3)


@pytest.mark.parametrize("failures", [1, 2])
def test_a_back_off_is_never_longer_than_its_own(failures: int) -> None:
    course = Course()
    for _ in range(failures):
        failed(course, "timeout", now=NOW, settings=SETTINGS)
    bounded(course, NOW - HOUR)
    assert course.retry_at == NOW - HOUR + BACK_OFF_SECONDS[failures - 1]


def test_a_breaker_is_never_open_for_longer_than_its_time() -> None:
    course = Course()
    for _ in range(3):
        failed(course, "timeout", now=NOW, settings=SETTINGS)
    bounded(course, NOW - HOUR)
    assert course.breaker_until == NOW - HOUR + BREAKER_SECONDS


def test_patience_with_work_in_flight_is_counted_from_now_at_the_latest() -> None:
    course = Course(wanted_at=NOW)
    bounded(course, NOW - HOUR)
    assert course.wanted_at == NOW - HOUR


def test_a_clock_that_goes_on_changes_nothing() -> None:
    course = Course(wanted_at=NOW)
    failed(course, "timeout", now=NOW, settings=SETTINGS)
    bounded(course, NOW + 1)
    assert (course.wanted_at, course.retry_at) == (NOW, NOW + BACK_OFF_SECONDS[0])
