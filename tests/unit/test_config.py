"""Configuration: defaults, where values come from, and that every mistake is named at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sidecar.app import replaced_url
from sidecar.config import Config, ConfigError, Problem, load_config, parse_listen, reload_rules

DEFAULTS = {
    "tenant": "default",
    "lanes": ("main",),
    "data_dir": Path(".watchkeeper"),
    "mode": "live",
    "nats.url": "nats://127.0.0.1:4222",
    "nats.creds": None,
    "nats.ca": None,
    "nats.cert": None,
    "nats.key": None,
    "nats.replicas": 1,
    "admin.listen": "127.0.0.1:9464",
    "authority.required": True,
    "authority.approval_kinds": (),
    "authority.forbidden_kinds": (),
    "budget.checkpoint_at": 0.65,
    "budget.compact_at": 0.75,
    "budget.critical_at": 0.90,
    "budget.reserve_tokens": 8000,
    "budget.keep_recent_tokens": 20000,
    "budget.packet_tokens": 8000,
    "budget.user_tokens": 4000,
    "budget.result_tokens": 2000,
    "budget.min_gain": 0.30,
    "summarizer.kind": "digest",
    "summarizer.timeout_seconds": 60.0,
    "summarizer.fallback": "digest",
    "summarizer.rebuild_every": 5,
    "summarizer.max_attempts": 3,
    "summarizer.window_tokens": 100000,
    "summarizer.model": None,
    "summarizer.base_url": None,
    "summarizer.api_key": None,
    "summarizer.api_key_file": None,
    "operations.unknown_after_seconds": 900.0,
    "operations.reconcile_by_authority_kinds": (),
    "calls.abandon_after_seconds": 3600.0,
    "intake.gap_after_seconds": 30.0,
    "intake.max_event_bytes": 1048576,
    "intake.batch": 1024,
    "intake.content_mib": 1024,
    "lease.seconds": 15.0,
    "lease.max_lanes": 64,
    "logs.level": "info",
    "logs.format": "auto",
    "storage.max_mib": None,
    "drain.seconds": 20.0,
    "redaction.enabled": True,
    "redaction.patterns": (),
    "redaction.allow": (),
    "retention.succeeded_days": 0.0,
    "retention.failed_days": 0.0,
    "retention.cancelled_days": 0.0,
    "rules": (),
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(tmp_path: Path, text: str, name: str = "given.toml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def problems_of(
    env: dict[str, str] | None = None, *, file: Path | None = None, **overrides: object
) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        load_config(file, env or {}, {key.replace("__", "."): value for key, value in overrides.items()})
    assert str(caught.value).count("\n") == len(caught.value.problems) - 1
    return {problem.key: problem for problem in caught.value.problems}


def test_defaults_are_these_and_no_key_is_missing_here() -> None:
    config = load_config(None, {})
    assert {setting.key: config.value(setting.key) for setting in config.describe()} == DEFAULTS
    assert {setting.source for setting in config.describe()} == {"default"}
    assert config == Config()


def test_every_key_can_come_from_file_variable_and_flag(tmp_path: Path) -> None:
    creds = write(tmp_path, "x", "user.creds")
    texts = {
        "tenant": "acme",
        "lanes": "a,b",
        "data_dir": "/var/lib/w",
        "mode": "shadow",
        "nats.url": "tls://n1:4222,tls://n2",
        "nats.creds": str(creds),
        "nats.ca": str(creds),
        "nats.cert": str(creds),
        "nats.key": str(creds),
        "nats.replicas": "3",
        "admin.listen": "[::1]:0",
        "authority.required": "false",
        "authority.approval_kinds": "mail.*, pay",
        "authority.forbidden_kinds": "rm",
        "budget.checkpoint_at": "0.5",
        "budget.compact_at": "0.6",
        "budget.critical_at": "0.7",
        "budget.reserve_tokens": "1",
        "budget.keep_recent_tokens": "2",
        "budget.packet_tokens": "700",
        "budget.user_tokens": "4",
        "budget.result_tokens": "50",
        "budget.min_gain": "0.2",
        "summarizer.kind": "openai",
        "summarizer.timeout_seconds": "7",
        "summarizer.fallback": "none",
        "summarizer.rebuild_every": "0",
        "summarizer.max_attempts": "1",
        "summarizer.window_tokens": "9000",
        "summarizer.model": "m",
        "summarizer.base_url": "http://127.0.0.1:8000/v1",
        "summarizer.api_key": "k",
        "summarizer.api_key_file": str(creds),
        "operations.unknown_after_seconds": "1.5",
        "operations.reconcile_by_authority_kinds": "pay",
        "calls.abandon_after_seconds": "2",
        "intake.gap_after_seconds": "3",
        "intake.max_event_bytes": "2048",
        "intake.batch": "1",
        "intake.content_mib": "0",
        "lease.seconds": "0.5",
        "lease.max_lanes": "2",
        "logs.level": "debug",
        "logs.format": "json",
        "storage.max_mib": "64",
        "drain.seconds": "0",
        "redaction.enabled": "false",
        "redaction.patterns": '[{"name":"badge","regex":"BADGE-([0-9]{6})"}]',
        "redaction.allow": "hunter2, AKIAEXAMPLE",
        "retention.succeeded_days": "30",
        "retention.failed_days": "90.5",
        "retention.cancelled_days": "7",
        "rules": '[{"labels":{"team":"x"},"mode":"observe","bypass":true}]',
    }
    assert texts.keys() == DEFAULTS.keys()
    by_env = load_config(None, {f"WATCHKEEPER_{k.upper().replace('.', '__')}": v for k, v in texts.items()})
    by_flag = load_config(None, {}, dict(texts))
    file = write(
        tmp_path,
        f"""
        tenant = "acme"
        lanes = ["a", "b"]
        data_dir = "/var/lib/w"
        mode = "shadow"
        [nats]
        url = "tls://n1:4222,tls://n2"
        creds = "{creds}"
        ca = "{creds}"
        cert = "{creds}"
        key = "{creds}"
        replicas = 3
        [admin]
        listen = "[::1]:0"
        [authority]
        required = false
        approval_kinds = ["mail.*", "pay"]
        forbidden_kinds = ["rm"]
        [budget]
        checkpoint_at = 0.5
        compact_at = 0.6
        critical_at = 0.7
        reserve_tokens = 1
        keep_recent_tokens = 2
        packet_tokens = 700
        user_tokens = 4
        result_tokens = 50
        min_gain = 0.2
        [summarizer]
        kind = "openai"
        timeout_seconds = 7
        fallback = "none"
        rebuild_every = 0
        max_attempts = 1
        window_tokens = 9000
        model = "m"
        base_url = "http://127.0.0.1:8000/v1"
        api_key = "k"
        api_key_file = "{creds}"
        [operations]
        unknown_after_seconds = 1.5
        reconcile_by_authority_kinds = ["pay"]
        [calls]
        abandon_after_seconds = 2
        [intake]
        gap_after_seconds = 3
        max_event_bytes = 2048
        batch = 1
        content_mib = 0
        [lease]
        seconds = 0.5
        max_lanes = 2
        [logs]
        level = "debug"
        format = "json"
        [storage]
        max_mib = 64
        [drain]
        seconds = 0
        [redaction]
        enabled = false
        allow = ["hunter2", "AKIAEXAMPLE"]
        [[redaction.patterns]]
        name = "badge"
        regex = 'BADGE-([0-9]{{6}})'
        [retention]
        succeeded_days = 30
        failed_days = 90.5
        cancelled_days = 7
        [[rules]]
        labels = {{ team = "x" }}
        mode = "observe"
        bypass = true
        """,
    )
    by_file = load_config(file, {})
    for key, default in DEFAULTS.items():
        assert by_env.value(key) == by_flag.value(key) == by_file.value(key) != default
    assert by_file.nats.servers == ("tls://n1:4222", "tls://n2")
    assert {setting.source for setting in by_file.describe()} == {f"file {file}"}
    assert {setting.source for setting in by_flag.describe()} == {"flag"}


def test_flag_beats_variable_beats_file_and_the_source_is_told(tmp_path: Path) -> None:
    file = write(tmp_path, 'tenant = "f"\nmode = "observe"\n[lease]\nseconds = 5\n')
    env = {"WATCHKEEPER_TENANT": "e", "WATCHKEEPER_MODE": "shadow"}
    config = load_config(file, env, {"tenant": "o", "mode": None})
    assert (config.tenant, config.mode, config.lease.seconds) == ("o", "shadow", 5.0)
    assert config.sources == {
        "tenant": "flag",
        "mode": "env WATCHKEEPER_MODE",
        "lease.seconds": f"file {file}",
    }


def test_the_file_of_the_working_directory_is_read_unless_another_is_named(tmp_path: Path) -> None:
    write(tmp_path, 'tenant = "here"', "watchkeeper.toml")
    other = write(tmp_path, 'tenant = "there"', "other.toml")
    assert load_config(None, {}).tenant == "here"
    assert load_config(other, {}).tenant == "there"
    assert load_config(None, {"WATCHKEEPER_CONFIG": str(other)}).tenant == "there"


def test_all_mistakes_are_named_at_once_with_key_source_value_and_what_is_allowed(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        tenant = "_x"
        mdoe = "live"
        budget = 3
        [nats]
        url = "http://h"
        [lease]
        seconds = "15"
        secnds = 1
        [[rules]]
        lables = {}
        mode = "loud"
        [[rules]]
        bypass = 1
        """,
    )
    found = problems_of({"WATCHKEEPER_LANES": "a,a", "WATCHKEEPER_LOGS_LEVEL": "info"}, file=file)
    assert set(found) == {
        "tenant",
        "mdoe",
        "budget",
        "nats.url",
        "lease.seconds",
        "lease.secnds",
        "rules[0].lables",
        "rules[0].mode",
        "rules[1].bypass",
        "lanes",
        "WATCHKEEPER_LOGS_LEVEL",
    }
    assert "mode" in found["mdoe"].allowed
    assert "lease.seconds" in found["lease.secnds"].allowed
    assert "labels" in found["rules[0].lables"].allowed
    assert "WATCHKEEPER_LOGS__LEVEL" in found["WATCHKEEPER_LOGS_LEVEL"].allowed
    assert str(found["rules[0].mode"]) == (
        f'rules[0].mode (file {file}): "loud" is refused; allowed: one of observe, shadow, live'
    )
    assert found["lanes"].source == "env WATCHKEEPER_LANES"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("budget.checkpoint_at", "0"),
        ("budget.compact_at", "1"),
        ("budget.critical_at", "nan"),
        ("budget.critical_at", "inf"),
        ("budget.min_gain", "0.09"),
        ("budget.packet_tokens", "499"),
        ("budget.reserve_tokens", "-1"),
        ("budget.reserve_tokens", "1.5"),
        ("summarizer.kind", "gpt"),
        ("summarizer.rebuild_every", "-1"),
        ("summarizer.base_url", "nats://x"),
        ("summarizer.model", 3),
        ("lease.seconds", "0.4"),
        ("lease.seconds", "3601"),
        ("lease.max_lanes", "0"),
        ("admin.listen", "9464"),
        ("admin.listen", ":9464"),
        ("admin.listen", "h:65536"),
        ("admin.listen", "::1:80"),
        ("admin.listen", 9464),
        ("authority.required", "yes"),
        ("nats.creds", "/nowhere/at/all"),
        ("nats.url", "nats://a,,nats://b"),
        ("nats.url", "nats://a:x"),
        ("lanes", ""),
        ("lanes", "a,_b"),
        ("lanes", "auto/0"),
        ("lanes", "auto/x"),
        ("lanes", []),
        ("lanes", [1]),
        ("tenant", "a.b"),
        ("tenant", ""),
        ("data_dir", ""),
        ("mode", "Live"),
        ("rules", "{"),
        ("rules", "[1]"),
        ("logs.level", "trace"),
        ("drain.seconds", "-1"),
        ("redaction.enabled", "maybe"),
        ("redaction.patterns", "BADGE"),
        ("redaction.patterns", '[{"name":"Badge","regex":"x"}]'),
        ("redaction.patterns", '[{"name":"badge","regex":"("}]'),
        ("redaction.patterns", '[{"name":"badge","regex":"x*"}]'),
        ("redaction.patterns", r'[{"name":"badge","regex":"(a)\\1"}]'),
        ("redaction.patterns", '[{"name":"jwt","regex":"x"}]'),
        ("redaction.patterns", '[{"name":"a","regex":"x"},{"name":"a","regex":"y"}]'),
        ("redaction.patterns", [{"name": f"p{number}", "regex": "x"} for number in range(33)]),
        ("redaction.patterns", [{"name": "a", "regex": "x" * 501}]),
        ("redaction.allow", ["x" * 501]),
        ("redaction.allow", [""]),
        ("redaction.allow", [f"v{number}" for number in range(257)]),
        ("retention.failed_days", "-1"),
        ("retention.failed_days", "36501"),
    ],
)
def test_values_out_of_bounds_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {}, {key: value})
    assert all(problem.key.startswith(key) and problem.allowed for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("budget.checkpoint_at", "0.0001"),
        ("budget.critical_at", "0.9999"),
        ("budget.min_gain", "0.1"),
        ("budget.packet_tokens", "4000"),
        ("lease.seconds", 3600),
        ("admin.listen", "localhost:65535"),
        ("lanes", "auto/4096"),
        ("lanes", "-a,0"),
        ("nats.creds", ""),
        ("rules", ""),
        ("redaction.patterns", ""),
        ("redaction.patterns", [{"name": "a", "regex": "(a+)+$"}]),
        ("redaction.allow", ""),
        ("retention.failed_days", 36_500),
        ("retention.succeeded_days", 0),
    ],
)
def test_values_just_inside_are_taken(key: str, value: object) -> None:
    load_config(None, {}, {key: value})


