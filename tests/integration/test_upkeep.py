"""Forgetting, verifying, backing up and putting back, beside a real daemon and broker, as an operator does it."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from support.blackbox import Box, Json, blackbox, event, eventually, stored
from support.nats_server import NatsServer

pytestmark = pytest.mark.anyio

WORD = "marlinspike"
"""Said in every run that is to be forgotten, and nowhere else."""
SOON = {"retention.succeeded_days": 1e-6, "retention.failed_days": 1e-6}


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as started:
        yield started


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("WATCHKEEPER_")}
    return subprocess.run(
        [sys.executable, "-m", "sidecar", *arguments],
        env={**known, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


async def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return await anyio.to_thread.run_sync(partial(_command, *map(str, arguments)))


async def live(box: Box, run: str, *, outcome: str | None = "succeeded", **start: Any) -> None:
    """A short life that says the word, a decision, and how it ended."""
    await box.start(run, goal=f"Splice the {WORD}", **start)
    await box.tell(
        run,
        event("message", role="user", content=f"where is the {WORD}?"),
        event("decision.made", decision_id="d1", summary=f"use a {WORD}"),
        event("tool.called", call_id="c", tool="sh", arguments={"command": f"find {WORD}"}),
        event("tool.returned", call_id="c", status="ok", content=f"{WORD}.txt " * 50),
    )
    if outcome is not None:
        await box.tell(run, event("run.finished", outcome=outcome, detail=WORD))
    await box.status(run)


def words_on_disk(data_dir: Path) -> list[str]:
    """Files in which the word stands."""
    return [path.name for path in data_dir.glob("watchkeeper.db*") if WORD.encode() in path.read_bytes()]


async def held(box: Box, run: str) -> dict[str, int]:
    """How many messages of the run each stream holds."""
    areas = {"WK_IN": f"wk.v1.in.acme.main.{run}.*", "WK_OUT": f"wk.v1.out.acme.main.{run}.*",
             "WK_REJECTED": f"wk.v1.out.acme.main.{run}.*", "WK_STATE": f"wk.v1.state.acme.main.{run}"}  # fmt: skip
    return {name: len(await stored(box.js, name, subject)) for name, subject in areas.items()}


async def state(box: Box, run: str) -> Json:
    ((_, payload, _),) = await stored(box.js, "WK_STATE", f"wk.v1.state.acme.main.{run}")
    value: Json = json.loads(payload)
    return value


async def test_a_finished_family_is_forgotten_everywhere_and_an_unfinished_one_stays(
    server: NatsServer, tmp_path: Path
) -> None:
    async with blackbox(server, tmp_path, SOON) as box:
        await live(box, "open", outcome=None)
        await live(box, "cancelled", outcome="cancelled")
        await box.start("mother", goal=WORD)
        await box.tell("mother", event("child.spawned", child_run="daughter", task=WORD))
        await live(box, "daughter", parent_run="mother")
        await box.tell("mother", event("run.finished", outcome="failed"))
        before = {run: await box.status(run) for run in ("open", "cancelled")}

        async def forgotten() -> bool:
            kept = [await held(box, run) for run in ("mother", "daughter")]
            gone = kept == [{"WK_IN": 0, "WK_OUT": 0, "WK_REJECTED": 0, "WK_STATE": 1}] * 2
            # The streams go first, and the tombstone takes the place of the state a moment later.
            return gone and all([(await state(box, run)).get("tombstones") for run in ("mother", "daughter")])

        await eventually(forgotten, "forgetting")
        assert await box.metric("runs_forgotten_total") == 2
        for run in ("mother", "daughter"):
            left = await state(box, run)
            assert WORD not in json.dumps(left)
            (grave,) = left["tombstones"]
            assert (grave["run"], grave["reason"]) == (run, "retention")
            assert left["hash_chain"] == grave["hash_chain"]
            for verb in ("packet", "status", "context"):
                body = {"format": "openai"} if verb == "context" else {}
                assert (await box.ask(run, verb, **body)).code == "run_unknown"
            assert (await box.ask(run, "authorize", operation_id="x", request_id="r")).code == "run_unknown"
            found = (await box.ask(run, "fetch", from_=1, **{"from": 1, "through": 2})).body
            assert [item["status"] for item in found["items"]] == ["gone", "gone"]
        late = await box.send("mother", event("message", role="user", content="hello?"))
        assert (await box.hear_rejected("mother", late))["code"] == "run_mismatch"
        late = await box.send("open", event("child.spawned", child_run="daughter", task="again"))
        assert (await box.hear_rejected("open", late))["code"] == "run_mismatch"
        for run in ("open", "cancelled"):
            status = await box.status(run)
            assert status["ledger_version"] == before[run]["ledger_version"]
        verified = await command("audit", "verify", "--all", "--data-dir", box.data_dir, "--json")
        assert verified.returncode == 0, verified.stderr
        runs = {item["run"]: item["forgotten"] for item in json.loads(verified.stdout)["runs"]}
        assert runs == {"open": False, "cancelled": False, "mother": True, "daughter": True}
        looked = await command("inspect", "mother", "--tenant", "acme", "--config", _config(tmp_path, box))
        assert "Traceback" not in looked.stderr
    # A new owner without this disk knows as well.
    async with blackbox(server, tmp_path / "other") as box:
        assert (await box.ask("mother", "packet")).code == "run_unknown"
        late = await box.send("mother", event("message", role="user", content="and here?"))
        assert (await box.hear_rejected("mother", late))["code"] == "run_mismatch"
        assert (await box.packet("open"))["task"]["goal"] == f"Splice the {WORD}"


def _config(folder: Path, box: Box) -> Path:
    file = folder / "inspect.toml"
    file.write_text(f'data_dir = "{box.data_dir}"\ntenant = "acme"\n')
    return file


async def test_nothing_of_what_was_said_is_left_in_the_files(server: NatsServer, tmp_path: Path) -> None:
    async with blackbox(server, tmp_path, SOON) as box:
        await live(box, "one")
        await live(box, "two")
        await box.start("other")

        async def clean() -> bool:
            return await box.metric("runs_forgotten_total") == 2 and not words_on_disk(box.data_dir)

        await eventually(clean, "the files without the word")


async def test_the_command_forgets_a_finished_run_and_the_daemon_tells_the_broker(
    server: NatsServer, tmp_path: Path
) -> None:
    async with blackbox(server, tmp_path) as box:
        await live(box, "done")
        await live(box, "open", outcome=None)
        await live(box, "parent")
        await live(box, "child", parent_run="parent", outcome=None)
        data_dir = box.data_dir
        busy = await command("forget", "done", "--data-dir", data_dir)
        assert (busy.returncode, busy.stdout) == (2, "")
        assert "in use by process" in busy.stderr
        assert "stop that process first" in busy.stderr
    for run, said in (
        ("open", "not finished: open"),
        ("parent", "not finished: child"),
        ("nobody", "not in"),
    ):
        refused = await command("forget", run, "--data-dir", data_dir)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert said in refused.stderr
        how = "publishes it to wk.v1.in.acme.main.child.authority while the daemon runs"
        assert (how in refused.stderr) == (run == "parent")
    assert (await command("forget", "done", "--data-dir", tmp_path / "nowhere")).returncode == 2
    assert not (tmp_path / "nowhere").exists()
    gone = await command("forget", "done", "--data-dir", data_dir)
    assert gone.returncode == 0, gone.stderr
    assert "forgotten: done" in gone.stdout
    again = await command("forget", "done", "--data-dir", data_dir)
    assert "forgotten already" in again.stderr
    async with blackbox(server, tmp_path) as box:

        async def told() -> bool:
            buried = bool((await state(box, "done"))["tombstones"])
            kept = await held(box, "done")
            return buried and kept == {"WK_IN": 0, "WK_OUT": 0, "WK_REJECTED": 0, "WK_STATE": 1}

        await eventually(told, "the broker forgets")
        assert (await state(box, "done"))["tombstones"][0]["reason"] == "command"
        assert await box.metric("runs_forgotten_total") == 1
        assert (await box.ask("done", "packet")).code == "run_unknown"
        assert (await box.packet("open"))["task"]["goal"] == f"Splice the {WORD}"


async def test_verify_names_the_first_link_that_does_not_hold(server: NatsServer, tmp_path: Path) -> None:
    async with blackbox(server, tmp_path) as box:
        await live(box, "sound")
        await live(box, "touched")
        data_dir = box.data_dir
        beside = await command("audit", "verify", "--all", "--data-dir", data_dir)
        assert beside.returncode == 0, beside.stderr
        assert "2 runs verified, 0 broken" in beside.stdout
    connection = sqlite3.connect(data_dir / "watchkeeper.db")
    with connection:
        connection.execute("DROP TRIGGER bodies_no_update")
        connection.execute(
            "UPDATE bodies SET body = CAST(replace(CAST(body AS TEXT), 'use a', 'use no') AS BLOB) WHERE entry = "
            "(SELECT entry FROM heads JOIN runs USING (run_no) WHERE run = 'touched' AND type = 'decision.made')"
        )
    connection.close()
    one = await command("audit", "verify", "touched", "--data-dir", data_dir)
    assert one.returncode == 1
    assert "BROKEN run touched" in one.stdout
    assert "message 3 (" in one.stdout
    assert "the kept body is not the one that was stored" in one.stdout
    sound = await command("audit", "verify", "sound", "--data-dir", data_dir)
    assert (sound.returncode, sound.stdout.count("holds")) == (0, 1)
    both = await command("audit", "verify", "--all", "--data-dir", data_dir, "--json")
    assert both.returncode == 1
    assert json.loads(both.stdout)["broken"] == 1
    for wrong in ((), ("touched", "--all"), ("nobody",)):
        assert (await command("audit", "verify", *wrong, "--data-dir", data_dir)).returncode == 2
    assert (await command("audit", "verify", "--all", "--data-dir", tmp_path / "nowhere")).returncode == 2


async def test_redacted_messages_verify_too(server: NatsServer, tmp_path: Path) -> None:
    async with blackbox(server, tmp_path) as box:
        run = await box.start()
        await box.tell(run, event("message", role="user", content="password=hunter2"))
        assert "[redacted:password]" in json.dumps(await box.packet(run))
        verified = await command("audit", "verify", run, "--data-dir", box.data_dir)
        assert verified.returncode == 0, verified.stdout


def answer_of(packet: Json) -> Json:
    """What a packet says, without when and by whom it was built."""
    return {
        name: value for name, value in packet.items() if name not in ("at", "epoch", "packet_id", "reason")
    }


async def test_a_backup_taken_beside_the_daemon_answers_as_the_daemon_did(
    server: NatsServer, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.db"
    async with blackbox(server, tmp_path) as box:
        await live(box, "kept", outcome=None)
        await live(box, "done")
        taken = await command("backup", copy, "--data-dir", box.data_dir)
        assert taken.returncode == 0, taken.stderr
        assert copy.stat().st_mode & 0o077 == 0
        again = await command("backup", copy, "--data-dir", box.data_dir)
        assert (again.returncode, again.stdout) == (2, "")
        assert "exists and is not overwritten" in again.stderr
        # What comes after the backup is read from the stream again.
        await box.tell("kept", event("decision.made", decision_id="d2", summary="belay that"))
        packets = {run: answer_of(await box.packet(run)) for run in ("kept", "done")}
        statuses = {run: (await box.status(run))["ledger_version"] for run in ("kept", "done")}
        refused = await command("restore", copy, "--data-dir", box.data_dir)
        assert refused.returncode == 2
        assert "stop that process first" in refused.stderr
        data_dir = box.data_dir
    refused = await command("restore", copy, "--data-dir", data_dir)
    assert (refused.returncode, "not overwritten" in refused.stderr) == (2, True)
    other = tmp_path / "restored"
    restored = await command("restore", copy, "--data-dir", other / "data")
    assert restored.returncode == 0, restored.stderr
    assert [path.name for path in (other / "data").glob("watchkeeper.db*")] == ["watchkeeper.db"]
    assert (await command("audit", "verify", "--all", "--data-dir", other / "data")).returncode == 0
    async with blackbox(server, other) as box:
        box.newest = {"kept": 0}
        assert {run: answer_of(await box.packet(run)) for run in packets} == packets
        assert {run: (await box.status(run))["ledger_version"] for run in statuses} == statuses
    broken = tmp_path / "broken.db"
    broken.write_bytes(copy.read_bytes()[:-4096] + bytes(4096))
    for file in (broken, tmp_path / "none.db", Path(__file__)):
        refused = await command("restore", file, "--data-dir", tmp_path / "fresh")
        assert (refused.returncode, refused.stdout) == (2, "")
        # It is the file that is wrong, not the data directory.
        assert refused.stderr.startswith(f"watchkeeper: {file}: ")
        assert refused.stderr.endswith("(give a file that backup wrote; nothing was changed)\n")
    nowhere = tmp_path / "no" / "copy.db"
    refused = await command("backup", nowhere, "--data-dir", data_dir)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert f"{nowhere}" in refused.stderr
    assert "name a file in a folder that exists" in refused.stderr
    assert not (tmp_path / "fresh" / "watchkeeper.db").exists()
