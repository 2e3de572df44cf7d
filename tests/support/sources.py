"""The project's own source files, parsed, for the tests that hold the house rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import storage

ROOT: Final = Path(__file__).resolve().parent.parent.parent
PACKAGES: Final = ("protocol", "storage", "sidecar")


def modules() -> list[str]:
    """Every module of the three packages, as a path from the root."""
    return sorted(
        str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    )


@cache
def tree(path: str) -> ast.Module:
    """The module, parsed."""
    return ast.parse((ROOT / path).read_text(), path)


def imports(path: str) -> Iterator[str]:
    """Dotted names of everything the module imports, inside functions and type checks too."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            assert node.module is not None
            yield from (f"{node.module}.{name.name}" for name in node.names)


def public_names(path: str) -> list[str]:
    """Names without underscore that the module defines itself."""
    found: list[str] = []
    for node in tree(path).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.append(name)
            case ast.Assign(targets=targets):
                found += [target.id for target in targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.append(name)
            case _:
                pass
    return sorted(name for name in found if not name.startswith("_"))


def public_api() -> str:
    """One line per module of ``protocol`` with its own names, and what ``storage`` offers."""
    lines = [
        f"{path}: {' '.join(public_names(path))}"
        for path in modules()
        if path.startswith("protocol/") and public_names(path)
    ]
    return "\n".join([*lines, f"storage: {' '.join(sorted(storage.__all__))}"]) + "\n"
