"""What the crash tests compare with: undisturbed runs, each made once."""

from __future__ import annotations

import pytest

from support.evidence import Left
from support.voyage import BRIEF, calm_voyage


@pytest.fixture(scope="session")
async def calm(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> Left:
    return await calm_voyage(tmp_path_factory.mktemp("calm"))


@pytest.fixture(scope="session")
async def brief(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> Left:
    return await calm_voyage(tmp_path_factory.mktemp("brief"), BRIEF)
