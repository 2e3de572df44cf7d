"""The tables of README.md, deploy/README.md and deploy/reference.md that are printed from the code.

A table stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. A test compares; to write them
anew, and with them the list of public names, the alerts' cases and the dashboards: ``make pages``.
"""

from __future__ import annotations

import inspect
import re
import runpy
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, get_args

from protocol import subjects as wire
from protocol.asks import AuthorizeCode
from sidecar.config import PREFIX as VARIABLE_PREFIX
from sidecar.config_shape import KEYS, TABLES, Config
from sidecar.config_values import allowed
from sidecar.core import transitions
from sidecar.core.validation import CHECKS, Check
from sidecar.core.window import HYSTERESIS, LEVELS, BudgetSettings
from sidecar.metric_labels import RESUME_CODES, RUN_CODES, SEVERITIES
from sidecar.metric_surface import PREFIX, SURFACE
from sidecar.transport.topology import desired_streams, ensure_streams

ROOT: Final = Path(__file__).resolve().parent.parent.parent
PAGES: Final = (ROOT / "README.md", ROOT / "deploy" / "reference.md", ROOT / "deploy" / "README.md")

RUN_MEANINGS: Final = {
    "history_gap": (
        "an event number is missing, or the stream lost messages",
        "`authorize` denies, boundary waits; once declared, verdict `pause`",
    ),
    "duplicate_conflict": (
        "the same event id with other bytes",
        "the first stands; the second is answered on `.rejected`",
    ),
    "sequence_conflict": ("one event number used by two events", "both are folded"),
    "orphan_result": ("a tool result without an open call", "kept as evidence"),
    "duplicate_call": ("a call id that is still open is used again", "both calls stay open"),
    "illegal_transition": (
        "a step the state machine does not have",
        "nothing changes, except that evidence that an operation ran always counts",
    ),
    "repeated_operation": (
        "an idempotency key that is pending, done or of unknown outcome is used again",
        "`authorize` denies",
    ),
    "unauthorized_write": (
        "an operation ran that `authorize` would have denied",
        "it is `pending` or `unknown` from then on, never harmless",
    ),
    "expired_approval_used": ("an operation ran under an approval that had expired", "as above"),
    "self_approval": (
        "the agent tried to grant what only an authority may",
        "answered on `.rejected`, nothing is granted",
    ),
    "foreign_session": (
        "an event of a session that is over",
        "kept, moves nothing; evidence that an operation ran counts",
    ),
    "late_event": ("an event came after its gap was given up", "folded where it came; sets no current value"),
    "contract_conflict": ("a second `run.started` says another contract", "the first stands"),
}
RESUME_MEANINGS: Final = {
    "stale_packet": "a newer checkpoint, or protected content changed by someone else, was not in the packet",
    "policy_mismatch": "another policy version than the released one was loaded",
    "first_action_mismatch": "the first action is not the ledger's next action",
    "artifact_missing": "an artifact that the cut range names was never saved",
    "ledger_version_mismatch": "the agent names a ledger version that does not exist",
}
AUTHORIZE_MEANINGS: Final = {
    "unknown_operation": "declare it first",
    "run_finished": "the run is over",
    "run_paused": "wait for whoever paused it",
    "history_gap": "wait for the missing event, or for an authority to accept the gap",
    "already_succeeded": "do not repeat it",
    "already_failed": "declare a new operation with the same key",
    "in_flight": "it was dispatched and has no outcome yet: wait",
    "outcome_unknown": "find out what happened, then `operation.reconciled`",
    "policy_stale": "load the released policy",
    "out_of_scope": "the scope or the list of tools does not hold it",
    "constraint_forbids": "an active constraint or the policy forbids it",
    "approval_missing": "request an approval that names this operation",
    "approval_pending": "wait for the authority",
    "approval_denied": "the authority said no",
    "approval_expired": "request a new one",
    "approval_revoked": "the authority took it back",
    "approval_consumed": "its uses are spent: request a new one",
    "payload_mismatch": "what was approved is not what would be done",
    "postponed": "nonessential, and the protected part is too large for the window now",
    "ok": "do it now, once; the approval is used up by this answer",
}
LEVEL_MEANINGS: Final = {
    "ok": "nothing",
    "checkpoint": "a packet goes out, so that the agent has a fresh one",
    "compact": "old tool results are trimmed, or a summary is asked for, at the next stable boundary",
    "critical": "the same, without waiting for open calls and pending operations",
    "overflow": "the same; the next model request may not fit",
}
STREAM_MEANINGS: Final = {
    wire.STREAM_IN: ("what agents, authorities and the daemon said: the truth", "agents' events are refused"),
    wire.STREAM_OUT: ("packets, receipts, notices", "the oldest go"),
    wire.STREAM_REJECTED: ("answers to messages that were refused", "the oldest go"),
    wire.STREAM_STATE: (
        "who owns each lane, and the last state of each run",
        "output waits in the outbox; leases may not be renewed, so lanes are lost",
    ),
}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; what would end a cell or begin a tag is escaped."""
    names = list(head)
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += [
        "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in row) + " |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def configuration() -> str:
    """One table per table of the file."""
    default = Config()
    groups: dict[str, list[tuple[str, ...]]] = {}
    for key in KEYS:
        group = key.partition(".")[0] if "." in key else ""
        value = default.value(key)
        shown = "" if value is None else ", ".join(value) if isinstance(value, tuple) else str(value)
        shown = shown.lower() if isinstance(value, bool) else shown
        variable = VARIABLE_PREFIX + key.upper().replace(".", "__")
        row = (f"`{key}`", f"`{variable}`", f"`{shown}`" if shown else "–", allowed(key))
        groups.setdefault(group, []).append(row)
    parts = []
    for group, rows in groups.items():
        doc = (TABLES[group].__doc__ or "").strip() if group else "The keys without a table."
        title = f"**`[{group}]`** " if group else ""
        words = " ".join(doc.split())
        parts.append(f"{title}{words}\n\n" + table(("key", "variable", "default", "allowed"), rows))
    return "\n".join(parts)


def metrics() -> str:
    """Every metric of the surface."""
    rows = [
        (
            f"`{PREFIX}{name}`",
            declared.kind,
            ", ".join(f"`{label}`" for label in declared.names) or "–",
            declared.text,
        )
        for name, declared in SURFACE.items()
    ]
    rows.append((f"`{PREFIX}build_info`", "gauge", "`version`, `python`, `sqlite`", "What is running."))
    return table(("metric", "kind", "labels", "what it counts"), rows)


def _then(check: Check) -> str:
    if check.level == "statement":
        return "the statement is removed; more than a fifth removed: rejected"
    return "rejected; the old checkpoint stays"


def candidate() -> str:
    """What a summary must pass before it may replace history."""
    return table(
        ("code", "severity", "what it catches", "what happens then"),
        ((f"`{check.code}`", check.severity, check.meaning, _then(check)) for check in CHECKS.values()),
    )


def run_checks() -> str:
    """What is watched while a run goes on."""
    return table(
        ("code", "severity", "what it catches", "what happens then"),
        ((f"`{code}`", SEVERITIES[code], *RUN_MEANINGS[code]) for code in RUN_CODES),
    )


def resume_checks() -> str:
    """What is compared when an agent resumes."""
    return table(
        ("code", "severity", "what it catches"),
        ((f"`{code}`", SEVERITIES[code], RESUME_MEANINGS[code]) for code in RESUME_CODES),
    )


def authorize() -> str:
    """The answers of ``authorize`` in their order."""
    return table(
        ("answer", "what to do"),
        ((f"`{code}`", AUTHORIZE_MEANINGS[code]) for code in get_args(AuthorizeCode)),
    )


def states() -> str:
    """The ledger's state machines."""
    return transitions.render()


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def levels() -> str:
    """From which share of the usable window each level holds, and what happens there."""
    default = BudgetSettings()
    shares = {
        "checkpoint": (default.checkpoint_at, "`budget.checkpoint_at`"),
        "compact": (default.compact_at, "`budget.compact_at`"),
        "critical": (default.critical_at, "`budget.critical_at`"),
        "overflow": (1.0, "fixed"),
    }
    rows = []
    for level in LEVELS:
        share, key = shares.get(level, (0.0, ""))
        left = _share(share - HYSTERESIS) if key else "–"
        rows.append((f"`{level}`", _share(share), left, key or "–", LEVEL_MEANINGS[level]))
    return table(("level", "entered from", "left at or below", "key", "what happens"), rows)


