"""The packet as it is defined, item by item and choice by choice, with no index and nothing weighed ahead.

Slow, and kept to be compared with: what an index finds, and what a sum of weights chooses, must be the same to the
byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from protocol.identifiers import parse_ref
from sidecar.core import carried, fitting, packet, protected, room
from sidecar.core.fitting import Bounds, Choice, Contents, Fitted
from sidecar.core.gate import may
from sidecar.core.packet import Built, PacketInputs
from sidecar.core.protected import RestedOn
from sidecar.core.shelf import Piece
from sidecar.core.state import Artifact, Evidence, Lane, Ledger
from sidecar.core.stock import digest_of


def plain_packet(inputs: PacketInputs) -> Built:
    """What ``build_packet`` must give."""
    ledger = inputs.runs[inputs.run]
    view = plain_view(inputs.runs, inputs.run)
    lane = Lane(settings=inputs.settings)
    left: Counter[str] = Counter()
    covered = 0 if inputs.checkpoint is None else inputs.checkpoint.covers_through.position
    unchanging = [
        *carried.abandoned_calls(ledger, covered),
        *carried.steps(view["progress"]),
        *_records(ledger, left),
        *carried.user_messages(ledger, inputs.user_tokens, left),
        *carried.statements(
            inputs.checkpoint, lambda ref: inputs.statements_dead(ref) or _is_dead(ledger, ref), left
        ),
        *carried.recent(inputs.recent),
    ]
    settled = list(_settled(ledger, left))
    cleared = packet._cleared(inputs.cleared, inputs.wire_bytes // packet._CLEARED_SHARE)
    left["cleared"] = len(inputs.cleared) - len(cleared)
    fits = room.fit_of(lane, inputs.runs, inputs.run, view)

    def contents(choice: Choice | None) -> tuple[dict[str, Any], list[Piece]]:
        frame = packet._frame(inputs, view, choice) | {"cleared": cleared}
        paused, postpone = frame["verdict"] == "pause", fits != "fits"
        unsettled = [
            carried.operation_piece(
                item,
                may(lane, inputs.runs, inputs.run, item, paused=paused, postpone=postpone, now=inputs.now),
            )
            for item in ledger.active["operation"].values()
        ]
        return frame, [*unsettled, *settled, *unchanging]

    bounds = Bounds(
        inputs.packet_tokens, inputs.budget.usable, None if fits == "fits" else fits, inputs.wire_bytes
    )
    fitted = _fit(contents, left, bounds)
    return Built(packet._with_digest(fitted.fields), fitted.choice, fitted.tokens, fitted.text_tokens)


# --- what must survive --------------------------------------------------------------------------------------


def plain_view(runs: Mapping[str, Ledger], run: str) -> dict[str, Any]:
    """The protected view with everything an index answers asked of every item."""
    ledger = runs[run]
    rested = plain_rested_on(ledger)
    known = ledger.items
    return protected.protected_view(runs, run) | {
        "artifacts": [
            protected.artifact_fields(item)
            for item in protected.in_artifact_order(known["artifact"][key] for key in rested.artifacts)
        ],
        "evidence": [protected.evidence_fields(known["evidence"][key]) for key in sorted(rested.evidence)],
        "contradictions": _contradictions(ledger),
    }


def plain_rested_on(ledger: Ledger) -> RestedOn:
    artifacts, evidence = set(), set()
    saved: dict[str, list[Artifact]] = {}
    for item in protected.in_artifact_order(ledger.items["artifact"].values()):
        if item.state != "withdrawn":
            for name in {item.artifact_id, item.id, digest_of(item)}:
                saved.setdefault(name, []).append(item)
    for ref, payload_digest in _named(ledger):
        try:
            kind, name, run = parse_ref(ref)
        except ValueError:
            continue
        if run is not None and run != ledger.head.run:
            continue
        if kind == "evidence" and name in ledger.items["evidence"]:
            evidence.add(name)
        elif kind in ("artifact", "sha256") and (
            versions := saved.get(name if kind == "artifact" else f"sha256:{name}")
        ):
            approved = [item for item in versions if digest_of(item) == payload_digest]
            artifacts.add((approved or versions)[-1].id)
    return RestedOn(frozenset(artifacts), frozenset(evidence))


def _named(ledger: Ledger) -> Iterator[tuple[str, str | None]]:
    for approval in ledger.active["approval"].values():
        if approval.payload_ref is not None:
            yield approval.payload_ref, approval.payload_digest
    for operation in ledger.active["operation"].values():
        for ref in (operation.target, operation.receipt):
            if ref is not None:
                yield ref, operation.payload_digest
    for holder in (*ledger.active["decision"].values(), *ledger.progress.completed):
        for ref in holder.refs:
            yield ref, None


def _contradictions(ledger: Ledger) -> list[list[str]]:
    known: dict[str, Evidence] = ledger.items["evidence"]
    pairs: list[list[str]] = []
    for item in sorted(known.values(), key=lambda item: (item.position, item.id)):
        for other in item.contradicts:
            older = known[other].position if other in known else 0
            pair = [f"evidence:{name}" for _, name in sorted([(item.position, item.id), (older, other)])]
            if other != item.id and pair not in pairs:
                pairs.append(pair)
    return pairs


# --- what may be shown --------------------------------------------------------------------------------------


def _settled(ledger: Ledger, left: Counter[str]) -> Iterator[Piece]:
    settled = [item for item in ledger.items["operation"].values() if not item.live]
    for place, item in enumerate(_newest("operations", settled, left)):
        yield Piece(
            slot="operations",
            order=(1, place),
            value=carried._operation(item, "none"),
            rank=_rank(place, carried._SETTLED),
        )


def _records(ledger: Ledger, left: Counter[str]) -> Iterator[Piece]:
    rested = plain_rested_on(ledger)
    children = sorted(ledger.active["child"].values(), key=lambda item: item.status != "running")
    for child in children:
        value = {"run": child.id, "task": child.task, "status": child.status}
        yield Piece(slot="children", order=child.id, value=value, rank=carried._CHILD)
    for age, decision in enumerate(_newest("decisions", list(ledger.active["decision"].values()), left)):
        fields = protected.decision_fields(decision)
        rejected = fields.pop("rejected", None)
        yield Piece(slot="decisions", order=decision.id, value=fields, rank=_rank(age, carried._DECISION))
        if rejected is not None:
            yield Piece(
                slot="rejected",
                order=decision.id,
                value=(decision.id, rejected),
                rank=_rank(age, carried._REJECTED),
            )
    in_order = protected.in_artifact_order(ledger.items["artifact"].values())
    place = {item.id: index for index, item in enumerate(in_order)}
    for key in rested.artifacts:
        value = protected.artifact_fields(ledger.items["artifact"][key])
        yield Piece(slot="artifacts", order=place[key], value=value, required=True)
    others = [item for item in ledger.active["artifact"].values() if item.id not in rested.artifacts]
    for age, item in enumerate(_newest("artifacts", others, left)):
        value = protected.artifact_fields(item)
        yield Piece(slot="artifacts", order=place[item.id], value=value, rank=_rank(age, carried._RECORD))
    for key in rested.evidence:
        value = protected.evidence_fields(ledger.items["evidence"][key])
        yield Piece(slot="evidence", order=key, value=value, required=True)
    told = [item for item in ledger.active["evidence"].values() if item.id not in rested.evidence]
    disputed = {ref for pair in _contradictions(ledger) for ref in pair}
    for age, item in enumerate(_newest("evidence", told, left)):
        rank = carried._DECISION if f"evidence:{item.id}" in disputed else _rank(age, carried._RECORD)
        yield Piece(slot="evidence", order=item.id, value=protected.evidence_fields(item), rank=rank)


def _newest(slot: str, items: list[Any], left: Counter[str]) -> list[Any]:
    left[slot] += max(0, len(items) - carried.CANDIDATES)
    return sorted(items, key=lambda item: (item.position, item.id), reverse=True)[: carried.CANDIDATES]


def _rank(age: int, rank: int) -> int:
    return rank if age < carried.FEW else carried._OLD


def _is_dead(ledger: Ledger, ref: str) -> bool:
    try:
        kind, name, run = parse_ref(ref)
    except ValueError:
        return False
    if kind != "artifact" or (run is not None and run != ledger.head.run):
        return carried.is_dead(ledger, ref)
    versions = [item for item in ledger.items["artifact"].values() if name in (item.artifact_id, item.id)]
    return bool(versions) and all(item.state == "withdrawn" for item in versions)


# --- what of it fits ----------------------------------------------------------------------------------------


def _fit(
    contents: Callable[[Choice | None], tuple[dict[str, Any], list[Piece]]],
    left: Counter[str],
    bounds: Bounds,
) -> Fitted:
    frame, pieces = contents(None)
    optional = sorted((piece for piece in pieces if not piece.required), key=lambda piece: piece.rank)
    without = left + Counter(piece.slot for piece in optional)
    if bounds.least is None:
        fields = fitting._assemble(frame, pieces, left)
        size = fitting._measure(fields)
        if fitting._within(size, bounds):
            return fitting._done(fields, None, size)
        required = [piece for piece in pieces if piece.required]
        fields = fitting._assemble(frame, required, without)
        size = fitting._measure(fields)
        if fitting._within(size, bounds):
            ordered = sorted(
                optional, key=lambda piece: len(fitting.encode(piece.value)) > bounds.packet_tokens
            )
            fits, over = 0, len(ordered)
            while over - fits > 1:
                count = (fits + over) // 2
                missing = Counter(piece.slot for piece in ordered[count:])
                tried = fitting._assemble(frame, required + ordered[:count], left + missing)
                weighed = fitting._measure(tried)
                if fitting._within(weighed, bounds):
                    fits, fields, size = count, tried, weighed
                else:
                    over = count
            return fitting._done(fields, None, size)

    def bare(choice: Choice | None) -> Contents:
        frame, pieces = contents(choice)
        groups = [*carried.in_groups(piece for piece in pieces if not piece.required)]
        return Contents(frame, [piece for piece in pieces if piece.required], groups)

    # From here on nothing optional is looked at: what is left is the same in both ways.
    hopeless = bounds._replace(packet_tokens=-1) if bounds.least is None else bounds
    return fitting.fit(bare, left, hopeless)
