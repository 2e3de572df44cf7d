"""Whether a candidate summary may become a checkpoint: deterministic checks against ledger and record.

A statement that fails is removed; an echo of the ledger that fails rejects the candidate, and so do too many
removals. No free prose is judged: the narrative is capped and never authoritative. What is accepted carries
the ledger's own states, so that a weaker echo cannot mislead anyone either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from protocol.codec import decode_struct, encode
from protocol.content import NextAction
from protocol.errors import ProtocolError
from protocol.identifiers import parse_ref
from protocol.redaction import holds_secret
from protocol.summary import Exchange, Statement, Summary
from sidecar.core.claims import (
    STATEMENT_CHARS,
    RawOutput,
    Rules,
    Sources,
    figures,
    looks_raw,
    statement_tokens,
    statements_of,
)
from sidecar.core.course import GAIN_FLOOR
from sidecar.core.echoes import Echoes, is_forbidden, ledger_action
from sidecar.core.excerpt import cut_at_sentence
from sidecar.core.state import Evidence, Ledger

MOST_REMOVED: Final = 0.20
"""Share of completed items, observations and inferences that may be removed."""
SUMMARY_BYTES: Final = 1_000_000
REFS_PER_STATEMENT: Final = 64


class Check(Struct, frozen=True, kw_only=True):
    """One invariant of a candidate."""

    code: str
    severity: Literal["critical", "major", "minor"]
    level: Literal["statement", "candidate"]
    meaning: str


def _checks(*rows: tuple[str, str, str, str]) -> dict[str, Check]:
    return {
        row[0]: msgspec.convert(dict(zip(Check.__struct_fields__, row, strict=True)), Check) for row in rows
    }


CHECKS: Final[dict[str, Check]] = _checks(
    ("schema_invalid", "major", "candidate", "not the shape of a summary"),
    ("empty_summary", "major", "candidate", "no completed item, observation, inference or narrative"),
    ("unknown_reference", "major", "statement", "a ref that leads nowhere; in an echo it rejects"),
    ("unbacked_claim", "major", "statement", "a completed item or observation without a ref that resolves"),
    ("question_dropped", "critical", "candidate", "an open question is missing"),
    ("operation_dropped", "critical", "candidate", "an operation not finally settled is missing"),
    ("operation_promoted", "critical", "candidate", "an operation's state is claimed beyond the ledger's"),
    ("approval_promoted", "critical", "candidate", "an approval's state is claimed beyond the ledger's"),
    ("approval_dropped", "critical", "candidate", "a pending or granted approval is missing"),
    ("objective_changed", "critical", "candidate", "the objective is not the goal"),
    ("next_action_changed", "critical", "candidate", "the next action is not the ledger's"),
    (
        "constraint_contradicted",
        "critical",
        "candidate",
        "a statement or field contradicts an active constraint",
    ),
    ("contradiction_hidden", "major", "candidate", "a contradiction of the ledger is missing"),
    (
        "inference_as_observation",
        "major",
        "statement",
        "an observation that rests on inferred evidence alone",
    ),
    ("unsupported_figure", "major", "statement", "a figure, version, hash or path its refs do not hold"),
    ("raw_content", "minor", "statement", "content instead of a statement"),
    ("secret_in_summary", "critical", "statement", "what looks like a credential"),
    ("over_budget", "major", "candidate", "larger than its token limit"),
    ("no_gain", "major", "candidate", "what it replaces is hardly larger"),
    ("stale", "major", "candidate", "another checkpoint is newest"),
)
"""Every code of a candidate, in the order they are looked for."""


class Limits(Struct, frozen=True, kw_only=True):
    """Bounds of a candidate: tokens (bytes / 4) of statements and narrative, characters of the narrative."""

    max_tokens: int
    narrative_chars: int = 1_200


class Verdict(Struct, frozen=True, kw_only=True):
    """``summary`` is what may be committed if ``accepted``. ``removed``: statements, and a cut narrative."""

    accepted: bool
    summary: Summary
    violations: tuple[str, ...] = ()
    removed: int = 0
    echo: bool = False
    """The narrative is an assistant's text of the range: the summariser answered with an old reply."""


