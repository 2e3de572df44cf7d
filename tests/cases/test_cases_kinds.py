"""Every kind of fault others reported has its tests, and each part of what was reported one that names it.

Most are in this folder and carry the kind in their name; where the real thing is needed (a broker, a second
process, a full disk) the test is where that thing is.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent

K05, K13 = "cases/test_cases_k05_k08.py", "integration/test_transport_pump.py"
STOP, FAULTS = "crash/test_crash_stop.py", "integration/test_storage_faults.py"

COVERED: dict[str, dict[str, tuple[str, str]]] = {
    "K7 summarizer input": {
        "a range over the summariser's window": (
            K05,
            "test_k07_a_range_over_the_summarisers_window_goes_in_parts",
        ),
        "its real limit is smaller": (K05, "test_k07_a_window_smaller_than_told_ends_in_a_stated_failure"),
        "too long, then late, then well": (K05, "test_k07_one_failure_then_a_timeout_then_it_goes_through"),
    },
    "K6 no progress": {
        "a fixed part above the trigger": (
            K05,
            "test_k06_a_threshold_that_can_never_be_met_stops_the_attempts",
        ),
        "half a percent a pass, auto-continue": (K05, "test_k06_passes_that_win_nothing_stop_themselves"),
        "a real change clears it": (K05, "test_k06_a_larger_window_clears_it"),
        "nobody takes it up": (K05, "test_k06_without_gain_the_same_input_triggers_once"),
    },
    "K13 client liveness": {
        "a broker restarted while a pull is open": (K13, "test_broker_killed_thrice"),
        "a link that only swallows": (K13, "test_half_open_connection_while_reading"),
        "away for longer than the client tries": (K13, "test_client_closed_for_good_while_reading"),
        "back without JetStream for a while": (K13, "test_jetstream_slow_to_come_back"),
        "a consumer that is gone": (K13, "test_consumer_deleted_while_waiting"),
        "not reading is not ready": (
            "unit/test_health.py",
            "test_each_lane_counts_and_a_dropped_one_does_not",
        ),
    },
    "K14 broker limits": {
        "at, below and above the limit": (
            "integration/test_transport_publisher.py",
            "test_what_is_too_large_is_not_sent",
        ),
        "large messages at full batch": (K13, "test_messages_larger_than_a_request_may_bring_together"),
        "a bounded buffer": (K13, "test_what_waits_is_bounded_by_the_requests_ahead"),
        "a full stream": (
            "integration/test_transport_publisher.py",
            "test_a_full_stream_says_so_and_takes_the_message_later",
        ),
    },
    "K15 database concurrency": {
        "a foreign lock of three seconds": (FAULTS, "test_a_foreign_lock_of_three_seconds_is_waited_for"),
        "one held for too long": (FAULTS, "test_a_foreign_lock_held_too_long_is_told_and_survived"),
        "many writers, one refused": (
            "unit/test_storage_writer.py",
            "test_a_refused_unit_takes_no_other_with_it",
        ),
        "a cancelled commit": ("unit/test_storage_writer.py", "test_a_cancelled_commit_is_whole_or_absent"),
    },
    "K16 database storage": {
        "full while reading": (FAULTS, "test_a_disk_that_fills_up_and_is_given_space"),
        "full at start": (FAULTS, "test_a_disk_full_at_start"),
        "full before the first start": (FAULTS, "test_a_disk_full_before_the_first_start"),
    },
    "K17 lifecycle": {
        "idle": (STOP, "test_idle_it_ends_with_zero_and_the_next_owner_need_not_wait"),
        "in a summariser's call": (
            STOP,
            "test_while_a_summary_is_made_it_ends_and_the_attempt_is_recorded_as_interrupted",
        ),
        "in a transaction": ("unit/test_storage_writer.py", "test_closing_commits_what_is_queued"),
        "without its broker": (STOP, "test_without_its_broker_it_ends_and_what_was_not_sent_goes_out_later"),
        "while it starts": (STOP, "test_before_it_listens_for_signals_it_ends_with_zero"),
        "twice": (STOP, "test_a_second_sigterm_at_any_time_ends_it_as_well"),
    },
}
"""Kind → part of what was reported → file and test; the other kinds are this folder's altogether."""


@cache
def named_in(path: str) -> frozenset[str]:
    """Names of the tests in a file under tests/."""
    tree = ast.parse((TESTS / path).read_text())
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


@pytest.mark.parametrize("number", range(1, 19))
def test_every_kind_is_tested(number: int) -> None:
    here = {
        name for path in Path(__file__).parent.glob("test_*.py") for name in named_in(f"cases/{path.name}")
    }
    elsewhere = [kind for kind in COVERED if kind.startswith(f"K{number} ")]
    assert elsewhere or any(name.startswith(f"test_k{number:02}_") for name in here)


@pytest.mark.parametrize(
    ("path", "name"), [place for parts in COVERED.values() for place in parts.values()], ids=str
)
def test_what_is_said_to_be_tested_is(path: str, name: str) -> None:
    assert name in named_in(path)
