"""How the optional parts of the package are installed, for the messages that miss one.

It says what to type, in words that fit how this package itself was installed; it installs nothing.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from typing import Final
from urllib.parse import unquote, urlsplit

PACKAGE: Final = "watchkeeper-sidecar"


def how_to_install(extra: str) -> str:
    """What to type for an extra (`openai`, `anthropic`, `tracing`, `embedded`): from the clone or the wheel this
    package came from, with the Python it runs in."""
    origin, editable = _origin()
    pip = f"{sys.executable} -m pip install"
    if editable:
        return f"install the extra {extra}: {pip} -e '{origin}[{extra}]'"
    if origin:
        return f"install the extra {extra}: {pip} '{PACKAGE}[{extra}] @ {origin}'"
    wheel = f"{PACKAGE.replace('-', '_')}-…-py3-none-any.whl"
    return f"install the extra {extra}: {pip} -e '.[{extra}]' in a clone, or {pip} './{wheel}[{extra}]' of a wheel"


def _origin() -> tuple[str, bool]:
    """Where the package was installed from: the folder of a clone, or the address of a file; whether editable."""
    try:
        told = metadata.distribution(PACKAGE).read_text("direct_url.json")
        found = json.loads(told or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return "", False
    url = str(found.get("url", ""))
    if found.get("dir_info", {}).get("editable") and url.startswith("file://"):
        return unquote(urlsplit(url).path), True
    return url, False
