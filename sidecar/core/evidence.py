"""From refs to what they name: in whose run, under which id or position, and what the ledger holds of it.

Pure. Whether the asker may see a thing is settled first and without looking for it. What lies in the journal
or among checkpoints is only named here; reading it is the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from protocol.codec import encode
from protocol.events import (
    EVENT_TYPES,
    OfApproval,
    OfArtifact,
    OfConstraint,
    OfDecision,
    OfEvidence,
    OfOperation,
    OfQuestion,
)
from protocol.identifiers import Ref, parse_ref
from sidecar.core import family, scope
from sidecar.core.state import Ledger
from sidecar.core.stock import digest_of

_ITEM_CLASSES = (OfApproval, OfArtifact, OfConstraint, OfDecision, OfEvidence, OfOperation, OfQuestion)
ITEM_EVENTS: Final[tuple[str, ...]] = tuple(
    sorted(name for name, cls in EVENT_TYPES.items() if issubclass(cls, _ITEM_CLASSES))
)
"""Types of events that speak of one item, whose id may be the event's own."""

_ITEMS: Final = frozenset(
    {"artifact", "evidence", "decision", "operation", "approval", "question", "constraint"}
)
_INTERNAL: Final = frozenset(
    {"announced", "called", "dispatched", "late", "dispatched_at", "granted_at", "request_id"}
)
"""Fields of ledger items that serve the fold alone."""


class Wanted(Struct, frozen=True, kw_only=True):
    """One thing asked for. ``place`` says where it is looked for:

    ``none``: ``status`` is the answer; ``position``: the message at ``position``; ``event``: the last message
    of the event channel with the id ``name`` (in ``run``, else in ``instead``); ``checkpoint``: the one with
    the id ``name``; ``sha256``: the message whose bytes have this digest; ``record``: only the ledger's view.
    """

    ref: str
    run: str
    place: Literal["none", "position", "event", "checkpoint", "sha256", "record"]
    status: Literal["not_found", "out_of_scope", "gone"] = "not_found"
    name: str = ""
    position: int = 0
    record: bytes | None = None
    item: str = ""
    """Id of the item that the message must be about to be shown; empty: any message may be."""
    instead: str | None = None


def wanted(
    runs: Mapping[str, Ledger], asker: str, refs: Sequence[str], of_run: str | None = None
) -> list[Wanted]:
    """What each ref names. Raises ValueError for what is no ref; KeyError when ``asker`` is not in ``runs``."""
    return [_one(runs, asker, text, parse_ref(text), of_run) for text in refs]


def readable(runs: Mapping[str, Ledger], asker: str, target: str) -> list[Wanted]:
    """Everything ``asker`` may read of another run."""
    return [
        _in_run(runs, asker, target, str(ref), ref, foreign=True)
        for ref in scope.readable(runs, asker, target)
    ]


def forgotten(
    asker: str, refs: Sequence[str], newest: int, of_run: str | None = None, *, heads: bool = True
) -> list[Wanted]:
    """What each ref of a forgotten run names: no ledger is left, ``heads`` of its messages are (or not even
    these: another owner forgot it). Raises ValueError for what is no ref."""
    missing: Literal["not_found", "gone"] = "not_found" if heads else "gone"
    found = []
    for text in refs:
        ref = parse_ref(text)
        target = ref.run or of_run or asker
        if target != asker:
            found.append(Wanted(ref=text, run=target, place="none", status="out_of_scope"))
        elif ref.kind == "event":
            found.append(Wanted(ref=text, run=asker, place="event", name=ref.value, status=missing))
        elif ref.kind == "pos" and ref.position <= newest:
            found.append(Wanted(ref=text, run=asker, place="position", position=ref.position))
        else:
            found.append(
                Wanted(ref=text, run=asker, place="none", status="not_found" if ref.kind == "pos" else "gone")
            )
    return found


def identities(event_id: str, first: int = 1, count: int = 1) -> list[str]:
    """Names under which the journal may hold messages with this id: the ``first`` and following ones of each
    kind."""
    if first == 1:
        found = [event_id, *(f"{event_id}#{name}" for name in ITEM_EVENTS)]
        return found + (identities(event_id, 2, count - 1) if count > 1 else [])
    return [f"{event_id}#{name}#{turn}" for name in ITEM_EVENTS for turn in range(first, first + count)]


def _one(runs: Mapping[str, Ledger], asker: str, text: str, ref: Ref, of_run: str | None) -> Wanted:
    target = ref.run or of_run or asker
    if target != asker:
        if not scope.may_read(runs, asker, target, ref):
            return Wanted(ref=text, run=target, place="none", status="out_of_scope")
        return _in_run(runs, asker, target, text, ref, foreign=True)
    found = _in_run(runs, asker, asker, text, ref, foreign=False)
    parent = scope.granted_here(runs, asker, ref)
    if parent is None:
        return found
    if found.place == "event":
        return msgspec.structs.replace(found, instead=parent)
    return found if found.place != "none" else _in_run(runs, asker, parent, text, ref, foreign=True)


def _in_run(
    runs: Mapping[str, Ledger], asker: str, target: str, text: str, ref: Ref, *, foreign: bool
) -> Wanted:
    nothing = Wanted(ref=text, run=target, place="none")
    ledger = runs.get(target)
    if ledger is None:
        return nothing
    if ref.kind == "event":
        return Wanted(ref=text, run=target, place="event", name=ref.value)
    if ref.kind == "checkpoint":
        return Wanted(ref=text, run=target, place="checkpoint", name=ref.value)
    if ref.kind == "pos":
        if ref.position > ledger.head.position:
            return nothing
        return Wanted(ref=text, run=target, place="position", position=ref.position)
    if ref.kind == "sha256":
        artifact = next(
            (
                item
                for item in ledger.items["artifact"].values()
                if digest_of(item) == f"sha256:{ref.value}" and item.state != "withdrawn"
            ),
            None,
        )
        if artifact is None:
            return Wanted(ref=text, run=target, place="sha256", name=ref.value)
        return _item(text, target, artifact, artifact.artifact_id, foreign=foreign)
    item = _find(ledger, ref)
    if item is not None:
        return _item(text, target, item, getattr(item, "artifact_id", item.id), foreign=foreign)
    if ref.kind == "constraint" and not foreign:
        for inherited in family.constraints(runs, asker):
            if inherited.id == ref.value:
                # It binds this run too; the message that set it is its ancestor's own.
                return Wanted(ref=text, run=target, place="record", record=record(inherited))
    return nothing


def _find(ledger: Ledger, ref: Ref) -> Any:
    if ref.kind not in _ITEMS:
        return None
    if ref.kind == "artifact":
        current = ledger.index.current.get(ref.value)
        if current is not None:
            return ledger.items["artifact"].get(current[1])
    return ledger.get(ref.kind, ref.value)


def _item(text: str, target: str, item: Any, name: str, *, foreign: bool) -> Wanted:
    if item.position < 1:
        return Wanted(ref=text, run=target, place="record", record=record(item))
    return Wanted(
        ref=text,
        run=target,
        place="position",
        position=item.position,
        record=record(item),
        item=name if foreign else "",
    )


def record(item: Any) -> bytes:
    """The ledger's view of an item as JSON, without what only the fold uses."""
    fields = msgspec.to_builtins(item)
    if fields.get("rejected"):
        # As the wire names them, not as the fold keeps them.
        fields["rejected"] = [{"alternative": other, "reason": why} for other, why in fields["rejected"]]
    return encode(
        {name: value for name, value in fields.items() if value is not None and name not in _INTERNAL}
    )
