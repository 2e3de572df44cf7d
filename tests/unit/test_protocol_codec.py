"""The gate: good messages come through whole, bad ones with the one code that says why, and nothing else."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from protocol import events
from protocol.codec import (
    canonical,
    decode_ask,
    decode_event,
    decode_state,
    decode_struct,
    digest,
    digest_bytes,
    encode,
)
from protocol.errors import MAX_DETAIL_CHARS, REJECTION_CODES, AskRefused, ProtocolError
from protocol.events import EVENT_TYPES, RECORD_TYPES, identity, item_id, type_of
from protocol.handoff import LaneEpoch, Packet
from protocol.identifiers import MAX_INTEGER
from protocol.summary import Summary

SMILE = "\U0001f600"


def body(**fields: Any) -> dict[str, Any]:
    event = {
        "v": 1,
        "id": "e-1",
        "type": "message",
        "at": "2026-11-30T09:12:00Z",
        "role": "user",
        "content": "hi",
    }
    return {key: value for key, value in (event | fields).items() if value is not ...}


def of(type_: str, **fields: Any) -> dict[str, Any]:
    return body(type=type_, role=..., content=..., **fields)


def raw(value: Any) -> bytes:
    return json.dumps(value).encode()


def refusal(payload: bytes, **options: Any) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        decode_event(payload, **options)
    error = caught.value
    assert error.code in REJECTION_CODES
    assert 0 < len(error.detail) <= MAX_DETAIL_CHARS
    error.detail.encode()
    return error


def code(payload: bytes, **options: Any) -> str:
    return refusal(payload, **options).code


def nested(depth: int) -> bytes:
    """A call whose arguments make the message that deep, the message itself included."""
    call = raw(of("tool.called", call_id="c", tool="t", arguments="@"))
    return call.replace(b'"@"', b"[" * (depth - 1) + b"]" * (depth - 1))


def with_arguments(text: bytes) -> bytes:
    return raw(of("tool.called", call_id="c", tool="t", arguments="@")).replace(b'"@"', text)


class TestGoodMessages:
    def test_the_example_of_the_protocol(self) -> None:
        event = decode_event(
            b"""{"v":1,"id":"e-17","type":"tool.returned","at":"2026-11-30T09:12:00Z","session":"s1","seq":17,
     "call_id":"c-4","status":"timeout","content":"no answer after 30 s"}""",
            run="r1",
            channel="event",
        )
        assert event == events.ToolReturned(
            v=1,
            id="e-17",
            at=datetime(2026, 11, 30, 9, 12, tzinfo=UTC),
            session="s1",
            seq=17,
            call_id="c-4",
            status="timeout",
            content="no answer after 30 s",
        )
        assert type_of(event) == "tool.returned"

    def test_unknown_optional_fields_are_ignored(self) -> None:
        plain = decode_event(raw(body()))
        assert decode_event(raw(body(extra={"a": [1]}, more=10**400))) == plain

    def test_absent_and_empty_lists_differ_in_a_step(self) -> None:
        step = decode_event(raw(of("step.changed", plan=[])))
        assert isinstance(step, events.StepChanged)
        assert step.plan == ()
        assert step.uncertain is None

    def test_must_understand_names_known_fields(self) -> None:
        assert decode_event(raw(body(must_understand=["content", "type", "run"]))).must_understand

    def test_another_offset_is_the_same_moment(self) -> None:
        event = decode_event(raw(body(at="2026-11-30T10:12:00+01:00")))
        assert event.at == datetime(2026, 11, 30, 9, 12, tzinfo=UTC)

    def test_escaped_backslashes_before_u_are_text(self) -> None:
        text = r"C:\u0000 \ud800 \\ud800" + SMILE
        event = decode_event(raw(body(content=text)))
        assert isinstance(event, events.Message)
        assert event.content == text

    def test_many_brackets_in_text_are_no_nesting(self) -> None:
        text = '[{"\\' * 500
        assert decode_event(raw(body(content=text))).id == "e-1"
        assert decode_event(raw(of("tool.called", call_id="c", tool="t", arguments=[{"a": text}] * 99)))

    def test_the_deepest_message_accepted(self) -> None:
        assert decode_event(nested(64))

    @pytest.mark.parametrize("value", ["text", 1, -1.5, True, None, 10**300])
    def test_evidence_takes_any_scalar(self, value: Any) -> None:
        event = decode_event(
            raw(of("evidence.recorded", claim="c", kind="observed", source="s", value=value))
        )
        assert isinstance(event, events.EvidenceRecorded)
        assert event.value == value

    @pytest.mark.parametrize("verb", ["inspect", "ask_human", "stop", "x-review", "x-a.b_c"])
    def test_verbs(self, verb: str) -> None:
        assert decode_event(raw(of("step.changed", next_action={"verb": verb})))

    def test_arguments_keep_their_bytes(self) -> None:
        event = decode_event(with_arguments(b'{"b" : 1.0, "a": "\\u00e9"}'))
        assert isinstance(event, events.ToolCalled)
        assert bytes(event.arguments) == b'{"b" : 1.0, "a": "\\u00e9"}'

    def test_a_hash_is_taken_with_and_without_its_prefix(self) -> None:
        for text in ("ab" * 32, "sha256:" + "ab" * 32):
            event = decode_event(raw(of("artifact.saved", uri="u", sha256=text, description="d")))
            assert isinstance(event, events.ArtifactSaved)
            assert event.digest == "sha256:" + "ab" * 32


class TestItemsAndIdentity:
    def test_an_item_has_a_name_of_its_own(self) -> None:
        event = decode_event(raw(of("operation.dispatched", operation_id="op-9")))
        assert item_id(event) == "op-9"
        assert identity(event) == "e-1"

    def test_an_event_may_lend_its_id_to_its_item(self) -> None:
        declared = decode_event(raw(of("operation.declared", id="op-9", kind="k", idempotency_key="x")))
        dispatched = decode_event(raw(of("operation.dispatched", id="op-9")))
        assert item_id(declared) == item_id(dispatched) == "op-9"
        assert identity(declared) != identity(dispatched)
        assert decode_event(encode(declared)) == declared

    def test_what_speaks_of_no_item(self) -> None:
        event = decode_event(raw(body()))
        assert item_id(event) is None
        assert identity(event) == "e-1"

    def test_every_item_type_names_its_item(self) -> None:
        for name, kind in EVENT_TYPES.items():
            noun = name.split(".")[0]
            own = {"authorization": "operation"}.get(noun, noun)
            if noun in {
                "constraint",
                "decision",
                "question",
                "operation",
                "approval",
                "evidence",
                "artifact",
            }:
                assert f"{own}_id" in kind.__struct_fields__, name


class TestMalformed:
    @pytest.mark.parametrize(
        "payload",
        [
            b"",
            b" ",
            b"null",
            b"1",
            b'"text"',
            b"[]",
            b"[{}]",
            b"{",
            b"{}{}",
            b"{} x",
            b"{'v':1}",
            b'{"v":1,}',
            b'{"v":01}',
            b'{"v":NaN}',
            b'{"v":Infinity}',
            b'{"v":+1}',
            b'{"v":tru}',
            b'{"v"}',
            b"{v:1}",
            b"// x\n{}",
            b"\xef\xbb\xbf{}",
            b"\x00",
            b"{}\x00",
            "{}".encode("utf-16"),
            b"\xff\xfe\x00\x01\x80",
            b'{"a":"\t"}',
            b'{"a":"\\x"}',
            b'{"a":"\\u12"}',
        ],
    )
    def test_what_is_no_object(self, payload: bytes) -> None:
        assert code(payload) == "malformed"

    @pytest.mark.parametrize(
        "bad", [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\x00"]
    )
    @pytest.mark.parametrize("place", ["content", "extra", "arguments"])
    def test_bytes_that_are_no_text(self, bad: bytes, place: str) -> None:
        self.check_text(bad, place)

    @pytest.mark.parametrize(
        "bad",
        [
            rb"\u0000",
            rb"\\\u0000",
            rb"\ud800",
            rb"\uD83D",
            rb"\udc00",
            rb"\uDE00 \ud83d",
            rb"\ud83d\\\ude00",
            rb"\ud83d\ud83d\ude00",
            rb"\ud83d\ude00\ude00",
            rb"\ud83d\u0041",
            rb"\ud83d\n",
        ],
    )
    @pytest.mark.parametrize("place", ["content", "extra", "arguments"])
    def test_escapes_that_are_no_text(self, bad: bytes, place: str) -> None:
        self.check_text(bad, place)

    def check_text(self, bad: bytes, place: str) -> None:
        if place == "arguments":
            payload = with_arguments(b'{"k":["ok @ok"]}'.replace(b"@", bad))
            keyed = with_arguments(b'{"@":1}'.replace(b"@", bad))
            assert code(keyed) == "malformed"
        else:
            payload = raw(body(**{place: "ok @ok"})).replace(b"@", bad)
        assert code(payload) == "malformed"

    def test_a_pair_of_escapes_is_one_character(self) -> None:
        event = decode_event(raw(body(content="@")).replace(b"@", rb"\uD83D\uDE00\ud83d\ude00"))
        assert isinstance(event, events.Message)
        assert event.content == SMILE * 2

    @pytest.mark.parametrize("depth", [65, 66, 200, 900, 1100, 100_000])
    def test_too_deep(self, depth: int) -> None:
        assert code(nested(depth)) == "malformed"
        deep = b"[" * (depth - 1) + b"]" * (depth - 1)
        assert code(raw(body(extra="@")).replace(b'"@"', deep)) == "malformed"

    def test_too_deep_in_objects_with_misleading_text(self) -> None:
        value: Any = "}}]]"
        for _ in range(64):
            value = {'"]\\': value}
        assert code(raw(of("tool.called", call_id="c", tool="t", arguments=value))) == "malformed"

    def test_ten_megabytes_of_nesting(self) -> None:
        for payload in (b"[" * 10_000_000, b'{"a":' * 2_000_000, nested(5_000_000), b'{"a":[' * 1_600_000):
            assert code(payload) == "malformed"

    def test_ten_megabytes_of_width(self) -> None:
        wide = b"[" + b"[]," * 3_300_000 + b"[]]"
        assert decode_event(with_arguments(wide))
        many = b"{" + b",".join(b'"k%d":1' % n for n in range(800_000)) + b"}"
        assert code(many) == "invalid_field"
        assert code(with_arguments(b"1" * 10_000_000)) == "invalid_field"
        assert decode_event(raw(body(content='\\"' * 3_300_000)))


class TestOtherCodes:
    def test_too_large_comes_first(self) -> None:
        payload = raw(body())
        assert decode_event(payload, max_bytes=len(payload))
        assert code(payload, max_bytes=len(payload) - 1) == "too_large"
        assert code(b"\xff" * 100, max_bytes=99) == "too_large"

    @pytest.mark.parametrize("version", [2, 3, 10**30])
    def test_a_newer_version(self, version: int) -> None:
        error = refusal(raw(body(v=version, type="new.type", must_understand=["x"], at=...)))
        assert error.code == "unsupported_version"
        assert error.event_id == "e-1"

    @pytest.mark.parametrize("version", [..., 0, -1, -2, 1.0, 2.0, "2", "1", True, None, [2]])
    def test_no_version(self, version: Any) -> None:
        error = refusal(raw(body(v=version)))
        assert error.code == "invalid_field"
        assert "v" in error.detail

    def test_must_understand_names_what_is_unknown(self) -> None:
        error = refusal(raw(body(must_understand=["content", "shape"])))
        assert (error.code, error.event_id) == ("must_understand", "e-1")
        assert "shape" in error.detail
        assert "content" not in error.detail
        assert code(raw(body(must_understand=["goal"]))) == "must_understand"
        assert code(raw(of("run.started", must_understand=["shape"]))) == "must_understand"
        assert code(raw(body(must_understand=["x" * 100_000]))) == "must_understand"

    @pytest.mark.parametrize("names", ["content", [1], {"content": 1}, 7])
    def test_must_understand_is_a_list_of_names(self, names: Any) -> None:
        assert code(raw(body(must_understand=names))) == "invalid_field"

    @pytest.mark.parametrize(
        "name", ["nope", "", "Message", "message ", "run.started\n", "x" * 100_000, "é", SMILE]
    )
    def test_unknown_type(self, name: str) -> None:
        error = refusal(raw(body(type=name)))
        assert (error.code, error.event_id) == ("unknown_type", "e-1")

    @pytest.mark.parametrize("name", [..., None, 1, ["message"], {}])
    def test_no_type(self, name: Any) -> None:
        error = refusal(raw(body(type=name)))
        assert error.code == "invalid_field"
        assert "type" in error.detail

    @pytest.mark.parametrize(
        ("event", "field"),
        [
            (body(id=...), "id"),
            (body(id="a b"), "id"),
            (body(id="a\n"), "id"),
            (body(id=7), "id"),
            (body(at=...), "at"),
            (body(at="2026-11-30T09:12:00"), "at"),
            (body(at="yesterday"), "at"),
            (body(at=1764490320), "at"),
            (body(at="0001-01-01T00:00:00+23:59"), "at"),
            (body(at="9999-12-31T23:59:59-23:59"), "at"),
            (body(seq=1), "seq"),
            (body(session="s", seq=0), "seq"),
            (body(session="s", seq=1.5), "seq"),
            (body(session="s", seq=MAX_INTEGER + 1), "seq"),
            (body(session="s", seq=10**30), "seq"),
            (body(session=""), "session"),
            (body(role="robot"), "role"),
            (body(content=...), "content"),
            (body(content=None), "content"),
            (body(content=1), "content"),
            (body(content=[{"kind": "sound"}]), "content[0].kind"),
            (body(content=["text"]), "content[0]"),
            (body(content=[{"kind": "image"}]), "media_type"),
            (body(content=[{"kind": "data"}]), "value"),
            (of("tool.called", call_id="c", tool="t"), "arguments"),
            (of("run.started", goal="g", model={"name": "m", "context_window": 0}), "model.context_window"),
            (of("run.started", goal="g", model={"name": "m", "context_window": -1}), "model.context_window"),
            (of("run.started", goal="g", model={"name": "m"}), "context_window"),
            (of("run.started", model={"name": "m", "context_window": 1}), "goal"),
            (of("model.changed", model={"name": "m", "context_window": 0}), "model.context_window"),
            (of("usage.reported", model="m", context_tokens=-1, output_tokens=0), "context_tokens"),
            (of("usage.reported", model="m", context_tokens=1, output_tokens=-1), "output_tokens"),
            (of("step.changed", next_action={"verb": "fly"}), "next_action.verb"),
            (of("step.changed", next_action={"verb": "edit\n"}), "next_action.verb"),
            (of("step.changed", next_action={"verb": "x-"}), "next_action.verb"),
            (of("step.changed", plan=[{"id": "p", "text": "t", "state": "later"}]), "plan[0].state"),
            (of("constraint.set", text="t", source="nobody"), "source"),
            (of("operation.settled", state="pending"), "state"),
            (of("operation.declared", operation_id="", kind="k", idempotency_key="x"), "operation_id"),
            (
                of("operation.declared", kind="k", idempotency_key="x", payload_digest="md5:1"),
                "payload_digest",
            ),
            (of("approval.resolved", outcome="granted", by="b", action="a", uses=0), "uses"),
            (of("child.spawned", child_run="_lane", task="t"), "child_run"),
            (of("child.spawned", child_run="a.b", task="t"), "child_run"),
            (of("evidence.recorded", claim="c", kind="observed", source="s", value={}), "value"),
            (of("evidence.recorded", claim="c", kind="observed", source="s", value=10**400), "value"),
            (of("gap.accepted", through=2, by="b"), "from"),
            (of("run.finished", outcome="done"), "outcome"),
            (
                of("run.started", goal="g", model={"name": "m", "context_window": 1}, labels={"a": 1}),
                "labels",
            ),
        ],
    )
    def test_invalid_fields_are_named(self, event: dict[str, Any], field: str) -> None:
        error = refusal(raw(event))
        assert error.code == "invalid_field"
        assert field in error.detail

    @pytest.mark.parametrize(
        "number", [b"1e999", b"-1e999", b"[[1e400]]", b"9" * 400, b'{"a":[' + b"9" * 4000 + b"]}"]
    )
    def test_numbers_nobody_could_read_later(self, number: bytes) -> None:
        assert code(with_arguments(number)) == "invalid_field"
        part = raw(body(content=[{"kind": "data", "value": "@"}])).replace(b'"@"', number)
        error = refusal(part)
        assert error.code == "invalid_field"
        assert "$.content[0].value" in error.detail

    def test_long_digits_in_text_and_large_numbers_are_fine(self) -> None:
        assert decode_event(with_arguments(b'{"a":"' + b"9" * 5000 + b'"}'))
        assert decode_event(with_arguments(b"1" + b"0" * 308))
        assert decode_event(with_arguments(b"1e308"))

    def test_the_run_must_be_the_subjects(self) -> None:
        assert decode_event(raw(body(run="r1")), run="r1", channel="event").run == "r1"
        assert decode_event(raw(body()), run="r1", channel="event").run is None
        error = refusal(raw(body(run="r2")), run="r1", channel="record")
        assert (error.code, error.event_id) == ("run_mismatch", "e-1")
        assert code(raw(body(run="x" * 100_000)), run="r1") == "run_mismatch"

    @pytest.mark.parametrize("name", sorted(RECORD_TYPES))
    @pytest.mark.parametrize("channel", ["event", "authority"])
    def test_the_sidecars_types_elsewhere(self, name: str, channel: str) -> None:
        error = refusal(raw(of(name)), channel=channel)
        assert (error.code, error.event_id) == ("not_authorized", "e-1")

    def test_other_types_on_the_record_channel(self) -> None:
        assert code(raw(body()), run="r1", channel="record") == "not_authorized"
        assert code(raw(of("approval.resolved")), run="r1", channel="record") == "not_authorized"

    def test_a_record_carries_its_epoch(self) -> None:
        record = of("approval.expired", approval_id="ap-1")
        assert decode_event(raw(record | {"epoch": 3}), run="r1", channel="record").epoch == 3
        assert code(raw(record), run="r1", channel="record") == "invalid_field"

    def test_the_lanes_own_message_belongs_to_the_lane(self) -> None:
        settings = of("settings.applied", settings={}, epoch=1)
        assert decode_event(raw(settings), run="_lane", channel="record")
        assert code(raw(settings), run="r1", channel="record") == "run_mismatch"
        record = of("approval.expired", approval_id="ap-1", epoch=1)
        assert code(raw(record), run="_lane", channel="record") == "run_mismatch"

    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"from": 1, "through": 2},
            {"session": "s", "from": 1},
            {"stream_from": 1},
            {"session": "s", "from": 1, "through": 2, "stream_from": 1, "stream_through": 2},
        ],
    )
    def test_a_gap_is_of_a_session_or_of_the_stream(self, fields: dict[str, Any]) -> None:
        assert code(raw(of("gap.declared", epoch=1, **fields)), run="r1", channel="record") == "invalid_field"

    def test_the_type_said_twice_is_not_chosen_between(self) -> None:
        payload = raw(body()).replace(b'"type"', b'"type":"run.paused","type"')
        assert code(payload) == "invalid_field"


class TestOtherMessages:
    def test_a_summary_lacks_nothing(self) -> None:
        whole: dict[str, Any] = {name: [] for name in Summary.__struct_fields__}
        whole |= {"operations": {}, "approvals": {}, "objective": "o", "next_action": None, "narrative": ""}
        assert decode_struct(raw(whole), Summary).objective == "o"
        for name in whole:
            part = {key: value for key, value in whole.items() if key != name}
            with pytest.raises(ProtocolError, match="invalid_field"):
                decode_struct(raw(part), Summary)
        with pytest.raises(ProtocolError, match="invalid_field"):
            decode_struct(raw(whole | {"observations": ["bare"]}), Summary)
        with pytest.raises(ProtocolError, match="malformed"):
            decode_struct(b"the summary is:", Summary)

    @pytest.mark.parametrize(
        ("verb", "request_"),
        [
            ("authorize", {}),
            ("authorize", {"operation_id": "op"}),
            ("authorize", {"kind": "k"}),
            ("authorize", {"operation_id": "a b", "request_id": "r"}),
            ("fetch", {}),
            ("fetch", {"refs": [], "from": 1, "through": 2}),
            ("fetch", {"from": 1}),
            ("context", {"format": "xml"}),
            ("search", {}),
            ("packet", {"after": -1}),
            ("packet", []),
        ],
    )
    def test_invalid_questions(self, verb: Any, request_: Any) -> None:
        with pytest.raises(AskRefused) as caught:
            decode_ask(verb, raw(request_))
        assert caught.value.code == "invalid_request"
        assert not caught.value.retryable

    @pytest.mark.parametrize(
        ("verb", "request_"),
        [
            ("authorize", {"operation_id": "op", "request_id": "r"}),
            ("authorize", {"operation_id": "op", "dry_run": True}),
            ("authorize", {"kind": "k", "idempotency_key": "x"}),
            ("fetch", {"refs": []}),
            ("fetch", {"from": 1, "through": 2}),
            ("packet", {"unknown": 1}),
        ],
    )
    def test_valid_questions(self, verb: Any, request_: Any) -> None:
        assert decode_ask(verb, raw(request_)).after is None

    def test_an_empty_question_and_a_large_one(self) -> None:
        assert decode_ask("status", b"").after is None
        with pytest.raises(AskRefused) as caught:
            decode_ask("search", raw({"query": "x" * 100}), max_bytes=50)
        assert caught.value.code == "too_large"

    def test_a_newer_state_is_refused(self) -> None:
        with pytest.raises(ProtocolError, match="unsupported_version"):
            decode_state(raw({"v": 2, "type": "run.state", "epoch": 1}))

    @pytest.mark.parametrize(
        "more", [{}, {"blob": {"name": "n", "digest": "d", "bytes": 1, "encoding": "gzip"}}]
    )
    def test_a_state_that_says_what_we_do_not_know_is_refused(self, more: Any) -> None:
        told = {"v": 1, "type": "run.state", "epoch": 1, "must_understand": ["until"], **more}
        with pytest.raises(ProtocolError, match="must_understand"):
            decode_state(raw(told))

    def test_unset_fields_are_left_out_and_empty_ones_are_not(self) -> None:
        record = LaneEpoch(epoch=1, owner="o", at=datetime(2026, 1, 1, tzinfo=UTC))
        assert encode(record) == (
            b'{"v":1,"type":"lane.epoch","epoch":1,"owner":"o","at":"2026-01-01T00:00:00Z"}'
        )

    def test_the_packet_has_the_fields_of_the_document_in_their_order(self) -> None:
        document = """
            v type tenant lane run at epoch must_understand packet_id reason checkpoint ledger_version
            protected_digest tail cleared verdict blockers authority contract task inputs policy
            progress operations approvals decisions questions artifacts evidence contradictions
            children parent allowed_tools required_artifacts abandoned_calls open_calls summary recent
            omitted violations budget digest text
        """
        assert list(Packet.__struct_encode_fields__) == document.split()


class TestCanonicalForm:
    def test_rfc_8785(self) -> None:
        value = {"b": [1.0, 1e21, 0.1, -0.0], "a": "é\n\u2028", "\ufb33": 1, SMILE: 2}
        assert (
            canonical(value)
            == ('{"a":"é\\n\u2028","b":[1,1e+21,0.1,0],"' + SMILE + '":2,"\ufb33":1}').encode()
        )

    def test_structs_bytes_and_moments(self) -> None:
        at = datetime(2026, 1, 1, 1, tzinfo=UTC)
        call = events.ToolCalled(
            v=1, id="e", at=at, call_id="c", tool="t", arguments=msgspec.Raw(b'{"b":1,"a":2}')
        )
        assert canonical(call) == (
            b'{"arguments":{"a":2,"b":1},"at":"2026-01-01T01:00:00Z","call_id":"c","id":"e","tool":"t",'
            b'"type":"tool.called","v":1}'
        )

    def test_large_integers_are_doubles(self) -> None:
        assert canonical([2**53 + 1, -(2**60), 10**21, True]) == canonical(
            [float(2**53 + 1), -float(2**60), 1e21, True]
        )

    def test_a_number_out_of_range_has_no_form(self) -> None:
        with pytest.raises(ValueError, match="out of range"):
            canonical([10**400])

    def test_digests(self) -> None:
        empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        assert digest_bytes(b"") == empty
        assert digest({"b": 1, "a": 2.0}) == digest_bytes(b'{"a":2,"b":1}')
        assert digest({"a": timedelta(0)}).startswith("sha256:")
