"""README, reference tables and pictures: what is printed from the code is printed anew, and links lead somewhere."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from protocol.errors import ExitCode
from protocol.handoff import Packet, Verdict
from sidecar.cli import app
from sidecar.config import load_config
from sidecar.metric_labels import AUTHORIZE_CODES, RESUME_CODES, RUN_CODES
from support import pages, pictures

README = pages.ROOT / "README.md"
TABLES = [(path, name) for path in pages.PAGES for name in pages.marked(path.read_text())]
SVGS = sorted(pictures.PICTURES.glob("*.svg"))


def between(start: str, end: str) -> str:
    """The code block between two marks of the README."""
    found = re.search(rf"<!-- {start} -->\n```\w+\n(.*?)```\n<!-- {end} -->", README.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(("path", "name"), TABLES)
def test_a_table_is_what_the_code_says(path: Path, name: str) -> None:
    shown = pages.marked(path.read_text())[name]
    assert shown == pages.TABLES_OF_PAGES[name]().strip("\n"), "run: make pages"


def test_every_table_is_on_a_page() -> None:
    assert sorted(name for _, name in TABLES) == sorted(pages.TABLES_OF_PAGES)


def test_every_code_has_a_meaning_and_no_other() -> None:
    assert set(pages.RUN_MEANINGS) == set(RUN_CODES)
    assert set(pages.RESUME_MEANINGS) == set(RESUME_CODES)
    assert set(pages.AUTHORIZE_MEANINGS) == set(AUTHORIZE_CODES)


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _anchors(path: Path) -> set[str]:
    titles = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    return {_anchor(title) for title in titles}


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        file, _, anchor = target.partition("#")
        path = page if not file else (page.parent / file).resolve()
        assert path.exists(), target
        if anchor:
            assert anchor in _anchors(path), target


def test_files_and_folders_that_the_readme_names_exist() -> None:
    named = re.findall(r"`((?:sidecar|storage|protocol|tests|deploy)/[\w./*-]+)`", README.read_text())
    assert named
    for name in named:
        assert list(pages.ROOT.glob(name)) or list(pages.ROOT.glob(f"{name}*")), name


def test_the_packets_first_level_is_shown_whole() -> None:
    shown = json.loads(between("packet json", "packet json end"))
    assert tuple(shown) == tuple(name for name in Packet.__struct_encode_fields__ if name in shown)
    required = {field.encode_name for field in msgspec.structs.fields(Packet) if field.required}
    assert required <= set(shown)


def test_every_verdict_command_and_exit_code_is_explained() -> None:
    text = README.read_text()
    for verdict in Verdict.__args__:  # type: ignore[attr-defined]
        assert f"| `{verdict}` |" in text
    for command in app.registered_commands:
        name = command.name or command.callback.__name__  # type: ignore[union-attr]
        assert f"| `watchkeeper {name}" in text
    for code in ExitCode:
        assert f"| {int(code)} | " in text


def test_the_example_configuration_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "watchkeeper.toml"
    path.write_text(between("config example", "config example end"))
    config = load_config(path, {})
    assert len(config.sources) == sum(
        len(value) if isinstance(value, dict) else 1 for value in tomllib.loads(path.read_text()).values()
    )


@pytest.mark.parametrize("path", SVGS, ids=lambda path: path.name)
def test_a_picture_stands_by_itself(path: Path) -> None:
    text = path.read_text()
    ElementTree.fromstring(text)
    assert re.findall(r"https?://[^\"']+", text.replace("http://www.w3.org/2000/svg", "")) == []
    for word in ("<script", "@import", "@font-face", "url(http", "href", "<image"):
        assert word not in text
    assert f"deploy/pictures/{path.name}" in README.read_text()


def test_the_headroom_picture_is_drawn_from_its_frames() -> None:
    stored = (pictures.PICTURES / "headroom.json").read_bytes()
    frames = msgspec.json.decode(stored, type=list[pictures.Frame])
    drawn = pictures.draw(frames)
    assert drawn == pictures.draw(frames)
    words = (pictures.PICTURES / "headroom.svg").read_text()
    for frame in frames:
        assert f">{frame.events}" in words.replace("&#160;", "").replace("\u00a0", "")
