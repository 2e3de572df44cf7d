"""Values that a name gives away: ``password=…``, ``"api_key": "…"``, ``--token …``, ``<secret>…</secret>``.

A name alone proves nothing: most of what stands behind such names in transcripts is code, a type, a count or a
placeholder. What reads as one of these is left; what reads as drawn by lot, or as a word somebody chose, goes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import re2  # type: ignore[import-untyped]
from msgspec import Struct

LONGEST_VALUE: Final = 512
"""So many bytes of a value that a name gives away are judged; what goes is the whole of it."""
MOST_JUDGED: Final = 5_000
"""Beyond so many named values in one text each of them goes unjudged: judging is what costs."""

BYTES: Final = re2.Options()
BYTES.encoding = re2.Options.Encoding.LATIN1
BYTES.log_errors = False
BYTES.max_mem = 32 << 20


class Found(Struct, frozen=True, gc=False):
    """A secret in a text: its kind, and the span (bytes) that has to go. A hostile text holds a hundred thousand:
    none of them is the garbage collector's business."""

    kind: str
    start: int
    end: int


SPACE: Final = r"(?:[ \t]|\\+[nrt])"
_GAP: Final = r"(?:\s|\\+[nrt])*"
_NAMES: Final = (
    r"secret|passw(?:or)?d|passphrase|\bpwd|token|api[_-]?key|access[_-]?key|auth[_-]?key|private[_-]?key"
    r"|signing[_-]?key|encryption[_-]?key|credentials?"
)
# A bare number after a token's name says nothing: `max_tokens: 4096` must cost nothing.
_PLAIN_NAMES: Final = _NAMES.replace(r"\b", "")
HINT: Final = (
    rf"(?i)(?:passw(?:or)?d|passphrase|pwd|secret|(?:api|access|auth|private|signing|encryption)[_-]?key"
    rf"|credentials?)[\w.-]{{0,40}}\\*[\"'`]?\]?{_GAP}[:=>]"
    rf"|token[\w.-]{{0,40}}\\*[\"'`]?\]?{_GAP}[:=>][=>]?{_GAP}\\*[\"'`]?[0-9.,;)}}\]]*"
    rf"(?:[^\s0-9.,;)}}\]\"'`\\]|\\+[^nrt\"\\\s])"
    rf"|--[\w-]{{0,40}}(?:{_PLAIN_NAMES})[\w.-]{{0,40}}{SPACE}+[^\s-]"
    rf"|\"(?:name|key)\"\s*:\s*\"[\w.-]{{0,60}}(?:{_PLAIN_NAMES})"
)
_NAMED: Final = re2.compile(
    rf"(?i)(--[\w-]{{0,40}})?({_NAMES})([\w.-]{{0,40}})"
    rf"(?:\\*[\"'`]?\]?{SPACE}*(:=|=>|[:=>]){SPACE}*|{SPACE}+)".encode(),
    BYTES,
)
MARK: Final = re.compile(rb"\[redacted(?::[a-z0-9_]{1,40})?\]")
_INSIDE: Final = re.compile(rb"\[redacted:[a-z0-9_]*$")
"""Before a name that is part of a mark."""
_QUOTE: Final = re.compile(rb"[bBfFrRuU]{0,2}(\\*)([\"'`])")
_BARE: Final = re.compile(rb"[^\s]{1,%d}" % LONGEST_VALUE)
_RUN: Final = re.compile(rb"[^\s]*")
_NEXT_PAIR: Final = re.compile(rb"[,;&][\"']?[\w.-]{1,60}[\"']?\s?[:=]|\\+[nrt]|</|\\*\"")
_ENDINGS: Final = b"\"'`,;)}]>\\."
PLACEHOLDER: Final = re.compile(
    rb"[$<{%\[(]|arn:|#[0-9a-f]{3,8}$|\*\*|\.\.|(?:your|my|some|the|a|example)[-_ ]"
    rb"|(?:x{3,}|\*+|\.+|-+|_+|#+|\?+|0+)$|redacted|placeholder|change[-_]?me\b|(?:\xe2\x80[\xa2\xa6])+",
    re.IGNORECASE,
)
_FILLED_IN: Final = (b"${", b"{{", b"...", b"[redacted")
WORDS: Final = frozenset(
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
    rb"|rule|cost|price|input|output|cache|in\b|out\b|num|stream|saved|before|after|strength|form|page|option|stdin|prefix|suffix)",
    re.IGNORECASE,
)
# `secrets.py:12: …` is a line of a search, not an assignment.
_FILE: Final = re.compile(
    rb"\.(?:py|pyi|js|jsx|ts|tsx|go|rs|java|kt|rb|php|cs|c|h|cc|cpp|hpp|swift|sh|md|rst|txt|json|ya?ml|toml|cfg|ini"
    rb"|html?|css|sql|lock|log|xml|proto|tf|env)$",
    re.IGNORECASE,
)
_KEYWORD_FIRST: Final = re.compile(
    rb"[\w.-]{0,40}(?:secret|passw|token|api[_-]?key|credential)", re.IGNORECASE
)
_EXPRESSION: Final = re.compile(
    rb"[A-Za-z_$][\w$]*(?:\.[A-Za-z_$][\w$]*)+[!?;,)]*$|[\w.$]*[(\[]|&|[=~:>|]|\\"
)
_CODE: Final = re.compile(
    rb"(?:self|this|os|process|env|config|settings|args|options|req|request|ctx|params|props|data)\."
)
_PATH: Final = re.compile(rb"(?:~|\.{1,2})?/|[A-Za-z]:\\|[a-z][a-z0-9+.-]*://")
_WORDLIKE: Final = re.compile(rb"[A-Za-z]+(?:[._-][A-Za-z]+)*$|[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+$")
_NAME_OF_CODE: Final = re.compile(rb"_?(?:[a-z0-9]+(?:_[a-z0-9]+){2,}|[A-Z0-9]+(?:_[A-Z0-9]+){2,})$")
_SHORTEST_WORD: Final = {"password": 5, "secret": 6, "api_key": 6, "token": 8}
"""Of a word without a digit or sign in it, by what its name gives away: shorter ones are code nearly always."""
# What may stand behind a word that was assigned: nothing that makes an expression of it.
_ASSIGNED_END: Final = re.compile(
    rb"[\"'`]?(?:$|\s*[\r\n]|\\+[nrt]|\s*[,;&)}\]\"'`<#|]|\.?\s+(?![=+*/%<>?:&|.(\[]|-(?![-A-Za-z]))|\.$)"
)
# And behind one that was told: nothing at all in its line, or another thing told.
_TOLD_END: Final = re.compile(
    rb"[\"'`]?(?:\s*$|\s*[\r\n]|\\+[nrt]|[ \t]*[,;&)}\]\"'`<#|](?![(\[=])|\.(?:\s|$)|[ \t]+(?:and\b|[\w-]{1,40}[:=]))"
)
_NO_SECRET: Final = frozenset(
    b"accepted access account action added after again agent algorithm allowed alphanumeric already always"
    b" api apikeys args argument arguments async attribute attributes auth authenticate authentication"
    b" authorization available await backend based because before between body boolean browser buffer"
    b" bytearray cache cached call callback cannot challenge change changed char character characters chars"
    b" check class clear client code column config configuration configured confirm confirmation connection"
    b" const constant constructor contains content context control cookie cookies could count create"
    b" created credential current custom data database datetime decode decoded decrypt decrypted delete"
    b" deleted deny derived description details disabled display document double either element email"
    b" embedding enable enabled encode encoded encrypt encrypted encryption enter entry error errors every"
    b" exact exception existing expected expiration expiry export exported expression external extract"
    b" extracted failed fails fallback false field fields filled filter final first fixed forgot format"
    b" forms found fragment from function generate generator getenv getpass given global group hash hashed"
    b" hashing header headers here hint identifier identity import inactive incorrect index inferred init"
    b" initial inline input inputs insert inside instance instead interface internal invalidate issue"
    b" issued item items iterator json keep keys keyword keywords kind label last later leaked length"
    b" letters level lexer line link list literal load loaded local locked login logout lookup lowercase"
    b" main makes managed manual manually mapping match matched matches maximum member message metadata"
    b" method middle minimum mismatch mock mode model module must name named names namespace needed never"
    b" next node nonce normal note nothing null nullable number numeric obtained older only opaque operator"
    b" option options original other otherwise output override package page paging param parameter params"
    b" parse parsed parser part parts passphrase passwords path pattern payload pending plain plaintext"
    b" please policy position present previous print process production profile properties property"
    b" protected provided provider punctuation query quoted random range rather read reader readonly record"
    b" redact redacted redirect reference refresh refreshed refused regenerate regex register reject"
    b" rejected remote remove removed replace replaced request requests require reset resolve resolved"
    b" response result results return returned returns revoke revoked right role root rotate rotated"
    b" rotation route rule rules salt same sample save saved scalar schema scheme scope secrets section"
    b" secure select sensitive separator service session sessions set settings should show shown signature"
    b" signed simple single size some source special start state static status stdin still stored strategy"
    b" stream strict strings strong struct subject submit super symbol symbols system table target task"
    b" temporary testing that their them then there these they thing this those time timeout title tokenize"
    b" tokenized tokenizer tokens translation transport trim tuple type typed types under unique unused"
    b" update updated upload uppercase used useful username users uses using utils uuid validate validated"
    b" validation validator values varchar variable variables verification verified verify version void"
    b" weak well were what when where whether which while whitespace will with within without word words"
    b" works would wrapped write wrong yaml your yours".split()
)
"""Words that stand behind such names in code, in documents and in messages about them, and are no secrets."""
_STRONG: Final = re.compile(rb"[A-Za-z0-9+/=_.~:-]{16,}$")
DIGIT: Final = re.compile(rb"[0-9]")
LETTER: Final = re.compile(rb"[A-Za-z]")
_SPECIAL: Final = re.compile(rb"[!@#$%^&*+/=~?]")


