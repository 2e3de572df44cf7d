"""Redaction: what goes, what stays, and that looking only where hints point misses nothing."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import detectors
from protocol.codec import decode_event
from protocol.content import RedactionPattern, RedactionRules
from protocol.redaction import DEFAULT, Redactor, holds_secret, redactor_for
from sidecar.importers import ImportFailure, import_files
from support.planted import KINDS, Planted, planted

ENVELOPE = {"v": 1, "id": "e-1", "at": "2026-11-30T09:00:00Z"}
CORPUS = Path(os.environ.get("WATCHKEEPER_CORPUS", "../shared/corpus/transcripts"))
MOST_FALSE = 0.005
"""Share of the corpus' messages in which something may be redacted that is no secret."""


def sent(type_: str, **fields: Any) -> dict[str, Any]:
    return {**ENVELOPE, "type": type_, **fields}


def payload(type_: str, **fields: Any) -> bytes:
    return json.dumps(sent(type_, **fields)).encode()


def told(type_: str, **fields: Any) -> dict[str, Any]:
    """The message as it is kept."""
    raw = payload(type_, **fields)
    found = DEFAULT.message(raw)
    kept = raw if found is None else found.payload
    decode_event(kept)
    value: dict[str, Any] = json.loads(kept)
    return value


@pytest.mark.parametrize("item", planted(4 * len(KINDS)), ids=lambda item: item.kind)
def test_a_secret_of_every_kind_becomes_the_mark_of_its_kind(item: Planted) -> None:
    shown = DEFAULT.text(item.text)
    assert item.secret not in shown
    assert f"[redacted:{item.kind}]" in shown
    assert DEFAULT.text(shown) == shown
    assert holds_secret(item.text)
    assert not holds_secret(shown)


@pytest.mark.parametrize(
    "text",
    [
        "The token count is 12, the password is required and no secret is kept.",
        "max_tokens: 4096, max_tokens=4096, tokens: 12_000, total_tokens = 3.5",
        '{"usage":{"input_tokens":4096,"output_tokens":12,"cache_read_tokens":0}}',
        "password=$DB_PASSWORD and PASSWORD=${PW} and password: {{ vault.pw }}",
        'password: <your password>, api_key="<API_KEY>", token: ***, secret: None, token=null',
        "password = get_password(user)\ntoken = response.json()['token']",
        "def login(user: str, password: str, token: Optional[str] = None) -> None:",
        "const token: string = req.headers.token; this.password = password;",
        "connect(user=user, password=password, token=self.token)",
        'api_key=os.environ["API_KEY"], secret=settings.client_secret',
        "secrets.py:12:import secrets\ntoken_store.go:7:package token",
        "tokenizer: gpt2\ntoken_type: bearer\npassword_file: /run/secrets/db\nsecretName: app-tls",
        "Basic concepts of Bearer authentication, basic usage",
        "https://a.invalid:8080/x@y and git@host.invalid:a/b.git and postgres://db.invalid/app",
        "postgres://bob:$PGPASSWORD@db.invalid/app and postgres://bob:***@db.invalid/app",
        "sk-learn-pipeline-example task-force-of-the-year risk-management-of-projects",
        "grep for -----BEGIN RSA PRIVATE KEY----- in all files",
        "eyJ is how a token begins",
        "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08 commit 3f786850e387550f",
        "password: required\npassword: string\ntoken: refresh\nsecret: true",
        'OPENAI_API_KEY="OPENAI_API_KEY" api_key: YOUR_API_KEY password: your-password',
        "if token == expected: pass\nif password != other: fail",
        "Password must be at least 8 characters",
        "authorization = base64.decodebytes(auth) and Authorization: AWS4-HMAC-SHA256 Credential=x",
        "sk-ecdsa-sha2-nistp256@openssh.invalid is a key type; see `Basic Operations for tables`",
        'encryptionKey: "arn:aws:kms:us-west-2:111122223333:key/a1b2c3d4-5678-90ab-cdef-0123456789ab"',
        "docker login --password-stdin public.invalid/alias4; TOKEN_PREFIX = 'k8s-aws-v1.'",
        'Token: "#d8dee9", {"batch_1_day_max_input_tokens": batch_1_day_max_input_tokens}',
        "AKIA is the prefix, ghp_ another, xoxb- as well",
        "token_count: 5, max_tokens=100, tokens: many",
        'password: str\npassword: bytes\n"secret": null\ntoken: AuthToken',
        "password = getpass()\ntoken = nextToken\napi_key = config.key\nsecret = args[0]\npassword = hashed",
        "password: please enter it\nsecret: keep it where nobody looks\ntoken = head + tail",
        "if token == expected or secret != given: raise",
    ],
)
def test_near_misses_stay(text: str) -> None:
    assert DEFAULT.text(text) == text
    assert told("message", role="user", content=text)["content"] == text


