"""A scenario file: its shape, read and checked; every mistake is one line with file, key and what is allowed.

TOML, one run (and its children) told step by step, and probes whose answers are known. What the steps mean on
the wire is ``story``'s; how a probe is scored is ``probes``'. The format is described in ``deploy/scenarios.md``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_type_hints

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from protocol.events import EVENT_TYPES
from protocol.identifiers import Id, Token

Channel = Literal["event", "authority", "record"]
CallStatus = Literal["ok", "error", "timeout", "cancelled", "pending"]

STEP_KEYS: Final = ("user", "assistant", "system", "call", "type", "compact", "work", "wait")
"""Each step has exactly one of them."""
PROBE_KEYS: Final = ("keeps", "state", "authorize", "may", "verdict", "next", "find", "fetch", "never")
"""Each probe has exactly one of them."""
COVERS: Final = (
    "negative_constraint", "superseded_instruction", "conflicting_sources", "approval", "unknown_write",
    "repeated_effect", "changed_policy", "exact_figure", "file_and_test", "open_question",
    "rejected_alternative", "hostile_text", "child_result", "many_compactions",
)  # fmt: skip
"""What a scenario is about; results are also given by this."""

_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_WAIT = re.compile(r"(\d{1,6})([smhd])")


class ScenarioError(Exception):
    """A file that is no scenario. One line: ``FILE: KEY: what is wrong; what is allowed``."""

    def __init__(self, file: Path, key: str, text: str) -> None:
        place = f"{file}: {key}" if key else str(file)
        super().__init__(" ".join(f"{place}: {text}".split()))
        self.file = file
        self.key = key


class Sizes(Struct, frozen=True, kw_only=True):
    """The model's window and what a compaction leaves of it, in tokens."""

    window: Annotated[int, Meta(ge=2_000)] = 40_000
    keep_recent_tokens: Annotated[int, Meta(ge=200)] = 2_000
    packet_tokens: Annotated[int, Meta(ge=500)] = 6_000


class Rules(Struct, frozen=True, kw_only=True):
    """What the application always knows, whatever its context holds."""

    approval_kinds: tuple[str, ...] = ()
    forbidden_kinds: tuple[str, ...] = ()
    authority_required: bool = True
    reconcile_by_authority_kinds: tuple[str, ...] = ()


class TaskTable(Struct, frozen=True, kw_only=True):
    """The contract the run starts with: ``run.started`` without its envelope and model."""

    goal: str
    done_when: tuple[str, ...] = ()
    constraints: tuple[dict[str, Any], ...] = ()
    scope: dict[str, Any] | None = None
    policy_version: str | None = None


class Step(Struct, frozen=True, kw_only=True):
    """One step: exactly one of ``STEP_KEYS``, and what goes with it."""

    user: str | None = None
    assistant: str | None = None
    system: str | None = None
    call: str | None = None
    type: str | None = None
    work: Annotated[int, Meta(ge=1, le=200)] | None = None
    compact: Annotated[int, Meta(ge=1, le=20)] | None = None
    wait: str | None = None

    id: Id | None = None
    run: Token | None = None
    channel: Channel | None = None
    arguments: dict[str, Any] | None = None
    result: str | None = None
    status: CallStatus | None = None
    conclusion: str | None = None
    operation: Id | None = None
    supersedes: Id | None = None
    tokens: Annotated[int, Meta(ge=20, le=20_000)] | None = None
    fields: dict[str, Any] = {}
    """Of a ``type`` step: every other key, as on the wire."""

    @property
    def key(self) -> str:
        """Which of ``STEP_KEYS`` it has."""
        return next(name for name in STEP_KEYS if getattr(self, name) is not None)

    @property
    def seconds(self) -> int:
        """Of a ``wait`` step."""
        found = _WAIT.fullmatch(self.wait or "")
        return int(found[1]) * _SECONDS[found[2]] if found else 0


_ALONGSIDE: Final[dict[str, tuple[str, ...]]] = {
    "user": ("id", "run", "supersedes"),
    "assistant": ("id", "run"),
    "system": ("id", "run"),
    "call": ("id", "run", "arguments", "result", "status", "conclusion", "operation"),
    "work": ("run", "tokens"),
    "compact": ("work", "tokens"),
    "wait": (),
}


class Asked(Struct, frozen=True, kw_only=True):
    """An effect that was not declared: what ``authorize`` is asked by when there is no operation id."""

    kind: str
    idempotency_key: str
    approval_id: Id | None = None
    payload_digest: str | None = None
    target: str | None = None
    tool: str | None = None


