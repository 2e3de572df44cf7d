"""House rules of the source text: docstrings, size, names, what is caught, and words that have no place."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.sources import ROOT, modules, tree

TOP_LEVEL = {
    "pyproject.toml", "sidecar", "protocol", "storage", "deploy", "tests", "README.md", "Makefile", "LICENSE",
    "CHANGELOG.md",
}  # fmt: skip

LONGEST = 400
LONGER = {
    "sidecar/cli.py": "one function for each command, nothing else",
    "protocol/events.py": "one class for each of the many inbound messages, nothing else",
    "protocol/handoff.py": "one class for each part of the outgoing messages, nothing else",
    "sidecar/core/state.py": "one class for each kind of item in the ledger, nothing else",
    "sidecar/lane.py": "one lane from claim to release, with the parts it is served by, in order",
    "sidecar/compactor.py": "the one way of an attempt from prepare to commit, read in order",
    "sidecar/transport/session.py": "one connection from its first byte to its last, and what can be asked of it",
    "storage/store.py": "the one face of the package; each method is a line or two to its module",
}
TOO_LONG_FOR_ANY_REASON = 700

EMPTY_NAMES = {
    "utils",
    "util",
    "helpers",
    "helper",
    "manager",
    "base",
    "common",
    "handler",
    "handlers",
    "misc",
}

SUPERVISORS = {
    "sidecar/compactor.py": "a defect in one attempt is logged and counted; the lane goes on without a summary",
}
"""Modules that may catch everything without raising it again."""

# Put together here, so that this file does not hold them itself.
MARKS = ["TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK", "NotImplemented" + "Error"]
UNFINISHED = re.compile(rf"\b(?:{'|'.join(MARKS)})\b|\b{'st' + 'ub'}s?\b")
PLACES = ["/wo" + "rk/", "/ro" + "ot/", "/Us" + "ers/", "/ho" + "me/"]
REGISTRIES = [r"\bpypi\." + "org", "python" + "hosted", r"registry\." + "npmjs", r"ghcr\." + "io"]
ORIGINS = ["co-authored" + "-by", "generated " + "by an? "]
ELSEWHERE = re.compile("|".join([*PLACES, *REGISTRIES, *ORIGINS]), re.IGNORECASE)
WEB = re.compile(r"https?://([a-z0-9.-]+\.[a-z]{2,})", re.IGNORECASE)
HOSTS = {"www.w3.org", "json-schema.org", "www.apache.org"}
"""Names of formats and of the license; nothing is fetched from them."""
PRETENDED = re.compile(
    r"(?:^|\.)(?:example|invalid|test|internal|local|svc)(?:\.(?:com|org|net))?$|\.example\."
)


def tracked() -> list[str]:
    """Every file under version control; without git, every file that would be."""
    found = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=False,
    )
    if found.returncode:
        pytest.skip("not a git work tree")
    return [name for name in found.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def texts() -> list[tuple[str, str]]:
    pairs = []
    for name in tracked():
        try:
            pairs.append((name, (ROOT / name).read_text()))
        except UnicodeDecodeError:
            continue
    return pairs


def test_the_top_level_holds_only_what_belongs_there() -> None:
    top = {Path(name).parts[0] for name in tracked()}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL


def test_a_module_says_what_it_is() -> None:
    assert [path for path in modules() if len(ast.get_docstring(tree(path)) or "") < 20] == []


def test_a_file_answers_one_question() -> None:
    lengths = {path: (ROOT / path).read_text().count("\n") for path in modules()}
    bounds = {path: TOO_LONG_FOR_ANY_REASON if path in LONGER else LONGEST for path in lengths}
    assert {path: lines for path, lines in lengths.items() if lines > bounds[path]} == {}


def test_module_names_say_something() -> None:
    assert [path for path in modules() if set(Path(path).with_suffix("").parts) & EMPTY_NAMES] == []


def test_nothing_swallows_every_error() -> None:
    assert [where for path in modules() if path not in SUPERVISORS for where in swallowing(path)] == []


def swallowing(path: str) -> Iterator[str]:
    """Places that catch everything, by except or suppress, and cannot raise it again."""
    everything = re.compile(r"\b(?:Base)?Exception\b")
    for node in ast.walk(tree(path)):
        match node:
            case ast.ExceptHandler(type=kind):
                caught = kind is None or everything.search(ast.unparse(kind))
                if caught and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
                    yield f"{path}:{node.lineno}"
            case ast.Call(func=func, args=kinds) if ast.unparse(func).endswith("suppress"):
                if any(everything.search(ast.unparse(kind)) for kind in kinds):
                    yield f"{path}:{node.lineno}"
            case _:
                pass


def test_nothing_is_left_unfinished() -> None:
    found = [
        f"{name}: {match[0]}"
        for name, text in texts()
        if not name.endswith(".jsonl")
        for match in UNFINISHED.finditer(text)
    ]
    assert found == []


def test_the_project_speaks_of_itself_only() -> None:
    found = [
        f"{name}: {match[0]}"
        for name, text in texts()
        if not name.endswith(".jsonl")
        for match in ELSEWHERE.finditer(text)
    ]
    assert found == []


def test_no_host_of_the_web_is_named() -> None:
    found = [
        f"{name}: {match[1]}"
        for name, text in texts()
        if not name.startswith("tests/")
        for match in WEB.finditer(text)
        if match[1] not in HOSTS and not PRETENDED.search(match[1])
    ]
    assert found == []


def test_every_test_file_has_its_own_name() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))


LOGGED = {"debug", "info", "warning", "error", "exception", "critical"}


def logged(path: str) -> Iterator[str]:
    """The names under which a module logs, where they stand in the call."""
    for node in ast.walk(tree(path)):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="log"), attr=level),
                args=[ast.Constant(value=str(name)), *_],
            ) if level in LOGGED:
                yield name


def test_a_log_entry_is_named_by_plain_words() -> None:
    """One style, so that who reads or searches the log knows what to look for."""
    named = [(path, name) for path in modules() for name in logged(path)]
    assert len(named) > 40
    assert [item for item in named if not re.fullmatch(r"[a-z][^_]*[^_.]", item[1])] == []
