"""Reading one configuration value: from the text of a variable or the type of the file to what its key holds.

Pure: it knows types, bounds and words for them; where values come from is `sidecar.config`'s matter.
"""

from __future__ import annotations

import difflib
import os
import os.path
import re
import stat
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec
import msgspec.inspect

from protocol import detectors
from protocol.identifiers import is_token
from sidecar.config_shape import KEYS, TABLES, Config, ExtraPattern, Problem, Rule, shown

_AUTO = re.compile(r"auto/([0-9]{1,4})")
_TOKEN_TEXT = "letters, digits, - and _, at most 128, not beginning with _"
MOST_BYTES = 1 << 20
"""Of a file."""
_MOST_LEVELS = 16
DEEP = f"tables and lists not more than {_MOST_LEVELS} levels deep"
_LANES_TEXT = f"different lane names ({_TOKEN_TEXT}), or auto/<n> with n from 1 to 4096"


class Refused(ValueError):
    """A value that its key does not allow; the text says what is allowed."""


class Given(msgspec.Struct, frozen=True):
    """A value as found: text of a variable or flag is read leniently, a TOML value by its own type."""

    value: object
    source: str
    lenient: bool


def problem(key: str, source: str, value: object, allowed: str) -> Problem:
    """A problem with the value as it may be printed."""
    return Problem(key=key, source=source, value=shown(key, value), allowed=allowed)


def too_deep(value: object) -> bool:
    """Whether lists and tables stand in each other deeper than any key needs. No recursion."""
    level = [value]
    for _ in range(_MOST_LEVELS + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)


def read_text(path: Path) -> str:
    """A file's text. Raises `Refused` for what is no regular file (a device may never end) or over 1 MiB, and
    `OSError`, `UnicodeDecodeError`."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise Refused("a regular file")
    with open(path, "rb") as file:
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise Refused(f"a file of at most {MOST_BYTES} bytes")
    return raw.decode("utf-8").replace("\r\n", "\n")


def _json(text: str) -> Any:
    """The value of a JSON text of a variable. Raises `Refused` for one that is nested beyond reason."""
    try:
        value = msgspec.json.decode(text)
        if too_deep(value):
            raise RecursionError
    except RecursionError:
        raise Refused(DEEP) from None
    return value


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Words for a name that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"nothing, no such {what}{hint}"


def read(key: str, found: Given, values: dict[str, Any], problems: list[Problem]) -> None:
    """Put the value of `key` into `values`, or what is wrong with it into `problems`."""
    if key == "rules":
        values[key] = _rules(found, problems)
        return
    try:
        values[key] = _READERS[key](found) if key in _READERS else _convert(found, _TYPES[key])
    except Refused as refused:
        problems.append(problem(key, found.source, found.value, str(refused)))


def _convert(found: Given, kind: Any) -> Any:
    """By the field's type; the struct's bounds decide."""
    value = found.value
    if found.lenient and isinstance(value, str):
        if get_origin(kind) is tuple:
            value = [part.strip() for part in value.split(",") if part.strip()]
        elif value == "" and type(None) in get_args(kind):
            return None
    try:
        converted = msgspec.convert(value, kind, strict=not found.lenient)
    except msgspec.ValidationError:
        raise Refused(_allowed(kind)) from None
    if converted == "" or (isinstance(converted, tuple) and "" in converted):
        raise Refused(_allowed(kind))
    return converted


def _allowed(kind: Any) -> str:
    """What a type allows, in words, from the type itself."""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_allowed(part) for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    match msgspec.inspect.type_info(kind):
        case msgspec.inspect.IntType(ge=low, le=high):
            return f"a whole number from {low} to {high}"
        case msgspec.inspect.FloatType(gt=above, lt=below) if above is not None:
            return f"a number above {above} and below {below}"
        case msgspec.inspect.FloatType(ge=low, le=high):
            return f"a number from {low} to {high}"
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.VarTupleType():
            return "a list of words (comma-separated in a variable)"
        case _:
            return "a text that is not empty"


def parse_listen(text: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`; raises `ValueError` saying what is allowed."""
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not (colon and bare and port.isascii() and port.isdigit() and int(port) <= 65_535) or (
        ":" in bare and bare == host
    ):
        raise Refused("host:port with a port from 0 (any free one) to 65535; an IPv6 host in [ ]")
    return bare, int(port)


def _token(found: Given) -> str:
    if not (isinstance(found.value, str) and is_token(found.value)):
        raise Refused(_TOKEN_TEXT)
    return found.value


def _lanes(found: Given) -> tuple[str, ...] | int:
    """Lane names, or the n of `auto/<n>`."""
    value = found.value
    if isinstance(value, str):
        auto = _AUTO.fullmatch(value.strip())
        if auto and 1 <= int(auto[1]) <= 4096:
            return int(auto[1])
        value = [part.strip() for part in value.split(",")]
    if not isinstance(value, (list, tuple)) or not value or len(set(map(str, value))) != len(value):
        raise Refused(_LANES_TEXT)
    if not all(isinstance(name, str) and is_token(name) for name in value):
        raise Refused(_LANES_TEXT)
    return tuple(value)


def _path(found: Given) -> Path:
    if isinstance(found.value, Path):
        return found.value
    if not isinstance(found.value, str) or not found.value or "\0" in found.value:
        raise Refused("a path")
    return Path(found.value)


