"""The ledger of one run as data: its head, its items, and which of them changed.

The fold (``fold.py``) is the only writer; packet, gate and validation read. Items are frozen and
replaced whole, so a shallow copy of the dictionaries is a true snapshot. Nothing here reads a clock,
a budget, a summary or a packet, and nothing here does I/O.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import msgspec
from msgspec import Struct

from protocol.events import Forbids, NextAction, Scope, Settings
from sidecar.core.index import INDEXED, Index

Channel = Literal["event", "authority", "record"]
OperationState = Literal["not_started", "pending", "succeeded", "failed", "unknown"]
ApprovalState = Literal["pending", "granted", "denied", "expired", "revoked", "consumed"]


class Item(Protocol):
    """What every ledger item answers: its id, and whether the hot view still needs it."""

    @property
    def id(self) -> str: ...

    @property
    def live(self) -> bool: ...


class Task(Struct, frozen=True, kw_only=True):
    """What the run is for. One per run (id ``""``)."""

    id: str = ""
    goal: str = ""
    done_when: tuple[str, ...] = ()
    scope: Scope | None = None
    owner: str | None = None
    trust: str | None = None

    @property
    def live(self) -> bool:
        return True


class Policy(Struct, frozen=True, kw_only=True):
    """Released and loaded policy. ``None`` lists: the configured ones hold. One per run (id ``""``)."""

    id: str = ""
    released: str | None = None
    summary: str | None = None
    loaded: str | None = None
    approval_kinds: tuple[str, ...] | None = None
    forbidden_kinds: tuple[str, ...] | None = None
    release: int = 0
    """Number of this release within the family: the greatest one on the way to the root is in force."""
    told_in: str | None = None
    """``<channel>/<session>`` of the newest release; a late one is older only within it."""
    approval_kinds_seq: int = 0
    forbidden_kinds_seq: int = 0
    """Message numbers that set the lists, 0 where none did."""

    @property
    def live(self) -> bool:
        return True


class CompletedStep(Struct, frozen=True, kw_only=True):
    text: str
    refs: tuple[str, ...] = ()


class PlanStep(Struct, frozen=True, kw_only=True):
    id: str
    text: str
    state: Literal["todo", "doing", "done", "dropped"]


class Note(Struct, frozen=True, kw_only=True):
    """A blocker as ``step.changed`` told it."""

    id: str
    text: str


class WorkFocus(Struct, frozen=True, kw_only=True):
    files: tuple[str, ...] | None = None
    hypothesis: str | None = None
    remaining: tuple[str, ...] | None = None


class Progress(Struct, frozen=True, kw_only=True):
    """Where the work stands, from ``step.changed`` alone. One per run (id ``""``)."""

    id: str = ""
    phase: str | None = None
    completed: tuple[CompletedStep, ...] = ()
    plan: tuple[PlanStep, ...] = ()
    focus: WorkFocus | None = None
    next_action: NextAction | None = None
    blockers: tuple[Note, ...] = ()
    uncertain: tuple[str, ...] = ()

    @property
    def live(self) -> bool:
        return True


class Request(Struct, frozen=True, kw_only=True):
    """One user message of the current request; the key is its event id. Leaves when the turn is over."""

    id: str
    text: str
    position: int

    @property
    def live(self) -> bool:
        return True


class UserMessage(Struct, frozen=True, kw_only=True):
    """A user message worth keeping near (first, newest, prohibitions, exact identifiers); bounded in number."""

    id: str
    text: str
    position: int
    rank: int
    """3 first message, 2 a prohibition or exact identifier, 1 any other."""

    @property
    def live(self) -> bool:
        return True


class Corrected(Struct, frozen=True, kw_only=True):
    """A message that a later one supersedes (the key is its event id): what rests on it alone holds no longer."""

    id: str
    position: int = 0
    """Of the newest message that supersedes it."""

    @property
    def live(self) -> bool:
        return False


class PinnedInput(Struct, frozen=True, kw_only=True):
    id: str
    """The input's name."""
    version: str | None = None
    digest: str | None = None

    @property
    def live(self) -> bool:
        return True


class ConstraintItem(Struct, frozen=True, kw_only=True):
    id: str
    text: str
    source: Literal["user", "policy", "operator", "agent"]
    told_by: Literal["agent", "authority"]
    forbids: Forbids | None = None
    state: Literal["active", "replaced", "lifted"] = "active"
    position: int = 0

    @property
    def live(self) -> bool:
        return self.state == "active"


