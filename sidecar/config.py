"""Reading the configuration: one TOML file, the same keys as variables, and flags; all mistakes at once.

The only place that looks at the environment. It opens nothing but the file and the one with a provider's key
(and looks whether a credentials file exists); what a value means is for those who use it.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import msgspec.structs

from sidecar.config_shape import (
    KEYS,
    TABLES,
    Config,
    ConfigError,
    Mode,
    Problem,
    Rule,
    Setting,
)
from sidecar.config_values import (
    DEEP,
    Given,
    Refused,
    parse_listen,
    problem,
    read,
    read_text,
    too_deep,
    unknown,
)

__all__ = [
    "Config",
    "ConfigError",
    "Mode",
    "Problem",
    "Reload",
    "Rule",
    "Setting",
    "load_config",
    "parse_listen",
    "reload_rules",
]

PREFIX = "WATCHKEEPER_"
DEFAULT_FILE = Path("watchkeeper.toml")
# Read elsewhere: the file's own name by us, the place of test transcripts by the test suite.
_NOT_KEYS = frozenset({"WATCHKEEPER_CONFIG", "WATCHKEEPER_CORPUS"})
# Kubernetes sets these in every container of a namespace that has a Service called watchkeeper….
_SERVICE_LINK = re.compile(
    r"WATCHKEEPER_(?:\w+_)?(?:SERVICE_(?:HOST|PORT)(?:_\w+)?"
    r"|PORT_[0-9]+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)=.*"
    r"|WATCHKEEPER_(?:\w+_)?PORT=(?:tcp|udp|sctp)://.*"
)
# The usual variable of each provider, so that a key need not be given twice.
_PROVIDER_KEYS = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}


class Reload(msgspec.Struct, frozen=True):
    """What `reload_rules` found: the configuration to go on with, and changed keys that need a restart."""

    config: Config
    ignored: tuple[str, ...]


def load_config(
    file: Path | None, env: Mapping[str, str], overrides: Mapping[str, object] | None = None
) -> Config:
    """Read file, variables and overrides (dotted key to value, `None` = not given); later ones win.

    Without `file` it is the one `WATCHKEEPER_CONFIG` names, else `watchkeeper.toml` of the working directory
    if that exists. Raises `ConfigError` with every problem found; unknown keys and variables are problems.
    """
    problems: list[Problem] = []
    path, given = _from_file(file, env, problems)
    given |= _from_env(env, problems)
    given |= _from_overrides(overrides or {}, problems)
    values: dict[str, Any] = {}
    for key in KEYS:
        if key in given:
            read(key, given[key], values, problems)
    _provider_key(env, given, values, problems)
    _combinations(values, given, problems)
    if problems:
        raise ConfigError(problems)
    config = _assemble(values, given, path)
    return msgspec.structs.replace(config, overrides=dict(overrides or {}))


def reload_rules(config: Config, env: Mapping[str, str]) -> Reload:
    """Read everything again, under the same flags, but take over only `mode` and `rules`.

    Raises `ConfigError` if anything in it is wrong; the old configuration then stays in force whole.
    """
    new = load_config(config.file, env, config.overrides)
    sources = {key: source for key, source in config.sources.items() if key not in ("mode", "rules")}
    sources |= {key: source for key, source in new.sources.items() if key in ("mode", "rules")}
    taken = msgspec.structs.replace(config, mode=new.mode, rules=new.rules, sources=sources)
    fixed = (key for key in KEYS if key not in ("mode", "rules"))
    return Reload(taken, tuple(key for key in fixed if new.value(key) != config.value(key)))


# --- where values come from ---------------------------------------------------------------------------------


def _from_file(
    file: Path | None, env: Mapping[str, str], problems: list[Problem]
) -> tuple[Path | None, dict[str, Given]]:
    named = file or (Path(env["WATCHKEEPER_CONFIG"]) if env.get("WATCHKEEPER_CONFIG") else None)
    path = named or DEFAULT_FILE
    if named is None and not os.path.exists(path):
        return None, {}
    source = f"file {path}"
    given: dict[str, Given] = {}
    try:
        data = tomllib.loads(read_text(path))
        if too_deep(data):
            raise RecursionError
    except Refused as refused:
        problems.append(problem("config", source, str(path), str(refused)))
        return path, given
    except OSError as error:
        problems.append(problem("config", source, str(path), f"a readable file ({error.strerror})"))
        return path, given
    except ValueError as error:
        problems.append(problem("config", source, str(path), f"valid TOML in UTF-8 ({error})"))
        return path, given
    except RecursionError:
        problems.append(problem("config", source, str(path), DEEP))
        return path, given
    for name, value in data.items():
        if name not in TABLES:
            _accept(name, Given(value, source, lenient=False), given, problems)
        elif isinstance(value, dict):
            for field, inner in value.items():
                _accept(f"{name}.{field}", Given(inner, source, lenient=False), given, problems)
        else:
            problems.append(problem(name, source, value, f"a table [{name}]"))
    return path, given


def _from_env(env: Mapping[str, str], problems: list[Problem]) -> dict[str, Given]:
    given: dict[str, Given] = {}
    for name in sorted(env):
        if not name.startswith(PREFIX) or name in _NOT_KEYS:
            continue
        key = name.removeprefix(PREFIX).replace("__", ".").lower()
        found = Given(env[name], f"env {name}", lenient=True)
        if name == _variable(key) and key in KEYS:
            given[key] = found
        elif not _SERVICE_LINK.fullmatch(f"{name}={env[name]}"):
            allowed = unknown("variable", name, map(_variable, KEYS))
            problems.append(problem(name, "environment", env[name], allowed))
    return given


def _from_overrides(overrides: Mapping[str, object], problems: list[Problem]) -> dict[str, Given]:
    given: dict[str, Given] = {}
    for key, value in overrides.items():
        if value is not None:
            _accept(key, Given(value, "flag", lenient=True), given, problems)
    return given


def _accept(key: str, found: Given, given: dict[str, Given], problems: list[Problem]) -> None:
    if key in KEYS:
        given[key] = found
    else:
        problems.append(problem(key, found.source, found.value, unknown("key", key, [*KEYS, *TABLES])))


def _variable(key: str) -> str:
    return PREFIX + key.upper().replace(".", "__")


# --- all values together ------------------------------------------------------------------------------------


def _provider_key(
    env: Mapping[str, str], given: dict[str, Given], values: dict[str, Any], problems: list[Problem]
) -> None:
    """The key as given, else from its file, else from the provider's own variable."""
    file = values.get("summarizer.api_key_file")
    if values.get("summarizer.api_key") is None and file is not None:
        source = given["summarizer.api_key_file"].source
        try:
            key = read_text(file).strip()
        except (Refused, OSError, UnicodeDecodeError):
            key = ""
        if not key:
            problems.append(
                problem(
                    "summarizer.api_key_file", source, str(file), "a file that can be read and holds a key"
                )
            )
            return
        values["summarizer.api_key"] = key
        given["summarizer.api_key"] = Given(key, f"file of summarizer.api_key_file ({source})", lenient=True)
    variable = _PROVIDER_KEYS.get(values.get("summarizer.kind", ""), "")
    if values.get("summarizer.api_key") is None and env.get(variable):
        values["summarizer.api_key"] = env[variable]
        given["summarizer.api_key"] = Given(env[variable], f"env {variable}", lenient=True)


