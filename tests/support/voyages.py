"""Random lives of a lane: what is told, read, asked and compacted, and where it dies, as one list of steps.

``sail`` performs them and compares the daemon with what the stream alone says after each.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any

import anyio
from hypothesis import strategies as st

from protocol.codec import digest
from sidecar.core.state import Lane, encode_head, ledger_value
from sidecar.desk import fold_settings_of
from support.harness import LANE, MODEL, TENANT, Fault, Harness, Killed, Life
from support.summaries import BAD, good
from support.tellings import MESSAGE, OPERATIONS
from support.truth import Truth

RUNS = ("r", "c", "g")
BEHAVIOURS = {"good": good, **BAD}
QUICK = sorted(set(BEHAVIOURS) - {"never"})

_RUN = st.sampled_from(["r", "r", "r", "c"])


def _in_window(message: Any) -> Any:
    """The same with a window in which there is something to compact."""
    run, channel, type_, fields = message
    return (run, channel, type_, fields | {"model": MODEL} if "model" in fields else fields)


_ANY = MESSAGE.filter(lambda message: message[2] != "usage.reported").map(_in_window)
_CALM = _ANY.filter(
    lambda message: (
        "seq" not in message[3]
        and "session" not in message[3]
        and message[2] not in ("run.finished", "run.paused", "tool.called", "operation.dispatched")
    )
)
_TURN = st.tuples(st.just("turn"), _RUN, st.integers(2_000, 6_000), st.booleans())
_SAID = st.tuples(st.just("said"), _CALM)
_SLIP = st.one_of(
    st.tuples(st.just("said"), _ANY),
    st.tuples(st.just("again"), st.integers(0, 200)),
    st.tuples(st.just("other"), st.integers(0, 200)),
)
_PARALLEL = st.tuples(
    st.just("parallel"), _RUN, st.permutations(range(3)), st.integers(500, 3_000), st.integers(0, 3)
)
PIECES = st.lists(
    st.tuples(st.one_of(_SAID, _SAID, _SAID, _SLIP), st.one_of(_TURN, _TURN, _PARALLEL)),
    min_size=3,
    max_size=7,
).map(lambda pairs: [piece for pair in pairs for piece in pair])
BATCH = st.sampled_from([1, 2, 3, 5, 8, 256])

_BY_TIME = st.sampled_from([1.0, 70.0, 400.0]).map(lambda seconds: ("wait", seconds))
_FAULT = st.tuples(st.just("fault"), st.sampled_from(["refused", "before", "after"]), st.integers(0, 6))
_COMPACT = st.tuples(st.just("compact"), _RUN, st.sampled_from(["good", "good", "good", *QUICK]))
_ASK = st.tuples(st.just("ask"), _RUN, OPERATIONS, st.sampled_from(["q1", "q2", "q3"]))
_EVENT = st.one_of(
    _COMPACT,
    _COMPACT,
    _FAULT,
    _ASK,
    _BY_TIME,
    st.just(("crash",)),
    st.tuples(st.just("stop"), _RUN, st.integers(0, 20)),
    st.tuples(st.just("taken_up"), _RUN),
    st.tuples(st.just("publish"), _RUN),
    st.tuples(st.just("read"), BATCH),
)
_EVENTS = st.lists(_EVENT, min_size=1, max_size=4)
LEG = st.tuples(PIECES, BATCH, _EVENTS, _COMPACT, _EVENTS).map(
    lambda leg: [("tell", leg[0]), ("read", leg[1]), *leg[2], leg[3], *leg[4], ("read_all", leg[1])]
)
STEPS = st.lists(LEG, min_size=2, max_size=4).map(lambda legs: [step for leg in legs for step in leg])


_SILENT = frozenset({"tell", "wait", "fault", "taken_up"})
"""Steps of which the daemon notices nothing yet."""


class Voyage:
    """One example: the harness, what its stream says so far, and what was seen on the way."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.truth = Truth(Lane(settings=fold_settings_of(harness.config)))
        self.taken = 0
        self.seen: dict[str, list[Seen]] = {}
        """By run: every packet asked for, in order."""
        self.digests: dict[tuple[str, int], set[str]] = {}
        """(run, ledger version) → the digests the protected part had then; relatives may change it."""
        self.ledgers: dict[tuple[str, int], set[str]] = {}
        """(run, ledger version) → the digests its ledger had then."""
        self._heads: dict[str, bytes] = {}
        self.handoffs: dict[tuple[str, int], set[str]] = {}
        """(run, position) → the same."""
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
        """Perform the steps over as many lives as it takes; agree with the truth after each."""
        left = deque(steps)
        over = False
        while not over:
            try:
                async with self.harness.alive() as life:
                    await self.agree(life)
                    while left:
                        step = left.popleft()
                        await self.step(life, step)
                        if step[0] not in _SILENT:
                            await self.agree(life)
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
        """Take the truth to where the daemon has read, message by message."""
        stream = self.harness.broker.stream
        while self.taken < life.desk.cursor.stream_seq:
            self.truth.take(stream[self.taken : self.taken + 1])
            self.taken += 1
            for run, ledger in self.truth.runs.items():
                said = self.digests.setdefault((run, ledger.head.version), set())
                said.add(self.truth.protected_digest(run))
                head = encode_head(ledger.head)
                if ledger.changed or self._heads.get(run) != head:
                    whole = digest(ledger_value(ledger))
                    self.ledgers.setdefault((run, ledger.head.version), set()).add(whole)
                    self.handoffs.setdefault((run, ledger.head.position), set()).add(whole)
                    self._heads[run] = head
                    ledger.changed.clear()

    async def agree(self, life: Life) -> None:
        """Ledger, every answer and the protected part are those of the stream alone; what left a packet
        left it for a message that says so."""
        self.follow(life)
        for run, value in self.truth.values().items():
            assert await life.value(run) == value
            assert await life.looks(run) == self.truth.looks(run)
            packet = await life.packet(run)
            assert packet["protected_digest"] == self.truth.protected_digest(run)
            prove_shown(packet, self.truth.protected(run))
            seen = self.seen.setdefault(run, [])
            seen.append(Seen.of(packet, self.truth))
            if len(seen) > 1:
                seen[-1].prove_explained(seen[-2], self.truth)

    async def arrived(self, life: Life) -> None:
        """What must hold at the end of every voyage, whatever happened on it."""
        for run in self.truth.runs:
            await prove_coverage(life, self.truth, run)
            await self.prove_pairs(life, run)
            for receipt in await life.receipts(run):
                handoff = receipt["handoff"]
                assert handoff["ledger_digest"] in self.handoffs[run, handoff["position"]]
            self.prove_states(run)
        for run, record, code in self.acts:
            assert self.truth.decided[run, record].code == code
        for sent in self.harness.broker.sent:
            if sent.kind == "packet":
                packet = sent.body
                assert packet["protected_digest"] in self.digests[sent.run, packet["ledger_version"]]

    def prove_states(self, run: str) -> None:
        """What a new owner would read: each state is one the ledger had, and no newer one has an older
        checkpoint."""
        newest = 0
        for state in self.harness.sent("state", run):
            said = self.ledgers[run, state["ledger_version"]]
            assert state["ledger_digest"] in said
            assert digest(state["ledger"]) in said
            checkpoint = state["checkpoint"]
            version = checkpoint["version"] if checkpoint else 0
            assert version >= newest
            newest = version

    async def prove_pairs(self, life: Life, run: str) -> None:
        """No boundary parts what belongs together."""
        position = self.truth.positions(run)
        for row in await life.checkpoints(run):
            for of_run, ids in self.together:
                if of_run == run:
                    sides = {position[name] <= row.covers_through for name in ids if name in position}
                    assert len(sides) <= 1, (row.covers_through, ids)


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
    assert not await life.store.open_attempts(TENANT, LANE)
