"""Bytes to messages and back; canonical JSON and digests.

``decode_event`` is the gate of the daemon: whatever the bytes are, it returns an event or raises
ProtocolError with the one code that says why. The way of a good message is one pass of the decoder and a few
scans of the bytes; finding out *why* a message is bad happens only where one is. Nothing here knows a run's
state or settings.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, Final, TypeVar

import msgspec
import rfc8785
from msgspec import UNSET

from protocol.asks import ASKS, Ask
from protocol.errors import AskErrorCode, AskRefused, ProtocolError
from protocol.events import (
    EVENT_TYPES,
    RECORD_TYPES,
    AnyEvent,
    ApprovalRequested,
    ApprovalResolved,
    DataPart,
    Event,
    EvidenceRecorded,
    Message,
    ToolCalled,
    ToolReturned,
    type_of,
)
from protocol.identifiers import is_id
from protocol.state import RunState, RunStateReference, StateHead
from protocol.subjects import LANE_TOKEN, Verb

MAX_DEPTH: Final = 64
"""Deepest nesting of objects and arrays accepted, the message itself included."""

T = TypeVar("T")


class _Probe(msgspec.Struct):
    """The envelope's fields as bytes: what tells a bad message's fault from another."""

    v: msgspec.Raw = msgspec.Raw()
    id: msgspec.Raw = msgspec.Raw()
    type: msgspec.Raw = msgspec.Raw()
    must_understand: msgspec.Raw = msgspec.Raw()


_DECODER: Final = msgspec.json.Decoder(AnyEvent)
_PROBE: Final = msgspec.json.Decoder(_Probe)
_TEXT: Final = msgspec.json.Decoder(str)
_NAMES: Final = msgspec.json.Decoder(list[str])
_ANY: Final = msgspec.json.Decoder()
_ENCODER: Final = msgspec.json.Encoder()
_SORTED: Final = msgspec.json.Encoder(order="sorted")


class _Fraction(Exception):
    """A number with a fraction or an exponent, which RFC 8785 writes in a form of its own."""


def _no_fraction(text: str) -> Any:
    raise _Fraction


_WITHOUT_FRACTIONS: Final = msgspec.json.Decoder(float_hook=_no_fraction)
_UNLIKE: Final = re.compile(rb"(?:^|[:\[,])\s*-?[0-9]{16}|[\xf0-\xf4]|\\u[dD][89a-fA-F]")
"""What plain JSON with sorted names may write otherwise than RFC 8785: integers that no double holds, and names
beyond the basic plane, which sort elsewhere in UTF-16. All else but fractions is the same to the byte."""

_FIELDS: Final = {cls: frozenset(cls.__struct_encode_fields__) | {"type"} for cls in EVENT_TYPES.values()}
_ENVELOPE: Final = frozenset(Event.__struct_encode_fields__) | {"type"}

_MORE_TO_CHECK: Final = frozenset(
    {ToolCalled, Message, ToolReturned, ApprovalRequested, ApprovalResolved, EvidenceRecorded}
)
"""The types of which ``_value_fault`` looks at more than the envelope."""
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE_PAIR: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_BRACKETS: Final = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in b"{}[]")
_STEPS: Final = bytes.maketrans(b"[]", b"\x01\xff")
_SHALLOW: Final = 8
_SIXTEEN: Final = b"0" * 16
_BEYOND: Final = re.compile(rb"[\xf0-\xf4]")
_CERTAINLY_DEEP: Final = b"[" * (MAX_DEPTH + 1)
_DIGITS: Final = bytes.maketrans(b"123456789E", b"000000000e")
# Without one of these a number is below 1e299: fewer than 200 digits before an exponent of at most two.
_LARGE_NUMBERS: Final = (b"e000", b"e+000", b"0" * 200)
_POSITIVE: Final = re.compile(rb"[1-9][0-9]*")


def decode_event(
    payload: bytes, *, run: str | None = None, channel: str | None = None, max_bytes: int | None = None
) -> Event:
    """Decode one message of ``wk.v1.in``.

    ``run`` and ``channel`` are the subject's; where given, the message must belong there. ``max_bytes``
    bounds the payload. Raises ProtocolError and nothing else, with the first of these that applies:
    ``too_large``, ``malformed``, ``unsupported_version``, ``must_understand``, ``unknown_type``,
    ``invalid_field``, ``run_mismatch``, ``not_authorized``; a sidecar's type on another channel is
    ``not_authorized`` even where its fields are wrong. What the agent may not say (``AUTHORITY_ONLY_TYPES``)
    depends on settings and is not judged here.
    """
    if max_bytes is not None and len(payload) > max_bytes:
        raise ProtocolError("too_large", f"{len(payload)} bytes, at most {max_bytes} are accepted")
    fault = _byte_fault(payload)
    if fault is not None:
        raise _classify(payload, channel, fault, None)
    try:
        event: Event = _DECODER.decode(payload)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise _classify(payload, channel, None, error) from error
    if event.must_understand:
        _check_understood(event.must_understand, _FIELDS[type(event)], event.id)
    invalid = _value_fault(event)
    if invalid is not None:
        raise ProtocolError("invalid_field", invalid, event.id)
    _check_place(event, run, channel)
    return event


def _byte_fault(payload: bytes) -> str | None:
    """What the decoder does not look at: text that is no text, and nesting. Linear in the payload."""
    try:
        payload.isascii() or payload.decode()
    except UnicodeDecodeError:
        return "not valid UTF-8"
    if b"\\" in payload and (b"\\u0000" in payload or b"\\ud" in payload or b"\\uD" in payload):
        # An escaped backslash before u is text; with those gone every escape left is real.
        escapes = payload.replace(b"\\\\", b"__")
        if b"\\u0000" in escapes:
            return "a string contains NUL"
        if _SURROGATE.search(_SURROGATE_PAIR.sub(b"", escapes)) is not None:
            return "a string contains a lone surrogate"
    if payload.count(b"[") + payload.count(b"{") > MAX_DEPTH and _too_deep(payload):
        return f"nested more than {MAX_DEPTH} deep"
    return None


def _too_deep(payload: bytes) -> bool:
    """Whether brackets outside strings nest deeper than allowed. Of well-formed JSON the answer is exact."""
    unescaped = payload.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = b"".join(unescaped.split(b'"')[::2]).translate(_BRACKETS, _NOT_BRACKETS)
    if _CERTAINLY_DEEP in brackets:
        return True
    for _ in range(_SHALLOW):
        # Each round takes the innermost level away; ordinary messages are used up soon.
        brackets = brackets.replace(b"[]", b"")
        if not brackets:
            return False
    return max(accumulate(array("b", brackets.translate(_STEPS))), default=0) > MAX_DEPTH - _SHALLOW


def _value_fault(event: Event) -> str | None:
    """What types alone do not say about a decoded event, as a text naming the field; None: all is well."""
    if event.seq is not None and event.session is None:
        return "$.seq needs $.session"
    if not 1 < event.at.year < 9999:
        return "$.at is out of range"
    if type(event) not in _MORE_TO_CHECK:
        return None
    match event:
        case ToolCalled():
            return _number_fault(event.arguments, "$.arguments")
        case Message() | ToolReturned():
            if not isinstance(event.content, str):
                for index, part in enumerate(event.content):
                    if isinstance(part, DataPart):
                        found = _number_fault(part.value, f"$.content[{index}].value")
                        if found is not None:
                            return found
        case ApprovalRequested() | ApprovalResolved():
            if event.expires_at is not None and not 1 < event.expires_at.year < 9999:
                return "$.expires_at is out of range"
        case EvidenceRecorded():
            if isinstance(event.value, int) and not _is_double(event.value):
                return "$.value is a number out of range"
        case _:
            pass
    return None


def _number_fault(raw: msgspec.Raw, path: str) -> str | None:
    """Numbers no double holds, in a value kept as bytes: nobody could read it later."""
    shape = bytes(raw).translate(_DIGITS)
    if _LARGE_NUMBERS[0] not in shape and _LARGE_NUMBERS[1] not in shape and _LARGE_NUMBERS[2] not in shape:
        return None
    try:
        value = _ANY.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return f"{path} holds a number out of range"
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, int) and not _is_double(item):
            return f"{path} holds a number out of range"
    return None


def _is_double(number: int) -> bool:
    try:
        float(number)
    except OverflowError:
        return False
    return True


def _check_place(event: Event, run: str | None, channel: str | None) -> None:
    name = type_of(event)
    if run is not None:
        if event.run is not None and event.run != run:
            raise ProtocolError("run_mismatch", f"the message says run {event.run[:128]!r}", event.id)
        if (run == LANE_TOKEN) != (name == "settings.applied"):
            raise ProtocolError("run_mismatch", f"{name} does not belong to {run[:128]!r}", event.id)
    if channel is not None:
        _check_channel(name, channel, event.id)
        if channel == "record" and event.epoch is None:
            raise ProtocolError("invalid_field", "$.epoch is required on the record channel", event.id)


def _check_channel(name: str, channel: str, event_id: str | None) -> None:
    if name in RECORD_TYPES and channel != "record":
        raise ProtocolError("not_authorized", f"{name} is the sidecar's, on the record channel", event_id)
    if name not in RECORD_TYPES and channel == "record":
        raise ProtocolError("not_authorized", f"{name} does not belong on the record channel", event_id)


def _check_understood(names: Iterable[str], known: frozenset[str], event_id: str | None) -> None:
    unknown = sorted({name for name in names if name not in known})
    if unknown:
        shown = ", ".join(_quote(name) for name in unknown[:4])
        raise ProtocolError("must_understand", f"unknown field {shown}", event_id)


def _classify(
    payload: bytes, channel: str | None, fault: str | None, cause: Exception | None
) -> ProtocolError:
    """Why the payload is no event. The first reason in the order of ``decode_event``."""
    try:
        probe = _PROBE.decode(payload)
    except RecursionError:
        return ProtocolError("malformed", f"nested more than {MAX_DEPTH} deep")
    except msgspec.ValidationError:
        return ProtocolError("malformed", fault or "not a JSON object")
    except (msgspec.DecodeError, ValueError) as error:
        return ProtocolError("malformed", fault or f"not JSON: {_said(error)}")
    event_id = _text(probe.id)
    if event_id is not None and not is_id(event_id):
        event_id = None
    if fault is not None:
        return ProtocolError("malformed", fault, event_id)
    version = bytes(probe.v)
    if version != b"1" and _POSITIVE.fullmatch(version) is not None:
        return ProtocolError("unsupported_version", f"version {version[:20].decode()}, known is 1", event_id)
    name = _text(probe.type)
    cls = EVENT_TYPES.get(name) if name is not None else None
    if bytes(probe.must_understand):
        try:
            names = _NAMES.decode(probe.must_understand)
        except (msgspec.DecodeError, RecursionError, ValueError):
            names = []
        try:
            _check_understood(names, _ENVELOPE if cls is None else _FIELDS[cls], event_id)
        except ProtocolError as error:
            return error
    if name is None:
        return ProtocolError("invalid_field", "$.type is missing or no text", event_id)
    if cls is None:
        return ProtocolError("unknown_type", f"unknown type {_quote(name)}", event_id)
    if channel is not None:
        try:
            _check_channel(name, channel, event_id)
        except ProtocolError as error:
            return error
    return ProtocolError("invalid_field", _said(cause), event_id)


def _text(raw: msgspec.Raw) -> str | None:
    try:
        return _TEXT.decode(raw)
    except (msgspec.DecodeError, ValueError):
        return None


def _quote(text: str) -> str:
    return ascii(text if len(text) <= 80 else text[:79] + "…")


def _said(error: Exception | None) -> str:
    """The decoder's words. They name fields and types; a value only where it is a tag."""
    text = str(error) if error is not None else "the message is not valid"
    return text.encode("ascii", "backslashreplace").decode()


