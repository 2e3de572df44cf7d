"""The admin server over a real socket: statuses, the page, and a clean stop."""

from __future__ import annotations

import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import httpx
import pytest

from sidecar.admin import MAX_ROWS, ListenError, RunView, build, serve
from sidecar.health import Health
from sidecar.metrics import Metrics

pytestmark = pytest.mark.anyio


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def view(run: str, used: int, **more: str) -> RunView:
    return RunView(run=run, lane="main", level="ok", used=used, usable=1000, verdict="continue", **more)


@asynccontextmanager
async def admin(health: Health, runs: Sequence[RunView] = ()) -> AsyncIterator[httpx.AsyncClient]:
    app = build(health, Metrics(lanes=["main"]), lambda: runs)
    async with anyio.create_task_group() as tasks:
        address: str = await tasks.start(serve, app, "127.0.0.1:0")
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=30) as client:
            yield client
        tasks.cancel_scope.cancel()


async def test_the_probes_answer_by_status_and_say_why() -> None:
    clock = Clock()
    health = Health(clock)
    async with admin(health) as client:
        assert (await client.get("/startupz")).status_code == 503
        not_ready = await client.get("/readyz")
        assert not_ready.status_code == 503
        assert set(not_ready.json()["reasons"]) == {"nats", "lane"}
        health.set("nats", True)
        health.set("lane main", True)
        health.set("nats", False, "reconnecting")
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["tolerated"]) == (200, {"nats": "reconnecting"})
        assert (await client.get("/startupz")).status_code == 200
        health.beat("loop")
        assert (await client.get("/healthz")).status_code == 200
        clock.now += 31
        stuck = await client.get("/healthz")
        assert (stuck.status_code, stuck.json()["stuck"]) == (503, {"loop": 31.0})


async def test_metrics_come_in_the_format_asked_for() -> None:
    async with admin(Health()) as client:
        plain = await client.get("/metrics", headers={"Accept": "text/plain"})
        assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert 'watchkeeper_lane_epoch{lane="main"} 0.0' in plain.text
        modern = await client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
        assert modern.headers["content-type"].startswith("application/openmetrics-text")
        assert modern.text.endswith("# EOF\n")


async def test_the_page_escapes_what_agents_wrote_and_runs_no_script() -> None:
    hostile = "<script>alert(1)</script>\" onload='x\u202e\x1b"
    runs = [view("run-1", 400, goal=hostile, last_event=hostile)]
    async with admin(Health(), runs) as client:
        page = await client.get("/")
    assert page.status_code == 200
    assert "<script" not in page.text
    assert "&lt;script&gt;" in page.text
    assert "\u202e" not in page.text
    assert "onload='" not in page.text
    assert 'value="0.400"' in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text
    assert "https://" not in page.text


async def test_the_page_shows_the_fullest_runs_first_and_is_capped() -> None:
    runs = [view(f"run-{number}", number) for number in range(MAX_ROWS + 10)]
    async with admin(Health(), runs) as client:
        text = (await client.get("/")).text
    assert text.count("<meter") == MAX_ROWS
    assert "10 more" in text
    assert text.index(f"<td>run-{MAX_ROWS + 9}</td>") < text.index("<td>run-10</td>")
    assert "<td>run-9</td>" not in text


async def test_a_run_without_a_window_is_shown_all_the_same() -> None:
    unknown = RunView(run="r", lane="main", level="ok", used=5, usable=0, verdict="pause")
    async with admin(Health(), [unknown]) as client:
        assert "5 of 0 (0%)" in (await client.get("/")).text


async def test_only_reading_is_possible() -> None:
    async with admin(Health()) as client:
        assert (await client.post("/readyz")).status_code == 405
        assert (await client.get("/nowhere")).status_code == 404


async def test_an_address_in_use_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        app = build(Health(), Metrics(), list)
        async with anyio.create_task_group() as tasks:
            with pytest.raises(ListenError) as caught:
                await tasks.start(serve, app, listen)
    assert listen in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_cancelling_stops_the_server_and_frees_the_port_even_with_a_client_connected() -> None:
    app = build(Health(), Metrics(), list)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            address: str = await tasks.start(serve, app, "127.0.0.1:0")
            port = int(address.rpartition(":")[2])
            stream = await anyio.connect_tcp("127.0.0.1", port)
            await stream.send(b"GET /startupz HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await stream.receive()).startswith(b"HTTP/1.1 503")
            tasks.cancel_scope.cancel()
        await stream.aclose()
    with socket.create_server(("127.0.0.1", port)):
        pass


async def test_an_ipv6_address_is_reported_as_it_is_written() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 loopback here")
    async with anyio.create_task_group() as tasks:
        address: str = await tasks.start(serve, build(Health(), Metrics(), list), "[::1]:0")
        assert address.startswith("[::1]:")
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=30) as client:
            assert (await client.get("/startupz")).status_code == 503
        tasks.cancel_scope.cancel()


async def test_signals_stay_with_the_process() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    async with admin(Health()) as client:
        await client.get("/startupz")
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
