"""Random lives of a lane: what is told, read, asked and compacted, and where it dies, as one list of steps.

``sail`` performs them and compares the daemon with what the stream alone says after each.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Sequence
from typing import Any

import anyio
from hypothesis import strategies as st

from protocol.codec import digest
from sidecar.core.protected import protected_digest
from sidecar.core.state import Lane, ledger_value
from sidecar.desk import fold_settings_of
from sidecar.metrics import Metrics
from sidecar.transport.pump import Delivery
from support.harness import LANE, MODEL, TENANT, Fault, Harness, Killed, Life
from support.summaries import BAD, good
from support.tellings import OPERATIONS, Deal, Telling, calm_telling, words
from support.tellings import telling as any_telling
from support.truth import Truth

Piece = tuple[Any, ...]
Step = tuple[Any, ...]
RUNS = ("r", "c", "g")
BEHAVIOURS = {"good": good, **BAD}
QUICK = sorted(set(BEHAVIOURS) - {"never"})
"""Those that need no time."""

METRICS = Metrics()
"""One set for all voyages: making one takes as long as reading a hundred messages."""

_RUN = ("r", "r", "r", "c")
_ORDERS = tuple(itertools.permutations(range(3)))
_EARLIER = 200


def _window(telling: Telling) -> Telling:
    """The same with a window in which there is something to compact."""
    run, channel, type_, fields = telling
    return (run, channel, type_, fields | {"model": MODEL} if "model" in fields else fields)


def _said(deal: Deal) -> Piece:
    return ("said", _window(calm_telling(deal)))


def _slip(deal: Deal) -> Piece:
    """Something that comes again, something that is refused, or anything at all."""
    kind = deal.pick(("said", "again", "other"))
    if kind != "said":
        return (kind, deal.below(_EARLIER))
    telling = any_telling(deal)
    # A figure of the provider's would decide by itself what is compacted.
    return ("said", _window(telling)) if telling[2] != "usage.reported" else _said(deal)


def _turn(deal: Deal) -> Piece:
    return ("turn", deal.pick(_RUN), 3_000 + 1_000 * deal.below(6), deal.pick((False, True)))


def _parallel(deal: Deal) -> Piece:
    return ("parallel", deal.pick(_RUN), deal.pick(_ORDERS), 500 + 500 * deal.below(6), deal.below(4))


def pair(word: int) -> list[Piece]:
    """Two things that are said, and a turn between them: the turns are what there is to compact."""
    deal = Deal(word)
    turn = deal.pick((_turn, _turn, _parallel))(deal)
    before, after = deal.pick((_said, _said, _slip)), deal.pick((_said, _said, _said, _slip))
    return [before(deal), turn, after(deal)]


def pieces(least: int, most: int) -> st.SearchStrategy[list[Piece]]:
    """So many pairs of them."""
    return words(least, most).map(lambda drawn: [piece for word in drawn for piece in pair(word)])


PIECES = pieces(3, 7)
BATCHES = (1, 2, 3, 5, 8, 256)
BATCH = st.sampled_from(BATCHES)

_ASKED = ("q1", "q2", "q3")
_ANSWERS = (*("good",) * 2 * len(BAD), *sorted(BAD))
_EVENTS = (
    *("compact",) * 6,
    *("fault",) * 2,
    *("crash",) * 2,
    *("ask", "stop", "wait", "taken_up", "publish", "read", "read"),
)


def _event(deal: Deal) -> Step:
    name = deal.pick(_EVENTS)
    match name:
        case "compact":
            return (name, deal.pick(_RUN), deal.pick(_ANSWERS))
        case "fault":
            return (name, deal.pick(("refused", "before", "after")), deal.below(7))
        case "ask":
            return (name, deal.pick(_RUN), deal.pick(OPERATIONS), deal.pick(_ASKED))
        case "stop":
            return (name, deal.pick(_RUN), deal.below(21))
        case "wait":
            return (name, deal.pick((1.0, 70.0, 400.0)))
        case "read":
            return (name, deal.pick(BATCHES))
        case "crash":
            return (name,)
        case _:
            return (name, deal.pick(_RUN))


def _leg(word: int, told: list[int]) -> list[Step]:
    deal = Deal(word)
    batch = deal.pick(BATCHES)
    before, after = deal.below(2), deal.below(3)
    events = [_event(deal) for _ in range(before)]
    compaction = ("compact", deal.pick(_RUN), deal.pick(_ANSWERS))
    # What is left of the word is little: the rest is dealt by the last of what is told.
    later = Deal(told[-1] * 7919)
    events += [compaction, *(_event(later) for _ in range(after))]
    return [("tell", [piece for one in told for piece in pair(one)]), ("read", batch), *events]


_LEG_WORDS = 3


def legs(least: int, most: int) -> st.SearchStrategy[list[Step]]:
    """So many legs of a voyage: some is told and read, a compaction is asked for, and before and after it
    anything may happen."""
    return words(least * _LEG_WORDS, most * _LEG_WORDS).map(
        lambda drawn: [
            step
            for at in range(0, len(drawn), _LEG_WORDS)
            for step in _leg(drawn[at], drawn[at + 1 : at + _LEG_WORDS] or [0])
        ]
    )


STEPS = legs(1, 2)


SEEDS = st.integers(0, 2**16 - 1)
"""Which tasks run between two statements of the database."""

_SILENT = frozenset({"tell", "wait", "fault", "taken_up", "read", "publish"})
"""Steps of which the daemon notices nothing yet, or that another one follows."""


class Voyage:
    """One example: the harness, what its stream says so far, and what was seen on the way."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.truth = Truth(Lane(settings=fold_settings_of(harness.config)))
        self.taken = 0
        self.newest: dict[str, dict[str, Any]] = {}
        """By run: the packet asked for last."""
        self.seen: dict[str, list[Seen]] = {}
        """By run: every packet asked for, in order."""
        self.together: list[tuple[str, list[str]]] = []
        """Run and event ids of what no boundary may part."""
        self.acts: list[tuple[str, str, str]] = []
        """Run, record id and code of every answer to an act."""

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
            case ("turn", run, tokens, wordy):
                ids = harness.turn(tokens, run=run, wordy=wordy)
                self.together.append((run, ids[1:]))
            case ("parallel", run, order, tokens, user_at):
                self.together.append((run, harness.parallel(order, tokens, run=run, user_at=user_at)))
            case ("again" | "other" as how, number):
                earlier = harness.broker.stream[number % len(harness.broker.stream)]
                *_, run, channel = earlier.subject.split(".")
                if run != "_lane":
                    payload = earlier.payload if how == "again" else earlier.payload + b" "
                    harness.broker.put(run, channel, payload)

    # --- steps ------------------------------------------------------------------------------------------

    async def sail(self, steps: Sequence[Any]) -> None:
        """Perform the steps over as many lives as it takes; agree with the truth of one run after each, of all
        at the end."""
        left = deque(steps)
        asked = itertools.cycle(("r", "c", "r", "g"))
        over = False
        while not over:
            try:
                async with self.harness.alive() as life:
                    await self.agree(life, [next(asked)])
                    while left:
                        step = left.popleft()
                        await self.step(life, step)
                        if step[0] not in _SILENT:
                            await self.agree(life, [next(asked)])
                    self.harness.fault = None
                    await life.read_all()
                    await self.agree(life)
                    await life.relayed()
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
                await life.read_all()
                harness.script.then = [BEHAVIOURS[name]]
                await life.compact(run)
                harness.script.then = []
            case ("crash",):
                life.kill()
            case ("stop", run, steps):
                await life.ask("compact", run)
                for _ in range(steps):
                    await anyio.sleep(0.0002)
                await life.stop()
            case ("fault", kind, after):
                harness.fault = Fault(kind, after)
            case ("taken_up", run):
                harness.tell("context.replaced", run=run, by="agent")
            case ("wait", seconds):
                harness.wait(seconds)
            case ("ask", run, operation, request):
                before = len(harness.broker.stream)
                answer = await life.act(operation, request, run)
                put = harness.broker.stream[before:]
                if put and "code" in answer:
                    self.acts.append((run, json.loads(put[-1].payload)["id"], answer["code"]))
            case ("publish", run):
                await life.publish(run)

    # --- what must hold ---------------------------------------------------------------------------------

    def follow(self, life: Life) -> None:
        """Take the truth to where the daemon has read."""
        through = life.desk.cursor.stream_seq
        self.truth.take(self.harness.broker.stream[self.taken : through])
        self.taken = max(self.taken, through)

    async def agree(self, life: Life, runs: Sequence[str] = ()) -> None:
        """Ledger, every answer and the protected part are those of the stream alone; what left a packet
        left it for a message that says so. ``runs``: all there are, if none are named."""
        self.follow(life)
        for run in runs or sorted(self.truth.runs):
            if run not in self.truth.runs:
                continue
            assert await life.value(run) == ledger_value(self.truth.runs[run])
            assert await life.looks(run) == self.truth.looks(run)
            packet = self.newest[run] = await life.packet(run)
            protected = self.truth.protected(run)
            assert packet["protected_digest"] == protected_digest(protected)
            prove_shown(packet, protected)
            seen = self.seen.setdefault(run, [])
            seen.append(Seen.of(packet, self.truth))
            if len(seen) > 1:
                seen[-1].prove_explained(seen[-2], self.truth)

    async def arrived(self, life: Life) -> None:
        """What must hold at the end of every voyage, whatever happened on it."""
        told = Told()
        for run in self.truth.runs:
            await prove_coverage(life, self.truth, run, self.newest[run])
            await self.prove_pairs(life, run)
            for receipt in await life.receipts(run):
                handoff = receipt["handoff"]
                told.handoff(run, handoff["position"], handoff["ledger_digest"])
            newest = 0
            for state in self.harness.sent("state", run):
                assert state["ledger_digest"] == digest(state["ledger"])
                told.ledger(run, state["ledger_version"], state["ledger_digest"])
                # No newer state has an older checkpoint: a new owner would begin with it.
                checkpoint = state["checkpoint"]
                version = checkpoint["version"] if checkpoint else 0
                assert version >= newest
                newest = version
            for packet in self.harness.sent("packet", run):
                told.protected(run, packet["ledger_version"], packet["protected_digest"])
        for run, record, code in self.acts:
            assert self.truth.decided[run, record].code == code
        told.prove(Truth(Lane(settings=fold_settings_of(self.harness.config))), self.harness.broker.stream)

    async def prove_pairs(self, life: Life, run: str) -> None:
        """No boundary parts what belongs together."""
        position = self.truth.positions(run)
        for row in await life.checkpoints(run):
            for of_run, ids in self.together:
                if of_run == run:
                    sides = {position[name] <= row.covers_through for name in ids if name in position}
                    assert len(sides) <= 1, (row.covers_through, ids)