def streams() -> str:
    """The streams as the daemon makes them."""
    rows = []
    age = inspect.signature(ensure_streams).parameters["max_age_seconds"].default
    for name, wanted in desired_streams(1, age).items():
        held, full = STREAM_MEANINGS[name]
        days = wanted.get("max_age", 0) // (86_400 * 10**9)
        kept = "the last of each subject" if wanted.get("max_msgs_per_subject") == 1 else "everything"
        subjects_shown = ", ".join(f"`{subject}`" for subject in wanted["subjects"])
        rows.append((f"`{name}`", subjects_shown, held, f"{days} days" if days else kept, full))
    return table(("stream", "subjects", "holds", "keeps", "when it has a `max_bytes` and is full"), rows)


def _code(language: str, text: str) -> str:
    return f"```{language}\n{text.strip()}\n```\n"


def example() -> str:
    """The agent of the README: the file beside it."""
    return _code("python", (ROOT / "deploy" / "examples" / "first.py").read_text())


def permissions() -> str:
    """Users of one account: the script's permissions, with an inbox for each, and JetStream in short."""
    script = runpy.run_path(str(ROOT / "deploy" / "nats" / "credentials.py"))
    own = script["keeper"]("default")
    parties = {
        "keeper": {
            "publish": [*(name for name in own["publish"] if not name.startswith("$JS.")), "$JS.>"],
            "subscribe": own["subscribe"],
        },
        "agent": script["agent"]("default", "main"),
        "authority": script["authority"]("default"),
    }
    lines = ["authorization {", "  users = ["]
    for number, (name, may) in enumerate(parties.items(), start=1):
        heard = may["subscribe"] if "_INBOX.>" in may["subscribe"] else [*may["subscribe"], "_INBOX.>"]
        lines.append(f"    {{ user: {name}, password: change-me-{number}, permissions: {{")
        for verb, allowed_subjects in (("publish", may["publish"]), ("subscribe", heard)):
            listed = ", ".join(f'"{subject}"' for subject in allowed_subjects)
            end = "]" if verb == "publish" else "] } }"
            first, rest = f"        {verb}: [", " " * (len(verb) + 11)
            # Subjects hold dots and no spaces, so lines break between them alone.
            lines += textwrap.wrap(
                f"{listed}{end}", 110, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
            )
    return _code("text", "\n".join([*lines, "  ]", "}"]))


