"""What a daemon leaves behind, and the proof that it is whole: streams and database read raw, compared with
each other.

The chain is recomputed here from the bytes in the stream by the rules of the wire protocol; nothing of the
daemon's own reading is used for that.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.codec import decode_event
from protocol.errors import ProtocolError
from protocol.events import identity
from sidecar.core.budget import BudgetSettings
from sidecar.inspection import inspect_run
from sidecar.transport.errors import ApiError
from sidecar.transport.jetstream import Link
from storage.records import AttemptRow, BrokenLink, CheckpointRow, JournalEntry
from storage.store import Store
from support.daemon import LANE, TENANT


@dataclass(frozen=True)
class Stored:
    """One message of a stream."""

    seq: int
    subject: str
    payload: bytes

    @property
    def kind(self) -> str:
        """Last token of the subject: channel or kind."""
        return self.subject.rsplit(".", 1)[1]

    @property
    def body(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.payload)
        return value


async def stored(link: Link, stream: str, subject: str) -> list[Stored]:
    """Every message of the stream on these subjects, oldest first; [] where the stream is not there."""
    found: list[Stored] = []
    following = 1
    while True:
        try:
            answer = await link.api(
                f"STREAM.MSG.GET.{stream}", {"seq": following, "next_by_subj": subject}, timeout=10
            )
        except ApiError as error:
            if error.code != 404:
                raise
            return found
        message = answer["message"]
        payload = base64.b64decode(message.get("data", ""))
        found.append(Stored(int(message["seq"]), str(message["subject"]), payload))
        following = found[-1].seq + 1


@dataclass(frozen=True)
class Left:
    """One run as database and streams hold it."""

    run: str
    told: dict[str, Any]
    """As ``inspect`` shows it."""
    journal: list[JournalEntry]
    checkpoints: list[CheckpointRow]
    open_attempts: list[AttemptRow]
    broken: BrokenLink | None
    outbox: int
    inbound: list[Stored]
    outbound: list[Stored]

    @property
    def ledger(self) -> dict[str, Any]:
        value: dict[str, Any] = self.told["ledger"]
        return value

    @property
    def digest(self) -> str:
        return str(self.told["protected_digest"])

    @property
    def receipts(self) -> list[dict[str, Any]]:
        value: list[dict[str, Any]] = self.told["receipts"]
        return value

    def sent(self, kind: str, /, **wanted: Any) -> list[dict[str, Any]]:
        """What was published of this kind whose fields have these values, in order."""
        bodies = [item.body for item in self.outbound if item.kind == kind]
        return [body for body in bodies if all(body.get(name) == value for name, value in wanted.items())]


async def gather(link: Link, data_dir: Path, run: str) -> Left:
    """Read everything; works beside a running daemon."""
    told = await inspect_run(data_dir, TENANT, [LANE], run, BudgetSettings())
    assert told is not None, f"run {run} is not in the database"
    async with await Store.open_to_read(data_dir) as store:
        return Left(
            run=run,
            told=told,
            journal=await store.tail(TENANT, LANE, run, after=-1),
            checkpoints=await store.checkpoints(TENANT, LANE, run),
            open_attempts=await store.open_attempts(TENANT, LANE),
            broken=await store.verify_chain(TENANT, LANE, run),
            outbox=await store.outbox_count(TENANT, LANE),
            inbound=await stored(link, "WK_IN", f"wk.v1.in.{TENANT}.{LANE}.{run}.*"),
            outbound=await stored(link, "WK_OUT", f"wk.v1.out.{TENANT}.{LANE}.{run}.*"),
        )


# --- the proof --------------------------------------------------------------------------------------------


def prove_whole(left: Left, published: Sequence[tuple[str, str]]) -> None:
    """Everything that must hold after any sequence of crashes. ``published``: (channel, id) of the input."""
    assert left.outbox == 0
    assert left.open_attempts == []
    prove_journal(left, published)
    prove_coverage(left)
    prove_attempts(left)
    prove_output(left)
    prove_announced(left)


def prove_journal(left: Left, published: Sequence[tuple[str, str]]) -> None:
    """Each event once, without holes, and a hash chain that is that of the stream."""
    assert left.broken is None
    assert [entry.version for entry in left.journal] == list(range(1, len(left.journal) + 1))
    numbered = [entry for entry in left.journal if entry.channel != "record"]
    assert [entry.position for entry in numbered] == list(range(1, len(numbered) + 1))
    names = Counter((entry.channel, entry.event_id) for entry in left.journal)
    assert [name for name, count in names.items() if count > 1] == []
    spoken = [(str(item.channel), decode_event(item.body, channel=item.channel).id) for item in numbered]
    assert [name for name in spoken if name in set(published)] == list(published)
    links = chain_of(left.inbound)
    assert [entry.chain.hex() for entry in left.journal] == links
    assert left.told["hash_chain"] == f"sha256:{links[-1]}"


def chain_of(inbound: Sequence[Stored]) -> list[str]:
    """The hash chain after each message of one run that counts, from the stream's own bytes."""
    link = bytes(32)
    seen: set[tuple[str, str]] = set()
    links: list[str] = []
    for message in inbound:
        channel: Any = message.kind
        try:
            event = decode_event(message.payload, channel=channel)
        except ProtocolError:
            continue
        key = (channel, identity(event))
        if key in seen:
            continue
        seen.add(key)
        link = hashlib.sha256(link + hashlib.sha256(message.payload).digest()).digest()
        links.append(link.hex())
    return links


