"""Fixtures every test may use: the one asyncio backend, and where the transcripts lie; profiles of properties."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support import laws

laws.register()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def corpus() -> Path:
    root = Path(__file__).resolve().parent.parent
    path = Path(os.environ.get("WATCHKEEPER_CORPUS", root / "../shared/corpus/transcripts"))
    if not path.is_dir():
        pytest.skip(f"no transcripts at {path}: set WATCHKEEPER_CORPUS to a folder that holds them")
    return path
