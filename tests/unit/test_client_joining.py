"""Pages of a cut message, joined: the same message again, whatever its texts are; what does not fit is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Raw

from protocol.asks import FetchItem
from protocol.client.errors import ContentChanged
from protocol.client.joining import Joiner, join
from protocol.codec import encode
from sidecar.core.paging import Cut


def pages(event: dict[str, Any], room: int, record: dict[str, Any] | None = None) -> list[FetchItem]:
    """The items of all pages of so many bytes."""
    raw = None if record is None else encode(record)
    found, offset = [], 0
    while True:
        cut = Cut(encode(event), raw, room)
        piece = cut.piece(offset, room)
        found.append(
            FetchItem(
                ref="event:e",
                status="found",
                position=1,
                event=UNSET if piece.event is None else Raw(piece.event),
                record=UNSET if piece.record is None else Raw(piece.record),
                digest="d",
                part=piece.part,
            )
        )
        if piece.following is None:
            return found
        offset = piece.following


def joined(parts: list[FetchItem]) -> Any:
    whole = join(parts)
    assert whole.part is UNSET
    assert whole.event is not UNSET
    return msgspec.json.decode(whole.event)


TEXTS = st.one_of(
    st.text(max_size=300),
    # Pieces that are all alike, which do not tell by themselves that they were cut.
    st.builds(lambda letter, times: letter * times, st.sampled_from("aü🦓"), st.integers(0, 9_000)),
    st.builds(lambda seed, times: f"{seed} line\n" * times, st.integers(0, 99), st.integers(0, 900)),
)


@given(
    content=TEXTS,
    conclusion=TEXTS,
    more=st.lists(TEXTS, max_size=3),
    room=st.sampled_from([300, 700, 2_500, 9_000]),
)
def test_joining_gives_the_message_back(content: str, conclusion: str, more: list[str], room: int) -> None:
    event = {"type": "tool.returned", "id": "e", "content": content, "conclusion": conclusion, "parts": more}
    parts = pages(event, room)
    try:
        assert joined(parts) == event
    except ContentChanged:
        # Two texts of the same length as the piece that never changes: rare, and refused, never guessed.
        texts = [content, conclusion, *more]
        assert len(parts) > 1
        assert sum(len(text) == parts[0].part.chars for text in texts if parts[0].part is not UNSET) >= 1


def test_a_text_of_one_letter_is_joined() -> None:
    event = {"type": "message", "id": "e", "role": "user", "content": "a" * 6_000}
    parts = pages(event, 1_100)
    assert len(parts) > 5
    assert joined(parts) == event


def test_a_message_and_its_record_are_joined() -> None:
    event = {"type": "artifact.saved", "id": "e", "description": "d" * 3_000}
    record = {"id": "e", "state": "saved", "description": "d" * 3_000}
    parts = pages(event, 900, record)
    whole = join(parts)
    assert joined(parts) == event
    assert whole.record is not UNSET
    assert msgspec.json.decode(whole.record) == record


def test_whole_items_pass_and_a_cut_one_comes_when_it_is_complete() -> None:
    event = {"type": "message", "id": "e", "content": "".join(f"line {n}\n" for n in range(900))}
    parts = pages(event, 2_000)
    plain = FetchItem(ref="pos:9", status="not_found")
    joiner = Joiner()
    assert list(joiner.take([plain, parts[0]])) == [plain]
    for part in parts[1:-1]:
        assert list(joiner.take([part])) == []
    whole, last = joiner.take([parts[-1], plain])
    assert last == plain
    assert whole == join(parts)
    joiner.end()


def taken(parts: list[FetchItem]) -> list[FetchItem]:
    joiner = Joiner()
    found = [whole for part in parts for whole in joiner.take([part])]
    joiner.end()
    return found


@pytest.mark.parametrize("wrong", ["gap", "other", "unfinished", "interrupted"])
def test_pages_that_do_not_belong_together_are_refused(wrong: str) -> None:
    event = {"type": "message", "id": "e", "content": "".join(f"line {n}\n" for n in range(900))}
    parts = pages(event, 2_000)
    if wrong == "gap":
        del parts[1]
    elif wrong == "other":
        parts[1] = msgspec.structs.replace(parts[1], digest="another")
    elif wrong == "unfinished":
        del parts[-1]
    else:
        parts[1] = FetchItem(ref="pos:9", status="gone")
    with pytest.raises(ContentChanged):
        taken(parts)