class Compared:
    """What a candidate has word for word in common with a range, which is taken in bit by bit and not kept."""

    def __init__(self, candidate: Summary, limits: Limits) -> None:
        statements = (item.text for item in statements_of(candidate) if len(item.text) <= STATEMENT_CHARS)
        narrative = cut_at_sentence(candidate.narrative, limits.narrative_chars)
        self.output = RawOutput([*statements, narrative])
        self.echo = False
        """Its narrative is the text of one of the assistant's messages."""
        self._words = candidate.narrative.split()

    @property
    def types(self) -> frozenset[str]:
        """Types of the messages that have to be taken in; all others make no difference."""
        messages = ["message"] if self._words else []
        return frozenset([*messages, *(["tool.returned"] if self.output.matters else [])])

    def take(self, items: Iterable[Exchange]) -> None:
        """Compare with these, as the summariser saw them."""
        for item in items:
            if item.type == "tool.returned" and self.output.matters:
                self.output.take(item.text)
            elif item.type == "message" and item.role == "assistant" and self._words:
                self.echo = self.echo or item.text.split() == self._words


class SchemaInvalid(ValueError):
    """The bytes are no summary. What now: the attempt failed with reason ``invalid``."""

    code: Final = "schema_invalid"


def decode_summary(raw: bytes | msgspec.Raw) -> Summary:
    """The summary in an answer. Raises SchemaInvalid: wrong types, a bare text, a missing field."""
    try:
        return decode_struct(bytes(raw), Summary, max_bytes=SUMMARY_BYTES)
    except ProtocolError as error:
        raise SchemaInvalid(error.detail) from error


def validate(
    candidate: Summary,
    *,
    ledger: Ledger,
    protected: Mapping[str, Any],
    covered: Sequence[Exchange] | Compared,
    resolve: Callable[[str], str | None],
    previous: Summary | None,
    limits: Limits,
    tokens_before: int,
    tokens_after: int,
    parent_is_newest: bool = True,
) -> Verdict:
    """Check a candidate; the same arguments give the same verdict.

    ``ledger`` and ``protected`` (packet names) are of the handoff. ``covered``: the range as the summariser
    saw it, or what comparing this candidate with it gave. ``resolve``: the text a ref leads to, None if nowhere;
    asked once per ref. ``tokens_before``: what the range and the previous packet take now; ``tokens_after``: what
    takes their place. A statement that stood in ``previous`` was proven then; its figures are not looked up again.
    """
    if not isinstance(covered, Compared):
        shown, covered = covered, Compared(candidate, limits)
        covered.take(shown)
    return _Validation(ledger, protected, covered, resolve, previous).judge(
        candidate, limits, tokens_before, tokens_after, parent_is_newest
    )