def test_every_kind_of_text_field_is_redacted_and_no_id_key_digest_ref_or_name_is() -> None:
    """The same words in every place: only texts change."""
    word = "token-gh" + "p_" + "a1" * 20
    key = "gh" + "p_" + "b2" * 20
    text = f"use {key} now"
    digest = "sha256:" + "ab" * 32
    messages = [
        sent(
            "run.started", goal=text, done_when=[text], model={"name": word, "context_window": 9},
            constraints=[{"id": word, "text": text, "source": "user", "forbids": {"kinds": [word], "targets": [text]}}],
            scope={"purpose": text, "tools": [word], "kinds": [word]}, labels={"team": text}, owner=text,
            inputs=[{"name": word, "version": word, "digest": digest}], policy_version=word,
        ),
        sent("message", role="user", content=text, message_id=word, in_reply_to=word, supersedes=word),
        sent("message", role="user", content=[
            {"kind": "text", "text": text}, {"kind": "reasoning", "text": text},
            {"kind": "data", "value": {"id": text, "deep": [[text]]}},
            {"kind": "image", "media_type": "image/png", "artifact_id": word},
        ]),
        sent("tool.called", call_id=word, tool=word, arguments={"id": text, "list": [text]}, operation_id=word),
        sent("tool.returned", call_id=word, status="ok", content=text, conclusion=text, artifact_id=word),
        sent("step.changed", phase=text, completed=[{"text": text, "refs": [f"event:{word}"]}],
             plan=[{"id": word, "text": text, "state": "todo"}], focus={"files": [text], "hypothesis": text},
             next_action={"verb": "x-" + "abc", "detail": text, "operation_id": word},
             blockers=[{"id": word, "text": text}], uncertain=[text]),
        sent("decision.made", decision_id=word, summary=text, reason=text, refs=[f"event:{word}"],
             rejected=[{"alternative": text, "reason": text}], supersedes=word),
        sent("operation.declared", operation_id=word, kind=word, idempotency_key=word, target=text, tool=word,
             description=text, payload_digest=digest, approval_id=word),
        sent("operation.settled", operation_id=word, state="succeeded", receipt=text, detail=text),
        sent("operation.reconciled", operation_id=word, state="succeeded", evidence=f"evidence:{word}"),
        sent("approval.requested", approval_id=word, action=word, scope=text, payload_ref=f"artifact:{word}"),
        sent("artifact.saved", artifact_id=word, uri=f"s3://x/{text}", sha256="ab" * 32, description=text),
        sent("evidence.recorded", evidence_id=word, claim=text, kind="observed", source=f"event:{word}", value=text),
        sent("evidence.recorded", evidence_id=word, claim=text, kind="observed", source=f"https://h.invalid/{key}"),
        sent("question.opened", question_id=word, text=text),
        sent("child.spawned", child_run="c", task=text, allowed_tools=[word], granted_refs=[f"event:{word}"]),
        sent("message", role="user", content="x", unheard_of={"tool": text, "deeper": {"id": key}}),
    ]  # fmt: skip
    for message in messages:
        found = DEFAULT.message(json.dumps(message).encode())
        kept = message if found is None else json.loads(found.payload)
        assert kept == json.loads(json.dumps(message).replace(key, "[redacted:github_token]"))
        decode_event(json.dumps(kept).encode())


def test_a_name_in_the_senders_own_json_gives_its_value_away() -> None:
    shown = told(
        "tool.called",
        call_id="c",
        tool="http",
        arguments={
            "password": "swordfish",
            "headers": [
                {"name": "X-Api-Key", "value": "abcdef123456"},
                {"value": "q9w8e7r6", "key": "DB_SECRET"},
            ],
            "db": {"passwd": 12345678, "port": 5432, "max_tokens": 4096, "token": None},
            "body": json.dumps({"clientSecret": "s3cr3t-value"}),
            "gh" + "p_" + "c3" * 20: "a key may hold one too",
        },
    )["arguments"]
    assert shown == {
        "password": "[redacted:password]",
        "headers": [
            {"name": "X-Api-Key", "value": "[redacted:api_key]"},
            {"value": "[redacted:secret]", "key": "DB_SECRET"},
        ],
        "db": {"passwd": "[redacted:password]", "port": 5432, "max_tokens": 4096, "token": None},
        "body": '{"clientSecret": "[redacted:secret]"}',
        "[redacted:github_token]": "a key may hold one too",
    }


