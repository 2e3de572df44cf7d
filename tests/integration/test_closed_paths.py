"""Every command on paths its user may not read or write: one line that names the path and the user, exit code 2.

As root the commands run without the capabilities by which nothing is closed to root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from sidecar.evaluation.scenario import shipped
from support.sources import ROOT
from support.storage_rows import Messages, commit, opened

USER = os.geteuid()
POWERS = "-dac_override,-dac_read_search"
PLAIN = ["setpriv", f"--bounding-set={POWERS}", f"--inh-caps={POWERS}"] if USER == 0 else []

pytestmark = pytest.mark.skipif(USER == 0 and not shutil.which("setpriv"), reason="as root it needs setpriv")


async def _store(folder: Path) -> None:
    async with opened(folder) as store:
        await commit(store, journal=Messages().some(1))
        await store.backup(folder / "copy.db")


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """``closed``: nobody may look into it. ``fixed``: all may read it, nobody may write; both hold a database.
    ``own``: the user's."""
    folder = Path(tempfile.mkdtemp(prefix="watchkeeper-closed-"))
    folder.chmod(0o755)
    try:
        for name in ("closed", "fixed"):
            anyio.run(_store, folder / name)
            shutil.copy(shipped() / "approval_pending.toml", folder / name / "case.toml")
            (folder / name / "talk.jsonl").write_text("{}\n")
            (folder / name / "wk.toml").write_text("")
            for file in (folder / name).iterdir():
                file.chmod(0o444)
            (folder / name / "lock").chmod(0o400)
        (folder / "unread.toml").touch(0o000)
        (folder / "own").mkdir()
        shutil.copy(folder / "closed" / "copy.db", folder / "own" / "copy.db")
        (folder / "fixed").chmod(0o555)
        (folder / "closed").chmod(0o000)
        yield folder
    finally:
        for name in ("closed", "fixed"):
            (folder / name).chmod(0o700)
        shutil.rmtree(folder)


def command(
    place: Path, *arguments: str, cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("WATCHKEEPER_")}
    return subprocess.run(
        [*PLAIN, sys.executable, "-m", "sidecar", *(text.format(at=place) for text in arguments)],
        env={
            **known,
            "COLUMNS": "200",
            "NO_COLOR": "1",
            "TERM": "dumb",
            "PYTHONPATH": str(ROOT),
            "WATCHKEEPER_ADMIN__LISTEN": "127.0.0.1:0",
            **env,
        },
        cwd=cwd or place / "own",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("inspect r1 --data-dir {at}/closed", "closed/watchkeeper.db"),
        ("inspect r1 --data-dir {at}/fixed", "fixed"),
        ("audit verify --all --data-dir {at}/closed", "closed/watchkeeper.db"),
        ("forget r1 --data-dir {at}/closed", "closed/watchkeeper.db"),
        ("backup {at}/own/new.db --data-dir {at}/closed", "closed/watchkeeper.db"),
        ("restore {at}/closed/copy.db --data-dir {at}/own/new", "closed/copy.db"),
        ("restore {at}/own/copy.db --data-dir {at}/closed/new", "closed/new"),
        ("run --config {at}/closed/wk.toml", "closed/wk.toml"),
        ("check-config --config {at}/unread.toml", "unread.toml"),
        ("replay {at}/closed/talk.jsonl", "closed/talk.jsonl"),
        ("evaluate {at}/closed", "closed"),
        ("evaluate {at}/fixed/case.toml --html {at}/fixed/r.html", "fixed/r.html"),
        ("verify {at}/unread.toml", "unread.toml"),
    ],
)
def test_one_line_names_the_path_and_who_may_not(place: Path, arguments: str, named: str) -> None:
    ended = command(place, *arguments.split())
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert ended.stderr.startswith("watchkeeper: ")
    assert f"{place}/{named}" in ended.stderr
    assert f"user {USER} may not" in ended.stderr or "Permission denied" in ended.stderr
    assert not (place / "own" / "new.db").exists()


@pytest.mark.parametrize("broker", [(), ("--embedded-nats",)])
@pytest.mark.parametrize("folder", ["closed", "fixed/new"])
def test_the_daemon_ends_with_one_line_too(place: Path, folder: str, broker: tuple[str, ...]) -> None:
    told = {"WATCHKEEPER_DATA_DIR": f"{place}/{folder}", "WATCHKEEPER_LOGS__FORMAT": "json"}
    ended = command(place, "run", *broker, **told)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert f"Permission denied for user {USER}" in ended.stderr.splitlines()[-1]
    assert f"{place}/{folder}" in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize("key", ["NATS__CREDS", "SUMMARIZER__API_KEY_FILE"])
def test_a_configuration_that_names_a_closed_file_is_refused(place: Path, key: str) -> None:
    ended = command(place, "check-config", **{f"WATCHKEEPER_{key}": f"{place}/closed/wk.toml"})
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert f"{place}/closed/wk.toml" in ended.stderr
