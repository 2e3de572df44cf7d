"""Making a resume packet fit: what is left out, what is shortened, and from where on it must be announced.

The measure of a packet is the bytes of its JSON with ``text`` and without ``cleared`` (which is for the
agent's program and never enters a context), divided by four; the measure of what it occupies in a model's
context is the bytes of ``text``, divided by four. Nothing that is protected is ever dropped to fit a
budget; only where even the broker would refuse the message do the longest lists of a *pausing* packet
become counts. It renders and measures and knows no ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from protocol.codec import encode
from sidecar.core.excerpt import told_bytes
from sidecar.core.shelf import Group, Piece, Shelf, Weight, weight_of
from sidecar.core.text import item_lines, render_fields

Choice = Literal["reduced", "postpone", "pause"]

MAX_WIRE_BYTES: Final = 950_000
"""Bound of a packet's JSON: the broker's usual 1 MiB with room for headers."""

MIN_TEXT_TOKENS: Final = 1_024
"""A text up to this size is never too large for its window: no window is so small that it would pay."""

LEFT_OUT: Final[dict[str, tuple[str, str]]] = {
    "abandoned_calls": ("reference", "abandoned calls: ask.search types tool.called"),
    "children": ("reference", "children: ask.search types child.spawned"),
    "decisions": ("reference", "decisions: ask.fetch decision:<id>"),
    "rejected": ("reference", "rejected alternatives: ask.fetch decision:<id>"),
    "completed": ("reference", "older completed steps: ask.search types step.changed"),
    "plan": ("drop", "finished plan items"),
    "artifacts": ("reference", "artifacts: ask.fetch artifact:<id>"),
    "evidence": ("reference", "evidence: ask.fetch evidence:<id>"),
    "user_messages": ("reference", "earlier user messages: ask.search types message"),
    "operations": ("settled", "settled operations: ask.fetch operation:<id>, or authorize by kind and key"),
    "summary.completed": ("summarise", "completed steps of the summary"),
    "summary.observations": ("summarise", "observations of the summary"),
    "summary.inferences": ("summarise", "inferences of the summary"),
    "summary.narrative": ("summarise", "narrative of the summary"),
    "recent": ("reference", "recent items: ask.fetch by ref"),
    "cleared": ("reference", "older cleared results: ask.search types tool.returned"),
    "dead": ("drop", "statements of the summary about what no longer holds"),
    "wire": ("reference", "items beyond the message limit: ask.fetch by ref"),
}
"""Slot → class and way back, as ``omitted`` tells it."""

_REFS: Final = {
    "constraints": ("constraint", "id"),
    "current_request": ("event", "event_id"),
    "user_messages": ("event", "event_id"),
    "questions": ("question", "id"),
    "operations": ("operation", "id"),
    "approvals": ("approval", "id"),
    "decisions": ("decision", "id"),
    "artifacts": ("artifact", "id"),
    "evidence": ("evidence", "id"),
}
_EXACT: Final = frozenset({"id", "event_id", "call_id", "run", "sha256", "payload_digest", "digest"})
"""Bounded by the protocol, and useless when cut."""

_REF_FIELDS: Final = frozenset({"ref", "refs", "payload_ref", "source", "uri"})
_REF_CHARACTERS: Final = 300
"""Longer than any ref; only what claims to be one and is not gets cut."""

_RUNGS: Final[tuple[tuple[int, int | None], ...]] = (
    (1024, None),
    (256, None),
    (128, None),
    (128, 1024),
    (128, 256),
    (64, 64),
)
"""Longest text in characters left standing: of the rest, and of what binds (goal, constraints, approvals,
operations). What binds is shortened last."""

_MARGIN: Final = 64
"""A text is shortened only when that saves more than the marker costs."""

WIDEST_COUNT: Final = 10**9
"""Stands for a number that is not known yet, at its greatest width."""

_COMBINING: Final = frozenset(map(chr, (*range(0x300, 0x370), *range(0xFE00, 0xFE10), 0x200D, 0x20E3)))


class Contents(NamedTuple):
    """All fields of a packet with empty lists, what must stand in these, and what may."""

    frame: dict[str, Any]
    required: list[Piece]
    groups: Sequence[Group]
    """Those of all choices are the same; they are looked at once."""


class Bounds(NamedTuple):
    """``packet_tokens`` bounds the packet while all is well, a quarter of ``usable`` its text in a reduced one
    (0: not known). ``least``: the choice that the protected part leaves at best (None: it fits)."""

    packet_tokens: int
    usable: int
    least: Choice | None = None
    wire_bytes: int = MAX_WIRE_BYTES


class Fitted(NamedTuple):
    fields: dict[str, Any]
    choice: Choice | None
    tokens: int
    text_tokens: int


class _Size(NamedTuple):
    measured: int
    text: int
    wire: int

    @property
    def tokens(self) -> int:
        return -(-self.measured // 4)

    @property
    def text_tokens(self) -> int:
        return -(-self.text // 4)


def fit(contents: Callable[[Choice | None], Contents], left: Counter[str], bounds: Bounds) -> Fitted:
    """The packet's fields within ``bounds``, ``text`` included.

    ``contents`` gives them as they are under a choice; ``left`` counts, by slot, what was left out before.
    In order: everything; fewer of what is not required; shortened texts (``reduced``); and as the ledger
    says, ``postpone`` or ``pause``. What even the broker would refuse is a ``pause`` in any case.
    """
    whole = contents(None)
    without = sum((Counter(group.counts) for group in whole.groups), left)
    if bounds.least is None:
        most = Weight(min(4 * bounds.packet_tokens, bounds.wire_bytes), _text_bound(bounds))
        shelf = Shelf(whole.groups, large=bounds.packet_tokens, most=most)
        if shelf.whole:
            fields = _assemble(whole.frame, [*whole.required, *shelf.pieces], left)
            size = _measure(fields, shelf.ready)
            if _within(size, bounds):
                return _done(fields, None, size)
        fields = _bare(whole, without)
        size = _measure(fields)
        if _within(size, bounds):
            return _with_optional(whole, shelf, left, bounds, fields, size)
        reduced = _bare(contents("reduced"), without)
        for rest, firm in _RUNGS:
            fields = _shortened(reduced, rest, firm)
            size = _measure(fields)
            if size.wire <= bounds.wire_bytes and (
                (rest, firm) == _RUNGS[-1] or size.text <= _text_bound(bounds)
            ):
                return _done(fields, "reduced", size)
    elif bounds.least == "postpone":
        fields = shortest(_bare(contents("postpone"), without))
        size = _measure(fields)
        if size.wire <= bounds.wire_bytes:
            return _done(fields, "postpone", size)
    return _pausing(shortest(_bare(contents("pause"), without)), bounds)


def shortest(fields: dict[str, Any]) -> dict[str, Any]:
    """A copy with every text as short as a packet ever gives it."""
    return _shortened(fields, *_RUNGS[-1])


def shorten(text: str, limit: int, ref: str | None) -> str:
    """At most ``limit`` characters of ``text`` and a marker with its length in bytes and where the whole is.

    Cut between characters, never before a combining one; returned whole when that would save nothing.
    """
    if len(text) <= limit + _MARGIN:
        return text
    cut = limit
    while cut and (text[cut] in _COMBINING or text[cut - 1] == "\u200d"):
        cut -= 1
    where = f"ref {ref}" if ref is not None else "whole by ask.search"
    return f"{text[:cut]}… [{told_bytes(text)} bytes, {where}]"


def _with_optional(
    contents: Contents, shelf: Shelf, left: Counter[str], bounds: Bounds, fields: dict[str, Any], bare: _Size
) -> Fitted:
    """The longest beginning of the optional pieces that fits; ``fields`` has none of them and does fit."""
    required = Counter(piece.slot for piece in contents.required)
    told = _of_omitted(left + shelf.left(0))
    frame = _Size(bare.measured - told.measured, bare.text - told.text, bare.wire - told.measured)
    room = Weight(4 * bounds.packet_tokens - frame.measured, _text_bound(bounds) - frame.text)
    fits, over, step = 0, shelf.beyond(room), 1
    while over - fits > 1:
        # What commas and counts add is little: the answer lies near the upper end.
        count = max((fits + over) // 2, over - step)
        added = shelf.weight(count, required)
        if added is not None and _within(
            _plus(_plus(frame, added), _of_omitted(left + shelf.left(count))), bounds
        ):
            fits = count
        else:
            over, step = count, 2 * step
    if not fits:
        return _done(fields, None, bare)
    chosen = [*contents.required, *shelf.pieces[:fits]]
    fields = _assemble(contents.frame, chosen, left + shelf.left(fits))
    return _done(fields, None, _measure(fields, shelf.ready))


def _plus(size: _Size, added: Weight) -> _Size:
    return _Size(size.measured + added.measured, size.text + added.text, size.wire + added.measured)


def _of_omitted(left: Counter[str]) -> Weight:
    """What the list of what was left out weighs, its lines too."""
    measured, text = len("[]") - 1, 0
    for slot, count in left.items():
        if count > 0:
            digits, one = len(str(count)), _OMITTED_WEIGHTS[slot]
            # Once in the list, once in the line, which stands in the JSON too; a comma or the first's want of one.
            measured += one.measured + 2 * digits + 1
            text += one.text + digits
    return Weight(max(measured, len("[]")), text)


def _within(size: _Size, bounds: Bounds) -> bool:
    return (
        size.tokens <= bounds.packet_tokens
        and size.text <= _text_bound(bounds)
        and size.wire <= bounds.wire_bytes
    )


def _text_bound(bounds: Bounds) -> int:
    """Bytes that the text may have of a window."""
    return 4 * (max(bounds.usable // 4, MIN_TEXT_TOKENS) if bounds.usable > 0 else WIDEST_COUNT)


def _done(fields: dict[str, Any], choice: Choice | None, size: _Size) -> Fitted:
    fields["budget"] = fields["budget"] | {"packet_tokens": size.tokens}
    return Fitted(fields, choice, size.tokens, size.text_tokens)


def _measure(fields: dict[str, Any], ready: Mapping[int, str] | None = None) -> _Size:
    """Renders ``text`` into the fields, from lines that are ready where they are, and weighs them."""
    fields["text"] = render_fields(fields, ready)
    wire = len(encode(fields))
    return _Size(wire - len(encode(fields["cleared"])), len(fields["text"].encode("utf-8", "replace")), wire)


def _assemble(frame: dict[str, Any], pieces: Iterable[Piece], left: Counter[str]) -> dict[str, Any]:
    """The frame with its lists filled and ``omitted`` counted."""
    slots: dict[str, list[Piece]] = {}
    for piece in pieces:
        slots.setdefault(piece.slot, []).append(piece)
    values = {
        slot: [piece.value for piece in sorted(found, key=lambda piece: piece.order)]
        for slot, found in slots.items()
    }
    fields = dict(frame)
    fields["task"] = frame["task"] | {"user_messages": values.get("user_messages", [])}
    fields["progress"] = frame["progress"] | {name: values.get(name, []) for name in ("completed", "plan")}
    for name in ("operations", "artifacts", "evidence", "children", "recent", "abandoned_calls"):
        fields[name] = values.get(name, [])
    rejected = dict(values.get("rejected", []))
    fields["decisions"] = [
        item | {"rejected": rejected[item["id"]]} if item["id"] in rejected else item
        for item in values.get("decisions", [])
    ]
    fields["summary"] = {
        name: values.get(f"summary.{name}", []) for name in ("completed", "observations", "inferences")
    } | {"narrative": "".join(values.get("summary.narrative", []))}
    fields["omitted"] = _omitted(left)
    return fields


def _bare(contents: Contents, left: Counter[str]) -> dict[str, Any]:
    return _assemble(contents.frame, contents.required, left)


def _omitted(left: Counter[str]) -> list[dict[str, Any]]:
    return [
        {"class": kind, "count": left[slot], "how": how}
        for slot, (kind, how) in LEFT_OUT.items()
        if left[slot] > 0
    ]


def _shortened(fields: dict[str, Any], rest: int, firm: int | None) -> dict[str, Any]:
    """A copy whose long texts are cut to ``rest`` characters, those of what binds to ``firm``."""
    short = dict(fields)
    task = fields["task"]
    short["task"] = {
        "goal": _cut(task["goal"], firm, None),
        "done_when": _cut(task["done_when"], firm, None),
        "scope": _cut(task["scope"], firm, None),
        "constraints": _cut_items("constraints", task["constraints"], firm),
        "current_request": _cut_items("current_request", task["current_request"], rest),
        "user_messages": _cut_items("user_messages", task["user_messages"], rest),
    }
    for name in ("inputs", "policy", "parent", "allowed_tools", "required_artifacts", "granted_refs"):
        if name in fields:
            short[name] = _cut(fields[name], firm, None)
    for name in ("operations", "approvals"):
        short[name] = _cut_items(name, fields[name], firm)
    for name in ("questions", "decisions", "artifacts", "evidence"):
        short[name] = _cut_items(name, fields[name], rest)
    for name in (
        "blockers",
        "progress",
        "children",
        "open_calls",
        "abandoned_calls",
        "contradictions",
        "cleared",
    ):
        short[name] = _cut(fields[name], rest, None)
    return short


def _cut_items(slot: str, items: list[dict[str, Any]], limit: int | None) -> list[dict[str, Any]]:
    kind, key = _REFS[slot]
    return [_cut(item, limit, f"{kind}:{item[key]}") for item in items]


def _cut(value: Any, limit: int | None, ref: str | None) -> Any:
    """Every long string of the value shortened; ids and digests stay."""
    if limit is None:
        return value
    if isinstance(value, str):
        return shorten(value, limit, ref)
    if isinstance(value, list):
        return [_cut(item, limit, ref) for item in value]
    if isinstance(value, dict):
        return {
            name: item
            if name in _EXACT
            else _cut(item, max(limit, _REF_CHARACTERS) if name in _REF_FIELDS else limit, ref)
            for name, item in value.items()
        }
    return value


def _pausing(fields: dict[str, Any], bounds: Bounds) -> Fitted:
    """A packet that says stop. Beyond the wire's limit its longest lists are halved until it can be sent."""
    size = _measure(fields)
    beyond = 0
    while size.wire > bounds.wire_bytes:
        holder, name = max(_lists(fields), key=lambda place: len(encode(place[0][place[1]])))
        whole = holder[name]
        holder[name] = whole[: len(whole) // 2]
        beyond += len(whole) - len(holder[name])
        kind, how = LEFT_OUT["wire"]
        fields["omitted"] = [item for item in fields["omitted"] if item["how"] != how]
        fields["omitted"].append({"class": kind, "count": beyond, "how": how})
        size = _measure(fields)
    return _done(fields, "pause", size)


def _lists(fields: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Every non-empty list of the packet, by its holder; holders are copies of this packet's own."""
    task, progress = fields["task"], fields["progress"]
    holders = [fields, task, task["scope"] or {}, progress, progress["focus"]]
    return [
        (holder, name)
        for holder in holders
        for name, value in holder.items()
        if isinstance(value, list) and value and name != "omitted"
    ]


def _weight_omitted(kind: str, how: str) -> Weight:
    """What an entry weighs without the digits of its number."""
    entry = {"class": kind, "count": 0, "how": how}
    line = weight_of(item_lines("omitted", entry))
    return Weight(len(encode(entry)) + line.measured - 2, line.text - 1)


_OMITTED_WEIGHTS: Final = {slot: _weight_omitted(*said) for slot, said in LEFT_OUT.items()}