class Probe(Struct, frozen=True, kw_only=True):
    """One question with a known answer: exactly one of ``PROBE_KEYS``, and what the answer must be."""

    name: str
    keeps: str | None = None
    state: str | None = None
    authorize: str | Asked | None = None
    may: Id | None = None
    verdict: str | None = None
    next: str | None = None
    find: str | None = None
    fetch: str | None = None
    never: str | None = None

    is_: str | tuple[str, ...] | UnsetType = msgspec.field(name="is", default=UNSET)
    allowed: bool | UnsetType = UNSET
    code: str | tuple[str, ...] | UnsetType = UNSET
    expect: str | UnsetType = UNSET
    claims: tuple[str, ...] = ()
    run: Token | None = None
    since: Id | None = None
    until: Id | None = None

    @property
    def key(self) -> str:
        """Which of ``PROBE_KEYS`` it has."""
        return next(name for name in PROBE_KEYS if getattr(self, name) is not None)

    @property
    def wanted(self) -> tuple[str, ...]:
        """The right answers of ``is`` or ``code``."""
        told = self.is_ if self.is_ is not UNSET else self.code
        return () if told is UNSET else (told,) if isinstance(told, str) else told


_ANSWERS: Final[dict[str, tuple[str, ...]]] = {
    "keeps": (),
    "state": ("is",),
    "authorize": ("allowed",),
    "may": ("is",),
    "verdict": (),
    "next": (),
    "find": ("expect",),
    "fetch": ("expect",),
    "never": (),
}
_BESIDE: Final = ("name", "run", "since", "until")


class Scenario(Struct, frozen=True, kw_only=True):
    """One file. ``name`` is the file's name without its ending."""

    name: str
    title: str
    covers: str
    task: TaskTable
    steps: tuple[Step, ...]
    probes: tuple[Probe, ...]
    about: str = ""
    sizes: Sizes = Sizes()
    rules: Rules = Rules()

    @property
    def compactions(self) -> int:
        """How many its steps ask for."""
        return sum(step.compact or 0 for step in self.steps)


_TOP: Final = ("title", "covers", "about", "sizes", "rules", "task", "step", "probe")


