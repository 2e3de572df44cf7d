"""SIGTERM at awkward moments ends with 0 and loses nothing; a start that cannot work ends with its own code."""

from __future__ import annotations

import socket
from pathlib import Path

import anyio
import pytest

from support.daemon import DaemonProcess
from support.evidence import Left, comparable, gather, prove_whole, stored
from support.links import eventually, linked
from support.nats_server import NatsServer, free_port
from support.voyage import BRIEF, RUN, at_sea, laid_up, player, published, sail, voyage_events

pytestmark = pytest.mark.anyio

GRACE = 15.0
SHORT_DRAIN = {"DRAIN__SECONDS": "2"}


async def test_idle_it_ends_with_zero_and_the_next_owner_need_not_wait(tmp_path: Path) -> None:
    with NatsServer() as server:
        async with at_sea(server, tmp_path / "one") as (first, link):
            await sail(link, voyage_events(40))
            assert await first.stopped(GRACE) == 0, first.log
            left = await gather(link, first.data_dir, RUN)
            prove_whole(left, published(voyage_events(40)))
            epochs = await stored(link, "WK_STATE", "wk.v1.state.default.main._lane")
            assert epochs[-1].body["released"] is True
        # Another disk, so nothing but the released record tells it that the lane is free.
        with DaemonProcess(server.url, tmp_path / "two", {"LEASE__SECONDS": "600"}) as second:
            second.start()
            await second.owning()


async def test_while_a_summary_is_made_it_ends_and_the_attempt_is_recorded_as_interrupted(
    brief: Left, tmp_path: Path
) -> None:
    messages = voyage_events(BRIEF)
    with NatsServer() as server, DaemonProcess(server.url, tmp_path / "daemon") as daemon:
        daemon.start_doomed("slow_summary")
        async with linked(server.url) as link, anyio.create_task_group() as tasks:
            replay = player(link)
            fed = anyio.Event()

            async def feed() -> None:
                await replay.feed(messages)
                fed.set()

            tasks.start_soon(feed)
            await daemon.reached()
            assert await daemon.stopped(GRACE) == 0, daemon.log
            left = await gather(link, daemon.data_dir, RUN)
            assert (left.open_attempts, left.outbox, left.checkpoints) == ([], 0, [])
            (receipt,) = left.receipts
            assert (receipt["outcome"], receipt["reason"]) == ("failed", "interrupted")
            assert left.sent("receipt") == [receipt]

            daemon.start()
            with anyio.fail_after(120):
                await fed.wait()
                await replay.finish()
            left = await laid_up(daemon, link)
    prove_whole(left, published(messages))
    assert left.receipts[1]["attempt_id"] != receipt["attempt_id"]
    assert comparable(left) == comparable(brief)


async def test_without_its_broker_it_ends_and_what_was_not_sent_goes_out_later(
    brief: Left, tmp_path: Path
) -> None:
    messages = voyage_events(BRIEF)
    with NatsServer() as server, DaemonProcess(server.url, tmp_path / "daemon", SHORT_DRAIN) as daemon:
        daemon.start()
        await daemon.owning()
        async with linked(server.url) as link:
            replay = player(link)
            half = anyio.Event()
            fed = anyio.Event()

            async def feed() -> None:
                await replay.feed(messages[:70])
                half.set()
                await replay.feed(messages[70:])
                fed.set()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(feed)
                with anyio.fail_after(120):
                    await half.wait()
                server.kill9()
                await eventually(lambda: bool(daemon.said("nats disconnected")), "the loss of the broker")
                assert await daemon.stopped(GRACE) == 0, daemon.log
                server.start()
                daemon.start()
                with anyio.fail_after(120):
                    await fed.wait()
                    await replay.finish()
            left = await laid_up(daemon, link)
    prove_whole(left, published(messages))
    assert comparable(left) == comparable(brief)


async def test_before_it_ever_met_its_broker_it_ends_with_zero(tmp_path: Path) -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    with DaemonProcess(url, tmp_path / "daemon") as daemon:
        daemon.start()
        await daemon.unready("lane main")
        answer = await daemon.get("/healthz")
        assert answer is not None
        assert answer.status_code == 200
        assert await daemon.stopped(GRACE) == 0, daemon.log


async def test_at_the_first_sign_of_life_it_ends_with_zero(tmp_path: Path) -> None:
    with NatsServer() as server, DaemonProcess(server.url, tmp_path / "daemon") as daemon:
        for sign in ("admin listening", "nats connected", "lane owned"):
            daemon.start()
            await eventually(lambda sign=sign: bool(daemon.said(sign)), sign)  # type: ignore[misc]
            assert await daemon.stopped(GRACE) == 0, f"after {sign}\n{daemon.log}"


@pytest.mark.parametrize("moment", ["signalled_while_loading", "signalled_early"])
async def test_before_it_listens_for_signals_it_ends_with_zero(moment: str, tmp_path: Path) -> None:
    with NatsServer() as server, DaemonProcess(server.url, tmp_path / "daemon") as daemon:
        daemon.start_doomed(moment)
        await daemon.reached()
        assert await daemon.ended(GRACE) == 0, daemon.log


