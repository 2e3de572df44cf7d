"""Replays of real transcripts, whole: figures against the raw files, cuts against the stream, twice the same."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import rfc8785

from protocol.errors import ExitCode
from sidecar.config import load_config
from sidecar.rehearsal import rehearse
from tests.support.blackbox import Json
from tests.support.replayed import Replayed, replayed

pytestmark = pytest.mark.anyio

CLAUDE = [
    "claude-code-codemie/claude/-tmp-private/4c2ddfdc-b619-4525-8d03-1950fb1b0257.jsonl",
    "claude-code-codemie/claude/-tmp-private/agent-36541525.jsonl",
    "claude-code-codemie/claude/-tmp-private/agent-50243ee8.jsonl",
    "claude-code-codemie/claude/incremental-simple/turn-2.jsonl",
    "claude-code-codemie/claude/incremental-subagents/turn-2.jsonl",
    "claude-code-codemie/claude/incremental-subagents/turn-2/subagents/agent-a485154.jsonl",
    "claude-code-codemie/session-196820da.jsonl",
    "claude-code-codemie/session-9eda1058.jsonl",
    "claude-code-entire/fc-99c919b212-0-full.jsonl",
]
CODEX = [
    "codex-codemie/rollout-2026-05-11T11-26-55-019e1625-789d-76c0-80ab-3724b5ddb799.jsonl",
    "mixed-agent-sessions/codex/small.jsonl",
]
WINDOWS = [60_000, 32_000]
NOT_DIGESTED = {"digest", "text", "packet_id", "at", "epoch", "reason", "ledger_version"}


# --- the raw files, read independently ----------------------------------------------------------------------


def lines(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def claude_prompts(path: Path) -> list[int]:
    """Prompt sizes in order: one per API message, from its last line; nothing where the client wrote it."""
    last: dict[str, Json] = {}
    for line in lines(path):
        if line.get("type") == "assistant":
            last[line["message"]["id"]] = line["message"]["usage"]
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    sizes = [sum(usage.get(name) or 0 for name in names) for usage in last.values()]
    return [size for size in sizes if size]


def codex_prompts(path: Path) -> list[int]:
    """Prompt sizes in order; a report whose running total did not move is a repetition."""
    sizes: list[int] = []
    before: Any = None
    for line in lines(path):
        payload = line["payload"]
        info = payload.get("info") if payload.get("type") == "token_count" else None
        if info and info["total_token_usage"] != before:
            before = info["total_token_usage"]
            sizes.append(info["last_token_usage"]["input_tokens"])
    return [size for size in sizes if size]


def claude_calls(path: Path) -> int:
    return sum(
        block.get("type") == "tool_use"
        for line in lines(path)
        if line.get("type") == "assistant" and isinstance(line["message"]["content"], list)
        for block in line["message"]["content"]
    )


def codex_calls(path: Path) -> int:
    return sum(
        line["type"] == "response_item" and str(line["payload"]["type"]).endswith("_call")
        for line in lines(path)
    )


def prompts(path: Path, name: str) -> list[int]:
    return claude_prompts(path) if name in CLAUDE else codex_prompts(path)


# --- as the command does it ---------------------------------------------------------------------------------


async def report_of(capsys: pytest.CaptureFixture[str], files: list[Path], **how: Any) -> Json:
    options: Json = {"format": "auto", "window": None, "as_json": True, "bars": False, "patient": True, **how}
    code = await rehearse(load_config(None, {}), files, **options)
    assert code == ExitCode.CLEAN
    shown = capsys.readouterr().out
    # In this process the daemon's log is not set up and goes there as well.
    found: Json = json.loads(shown[shown.index("{\n") :])
    return found


@pytest.mark.parametrize("name", CLAUDE + CODEX)
async def test_each_transcript_replays_with_the_figures_of_its_file(
    corpus: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = corpus / name
    report = await report_of(capsys, [path])
    assert report["files"] == [str(path)]
    assert report["daemon"]["intake_lag_events"] == 0
    assert report["daemon"]["outbox_pending"] == 0
    assert len(report["runs"]) == 1
    run = report["runs"][0]
    sizes = prompts(path, name)
    assert run["usage_reports"] == len(sizes)
    assert run["tool_calls"] == (claude_calls(path) if name in CLAUDE else codex_calls(path))
    assert run["rejected"] == 0
    # Own messages of the daemon (packets taken up, settings, records) may be counted beside the file's.
    assert report["daemon"]["events_total"] >= run["events"]
    packet = run["packet"]
    assert packet["type"] == "resume.packet"
    if not run["compactions"] and not run["trims"]:
        # Nothing was ever shortened: the figure is the last prompt and what came after it.
        assert packet["budget"]["used_before"] >= sizes[-1]
    digested = {key: value for key, value in packet.items() if key not in NOT_DIGESTED}
    assert packet["digest"] == "sha256:" + hashlib.sha256(rfc8785.dumps(digested)).hexdigest()


async def test_live_does_not_wait_and_still_ends_settled(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = corpus / CODEX[0]
    report = await report_of(capsys, [path], window=60_000, patient=False, bars=True)
    run = report["runs"][0]
    assert run["usage_reports"] == len(codex_prompts(path))
    assert any(item["outcome"] == "applied" for item in run["compactions"])
    assert report["daemon"]["outbox_pending"] == 0
    code = await rehearse(
        load_config(None, {}),
        [path],
        format="codex",
        window=60_000,
        as_json=False,
        bars=True,
        patient=False,
    )
    assert code == ExitCode.CLEAN
    shown = capsys.readouterr().out
    assert "compactions applied" in shown or "compaction applied" in shown
    assert "VERDICT" in shown


async def test_a_session_and_its_subagent_replay_as_one_family(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = corpus / "claude-code-codemie/claude/incremental-subagents"
    files = [folder / "turn-2.jsonl", folder / "turn-2/subagents/agent-a485154.jsonl"]
    report = await report_of(capsys, files, window=60_000)
    assert len(report["runs"]) == 2
    parent, child = (item["packet"] for item in report["runs"])
    assert child["parent"] == {"run": parent["run"]}
    assert child["run"] in {item["run"] for item in parent["children"]}
    assert all(item["violations"] == {} for item in report["runs"])


# --- what the stream and the daemon's messages say ----------------------------------------------------------


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Replayed]:
    """Replays of this module, so that each is made once."""
    return {}


async def once(
    seen: dict[tuple[str, int], Replayed],
    corpus: Path,
    name: str,
    window: int,
    factory: pytest.TempPathFactory,
) -> Replayed:
    if (name, window) not in seen:
        seen[name, window] = await replayed(factory.mktemp("replay"), [corpus / name], window)
    return seen[name, window]


def pairs(history: list[Json]) -> list[tuple[int, int]]:
    """Positions of each call and its final result: a result closes the newest open call of its id."""
    open_calls: dict[str, list[int]] = {}
    found: list[tuple[int, int]] = []
    for position, item in enumerate(history, 1):
        if item["type"] == "tool.called":
            open_calls.setdefault(item["call_id"], []).append(position)
        elif item["type"] == "tool.returned" and item["status"] != "pending":
            waiting = open_calls.get(item["call_id"])
            if waiting:
                found.append((waiting.pop(), position))
    return found


def answers(history: list[Json]) -> list[tuple[int, int]]:
    """Positions of each call and of the assistant message before it whose ``message_id`` it names."""
    said: dict[str, int] = {}
    found: list[tuple[int, int]] = []
    for position, item in enumerate(history, 1):
        if item["type"] == "message" and item["role"] == "assistant" and item.get("message_id"):
            said[item["message_id"]] = position
        elif item["type"] == "tool.called" and item.get("message_id") in said:
            found.append((said[item["message_id"]], position))
    return found


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", CLAUDE + CODEX)
async def test_no_cut_leaves_an_orphan(
    corpus: Path,
    name: str,
    window: int,
    seen: dict[tuple[str, int], Replayed],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    replay = await once(seen, corpus, name, window, tmp_path_factory)
    for report in replay.reports:
        history = replay.history[report.run]
        linked = [*pairs(history), *answers(history)]
        end = 0
        for receipt in replay.receipts(report.run):
            first, through = receipt["range"]["from"], receipt["range"]["through"]
            assert first in (1, end + 1)
            assert through > end
            for earlier, later in linked:
                assert (earlier <= through) == (later <= through), (earlier, later, through)
            if receipt["outcome"] == "applied":
                end = through
                assert receipt["tokens"]["after"] < receipt["tokens"]["before"]
        packet = report.packet
        assert packet is not None
        if end:
            covers = packet["checkpoint"]["covers_through"]
            assert covers["position"] == end
            names = [item["id"] for item in history]
            assert covers["event_id"] in names[:end]
            assert packet["tail"]["from_position"] == end + 1
        else:
            assert packet["checkpoint"] is None
        assert packet["tail"]["through_position"] == len(history)
        cleared = {item["event_id"] for item in packet["cleared"]}
        results = {item["id"] for item in history[end:] if item["type"] == "tool.returned"}
        assert cleared <= results


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", CLAUDE + CODEX)
async def test_what_went_in_is_the_file_shortened_only_by_what_was_taken_up(
    corpus: Path,
    name: str,
    window: int,
    seen: dict[tuple[str, int], Replayed],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    replay = await once(seen, corpus, name, window, tmp_path_factory)
    sizes = prompts(corpus / name, name)
    history = next(iter(replay.history.values()))
    told: list[int] = []
    shortened = False
    for item in history:
        if item["type"] == "context.replaced" and item["by"] == "agent":
            shortened = True
        elif item["type"] == "usage.reported":
            told.append(item["context_tokens"])
            if not shortened:
                assert told[-1] == sizes[len(told) - 1]
            else:
                assert 0 < told[-1] <= sizes[len(told) - 1]
    assert len(told) == len(sizes)


@pytest.mark.parametrize("window", WINDOWS)
async def test_the_window_asks_for_compaction_where_the_history_outgrows_it(
    corpus: Path,
    window: int,
    seen: dict[tuple[str, int], Replayed],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    applied: Counter[str] = Counter()
    for name in CLAUDE + CODEX:
        replay = await once(seen, corpus, name, window, tmp_path_factory)
        for report in replay.reports:
            levels = {
                item.body["to"]
                for item in replay.heard
                if item.kind == "notice" and item.run == report.run and item.body["kind"] == "level_changed"
            }
            receipts = replay.receipts(report.run)
            applied[name] += sum(item["outcome"] == "applied" for item in receipts)
            if receipts or report.trims:
                assert levels & {"compact", "critical", "overflow"}
            else:
                told = {
                    item.body["kind"]
                    for item in replay.heard
                    if item.kind == "notice" and item.run == report.run
                }
                # Where nothing was done although the level asked for it, the reason was told.
                assert not levels & {"compact", "critical", "overflow"} or told & {
                    "compaction_deferred",
                    "ineffective",
                }
    for name in (CLAUDE[6], CLAUDE[8], CODEX[0]):
        assert applied[name] >= 2, applied


@pytest.mark.parametrize("name", CLAUDE + CODEX)
async def test_the_same_file_twice_gives_the_same_coverage_and_packet(
    corpus: Path,
    name: str,
    seen: dict[tuple[str, int], Replayed],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    one = await once(seen, corpus, name, 32_000, tmp_path_factory)
    other = await replayed(tmp_path_factory.mktemp("again"), [corpus / name], 32_000)
    assert one.coverage() == other.coverage()
    for first, second in zip(one.reports, other.reports, strict=True):
        assert first.packet is not None
        assert second.packet is not None
        assert first.packet["protected_digest"] == second.packet["protected_digest"]
        assert first.packet["text"] == second.packet["text"]
        assert first.packet["digest"] == second.packet["digest"]
        assert first.levels == second.levels
        assert first.trims == second.trims


async def test_every_notice_and_packet_of_a_long_run_is_said_once(
    corpus: Path, seen: dict[tuple[str, int], Replayed], tmp_path_factory: pytest.TempPathFactory
) -> None:
    replay = await once(seen, corpus, CLAUDE[8], 32_000, tmp_path_factory)
    for kind, name in (("packet", "packet_id"), ("notice", "notice_id"), ("receipt", "receipt_id")):
        ids = [item.body[name] for item in replay.heard if item.kind == kind]
        assert len(ids) == len(set(ids))
    for report in replay.reports:
        levels = [
            (item.body["from"], item.body["to"])
            for item in replay.heard
            if item.kind == "notice" and item.run == report.run and item.body["kind"] == "level_changed"
        ]
        assert all(before == after for (_, before), (after, _) in itertools.pairwise(levels))
