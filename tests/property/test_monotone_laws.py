"""Monotone: nothing unsettled ever leaves the packet without a message that says so.

Message by message and packet by packet, whatever is told by whom, on whatever checkpoint, with little room or
much. That the daemon's own packets are these is the voyages' part (``test_compaction_laws``).
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given

from protocol.events import Settings
from sidecar.core.packet import build_packet
from sidecar.core.state import Lane
from sidecar.transport.pump import Delivery
from support.laws import law
from support.packets import checkpoint, inputs, says
from support.story import AT
from support.tellings import MODEL, Deal, Telling, calm_telling, flavour, telling, words
from support.truth import Truth
from support.voyages import Seen

_ROOM = (8_000, 8_000, 700)
"""Tokens a packet may have; with the least, what is not protected gives way."""


@law()
@given(words(4, 16))
def test_what_is_open_stays_until_a_message_ends_it(drawn: list[int]) -> None:
    deal = Deal(drawn[0])
    room = deal.pick(_ROOM)
    covers = deal.below(len(drawn) + 1)
    types = flavour(deal, 4)
    tale = _Tale()
    for run, type_, fields in (
        ("r", "run.started", {"goal": "mend the pump", "model": MODEL}),
        ("r", "child.spawned", {"child_run": "c", "task": "t"}),
        ("c", "run.started", {"goal": "mend the pump", "model": MODEL}),
    ):
        tale.tell((run, "event", type_, fields))
    assert len(tale.truth.order) == 3
    before: dict[str, Seen] = {}
    for number, word in enumerate(drawn[1:]):
        dealt = Deal(word)
        told = telling(dealt) if dealt.pick((False, False, False, True)) else calm_telling(dealt, types)
        tale.tell(told)
        # What is told to one run may concern those below it.
        for run in sorted(tale.truth.runs) if told[2] in _FOR_ALL else {told[0]} & tale.truth.runs.keys():
            seen = tale.seen(run, room, covered=number >= covers)
            if run in before:
                seen.prove_explained(before[run], tale.truth)
            before[run] = seen
    for run in sorted(tale.truth.runs):
        seen = tale.seen(run, room, covered=True)
        if run in before:
            seen.prove_explained(before[run], tale.truth)


_FOR_ALL = frozenset({"constraint.set", "constraint.lifted", "child.spawned", "run.started"})


class _Tale:
    """A stream that is folded as it is told."""

    def __init__(self) -> None:
        self.truth = Truth(Lane(settings=Settings(approval_kinds=("deploy",))))
        self._count = 0

    def tell(self, told: Telling) -> None:
        run, channel, type_, fields = told
        self._count += 1
        body: dict[str, Any] = {"v": 1, "id": f"e-{self._count}", "type": type_, "at": AT}
        body |= {name.rstrip("_"): value for name, value in fields.items() if value is not None}
        subject = f"wk.v1.in.t.main.{run}.{channel}"
        self.truth.take([Delivery(subject, json.dumps(body).encode(), self._count, 0, None, 0.0)])

    def seen(self, run: str, room: int, *, covered: bool) -> Seen:
        """What a packet of the run holds now, on a checkpoint over all of it or on none."""
        runs = self.truth.runs
        position = runs[run].head.position
        stored = checkpoint(position, observations=(says("o" * 90, "event:e-1"),)) if covered else None
        built = build_packet(inputs(*runs.values(), run=run, checkpoint=stored, packet_tokens=room))
        assert built.choice != "pause"
        return Seen.of(msgspec.to_builtins(built.packet), self.truth)