class Told:
    """What the daemon said of a run at some version or position, to be found again in the stream alone."""

    def __init__(self) -> None:
        self._wanted: dict[tuple[str, str, int], set[str]] = {}

    def ledger(self, run: str, version: int, said: str) -> None:
        self._wanted.setdefault(("ledger", run, version), set()).add(said)

    def handoff(self, run: str, position: int, said: str) -> None:
        self._wanted.setdefault(("handoff", run, position), set()).add(said)

    def protected(self, run: str, version: int, said: str) -> None:
        self._wanted.setdefault(("protected", run, version), set()).add(said)

    def prove(self, truth: Truth, stream: Sequence[Delivery]) -> None:
        """Each was so while the run was there; relatives and records may change it meanwhile."""
        left = {key: set(said) for key, said in self._wanted.items()}
        for delivery in stream:
            truth.take([delivery])
            for run, ledger in truth.runs.items():
                whole = ("ledger", run, ledger.head.version), ("handoff", run, ledger.head.position)
                for key in whole:
                    if left.get(key):
                        left[key].discard(digest(ledger_value(ledger)))
                key = ("protected", run, ledger.head.version)
                if left.get(key):
                    left[key].discard(truth.protected_digest(run))
        assert not any(left.values()), left


class Seen:
    """What a packet holds of the open matters, and how much of the lane was told then."""

    def __init__(self, told: int, open_: dict[str, set[str]]) -> None:
        self.told = told
        self.open = open_

    @classmethod
    def of(cls, packet: dict[str, Any], truth: Truth) -> Seen:
        live = ("not_started", "pending", "unknown")
        return cls(
            len(truth.order),
            {
                "constraint": {item["id"] for item in packet["task"]["constraints"]},
                "question": {item["id"] for item in packet["questions"]},
                "operation": {item["id"] for item in packet["operations"] if item["state"] in live},
                "approval": {item["id"] for item in packet["approvals"]},
                "plan": {
                    item["id"] for item in packet["progress"]["plan"] if item["state"] in ("todo", "doing")
                },
                "request": {item["event_id"] for item in packet["task"]["current_request"]},
            },
        )

    def prove_explained(self, before: Seen, truth: Truth) -> None:
        between = truth.order[before.told :]
        for kind, names in before.open.items():
            for name in names - self.open[kind]:
                assert any(_ends(kind, name, body) for body in between), (kind, name)


