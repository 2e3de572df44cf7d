"""The public names of the packages others build on. A change there is a change for them: look twice.

`make pages` writes the list anew.
"""

from __future__ import annotations

from protocol.schema import MESSAGES
from support.sources import ROOT, public_api

VECTORS = ROOT / "tests" / "vectors"


def test_public_names_are_the_listed_ones() -> None:
    assert public_api() == (VECTORS / "public_names.txt").read_text(), "meant so? run: make pages"


def test_every_golden_vector_has_its_message() -> None:
    known = {name for messages in MESSAGES.values() for name in messages}
    assert {path.stem for path in (VECTORS / "v1").glob("*.json")} == known
