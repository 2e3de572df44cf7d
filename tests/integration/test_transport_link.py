"""The client's life: refusals at start, trouble later, and never a closed client for good."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from sidecar.transport.errors import Denied, NoResponders, Refused, TimedOut, TooLarge, Unavailable
from sidecar.transport.jetstream import Link
from sidecar.transport.session import Session
from support.links import States, eventually, linked, settings
from support.nats_server import NatsServer, free_port

pytestmark = pytest.mark.anyio

USERS = """
authorization {
  users = [
    { user: "keeper", password: "right", permissions: %s }
  ]
}
"""
ALL = '{ publish: ">", subscribe: ">" }'


async def start_refused(url: str, **times: float) -> Refused:
    """The refusal a link ends with at start, within the 30 seconds promised."""
    link = Link(settings(url, **times), States())
    with anyio.fail_after(30), pytest.raises(Refused) as caught:
        await link.run()
    return caught.value


async def test_wrong_password_is_refused_without_showing_it() -> None:
    with NatsServer(config=USERS % ALL) as server:
        refusal = await start_refused(server.url_for("keeper", "wrong-secret"))
        assert "credentials" in refusal.reason
        assert "Authorization Violation" in refusal.reason
        assert "wrong-secret" not in str(refusal)


async def test_right_password_connects() -> None:
    with NatsServer(config=USERS % ALL) as server:
        async with linked(server.url_for("keeper", "right")) as link:
            assert link.connected
            assert link.generation == 1


async def test_jetstream_off_is_refused() -> None:
    with NatsServer(jetstream=False) as server:
        assert "JetStream is off" in (await start_refused(server.url)).reason


async def test_no_permission_for_jetstream_is_refused() -> None:
    limited = '{ publish: "wk.>", subscribe: ">" }'
    with NatsServer(config=USERS % limited) as server:
        refusal = await start_refused(server.url_for("keeper", "right"))
        assert "no permission to publish to $JS.API.INFO: the daemon must connect" in refusal.reason
        assert "credentials.py --show" in refusal.reason


async def test_no_permission_for_inbox_is_refused() -> None:
    limited = '{ publish: ">", subscribe: "wk.>" }'
    with NatsServer(config=USERS % limited) as server:
        assert "no permission to subscribe" in (await start_refused(server.url_for("keeper", "right"))).reason


@pytest.mark.parametrize("content", [None, "", "-----BEGIN NATS USER JWT-----\n", "nothing of use"])
async def test_unusable_credentials_file_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "user.creds"
    if content is not None:
        path.write_text(content)
    with NatsServer() as server:
        link = Link(settings(server.url, creds=path), States())
        with anyio.fail_after(30), pytest.raises(Refused, match=r"user\.creds"):
            await link.run()


async def test_bad_seed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "user.creds"
    path.write_text(
        "-----BEGIN NATS USER JWT-----\neyJ0.eyJq.c2ln\n------END NATS USER JWT------\n\n"
        "-----BEGIN USER NKEY SEED-----\nSUAAAA\n------END USER NKEY SEED------\n"
    )
    with NatsServer() as server:
        link = Link(settings(server.url, creds=path), States())
        with anyio.fail_after(30), pytest.raises(Refused, match="seed is not valid"):
            await link.run()


async def test_unreachable_at_start_is_reported_and_tried_again() -> None:
    server = NatsServer(port=free_port())
    states = States()
    link = Link(settings(server.url, start_timeout=0.1), states)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(link.run)
            await eventually(lambda: bool(states.told), "report of an unreachable server")
            assert states.told[0][0] is False
            assert "cannot connect" in states.told[0][1]
            server.start()
            with anyio.fail_after(30):
                await link.wait_connected()
            assert states.told[-1] == (True, "")
            group.cancel_scope.cancel()
    finally:
        server.cleanup()


async def test_killed_broker_comes_back_as_a_new_generation() -> None:
    with NatsServer() as server:
        states = States()
        async with linked(server.url, states) as link:
            server.kill9()
            await eventually(lambda: not link.connected, "loss of the connection")
            assert link.reason
            with pytest.raises(Unavailable):
                await link.request("$JS.API.INFO", b"")
            server.start()
            with anyio.fail_after(30):
                assert await link.wait_connected(1) >= 2
            await link.api("INFO")
            assert [told[0] for told in states.told] == [True, False, True]


async def test_client_closed_for_good_is_replaced() -> None:
    with NatsServer() as server:
        async with linked(server.url) as link:
            raw = link.session()._client
            # Payload within the limit, payload and headers beyond it: the server ends this client for good.
            await raw.publish("any", b"x" * raw.max_payload, headers={"A": "b"})
            with anyio.fail_after(30):
                await link.wait_connected(1)
            assert raw.is_closed
            await link.api("INFO")


async def test_what_is_too_large_is_not_sent() -> None:
    with NatsServer() as server:
        async with linked(server.url) as link:
            with pytest.raises(TooLarge) as caught:
                await link.request("any", b"x" * (link.max_payload - 200), headers={"A": "b"})
            assert caught.value.limit == link.max_payload
            assert caught.value.size > caught.value.limit
            assert link.generation == 1


async def test_a_request_ends_with_the_connection_not_with_its_timeout() -> None:
    with NatsServer() as server:
        async with linked(server.url) as link:
            await link.subscribe("silent", lambda message: None)

            async def ask() -> None:
                with pytest.raises(Unavailable, match="connection lost"):
                    await link.request("silent", b"", timeout=600)

            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                server.kill9()


async def test_no_responders_and_time_out_are_told_apart() -> None:
    with NatsServer() as server:
        async with linked(server.url) as link:
            with pytest.raises(NoResponders):
                await link.request("nobody", b"")
            await link.subscribe("silent", lambda message: None)
            with pytest.raises(TimedOut):
                await link.request("silent", b"", timeout=0.1)


async def outcome(link: Link) -> type[Exception]:
    """How a request to nobody ends: NoResponders where it is allowed."""
    try:
        await link.request("wk.v1.in.t.l.r.Event", b"")
    except Unavailable as error:
        return type(error)
    raise AssertionError("somebody answered")


async def test_permission_taken_away_later_is_denied_and_the_link_stays() -> None:
    with NatsServer(config=USERS % ALL) as server:
        async with linked(server.url_for("keeper", "right")) as link:

            async def denied() -> bool:
                return await outcome(link) is Denied

            async def allowed() -> bool:
                return await outcome(link) is NoResponders

            server.write_config(USERS % '{ publish: ["$JS.>", "_INBOX.>"], subscribe: ">" }')
            server.reload()
            await eventually(denied, "denial")
            server.write_config(USERS % ALL)
            server.reload()
            await eventually(allowed, "permission")


async def test_password_changed_later_is_reported_and_tried_again() -> None:
    with NatsServer(config=USERS % ALL) as server:
        states = States()
        async with linked(server.url_for("keeper", "right"), states) as link:
            server.write_config((USERS % ALL).replace("right", "other"))
            server.restart()
            await eventually(
                lambda: any("credentials" in reason for _, reason in states.told), "report of the refusal"
            )
            assert not link.connected
            server.write_config(USERS % ALL)
            server.restart()
            with anyio.fail_after(30):
                await link.wait_connected(1)


async def test_half_open_connection_is_found() -> None:
    with NatsServer() as server:
        async with linked(server.url, ping_interval=1.0) as link:
            server.freeze()
            await eventually(lambda: not link.connected, "notice of the frozen broker")
            server.resume()
            with anyio.fail_after(30):
                await link.wait_connected(1)


async def test_stop_leaves_nothing_open() -> None:
    with NatsServer() as server:
        async with linked(server.url) as link:
            session = link.session()
        assert session.lost is not None
        assert not link.connected
        with pytest.raises(Unavailable):
            link.session()


async def test_an_old_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # No such server is at hand; what the real one says is compared with a higher demand.
    monkeypatch.setattr("sidecar.transport.session.MIN_SERVER", (99, 0))
    with NatsServer() as server:
        assert "too old" in (await start_refused(server.url)).reason
    monkeypatch.setattr("sidecar.transport.session.MIN_SERVER", (2, 11))
    monkeypatch.setattr("sidecar.transport.session.MIN_API_LEVEL", 99)
    with NatsServer() as server:
        assert "API level" in (await start_refused(server.url)).reason


async def test_open_cancelled_leaves_no_client() -> None:
    with NatsServer() as server:
        server.freeze()
        with anyio.move_on_after(0.2) as scope:
            await Session.open(settings(server.url), server.url)
        assert scope.cancelled_caught
        server.resume()
