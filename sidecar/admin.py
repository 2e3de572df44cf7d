"""The local HTTP face: health, metrics and one page for the operator.

It shows and never changes anything. The only place that serves HTTP, in a thread of its own, so that a daemon
whose event loop is stuck still says so. The page needs nothing from elsewhere, runs no script, and treats every
text of a run as hostile.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import heapq
import html
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import anyio
import anyio.to_thread
import uvicorn
from anyio.abc import TaskStatus
from msgspec import Struct
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from sidecar.config import parse_listen
from sidecar.health import Health
from sidecar.logs import visible
from sidecar.metrics import Metrics

MAX_ROWS: Final = 200
_MAX_GOAL_CHARS: Final = 160
_STOP_SECONDS: Final = 2
_PAGE_SECONDS: Final = 5.0
_HEAD_SECONDS: Final = 10.0
"""Within so much a connection has to send a request's whole head, and the next one's after an answer."""
_ANSWER_SECONDS: Final = 30.0
"""Within so much an answer has to be made and taken."""
_MOST_CONNECTIONS: Final = 256
"""Beyond these the one that has waited longest without a request is closed for a new one."""
_MOST_REQUESTS: Final = 512
_STYLE: Final = (
    "body{font:14px/1.5 system-ui,sans-serif;margin:2em;color:#222;background:#fff}"
    "table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.3em .8em;vertical-align:top;"
    "border-bottom:1px solid #ddd}th{font-weight:600}meter{width:10em}td.n{white-space:nowrap}"
    ".overflow,.critical,.no{color:#a00;font-weight:600}.compact{color:#850}.goal{color:#666}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}th,td{border-color:#333}"
    ".goal{color:#999}.overflow,.critical,.no{color:#f77}.compact{color:#fb5}}"
)
_STYLE_HASH: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_PAGE_HEADERS: Final = {
    **_HEADERS,
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
}


class RunView(Struct, frozen=True, kw_only=True):
    """One run as the page shows it. `used` and `usable` are tokens; `checkpoint` is a version, 0 for none."""

    run: str
    lane: str
    level: str
    used: int
    usable: int
    verdict: str
    checkpoint: int = 0
    last_event: str = ""
    goal: str = ""


class ListenError(OSError):
    """The address cannot be listened on. Choose another `admin.listen` or stop who holds it."""


def build(health: Health, metrics: Metrics, runs: Callable[[], Sequence[RunView]]) -> Starlette:
    """The application over these sources; each request reads them anew and nothing else.

    `health` and `metrics` are read in the server's thread, `runs` is called in the daemon's event loop.
    """

    async def healthz(_request: Request) -> Response:
        live = health.alive()
        return _answer(live.alive, {"alive": live.alive, "stuck": live.stuck})

    async def readyz(_request: Request) -> Response:
        now = health.ready()
        return _answer(now.ready, {"ready": now.ready, "reasons": now.reasons, "tolerated": now.tolerated})

    async def startupz(_request: Request) -> Response:
        return _answer(health.started(), {"started": health.started()})

    async def exposition(request: Request) -> Response:
        content_type, body = metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={**_HEADERS, "Content-Type": content_type})

    async def listed() -> Sequence[RunView]:
        return runs()

    async def page(request: Request) -> Response:
        # Not by a portal of anyio: that waits for the daemon's loop already when it hands the call over.
        shown = asyncio.run_coroutine_threadsafe(listed(), request.app.state.daemon)
        with anyio.move_on_after(_PAGE_SECONDS):
            return HTMLResponse(render_page(await asyncio.wrap_future(shown), health), headers=_PAGE_HEADERS)
        return _answer(False, {"error": "the daemon is busy"})

    return Starlette(
        routes=[
            Route("/", page),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/startupz", startupz),
            Route("/metrics", exposition),
        ]
    )


def _answer(fine: bool, body: dict[str, object]) -> Response:
    return JSONResponse(body, status_code=200 if fine else 503, headers=_HEADERS)


# --- the page -----------------------------------------------------------------------------------------------


def render_page(runs: Sequence[RunView], health: Health) -> str:
    """The operator's page: runs with the least headroom first, at most 200."""
    readiness = health.ready()
    state = "ready" if readiness.ready else "not ready"
    causes = "; ".join(
        f"{name}: {reason}" for name, reason in (readiness.reasons | readiness.tolerated).items()
    )
    shown = heapq.nlargest(MAX_ROWS, runs, key=_fullness)
    rows = "".join(_row(run) for run in shown)
    if not runs:
        rows = '<tr><td colspan="7">No runs.</td></tr>'
    hidden = (
        f"<p>{len(runs) - MAX_ROWS} more with more headroom are not shown.</p>"
        if len(runs) > MAX_ROWS
        else ""
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Watchkeeper</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="refresh" content="2"><style>{_STYLE}</style></head><body>'
        f'<h1>Watchkeeper</h1><p class="{"yes" if readiness.ready else "no"}">{state}'
        f"{': ' if causes else ''}{_text(causes)}</p>"
        "<table><thead><tr><th>Run</th><th>Lane</th><th>Level</th><th>Context</th><th>Verdict</th>"
        f"<th>Checkpoint</th><th>Last event</th></tr></thead><tbody>{rows}</tbody></table>{hidden}"
        '<p><a href="/metrics">metrics</a> · <a href="/readyz">readiness</a></p></body></html>'
    )