def _ends(kind: str, name: str, body: dict[str, Any]) -> bool:
    """Whether a message can be the reason that an open matter is open no more."""
    type_ = body["type"]
    item = body.get(f"{kind}_id") or body["id"]
    match kind:
        case "constraint":
            lifted = type_ == "constraint.lifted" and item == name
            return lifted or (type_ == "constraint.set" and body.get("replaces") == name)
        case "question":
            return type_ == "question.answered" and item == name
        case "operation":
            return type_ in ("operation.settled", "operation.reconciled") and item == name
        case "approval":
            used = ("operation.dispatched", "tool.called", "authorization.requested", "operation.settled")
            return type_ in used or (type_ in ("approval.resolved", "approval.expired") and item == name)
        case "plan":
            return type_ == "step.changed"
        case _:
            return type_ in ("message", "boundary.marked")


def prove_shown(packet: dict[str, Any], protected: dict[str, Any]) -> None:
    """The protected part stands in the packet as it is, wherever the boundary lies (texts here are short, so
    that none needs shortening)."""
    live = [item for item in packet["operations"] if item["state"] in ("not_started", "pending", "unknown")]
    bare = [{name: value for name, value in item.items() if name not in ("may", "receipt")} for item in live]
    assert bare == protected["operations"]
    task = {name: value for name, value in packet["task"].items() if name != "user_messages"}
    assert task == protected["task"]
    for name in ("inputs", "policy", "questions", "approvals", "contradictions", "parent"):
        assert packet[name] == protected[name], name
    plan = [item for item in packet["progress"]["plan"] if item["state"] in ("todo", "doing")]
    wanted = [item for item in protected["progress"]["plan"] if item["state"] in ("todo", "doing")]
    assert plan == wanted
    for name in ("phase", "focus", "next_action", "uncertain"):
        assert packet["progress"][name] == protected["progress"][name], name
    for name in ("artifacts", "evidence"):
        assert all(item in packet[name] for item in protected[name])


async def prove_coverage(life: Life, truth: Truth, run: str, packet: dict[str, Any] | None = None) -> None:
    """Checkpoints follow each other without hole or overlap, each over the digest of its range, and each is
    the end of one attempt that was accepted. ``packet``: of this moment, if there is one."""
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
    packet = packet or await life.packet(run)
    shown = packet["checkpoint"]
    assert (shown["covers_through"]["position"] if shown else 0) == covered
    assert packet["tail"]["from_position"] == covered + 1
    assert not await life.store.open_attempts(TENANT, LANE)
