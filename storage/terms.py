"""Words as search sees them: how a text is made ready for the index, what a query asks for, how well a text
answers it, and the piece of the text that shows it.

Pure. A query is plain words; nothing in it is syntax but a pair of double quotes around words that stand
together. What is written without blanks (a path, an identifier, an option) is one term, found as written.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

MAX_TERMS: Final = 24
"""Of a longer query the terms that tell most: the longest ones."""
MAX_TERM_CHARS: Final = 400
SNIPPET_CHARS: Final = 240
"""About what a snippet holds; a longer match is shown up to three times that."""

_SEPARATOR = "\u200b"
"""Put between characters of scripts that write no blanks, so that each is a token and any run of them a
phrase. No one sees it, and it is taken out again of what is shown."""
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3040-\u30ff\u3105-\u312f"
    "\u3130-\u318f\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\uff66-\uffdc"
    "\U00020000-\U0003ffff"
)
_BORDERS = re.compile(rf"(?<=[{_UNSPACED}])(?=\w)|(?<=\w)(?=[{_UNSPACED}])")
_PIECES = re.compile(r'"([^"]+)"|(\S+)')
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")
_EDGES = "\"'`,;!?()[]{}<>…。、，「」“”‘’"


def _base_letters() -> dict[int, str]:
    table = dict.fromkeys(range(0x300, 0x370), "")
    for code in (*range(0xC0, 0x250), *range(0x1E00, 0x1F00)):
        letters = "".join(
            letter for letter in unicodedata.normalize("NFD", chr(code)) if not unicodedata.combining(letter)
        )
        if letters != chr(code):
            table[code] = letters
    return table


_BASE: Final = _base_letters()


def ready(text: str) -> str:
    """The text as the index takes it: scripts without blanks are taken apart."""
    return text if text.isascii() else _BORDERS.sub(_SEPARATOR, text)


def shown(text: str) -> str:
    """The text as it was before ``ready``."""
    return text if text.isascii() else text.replace(_SEPARATOR, "")


def folded(text: str) -> str:
    """Case and accents away, as the index's tokenizer does it."""
    return text.lower() if text.isascii() else text.casefold().translate(_BASE)


class Term(Struct, frozen=True):
    """One thing asked for. ``literal`` as written, folded; ``words`` its words, [] if it is all punctuation."""

    literal: str
    words: tuple[str, ...]

    @property
    def phrase(self) -> str:
        """As an FTS5 string: its words in this order."""
        return _quoted(" ".join(self.words))


class Query(Struct, frozen=True):
    """What a query asks for; ``whole`` is all of it on one line, folded."""

    terms: tuple[Term, ...]
    whole: str

    @property
    def words(self) -> list[str]:
        """Every word of every term once, as they come."""
        return list(dict.fromkeys(word for term in self.terms for word in term.words))


def parse(query: str) -> Query:
    """The query's terms, at most ``MAX_TERMS``; none if it is blank."""
    found: dict[str, Term] = {}
    for quoted, plain in _PIECES.findall(query.replace("\0", " ")):
        literal = folded(quoted.strip() if quoted else _trimmed(plain))[:MAX_TERM_CHARS]
        if literal:
            found.setdefault(literal, Term(literal, tuple(_WORD.findall(literal))))
    terms = list(found.values())
    if any(term.words for term in terms):
        terms = [term for term in terms if term.words]
    if len(terms) > MAX_TERMS:
        kept = set(sorted(terms, key=lambda term: -len(term.literal))[:MAX_TERMS])
        terms = [term for term in terms if term in kept]
    return Query(tuple(terms), " ".join(folded(query).split()).strip("\"' "))


def loose(words: Sequence[str]) -> list[str]:
    """FTS5 strings that match any of the words or what begins with them, the longest ones first."""
    told = sorted((word for word in words if len(word) > 1), key=len, reverse=True) or list(words)
    return [f"{_quoted(word)} *" for word in told[:MAX_TERMS]]


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def _trimmed(piece: str) -> str:
    """Without the punctuation of a sentence around it. What begins an option or a hidden file stays."""
    return piece.strip(_EDGES).rstrip(".:") or piece


# --- how well a text answers ------------------------------------------------------------------------------

_LONG: Final = 1_500


def weights(query: Query, found: Sequence[int], total: int) -> list[float]:
    """What each term tells: ``found`` of ``total`` messages hold it."""
    return [math.log(1 + (total + 1) / (count + 0.5)) for _, count in zip(query.terms, found, strict=True)]


def score(query: Query, weight: Sequence[float], text: str) -> float:
    """How well a folded text answers, 0 for not at all. Linear in the text.

    What stands as written counts more than its words do, the whole query as written most; a text that holds
    all terms more than one that holds some; a short text a little more than a long one.
    """
    total = sum(weight) or 1.0
    reached = whole = 0.0
    for term, worth in zip(query.terms, weight, strict=True):
        degree = _degree(term, text)
        reached += worth * degree
        whole += worth if degree >= 0.7 else 0.0
    if reached == 0:
        return 0.0
    value = reached * (0.4 + 0.6 * whole / total)
    if len(query.terms) > 1 and query.whole and _together(query, text):
        value += total
    return value / (1 + 0.12 * math.log1p(len(text) / _LONG))