def test_the_rest_of_a_message_stays_as_it_was_sent() -> None:
    raw = (
        b'{"at":"2026-11-30T09:00:00Z", "type":"message","v":1,"later":[1,2.50,{"x":null}],"id":"e-1",'
        b'"role":"user","content":"password=hunter2 and \\u00fc"}'
    )
    found = DEFAULT.message(raw)
    assert found is not None
    assert found.counts == {"password": 1}
    assert found.payload.decode() == (
        '{"at":"2026-11-30T09:00:00Z","type":"message","v":1,"later":[1,2.5,{"x":null}],"id":"e-1",'
        '"role":"user","content":"password=[redacted:password] and ü"}'
    )
    assert DEFAULT.message(found.payload) is None


def test_an_unknown_field_nobody_can_read_goes() -> None:
    raw = payload("message", role="user", content="password=hunter2").replace(b'{"v"', b'{"n": 1e999, "v"')
    found = DEFAULT.message(raw)
    assert found is not None
    assert b"hunter2" not in found.payload
    assert b"1e999" not in found.payload


@pytest.mark.parametrize("escape", ["\\u0067hp_", "g\\u0068p_", "ghp\\u005f"])
def test_escaped_letters_hide_nothing(escape: str) -> None:
    body = "d4" * 20
    raw = payload("message", role="user", content="KEY").replace(b"KEY", f"{escape}{body}".encode())
    found = DEFAULT.message(raw)
    assert found is not None
    assert body.encode() not in found.payload


def test_escaped_slashes_hide_nothing() -> None:
    raw = payload("message", role="user", content="KEY").replace(
        b"KEY", b"postgres:\\/\\/bob:hunter2@db.invalid"
    )
    found = DEFAULT.message(raw)
    assert found is not None
    assert b"hunter2" not in found.payload


# --- laws ---------------------------------------------------------------------------------------------------

PIECES = st.one_of(
    st.sampled_from([item.text for item in planted(3 * len(KINDS), seed=7)]),
    st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12),
    st.sampled_from(
        ["password", "token", "secret: ", "api_key=", '"', "'", "\\", "\n", "\t", " ", "=", ":", "[redacted:token]",
         "[redacted", "]", "Bearer ", "basic ", "://", "@", "eyJ", "-----BEGIN PRIVATE KEY-----", "hunter2", "1234567"]
    ),
)  # fmt: skip
TEXTS = st.lists(PIECES, min_size=1, max_size=6).map("".join)


@given(TEXTS)
@settings(max_examples=200, deadline=None)
def test_redacting_twice_is_redacting_once(text: str) -> None:
    once = DEFAULT.text(text)
    assert DEFAULT.text(once) == once
    raw = payload("message", role="user", content=text)
    found = DEFAULT.message(raw)
    if found is not None:
        assert DEFAULT.message(found.payload) is None


@given(TEXTS, st.booleans(), st.sampled_from([None, 2]))
@settings(max_examples=200, deadline=None)
def test_hints_over_the_bytes_miss_nothing_that_stands_in_the_texts(
    text: str, ascii_only: bool, indent: int | None
) -> None:
    body = {**ENVELOPE, "type": "tool.called", "call_id": "c", "tool": "t", "arguments": {"a": [text]}}
    raw = json.dumps(body, ensure_ascii=ascii_only, indent=indent).encode()
    found = DEFAULT.message(raw)
    shown = body if found is None else json.loads(found.payload)
    assert shown["arguments"]["a"][0] == DEFAULT.text(text)


@given(st.sampled_from(["badge", "pin"]), st.text(max_size=30), TEXTS)
@settings(max_examples=100, deadline=None)
def test_configured_patterns_keep_the_law(name: str, before: str, text: str) -> None:
    rules = RedactionRules(
        patterns=(
            RedactionPattern(name=name, regex=r"[a-z]{3}\S*"),
            RedactionPattern(name="any", regex="red."),
        )
    )
    redactor = redactor_for(rules)
    once = redactor.text(before + text)
    assert redactor.text(once) == once


# --- rules --------------------------------------------------------------------------------------------------


def test_configured_patterns_allowed_values_and_the_switch() -> None:
    badge = RedactionRules(patterns=(RedactionPattern(name="badge", regex="BADGE-([0-9]{6})"),))
    assert Redactor(badge).text("BADGE-123456 password=hunter2") == (
        "BADGE-[redacted:badge] password=[redacted:password]"
    )
    found = Redactor(badge).message(payload("message", role="user", content="BADGE-123456"))
    assert found is not None
    assert found.counts == {"badge": 1}
    allowed = Redactor(RedactionRules(allow=("hunter2",)))
    assert (
        allowed.text("password=hunter2 password=hunter3") == "password=hunter2 password=[redacted:password]"
    )
    arguments = {"password": "hunter2", "secret": "hunter3!"}
    called = allowed.message(payload("tool.called", call_id="c", tool="t", arguments=arguments))
    assert called is not None
    assert json.loads(called.payload)["arguments"] == {"password": "hunter2", "secret": "[redacted:secret]"}
    off = Redactor(RedactionRules(enabled=False, patterns=badge.patterns))
    assert off.text("password=hunter2") == "password=hunter2"
    assert off.message(payload("message", role="user", content="password=hunter2")) is None
    assert redactor_for(badge) is redactor_for(RedactionRules(patterns=badge.patterns))


