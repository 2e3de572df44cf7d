"""How many examples a law is tried with.

Each run draws the same examples (profile ``steady``): what fails fails for everyone, by a change and not by the
day. ``--hypothesis-profile=random`` draws others every time, ``--hypothesis-profile=long`` others and ten times as
many; ``WATCHKEEPER_EXAMPLES=n`` says how many for each law, whatever the profile.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

_LAW = 2_000
"""Examples of a law in the profile ``steady``."""
_PLAIN = 100
"""Of any other property."""
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)


def register() -> None:
    """Make the profiles known and load ``steady``; a flag may load another one afterwards."""
    every = settings(
        deadline=None, database=None, phases=_PHASES, suppress_health_check=list(HealthCheck), print_blob=True
    )
    settings.register_profile("steady", every, max_examples=_PLAIN, derandomize=True)
    settings.register_profile("random", every, max_examples=_PLAIN)
    settings.register_profile("long", every, max_examples=_PLAIN * 10)
    settings.load_profile("steady")


def law(share: int = 1) -> settings:
    """So many examples, over ``share`` where one is dear or the law is a lesser one."""
    wanted = os.environ.get("WATCHKEEPER_EXAMPLES")
    examples = int(wanted) if wanted else _LAW * settings.default.max_examples // _PLAIN
    return settings(max_examples=max(10, examples // share))
