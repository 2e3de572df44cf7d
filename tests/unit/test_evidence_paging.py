"""Cutting between characters, pages that join, cursors that are good for one question; words of a query."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.asks import AskFetch
from sidecar.core.evidence import ITEM_EVENTS, identities
from sidecar.core.paging import Cursor, Cut, fitting, question, read_cursor, write_cursor
from storage import terms

TEXT = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=300)


@settings(max_examples=150, deadline=None)
@given(TEXT, st.integers(0, 20), st.integers(-3, 400))
def test_what_fits_fits_and_something_always_does(text: str, begin: int, room: int) -> None:
    begin = min(begin, len(text) - 1)
    size = fitting(text, begin, room)
    assert 0 <= size <= len(text) - begin
    used = len(json.dumps(text[begin : begin + size], ensure_ascii=False).encode()) - 2
    if size > 1:
        assert used <= max(room, 1) + 6
    assert size >= 1 or room <= 0


@settings(max_examples=120, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=4), st.integers(8, 3_000), st.integers(0, 3_000))
def test_pieces_join(texts: list[str], page: int, room: int) -> None:
    event = json.dumps({"id": "e1", "content": [{"text": text * 9} for text in texts]}).encode()
    record = json.dumps({"text": texts[0]}).encode()
    cut = Cut(event, record, page)
    assert cut.total > 0
    pages, offset = [], 0
    for _ in range(100_000):
        piece = cut.piece(offset, room)
        assert piece.part.offset == offset
        assert piece.part.chars >= 1
        pages.append(piece)
        if piece.following is None:
            break
        assert piece.following == offset + piece.part.chars
        offset = piece.following
    assert sum(piece.part.chars for piece in pages) == cut.total
    shown = [json.loads(piece.event or b"null") for piece in pages]
    if isinstance(shown[0], str):
        assert "".join(shown) == event.decode()
    else:
        long = [len(text * 9) > 128 for text in texts]
        for place, text in enumerate(texts):
            told = [item["content"][place]["text"] for item in shown]
            assert "".join(told) == text * 9 or not long[place] or told == [text * 9] * len(told)


def test_a_cursor_goes_back_to_its_question_only() -> None:
    one = question("t", "l", "r", AskFetch(refs=("pos:1",), max_tokens=5))
    cursor = Cursor(3, 14, 15, 92, "check")
    text = write_cursor(cursor, one)
    assert read_cursor(text, one) == cursor
    assert question("t", "l", "r", AskFetch(refs=("pos:1",), max_tokens=5, cursor="x", after=9)) == one
    for other in (
        question("t2", "l", "r", AskFetch(refs=("pos:1",), max_tokens=5)),
        question("t", "l", "r2", AskFetch(refs=("pos:1",), max_tokens=5)),
        question("t", "l", "r", AskFetch(refs=("pos:2",), max_tokens=5)),
    ):
        with pytest.raises(ValueError, match="cursor"):
            read_cursor(text, other)


@given(st.text(max_size=80))
def test_no_other_text_is_a_cursor(text: str) -> None:
    with pytest.raises(ValueError, match="cursor"):
        read_cursor(text, question("t", "l", "r", AskFetch(refs=())))


def test_a_negative_cursor_is_none() -> None:
    bound = question("t", "l", "r", AskFetch(refs=()))
    with pytest.raises(ValueError, match="cursor"):
        read_cursor(write_cursor(Cursor(index=-1), bound), bound)


def test_names_an_id_may_have_in_the_journal() -> None:
    first = identities("x")
    assert first[0] == "x"
    assert set(first[1:]) == {f"x#{name}" for name in ITEM_EVENTS}
    assert {"operation.declared", "approval.resolved", "authorization.requested"} <= set(ITEM_EVENTS)
    assert "x#operation.settled#3" in identities("x", 2, 2)
    assert "x#operation.settled#4" not in identities("x", 2, 2)


# --- words ------------------------------------------------------------------------------------------------


def literals(query: str) -> list[str]:
    return [term.literal for term in terms.parse(query).terms]


def test_what_is_written_together_is_one_term() -> None:
    assert literals("see src/app/main.py:42, now") == ["see", "src/app/main.py:42", "now"]
    assert literals('"won\'t fix" --no-verify .env') == ["won't fix", "--no-verify", ".env"]
    assert literals("(see) the   the") == ["see", "the"]
    assert literals("") == literals(" \n ") == []
    assert literals("=> x") == ["x"]
    assert literals("=>") == ["=>"] or literals("=>") == ["="]
    assert len(terms.parse(" ".join(f"word{n}" for n in range(500))).terms) == terms.MAX_TERMS


@given(TEXT)
def test_ready_and_shown_are_the_way_there_and_back(text: str) -> None:
    plain = text.replace("\u200b", "")
    assert terms.shown(terms.ready(plain)) == plain


@settings(max_examples=200, deadline=None)
@given(TEXT, st.text(max_size=60))
def test_any_query_of_any_text_scores_and_shows(text: str, query: str) -> None:
    asked = terms.parse(query)
    weight = [1.0] * len(asked.terms)
    value = terms.score(asked, weight, terms.folded(text * 5))
    assert value >= 0
    shown = terms.snippet(asked, weight, text * 5)
    assert len(shown) <= 3 * terms.SNIPPET_CHARS + 200


def test_the_snippet_shows_the_match_in_its_surroundings() -> None:
    text = "Ünicode ßtart " * 60 + "here stands acct_8812 among others " + "and more words " * 60
    asked = terms.parse("ACCT_8812")
    shown = terms.snippet(asked, [1.0], text)
    assert "here stands acct_8812 among others" in shown
    assert shown.startswith("… ")
    assert shown.endswith(" …")
    assert len(shown) < 300