def subjects(patterns: Iterable[str]) -> str:
    """The subjects in a cell; where most are of JetStream's interface, these in words."""
    names = list(patterns)
    shown = [name for name in names if not name.startswith("$JS.")]
    if 2 * len(shown) > len(names):
        return ", ".join(f"`{name}`" for name in names)
    return ", ".join(f"`{name}`" for name in shown) + ", and JetStream's interface for its own streams"


def roles() -> str:
    """What each party may say and hear, from the script that makes their credentials."""
    script = runpy.run_path(str(ROOT / "deploy" / "nats" / "credentials.py"))
    parties = {
        "daemon (`keeper`)": script["keeper"]("TENANT"),
        "agent (`agent-LANE`), an account each": script["agent"]("TENANT", "LANE"),
        "authority (`authority`), an account": script["authority"]("TENANT"),
        "summariser of kind `nats` (`summarizer`), in the daemon's account": script["summarizer"]("TENANT"),
    }
    return table(
        ("party", "may publish", "may subscribe to"),
        (
            (
                name,
                subjects(may["publish"]) if may["publish"] else "one answer to each request",
                subjects(may["subscribe"]),
            )
            for name, may in parties.items()
        ),
    )


def runbook_permissions() -> str:
    """What of the runbook a reader saves as the broker's configuration."""
    shown = marked((ROOT / "deploy" / "README.md").read_text())["permissions"]
    return shown.removeprefix("```text\n").removesuffix("```")


TABLES_OF_PAGES: Final[dict[str, Callable[[], str]]] = {
    "configuration": configuration,
    "metrics": metrics,
    "candidate": candidate,
    "run": run_checks,
    "resume": resume_checks,
    "authorize": authorize,
    "states": states,
    "levels": levels,
    "streams": streams,
    "example": example,
    "permissions": permissions,
    "roles": roles,
}
_MARKED = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def marked(page: str) -> dict[str, str]:
    """Name of each marked table → what stands there."""
    return {
        found[2]: found[0][len(found[1]) : -len(found[3])].strip("\n") for found in _MARKED.finditer(page)
    }


def renewed(page: str) -> str:
    """The page with each marked table printed anew. Raises KeyError for a name that does not exist."""
    return _MARKED.sub(lambda found: f"{found[1]}\n{TABLES_OF_PAGES[found[2]]()}\n{found[3]}", page)


if __name__ == "__main__":
    import alert_cases  # beside this file, which is run by itself here
    import dashboards
    from sources import public_api

    for path in PAGES:
        path.write_text(renewed(path.read_text()))
    (ROOT / "tests" / "vectors" / "public_names.txt").write_text(public_api())
    alert_cases.write()
    dashboards.write()
