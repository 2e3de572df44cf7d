"""The shape of the configuration: every key, its type, its bounds and its default.

One frozen struct per table of the file. It reads nothing: `sidecar.config` fills it. A bound stands in the
type of its field and nowhere else, so that the reader, the error text and `check-config` cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Mode = Literal["observe", "shadow", "live"]
Share = Annotated[float, Meta(gt=0, lt=1)]
Seconds = Annotated[float, Meta(ge=1, le=2_592_000)]
Tokens = Annotated[int, Meta(ge=0, le=10_000_000)]
Days = Annotated[float, Meta(ge=0, le=36_500)]


_SECRET_KEY = re.compile(r"secret|password|passwd|api_?key$|token$", re.IGNORECASE)
_LOGIN = re.compile(r"([a-z][a-z0-9+.-]*://)?[^\s,\"]*@", re.IGNORECASE)


def shown(key: str, value: object) -> str:
    """The value as it may be printed: a secret as `***`, a login in a URL as `***@`, at most 200 letters."""
    if value is None:
        return "unset"
    if _SECRET_KEY.search(key):
        return "***"
    if isinstance(value, float):
        return repr(value)
    text = msgspec.json.encode(value, enc_hook=str).decode()
    if "://" in text or key.endswith("url"):
        text = _LOGIN.sub(r"\1***@", text)
    return text if len(text) <= 200 else f"{text[:200]}…"


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """One table of the file; values are final once read."""


class Nats(Table, frozen=True, kw_only=True):
    """Where the broker is and how we prove who we are. `url` may list several servers, comma-separated.

    `ca` holds the authorities to trust instead of the system's, `cert` and `key` our own certificate for a broker
    that asks for one. The files are read anew at each connection.
    """

    url: str = "nats://127.0.0.1:4222"
    creds: Path | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    replicas: Annotated[int, Meta(ge=1, le=5)] = 1

    @property
    def servers(self) -> tuple[str, ...]:
        """Each server of `url` by itself."""
        return tuple(part.strip() for part in self.url.split(","))


class Admin(Table, frozen=True, kw_only=True):
    """Where health, metrics and the operator's page are served; port 0 takes any free one."""

    listen: str = "127.0.0.1:9464"


class Authority(Table, frozen=True, kw_only=True):
    """What the agent may not decide about itself. Kinds are globs."""

    required: bool = True
    approval_kinds: tuple[str, ...] = ()
    forbidden_kinds: tuple[str, ...] = ()


class Budget(Table, frozen=True, kw_only=True):
    """Levels as shares of the usable window, sizes in tokens, `min_gain` as a share of the context used."""

    checkpoint_at: Share = 0.65
    compact_at: Share = 0.75
    critical_at: Share = 0.90
    reserve_tokens: Tokens = 8_000
    keep_recent_tokens: Tokens = 20_000
    packet_tokens: Annotated[int, Meta(ge=500, le=1_000_000)] = 8_000
    user_tokens: Tokens = 4_000
    result_tokens: Annotated[int, Meta(ge=50, le=1_000_000)] = 2_000
    min_gain: Annotated[float, Meta(ge=0.10, le=0.95)] = 0.30


class Summarizer(Table, frozen=True, kw_only=True):
    """Who writes summaries, within which limits, and what is done when that fails.

    `timeout_seconds` is for one request. `rebuild_every` 0 means never. `window_tokens` bounds what one request
    may carry. `model`, `base_url` and the key, given itself or as a file that holds it, matter to the kinds that
    speak HTTP themselves.
    """

    kind: Literal["digest", "nats", "openai", "anthropic"] = "digest"
    timeout_seconds: Annotated[float, Meta(ge=0.1, le=3_600)] = 60.0
    fallback: Literal["digest", "none"] = "digest"
    rebuild_every: Annotated[int, Meta(ge=0, le=1_000)] = 5
    max_attempts: Annotated[int, Meta(ge=1, le=20)] = 3
    window_tokens: Annotated[int, Meta(ge=2_000, le=10_000_000)] = 100_000
    model: str | None = None
    base_url: str | None = None
    api_key: str | None = None
    api_key_file: Path | None = None


class Operations(Table, frozen=True, kw_only=True):
    """When a dispatched operation without an outcome counts as unknown; what only an authority may settle."""

    unknown_after_seconds: Seconds = 900.0
    reconcile_by_authority_kinds: tuple[str, ...] = ()


class Calls(Table, frozen=True, kw_only=True):
    """When an open tool call counts as abandoned."""

    abandon_after_seconds: Seconds = 3_600.0


class Intake(Table, frozen=True, kw_only=True):
    """How events are read: patience with a missing number, largest event in bytes, events per transaction.

    `content_mib` is what the bucket `WK_CONTENT`, made at start for texts too large for an event, may hold at most;
    0 makes none.
    """

    gap_after_seconds: Seconds = 30.0
    max_event_bytes: Annotated[int, Meta(ge=1_024, le=67_108_864)] = 1_048_576
    batch: Annotated[int, Meta(ge=1, le=10_000)] = 1_024
    content_mib: Annotated[int, Meta(ge=0, le=16_777_216)] = 1_024


class Lease(Table, frozen=True, kw_only=True):
    """How long a lane stays ours without a sign of life, and how many one sidecar may own."""

    seconds: Annotated[float, Meta(ge=0.5, le=3_600)] = 15.0
    max_lanes: Annotated[int, Meta(ge=1, le=1_024)] = 64