def test_combinations_that_make_no_sense_are_problems() -> None:
    assert set(problems_of(budget__checkpoint_at="0.8")) == {"budget.checkpoint_at"}
    assert set(problems_of(budget__compact_at="0.9")) == {"budget.compact_at"}
    assert set(problems_of(budget__user_tokens=900, budget__packet_tokens=800)) == {"budget.user_tokens"}
    assert load_config(None, {}, {"budget.packet_tokens": 800}).budget.packet_tokens == 800
    assert set(problems_of(lanes="a,b,c", lease__max_lanes=2)) == {"lanes"}
    assert set(problems_of(summarizer__kind="openai")) == {"summarizer.model", "summarizer.api_key"}
    assert set(problems_of(summarizer__kind="anthropic", summarizer__model="m")) == {"summarizer.api_key"}
    # A value that is wrong by itself is not reported a second time for what it would do with others.
    assert set(problems_of(budget__compact_at="7")) == {"budget.compact_at"}


def test_the_providers_own_variable_gives_the_key() -> None:
    config = load_config(
        None, {"OPENAI_API_KEY": "sk-1"}, {"summarizer.kind": "openai", "summarizer.model": "m"}
    )
    assert config.summarizer.api_key == "sk-1"
    assert config.sources["summarizer.api_key"] == "env OPENAI_API_KEY"
    assert load_config(None, {"OPENAI_API_KEY": "sk-1"}).summarizer.api_key is None