class Decision(Struct, frozen=True, kw_only=True):
    id: str
    summary: str
    reason: str | None = None
    refs: tuple[str, ...] = ()
    rejected: tuple[tuple[str, str], ...] = ()
    """(alternative, reason) pairs."""
    state: Literal["in_force", "superseded"] = "in_force"
    position: int = 0

    @property
    def live(self) -> bool:
        return self.state == "in_force"


class Question(Struct, frozen=True, kw_only=True):
    id: str
    text: str
    state: Literal["open", "answered"] = "open"
    answer: str | None = None
    by: str | None = None
    position: int = 0

    @property
    def live(self) -> bool:
        return self.state == "open"


class Operation(Struct, frozen=True, kw_only=True):
    """One side effect. ``declared`` is false while only evidence of it was seen."""

    id: str
    kind: str | None = None
    idempotency_key: str | None = None
    target: str | None = None
    tool: str | None = None
    description: str | None = None
    approval_id: str | None = None
    payload_digest: str | None = None
    nonessential: bool = False
    declared: bool = True
    state: OperationState = "not_started"
    request_id: str | None = None
    """The ``authorize`` request that made it pending. Kept after that, so that its id names nothing else."""
    used_approval: str | None = None
    """The approval its dispatch or authorization consumed."""
    dispatched: bool = False
    """A dispatch (or a call naming it) was seen, beyond the answer of ``authorize``."""
    announced: bool = False
    """The dispatch was seen as ``operation.dispatched``."""
    called: bool = False
    """The dispatch was seen as a ``tool.called`` naming it. Both together are one dispatch."""
    dispatched_at: int = 0
    """Position at which it became pending; results after it can reconcile it."""
    review: bool = False
    """``operation.reconciled`` said review: only an authority settles it."""
    evidence: str | None = None
    """The ref that reconciled it."""
    receipt: str | None = None
    detail: str | None = None
    position: int = 0

    @property
    def live(self) -> bool:
        return self.state in ("not_started", "pending", "unknown")


class Approval(Struct, frozen=True, kw_only=True):
    id: str
    action: str
    scope: str | None = None
    payload_ref: str | None = None
    payload_digest: str | None = None
    operation_id: str | None = None
    state: ApprovalState = "pending"
    by: str | None = None
    expires_at: str | None = None
    """RFC 3339; the resolution's if it gave one, else the request's."""
    uses_left: int = 0
    granted_at: int = 0
    """Position of the grant; orders "oldest" and "newest" granted."""
    position: int = 0

    @property
    def live(self) -> bool:
        return self.state in ("pending", "granted")


class EarlyResolution(Struct, frozen=True, kw_only=True):
    """An ``approval.resolved`` that came before its request and waits for one that equals it."""

    id: str
    outcome: Literal["granted", "denied", "revoked"]
    by: str
    action: str
    payload_digest: str | None = None
    expires_at: str | None = None
    uses: int = 1
    position: int = 0

    @property
    def live(self) -> bool:
        return True


class Artifact(Struct, frozen=True, kw_only=True):
    """One artifact version; the key is ``id`` or ``id@version`` for later versions of the same id."""

    id: str
    artifact_id: str
    uri: str
    sha256: str
    description: str
    version: str | None = None
    media_type: str | None = None
    bytes: int | None = None
    state: Literal["saved", "superseded", "withdrawn"] = "saved"
    position: int = 0

    @property
    def live(self) -> bool:
        return self.state == "saved"


class Evidence(Struct, frozen=True, kw_only=True):
    id: str
    claim: str
    kind: Literal["observed", "inferred"]
    source: str
    value: str | int | float | bool | None = None
    unit: str | None = None
    contradicts: tuple[str, ...] = ()
    position: int = 0
    late: bool = False
    """Recorded by a late event: it proves nothing about what happened just before its position."""

    @property
    def live(self) -> bool:
        return True


class Call(Struct, frozen=True, kw_only=True):
    """A tool call that is open, or was abandoned. The key is its *event* id, since call ids repeat."""

    id: str
    call_id: str
    tool: str
    operation_id: str | None = None
    repeatable: bool = False
    session: str | None = None
    state: Literal["open", "abandoned"] = "open"
    position: int = 0

    @property
    def live(self) -> bool:
        return True


