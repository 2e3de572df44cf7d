"""Short ways taken for nearly every event, held against the long ways they stand for."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from protocol.events import EVENT_TYPES
from sidecar.core import excerpt
from sidecar.core.budget import BudgetSettings, level_of
from sidecar.core.window import gauge, usable

_SHARES = st.floats(0.01, 0.99)


@given(st.integers(0, 2**53 - 1), st.none() | st.integers(1, 2**40), _SHARES, _SHARES, st.data())
def test_a_run_is_quiet_exactly_as_long_as_its_level_stays_ok(
    window: int, output: int | None, checkpoint: float, compact: float, data: Any
) -> None:
    settings = BudgetSettings(checkpoint_at=checkpoint, compact_at=compact)
    room, quiet = gauge(window, output, settings)
    assert room == usable(window, output, settings)
    near = st.integers(-3, 3).map(lambda step: min(max(0, quiet + step), 2**53 - 1))
    used = data.draw(near | st.integers(0, 2**53 - 1))
    assert (used < quiet) == (level_of(used, room, "ok", settings) == "ok")


_LETTERS = st.sampled_from(
    ["a", "word ", "Done. ", "! ", "\n", "\r\n", "\t", " ", "…", "é", "\u200b", "\u2028", "x" * 90, "v1.2 "]
)


@given(st.lists(_LETTERS, max_size=120).map("".join), st.integers(5, 160))
@example("word " * 200 + "end.", 160)
@example("x" * 330 + " y" * 300, 160)
def test_a_first_sentence_is_that_of_the_whole_line(text: str, limit: int) -> None:
    wanted = ""
    for line in excerpt.substance(text).splitlines():
        if cleaned := excerpt.plain(line[:2_000]):
            ends = [at + 1 for at, letter in enumerate(cleaned) if letter in ".!?…"]
            ends = [end for end in ends if end == len(cleaned) or cleaned[end] in " \"')]"]
            wanted = excerpt.clip(cleaned[: ends[0]] if ends else cleaned, limit)
            break
    assert excerpt.first_sentence(text, limit) == wanted


def test_no_event_type_has_another_below_it() -> None:
    # Types are compared where ``isinstance`` would take too long.
    assert not [cls for cls in EVENT_TYPES.values() if cls.__subclasses__()]
