"""Whether what is protected fits the model's window: a function of the family's ledgers and the settings alone.

It does not matter whether, when or on what checkpoint a packet is built: the measure is the text of the barest
packet there can be, every long text of it by reference, in the window the run declared. Packet, notice and
``authorize`` all go by it. It decides nothing else and reads no clock, budget or summary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from protocol.events import Settings
from protocol.handoff import May
from sidecar.core import verdict, window
from sidecar.core.carried import operation_piece, steps
from sidecar.core.fitting import LEFT_OUT, MIN_TEXT_TOKENS, WIDEST_COUNT, shortest
from sidecar.core.protected import protected_view
from sidecar.core.state import Head, Lane, Ledger
from sidecar.core.text import VERDICTS, render_fields

Fit = Literal["fits", "postpone", "pause"]

MAX_TEXT_BYTES: Final = 360_000
"""No packet with a longer text is sure to be carried by the broker's usual message, however large the window."""

_WIDEST_VERDICT: Final = max(VERDICTS, key=lambda name: len(name) + len(VERDICTS[name]))
_WIDEST_MAY: Final[dict[str, May]] = {"not_started": "dispatch", "pending": "wait", "unknown": "reconcile"}
_SETTINGS: Final = window.BudgetSettings()
"""The documented reserve, not the configured one: the ledger does not know it."""


def fit_of(lane: Lane, runs: Mapping[str, Ledger], run: str, view: Mapping[str, Any] | None = None) -> Fit:
    """``fits``: at most a quarter of the usable window is needed; ``postpone``: a half; ``pause``: more.

    A window that was not declared bounds nothing. Raises KeyError when ``run`` is not in ``runs``. Cost: the
    protected items, or fewer where their mere number decides. ``view``: the run's protected view, if it is at hand.
    """
    usable = usable_of(runs[run])
    if usable <= 0:
        return "fits"
    quarter, half = (min(max(share, _SMALL_BYTES), MAX_TEXT_BYTES) for share in (usable // 4 * 4, usable * 2))
    if _least(runs, run) > half:
        return "pause"
    needed = text_bytes(lane, runs, run, view) + FRAME_BYTES
    if needed <= quarter:
        return "fits"
    return "postpone" if needed <= half else "pause"


def usable_of(ledger: Ledger) -> int:
    """Usable tokens of the declared window; 0 where none was declared."""
    model = ledger.head.model
    return 0 if model is None else window.usable(model.context_window, model.max_output_tokens, _SETTINGS)


def text_bytes(
    lane: Lane, runs: Mapping[str, Ledger], run: str, view: Mapping[str, Any] | None = None
) -> int:
    """Bytes of the barest packet's text without ``FRAME_BYTES``; no packet that leaves out and shortens all it
    may is longer than both together."""
    return _size(_bare(lane, runs, run, protected_view(runs, run) if view is None else view))


def _bare(lane: Lane, runs: Mapping[str, Ledger], run: str, view: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that ``text`` is rendered from, every word that may vary at its longest."""
    ledger = runs[run]
    kept: dict[str, list[Any]] = {"completed": [], "plan": []}
    for piece in steps(view["progress"]):
        if piece.required:
            kept[piece.slot].append(piece.value)
    fields = dict(view) | {
        "verdict": _WIDEST_VERDICT,
        "blockers": msgspec.to_builtins(verdict.blockers(lane, runs, run)),
        "contract": "inferred",
        "authority": "required" if lane.settings.authority_required else "agent",
        "task": view["task"] | {"user_messages": []},
        "progress": view["progress"] | kept,
        "operations": [
            operation_piece(item, _WIDEST_MAY[item.state]).value
            for item in ledger.active["operation"].values()
        ],
        "open_calls": [
            {"call_id": call.call_id, "tool": call.tool}
            for call in ledger.active["call"].values()
            if call.state == "open"
        ],
    }
    return shortest(_NOTHING | fields)


def _least(runs: Mapping[str, Ledger], run: str) -> int:
    """Fewer bytes than the protected part takes, told from the number of its items."""
    active = runs[run].active
    return sum(least * len(active[kind]) for kind, least in _LEAST.items())


_LEAST: Final = {"constraint": 40, "operation": 90, "approval": 40, "question": 18, "request": 10}
"""Bytes of our own words in the shortest line of an item."""


def _size(fields: Mapping[str, Any]) -> int:
    return len(render_fields(fields).encode("utf-8", "replace"))


def _frame_bytes() -> int:
    """What a text may hold that no ledger knows of: a reason of ours, what was never saved, what is left out."""
    stop = max(verdict.POSTPONED, verdict.PROTECTED_TOO_LARGE, key=lambda stop: len("".join(stop)))
    runs = {"": Ledger(Head(run=""))}
    empty = _bare(Lane(settings=Settings()), runs, "", protected_view(runs, ""))
    causes = [*empty["blockers"], stop._asdict() | {"ref": None}, *map(msgspec.to_builtins, (_NEVER_SAVED,))]
    omitted = [{"class": kind, "count": WIDEST_COUNT, "how": how} for kind, how in LEFT_OUT.values()]
    return _size(empty | {"blockers": causes, "omitted": omitted}) - _size(empty)


_NOTHING: Final[dict[str, Any]] = {
    name: [] for name in ("abandoned_calls", "children", "cleared", "decisions", "recent", "omitted")
} | {"summary": None}
_NEVER_SAVED: Final = verdict.never_saved(WIDEST_COUNT)
FRAME_BYTES: Final = _frame_bytes()
_SMALL_BYTES: Final = 4 * MIN_TEXT_TOKENS + FRAME_BYTES
"""Up to this no text is too large for its window."""