def test_a_file_may_hold_the_key(tmp_path: Path) -> None:
    file = write(tmp_path, "sk-from-file\n", "key")
    given = {"summarizer.kind": "openai", "summarizer.model": "m", "summarizer.api_key_file": str(file)}
    config = load_config(None, {"OPENAI_API_KEY": "sk-1"}, given)
    assert config.summarizer.api_key == "sk-from-file"
    shown = {item.key: item for item in config.describe()}
    assert shown["summarizer.api_key"].value == "***"
    assert shown["summarizer.api_key_file"].value == f'"{file}"'
    assert load_config(None, {}, {**given, "summarizer.api_key": "sk-2"}).summarizer.api_key == "sk-2"
    file.write_text(" \n")
    with pytest.raises(ConfigError) as caught:
        load_config(None, {}, given)
    assert [item.key for item in caught.value.problems] == ["summarizer.api_key_file"]


def test_lanes_by_name_or_by_number() -> None:
    named = load_config(None, {"WATCHKEEPER_LANES": "a, b"})
    assert (named.lanes, named.lanes_auto) == (("a", "b"), None)
    auto = load_config(None, {"WATCHKEEPER_LANES": "auto/16"})
    assert (auto.lanes, auto.lanes_auto) == ((), 16)
    assert 'lanes = "auto/16"' in str(auto.describe()[1])