class ToolResult(Struct, frozen=True, kw_only=True):
    """A final tool result seen while an operation was unsettled; it may reconcile one dispatched before it."""

    id: str
    """Event id."""
    position: int
    operation_id: str | None = None

    @property
    def live(self) -> bool:
        return True


class Child(Struct, frozen=True, kw_only=True):
    """A child as its parent spawned it."""

    id: str
    """The child's run."""
    task: str
    done_when: tuple[str, ...] = ()
    inputs: tuple[PinnedInput, ...] = ()
    allowed_tools: tuple[str, ...] | None = None
    required_artifacts: tuple[str, ...] | None = None
    granted_refs: tuple[str, ...] = ()
    status: Literal["running", "succeeded", "failed", "cancelled"] = "running"
    artifacts: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    position: int = 0

    @property
    def live(self) -> bool:
        return True


class Gap(Struct, frozen=True, kw_only=True):
    """A hole in the numbers of a session (``session`` set) or in the stream itself (``session`` None)."""

    id: str
    """``<channel>/<session>/<from>`` or ``stream/<from>``."""
    channel: Channel
    session: str | None
    first: int
    through: int
    declared: bool = False
    """Said on ``record``: the gap will not close by itself; the verdict is ``pause``."""

    @property
    def live(self) -> bool:
        return True


class Claim(Struct, frozen=True, kw_only=True):
    """A run that calls this one its parent without having been spawned: paused, but of the family."""

    id: str
    """The claiming run."""

    @property
    def live(self) -> bool:
        return True


class Pause(Struct, frozen=True):
    by: Literal["agent", "authority"]
    reason: str


class ModelInfo(Struct, frozen=True):
    name: str
    context_window: int
    max_output_tokens: int | None = None


ITEM_TYPES: dict[str, type[Any]] = {
    "task": Task,
    "policy": Policy,
    "progress": Progress,
    "request": Request,
    "user": UserMessage,
    "corrected": Corrected,
    "input": PinnedInput,
    "constraint": ConstraintItem,
    "decision": Decision,
    "question": Question,
    "operation": Operation,
    "approval": Approval,
    "early": EarlyResolution,
    "artifact": Artifact,
    "evidence": Evidence,
    "call": Call,
    "result": ToolResult,
    "child": Child,
    "gap": Gap,
    "accepted": Gap,
    "claim": Claim,
}
"""Every collection of a ledger and the type of its items.

``gap`` holds what is missing, ``accepted`` what an authority accepted as missing (it may still come).
"""


class Head(Struct, kw_only=True):
    """The few values that change with most messages. Mutable; copied by ``Ledger.snapshot``."""

    run: str
    version: int = 0
    """Ledger version: messages folded, ``record`` included."""
    position: int = 0
    """Messages of ``event`` and ``authority`` folded."""
    started: bool = False
    finished: Literal["succeeded", "failed", "cancelled"] | None = None
    pauses: tuple[Pause, ...] = ()
    session: str | None = None
    ended_sessions: tuple[str, ...] = ()
    next_seq: dict[str, int] = {}
    """``<channel>/<session>`` → the next number expected."""
    last_event_id: str | None = None
    """Newest message of the ``event`` channel."""
    turn: Literal["none", "assistant", "call", "result"] = "none"
    """The newest of assistant message, call and result since the current request began."""
    model: ModelInfo | None = None
    agent: str | None = None
    labels: dict[str, str] = {}
    parent: str | None = None
    spawned: bool = False
    """The parent's ``child.spawned`` was seen; a child without it is paused."""
    continues: str | None = None
    allowed_tools: tuple[str, ...] | None = None
    required_artifacts: tuple[str, ...] | None = None
    granted_refs: tuple[str, ...] = ()
    constraint_seen: bool = False
    """Any constraint was ever told; else the packet says ``contract: inferred``."""
    context_changed_at: int = 0
    """Ledger version at which task, owner or trust last changed by an authority; 0: never."""
    context_known_at: int = 0
    """Highest ledger version a ``run.resumed`` named."""
    results: tuple[tuple[str, int], ...] = ()
    """Event id and position of the newest tool results; position 0 for a late one, which proves no order."""
    releases: int = 0
    """Of a root: policies released in its family so far, which puts them in order."""
    violations: dict[str, int] = {}


