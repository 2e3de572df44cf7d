"""What the cases share: one lane with its real parts and a summariser that does what the case says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from support.harness import Harness, Life, workplace


@pytest.fixture
def harness() -> Iterator[Harness]:
    with workplace() as folder:
        yield Harness(folder)


@pytest.fixture
async def life(harness: Harness) -> AsyncIterator[Life]:
    async with harness.alive() as life:
        yield life
