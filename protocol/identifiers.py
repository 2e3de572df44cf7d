"""Ids, subject tokens, digests and refs: the names of the wire.

Only the shape of names is checked here. Whether a name leads to something is the ledger's matter.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, NamedTuple, get_args

from msgspec import Meta

# ``$`` alone also matches before a trailing newline in Python; the look-ahead closes that and is valid ECMA.
ID_PATTERN: Final = r"^[A-Za-z0-9._:/@+=-]{1,128}$(?!\n)"
TOKEN_PATTERN: Final = r"^[A-Za-z0-9-][A-Za-z0-9_-]{0,127}$(?!\n)"
DIGEST_PATTERN: Final = r"^sha256:[0-9a-f]{64}$(?!\n)"

Id = Annotated[str, Meta(pattern=ID_PATTERN)]
"""Name of an event, call, operation, approval, …: 1 to 128 of ``A-Z a-z 0-9 . _ : / @ + = -``."""

Token = Annotated[str, Meta(pattern=TOKEN_PATTERN)]
"""Tenant, lane or run as it stands in a subject: 1 to 128 of ``A-Z a-z 0-9 _ -``, not starting with ``_``."""

Digest = Annotated[str, Meta(pattern=DIGEST_PATTERN)]
"""``sha256:`` and 64 lower-case hexadecimal digits."""

MAX_INTEGER: Final = 2**53 - 1
"""The largest integer every JSON reader keeps exact; bound of every count, position and sequence."""

RefKind = Literal[
    "event",
    "pos",
    "artifact",
    "evidence",
    "decision",
    "operation",
    "approval",
    "question",
    "constraint",
    "checkpoint",
    "sha256",
]
REF_KINDS: Final[frozenset[str]] = frozenset(get_args(RefKind))

_ID = re.compile(r"[A-Za-z0-9._:/@+=-]{1,128}")
_TOKEN = re.compile(r"[A-Za-z0-9-][A-Za-z0-9_-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_REF = re.compile(
    r"(?:run:(?P<run>[A-Za-z0-9-][A-Za-z0-9_-]{0,127})/)?"
    r"(?:(?P<kind>event|artifact|evidence|decision|operation|approval|question|constraint|checkpoint)"
    r":(?P<id>[A-Za-z0-9._:/@+=-]{1,128})"
    r"|pos:(?P<pos>[1-9][0-9]{0,15})"
    r"|sha256:(?P<hex>[0-9a-f]{64}))"
)


class Ref(NamedTuple):
    """A parsed ref. ``value`` is the text after the colon; ``run`` is the other run's token, None for own."""

    kind: RefKind
    value: str
    run: str | None = None

    @property
    def position(self) -> int:
        """The position a ``pos`` ref names. Raises ValueError for any other kind."""
        if self.kind != "pos":
            raise ValueError(f"a {self.kind} ref has no position")
        return int(self.value)

    def __str__(self) -> str:
        local = f"{self.kind}:{self.value}"
        return local if self.run is None else f"run:{self.run}/{local}"


def is_id(text: str) -> bool:
    """Whether the text is a well-formed id."""
    return _ID.fullmatch(text) is not None


def is_token(text: str) -> bool:
    """Whether the text may be a tenant, lane or run in a subject."""
    return _TOKEN.fullmatch(text) is not None


def is_digest(text: str) -> bool:
    """Whether the text is ``sha256:`` and 64 lower-case hexadecimal digits."""
    return _DIGEST.fullmatch(text) is not None


def parse_ref(ref: str) -> Ref:
    """Parse a ref of one of ``REF_KINDS``, own (``event:e-1``) or another run's (``run:r2/event:e-1``).

    Raises ValueError when malformed. Positions are 1 to 2**53 - 1, without leading zeros.
    """
    match = _REF.fullmatch(ref)
    if match is None:
        raise ValueError(f"not a ref: {ref[:160]!r}")
    run = match["run"]
    if match["pos"] is not None:
        if int(match["pos"]) > MAX_INTEGER:
            raise ValueError(f"position out of range: {ref[:160]!r}")
        return Ref("pos", match["pos"], run)
    if match["hex"] is not None:
        return Ref("sha256", match["hex"], run)
    return Ref(match["kind"], match["id"], run)  # type: ignore[arg-type]  # the pattern names only ref kinds


def is_ref(text: str) -> bool:
    """Whether ``parse_ref`` accepts the text."""
    try:
        parse_ref(text)
    except ValueError:
        return False
    return True
