"""The canonical form is RFC 8785's to the byte, whichever way it is made."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import rfc8785
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.codec import canonical
from support.laws import law

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
_INTEGERS = st.one_of(st.integers(-3, 3), st.integers(-(2**53) + 1, 2**53 - 1))
_NUMBERS = st.one_of(_INTEGERS, st.floats(allow_nan=False, allow_infinity=False))
_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_TEXT, inner, max_size=4)),
    max_leaves=12,
)
_CORNERS: tuple[Any, ...] = (
    {"\U0001f600": 1, "\ufb33": 2, "a": "\U0001f600"},
    {"n": 2**53 - 1, "s": ",1234567890123456"},
    [9007199254740991, -9007199254740991, 1e21, 1e-7, -0.0, 5e-324],
    {"".join(map(chr, range(0x20))): '\x7f\x80\u2028\u2029\ufeff/\\"'},
    [{}, [], "", {"": ""}],
    1234567890123456,
)


@law(10)
@given(_VALUES)
@example(_CORNERS[0])
@example(_CORNERS[1])
@example(_CORNERS[2])
@example(_CORNERS[3])
@example(_CORNERS[4])
@example(_CORNERS[5])
def test_any_value_has_the_one_form(value: Any) -> None:
    assert canonical(value) == rfc8785.dumps(value)


@law(10)
@given(_VALUES, st.booleans(), st.sampled_from((None, 1, "\t")))
@example(_CORNERS[0], True, 1)
@example({"a": {"b": 2**53 - 1}}, True, 1)
def test_so_has_json_as_it_came(value: Any, ascii_only: bool, indent: int | str | None) -> None:
    told = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert canonical({"x": msgspec.Raw(told.encode())}) == rfc8785.dumps({"x": json.loads(told)})