def find_named(text: bytes) -> Iterator[Found]:
    through = judged = 0
    for match in _NAMED.finditer(text):
        first, start = match.span()
        begin, named = match.span(2)
        if start < through or _INSIDE.search(text, max(0, first - 60), begin) is not None:
            continue
        signed, sign_end = match.span(4)
        sign = text[signed:sign_end] if signed >= 0 else None
        if sign is None and match.span(1)[0] < 0:
            continue
        name, rest = text[begin:named], text[slice(*match.span(3))]
        value = _value(text, start, sign)
        if value is None:
            continue
        begin, end, quoted = value
        judged += 1
        if (
            judged > MOST_JUDGED
            or is_value(name, rest, text[begin:end], quoted=quoted, sign=sign or b" ")
            or (not quoted and _is_word_given(name, rest, text, begin, end, sign or b" "))
        ):
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
    match = None if "[redacted" in name else _NAME.search(name.encode())
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
    if len(value) < 4 or PLACEHOLDER.match(value) is not None or value.lower() in WORDS:
        return False
    if _NO_VALUE.match(rest) is not None or any(part in value for part in _FILLED_IN):
        return False
    if sign == b":" and not quoted and _FILE.search(rest) is not None:
        return False
    if any(space in value for space in b" \t\n"):
        return quoted and name.lower() == b"passphrase" and len(value) >= 12
    if is_strong(value):
        return True
    if _PATH.match(value) is not None or (not quoted and _EXPRESSION.match(value) is not None):
        return False
    digit = DIGIT.search(value) is not None
    # A name of something in code holds such a word; with a digit and in one piece, it reads as chosen.
    chosen = digit and b"_" not in value
    if _CODE.match(value) is not None:
        return False
    if _KEYWORD_FIRST.match(value) is not None and not chosen and not (quoted and _is_plain(value)):
        return False
    letter = LETTER.search(value) is not None or any(byte > 127 for byte in value)
    if kind == "token":
        enough = 6 if quoted else 8 if sign == b"=" else 10
        return len(value) >= enough and digit and letter
    if not letter:
        return len(value) >= 6 and not rest and (quoted or sign == b"=")
    if _WORDLIKE.match(value) is None:
        return digit or _SPECIAL.search(value) is not None or len(value) >= 12
    if value.upper() == value and b"_" in value:
        return False
    shell = name.isupper() and sign == b"="
    one_word = value.isalpha()
    return one_word and len(value) >= _SHORTEST_WORD[kind] and (quoted or shell)


