"""What counts as a secret in a text, and where it stands. Nothing is replaced here (``protocol.redaction``).

Two kinds of evidence: keys that show by their form whose they are, and values that a name gives away
(``password=…``). Every search runs in time linear in the text, whatever the text or a configured pattern is;
no secret, nor its length, ever leaves this module in a name or an error.
"""

from __future__ import annotations

import base64
import binascii
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import re2  # type: ignore[import-untyped]

from protocol.named_values import (
    BYTES,
    DIGIT,
    HINT,
    LETTER,
    MARK,
    PLACEHOLDER,
    SPACE,
    WORDS,
    Found,
    find_named,
    is_strong,
)


class Form(NamedTuple):
    """Keys told by their form. Group 1, where there is one, is the secret. ``hint`` is found in every message
    that holds one, however its JSON is escaped, as long as letters, digits and ``-_:./`` are not."""

    kind: str
    hint: str
    pattern: str


_LINE: Final = r"(?:[\s\"'+,>|]|\\+[nrt\"])"
_LABEL: Final = r"(?:[A-Z0-9]+ ){0,4}PRIVATE KEY(?: BLOCK)?"

FORMS: Final = (
    Form(
        "private_key",
        r"-BEGIN [A-Z0-9 ]*PRIVATE KEY",
        rf"-----BEGIN {_LABEL}-----{_LINE}*(?:[A-Z][A-Za-z-]{{2,20}}: [^\n\\]{{0,100}}{_LINE}+){{0,6}}{_LINE}*"
        rf"[A-Za-z0-9+/=]{{16,}}(?:{_LINE}+[A-Za-z0-9+/=]{{16,}})*"
        rf"(?:{_LINE}*[A-Za-z0-9+/=]{{0,80}}{_LINE}*(?:=[A-Za-z0-9+/]{{4}}{_LINE}*)?-----END {_LABEL}-----)?",
    ),
    Form("private_key", r"AGE-SECRET-KEY-1", r"\bAGE-SECRET-KEY-1[A-Z0-9]{20,}"),
    # A transcript may have cut it off after the claims.
    Form(
        "jwt",
        r"eyJ[\w-]{8,}\.",
        r"\beyJ[\w-]{8,}\.(?:eyJ[\w-]{4,}(?:\.[\w-]*)?|[\w-]{8,}(?:\.[\w-]*){1,3})",
    ),
    Form("anthropic_key", r"sk-ant-", r"\bsk-ant-[A-Za-z0-9_-]{16,}"),
    Form("openai_key", r"sk-[\w-]{12}", r"\bsk-[A-Za-z0-9_-]{16,}"),
    Form("stripe_key", r"[rsp]k_(?:live|test)_", r"\b[rsp]k_(?:live|test)_[A-Za-z0-9]{16,}"),
    Form("stripe_key", r"whsec_", r"\bwhsec_[A-Za-z0-9+/=]{20,}"),
    Form("github_token", r"gh[pousr]_|github_pat_", r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,})"),
    Form(
        "gitlab_token", r"gl[a-z]{2,5}-", r"\bgl(?:pat|ptt|dt|rt|cbt|soat|agent|oas|ft|imt|ffct)-[\w-]{16,}"
    ),
    Form("aws_key", r"A[KSBC](?:IA|CA)", r"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b"),
    Form(
        "google_key",
        r"AIza|ya29\.|GOCSPX-",
        r"\b(?:AIza[\w-]{30,}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,})",
    ),
    Form(
        "azure_key",
        r"AccountKey=|SharedAccessKey=",
        r"\b(?:AccountKey|SharedAccessKey)=([A-Za-z0-9+/]{40,}={0,2})",
    ),
    Form(
        "slack_token",
        r"xox[abeoprs]|xapp-|hooks\.slack\.",
        r"\b(?:xox[abeoprs]-[\w-]{10,}|xapp-[\w-]{20,}|hooks\.slack\.com/[a-z]+/([\w/-]{20,}))",
    ),
    Form(
        "discord_token",
        r"/api/webhooks/|\.[\w-]{6}\.[\w-]{27}",
        r"\b(?:discord(?:app)?\.com/api/webhooks/([0-9]+/[\w-]{30,})|[MNO][\w-]{22,27}\.[\w-]{6}\.[\w-]{27,40})",
    ),
    Form("telegram_token", r"[0-9]{8}:[\w-]{34}", r"\b[0-9]{8,10}:[A-Za-z0-9_-]{35}\b"),
    Form("npm_token", r"npm_", r"\bnpm_[A-Za-z0-9]{30,}"),
    Form("pypi_token", r"pypi-", r"\bpypi-[A-Za-z0-9_-]{30,}"),
    Form("huggingface_token", r"hf_[A-Za-z0-9]{8}", r"\bhf_[A-Za-z0-9]{30,}"),
    Form("sendgrid_key", r"SG\.", r"\bSG\.[\w-]{16,}\.[\w-]{16,}"),
    Form("twilio_key", r"SK[0-9a-f]{8}", r"\bSK[0-9a-f]{32}\b"),
    Form("nats_seed", r"S[A-Z][A-Z2-7]{50}", r"\bS[ANCOUX][A-Z2-7]{56}\b"),
    Form(
        "provider_key",
        r"do[opr]_v1_|shp(?:at|ca|pa|ss)_|dapi[0-9a-f]{8}|hv[sbr]\.|dckr_pat_|gsk_|r8_|pplx-|xai-|lin_api_|ntn_"
        r"|gls?[ac]_|NRAK-|sntry[su]_|sbp_|PMAK-|rubygems_|sq0|dp\.[a-z]{2}\.|key-[0-9a-f]{8}|[0-9a-f]{8}-us[0-9]"
        r"|atlasv1|EAACEdEose",
        r"\b(?:do[opr]_v1_[0-9a-f]{40,}|shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}|dapi[0-9a-f]{32}|hv[sbr]\.[\w-]{20,}"
        r"|dckr_(?:pat|oat)_[\w-]{20,}|gsk_[A-Za-z0-9]{40,}|r8_[A-Za-z0-9]{30,}|pplx-[A-Za-z0-9]{32,}"
        r"|xai-[A-Za-z0-9]{40,}|lin_api_[A-Za-z0-9]{32,}|ntn_[A-Za-z0-9]{40,}|glsa_\w{32,}|glc_[A-Za-z0-9+/=]{32,}"
        r"|NRAK-[A-Z0-9]{24,}|sntry[su]_[\w=+/]{40,}|sbp_[0-9a-f]{40}|PMAK-[0-9a-f-]{40,}|rubygems_[0-9a-f]{40,}"
        r"|sq0[a-z]{3}-[\w-]{22,}|dp\.(?:pt|st|ct|sa)\.[A-Za-z0-9]{40,}|key-[0-9a-f]{32}\b|[0-9a-f]{32}-us[0-9]{1,2}\b"
        r"|[A-Za-z0-9]{14}\.atlasv1\.[\w-]{40,}|EAACEdEose0cBA[A-Za-z0-9]+)",
    ),
    Form("basic_auth", r"(?i:basic)(?:\s|\\)", rf"(?i)\bbasic{SPACE}+([A-Za-z0-9+/]{{6,}}={{0,2}})"),
    Form(
        "bearer",
        r"(?i:bearer)(?:\s|\\)|(?i:authorization)[\\\"' \t]*[:=]",
        rf"(?i)\bbearer{SPACE}+([A-Za-z0-9+/_.~-]{{8,}}=*)",
    ),
    Form(
        "bearer",
        r"(?i:authorization)[\\\"' \t]*[:=]",
        rf"(?i)\bauthorization\\*[\"']?{SPACE}*[:=]{SPACE}*\\*[\"']?(?:[A-Za-z0-9-]{{1,24}}{SPACE}+)?"
        r"([A-Za-z0-9+/_.~-]{8,}=*)",
    ),
    Form(
        "url_password",
        r"://[^\s/\"'<>]*@",
        r"(?i)[a-z][a-z0-9+.-]{0,30}://[^\s/:@\"'<>]{0,200}:([^\s/\"'<>]{1,300})@",
    ),
    Form("url_token", r"://[\w-]{20,}@", r"(?i)[a-z][a-z0-9+.-]{0,30}://([\w-]{20,300})@"),
)

