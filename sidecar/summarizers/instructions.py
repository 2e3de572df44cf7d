"""The instructions a model is given with every request, and what names them in receipts and checkpoints.

The text is package data, one file per version; a changed text is a new version. Nothing of a run is in it.
"""

from __future__ import annotations

from importlib import resources
from typing import Final

from protocol.codec import digest_bytes

VERSION: Final = "1"
INSTRUCTIONS: Final = (
    resources.files("sidecar.summarizers").joinpath(f"instructions_v{VERSION}.md").read_text("utf-8")
)
DIGEST: Final = digest_bytes(INSTRUCTIONS.encode())
"""Of the text's UTF-8 bytes."""