def prove_coverage(left: Left) -> None:
    """Checkpoints are one chain whose ranges tile the history from its first position."""
    chain = {entry.position: entry.chain.hex() for entry in left.journal if entry.channel != "record"}
    applied = {item["checkpoint_id"]: item for item in left.receipts if item["outcome"] == "applied"}
    assert len(applied) == len(left.checkpoints)
    covered, parent = 0, None
    for version, row in enumerate(left.checkpoints, 1):
        assert (row.version, row.parent_id) == (version, parent)
        assert row.covers_through > covered
        assert row.range_digest == f"sha256:{chain[row.covers_through]}"
        receipt = applied[row.checkpoint_id]
        assert receipt["range"]["through"] == row.covers_through
        assert receipt["range"]["from"] in (covered + 1, 1)
        assert receipt.get("parent_checkpoint_id") == parent
        covered, parent = row.covers_through, row.checkpoint_id


def prove_attempts(left: Left) -> None:
    """Every attempt that was begun has one receipt, in the database and in the stream; no id came twice."""
    begun = [notice["attempt_id"] for notice in left.sent("notice", kind="compaction_started")]
    ended = [receipt["attempt_id"] for receipt in left.receipts]
    assert len(set(begun)) == len(begun)
    assert sorted(ended) == sorted(begun)
    assert sorted(receipt["attempt_id"] for receipt in left.sent("receipt")) == sorted(begun)
    for receipt in left.receipts:
        assert receipt["outcome"] != "failed" or receipt["reason"], receipt


def prove_output(left: Left) -> None:
    """No id stands on two messages, and epochs never go back."""
    for kind, name in (("packet", "packet_id"), ("receipt", "receipt_id"), ("notice", "notice_id")):
        ids = Counter(body[name] for body in left.sent(kind))
        assert [name for name, count in ids.items() if count > 1] == []
    epochs = [item.body["epoch"] for item in left.outbound]
    assert epochs == sorted(epochs)


def prove_announced(left: Left) -> None:
    """Each checkpoint was told of in one packet, in order."""
    announced = [packet["checkpoint"]["id"] for packet in left.sent("packet", reason="compacted")]
    assert announced == [row.checkpoint_id for row in left.checkpoints]


# --- comparing two runs of one input ------------------------------------------------------------------------


def comparable(left: Left) -> dict[str, Any]:
    """The ledger, with positions told as the message that stands there.

    Two replays of one input take packets up at other moments, so positions and versions differ.
    """
    at = {
        entry.position: f"{entry.channel}/{entry.event_id}"
        for entry in left.journal
        if entry.channel != "record"
    }
    items = {kind: [_placed(item, at) for item in rows] for kind, rows in left.ledger["items"].items()}
    head = {name: value for name, value in left.ledger["head"].items() if name not in _COUNTED}
    head["results"] = [(name, at.get(position, position)) for name, position in head["results"]]
    return {"items": items, "head": head}


_COUNTED = frozenset({"version", "position", "last_event_id", "context_changed_at", "context_known_at"})
_POSITIONS = frozenset({"position", "dispatched_at", "granted_at"})
_NUMBERS = frozenset({"approval_kinds_seq", "forbidden_kinds_seq"})


def _placed(item: Mapping[str, Any], at: Mapping[int, str]) -> dict[str, Any]:
    return {
        name: at.get(value, value) if name in _POSITIONS else value
        for name, value in item.items()
        if name not in _NUMBERS
    }
