"""A range read page by page is divided, and compared with a candidate, as it would be if it were in one piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import encode
from protocol.summary import Exchange, Statement, Summary
from sidecar.core.material import exchange_items, parts
from sidecar.core.validation import Compared, Limits
from sidecar.portions import Portions
from sidecar.ranges import Reading, tail_items
from storage.records import JournalEntry
from support import one_thread
from support.laws import law
from support.tape import Tape

_SIZES = st.sampled_from((0, 1, 40, 230, 900, 5_000))
_KINDS = st.sampled_from(("said", "user", "call", "result", "usage"))


class Pages:
    """Stands where a reading stands: the messages, a few at a time."""

    def __init__(self, entries: Sequence[JournalEntry], size: int) -> None:
        self._left = list(entries)
        self._size = size

    async def page(self, work: Callable[[Sequence[JournalEntry]], None]) -> bool:
        page, self._left = self._left[: self._size], self._left[self._size :]
        if page:
            work(page)
        return bool(page)


def stored(script: Sequence[tuple[str, int]]) -> list[JournalEntry]:
    tape = Tape()
    for number, (kind, size) in enumerate(script):
        text = "".join(f"{number}-{place} " for place in range(size // 4 + 1))[:size]
        match kind:
            case "said":
                tape.said(text)
            case "user":
                tape.user(text, channel="authority" if number % 3 == 0 else "event")
            case "call":
                tape.call(f"c-{number}", command=text)
            case "result":
                tape.result(f"c-{number}", text)
            case _:
                tape.usage(100)
    return [
        JournalEntry(
            run="r",
            channel=cast(Any, item.channel),
            position=item.position,
            version=item.position,
            stream_seq=item.position,
            event_id=item.event.id,
            type=kind,
            sha256=bytes(32),
            chain=bytes(32),
            body=encode(item.event),
        )
        for item, kind in zip(tape.items, ["run.started", *(kind for kind, _ in script)], strict=True)
    ]


async def portioned(pages: Pages, windows: Sequence[int]) -> tuple[list[tuple[Exchange, ...]], Portions]:
    portions, found = Portions(cast(Reading, pages)), []
    while not found or not portions.ended:
        found.append(await portions.next(windows[len(found) % len(windows)], 0))
    return found, portions


@law(10)
@given(
    st.lists(st.tuples(_KINDS, _SIZES), max_size=24),
    st.integers(1, 7),
    st.lists(st.sampled_from((80, 200, 700, 3_000)), min_size=1, max_size=3),
)
def test_parts_are_those_of_the_whole(script: list[tuple[str, int]], size: int, windows: list[int]) -> None:
    entries = stored(script)
    items = tail_items(entries)
    left = exchange_items(items)
    wanted: list[tuple[Exchange, ...]] = []
    while not wanted or left:
        wanted.append(next(parts(left, windows[len(wanted) % len(windows)])))
        left = left[len(wanted[-1]) :]
    found, portions = one_thread.run(partial(portioned, Pages(entries, size), windows))
    assert found == wanted
    assert portions.shown == len(exchange_items(items))
    assert portions.others == len(items) - portions.shown


@law(10)
@given(
    st.lists(st.tuples(_KINDS, _SIZES), max_size=16),
    st.integers(1, 5),
    st.integers(0, 15),
    st.integers(0, 400),
    st.integers(1, 600),
)
def test_a_candidate_is_compared_with_pages_as_with_the_whole(
    script: list[tuple[str, int]], size: int, source: int, begin: int, length: int
) -> None:
    shown = exchange_items(tail_items(stored(script)))
    quoted = shown[source % len(shown)].text[begin : begin + length] if shown else ""
    candidate = Summary(
        accepted_decisions=(),
        open_questions=(),
        completed=(),
        observations=(Statement(text=quoted, refs=()),),
        inferences=(),
        contradictions=(),
        evidence_refs=(),
        pending_action_refs=(),
        operations={},
        approvals={},
        objective="",
        next_action=None,
        narrative=quoted,
    )
    limits = Limits(max_tokens=4_000)
    compared = Compared(candidate, limits)
    for start in range(0, len(shown), size):
        types = compared.types
        compared.take(item for item in shown[start : start + size] if item.type in types)
    flat = " ".join(quoted.split())
    output = "\n".join(" ".join(item.text.split()) for item in shown if item.type == "tool.returned")
    runs = (flat[at : at + 180] for at in range(0, len(flat) - 179, 20))
    assert compared.output.quoted_by(quoted) == any(run in output for run in runs)
    assert compared.echo == any(
        bool(flat) and item.text.split() == quoted.split() for item in shown if item.role == "assistant"
    )
