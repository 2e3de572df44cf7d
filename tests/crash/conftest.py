"""What the crash tests compare with: one undisturbed run of the sample, made once."""

from __future__ import annotations

import pytest

from support.evidence import Left
from support.voyage import calm_voyage


@pytest.fixture(scope="session")
async def calm(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> Left:
    return await calm_voyage(tmp_path_factory.mktemp("calm"))
