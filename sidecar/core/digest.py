"""The deterministic summariser: picks and quotes, never writes. Needs no model.

The same request gives the same bytes. Each statement is a fact about the record ("ran …: error …") whose
quoted words are one short, cut, JSON-quoted line, with refs to the messages they stand in; old tool output
gets in no further than that. What would contradict a constraint, a figure the refs do not hold, or what looks
like a credential is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from protocol.codec import encode
from protocol.content import NextAction
from protocol.redaction import holds_secret
from protocol.summary import Statement, SummarizeRequest, Summary
from sidecar.core.claims import Rules, Sources, looks_raw
from sidecar.core.excerpt import clip, cut_at_sentence, plain
from sidecar.core.findings import Finding, Verb, announces, findings, short_ref, spoken
from sidecar.core.tokens import BYTES_PER_TOKEN

VERSION: Final = "2"

NARRATIVE_CHARS: Final = 480
TOGETHER: Final = 8
"""Files read, or commands run, without more to say about them share a statement."""

_OLD_SHARE = 0.5
"""Part of the room that statements of the previous summary may take while new ones still want it."""
_LIVE_OPERATIONS = frozenset({"not_started", "pending", "unknown"})
_LIVE_APPROVALS = frozenset({"pending", "granted"})

_OLD_RANK = {"completed": 45, "observations": 35, "inferences": 15}


class _Candidate(Struct, frozen=True, kw_only=True):
    """A statement and how much it is worth. ``order`` is its place in the summary."""

    section: str
    statement: Statement
    rank: int
    order: int
    old: bool

    @property
    def size(self) -> int:
        return len(encode(self.statement)) + 1


def digest(request: SummarizeRequest) -> Summary:
    """A summary of the request's exchanges on top of the previous one.

    Its statements and narrative take at most ``max_tokens`` tokens (bytes / 4); the echoes of the ledger are
    what they are. Linear in the request, but for sorting.
    """
    ledger = _ledger(request.ledger)
    rules = Rules(_list(_map(ledger, "task"), "constraints"))
    texts = {short_ref(item): item.text for item in request.exchanges}
    found = findings(request.exchanges)
    candidates = _old(request.previous, rules)
    candidates += _new(found, rules, texts, start=len(candidates))
    room = request.max_tokens * BYTES_PER_TOKEN
    narrative = _narrative(request, rules, max(0, room // 4))
    frame = len(encode(((), (), (), narrative)))
    chosen = _choose(candidates, room - frame)
    if narrative and any(_says(candidate, narrative) for candidate in chosen):
        narrative = ""
    if not chosen and not narrative:
        narrative = _clip_bytes("Nothing in this range needs a statement.", max(0, room - 16))
    return Summary(
        accepted_decisions=_refs("decision", _list(ledger, "decisions")),
        open_questions=_refs("question", _list(ledger, "questions")),
        completed=_section(chosen, "completed"),
        observations=_section(chosen, "observations"),
        inferences=_section(chosen, "inferences"),
        contradictions=tuple((str(pair[0]), str(pair[1])) for pair in _list(ledger, "contradictions")),
        evidence_refs=_refs("evidence", _list(ledger, "evidence")),
        pending_action_refs=(
            *_refs("operation", _live(ledger, "operations", _LIVE_OPERATIONS)),
            *_refs("approval", _live(ledger, "approvals", _LIVE_APPROVALS)),
        ),
        operations={
            str(item["id"]): str(item["state"]) for item in _live(ledger, "operations", _LIVE_OPERATIONS)
        },
        approvals={
            str(item["id"]): str(item["state"]) for item in _live(ledger, "approvals", _LIVE_APPROVALS)
        },
        objective=str(_map(ledger, "task").get("goal") or ""),
        next_action=_next_action(ledger),
        narrative=narrative,
    )


# --- statements ------------------------------------------------------------------------------------------


def _new(found: Sequence[Finding], rules: Rules, texts: Mapping[str, str], *, start: int) -> list[_Candidate]:
    candidates: list[_Candidate] = []
    for finding in _together(found):
        section = finding.section
        if section == "completed" and rules.names_forbidden(finding.text):
            section = "observations"
        if rules.contradicted(finding.text, done=section == "completed"):
            continue
        sources = Sources(texts[ref] for ref in finding.refs if ref in texts)
        if sources.unsupported(finding.text):
            continue
        candidates.append(
            _Candidate(
                section=section,
                statement=Statement(text=finding.text, refs=finding.refs),
                rank=finding.rank,
                order=start + len(candidates),
                old=False,
            )
        )
    return candidates


def _together(found: Sequence[Finding]) -> list[Finding]:
    """Files read and commands run with nothing more to say, several to a statement, at the place of the last."""
    out: list[tuple[int, Finding]] = []
    waiting: dict[str, list[tuple[int, Finding]]] = {}
    for index, finding in enumerate(found):
        if finding.alike is None:
            out.append((index, finding))
            continue
        row = waiting.setdefault(finding.alike.verb, [])
        row.append((index, finding))
        if len(row) == TOGETHER:
            out.append((index, _shared([item for _, item in row])))
            row.clear()
    out += ((row[-1][0], _shared([item for _, item in row])) for row in waiting.values() if row)
    return [finding for _, finding in sorted(out, key=lambda pair: pair[0])]


_SHARED: Final[dict[Verb, tuple[str, str]]] = {
    "read": ("read ", ""),
    "ran": ("ran ", ": each ok"),
    "searched": ("searched for ", ": each ok"),
}


def _shared(found: Sequence[Finding]) -> Finding:
    """One statement for all of them."""
    alike = [finding.alike for finding in found if finding.alike is not None]
    verb = alike[0].verb
    if len(found) == 1 and verb != "read":
        return found[0]
    begin, end = _SHARED[verb]
    names = ", ".join(json.dumps(item.subject, ensure_ascii=False) for item in alike)
    return Finding(
        section="observations",
        text=f"{begin}{names}{end}",
        refs=tuple(dict.fromkeys(ref for item in alike for ref in item.refs)),
        rank=max(finding.rank for finding in found),
    )


def _old(previous: Summary | None, rules: Rules) -> list[_Candidate]:
    if previous is None:
        return []
    candidates: list[_Candidate] = []
    for section, rank in _OLD_RANK.items():
        statements: tuple[Statement, ...] = getattr(previous, section)
        for statement in statements:
            if rules.contradicted(statement.text, done=section == "completed"):
                continue
            if not statement.refs:
                continue
            candidates.append(
                _Candidate(section=section, statement=statement, rank=rank, order=len(candidates), old=True)
            )
    return candidates


def _unfit(text: str) -> bool:
    return looks_raw(text) or holds_secret(text)


def _choose(candidates: Sequence[_Candidate], room: int) -> list[_Candidate]:
    """The worthiest that fit, newest first among equals; a text said again counts once, at its newest place.
    Whether a text may be said at all is looked at where there is room for it: that is the dearest question.

    Old statements get no more than their share before the new ones had theirs: they thin out by layers.
    """
    newest: dict[tuple[str, str], _Candidate] = {}
    for candidate in candidates:
        newest[candidate.section, candidate.statement.text] = candidate
    ranked = sorted(newest.values(), key=lambda candidate: (-candidate.rank, -candidate.order))
    chosen: list[_Candidate] = []
    left = room
    share = int(room * _OLD_SHARE)
    waiting: list[_Candidate] = []
    for candidate in ranked:
        size = candidate.size
        if candidate.old and size > share:
            waiting.append(candidate)
        elif size <= left and not _unfit(candidate.statement.text):
            chosen.append(candidate)
            left -= size
            if candidate.old:
                share -= size
    for candidate in waiting:
        if candidate.size <= left and not _unfit(candidate.statement.text):
            chosen.append(candidate)
            left -= candidate.size
    return sorted(chosen, key=lambda candidate: candidate.order)


def _says(candidate: _Candidate, narrative: str) -> bool:
    """Whether a statement quotes the same words already."""
    return candidate.section == "inferences" and candidate.statement.text.endswith(
        narrative.partition(": ")[2][:-1]
    )


def _section(chosen: Iterable[_Candidate], section: str) -> tuple[Statement, ...]:
    return tuple(candidate.statement for candidate in chosen if candidate.section == section)


def _narrative(request: SummarizeRequest, rules: Rules, room: int) -> str:
    """Where the conversation stood: what the agent last said, in its first sentences."""
    sentences: list[str] = []
    spoke = [item for item in request.exchanges if item.role == "assistant" and item.text.strip()]
    last = next((item for item in reversed(spoke) if not announces(item.text)), spoke[-1] if spoke else None)
    label = "The agent last wrote"
    if last is None:
        label = "The user last wrote"
        last = next((item for item in reversed(request.exchanges) if item.role == "user"), None)
    quote = spoken(last.text, NARRATIVE_CHARS - len(label) - 8) if last is not None else ""
    if quote:
        sentences.append(f"{label}: {json.dumps(quote, ensure_ascii=False)}.")
    if not sentences and request.previous is not None:
        sentences.append(cut_at_sentence(plain(request.previous.narrative), NARRATIVE_CHARS))
    kept = [
        sentence
        for sentence in sentences
        if sentence and not _unfit(sentence) and not rules.turned_around(sentence)
    ]
    while kept and len(encode(" ".join(kept))) > room:
        kept.pop(0)
    return clip(" ".join(kept), NARRATIVE_CHARS)


def _clip_bytes(text: str, size: int) -> str:
    return text.encode()[:size].decode("ascii", "ignore")


# --- echoes of the ledger --------------------------------------------------------------------------------


def _ledger(raw: msgspec.Raw) -> Mapping[str, Any]:
    value = msgspec.json.decode(raw) if bytes(raw) else {}
    return value if isinstance(value, dict) else {}


def _map(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name)
    return value if isinstance(value, dict) else {}


def _list(fields: Mapping[str, Any], name: str) -> list[Any]:
    value = fields.get(name)
    return value if isinstance(value, list) else []


def _live(ledger: Mapping[str, Any], name: str, states: frozenset[str]) -> list[Any]:
    return [item for item in _list(ledger, name) if item.get("state") in states]


def _refs(kind: str, items: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(f"{kind}:{item['id']}" for item in items)


def _next_action(ledger: Mapping[str, Any]) -> NextAction | None:
    action = _map(ledger, "progress").get("next_action")
    if not isinstance(action, dict) or "verb" not in action:
        return None
    return NextAction(verb=action["verb"], operation_id=action.get("operation_id"))