class _Validation:
    """One candidate's checks and what they found."""

    def __init__(
        self,
        ledger: Ledger,
        protected: Mapping[str, Any],
        compared: Compared,
        resolve: Callable[[str], str | None],
        previous: Summary | None,
    ) -> None:
        self.ledger = ledger
        self.protected = protected
        self.rules = Rules(protected["task"]["constraints"])
        self.compared = compared
        self.output = compared.output
        self.proven = set() if previous is None else {_key(item) for item in statements_of(previous)}
        self.found: dict[str, None] = {}
        self._resolve = resolve
        self._texts: dict[str, str | None] = {}

    def judge(
        self,
        candidate: Summary,
        limits: Limits,
        tokens_before: int,
        tokens_after: int,
        parent_is_newest: bool,
    ) -> Verdict:
        echoes = Echoes(self.ledger, self.protected, self.text_of)
        found = echoes.check(candidate)
        self.found.update(dict.fromkeys(found))
        rejects = bool(found)
        total = sum(1 for _ in statements_of(candidate))
        completed = self._kept(candidate.completed, "completed")
        observations = self._kept(candidate.observations, "observations")
        inferences = self._kept(candidate.inferences, "inferences")
        removed = total - len(completed) - len(observations) - len(inferences)
        narrative = self._narrative(candidate.narrative, limits.narrative_chars)
        summary = msgspec.structs.replace(
            echoes.with_ledger_states(candidate),
            completed=completed,
            observations=observations,
            inferences=inferences,
            narrative=narrative,
        )
        rejects |= removed > MOST_REMOVED * total
        rejects |= self._contradictions(candidate, summary)
        if not (completed or observations or inferences or narrative.strip()):
            rejects |= self._add("empty_summary")
        if statement_tokens(summary) > limits.max_tokens:
            rejects |= self._add("over_budget")
        if tokens_after >= tokens_before or tokens_before - tokens_after < GAIN_FLOOR * tokens_before:
            rejects |= self._add("no_gain")
        if not parent_is_newest:
            rejects |= self._add("stale")
        echo = self.compared.echo
        return Verdict(
            accepted=not rejects and not echo,
            summary=summary,
            violations=tuple(code for code in CHECKS if code in self.found),
            removed=removed + (narrative != candidate.narrative),
            echo=echo,
        )

    def _add(self, code: str) -> bool:
        self.found[code] = None
        return True

    # --- statements

    def _kept(self, statements: tuple[Statement, ...], section: str) -> tuple[Statement, ...]:
        return tuple(statement for statement in statements if not self._faulty(statement, section))

    def _faulty(self, statement: Statement, section: str) -> bool:
        faults = False
        texts = [self.text_of(ref) for ref in statement.refs[:REFS_PER_STATEMENT]]
        if None in texts or len(statement.refs) > REFS_PER_STATEMENT:
            faults |= self._add("unknown_reference")
        known = [text for text in texts if text is not None]
        if section != "inferences" and not known:
            faults |= self._add("unbacked_claim")
        if section == "observations" and self._only_inferred(statement.refs):
            faults |= self._add("inference_as_observation")
        if looks_raw(statement.text):
            faults |= self._add("raw_content")
        if len(statement.text) > STATEMENT_CHARS:
            return faults
        if self.output.quoted_by(statement.text):
            faults |= self._add("raw_content")
        if holds_secret(statement.text):
            faults |= self._add("secret_in_summary")
        if not faults and _key(statement) not in self.proven and self._unsupported(statement, known):
            faults |= self._add("unsupported_figure")
        return faults or not statement.text.strip()

    def _unsupported(self, statement: Statement, texts: list[str]) -> bool:
        wanted = figures(statement.text)
        if not wanted:
            return False
        sources = Sources(texts)
        return any(not sources.hold(figure) for figure in wanted)

    def _only_inferred(self, refs: Sequence[str]) -> bool:
        """Whether all refs are evidence, and none of it observed."""
        kinds: list[bool] = []
        for ref in refs:
            if not ref.startswith("evidence:"):
                return False
            evidence: Evidence | None = self.ledger.get("evidence", ref.removeprefix("evidence:"))
            kinds.append(evidence is not None and evidence.kind == "inferred")
        return bool(kinds) and all(kinds)

    def text_of(self, ref: str) -> str | None:
        """The text a ref leads to, looked up once; an item of the ledger is known by the ledger itself."""
        if ref not in self._texts:
            self._texts[ref] = self._look_up(ref)
        return self._texts[ref]

    def _look_up(self, ref: str) -> str | None:
        try:
            kind, name, run = parse_ref(ref)
        except ValueError:
            return None
        text = self._resolve(ref)
        if (
            text is None
            and run is None
            and kind in ("decision", "question", "operation", "approval", "evidence")
        ):
            item = self.ledger.get(kind, name)
            text = None if item is None else encode(item).decode()
        return text

    # --- constraints, narrative

    def _contradictions(self, candidate: Summary, kept: Summary) -> bool:
        """Whether the kept statements, the narrative or the next action contradict a constraint."""
        bad = any(self._names_forbidden(statement) for statement in kept.completed)
        texts = [statement.text for statement in statements_of(kept)]
        bad |= any(self.rules.turned_around(text) for text in (*texts, kept.narrative))
        bad |= self._action_contradicts(candidate.next_action)
        return bad and self._add("constraint_contradicted")

    def _action_contradicts(self, action: NextAction | None) -> bool:
        """Only by what it adds to the ledger's own next action."""
        told = ledger_action(self.protected)
        if action is None:
            return False
        added = action.detail or ""
        if told is not None and told.detail == action.detail:
            added = ""
        if self.rules.names_forbidden(added) or self.rules.turned_around(added):
            return True
        if told is None or told.operation_id != action.operation_id:
            return is_forbidden(self.ledger, action.operation_id)
        return False

    def _names_forbidden(self, statement: Statement) -> bool:
        """By its words or an operation it rests on; that an operation did succeed may be said."""
        operations = [
            self.ledger.get("operation", ref.removeprefix("operation:"))
            for ref in statement.refs
            if ref.startswith("operation:")
        ]
        if any(operation is not None and operation.state == "succeeded" for operation in operations):
            return False
        if any(operation is not None and is_forbidden(self.ledger, operation.id) for operation in operations):
            return True
        return self.rules.names_forbidden(statement.text)

    def _narrative(self, text: str, limit: int) -> str:
        """Cut at a sentence; nothing where it holds a credential or raw content."""
        cut = cut_at_sentence(text, limit)
        if holds_secret(cut):
            self._add("secret_in_summary")
            return ""
        if self.output.quoted_by(cut):
            self._add("raw_content")
            return ""
        return cut


def _key(statement: Statement) -> tuple[str, tuple[str, ...]]:
    return statement.text, statement.refs