def test_secrets_are_never_shown() -> None:
    env = {
        "WATCHKEEPER_NATS__URL": "nats://me:hunter2@h1,nats://tok-hunter2@h2",
        "WATCHKEEPER_SUMMARIZER__API_KEY": "hunter2",
    }
    text = "\n".join(map(str, load_config(None, env).describe()))
    assert "hunter2" not in text
    assert 'nats.url = "nats://***@h1,nats://***@h2"' in text
    with pytest.raises(ConfigError) as caught:
        load_config(
            None,
            {
                "WATCHKEEPER_NATS__URL": "http://me:hunter2/x@h",
                "WATCHKEEPER_NATS_PASSWORD": "hunter2",
                "WATCHKEEPER_SUMMARIZER_API_KEY": "hunter2",
            },
        )
    assert len(caught.value.problems) == 3
    assert "hunter2" not in str(caught.value)


def test_variables_of_the_platform_are_not_mistaken_for_ours() -> None:
    load_config(
        None,
        {
            "WATCHKEEPER_SERVICE_HOST": "10.0.0.1",
            "WATCHKEEPER_SERVICE_PORT": "9464",
            "WATCHKEEPER_SERVICE_PORT_METRICS": "9464",
            "WATCHKEEPER_PORT": "tcp://10.0.0.1:9464",
            "WATCHKEEPER_PORT_9464_TCP": "tcp://10.0.0.1:9464",
            "WATCHKEEPER_PORT_9464_TCP_ADDR": "10.0.0.1",
            "WATCHKEEPER_METRICS_SERVICE_HOST": "10.0.0.1",
            "PATH": "/bin",
        },
    )
    assert set(problems_of({"WATCHKEEPER_PORT": "9464"})) == {"WATCHKEEPER_PORT"}


