"""A new owner compares the ledger it folded with the last owner's state, and says so when they differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nats
import pytest

from tests.support.blackbox import blackbox, event
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.anyio

OTHER = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("changed", "alarms"),
    [
        ({}, 0),
        ({"ledger_digest": OTHER}, 1),
        ({"ledger_digest": OTHER, "fold_version": 1}, 0),
        ({"ledger_digest": OTHER, "fold_version": 999}, 0),
    ],
)
async def test_only_the_same_fold_must_come_to_the_same_ledger(
    changed: dict[str, Any], alarms: int, tmp_path: Path
) -> None:
    with NatsServer() as server:
        async with blackbox(server, tmp_path / "one") as box:
            run = await box.start()
            await box.tell(run, event("constraint.set", constraint_id="c", text="Never push.", source="user"))
            await box.packet(run)
        subject = f"wk.v1.state.acme.main.{run}"
        async with await nats.connect(server.url) as client:
            js = client.jetstream()
            state = json.loads((await js.get_last_msg("WK_STATE", subject)).data or b"")
            await js.publish(subject, json.dumps({**state, **changed}).encode())
        async with blackbox(server, tmp_path / "two") as box:
            box.newest[run] = 0
            packet = await box.packet(run)
            assert await box.metric("ledger_mismatches_total") == alarms
            # Whatever a state says, the stream is what counts.
            assert [item["text"] for item in packet["task"]["constraints"]] == ["Never push."]


async def test_a_state_subject_that_names_no_run_holds_nobody_up(tmp_path: Path) -> None:
    with NatsServer() as server:
        async with blackbox(server, tmp_path / "one") as box:
            run = await box.start()
            await box.packet(run)
            for token in ("_odd", "a$b", f"{run}.more"):
                await box.js.publish(f"wk.v1.state.acme.main.{token}", b"rubbish")
        async with blackbox(server, tmp_path / "two") as box:
            box.newest[run] = 0
            assert (await box.packet(run))["task"]["goal"] == "Ship it."