def _combinations(values: dict[str, Any], given: dict[str, Given], problems: list[Problem]) -> None:
    """Values that are fine alone and nonsense together. A key that is already a problem is left alone."""
    wrong = {problem.key for problem in problems}
    defaults = Config()

    def now(key: str) -> Any:
        return values.get(key, defaults.value(key))

    def refuse(key: str, allowed: str, *with_keys: str) -> None:
        if wrong.isdisjoint((key, *with_keys)):
            source = given[key].source if key in given else "default"
            problems.append(problem(key, source, now(key), allowed))

    for lower, upper in (("checkpoint_at", "compact_at"), ("compact_at", "critical_at")):
        low, high = f"budget.{lower}", f"budget.{upper}"
        if now(low) >= now(high):
            refuse(low, f"below {high} (now {now(high)})", high)
    if "budget.user_tokens" in given and now("budget.user_tokens") > now("budget.packet_tokens"):
        at_most = f"at most budget.packet_tokens (now {now('budget.packet_tokens')})"
        refuse("budget.user_tokens", at_most, "budget.packet_tokens")
    if now("nats.key") is not None and now("nats.cert") is None:
        refuse("nats.key", "unset while nats.cert is", "nats.cert")
    lanes = now("lanes")
    if isinstance(lanes, tuple) and len(lanes) > now("lease.max_lanes"):
        refuse("lanes", f"at most lease.max_lanes (now {now('lease.max_lanes')}) lanes", "lease.max_lanes")
    kind = now("summarizer.kind")
    if kind in _PROVIDER_KEYS and now("summarizer.model") is None:
        refuse("summarizer.model", f"a model name when summarizer.kind is {kind}", "summarizer.kind")
    if kind in _PROVIDER_KEYS and now("summarizer.api_key") is None and now("summarizer.base_url") is None:
        needed = (
            f"a key, a file with one, the variable {_PROVIDER_KEYS[kind]}, "
            "or summarizer.base_url of a server without keys"
        )
        refuse(
            "summarizer.api_key",
            needed,
            "summarizer.kind",
            "summarizer.base_url",
            "summarizer.api_key_file",
        )


def _assemble(values: dict[str, Any], given: dict[str, Given], path: Path | None) -> Config:
    tables: dict[str, dict[str, Any]] = {}
    top: dict[str, Any] = {}
    for key, value in values.items():
        table, dot, name = key.partition(".")
        if dot:
            tables.setdefault(table, {})[name] = value
        else:
            top[key] = value
    if isinstance(top.get("lanes"), int):
        top["lanes_auto"], top["lanes"] = top["lanes"], ()
    top |= {name: TABLES[name](**fields) for name, fields in tables.items()}
    sources = {key: found.source for key, found in given.items()}
    return Config(**top, sources=sources, file=path)
