"""Ids, tokens, digests, refs and subjects: what is a name, and what only looks like one."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import subjects
from protocol.identifiers import (
    DIGEST_PATTERN,
    ID_PATTERN,
    REF_KINDS,
    TOKEN_PATTERN,
    Ref,
    is_digest,
    is_id,
    is_ref,
    is_token,
    parse_ref,
)

HEX = "0123456789abcdef" * 4
TOKENS = st.from_regex(r"[A-Za-z0-9-][A-Za-z0-9_-]{0,20}", fullmatch=True)


@pytest.mark.parametrize("text", ["e-1", "a" * 128, "._:/@+=-", "call_00"])
def test_ids(text: str) -> None:
    assert is_id(text)
    assert re.search(ID_PATTERN, text)


@pytest.mark.parametrize("text", ["", "a" * 129, "a b", "a\n", "\na", "é", "a*", "a#b", "a|b"])
def test_no_ids(text: str) -> None:
    assert not is_id(text)
    assert not re.search(ID_PATTERN, text)


@pytest.mark.parametrize("text", ["r1", "-", "a_b", "9", "a" * 128])
def test_tokens(text: str) -> None:
    assert is_token(text)
    assert re.search(TOKEN_PATTERN, text)


@pytest.mark.parametrize("text", ["", "_", "_lane", "a.b", "*", ">", "a b", "a\n", "a" * 129, "a/b"])
def test_no_tokens(text: str) -> None:
    assert not is_token(text)
    assert not re.search(TOKEN_PATTERN, text)


@pytest.mark.parametrize(
    "text", [f"sha256:{HEX.upper()}", HEX, f"sha256:{HEX}0", f"sha256:{HEX}\n", "sha256:"]
)
def test_no_digests(text: str) -> None:
    assert is_digest(f"sha256:{HEX}")
    assert not is_digest(text)
    assert not re.search(DIGEST_PATTERN, text)


@pytest.mark.parametrize("kind", sorted(REF_KINDS - {"pos", "sha256"}))
@pytest.mark.parametrize("run", [None, "r-2"])
def test_refs_of_items(kind: str, run: str | None) -> None:
    text = f"{kind}:a/b:c" if run is None else f"run:{run}/{kind}:a/b:c"
    assert parse_ref(text) == (kind, "a/b:c", run)
    assert str(parse_ref(text)) == text


def test_refs_of_positions_and_digests() -> None:
    assert parse_ref("pos:40") == Ref("pos", "40")
    assert parse_ref("pos:40").position == 40
    assert parse_ref(f"run:r/sha256:{HEX}") == ("sha256", HEX, "r")
    with pytest.raises(ValueError, match="no position"):
        _ = parse_ref("event:e-1").position


@pytest.mark.parametrize(
    "text",
    [
        "",
        "event",
        "event:",
        "Event:e",
        "event:e f",
        "event:e\n",
        "pos:0",
        "pos:-1",
        "pos:01",
        "pos:1.5",
        "pos:x",
        "pos:9007199254740992",
        "pos:" + "9" * 5000,
        "pos:٣",
        f"sha256:{HEX[:-1]}",
        "run:r",
        "run:r/",
        "run:_lane/event:e",
        "run:a/run:b/event:e",
        "call:c-1",
        "e-1",
        " event:e",
    ],
)
def test_no_refs(text: str) -> None:
    assert not is_ref(text)
    with pytest.raises(ValueError, match=r"not a ref|out of range"):
        parse_ref(text)


@given(st.text())
def test_parsing_a_ref_raises_only_value_errors(text: str) -> None:
    if is_ref(text):
        assert str(parse_ref(text)) == text


@given(TOKENS, TOKENS, TOKENS, st.sampled_from(sorted(subjects.CHANNELS)))
def test_inbound_subjects_are_parsed_back(
    tenant: str, lane: str, run: str, channel: subjects.Channel
) -> None:
    subject = subjects.inbound(tenant, lane, run, channel)
    assert subject == f"wk.v1.in.{tenant}.{lane}.{run}.{channel}"
    assert subjects.parse_inbound(subject) == (tenant, lane, run, channel)
    assert subject.startswith(subjects.inbound_filter(tenant, lane).removesuffix(">"))


@given(TOKENS, TOKENS, TOKENS)
def test_other_subjects_are_parsed_back(tenant: str, lane: str, run: str) -> None:
    for kind in ("packet", "receipt", "notice", "rejected", "epoch"):
        subject = subjects.outbound(tenant, lane, run, kind)
        assert subjects.parse_outbound(subject) == (tenant, lane, run, kind)
    for verb in subjects.VERBS:
        subject = subjects.ask(tenant, lane, run, verb)  # type: ignore[arg-type]
        assert subjects.parse_ask(subject) == (tenant, lane, run, verb)
    assert subjects.parse_state(subjects.state(tenant, lane, run)) == (tenant, lane, run)
    assert subjects.summarize(tenant, lane, run) == f"wk.v1.summarize.{tenant}.{lane}.{run}"


def test_the_lane_speaks_where_it_may_and_nowhere_else() -> None:
    assert subjects.inbound("t", "l", "_lane", "record") == "wk.v1.in.t.l._lane.record"
    assert subjects.parse_inbound("wk.v1.in.t.l._lane.record").run == "_lane"
    assert subjects.out_epoch("t", "l") == "wk.v1.out.t.l._lane.epoch"
    assert subjects.state_epoch("t", "l") == "wk.v1.state.t.l._lane"
    assert subjects.parse_state("wk.v1.state.t.l._lane").run == "_lane"
    assert subjects.outbound("t", "l", "_", "rejected") == "wk.v1.out.t.l._.rejected"
    for channel in ("event", "authority"):
        with pytest.raises(ValueError, match="run"):
            subjects.inbound("t", "l", "_lane", channel)
    with pytest.raises(ValueError, match="run"):
        subjects.outbound("t", "l", "_lane", "packet")
    with pytest.raises(ValueError, match="run"):
        subjects.state("t", "l", "_lane")
    with pytest.raises(ValueError, match="run"):
        subjects.ask("t", "l", "_lane", "status")


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "wk.v1.in.t.l.r",
        "wk.v1.in.t.l.r.event.x",
        "wk.v2.in.t.l.r.event",
        "wk.v1.out.t.l.r.event",
        "wk.v1.in.t.l.r.packet",
        "wk.v1.in.t.l._lane.event",
        "wk.v1.in.t.l._.event",
        "wk.v1.in.t.*.r.event",
        "wk.v1.in.t..r.event",
        "wk.v1.in.t.l.r.event\n",
        "wk.v1.in.t.l.r\n.event",
    ],
)
def test_no_inbound_subjects(subject: str) -> None:
    with pytest.raises(ValueError, match=r"not a|unknown channel"):
        subjects.parse_inbound(subject)