def decode_struct(payload: bytes, kind: type[T], *, max_bytes: int | None = None) -> T:
    """Decode any other message (question, reply, summary, state) with the same care for its bytes.

    Raises ProtocolError: ``too_large``, ``malformed`` (not JSON, bad text, too deep) or ``invalid_field``
    (naming the field).
    """
    if max_bytes is not None and len(payload) > max_bytes:
        raise ProtocolError("too_large", f"{len(payload)} bytes, at most {max_bytes} are accepted")
    fault = _byte_fault(payload)
    if fault is not None:
        raise ProtocolError("malformed", fault)
    try:
        return msgspec.json.decode(payload, type=kind)
    except msgspec.ValidationError as error:
        raise ProtocolError("invalid_field", _said(error)) from error
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ProtocolError("malformed", _said(error)) from error


def encode(obj: Any) -> bytes:
    """The JSON bytes of a message or any plain value. Fields in their declared order, unset ones left out."""
    return _ENCODER.encode(obj)


def canonical(obj: Any) -> bytes:
    """The RFC 8785 form of a message or value. Integers beyond 2**53 are written as the nearest double.

    Raises ValueError for what has no such form: a number out of range, text that is not Unicode.
    """
    encoded = _ENCODER.encode(obj)
    if _is_alike(encoded):
        try:
            return _SORTED.encode(_WITHOUT_FRACTIONS.decode(encoded))
        except _Fraction:
            pass
    plain = msgspec.json.decode(encoded)
    try:
        return rfc8785.dumps(plain)
    except rfc8785.IntegerDomainError:
        return rfc8785.dumps(_with_doubles(plain))