def _is_plain(word: bytes) -> bool:
    """Whether it is one lower-case word that stands for nothing in code or in a sentence about secrets."""
    return word.isalpha() and word.islower() and word not in WORDS and word not in _NO_SECRET


def _is_word_given(name: bytes, rest: bytes, text: bytes, begin: int, end: int, sign: bytes) -> bool:
    """Whether a bare word behind a name is what was chosen as a secret: ``password: hunter``.

    Behind ``=`` and ``:`` stand types, variables and sentences as well. One lower-case word is given away where
    it is neither of the words they are made of, and nothing goes on behind it.
    """
    word = text[begin:end]
    if sign not in (b"=", b":", b" ") or not _is_plain(word) or len(word) < _SHORTEST_WORD[kind_of(name)]:
        return False
    if _NO_VALUE.match(rest) is not None or (sign == b":" and _FILE.search(rest) is not None):
        return False
    return (_TOLD_END if sign == b":" else _ASSIGNED_END).match(text, end) is not None


def is_strong(value: bytes) -> bool:
    """Whether it looks drawn by lot: long, of many characters, letters and digits, no path and no name."""
    if _STRONG.match(value) is None or len(set(value)) < 8:
        return False
    if DIGIT.search(value) is None or LETTER.search(value) is None:
        return False
    if _NAME_OF_CODE.match(value) is not None and len(DIGIT.findall(value)) < 5:
        return False
    if _EXPRESSION.match(value) is not None and (len(value) < 32 or len(DIGIT.findall(value)) < 4):
        return False
    return b"://" not in value and (value.count(b"/") * 8 <= len(value) or b"." not in value)