def read_scenario(file: Path) -> Scenario:
    """The scenario of a file. Raises ``ScenarioError``."""
    try:
        value = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(file, "", f"cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(file, "", f"is not TOML: {error}") from error
    return _Reader(file).scenario(value)


class _Reader:
    """Checks one file's tables; every refusal names the key it is about."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def scenario(self, value: Mapping[str, Any]) -> Scenario:
        self._keys("", value, _TOP)
        self._needed("", value, ("title", "covers", "task", "step", "probe"))
        covers = self._value("covers", value["covers"], str)
        if covers not in COVERS:
            self._refuse("covers", f"{covers!r}", f"one of {', '.join(COVERS)}")
        steps = tuple(self._step(f"step[{n}]", item) for n, item in self._tables("step", value["step"]))
        probes = tuple(self._probe(f"probe[{n}]", item) for n, item in self._tables("probe", value["probe"]))
        self._consistent(steps, probes)
        return Scenario(
            name=self._file.stem,
            title=self._value("title", value["title"], str),
            covers=covers,
            about=self._value("about", value.get("about", ""), str),
            sizes=self._table("sizes", value.get("sizes", {}), Sizes),
            rules=self._table("rules", value.get("rules", {}), Rules),
            task=self._table("task", value["task"], TaskTable),
            steps=steps,
            probes=probes,
        )

    def _step(self, key: str, value: Mapping[str, Any]) -> Step:
        if "type" in value:
            name = self._value(f"{key}.type", value["type"], str)
            if name not in EVENT_TYPES:
                self._refuse(f"{key}.type", f"{name!r}", f"one of {', '.join(sorted(EVENT_TYPES))}")
            head = {name: value[name] for name in ("type", "id", "run", "channel") if name in value}
            rest = {name: item for name, item in value.items() if name not in head}
            told: Step = self._table(key, head, Step)
            return msgspec.structs.replace(told, fields=rest)
        found = [name for name in STEP_KEYS if name in value and not (name == "work" and "compact" in value)]
        if len(found) != 1:
            self._refuse(
                key, f"has {', '.join(found) or 'none'} of them", f"exactly one of {', '.join(STEP_KEYS)}"
            )
        self._keys(key, value, (found[0], *_ALONGSIDE[found[0]]))
        step: Step = self._table(key, value, Step)
        if step.wait is not None and not step.seconds:
            self._refuse(f"{key}.wait", f"{step.wait!r}", "a number and s, m, h or d, such as '90s' or '2h'")
        return step

    def _probe(self, key: str, value: Mapping[str, Any]) -> Probe:
        found = [name for name in PROBE_KEYS if name in value]
        if len(found) != 1:
            self._refuse(
                key, f"has {', '.join(found) or 'none'} of them", f"exactly one of {', '.join(PROBE_KEYS)}"
            )
        kind = found[0]
        more = {"authorize": ("code",), "state": ("claims",)}.get(kind, ())
        self._keys(key, value, (kind, *_ANSWERS[kind], *more, *_BESIDE))
        self._needed(key, value, ("name", *_ANSWERS[kind]))
        if kind == "authorize" and isinstance(value["authorize"], dict):
            self._table(f"{key}.authorize", value["authorize"], Asked)
        probe: Probe = self._table(key, value, Probe)
        if kind in ("state", "fetch") and ":" not in str(value[kind]):
            self._refuse(f"{key}.{kind}", f"{value[kind]!r}", "a ref such as operation:op-1 or event:e-12")
        return probe

    def _consistent(self, steps: tuple[Step, ...], probes: tuple[Probe, ...]) -> None:
        known = {step.id for step in steps if step.id is not None}
        for number, probe in enumerate(probes, 1):
            for name in ("since", "until"):
                told = getattr(probe, name)
                if told is not None and told not in known:
                    allowed = f"the id of a step ({', '.join(sorted(known)) or 'no step has one'})"
                    self._refuse(f"probe[{number}].{name}", f"{told!r}", allowed)
        names = [probe.name for probe in probes]
        for number, name in enumerate(names, 1):
            if name in names[: number - 1]:
                self._refuse(
                    f"probe[{number}].name", f"{name!r} stands twice", "a name of its own for each probe"
                )

    # --- shapes -------------------------------------------------------------------------------------------

    def _tables(self, key: str, value: Any) -> list[tuple[int, Mapping[str, Any]]]:
        if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
            self._refuse(key, "is no list of tables", f"one or more [[{key}]]")
        return list(enumerate(value, 1))

    def _table(self, key: str, value: Any, kind: type[Any]) -> Any:
        if not isinstance(value, dict):
            self._refuse(key, f"is {_said(value)}", f"a table [{key}]")
        hints = get_type_hints(kind, include_extras=True)
        fields = {
            field.encode_name: field for field in msgspec.structs.fields(kind) if field.name != "fields"
        }
        self._keys(key, value, tuple(fields))
        needed = tuple(name for name, field in fields.items() if field.required)
        self._needed(key, value, needed)
        for name, item in value.items():
            self._value(f"{key}.{name}", item, hints[fields[name].name])
        return msgspec.convert(value, kind)

    def _value(self, key: str, value: Any, kind: Any) -> Any:
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            text = str(error).split(" - at ")[0]
            self._refuse(key, _said(value), text[:1].lower() + text[1:] + _choices(kind))

    def _keys(self, key: str, value: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
        for name in value:
            if name not in allowed:
                self._refuse(f"{key}.{name}".lstrip("."), "unknown key", ", ".join(dict.fromkeys(allowed)))

    def _needed(self, key: str, value: Mapping[str, Any], names: tuple[str, ...]) -> None:
        for name in names:
            if name not in value:
                self._refuse(
                    f"{key}.{name}".lstrip("."), "is missing", f"it is needed beside {', '.join(names)}"
                )

    def _refuse(self, key: str, what: str, allowed: str) -> Any:
        raise ScenarioError(self._file, key, f"{what}; allowed: {allowed}")


def _said(value: Any) -> str:
    return (
        f"{str(value)[:60]!r}" if isinstance(value, (str, int, float, bool)) else f"a {type(value).__name__}"
    )


def _choices(kind: Any) -> str:
    """The values of a literal type, where there are any."""
    found: list[str] = []
    for part in (kind, *get_args(kind)):
        found += [str(value) for value in get_args(part) if isinstance(value, str)]
    return f" ({', '.join(found)})" if found else ""


def shipped() -> Path:
    """The folder of the scenarios that come with the package."""
    return Path(__file__).parent.parent / "scenarios"