class Logs(Table, frozen=True, kw_only=True):
    """`auto` is the console form on a terminal, JSON elsewhere."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "console", "auto"] = "auto"


class Storage(Table, frozen=True, kw_only=True):
    """How large the database file may grow, in MiB; unset means as large as the disk lets it.

    At the limit the daemon stops reading and is not ready, as on a full disk. Logs of the database and a damaged
    file that was moved aside come on top.
    """

    max_mib: Annotated[int, Meta(ge=16, le=16_777_216)] | None = None


class Drain(Table, frozen=True, kw_only=True):
    """How long a clean stop may take before what is left is dropped (nothing is lost by that)."""

    seconds: Annotated[float, Meta(ge=0, le=3_600)] = 20.0


class ExtraPattern(Table, frozen=True, kw_only=True):
    """One more form of secrets: a pattern of RE2 syntax; group 1, if it has one, is the secret."""

    name: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,39}$(?!\n)")]
    regex: Annotated[str, Meta(min_length=1, max_length=500)]


class Redaction(Table, frozen=True, kw_only=True):
    """Secrets taken out of texts before anything is stored or shown; `allow` holds values that are none.

    It belongs to what the lane folds: the owner publishes it, and it holds from there on.
    """

    enabled: bool = True
    patterns: tuple[ExtraPattern, ...] = ()
    allow: tuple[str, ...] = ()


class Retention(Table, frozen=True, kw_only=True):
    """Days after its end that a run is forgotten, with its whole family, by how it ended; 0 keeps it for ever."""

    succeeded_days: Days = 0.0
    failed_days: Days = 0.0
    cancelled_days: Days = 0.0


class Rule(Table, frozen=True, kw_only=True):
    """A mode for runs that carry all of `labels` (none: every run); without `mode` the general one holds."""

    labels: dict[str, str] = {}
    mode: Mode | None = None
    bypass: bool = False

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether the run has each label of the rule with the same value."""
        return all(labels.get(name) == value for name, value in self.labels.items())


class Setting(Table, frozen=True, kw_only=True):
    """One effective value and where it came from, secrets masked."""

    key: str
    value: str
    source: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value}  ({self.source})"


class Problem(Table, frozen=True, kw_only=True):
    """One thing wrong: the key, where its value came from, the value (masked if secret), what is allowed."""

    key: str
    source: str
    value: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.key} ({self.source}): {self.value} is refused; allowed: {self.allowed}"


class ConfigError(ValueError):
    """The configuration cannot be used; `problems` holds all of it. Correct it and start again."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


class Config(Table, frozen=True, kw_only=True):
    """The whole effective configuration.

    `lanes` are the names to own; for `auto/<n>` it is empty and `lanes_auto` is n. `sources` tells for every
    key where its value came from; `file` is the file that was read, if any, `overrides` the flags given.
    """

    tenant: str = "default"
    lanes: tuple[str, ...] = ("main",)
    lanes_auto: int | None = None
    data_dir: Path = Path(".watchkeeper")
    mode: Mode = "live"
    nats: Nats = Nats()
    admin: Admin = Admin()
    authority: Authority = Authority()
    budget: Budget = Budget()
    summarizer: Summarizer = Summarizer()
    operations: Operations = Operations()
    calls: Calls = Calls()
    intake: Intake = Intake()
    lease: Lease = Lease()
    logs: Logs = Logs()
    storage: Storage = Storage()
    drain: Drain = Drain()
    redaction: Redaction = Redaction()
    retention: Retention = Retention()
    rules: tuple[Rule, ...] = ()
    sources: dict[str, str] = {}
    file: Path | None = None
    overrides: dict[str, object] = {}

    def mode_for(self, labels: Mapping[str, str]) -> tuple[Mode, bool]:
        """Mode and bypass of a run with these labels: of the first matching rule, else the general mode."""
        for rule in self.rules:
            if rule.matches(labels):
                return rule.mode or self.mode, rule.bypass
        return self.mode, False

    def describe(self) -> tuple[Setting, ...]:
        """Every key in the order of the file with its effective value and source; secrets are masked."""
        return tuple(
            Setting(key=key, value=shown(key, self.value(key)), source=self.sources.get(key, "default"))
            for key in KEYS
        )

    @property
    def lane_names(self) -> tuple[str, ...]:
        """The lanes to claim: those named, or ``0`` to ``n-1`` for `auto/<n>`."""
        return self.lanes if self.lanes_auto is None else tuple(map(str, range(self.lanes_auto)))

    def value(self, key: str) -> object:
        """The effective value of a dotted key, unmasked; lanes of `auto/<n>` as that text."""
        if key == "lanes" and self.lanes_auto is not None:
            return f"auto/{self.lanes_auto}"
        value: object = self
        for name in key.split("."):
            value = getattr(value, name)
        return value


_NOT_KEYS = frozenset({"lanes_auto", "sources", "file", "overrides"})
TABLES: dict[str, type[Table]] = {
    field.name: field.type
    for field in msgspec.structs.fields(Config)
    if isinstance(field.type, type) and issubclass(field.type, Table)
}


def _keys() -> tuple[str, ...]:
    names: list[str] = []
    for name in Config.__struct_fields__:
        if name in TABLES:
            names.extend(f"{name}.{field}" for field in TABLES[name].__struct_fields__)
        elif name not in _NOT_KEYS:
            names.append(name)
    return tuple(names)


KEYS: tuple[str, ...] = _keys()
"""Every key by its dotted name: `mode`, `budget.compact_at`, …"""
