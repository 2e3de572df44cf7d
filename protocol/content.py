"""Values that events carry and packets repeat: content parts, contract pieces, plan, next action.

Frozen and made from the inside out, so that none can be part of a cycle: the garbage collector has no business
with them. Only shapes. An absent list (None) differs from an empty one wherever the field's docstring says so.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from protocol.identifiers import MAX_INTEGER, Digest, Id

Count = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
"""A number of things, 0 to 2**53 - 1."""
Ordinal = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
"""A position or sequence, 1 to 2**53 - 1."""
Number = Annotated[int, Meta(ge=1, le=MAX_INTEGER - 1)]
"""A number of a session, 1 to 2**53 - 2: the one after it is kept, and must have a place in every JSON too."""

Source = Literal["user", "policy", "operator", "agent"]
PlanState = Literal["todo", "doing", "done", "dropped"]
Scalar = str | int | float | bool | None

VERB_PATTERN: Final = (
    r"^(inspect|edit|test|call|ask_human|wait|reconcile|finish|stop|x-[A-Za-z0-9][A-Za-z0-9._-]{0,63})$(?!\n)"
)
NextVerb = Annotated[str, Meta(pattern=VERB_PATTERN)]


class Part(Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True, tag_field="kind"):
    """One part of a message's content."""


class TextPart(Part, frozen=True, kw_only=True, tag="text"):
    """Plain text."""

    text: str


class ReasoningPart(Part, frozen=True, kw_only=True, tag="reasoning"):
    """A model's reasoning. ``text`` is absent where the provider hides it; ``tokens`` counts it then."""

    text: str | None = None
    tokens: Count | None = None


class ImagePart(Part, frozen=True, kw_only=True, tag="image"):
    """An image, by its cost in tokens and the artifact that holds it."""

    media_type: str
    tokens: Count | None = None
    artifact_id: Id | None = None


class DataPart(Part, frozen=True, kw_only=True, tag="data"):
    """Any JSON value, kept as the bytes received."""

    value: Raw


ContentPart = TextPart | ReasoningPart | ImagePart | DataPart
Content = str | tuple[ContentPart, ...]

MAX_BLOB_BYTES: Final = 32 * 1024 * 1024
"""Of a text that is kept beside its message."""


class ContentBlob(Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """The whole of a content too large for a message, as one text: UTF-8 in an object of ``WK_CONTENT``.

    The object's name follows from the run and ``sha256`` (``subjects.content_object``), so that a message can
    name no other run's. ``bytes`` is its size.
    """

    sha256: Digest
    bytes: Annotated[int, Meta(ge=1, le=MAX_BLOB_BYTES)]
    media_type: str | None = None


class Model(Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """A model and its window, both limits in tokens."""

    name: str
    context_window: Ordinal
    max_output_tokens: Count | None = None


class Scope(Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """For whom and with what a run may act. An absent list allows everything, an empty one nothing; globs."""

    actor: str | None = None
    purpose: str | None = None
    channels: tuple[str, ...] | None = None
    tools: tuple[str, ...] | None = None
    kinds: tuple[str, ...] | None = None


class InputRef(Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """One pinned input of the task."""

    name: str
    version: str | None = None
    digest: Digest | None = None


class Forbids(Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """What a constraint forbids: it matches when every list given matches by any entry. Globs."""

    kinds: tuple[str, ...] | None = None
    tools: tuple[str, ...] | None = None
    targets: tuple[str, ...] | None = None


class Constraint(Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """A constraint as ``run.started`` brings it."""

    id: Id
    text: str
    source: Source
    forbids: Forbids | None = None


class CompletedStep(Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """A step said to be done, and what shows it."""

    text: str
    refs: tuple[str, ...] = ()


class PlanItem(Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """One item of the plan."""

    id: Id
    text: str
    state: PlanState


class Focus(Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """What the agent is working on. An absent list is unsaid."""

    files: tuple[str, ...] | None = None
    hypothesis: str | None = None
    remaining: tuple[str, ...] | None = None


class NextAction(Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """What the agent does next. ``verb`` is one of the listed verbs or ``x-<name>``."""

    verb: NextVerb
    detail: str | None = None
    operation_id: Id | None = None


class Blocker(Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """What the agent says stands in its way."""

    id: Id
    text: str


class RejectedAlternative(Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """What a decision turned down, and why."""

    alternative: str
    reason: str


class RedactionPattern(Struct, frozen=True, gc=False, kw_only=True):
    """One more form of secrets: an RE2 pattern; group 1, if it has one, is the secret."""

    name: str
    regex: str


class RedactionRules(Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """What is redacted beyond the built-in forms, and values that are never. They decide what the fold reads."""

    enabled: bool = True
    patterns: tuple[RedactionPattern, ...] = ()
    allow: tuple[str, ...] = ()


class Settings(Struct, frozen=True, gc=False, kw_only=True):
    """The settings the fold uses, one set per lane. Kinds are globs.

    ``reconcile_by_authority_kinds``: operations of these kinds are reconciled by an authority's word only.
    ``redaction`` absent: the built-in forms. It is here because the fold reads redacted texts.
    """

    authority_required: bool = True
    approval_kinds: tuple[str, ...] = ()
    forbidden_kinds: tuple[str, ...] = ()
    reconcile_by_authority_kinds: tuple[str, ...] = ()
    redaction: RedactionRules | UnsetType = UNSET
