"""The law everything serves: ledger, answers and the protected part are functions of the stream alone.

Whatever is read in whatever batches, compacted by whatever summariser, killed at whatever commit and delivered
again: nothing of it may show. ``WATCHKEEPER_EXAMPLES`` sets how many examples each law is tried with.
"""

from __future__ import annotations

import os
from typing import Any

import anyio
from hypothesis import HealthCheck, given, settings

from support.harness import Harness, workplace
from support.voyages import STEPS, Voyage

EXAMPLES = int(os.environ.get("WATCHKEEPER_EXAMPLES", "100"))
laws = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


@laws
@given(STEPS)
def test_nothing_that_happens_to_the_daemon_shows_in_what_it_says(steps: Any) -> None:
    with workplace() as folder:
        voyage = Voyage(Harness(folder))
        voyage.begin()
        anyio.run(voyage.sail, steps)