def _row(run: RunView) -> str:
    share = _fullness(run)
    goal = f'<br><span class="goal">{_text(run.goal, _MAX_GOAL_CHARS)}</span>' if run.goal else ""
    figures = f"{run.used:,} of {run.usable:,} ({share:.0%})"
    return (
        f"<tr><td>{_text(run.run)}{goal}</td><td>{_text(run.lane)}</td>"
        f'<td class="{_text(run.level)}">{_text(run.level)}</td>'
        f'<td class="n"><meter min="0" max="1" low="0.65" high="0.9" optimum="0" value="{share:.3f}">'
        f"{share:.0%}</meter> {figures}</td><td>{_text(run.verdict)}</td>"
        f'<td>{run.checkpoint or "none"}</td><td class="n">{_text(run.last_event)}</td></tr>'
    )


def _fullness(run: RunView) -> float:
    return run.used / run.usable if run.usable > 0 else 0.0


def _text(text: str, limit: int = 300) -> str:
    cut = text if len(text) <= limit else f"{text[:limit]}…"
    return html.escape(visible(cut))


# --- serving ------------------------------------------------------------------------------------------------


class _Server(uvicorn.Server):
    """The server without its own signal handlers: signals belong to the composition root."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(H11Protocol):
    """A connection that is closed where it is silent, half open or slow, so that none keeps another's place."""

    _timer: asyncio.TimerHandle | None = None
    _since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._within(_HEAD_SECONDS)
        if len(self.connections) > _MOST_CONNECTIONS:
            others = (other for other in self.connections if isinstance(other, _Connection))
            waiting = [other for other in others if other is not self and not other._asked]
            if waiting:
                eldest = min(waiting, key=lambda other: other._since)
                eldest._give_up()
                self.connections.discard(eldest)

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        # A head that drips in buys no time: only a whole one does.
        if self.cycle is not before and self._asked:
            self._within(_ANSWER_SECONDS)

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        self._within(_HEAD_SECONDS)
        before = self.cycle
        super().on_response_complete()
        if self.cycle is not before and self._asked:
            self._within(_ANSWER_SECONDS)

    @property
    def _asked(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _within(self, seconds: float) -> None:
        self._settle()
        self._timer = self.loop.call_later(seconds, self._give_up)

    def _settle(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        # What is not taken yet is dropped with it: who does not read would hold the connection for ever.
        self.transport.abort()


async def serve(
    app: Starlette, listen: str, *, task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED
) -> None:
    """Serve until cancelled; reports the bound address as the task's start value, `host:port`.

    Raises `ListenError` if the address cannot be had. On cancellation open requests get at most two seconds. The
    socket takes connections from the first moment on.
    """
    sock = await _bind(listen)
    config = uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        loop="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=_MOST_REQUESTS,
        timeout_graceful_shutdown=_STOP_SECONDS,
    )
    server = _Server(config)

    async def run() -> None:
        # Cancelling the server itself would leave its sockets open; it is told to stop instead.
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(anyio.run, server.serve, [sock], limiter=anyio.CapacityLimiter(1))

    app.state.daemon = asyncio.get_running_loop()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        try:
            task_status.started(_address(sock))
            await anyio.sleep_forever()
        finally:
            server.should_exit = True


async def _bind(listen: str) -> socket.socket:
    host, port = parse_listen(listen)
    try:
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, *_, address = found[0]
        # Any address of IPv6 is meant to be any address at all, where the machine can do both.
        both = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address[:2], family=family, backlog=64, dualstack_ipv6=both)
    except OSError as error:
        raise ListenError(f"cannot listen on {listen} (admin.listen): {error.strerror or error}") from error


def _address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if sock.family == socket.AF_INET6 else f"{host}:{port}"