def _existing_file(found: Given) -> Path | None:
    if found.lenient and found.value == "":
        return None
    path = _path(found)
    if not os.path.isfile(path):
        raise Refused("the path of an existing file")
    return path


def _listen(found: Given) -> str:
    if not isinstance(found.value, str):
        raise Refused("host:port")
    parse_listen(found.value)
    return found.value


def _url(*schemes: str) -> Callable[[Given], str]:
    allowed = " or ".join(f"{scheme}://host[:port]" for scheme in schemes)

    def read(found: Given) -> str:
        parts = found.value.split(",") if isinstance(found.value, str) else [""]
        for part in parts if "nats" in schemes else parts[:1]:
            try:
                url = urlsplit(part.strip())
                fine = url.scheme in schemes and bool(url.hostname) and url.port != 0
            except ValueError:
                fine = False
            if not fine:
                raise Refused(allowed)
        return str(found.value)

    return read


def _rules(found: Given, problems: list[Problem]) -> tuple[Rule, ...]:
    """Each rule field by field, so that one mistake does not hide the next."""
    value = found.value
    if found.lenient and isinstance(value, str):
        try:
            value = _json(value or "[]")
        except Refused as refused:
            problems.append(problem("rules", found.source, found.value, str(refused)))
            return ()
        except msgspec.DecodeError:
            value = None
    if not isinstance(value, (list, tuple)):
        allowed = "a list of tables {labels, mode, bypass}"
        problems.append(problem("rules", found.source, found.value, allowed))
        return ()
    hints = get_type_hints(Rule, include_extras=True)
    rules: list[Rule] = []
    for number, entry in enumerate(value):
        at = f"rules[{number}]"
        fields: dict[str, Any] = {}
        if not isinstance(entry, dict):
            problems.append(problem(at, found.source, entry, "a table {labels, mode, bypass}"))
            continue
        for name, inner in entry.items():
            if name not in hints:
                problems.append(problem(f"{at}.{name}", found.source, inner, unknown("key", name, hints)))
                continue
            try:
                fields[name] = msgspec.convert(inner, hints[name])
            except msgspec.ValidationError:
                allowed = "a table of texts" if name == "labels" else _allowed(hints[name])
                problems.append(problem(f"{at}.{name}", found.source, inner, allowed))
        rules.append(Rule(**fields))
    return tuple(rules)


_MOST_PATTERNS = 32
_MOST_ALLOWED = 256
_PATTERNS_TEXT = f"at most {_MOST_PATTERNS} tables {{name, regex}} with different names of a-z, 0-9 and _"


def _patterns(found: Given) -> tuple[ExtraPattern, ...]:
    value = found.value
    try:
        if found.lenient and isinstance(value, str):
            value = _json(value) if value else []
        patterns = msgspec.convert(value, tuple[ExtraPattern, ...])
    except msgspec.MsgspecError as error:
        # Which entry, where it is one of them; the rest is said already.
        where = f" ({error})" if "$[" in str(error) else ""
        raise Refused(f"{_PATTERNS_TEXT}{where}") from None
    known = {pattern.name for pattern in patterns} | set(detectors.KINDS)
    if len(patterns) > _MOST_PATTERNS or len(known) != len(patterns) + len(detectors.KINDS):
        raise Refused(f"{_PATTERNS_TEXT}, none of them built in")
    for pattern in patterns:
        try:
            detectors.compiled(pattern.name, pattern.regex)
        except ValueError as error:
            raise Refused(
                f"a pattern of RE2 syntax that matches no empty text ({pattern.name}: {error})"
            ) from None
    return patterns


def _allowed_values(found: Given) -> tuple[str, ...]:
    values: tuple[str, ...] = _convert(found, tuple[str, ...])
    if len(values) > _MOST_ALLOWED or any(len(value) > 500 for value in values):
        raise Refused(f"at most {_MOST_ALLOWED} texts of at most 500 letters, each the whole of a value")
    return values


_READERS: dict[str, Callable[[Given], Any]] = {
    "tenant": _token,
    "lanes": _lanes,
    "data_dir": _path,
    "nats.url": _url("nats", "tls", "ws", "wss"),
    "nats.creds": _existing_file,
    "nats.ca": _existing_file,
    "nats.cert": _existing_file,
    "nats.key": _existing_file,
    "summarizer.api_key_file": _existing_file,
    "admin.listen": _listen,
    "summarizer.base_url": _url("http", "https"),
    "redaction.patterns": _patterns,
    "redaction.allow": _allowed_values,
}
_TYPES: dict[str, Any] = {
    **{name: kind for name, kind in get_type_hints(Config, include_extras=True).items() if name in KEYS},
    **{
        f"{table}.{name}": kind
        for table, struct in TABLES.items()
        for name, kind in get_type_hints(struct, include_extras=True).items()
    },
}


def allowed(key: str) -> str:
    """What a key may hold, in the words a wrong value is refused with."""
    if key == "rules":
        return "a list of tables {labels, mode, bypass}"
    if key not in _READERS:
        return _allowed(_TYPES[key])
    for wrong in (":", ""):
        try:
            _READERS[key](Given(wrong, "", lenient=False))
        except Refused as refused:
            return str(refused)
    return "a text"
