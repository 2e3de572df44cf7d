"""The resume packet: what stands in it, from the family's ledgers, the checkpoint and the tail.

Pure: moment, ids, budget figures and recent lines are given. The protected part comes from the ledgers
alone; a summary adds only what is shown as its own, and nothing it says changes a field of the ledger's.
What must be left out or shortened so that it fits is ``fitting``'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from protocol.codec import digest, encode
from protocol.events import Settings
from protocol.handoff import DIGEST_EXCLUDES, ClearedResult, Level, Packet, PacketReason, Recent, Tail
from protocol.state import StateCheckpoint
from sidecar.core import room
from sidecar.core import verdict as verdicts
from sidecar.core.carried import (
    abandoned_calls,
    in_groups,
    is_dead,
    operation_piece,
    recent,
    records,
    rested,
    settled_operations,
    statements,
    steps,
    user_messages,
)
from sidecar.core.fitting import MAX_WIRE_BYTES, WIDEST_COUNT, Bounds, Choice, Contents, fit, shorten
from sidecar.core.gate import may
from sidecar.core.protected import decision_fields, protected_digest, protected_view, rested_on
from sidecar.core.state import Lane, Ledger

CLEARED_SHOWN: Final = 1_000
"""Newest cleared results listed; older ones stay whole in the agent's history."""

_CLEARED_NOTE: Final = 300
"""Characters of a cleared result's note."""

_CLEARED_SHARE: Final = 8
"""Cleared results may take this part of the message."""

_DIGEST_WIDTH: Final = len("sha256:") + 64
"""Measured before it is known."""


class BudgetFigures(NamedTuple):
    """Tokens of the window, as the budget has them."""

    window: int
    usable: int
    used_before: int
    used_after: int
    level: Level


class PacketInputs(Struct, kw_only=True):
    """Everything a packet is made of. ``packet_tokens`` and ``user_tokens`` are bounds in tokens."""

    tenant: str
    lane: str
    run: str
    epoch: int
    at: str
    """RFC 3339, UTC."""
    packet_id: str
    reason: PacketReason
    runs: Mapping[str, Ledger]
    """The run's family."""
    settings: Settings
    checkpoint: StateCheckpoint | None
    tail: Tail
    cleared: list[ClearedResult]
    """Oldest first."""
    budget: BudgetFigures
    packet_tokens: int
    user_tokens: int
    recent: list[Recent] = []
    """Oldest first."""
    missing_artifacts: tuple[str, ...] = ()
    """Ids of artifacts the covered range names and nobody saved."""
    stops: tuple[verdicts.Stop, ...] = ()
    """Reasons to pause that the ledger does not know."""
    statements_dead: Callable[[str], bool] = lambda _ref: False
    """Whether a ref was superseded, withdrawn or forgotten, beyond what the run's ledger knows."""
    wire_bytes: int = MAX_WIRE_BYTES
    now: datetime | None = None
    """With its offset; takes from ``may`` what an approval permits no longer, and nothing else."""


class Built(NamedTuple):
    """A packet, the choice that had to be made to fit (to be announced), and its size.

    ``tokens`` is measured as ``fitting`` says, ``text_tokens`` what the text takes of a context.
    """

    packet: Packet
    choice: Choice | None
    tokens: int
    text_tokens: int