class Ledger:
    """The operational state of one run: head, items by collection, and what changed since last stored."""

    __slots__ = ("_index", "active", "changed", "head", "items")

    def __init__(self, head: Head) -> None:
        self.head = head
        self.items: dict[str, dict[str, Any]] = {kind: {} for kind in ITEM_TYPES}
        self.active: dict[str, dict[str, Any]] = {kind: {} for kind in ITEM_TYPES}
        self.changed: set[tuple[str, str]] = set()
        self._index = Index()

    @property
    def index(self) -> Index:
        """Where to find items by something other than their id."""
        if not self._index.covers(self.items):
            self._index = Index.of(self.items)
        return self._index

    @property
    def indexed(self) -> Index:
        """The same for the fold, by which every item goes in through ``put``: not looked over each time."""
        return self._index

    def put(self, kind: str, item: Item) -> None:
        """Insert or replace an item; a settled one stays in ``items`` and leaves ``active``."""
        key, items = item.id, self.items[kind]
        if kind in INDEXED:
            self._index.note(kind, items.get(key), item)
        items[key] = item
        if item.live:
            self.active[kind][key] = item
        else:
            self.active[kind].pop(key, None)
        self.changed.add((kind, key))

    def drop(self, kind: str, key: str) -> None:
        """Forget an item that has no history of its own (a closed call, a closed gap)."""
        if (item := self.items[kind].pop(key, None)) is not None:
            if kind in INDEXED:
                self._index.note(kind, item, None)
            self.active[kind].pop(key, None)
            self.changed.add((kind, key))

    def get(self, kind: str, key: str) -> Any:
        """The item, settled or not, or ``None``."""
        return self.items[kind].get(key)

    @property
    def task(self) -> Task:
        task = self.items["task"].get("")
        return task if task is not None else _NO_TASK

    @property
    def policy(self) -> Policy:
        policy = self.items["policy"].get("")
        return policy if policy is not None else _NO_POLICY

    @property
    def progress(self) -> Progress:
        progress = self.items["progress"].get("")
        return progress if progress is not None else _NO_PROGRESS

    def snapshot(self, *, bare: bool = False) -> Ledger:
        """A copy that later folding does not touch; cost is the number of items, not their size.

        ``bare``: for its head and its items alone, at a fraction of that; what else it is asked for is wrong.
        """
        twin = Ledger(copy.copy(self.head))
        twin.head.next_seq = dict(self.head.next_seq)
        twin.head.violations = dict(self.head.violations)
        twin.head.labels = dict(self.head.labels)
        twin.items = {kind: dict(items) for kind, items in self.items.items()}
        if bare:
            return twin
        twin.active = {kind: dict(items) for kind, items in self.active.items()}
        twin._index = self._index.copy()
        return twin


_NO_TASK = Task()
_NO_POLICY = Policy()
_NO_PROGRESS = Progress()


class Lane(Struct, kw_only=True):
    """What the fold knows of a lane: the settings in force and the highest epoch a record carried."""

    settings: Settings
    epoch: int = 0
    settled: bool = False
    """A ``settings.applied`` was folded (before the first one, the first one's settings hold)."""


Runs = Mapping[str, Ledger]
"""Ledgers by run: at least the whole family of the run at hand."""


def encode_item(item: Any) -> bytes:
    """One item as stored: MessagePack, by field name."""
    return msgspec.msgpack.encode(item)


_DECODERS = {kind: msgspec.msgpack.Decoder(type_) for kind, type_ in ITEM_TYPES.items()}
_HEAD = msgspec.msgpack.Decoder(Head)


def decode_item(kind: str, body: bytes) -> Any:
    """The stored form back; raises ``msgspec.DecodeError`` on damage."""
    return _DECODERS[kind].decode(body)


def encode_head(head: Head) -> bytes:
    return msgspec.msgpack.encode(head)


def decode_head(body: bytes) -> Head:
    return _HEAD.decode(body)


def ledger_value(ledger: Ledger) -> dict[str, Any]:
    """The whole ledger as plain data with a fixed order: what its digest is taken over and what
    two ledgers are compared by."""
    return {
        "head": msgspec.to_builtins(ledger.head),
        "items": {
            kind: [msgspec.to_builtins(items[key]) for key in sorted(items)]
            for kind, items in sorted(ledger.items.items())
            if items
        },
    }