# An escaped letter, or an escaped slash: the hints cannot be trusted then.
_ESCAPED: Final = r"\\u00[2-7]|\\/"

KINDS: Final = (
    *dict.fromkeys(form.kind for form in FORMS),
    "password",
    "secret",
    "token",
    "api_key",
    "custom",
)
"""Every kind there is. ``custom`` stands for all configured patterns together where kinds are counted."""


class Pattern(NamedTuple):
    """A pattern ready to search; group 1, where it has one, is the secret."""

    kind: str
    regex: Any
    group: int


def compiled(kind: str, pattern: str) -> Pattern:
    """A pattern of RE2 syntax over UTF-8 text, which is searched in linear time whatever it says.

    Raises ValueError, in words, for what RE2 cannot read or what matches an empty text.
    """
    options = re2.Options()
    options.log_errors = False
    options.max_mem = 8 << 20
    try:
        regex = re2.compile(pattern.encode(), options)
    except re2.error as error:
        shown = error.args[0] if error.args else "not readable"
        raise ValueError(shown.decode(errors="replace") if isinstance(shown, bytes) else str(shown)) from None
    if regex.search(b"") is not None:
        raise ValueError("it matches an empty text")
    return Pattern(kind, regex, min(1, regex.groups))


def _hints() -> Any:
    hints = re2.Set.SearchSet(BYTES)
    for hint in (*(form.hint for form in FORMS), HINT, _ESCAPED):
        hints.Add(hint.encode())
    hints.Compile()
    return hints


