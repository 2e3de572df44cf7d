"""What must survive fits or does not: a matter of the stream, however and however often the daemon is asked."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from protocol.asks import AskAuthorize
from sidecar.core import gate, room
from support import one_thread
from support.harness import Harness, Life, workplace
from support.laws import law
from support.voyages import BATCH, METRICS, QUICK, Voyage, pieces

_SIZES = st.sampled_from([0, 5, 800, 800, 1_300])
"""Plan items; the window of the harness has room for about 500 in a quarter of it, 1,100 in a half."""
_LEG = st.tuples(
    pieces(1, 3),
    _SIZES,
    st.sampled_from(["r", "r", "c"]),
    BATCH,
    st.sampled_from(["compact", "packet", "publish", "crash", "look"]),
    st.sampled_from(QUICK),
)


@law(100)
@given(st.lists(_LEG, min_size=2, max_size=4))
def test_room_is_a_matter_of_the_stream(legs: Any) -> None:
    with workplace(prepared=True) as folder:
        voyage = Voyage(Harness(folder, metrics=METRICS))
        voyage.begin()
        for run in ("r", "c"):
            voyage.harness.tell(
                "operation.declared",
                run=run,
                operation_id="side",
                kind="look",
                idempotency_key=f"side-{run}",
                target="t",
                nonessential=True,
            )
        steps: list[Any] = []
        for told, size, run, batch, what, how in legs:
            plan = [
                {"id": f"t{n}", "text": f"look at part {n} of the tree", "state": "todo"} for n in range(size)
            ]
            crowd = ("said", (run, "event", "step.changed", {"plan": plan}))
            steps += [("tell", [*told, crowd]), ("read_all", batch)]
            steps += {
                "compact": [("compact", run, how)],
                "packet": [("packet", run)],
                "publish": [("publish", run)],
                "crash": [("crash",)],
                "look": [],
            }[what]
            steps.append(("room",))
        one_thread.run(Rooms(voyage).sail, steps)


class Rooms(Voyage):
    """A voyage on which room is asked for."""

    def __init__(self, voyage: Voyage) -> None:
        self.__dict__ = voyage.__dict__

    async def step(self, life: Life, step: Any) -> None:
        if step == ("room",):
            await self.room(life)
        elif step[0] == "packet":
            await life.packet(step[1])
        else:
            await super().step(life, step)

    async def room(self, life: Life) -> None:
        """What ``authorize``, packet and notice say of each run is what the stream alone says."""
        await life.read_all()
        self.follow(life)
        truth = self.truth
        for run in ("r", "c"):
            fits = room.fit_of(truth.lane, truth.runs, run)
            looked = gate.look(
                truth.lane, truth.runs, run, AskAuthorize(operation_id="side", dry_run=True)
            ).code
            answer = await life.ask("authorize", run, operation_id="side", dry_run=True)
            assert answer["code"] == looked
            if looked in ("ok", "postponed"):
                assert looked == ("ok" if fits == "fits" else "postponed")
            packet = await life.packet(run)
            codes = {blocker["code"] for blocker in packet["blockers"]}
            assert ("postponed" in codes) == (fits == "postpone")
            assert ("protected_too_large" in codes) == (fits == "pause")
            (side,) = [item for item in packet["operations"] if item["id"] == "side"]
            if packet["verdict"] != "pause" and side["state"] == "not_started":
                assert (side["may"] == "dispatch") == (looked == "ok")
            await life.publish(run)
            said = (await life.view(run)).choice
            if said is not None or fits != "fits":
                assert said == "reduced" if fits == "fits" else said == fits
