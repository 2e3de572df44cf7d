"""What the crash tests compare with: undisturbed runs, each made once."""

from __future__ import annotations

import pytest

from support.evidence import Left
from support.voyage import BRIEF, calm_voyage

_MADE: dict[str, Left] = {}
"""Kept here and not by a wider scope: an asynchronous session fixture keeps its event loop open to the end of
the session, and no later test could run one of its own."""


@pytest.fixture
async def calm(tmp_path_factory: pytest.TempPathFactory) -> Left:
    if "calm" not in _MADE:
        _MADE["calm"] = await calm_voyage(tmp_path_factory.mktemp("calm"))
    return _MADE["calm"]


@pytest.fixture
async def brief(tmp_path_factory: pytest.TempPathFactory) -> Left:
    if "brief" not in _MADE:
        _MADE["brief"] = await calm_voyage(tmp_path_factory.mktemp("brief"), BRIEF)
    return _MADE["brief"]