def build_packet(inputs: PacketInputs) -> Built:
    """The packet of ``inputs.run``. Same inputs, same packet; raises KeyError for a run not in ``runs``."""
    view = protected_view(inputs.runs, inputs.run)
    ledger = inputs.runs[inputs.run]
    lane = Lane(settings=inputs.settings)
    left: Counter[str] = Counter()
    covered = 0 if inputs.checkpoint is None else inputs.checkpoint.covers_through.position
    rests_on = rested_on(ledger)
    work = list(steps(view["progress"]))
    kept = [piece for piece in work if piece.required] + list(rested(ledger, rests_on))
    groups = [
        *settled_operations(ledger, left),
        *in_groups(abandoned_calls(ledger, covered)),
        *in_groups(piece for piece in work if not piece.required),
        *records(ledger, rests_on, left),
        *in_groups(user_messages(ledger, inputs.user_tokens, left)),
        *in_groups(
            statements(
                inputs.checkpoint, lambda ref: inputs.statements_dead(ref) or is_dead(ledger, ref), left
            )
        ),
        *in_groups(recent(inputs.recent)),
    ]
    cleared = _cleared(inputs.cleared, inputs.wire_bytes // _CLEARED_SHARE)
    left["cleared"] = len(inputs.cleared) - len(cleared)
    fits = room.fit_of(lane, inputs.runs, inputs.run, view)

    def contents(choice: Choice | None) -> Contents:
        frame = _frame(inputs, view, choice) | {"cleared": cleared}
        paused = frame["verdict"] == "pause"
        unsettled = [
            operation_piece(
                operation,
                may(
                    lane,
                    inputs.runs,
                    inputs.run,
                    operation,
                    paused=paused,
                    postpone=fits != "fits",
                    now=inputs.now,
                ),
            )
            for operation in ledger.active["operation"].values()
        ]
        return Contents(frame, [*unsettled, *kept], groups)

    bounds = Bounds(
        inputs.packet_tokens, inputs.budget.usable, None if fits == "fits" else fits, inputs.wire_bytes
    )
    fitted = fit(contents, left, bounds)
    return Built(_with_digest(fitted.fields), fitted.choice, fitted.tokens, fitted.text_tokens)


def protected_names(runs: Mapping[str, Ledger], run: str) -> dict[str, Any]:
    """The protected view under the packet's names, for a summariser's request. Texts are whole."""
    view = protected_view(runs, run)
    ledger = runs[run]
    return {
        "task": view["task"] | {"user_messages": []},
        "questions": view["questions"],
        "operations": view["operations"],
        "approvals": view["approvals"],
        "progress": view["progress"],
        "contradictions": view["contradictions"],
        "decisions": [
            decision_fields(item)
            for item in sorted(ledger.active["decision"].values(), key=lambda item: item.id)
        ],
        "evidence": view["evidence"],
        "artifacts": view["artifacts"],
    }


def _frame(inputs: PacketInputs, view: dict[str, Any], choice: Choice | None) -> dict[str, Any]:
    """Every field in the wire's order, lists that ``fitting`` fills still empty."""
    ledger = inputs.runs[inputs.run]
    head = ledger.head
    stops = list(inputs.stops)
    if choice == "postpone":
        stops.append(verdicts.POSTPONED)
    elif choice == "pause":
        stops.append(verdicts.PROTECTED_TOO_LARGE)
    causes = verdicts.blockers(
        Lane(settings=inputs.settings),
        inputs.runs,
        inputs.run,
        stops=stops,
        missing_artifacts=inputs.missing_artifacts,
        brief=choice is not None,
    )
    fields: dict[str, Any] = {
        "v": 1,
        "type": "resume.packet",
        "tenant": inputs.tenant,
        "lane": inputs.lane,
        "run": inputs.run,
        "at": inputs.at,
        "epoch": inputs.epoch,
        "must_understand": [],
        "packet_id": inputs.packet_id,
        "reason": inputs.reason,
        "checkpoint": _checkpoint(inputs.checkpoint),
        "ledger_version": head.version,
        "protected_digest": protected_digest(view),
        "tail": msgspec.to_builtins(inputs.tail),
        "cleared": [],
        "verdict": verdicts.verdict(causes),
        "blockers": msgspec.to_builtins(causes),
        "authority": "required" if inputs.settings.authority_required else "agent",
        "contract": _contract(inputs, view),
        "task": view["task"] | {"user_messages": []},
        "inputs": view["inputs"],
        "policy": view["policy"],
        "progress": view["progress"],
        "operations": [],
        "approvals": view["approvals"],
        "decisions": [],
        "questions": view["questions"],
        "artifacts": [],
        "evidence": [],
        "contradictions": view["contradictions"],
        "children": [],
        "parent": view["parent"],
    }
    fields |= {name: view[name] for name in ("allowed_tools", "required_artifacts") if name in view}
    calls = sorted(ledger.active["call"].values(), key=lambda item: (item.position, item.id))
    return fields | {
        "abandoned_calls": [],
        "open_calls": [
            {"call_id": call.call_id, "tool": call.tool} for call in calls if call.state == "open"
        ],
        "summary": {},
        "recent": [],
        "omitted": [],
        "violations": [
            {"code": code, "count": count} for code, count in sorted(head.violations.items()) if count
        ],
        "budget": inputs.budget._asdict() | {"packet_tokens": WIDEST_COUNT},
        "digest": _DIGEST_WIDTH * "0",
        "text": "",
    }


def _cleared(results: list[ClearedResult], room_bytes: int) -> list[dict[str, Any]]:
    """The newest that fit, oldest first."""
    plain: list[dict[str, Any]] = msgspec.to_builtins(results[-CLEARED_SHOWN:])
    shown: list[dict[str, Any]] = []
    for item in reversed(plain):
        short = item | {"note": shorten(item["note"], _CLEARED_NOTE, item["ref"])}
        room_bytes -= len(encode(short)) + 1
        if room_bytes < 0:
            break
        shown.append(short)
    return shown[::-1]


def _checkpoint(checkpoint: StateCheckpoint | None) -> dict[str, Any] | None:
    if checkpoint is None:
        return None
    plain: dict[str, Any] = msgspec.to_builtins(checkpoint)
    return {name: value for name, value in plain.items() if name not in ("summary", "parent_checkpoint_id")}


def _contract(inputs: PacketInputs, view: dict[str, Any]) -> str:
    head = inputs.runs[inputs.run].head
    if not head.started:
        return "missing"
    return "declared" if head.constraint_seen or view["task"]["constraints"] else "inferred"


def _with_digest(fields: dict[str, Any]) -> Packet:
    packet = msgspec.convert(fields, Packet)
    plain = msgspec.to_builtins(packet)
    covered = {name: value for name, value in plain.items() if name not in DIGEST_EXCLUDES}
    return msgspec.structs.replace(packet, digest=digest(covered))
