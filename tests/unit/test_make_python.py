"""The Makefile uses the Python it is given, or says why not, whatever made the environment before."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.sources import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", "-f", str(ROOT / "Makefile"), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Something made an environment here before: its Python tells of another one, its command says so."""
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for name, said in (("python", "3.11.0 /somewhere/else"), ("watchkeeper", "the demo runs")):
        (binaries / name).write_text(f"#!/bin/sh\necho {said}\n")
        (binaries / name).chmod(0o755)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / ".venv" / ".demo").touch()
    return tmp_path


def test_a_python_that_is_not_there_is_told_beside_an_environment_too(folder: Path) -> None:
    ended = make(folder, "demo", "PYTHON=/nope")
    assert ended.returncode == 2
    assert "PYTHON=/nope: no Python runs by that name" in ended.stderr
    assert ended.stdout == ""


def test_an_environment_of_another_python_is_not_taken_for_it(folder: Path) -> None:
    ended = make(folder, "demo", f"PYTHON={sys.executable}")
    assert ended.returncode == 2
    assert ".venv is of another Python (3.11.0 /somewhere/else); make clean first" in ended.stderr


def test_without_a_choice_the_environment_is_used_as_it_is(folder: Path) -> None:
    ended = make(folder, "demo")
    assert (ended.returncode, ended.stdout) == (0, "the demo runs\n")


def test_a_python_too_old_is_told_with_the_goal_that_was_asked_for(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text('#!/bin/sh\ntest -z "$2"\n')
    old.chmod(0o755)
    (tmp_path / "pyproject.toml").touch()
    ended = make(tmp_path, "demo", f"PYTHON={old}")
    assert ended.returncode == 2
    assert "Watchkeeper needs Python 3.11 or newer: make demo PYTHON=" in ended.stderr
