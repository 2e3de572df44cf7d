"""A long text of bytes reads as the same ``str`` does, and is paged and redacted as it; one at a time on the shelf."""

from __future__ import annotations

import json

import anyio
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol.errors import AskRefused
from protocol.redaction import DEFAULT
from sidecar import large_contents
from sidecar.core import longtext
from sidecar.core.longtext import LongText, valid
from sidecar.core.paging import Cut, joined
from sidecar.large_contents import Shelf, Whole

TEXT = st.text(alphabet=st.characters(codec="utf-8"), max_size=200)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longtext, "_BLOCK", 7)


@settings(max_examples=200, deadline=None)
@given(TEXT, st.integers(0, 220), st.integers(0, 220))
@example("🦓" * 30, 3, 9)
def test_it_reads_as_the_text_does(text: str, begin: int, end: int) -> None:
    long = LongText(text.encode())
    assert len(long) == len(text)
    assert long[begin:end] == text[begin:end]
    assert json.loads(long.quoted()) == text


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=100))
def test_what_is_no_utf_8_is_marked_as_ever(raw: bytes) -> None:
    assert valid(raw) == raw.decode("utf-8", "replace").encode()


@settings(max_examples=60, deadline=None)
@given(TEXT, st.integers(8, 3_000), st.integers(0, 3_000))
def test_it_is_paged_as_the_text_is(text: str, page: int, room: int) -> None:
    content = f"{text} größe 🦓" * 300
    event = json.dumps({"id": "e", "content": "short", "more": "x" * 300}).encode()
    whole = json.dumps({"id": "e", "content": content, "more": "x" * 300}).encode()
    long = LongText(content.encode())
    assert json.loads(joined(event, long)) == json.loads(whole)
    one, other = Cut(event, None, page, long), Cut(joined(event, long), None, page)
    assert one.total == other.total
    offset = 0
    for _ in range(40):
        piece = one.piece(offset, room)
        assert piece == other.piece(offset, room)
        if piece.following is None:
            return
        offset = piece.following


@settings(max_examples=60, deadline=None)
@given(TEXT)
def test_bytes_are_redacted_as_text_is(text: str) -> None:
    text += " password=hunter2hunter2 ghp_0123456789abcdefghijABCDEFGHIJ012345"
    assert DEFAULT.utf8(text.encode()) == DEFAULT.text(text).encode()
    plain = b"nothing here"
    assert DEFAULT.utf8(plain) is plain


@pytest.mark.anyio
async def test_one_text_at_a_time_and_who_waits_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf()
    first, second = ("a", b"", 1), ("b", b"", 1)
    shelf.keep(first, Whole("found", b"{}"))
    shelf.keep(second, Whole("found", b"[]"))
    assert shelf.kept(first) is None
    found = shelf.kept(second)
    assert found is not None
    assert found.event == b"[]"
    monkeypatch.setattr(large_contents, "_WAIT_SECONDS", 0.01)
    codes: list[str] = []

    async def another() -> None:
        with pytest.raises(AskRefused) as refused:
            async with shelf.turn():
                raise AssertionError("two at once")
        codes.append(refused.value.code)

    async with shelf.turn(), anyio.create_task_group() as tasks:
        tasks.start_soon(another)
    assert codes == ["unavailable"]
    with anyio.fail_after(30):
        async with shelf.turn():
            shelf.let_go()
    assert shelf.kept(second) is None