def test_a_file_that_cannot_be_read_is_one_problem_among_others(tmp_path: Path) -> None:
    broken = write(tmp_path, "tenant = ")
    assert set(problems_of({"WATCHKEEPER_MODE": "x"}, file=broken)) == {"config", "mode"}
    assert set(problems_of({"WATCHKEEPER_MODE": "x"}, file=tmp_path / "none.toml")) == {"config", "mode"}
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b'tenant = "\xe9"')
    assert set(problems_of(file=latin)) == {"config"}


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 600 + "]" * 600, '[{"labels":' * 20 + "1" + "}]" * 20])
@pytest.mark.parametrize("key", ["rules", "redaction.patterns"])
def test_a_variable_nested_beyond_reason_is_one_problem(key: str, text: str) -> None:
    name = "WATCHKEEPER_" + key.upper().replace(".", "__")
    assert set(problems_of({name: text, "WATCHKEEPER_MODE": "x"})) == {key, "mode"}


@pytest.mark.parametrize(
    "text",
    [
        "rules = " + "[" * 100_000,
        "rules = " + "[" * 200 + "]" * 200,
        "a" + ".a" * 2_000 + " = 1",
        "[" + "a." * 500 + "a]",
        "rules = " + "{a=" * 5_000,
    ],
)
def test_a_file_nested_beyond_reason_is_one_problem(tmp_path: Path, text: str) -> None:
    assert set(problems_of({"WATCHKEEPER_MODE": "x"}, file=write(tmp_path, text))) == {"config", "mode"}


