"""The streams: made as the protocol says, an operator's larger ones kept, unusable ones refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from protocol import subjects
from sidecar.transport.errors import Refused
from sidecar.transport.topology import covers, ensure_streams
from sidecar.transport.writes import last_message, store
from support.links import linked
from support.nats_server import NatsServer

pytestmark = pytest.mark.anyio

DAY = 24 * 3600 * 10**9


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as running:
        yield running


async def test_streams_are_made_as_the_protocol_says(server: NatsServer) -> None:
    async with linked(server.url) as link:
        facts = await ensure_streams(link)
        assert set(facts) == {"WK_IN", "WK_OUT", "WK_REJECTED", "WK_STATE"}
        configs = {name: (await link.api(f"STREAM.INFO.{name}"))["config"] for name in facts}
        for config in configs.values():
            assert (config["retention"], config["storage"], config["num_replicas"]) == ("limits", "file", 1)
        inbound = configs["WK_IN"]
        assert inbound["subjects"] == ["wk.v1.in.*.*.*.*"]
        assert inbound["discard"] == "new"
        assert inbound["discard_new_per_subject"] is True
        assert inbound["duplicate_window"] == 100_000_000
        assert inbound["max_age"] == 30 * DAY
        out = configs["WK_OUT"]
        assert out["subjects"] == [f"wk.v1.out.*.*.*.{k}" for k in ("packet", "receipt", "notice", "epoch")]
        assert (out["discard"], out["duplicate_window"], out["allow_direct"]) == ("old", 3600 * 10**9, True)
        assert configs["WK_REJECTED"]["subjects"] == ["wk.v1.out.*.*.*.rejected"]
        assert configs["WK_REJECTED"]["discard"] == "old"
        state = configs["WK_STATE"]
        assert state["subjects"] == ["wk.v1.state.>"]
        assert (state["max_msgs_per_subject"], state["max_age"]) == (1, 0)


async def test_again_and_by_two_at_once_changes_nothing(server: NatsServer) -> None:
    async with linked(server.url) as first, linked(server.url) as second:
        seen: list[Any] = []

        async def ensure(link: Any) -> None:
            seen.append(await ensure_streams(link))

        async with anyio.create_task_group() as group:
            group.start_soon(ensure, first)
            group.start_soon(ensure, second)
        again = await ensure_streams(first)
        assert {name: facts.created for name, facts in again.items()} == {
            name: facts.created for name, facts in seen[0].items()
        }
        assert seen[0].keys() == seen[1].keys()


async def test_an_operators_larger_stream_is_kept(server: NatsServer) -> None:
    async with linked(server.url) as link:
        wanted = {
            "name": "WK_IN",
            "subjects": ["wk.v1.in.>"],
            "storage": "memory",
            "discard": "new",
            "max_age": 90 * DAY,
            "max_bytes": 10**9,
            "duplicate_window": 10**10,
        }
        await link.api("STREAM.CREATE.WK_IN", wanted)
        await link.api(
            "STREAM.CREATE.WK_OUT",
            {"name": "WK_OUT", "subjects": list(subjects.OUT_SUBJECTS), "max_msgs_per_subject": 5},
        )
        await ensure_streams(link)
        config = (await link.api("STREAM.INFO.WK_IN"))["config"]
        assert (config["max_age"], config["storage"], config["subjects"]) == (
            90 * DAY,
            "memory",
            ["wk.v1.in.>"],
        )


@pytest.mark.parametrize(
    ("name", "setting", "config"),
    [
        ("WK_IN", "subjects", {"subjects": ["wk.v1.in.acme.*.*.*"]}),
        (
            "WK_IN",
            "retention",
            {"subjects": ["wk.v1.in.*.*.*.*"], "retention": "workqueue", "discard": "new"},
        ),
        ("WK_IN", "discard", {"subjects": ["wk.v1.in.*.*.*.*"], "max_bytes": 10**6}),
        (
            "WK_IN",
            "discard_new_per_subject",
            {"subjects": ["wk.v1.in.*.*.*.*"], "discard": "new", "max_msgs_per_subject": 10},
        ),
        ("WK_IN", "no_ack", {"subjects": ["wk.v1.in.*.*.*.*"], "discard": "new", "no_ack": True}),
        ("WK_STATE", "max_age", {"subjects": ["wk.v1.state.>"], "max_age": DAY, "max_msgs_per_subject": 1}),
        ("WK_STATE", "discard", {"subjects": ["wk.v1.state.>"], "max_msgs": 100, "max_msgs_per_subject": 1}),
        (
            "WK_STATE",
            "discard_new_per_subject",
            {
                "subjects": ["wk.v1.state.>"],
                "discard": "new",
                "discard_new_per_subject": True,
                "max_msgs_per_subject": 1,
            },
        ),
        ("WK_OUT", "subjects", {"subjects": ["wk.v1.out.*.*.*.packet"]}),
    ],
)
async def test_an_unusable_stream_is_refused_by_name(
    server: NatsServer, name: str, setting: str, config: dict[str, Any]
) -> None:
    async with linked(server.url) as link:
        await link.api(f"STREAM.CREATE.{name}", {"name": name, **config})
        with pytest.raises(Refused, match=f"stream {name}: {setting} "):
            await ensure_streams(link)


async def test_subjects_of_another_stream_are_refused(server: NatsServer) -> None:
    async with linked(server.url) as link:
        await link.api("STREAM.CREATE.OTHER", {"name": "OTHER", "subjects": ["wk.v1.out.>"]})
        with pytest.raises(Refused, match="stream WK_OUT: its subjects belong to another stream"):
            await ensure_streams(link)


async def test_no_permission_to_make_streams_is_refused() -> None:
    config = (
        'authorization { users = [ { user: "u", password: "p", permissions: '
        '{ publish: { allow: ">", deny: "$JS.API.STREAM.CREATE.>" }, subscribe: ">" } } ] }'
    )
    with NatsServer(config=config) as server:
        async with linked(server.url_for("u", "p")) as link:
            with pytest.raises(Refused, match="stream WK_IN: no permission"):
                await ensure_streams(link)


async def test_the_state_stream_replaces_per_subject(server: NatsServer) -> None:
    async with linked(server.url) as link:
        await ensure_streams(link)
        for number in range(5):
            await store(link, "WK_STATE", "wk.v1.state.t.l.r", str(number).encode(), {}, timeout=5)
        assert await last_message(link, "WK_STATE", "wk.v1.state.t.l.r") == (5, b"4")
        assert (await link.api("STREAM.INFO.WK_STATE"))["state"]["messages"] == 1


@pytest.mark.parametrize(
    ("pattern", "subject", "held"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.*", True),
        ("a.b", "a.*", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("a.>", "a.>", True),
        ("a.*", "a.>", False),
        ("a.*.c", "a.b", False),
        (">", "a.b.*", True),
    ],
)
def test_covers(pattern: str, subject: str, held: bool) -> None:
    assert covers(pattern, subject) is held