def _is_alike(encoded: bytes) -> bool:
    """Whether this JSON, with its names sorted, is the canonical form if no number in it has a fraction."""
    if _SIXTEEN in encoded.translate(_DIGITS) or b"\\ud" in encoded or b"\\uD" in encoded:
        return _UNLIKE.search(encoded) is None
    # As nearly all: told without looking at each place a number may stand.
    return encoded.isascii() or _BEYOND.search(encoded) is None


def _with_doubles(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_doubles(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_doubles(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**53:
        try:
            return float(value)
        except OverflowError as error:
            raise ValueError("a number out of range has no canonical form") from error
    return value


def digest(obj: Any) -> str:
    """``sha256:<hex>`` of a value's RFC 8785 form. Raises ValueError as ``canonical`` does."""
    return digest_bytes(canonical(obj))


def digest_bytes(data: bytes) -> str:
    """``sha256:<hex>`` of the bytes as they are."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def decode_ask(verb: Verb, payload: bytes, *, max_bytes: int | None = None) -> Ask:
    """Decode a question; empty bytes are ``{}``. Raises AskRefused: ``too_large`` or ``invalid_request``."""
    try:
        return decode_struct(payload or b"{}", ASKS[verb], max_bytes=max_bytes)
    except ProtocolError as error:
        code: AskErrorCode = "too_large" if error.code == "too_large" else "invalid_request"
        raise AskRefused(code, error.detail) from error


def decode_state(payload: bytes) -> RunState | RunStateReference:
    """Decode a run's message of the state stream, whole or as a reference to an object.

    Raises ProtocolError as ``decode_struct`` does, ``unsupported_version`` for a newer one, and ``must_understand``.
    """
    head = decode_struct(payload, StateHead)
    if head.v > 1:
        raise ProtocolError("unsupported_version", f"state version {head.v}, known is 1")
    kind: type[RunState | RunStateReference] = RunState if head.blob is UNSET else RunStateReference
    _check_understood(head.must_understand, frozenset(kind.__struct_encode_fields__), None)
    return decode_struct(payload, kind)
