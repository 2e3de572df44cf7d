"""A law may take longer than a test: on a busy machine, and in the profile that looks for long."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

_SECONDS = 1_200


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    long = settings.default is settings.get_profile("long")
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(0 if long else _SECONDS))