def test_what_is_no_file_of_reasonable_size_is_not_read(tmp_path: Path) -> None:
    assert problems_of({"WATCHKEEPER_CONFIG": "/dev/zero"})["config"].allowed == "a regular file"
    os.mkfifo(tmp_path / "pipe")
    assert problems_of(file=tmp_path / "pipe")["config"].allowed == "a regular file"
    large = write(tmp_path, "#" * (1 << 20) + "\n")
    assert problems_of(file=large)["config"].allowed == "a file of at most 1048576 bytes"
    assert load_config(write(tmp_path, "#" * ((1 << 20) - 1) + "\n"), {}) is not None
    given: dict[str, Any] = {"summarizer__api_key_file": str(write(tmp_path, "k" * (1 << 21), "key"))}
    assert set(problems_of(None, **given)) == {"summarizer.api_key_file"}


def test_the_first_rule_that_matches_decides_mode_and_bypass() -> None:
    rules = [
        {"labels": {"team": "a", "env": "prod"}, "mode": "shadow"},
        {"labels": {"team": "a"}, "bypass": True},
        {"labels": {"team": "b"}, "mode": "observe", "bypass": False},
    ]
    config = load_config(None, {}, {"rules": rules})
    assert config.mode_for({"team": "a", "env": "prod", "x": "y"}) == ("shadow", False)
    assert config.mode_for({"team": "a", "env": "dev"}) == ("live", True)
    assert config.mode_for({"team": "b"}) == ("observe", False)
    assert config.mode_for({}) == ("live", False)


def test_a_reload_takes_over_mode_and_rules_and_names_what_it_left(tmp_path: Path) -> None:
    file = write(tmp_path, 'tenant = "a"\n')
    config = load_config(file, {})
    write(tmp_path, 'tenant = "b"\nmode = "shadow"\n[[rules]]\nlabels = { x = "y" }\nbypass = true\n')
    reload = reload_rules(config, {})
    assert (reload.config.tenant, reload.config.mode) == ("a", "shadow")
    assert reload.config.mode_for({"x": "y"}) == ("shadow", True)
    assert reload.ignored == ("tenant",)
    assert reload.config.sources["mode"] == f"file {file}"
    write(tmp_path, "mode = 1\n")
    with pytest.raises(ConfigError):
        reload_rules(config, {})


def test_a_flag_still_holds_after_a_reload(tmp_path: Path) -> None:
    file = write(tmp_path, 'mode = "observe"\n')
    config = load_config(file, {}, {"mode": "live", "logs.level": "debug"})
    write(tmp_path, 'mode = "shadow"\n')
    reload = reload_rules(config, {})
    assert (reload.config.mode, reload.ignored) == ("live", ())


def test_the_configuration_cannot_be_changed() -> None:
    config = load_config(None, {})
    with pytest.raises(AttributeError):
        config.budget.compact_at = 0.1  # type: ignore[misc]


def test_listen_addresses() -> None:
    assert parse_listen("127.0.0.1:0") == ("127.0.0.1", 0)
    assert parse_listen("[::1]:9464") == ("::1", 9464)
    with pytest.raises(ValueError, match="host:port"):
        parse_listen("x")


def test_a_key_belongs_to_a_certificate(tmp_path: Path) -> None:
    file = write(tmp_path, "x", "tls.pem")
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"WATCHKEEPER_NATS__KEY": str(file)})
    (problem,) = caught.value.problems
    assert (problem.key, problem.allowed) == ("nats.key", "unset while nats.cert is")
    both = {"WATCHKEEPER_NATS__KEY": str(file), "WATCHKEEPER_NATS__CERT": str(file)}
    assert load_config(None, both).nats.key == file


def test_a_reload_of_nothing_names_nothing_beside_an_embedded_broker(tmp_path: Path) -> None:
    file = tmp_path / "wk.toml"
    file.write_text('[nats]\nurl = "nats://elsewhere:4222"\n')
    config = replaced_url(load_config(file, {}), "nats://127.0.0.1:4711")
    assert config.nats.url == "nats://127.0.0.1:4711"
    found = reload_rules(config, {})
    assert (found.ignored, found.config.nats.url) == ((), "nats://127.0.0.1:4711")
    file.write_text('tenant = "b"\n')
    assert reload_rules(config, {}).ignored == ("tenant",)
