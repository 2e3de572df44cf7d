"""What a message says about installing what is missing: as this package was installed itself."""

from __future__ import annotations

import json
import sys
from importlib import metadata

import pytest

from sidecar.extras import how_to_install


@pytest.mark.parametrize(
    ("told", "line"),
    [
        ({"url": "file:///srv/a%20clone", "dir_info": {"editable": True}}, "-e '/srv/a clone[openai]'"),
        (
            {"url": "file:///tmp/w.whl", "archive_info": {}},
            "'watchkeeper-sidecar[openai] @ file:///tmp/w.whl'",
        ),
        (None, "-e '.[openai]' in a clone, or"),
    ],
)
def test_the_line_fits_where_the_package_came_from(
    told: dict[str, object] | None, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            return None if told is None else json.dumps(told)

    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())
    said = how_to_install("openai")
    assert said.startswith(f"install the extra openai: {sys.executable} -m pip install ")
    assert line in said


def test_a_package_that_is_not_installed_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert ".whl[tracing]' of a wheel" in how_to_install("tracing")