_HINTS: Final = _hints()
_TOGETHER: Final = 16
MOST_FOUND: Final = 5_000
"""Secrets that one detector finds in one text before all the rest goes: finding is what costs."""
_FORMS: Final = tuple(
    Pattern(form.kind, regex := re2.compile(form.pattern.encode(), BYTES), min(1, regex.groups))
    for form in FORMS
)
_NAMED_NUMBER: Final = len(FORMS)
_ESCAPED_NUMBER: Final = len(FORMS) + 1
EVERY: Final = tuple(range(_NAMED_NUMBER + 1))
"""The numbers of all detectors there are."""


def hinted(payload: bytes) -> tuple[int, ...]:
    """Numbers of the detectors that may find something in the texts of a JSON message; () nearly always.

    One linear pass over the bytes as they are. What it leaves out certainly finds nothing.
    """
    numbers = _HINTS.Match(payload)
    if not numbers:
        return ()
    return EVERY if _ESCAPED_NUMBER in numbers else tuple(sorted(numbers))


def all_hinted(payloads: Sequence[bytes]) -> list[tuple[int, ...]]:
    """``hinted`` of each. Several are looked at together: nearly always none of them holds anything, and each
    search hands the interpreter over to other threads and waits to get it back."""
    found: list[tuple[int, ...]] = []
    for first in range(0, len(payloads), _TOGETHER):
        group = payloads[first : first + _TOGETHER]
        if _HINTS.Match(b"\n".join(group)):
            found += [hinted(payload) for payload in group]
        else:
            found += [()] * len(group)
    return found


