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
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import re2  # type: ignore[import-untyped]

LONGEST_VALUE: Final = 512
"""So many bytes of a value that a name gives away are judged; what goes is the whole of it."""
MOST_JUDGED: Final = 5_000
"""Beyond so many named values in one text each of them goes unjudged: judging is what costs."""

_BYTES: Final = re2.Options()
_BYTES.encoding = re2.Options.Encoding.LATIN1
_BYTES.log_errors = False
_BYTES.max_mem = 32 << 20


class Found(NamedTuple):
    """A secret in a text: its kind, and the span (bytes) that has to go."""

    kind: str
    start: int
    end: int


class Form(NamedTuple):
    """Keys told by their form. Group 1, where there is one, is the secret. ``hint`` is found in every message
    that holds one, however its JSON is escaped, as long as letters, digits and ``-_:./`` are not."""

    kind: str
    hint: str
    pattern: str


_SPACE: Final = r"(?:[ \t]|\\+[nrt])"
_GAP: Final = r"(?:\s|\\+[nrt])*"
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
    Form("jwt", r"eyJ[\w-]{8,}\.", r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*){1,3}"),
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
    Form("huggingface_token", r"hf_[A-Za-z]{6}", r"\bhf_[A-Za-z0-9]{30,}"),
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
    Form(
        "bearer",
        r"(?i:bearer)(?:\s|\\)|(?i:authorization)[\\\"' \t]*[:=]",
        rf"(?i)\bbearer{_SPACE}+([A-Za-z0-9+/_.~-]{{8,}}=*)",
    ),
    Form(
        "bearer",
        r"(?i:authorization)[\\\"' \t]*[:=]",
        rf"(?i)\bauthorization\\*[\"']?{_SPACE}*[:=]{_SPACE}*\\*[\"']?(?:[A-Za-z-]{{1,20}}{_SPACE}+)?"
        r"([A-Za-z0-9+/_.~-]{8,}=*)",
    ),
    Form("basic_auth", r"(?i:basic)(?:\s|\\)", rf"(?i)\bbasic{_SPACE}+([A-Za-z0-9+/]{{6,}}={{0,2}})"),
    Form(
        "url_password",
        r"://[^\s/\"'<>]*@",
        r"(?i)[a-z][a-z0-9+.-]{0,30}://[^\s/:@\"'<>]{0,200}:([^\s/\"'<>]{1,300})@",
    ),
    Form("url_token", r"://[\w-]{20,}@", r"(?i)[a-z][a-z0-9+.-]{0,30}://([\w-]{20,300})@"),
)