def _degree(term: Term, text: str) -> float:
    """1 for the term as written and standing alone, less for less."""
    at = text.find(term.literal)
    if at >= 0:
        return 1.0 if _alone(term, text, at) else 0.85
    if not term.words:
        return 0.0
    if all(word in text for word in term.words):
        return 0.7 if _spread(term).search(text) is not None else 0.4
    if len(term.words) > 2 and all(len(word) == 1 for word in term.words):
        # A sentence in a script without blanks: what counts is how much of it stands there.
        pairs = [first + second for first, second in zip(term.words, term.words[1:], strict=False)]
        return 0.5 * sum(pair in text for pair in pairs) / len(pairs)
    return 0.0


def _alone(term: Term, text: str, at: int) -> bool:
    """Whether one of the first places of the term is no part of a longer word."""
    size = len(term.literal)
    for _ in range(8):
        if at < 0:
            return False
        before, after = text[at - 1 : at], text[at + size : at + size + 1]
        if not (_inner(before) and _inner(term.literal[0])) and not (
            _inner(after) and _inner(term.literal[-1])
        ):
            return True
        at = text.find(term.literal, at + 1)
    return False


def _inner(char: str) -> bool:
    return char != "" and (char.isalnum() or char == "_")


def _spread(term: Term) -> re.Pattern[str]:
    """The term's words in order with anything but words between them."""
    return re.compile(r"[\W_]{0,40}".join(map(re.escape, term.words)))


def _together(query: Query, text: str) -> bool:
    if query.whole in text:
        return True
    pieces = query.whole.split(" ")
    return len(pieces) <= MAX_TERMS and re.search(r"\s{1,40}".join(map(re.escape, pieces)), text) is not None


# --- what is shown ------------------------------------------------------------------------------------------


def snippet(query: Query, weight: Sequence[float], text: str) -> str:
    """The piece of the text that answers best, in its surroundings, as it was written."""
    if len(text) <= SNIPPET_CHARS:
        return text
    start, end = _best(query, weight, text)
    start, end = _unfolded(text, start, end)
    end = min(end, start + 3 * SNIPPET_CHARS)
    around = max(40, (SNIPPET_CHARS - (end - start)) // 2)
    first, last = max(0, start - around), min(len(text), end + around)
    first, last = _at_words(text, first, start, end, last)
    return f"{'… ' if first else ''}{text[first:last].strip()}{' …' if last < len(text) else ''}"


def _best(query: Query, weight: Sequence[float], text: str) -> tuple[int, int]:
    """Where in the folded text the best match begins and ends."""
    low = folded(text)
    if len(query.terms) > 1 and query.whole:
        pieces = query.whole.split(" ")
        found = re.search(r"\s{1,40}".join(map(re.escape, pieces[:MAX_TERMS])), low)
        if found is not None:
            return found.span()
    places: list[tuple[float, int, int]] = []
    for term, worth in zip(query.terms, weight, strict=True):
        places.extend((worth, at, at + len(term.literal)) for at in _places(term, low))
        if not places and term.words and (found := _spread(term).search(low)) is not None:
            places.append((worth * 0.7, *found.span()))
    if not places:
        for word in query.words:
            at = low.find(word)
            if at >= 0:
                places.append((0.1 * len(word), at, at + len(word)))
    if not places:
        return 0, 0
    # The place with most of the others around it.
    worth_near = [
        (sum(other for other, at, _ in places if abs(at - place[1]) < SNIPPET_CHARS // 2), -place[1], place)
        for place in places[:200]
    ]
    return max(worth_near)[2][1:]


def _places(term: Term, text: str) -> list[int]:
    found: list[int] = []
    at = text.find(term.literal)
    while at >= 0 and len(found) < 16:
        found.append(at)
        at = text.find(term.literal, at + 1)
    alone = [place for place in found if _alone(term, text[: place + len(term.literal) + 1], place)]
    return alone or found


def _unfolded(text: str, start: int, end: int) -> tuple[int, int]:
    """Places of the folded text as places of the text itself: folding changes lengths."""
    if text.isascii():
        return start, end
    at = 0
    first: int | None = None
    for index, char in enumerate(text):
        if first is None and at >= start:
            first = index
        if at >= end:
            return first if first is not None else index, index
        at += len(folded(char))
    return first if first is not None else len(text), len(text)


def _at_words(text: str, first: int, start: int, end: int, last: int) -> tuple[int, int]:
    """Bounds moved inwards to blanks, where one is near; never into the match."""
    if first > 0:
        blank = re.compile(r"\s").search(text, first, start)
        first = blank.end() if blank is not None and blank.end() - first < 40 else first
    if last < len(text):
        ends = [match.start() for match in re.finditer(r"\s", text[end:last])]
        last = end + ends[-1] if ends and last - (end + ends[-1]) < 40 else last
    return first, last