@pytest.mark.parametrize("gap", [0.0, 0.1, 0.2])
async def test_a_second_sigterm_at_any_time_ends_it_as_well(gap: float, tmp_path: Path) -> None:
    with NatsServer() as server:
        async with at_sea(server, tmp_path / "daemon") as (daemon, link):
            await sail(link, voyage_events(30))
            daemon.terminate()
            # The gap is what is tested: the second one meets the drain, its end, or the interpreter's end.
            with anyio.move_on_after(gap):
                await daemon.ended()
            daemon.terminate()
            assert await daemon.ended(GRACE) == 0, daemon.log
            daemon.start()
            await daemon.owning()
            left = await laid_up(daemon, link)
    assert left.open_attempts == []


async def test_two_sigterms_while_a_drain_waits_for_the_broker_end_it_at_once(
    tmp_path: Path,
) -> None:
    with NatsServer() as server:
        async with at_sea(server, tmp_path / "daemon", {"DRAIN__SECONDS": "600"}) as (daemon, link):
            await sail(link, voyage_events(60))
            server.kill9()
            await eventually(lambda: bool(daemon.said("nats disconnected")), "the loss of the broker")
            daemon.terminate()
            await eventually(lambda: bool(daemon.said("draining")), "the drain")
            daemon.terminate()
            assert await daemon.ended(GRACE) == 0, daemon.log
            server.start()
            daemon.start()
            await daemon.owning()
        async with linked(server.url) as link:
            left = await gather(link, daemon.data_dir, RUN)
    prove_whole(left, published(voyage_events(60)))


# --- starts that cannot work --------------------------------------------------------------------------------


def last_line(daemon: DaemonProcess) -> str:
    """What it said last, as a person would read it."""
    return daemon.log.strip().splitlines()[-1]


async def test_a_wrong_password_ends_with_three(tmp_path: Path) -> None:
    config = "authorization { user: watch, password: right }"
    with NatsServer(config=config) as server:
        url = server.url_for("watch", "wrong-password")
        with DaemonProcess(url, tmp_path / "daemon") as daemon:
            daemon.start()
            assert await daemon.ended(30) == 3, daemon.log
            assert "refuses our credentials" in last_line(daemon)
            assert "Traceback" not in daemon.log
            assert "wrong-password" not in daemon.log


async def test_a_broker_without_jetstream_ends_with_three(tmp_path: Path) -> None:
    with NatsServer(jetstream=False) as server, DaemonProcess(server.url, tmp_path / "daemon") as daemon:
        daemon.start()
        assert await daemon.ended(30) == 3, daemon.log
        assert "jetstream" in last_line(daemon).lower()
        assert "Traceback" not in daemon.log


async def test_wrong_configuration_ends_with_two_and_names_every_mistake(tmp_path: Path) -> None:
    wrong = {"MODE": "fast", "BUDGET__COMPACT_AT": "1.5", "LEESE__SECONDS": "3"}
    with DaemonProcess("nats://127.0.0.1:1", tmp_path / "daemon", wrong) as daemon:
        daemon.start()
        assert await daemon.ended() == 2, daemon.log
        lines = daemon.log.splitlines()
        (mode,) = [line for line in lines if "MODE" in line]
        assert "fast" in mode
        assert all(allowed in mode for allowed in ("observe", "shadow", "live"))
        (share,) = [line for line in lines if "COMPACT_AT" in line]
        assert all(word in share for word in ("budget.compact_at", "1.5", "allowed"))
        assert any("LEESE__SECONDS" in line for line in lines)
        assert not daemon.data_dir.exists()


async def test_a_data_directory_in_use_ends_with_two(tmp_path: Path) -> None:
    with NatsServer() as server:
        async with at_sea(server, tmp_path / "first") as (first, _):
            with DaemonProcess(server.url, tmp_path / "second") as second:
                second.settings["DATA_DIR"] = str(first.data_dir)
                second.start()
                assert await second.ended() == 2, second.log
                assert f"{first.data_dir} is in use by process {first.pid}" in last_line(second)
                assert "Traceback" not in second.log
            assert await first.stopped(GRACE) == 0


async def test_an_admin_port_in_use_ends_with_two(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with DaemonProcess("nats://127.0.0.1:1", tmp_path / "daemon", {"ADMIN__LISTEN": listen}) as daemon:
            daemon.start()
            assert await daemon.ended() == 2, daemon.log
            assert f"cannot listen on {listen} (admin.listen)" in last_line(daemon)
            assert "Traceback" not in daemon.log


async def test_a_data_directory_that_cannot_be_had_ends_with_one(tmp_path: Path) -> None:
    (tmp_path / "daemon").mkdir()
    (tmp_path / "daemon" / "data").write_text("a file")
    with DaemonProcess("nats://127.0.0.1:1", tmp_path / "daemon") as daemon:
        daemon.start()
        assert await daemon.ended() == 1, daemon.log
        assert str(daemon.data_dir) in last_line(daemon)
        assert "Traceback" not in daemon.log
