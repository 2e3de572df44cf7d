"""Effects under guard: entered with a permission only, and the outcome told whatever happens in the block."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import pytest

from protocol.client import NotAllowed, Run, connect
from support.blackbox import LANE, TENANT, Box, Json, blackbox, new_run
from support.nats_server import NatsServer

pytestmark = pytest.mark.anyio

MODEL = {"name": "m", "context_window": 100_000}


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as started:
        yield started


@pytest.fixture(scope="module")
async def box(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Box]:
    settings = {"authority.approval_kinds": "deploy.*"}
    async with blackbox(server, tmp_path_factory.mktemp("effects"), settings) as opened:
        yield opened


def opened(box: Box, run: str | None = None, **options: Any) -> Any:
    return connect(box.url, tenant=TENANT, lane=LANE, run=run or new_run("effect"), **options)


async def operations(run: Run) -> dict[str, tuple[str, str | None]]:
    """State and receipt by key."""
    packet = await run.fresh_packet()
    return {
        item.idempotency_key: (item.state, item.receipt if isinstance(item.receipt, str) else None)
        for item in packet.operations
    }


async def code(run: Run, kind: str, key: str, **more: Any) -> str:
    """What a further attempt is told; ``entered`` if it may."""
    try:
        async with run.effect(kind, key, **more) as effect:
            effect.failed("only tried")
    except NotAllowed as refused:
        return refused.permission.code
    return "entered"


async def violations(run: Run) -> Json:
    return dict((await run.status()).violations)


async def test_every_way_out_of_the_block_is_told(box: Box) -> None:
    async with opened(box) as run:
        await run.run_started(goal="g", model=MODEL)
        async with run.effect("mail.send", "plain", target="you@x", tool="smtp", description="a mail"):
            pass
        async with run.effect("mail.send", "receipt") as effect:
            effect.succeeded(receipt="250 OK")
        async with run.effect("mail.send", "failed") as effect:
            effect.failed("refused by the server")
        async with run.effect("mail.send", "unknown") as effect:
            effect.unknown("no answer")

        async def raising(key: str, said: bool) -> None:
            async with run.effect("mail.send", key) as effect:
                if said:
                    effect.succeeded(receipt="it did")
                raise KeyError(key)

        with pytest.raises(KeyError):
            await raising("error", said=False)
        with pytest.raises(KeyError):
            await raising("late error", said=True)
        assert await operations(run) == {
            "plain": ("succeeded", None),
            "receipt": ("succeeded", "250 OK"),
            "failed": ("failed", None),
            "unknown": ("unknown", None),
            "error": ("unknown", None),
            "late error": ("succeeded", "it did"),
        }
        assert await violations(run) == {}
        assert await code(run, "mail.send", "plain") == "already_succeeded"
        assert await code(run, "mail.send", "unknown") == "outcome_unknown"
        # What failed may be tried again, as another operation with the same key.
        assert await code(run, "mail.send", "failed") == "entered"
        assert await code(run, "mail.send", "failed") == "entered"
        assert await violations(run) == {}


async def test_a_cancelled_effect_is_unknown_even_where_everything_is_cancelled(box: Box) -> None:
    name = new_run("effect")
    begun = anyio.Event()

    async def agent() -> None:
        async with opened(box, name) as run:
            await run.run_started(goal="g", model=MODEL)
            async with run.effect("mail.send", "k"):
                begun.set()
                await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(agent)
        await begun.wait()
        tasks.cancel_scope.cancel()
    async with opened(box, name) as later:
        await later.run_resumed()
        assert await operations(later) == {"k": ("unknown", None)}
        assert await code(later, "mail.send", "k") == "outcome_unknown"
        # Found out from what was observed, it is settled.
        seen = await later.tool_called(call_id="c", tool="outbox", arguments={})
        seen = await later.tool_returned(call_id="c", status="ok", content="not there")
        operation = (await later.fresh_packet()).operations[0].id
        await later.operation_reconciled(
            operation_id=operation, state="failed", evidence=f"event:{seen.event_id}"
        )
        assert await operations(later) == {"k": ("failed", None)}
        assert await violations(later) == {}


async def test_a_permission_that_comes_too_late_is_given_back(box: Box) -> None:
    async with opened(box) as run:
        await run.run_started(goal="g", model=MODEL)
        authorize, asked = run.authorize, anyio.Event()

        async def slow(*arguments: Any, **more: Any) -> Any:
            permission = await authorize(*arguments, **more)
            if not asked.is_set():
                asked.set()
                await anyio.sleep_forever()
            return permission

        run.authorize = slow  # type: ignore[method-assign]

        async def act() -> None:
            async with run.effect("mail.send", "k"):
                pytest.fail("left before it was entered")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(act)
            await asked.wait()
            tasks.cancel_scope.cancel()
        assert await operations(run) == {"k": ("failed", None)}
        assert await code(run, "mail.send", "k") == "entered"
        assert await violations(run) == {}


async def test_a_key_that_another_operation_holds_leaves_no_trace(box: Box) -> None:
    async with opened(box) as run:
        await run.run_started(goal="g", model=MODEL)
        await run.operation_declared(operation_id="own", kind="mail.send", idempotency_key="k")
        assert await run.authorize("own")
        assert await code(run, "mail.send", "k") == "in_flight"
        assert len((await run.fresh_packet()).operations) == 1
        assert await violations(run) == {}


async def test_a_call_in_the_block_belongs_to_the_effect(box: Box) -> None:
    async with opened(box) as run:
        await run.run_started(goal="g", model=MODEL)
        async with run.effect("git.tag", "1.4", tool="git") as effect:
            await run.tool_called(call_id="c", tool="git", arguments={}, operation_id=effect.operation_id)
            await run.tool_returned(call_id="c", status="ok", content="tagged")
        assert await operations(run) == {"1.4": ("succeeded", None)}
        assert await violations(run) == {}


async def test_an_approval_is_waited_for_and_used_once(box: Box) -> None:
    async with opened(box) as run, opened(box, run.name, channel="authority") as authority:
        await run.run_started(goal="g", model=MODEL)
        assert await code(run, "deploy.prod", "v1") == "approval_missing"
        (operation,) = (await run.fresh_packet()).operations
        asked = {"approval_id": "ap", "action": "deploy.prod"}
        digest = "sha256:" + "ab" * 32
        await run.approval_requested(**asked, operation_id=operation.id, payload_digest=digest)
        assert await code(run, "deploy.prod", "v1") == "approval_pending"
        await authority.approval_resolved(**asked, outcome="granted", by="ops", payload_digest=digest)
        with anyio.fail_after(30):
            while (found := await code(run, "deploy.prod", "v1")) == "approval_pending":
                pass
        # Declared without a digest, it is not what was approved.
        assert found == "payload_mismatch"
        assert (
            await code(run, "deploy.prod", "v2", payload_digest=digest, operation_id="op-2")
            == "approval_missing"
        )
        again = {"approval_id": "ap-2", "action": "deploy.prod", "payload_digest": digest}
        await run.approval_requested(**again, operation_id="op-2")
        await authority.approval_resolved(**again, outcome="granted", by="ops")
        await run.status(after=authority.newest)
        async with run.effect("deploy.prod", "v2", operation_id="op-2") as effect:
            effect.succeeded(receipt="deployed")
        assert await code(run, "deploy.prod", "v2", operation_id="op-2") == "already_succeeded"
        assert await violations(run) == {}


async def test_a_forbidden_effect_is_never_entered(box: Box) -> None:
    async with opened(box) as run:
        rule = {"id": "c1", "text": "Never push.", "source": "user", "forbids": {"kinds": ["git.push*"]}}
        await run.run_started(goal="g", model=MODEL, constraints=[rule])
        assert await code(run, "git.push_main", "p") == "constraint_forbids"
        await run.run_paused(reason="tea")
        assert await code(run, "mail.send", "m") == "run_paused"
        await run.run_resumed()
        assert await code(run, "mail.send", "m") == "entered"
