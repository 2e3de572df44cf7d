"""What the image holds, made by the steps of its Dockerfile without a container engine, file by file.

The Dockerfile's copies and its script are carried out here; what it says about user, folders and commands is read
from it and done with the kernel's own means: a read-only root, another user, one folder to write to.
"""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement

from sidecar.config import load_config
from sidecar.config_shape import KEYS
from support.nats_server import NatsServer, free_port, wait_until
from support.pages import ROOT

pytestmark = pytest.mark.timeout(600)

DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
LOCKS = sorted((DEPLOY / "image").glob("requirements*.txt"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
UID = 10001


def steps() -> list[list[tuple[str, str]]]:
    """Instruction and argument of each step of each stage."""
    joined = re.sub(r"\\\n\s*", " ", re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE))
    stages: list[list[tuple[str, str]]] = [[]]
    for line in filter(None, joined.splitlines()):
        name, _, argument = line.partition(" ")
        if name == "FROM":
            stages.append([])
        stages[-1].append((name, argument.strip()))
    return stages


ARGUMENTS, BUILD, FINAL = steps()


def of(stage: list[tuple[str, str]], name: str) -> list[str]:
    return [argument for instruction, argument in stage if instruction == name]


def environment() -> dict[str, str]:
    """What the image sets."""
    (text,) = of(FINAL, "ENV")
    return dict(pair.split("=", 1) for pair in text.split())


# --- the Dockerfile itself ------------------------------------------------------------------------------------


def test_the_base_is_an_argument_and_may_be_pinned_by_its_digest() -> None:
    assert dict(argument.split("=", 1) for argument in of(ARGUMENTS, "ARG")) == {
        "BASE": "python:3.11-slim-bookworm",
        "DIGEST": "",
    }
    bases = {of(stage, "FROM")[0].split(" AS ")[0] for stage in (BUILD, FINAL)}
    assert bases == {"${BASE}${DIGEST:+@${DIGEST}}"}


def test_it_runs_as_a_number_and_says_how_it_is_stopped_and_asked() -> None:
    assert of(FINAL, "USER") == [f"{UID}:{UID}"]
    assert of(FINAL, "STOPSIGNAL") == ["SIGTERM"]
    assert of(FINAL, "ENTRYPOINT") == ['["watchkeeper"]']
    assert of(FINAL, "CMD") == ['["run"]']
    assert of(FINAL, "HEALTHCHECK")[0].endswith('CMD ["watchkeeper", "health", "alive"]')
    assert of(FINAL, "VOLUME") == [f'["{environment()["WATCHKEEPER_DATA_DIR"]}"]']


def test_what_it_sets_the_daemon_understands() -> None:
    ours = {name: value for name, value in environment().items() if name.startswith("WATCHKEEPER_")}
    config = load_config(None, ours)
    # Loopback would answer no probe from outside.
    assert config.admin.listen == "0.0.0.0:9464"
    assert of(FINAL, "EXPOSE") == ["9464"]
    assert {f"WATCHKEEPER_{key.upper().replace('.', '__')}" for key in KEYS} >= set(ours)


def test_nothing_but_what_is_copied_goes_to_the_build() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in ("", "#")]
    assert lines[0] == "*"
    let_in = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = {source for argument in of(BUILD, "COPY") for source in argument.split()[:-1]}
    assert let_in == copied
    assert all((ROOT / name).exists() for name in let_in)


# --- the locks ------------------------------------------------------------------------------------------------


def locked(path: Path) -> dict[str, str]:
    """Package → version."""
    return {
        name.lower(): version for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", path.read_text(), re.M)
    }


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_package_of_a_lock_has_its_hashes(path: Path) -> None:
    entries = re.split(r"\n(?=[\w.-]+==)", re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE))
    assert [entry.splitlines()[0] for entry in entries if "--hash=sha256:" not in entry] == []


