"""Random lives of a lane: what is told, read, asked and compacted, and where it dies, as one list of steps.

``sail`` performs them and compares the daemon with what the stream alone says after each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from sidecar.core.state import Lane
from sidecar.desk import fold_settings_of
from support.harness import Fault, Harness, Killed, Life
from support.summaries import BAD, good
from support.tellings import MESSAGE, OPERATIONS
from support.truth import Truth

RUNS = ("r", "c", "g")
BEHAVIOURS = {"good": good, **BAD}
QUICK = sorted(set(BEHAVIOURS) - {"never"})

_RUN = st.sampled_from(["r", "r", "r", "c"])
_PLAIN = MESSAGE.filter(lambda message: "seq" not in message[3] and message[2] != "run.finished")
PIECE = st.one_of(
    st.tuples(st.just("said"), _PLAIN),
    st.tuples(st.just("turn"), _RUN, st.integers(200, 6_000)),
    st.tuples(st.just("turn"), _RUN, st.integers(2_000, 6_000)),
    st.tuples(st.just("said"), MESSAGE),
    st.tuples(st.just("again"), st.integers(0, 200)),
    st.tuples(st.just("other"), st.integers(0, 200)),
)
TELL = st.tuples(st.just("tell"), st.lists(PIECE, min_size=1, max_size=8))
FAULT = st.tuples(
    st.just("fault"), st.sampled_from(["refused", "before", "after"]), st.integers(0, 6)
)
READ = st.one_of(
    st.tuples(st.just("read"), st.integers(1, 9)),
    st.tuples(st.just("read_all"), st.sampled_from([1, 2, 3, 7, 256])),
)
COMPACT = st.tuples(st.just("compact"), _RUN, st.sampled_from(["good", "good", "good", *QUICK]))
STEP = st.one_of(
    TELL,
    TELL,
    READ,
    COMPACT,
    COMPACT,
    FAULT,
    st.just(("crash",)),
    st.tuples(st.just("taken_up"), _RUN),
    st.tuples(st.just("wait"), st.sampled_from([1.0, 70.0, 400.0])),
    st.tuples(st.just("ask"), _RUN, OPERATIONS, st.sampled_from(["q1", "q2", "q3"])),
    st.tuples(st.just("publish"), _RUN),
)
STEPS = st.lists(STEP, min_size=3, max_size=14)


class Voyage:
    """One example: the harness, what its stream says so far, and what was seen on the way."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.truth = Truth(Lane(settings=fold_settings_of(harness.config)))
        self.taken = 0
        self.packets: dict[str, list[dict[str, Any]]] = {run: [] for run in RUNS}
        """By run: every packet asked for, in order."""

    # --- the stream -------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.harness.start()
        self.harness.tell("child.spawned", child_run="c", task="t")
        self.harness.start("c")

    def piece(self, piece: Any) -> None:
        harness = self.harness
        match piece:
            case ("said", (run, channel, type_, fields)):
                harness.tell(type_, run=run, channel=channel, **fields)
            case ("turn", run, tokens):
                harness.turn(tokens, run=run)
            case ("again" | "other" as how, number):
                earlier = harness.broker.stream[number % len(harness.broker.stream)]
                *_, run, channel = earlier.subject.split(".")
                if run != "_lane":
                    payload = earlier.payload if how == "again" else earlier.payload + b" "
                    harness.broker.put(run, channel, payload)

    # --- steps ------------------------------------------------------------------------------------------

    async def sail(self, steps: Sequence[Any]) -> None:
        """Perform the steps over as many lives as it takes; agree with the truth after each."""
        left = deque(steps)
        over = False
        while not over:
            try:
                async with self.harness.alive() as life:
                    await self.agree(life)
                    while left:
                        await self.step(life, left.popleft())
                        await self.agree(life)
                    self.harness.fault = None
                    await life.read_all()
                    await self.agree(life)
                    await self.arrived(life)
                    over = True
            except* Killed:
                pass

    async def step(self, life: Life, step: Any) -> None:
        harness = self.harness
        match step:
            case ("tell", pieces):
                for piece in pieces:
                    self.piece(piece)
            case ("read", batch):
                await life.read(batch)
            case ("read_all", batch):
                await life.read_all(batch)
            case ("compact", run, name):
                harness.script.then = [BEHAVIOURS[name]]
                await life.read_all()
                await life.compact(run)
                harness.script.then = []
            case ("crash",):
                life.kill()
            case ("fault", kind, after):
                harness.fault = Fault(kind, after)
            case ("taken_up", run):
                harness.tell("context.replaced", run=run, by="agent")
            case ("wait", seconds):
                harness.wait(seconds)
            case ("ask", run, operation, request):
                await life.act(operation, request, run)
            case ("publish", run):
                await life.publish(run)

    async def agree(self, life: Life) -> None:
        """Ledger, every answer and the protected part are those of the stream alone."""
        through = life.desk.cursor.stream_seq
        if through > self.taken:
            self.truth.take(self.harness.broker.stream[self.taken : through])
            self.taken = through
        for run, value in self.truth.values().items():
            assert await life.value(run) == value
            assert await life.looks(run) == self.truth.looks(run)
            packet = await life.packet(run)
            assert packet["protected_digest"] == self.truth.protected_digest(run)
            self.packets[run].append(packet)

    async def arrived(self, life: Life) -> None:
        """What must hold at the end of every voyage, whatever happened on it."""
        for run in self.truth.runs:
            await prove_coverage(life, self.truth, run)


async def prove_coverage(life: Life, truth: Truth, run: str) -> None:
    """Checkpoints follow each other without hole or overlap, each over the digest of its range, and each is
    the end of one attempt that was accepted."""
    rows = await life.checkpoints(run)
    receipts = await life.receipts(run)
    applied = {item["checkpoint_id"]: item for item in receipts if item["outcome"] == "applied"}
    assert set(applied) == {row.checkpoint_id for row in rows}
    parent, covered = None, 0
    for number, row in enumerate(rows, 1):
        receipt = applied[row.checkpoint_id]
        assert (row.version, row.parent_id) == (number, parent)
        assert row.covers_through > covered
        assert receipt["range"]["from"] in (1, covered + 1)
        assert receipt["range"]["through"] == row.covers_through
        assert row.range_digest == receipt["range_digest"]
        assert row.range_digest == "sha256:" + truth.chains[run][row.covers_through].hex()
        parent, covered = row.checkpoint_id, row.covers_through
    view = await life.view(run)
    assert view.course.covers_through == covered
    assert view.course.checkpoint_version == len(rows)
    packet = await life.packet(run)
    shown = packet["checkpoint"]
    assert (shown["covers_through"]["position"] if shown else 0) == covered
    assert packet["tail"]["from_position"] == covered + 1