def find(text: bytes, numbers: tuple[int, ...] = EVERY, patterns: tuple[Pattern, ...] = ()) -> list[Found]:
    """The secrets in a text (UTF-8) by these detectors and patterns, in order and without overlap.

    Where two claim one place, the earlier detector has it. Marks of an earlier redaction are nobody's. Behind
    ``MOST_FOUND`` of one detector all the rest is one secret: such a text is nobody's message.
    """
    end = len(text)
    marks = [Found("", *mark.span()) for mark in MARK.finditer(text)] if b"[redacted" in text else []
    taken = marks
    for number in numbers:
        candidates = find_named(text) if number == _NAMED_NUMBER else _by_form(text, _FORMS[number])
        found = list(islice(candidates, MOST_FOUND))
        end = min(end, _rest(candidates, end))
        taken = _with(taken, found)
    for pattern in patterns:
        candidates = _by_form(text, pattern)
        found = list(islice(candidates, MOST_FOUND))
        end = min(end, _rest(candidates, end))
        taken = _with(taken, found)
    if end == len(text):
        return [item for item in taken if item.kind]
    # From there on all of it; what an earlier detector has there may begin before.
    end = min((item.start for item in taken if item.end > end), default=end)
    return [*(item for item in taken if item.kind and item.end <= end), Found("secret", end, len(text))]


def _rest(candidates: Iterator[Found], end: int) -> int:
    """Where the next one begins; ``end`` if there is none."""
    return next((item.start for item in candidates), end)


def _with(taken: list[Found], candidates: list[Found]) -> list[Found]:
    """What is taken, in order, and of the candidates those that overlap nothing of it."""
    starts = [item.start for item in taken]
    fresh = []
    for item in candidates:
        after = bisect_right(starts, item.start)
        free = item.start < item.end and not (after and taken[after - 1].end > item.start)
        if free and not (after < len(taken) and taken[after].start < item.end):
            fresh.append(item)
    return sorted(taken + fresh, key=_start) if fresh else taken


def _start(item: Found) -> int:
    return item.start


def _by_form(text: bytes, pattern: Pattern) -> Iterator[Found]:
    check = _CHECKS.get(pattern.kind)
    for match in pattern.regex.finditer(text):
        start, end = match.span(pattern.group)
        if start < 0:
            start, end = match.span()
        if check is None or check(text[start:end]):
            yield Found(pattern.kind, start, end)


# --- what a form alone does not show ------------------------------------------------------------------------


_DOTTED: Final = re.compile(rb"[A-Za-z_]\w{0,30}(?:\.[A-Za-z_]\w{0,30})+$")


def _is_bearer(value: bytes) -> bool:
    if PLACEHOLDER.match(value) is not None or value.lower() in WORDS:
        return False
    if _DOTTED.match(value) is not None and len(DIGIT.findall(value)) < 4:
        return False
    if DIGIT.search(value) is not None and LETTER.search(value) is not None:
        return True
    return len(value) >= 16 and value.isalpha()


def _is_basic(value: bytes) -> bool:
    bare = value.rstrip(b"=")
    try:
        plain = base64.b64decode(bare + b"=" * (-len(bare) % 4), validate=True)
    except binascii.Error:
        return False
    text = plain.decode(errors="replace")
    return ":" in text and text.isprintable() and "\ufffd" not in text


def _is_login(value: bytes) -> bool:
    return PLACEHOLDER.match(value) is None and MARK.search(value) is None


def _is_drawn(value: bytes) -> bool:
    """Prefixed keys in words (`sk-learn-pipeline-example`) are names of things."""
    if value.startswith((b"sk-ecdsa-", b"sk-ssh-")):
        return False
    return DIGIT.search(value) is not None or not re.search(rb"[a-z]{3,}-[a-z]{3,}-[a-z]", value)


_CHECKS: Final = {
    "bearer": _is_bearer,
    "basic_auth": _is_basic,
    "url_password": _is_login,
    "url_token": is_strong,
    "openai_key": _is_drawn,
    "pypi_token": _is_drawn,
}