@pytest.mark.parametrize(
    ("lock", "extras"),
    [("requirements.txt", []), ("requirements-extras.txt", ["openai", "anthropic", "tracing"])],
)
def test_a_lock_holds_what_the_project_asks_for(lock: str, extras: list[str]) -> None:
    versions = locked(DEPLOY / "image" / lock)
    wanted = [*PROJECT["dependencies"]]
    for extra in extras:
        wanted += PROJECT["optional-dependencies"][extra]
    for text in wanted:
        asked = Requirement(text)
        again = "make the locks anew by the command in their first lines"
        assert asked.name.lower() in versions, again
        assert versions[asked.name.lower()] in asked.specifier, again


# --- the files ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    """``/opt/watchkeeper`` of the image, made by the Dockerfile's own copies and script."""
    folder = Path(tempfile.mkdtemp(prefix="wk-image-"))
    # Another user must be able to look into it, as into the image.
    folder.chmod(0o755)
    source, target = folder / "src", folder / "opt"
    try:
        for argument in of(BUILD, "COPY"):
            *names, where = argument.split()
            for name in names:
                inside = source / where.removeprefix("/src").strip("/")
                place = inside / Path(name).name if where.endswith("/") else inside
                place.parent.mkdir(parents=True, exist_ok=True)
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, place, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / name, place)
        (run,) = of(BUILD, "RUN")
        command = run.replace('"$LOCK"', "requirements.txt").replace("/opt/watchkeeper", str(target))
        done = subprocess.run(
            command.replace("/src", str(source)).split(),
            env={**os.environ, "PYTHON": python_with_pip()},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        yield target
    finally:
        shutil.rmtree(folder)


def python_with_pip() -> str:
    """The interpreter below the tests' environment, which another user may run and which has pip."""
    outer = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    for candidate in (str(outer), sys.executable):
        if subprocess.run([candidate, "-m", "pip", "--version"], capture_output=True).returncode == 0:
            return candidate
    pytest.skip("no interpreter here has pip")


def site(image: Path) -> Path:
    (found,) = image.glob("lib/python3.*/site-packages")
    return found


def test_it_holds_the_locked_packages_and_ours_and_no_other(image: Path) -> None:
    found = {}
    for path in site(image).glob("*.dist-info/METADATA"):
        about = email.message_from_string(path.read_text())
        found[about["Name"].lower()] = about["Version"]
    ours = found.pop(PROJECT["name"])
    assert ours == PROJECT["version"]
    lock = {name.replace("_", "-"): version for name, version in locked(LOCKS[-1]).items()}
    installed = {name.replace("_", "-"): version for name, version in found.items()}
    # A lock for every platform names packages that this one does not need.
    assert installed.items() <= lock.items()
    direct = {Requirement(text).name.lower() for text in PROJECT["dependencies"]}
    assert direct <= set(installed)


def test_of_ours_it_holds_the_three_packages_whole(image: Path) -> None:
    source = image.parent / "src"
    for package in ("protocol", "storage", "sidecar"):
        assert held(site(image), package) == held(source, package)
        assert f"{package}/py.typed" in held(site(image), package)


def held(folder: Path, package: str) -> set[str]:
    """The package's files in the folder, without what Python makes of them."""
    return {
        str(path.relative_to(folder))
        for path in (folder / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_it_holds_no_tests_no_tools_and_nothing_left_over(image: Path) -> None:
    assert sorted(path.name for path in (image / "bin").iterdir() if not path.name.startswith("python")) == [
        "watchkeeper"
    ]
    unwanted = (
        "tests",
        "test",
        "pip",
        "setuptools",
        "wheel",
        "hatchling",
        "*.c",
        "*.h",
        "*.pyx",
        "*.whl",
        ".cache",
    )
    found = [
        str(path.relative_to(image))
        for path in image.rglob("*")
        if any(fnmatch(path.name, pattern) for pattern in unwanted) and not path.name.startswith("_cffi")
    ]
    assert [name for name in found if not name.startswith("lib/python3.11/site-packages/cffi/")] == []
    assert not list(image.rglob("nats-server*"))


def test_it_is_compiled_and_small(image: Path) -> None:
    sources = [path for path in (site(image) / "sidecar").rglob("*.py") if path.stat().st_size]
    compiled = {path.name.split(".")[0] for path in (site(image) / "sidecar").rglob("*.pyc")}
    assert {path.stem for path in sources} <= compiled
    size = sum(path.lstat().st_size for path in image.rglob("*") if path.is_file() and not path.is_symlink())
    assert size < 80 * 1024 * 1024


# --- running it -----------------------------------------------------------------------------------------------


@pytest.fixture
def cage(image: Path) -> Iterator[list[str]]:
    """Words to put before a command: as the image's user, with a root that nobody can write to but one folder."""
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"):
        pytest.skip("a read-only root and another user need root, unshare and setpriv")
    data = Path(tempfile.mkdtemp(prefix="wk-data-"))
    os.chown(data, UID, UID)
    data.chmod(0o700)
    # What lies below /tmp stays to be seen; the root's mount makes it read-only with everything else.
    script = (
        "set -e; mount --make-rprivate /; mount --bind $0 $0; mount -o remount,bind,ro /; "
        "for at in /dev/shm /run; do mount -t tmpfs -o ro tmpfs $at 2>/dev/null || true; done; "
    )
    user = [
        "setpriv",
        f"--reuid={UID}",
        f"--regid={UID}",
        "--clear-groups",
        "--no-new-privs",
        "--bounding-set=-all",
    ]
    if subprocess.run([*user, str(image / "bin/python"), "-c", ""], capture_output=True).returncode:
        pytest.skip("the interpreter of these tests lies where another user may not go")
    try:
        yield ["unshare", "--mount", "sh", "-c", script + 'exec "$@"', str(data), *user]
    finally:
        shutil.rmtree(data)


def variables(image: Path, data: str, **more: str) -> dict[str, str]:
    """The image's environment with its folders where they lie here."""
    given = environment() | {"PATH": f"{image}/bin:/usr/bin:/bin", "WATCHKEEPER_DATA_DIR": f"{data}/data"}
    return given | more


def test_its_user_can_write_to_the_data_folder_and_nowhere_else(image: Path, cage: list[str]) -> None:
    data = cage[5]
    program = (
        "import os, sys\n"
        "assert os.getuid() == os.geteuid() == 10001 and os.getgroups() == []\n"
        "open(os.path.join(sys.argv[1], 'x'), 'w').close()\n"
        "for folder in ('/', '/tmp', '/var/tmp', '/etc', '/dev/shm', sys.argv[2], os.path.expanduser('~')):\n"
        "    try:\n"
        "        open(os.path.join(folder, 'x'), 'w').close()\n"
        "    except OSError:\n"
        "        continue\n"
        "    raise SystemExit(folder + ' can be written to')\n"
    )
    done = subprocess.run(
        [*cage, str(image / "bin/python"), "-c", program, data, str(image)],
        env=variables(image, data),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_daemon_of_the_image_works_in_its_cage(image: Path, cage: list[str]) -> None:
    data = cage[5]
    port = free_port()
    with NatsServer() as server:
        given = variables(
            image, data, WATCHKEEPER_NATS__URL=server.url, WATCHKEEPER_ADMIN__LISTEN=f"0.0.0.0:{port}"
        )
        log = Path(data) / "log"
        with log.open("wb") as file:
            daemon = subprocess.Popen([*cage, "watchkeeper", "run"], cwd="/", env=given, stderr=file)
        try:

            def ready() -> bool:
                assert daemon.poll() is None, log.read_text()
                try:
                    return httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False).status_code == 200
                except httpx.TransportError:
                    return False

            wait_until(ready, "readiness", 60)
            check = subprocess.run(
                [*cage, "watchkeeper", "health", "alive"], env=given, capture_output=True, text=True
            )
            assert check.returncode == 0, check.stdout + check.stderr
            about = Path(f"/proc/{daemon.pid}/status").read_text()
            for kind in ("Uid", "Gid"):
                assert f"{kind}:\t{UID}\t{UID}\t{UID}\t{UID}" in about
            daemon.terminate()
            assert daemon.wait(60) == 0, log.read_text()
        finally:
            if daemon.poll() is None:
                daemon.kill()
                daemon.wait()
    assert (Path(data) / "data" / "watchkeeper.db").stat().st_uid == UID