def test_a_pattern_that_cannot_be_read_does_not_stop_the_fold() -> None:
    rules = RedactionRules(patterns=(RedactionPattern(name="x", regex="("),))
    assert Redactor(rules).text("password=hunter2") == "password=[redacted:password]"


@pytest.mark.parametrize(
    "value", ["abcdefghijklmnopqrstuv", "a1b2c3d4.e5f6g7h8.i9", "q8Zr5tY1", "v1.9f8e7d6c5b4a"]
)
def test_what_stands_behind_bearer_is_a_secret_in_every_header(value: str) -> None:
    for text in (
        f"Authorization: Bearer {value}",
        f'"authorization": "bearer {value}"',
        f"-H 'Authorization: token {value}'",
    ):
        assert value not in DEFAULT.text(text)


def test_a_mark_tells_no_length() -> None:
    texts = {DEFAULT.text(f"password={'a1' * size}") for size in (4, 40, 400, 4000)}
    assert texts == {"password=[redacted:password]"}


def test_a_text_full_of_names_is_redacted_without_judging_each() -> None:
    text = "token=" * 50_000 + " password=x" * 20_000
    shown = DEFAULT.text(text)
    assert DEFAULT.text(shown) == shown


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("secret=mysecretvalue", "mysecretvalue"),
        ("password: hunter", "hunter"),
        ("api_key = abcdef", "abcdef"),
        ("log in with password: swordfish, then go on", "swordfish"),
        ("my password: swordfish and user: bob", "swordfish"),
        ("PASSWORD=hunter\nDB_PASSWORD=swordfish", "hunter"),
        ("https://a.invalid/x?secret=mysecretvalue&page=1", "mysecretvalue"),
        ("client --password=hunter --verbose", "hunter"),
        ("token: mytokenvalue\nuser: bob", "mytokenvalue"),
        ('{"api_key": "abcdef"}', "abcdef"),
        ('{"secret": "mysecretvalue"}', "mysecretvalue"),
        ("client_secret=verysecret;", "verysecret"),
    ],
)
def test_a_plain_word_that_a_name_gives_away_goes(text: str, secret: str) -> None:
    shown = DEFAULT.text(text)
    assert secret not in shown
    assert DEFAULT.text(shown) == shown
    assert secret not in told("message", role="user", content=text)["content"]


def test_of_a_text_full_of_secrets_the_rest_goes_as_one() -> None:
    text = "start " + "password=abc123xyz " * (2 * detectors.MOST_FOUND) + "end"
    shown = DEFAULT.text(text)
    assert shown.startswith("start password=[redacted:password] ")
    assert shown.count("[redacted:") == detectors.MOST_FOUND + 1
    assert shown.endswith("[redacted:secret]")
    assert DEFAULT.text(shown) == shown


def test_looking_at_many_messages_at_once_finds_what_looking_at_each_does() -> None:
    messages = [payload("message", role="user", content=item.text) for item in planted(3 * len(KINDS))]
    ordinary = [
        payload("message", role="user", content=f"nothing of note, {number}") for number in range(100)
    ]
    mixed = [*ordinary[:40], *messages[:5], *ordinary[40:], *messages[5:]]
    assert detectors.all_hinted(mixed) == [detectors.hinted(message) for message in mixed]


def test_every_form_has_its_own_hint_and_no_kind_is_missing_in_the_samples() -> None:
    assert {form.kind for form in detectors.FORMS} - set(KINDS) == {
        "discord_token",
        "twilio_key",
        "url_token",
    }
    assert set(KINDS) <= set(detectors.KINDS)


# --- the corpus ---------------------------------------------------------------------------------------------


def test_transcripts_without_secrets_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    if not CORPUS.is_dir():
        pytest.skip(f"no transcripts in {CORPUS}")
    counts: Counter[str] = Counter()
    changed = looked = total = 0
    for file in sorted(CORPUS.rglob("*.jsonl")):
        try:
            messages = list(import_files([file], format="auto", window=100_000))
        except ImportFailure:
            continue
        for message in messages:
            raw = json.dumps(message.event).encode()
            total += 1
            looked += bool(detectors.hinted(raw))
            found = DEFAULT.message(raw)
            if found is not None:
                changed += 1
                counts.update(found.counts)
    with capsys.disabled():
        print(f"\nredaction: {total} messages, {looked} looked at closely, {changed} changed {dict(counts)}")
    assert total > 500
    assert changed <= total * MOST_FALSE