_NAMES: Final = (
    r"secret|passw(?:or)?d|passphrase|\bpwd|token|api[_-]?key|access[_-]?key|auth[_-]?key|private[_-]?key"
    r"|signing[_-]?key|encryption[_-]?key|credentials?"
)
# A bare number after a token's name says nothing: `max_tokens: 4096` must cost nothing.
_PLAIN_NAMES: Final = _NAMES.replace(r"\b", "")
_NAMED_HINT: Final = (
    rf"(?i)(?:passw(?:or)?d|passphrase|pwd|secret|(?:api|access|auth|private|signing|encryption)[_-]?key"
    rf"|credentials?)[\w.-]{{0,40}}\\*[\"'`]?\]?{_GAP}[:=>]"
    rf"|token[\w.-]{{0,40}}\\*[\"'`]?\]?{_GAP}[:=>][=>]?{_GAP}\\*[\"'`]?[0-9.,;)}}\]]*"
    rf"(?:[^\s0-9.,;)}}\]\"'`\\]|\\+[^nrt\"\\\s])"
    rf"|--[\w-]{{0,40}}(?:{_PLAIN_NAMES})[\w.-]{{0,40}}{_SPACE}+[^\s-]"
    rf"|\"(?:name|key)\"\s*:\s*\"[\w.-]{{0,60}}(?:{_PLAIN_NAMES})"
)
_NAMED: Final = re2.compile(
    rf"(?i)(--[\w-]{{0,40}})?({_NAMES})([\w.-]{{0,40}})"
    rf"(?:\\*[\"'`]?\]?{_SPACE}*(:=|=>|[:=>]){_SPACE}*|{_SPACE}+)".encode(),
    _BYTES,
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

_MARK: Final = re.compile(rb"\[redacted(?::[a-z0-9_]{1,40})?\]")
_QUOTE: Final = re.compile(rb"[bBfFrRuU]{0,2}(\\*)([\"'`])")
_BARE: Final = re.compile(rb"[^\s]{1,%d}" % LONGEST_VALUE)
_RUN: Final = re.compile(rb"[^\s]*")
_NEXT_PAIR: Final = re.compile(rb"[,;&][\"']?[\w.-]{1,60}[\"']?\s?[:=]|\\+[nrt]|</|\\*\"")
_ENDINGS: Final = b"\"'`,;)}]>\\."
_PLACEHOLDER: Final = re.compile(
    rb"[$<{%\[(]|\*\*|\.\.|(?:your|my|some|the|a|example)[-_ ]"
    rb"|(?:x{3,}|\*+|\.+|-+|_+|#+|\?+|0+)$|redacted|placeholder|change[-_]?me\b|(?:\xe2\x80[\xa2\xa6])+",
    re.IGNORECASE,
)
_FILLED_IN: Final = (b"${", b"{{", b"...", b"[redacted")
_WORDS: Final = frozenset(
    b"none null nil true false yes no undefined unset empty missing required optional hidden masked invalid"
    b" expired valid default unknown value string str text int integer number float bool boolean any object"
    b" bytes array list dict map optional env environment vault keychain prompt file stdin auto generated"
    b" bearer basic oauth oauth2 jwt sha256 sha512 md5 utf8 base64 secret password passwd token apikey api_key"
    b" credentials public private read write admin user test example and or not is self this".split()
)
_NO_VALUE: Final = re.compile(
    rb"s?[_.-]*(?:count|usage|used|limit|length|len\b|types?\b|names?\b|files?\b|paths?\b|dir\b|url|uri|endpoint"
    rb"|ids?\b|key_?ref|refs?\b|expir|ttl|age\b|at\b|size|budget|iz|ise|policy|policies|field|version|scope|hint"
    rb"|reset|required|enabled|min|max|per\b|per_|index|position|class|style|colou?r|estimate|total|remaining"
    rb"|window|rate|manager|provider|service|store|error|status|response|request|valid|label|format|list|pattern"
    rb"|rule|cost|price|input|output|cache|in\b|out\b|num|stream|saved|before|after|strength|form|page|option)",
    re.IGNORECASE,
)
# `secrets.py:12: …` is a line of a search, not an assignment.
_FILE: Final = re.compile(
    rb"\.(?:py|pyi|js|jsx|ts|tsx|go|rs|java|kt|rb|php|cs|c|h|cc|cpp|hpp|swift|sh|md|rst|txt|json|ya?ml|toml|cfg|ini"
    rb"|html?|css|sql|lock|log|xml|proto|tf|env)$",
    re.IGNORECASE,
)
_KEYWORD_FIRST: Final = re.compile(
    rb"[\w.-]{0,20}(?:secret|passw|token|api[_-]?key|credential)", re.IGNORECASE
)
_EXPRESSION: Final = re.compile(
    rb"[A-Za-z_$][\w$]*(?:\.[A-Za-z_$][\w$]*)+[!?;,)]*$|[\w.$]*[(\[]|&|[=~:>|]|\\"
)
_CODE: Final = re.compile(
    rb"(?:self|this|os|process|env|config|settings|args|options|req|request|ctx|params|props|data)\."
)
_PATH: Final = re.compile(rb"(?:~|\.{1,2})?/|[A-Za-z]:\\|[a-z][a-z0-9+.-]*://")
_WORDLIKE: Final = re.compile(rb"[A-Za-z]+(?:[._-][A-Za-z]+)*$|[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+$")
_STRONG: Final = re.compile(rb"[A-Za-z0-9+/=_.~:-]{16,}$")
_DIGIT: Final = re.compile(rb"[0-9]")
_LETTER: Final = re.compile(rb"[A-Za-z]")
_SPECIAL: Final = re.compile(rb"[!@#$%^&*+/=~?]")


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
    hints = re2.Set.SearchSet(_BYTES)
    for hint in (*(form.hint for form in FORMS), _NAMED_HINT, _ESCAPED):
        hints.Add(hint.encode())
    hints.Compile()
    return hints


_HINTS: Final = _hints()
_FORMS: Final = tuple(
    Pattern(form.kind, regex := re2.compile(form.pattern.encode(), _BYTES), min(1, regex.groups))
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


def find(text: bytes, numbers: tuple[int, ...] = EVERY, patterns: tuple[Pattern, ...] = ()) -> list[Found]:
    """The secrets in a text (UTF-8) by these detectors and patterns, in order and without overlap.

    Where two claim one place, the earlier detector has it. Marks of an earlier redaction are nobody's.
    """
    marks = [Found("", *mark.span()) for mark in _MARK.finditer(text)] if b"[redacted" in text else []
    taken = marks
    for number in numbers:
        candidates = _named(text) if number == _NAMED_NUMBER else _by_form(text, _FORMS[number])
        taken = _with(taken, candidates)
    for pattern in patterns:
        taken = _with(taken, _by_form(text, pattern))
    return [item for item in taken if item.kind]


def _with(taken: list[Found], candidates: Iterator[Found]) -> list[Found]:
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


# --- values that a name gives away --------------------------------------------------------------------------


def _named(text: bytes) -> Iterator[Found]:
    through = judged = 0
    for match in _NAMED.finditer(text):
        start = match.end()
        if start < through:
            continue
        flag, name, rest, sign = match.group(1), match.group(2), match.group(3), match.group(4)
        if sign is None and flag is None:
            continue
        value = _value(text, start, sign)
        if value is None:
            continue
        begin, end, quoted = value
        judged += 1
        if judged > MOST_JUDGED or is_value(name, rest, text[begin:end], quoted=quoted, sign=sign or b" "):
            if end - begin == LONGEST_VALUE or judged > MOST_JUDGED:
                end = _RUN.match(text, begin).end()  # type: ignore[union-attr]  # it may be empty
            through = end
            yield Found(kind_of(name), begin, end)


def _value(text: bytes, start: int, sign: bytes | None) -> tuple[int, int, bool] | None:
    """Where the value after a name begins and ends, and whether it stands in quotes."""
    opening = _QUOTE.match(text, start)
    if opening is not None:
        begin = opening.end()
        closing = text.find(opening[1] + opening[2], begin, begin + LONGEST_VALUE)
        line = text.find(b"\n", begin, begin + LONGEST_VALUE)
        if closing >= 0 and not 0 <= line < closing:
            return begin, closing, True
        start = begin
    if sign == b">":
        closing = text.find(b"</", start, start + LONGEST_VALUE)
        return (start, closing, True) if closing > start else None
    bare = _BARE.match(text, start)
    if bare is None:
        return None
    pair = _NEXT_PAIR.search(bare[0])
    if pair is None and len(bare[0]) == LONGEST_VALUE:
        return start, start + LONGEST_VALUE, False
    kept = bare[0] if pair is None else bare[0][: pair.start()]
    return start, start + len(kept.rstrip(_ENDINGS)), False


def kind_of(name: bytes) -> str:
    """The kind of a secret that this part of a name gives away."""
    word = name.lower()
    if word.startswith((b"pass", b"pwd")):
        return "password"
    if word.startswith(b"token"):
        return "token"
    return "api_key" if word.startswith((b"api", b"access", b"auth")) else "secret"


_NAME: Final = re.compile(rf"({_NAMES})([\w.-]{{0,40}})".encode(), re.IGNORECASE)


def named_secret(name: str, value: str) -> str | None:
    """The kind of secret that the value of this name (a key of a JSON object) is, None if it is none."""
    match = _NAME.search(name.encode())
    if match is None or not is_value(match[1], match[2], value.encode(), quoted=True, sign=b":"):
        return None
    return kind_of(match[1])


def named_number(name: str) -> str | None:
    """The kind of secret that a bare number under this name is: only passwords are numbers."""
    match = _NAME.search(name.encode())
    kind = None if match is None else kind_of(match[1])
    return kind if match is not None and kind == "password" and not match[2] else None


def is_value(name: bytes, rest: bytes, value: bytes, *, quoted: bool, sign: bytes) -> bool:
    """Whether a value reads as a secret and not as a word, a number, a path, an expression or a placeholder.

    ``name`` is the telling part of the name, ``rest`` what follows in it.
    """
    kind = kind_of(name)
    if len(value) < 4 or _PLACEHOLDER.match(value) is not None or value.lower() in _WORDS:
        return False
    if _NO_VALUE.match(rest) is not None or any(part in value for part in _FILLED_IN):
        return False
    if sign == b":" and not quoted and _FILE.search(rest) is not None:
        return False
    if any(space in value for space in b" \t\n"):
        return quoted and name.lower() == b"passphrase" and len(value) >= 12
    if _strong(value):
        return True
    if _PATH.match(value) is not None or (not quoted and _EXPRESSION.match(value) is not None):
        return False
    if _KEYWORD_FIRST.match(value) is not None or _CODE.match(value) is not None:
        return False
    digit = _DIGIT.search(value) is not None
    letter = _LETTER.search(value) is not None or any(byte > 127 for byte in value)
    if kind == "token":
        enough = 6 if quoted else 10
        return len(value) >= enough and digit and letter
    if not letter:
        return len(value) >= 6 and not rest and (quoted or sign == b"=")
    if _WORDLIKE.match(value) is None:
        return digit or _SPECIAL.search(value) is not None or len(value) >= 12
    if value.upper() == value and b"_" in value:
        return False
    shell = name.isupper() and sign == b"="
    one_word = value.isalpha()
    if kind == "password":
        return one_word and len(value) >= 6 and (quoted or shell)
    return one_word and len(value) >= 12 and (quoted or shell)


def _strong(value: bytes) -> bool:
    """Whether it looks drawn by lot: long, of many characters, letters and digits, no path and no name."""
    if _STRONG.match(value) is None or len(set(value)) < 8:
        return False
    if _DIGIT.search(value) is None or _LETTER.search(value) is None:
        return False
    if _EXPRESSION.match(value) is not None and len(value) < 32:
        return False
    return b"://" not in value and (value.count(b"/") * 8 <= len(value) or b"." not in value)


# --- what a form alone does not show ------------------------------------------------------------------------


def _is_bearer(value: bytes) -> bool:
    if _PLACEHOLDER.match(value) is not None or value.lower() in _WORDS:
        return False
    if _DIGIT.search(value) is not None and _LETTER.search(value) is not None:
        return True
    return len(value) >= 16 and value.isalpha()


def _is_basic(value: bytes) -> bool:
    bare = value.rstrip(b"=")
    try:
        plain = base64.b64decode(bare + b"=" * (-len(bare) % 4), validate=True)
    except binascii.Error:
        return False
    return b":" in plain and all(byte >= 32 for byte in plain)


def _is_login(value: bytes) -> bool:
    return _PLACEHOLDER.match(value) is None and _MARK.search(value) is None


def _is_drawn(value: bytes) -> bool:
    """Prefixed keys in words (`sk-learn-pipeline-example`) are names of things."""
    return _DIGIT.search(value) is not None or not re.search(rb"[a-z]{3,}-[a-z]{3,}-[a-z]", value)


_CHECKS: Final = {
    "bearer": _is_bearer,
    "basic_auth": _is_basic,
    "url_password": _is_login,
    "url_token": _strong,
    "openai_key": _is_drawn,
    "pypi_token": _is_drawn,
}
