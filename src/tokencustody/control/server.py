"""A process that serves the control routes of one run."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Mapping
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tokencustody.control import metrics
from tokencustody.control.connections import BoundedConnection
from tokencustody.control.routes import install_rollout_control_routes, require_method
from tokencustody.control.token import BearerToken
from tokencustody.protocols import CaptureLedger
from tokencustody.store import SqlLineageStore

HEALTH_SECONDS = 2.0
_STOP_SECONDS = 10
# Any valid id does: the read reaches the database and checks its schema.
_PROBED_ROLLOUT = "health"


def make_control_app(
    ledger: CaptureLedger, *, auth_token: str, stats: Callable[[], Mapping[str, int]] | None = None
) -> FastAPI:
    """Return an app with the control routes of `ledger`, `GET /healthz`, with `stats` `GET /metrics`, and nothing else.

    `/healthz` needs no token and tells nothing but whether the store answers within two seconds: 200 or 503. However
    many ask, the store is asked by one at a time. `/metrics` needs the token and answers what `stats`, a store's
    method, returns, in the text format of Prometheus.
    """
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    install_rollout_control_routes(app, ledger, auth_token=auth_token)
    app.add_api_route("/healthz", _Health(ledger).answer, response_model=None)
    if stats is not None:
        app.router.routes.append(Route("/metrics", _Metrics(stats, auth_token)))
    return app


class _Metrics:
    """An ASGI application: an ordinary endpoint would tell its methods before it asks for the token."""

    def __init__(self, stats: Callable[[], Mapping[str, int]], auth_token: str) -> None:
        self._stats = stats
        self._token = BearerToken(auth_token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        self._token.check(request)
        require_method(request, "GET")
        response = Response(metrics.render_metrics(self._stats()), media_type=metrics.CONTENT_TYPE)
        await response(scope, receive, send)


class _Health:
    def __init__(self, ledger: CaptureLedger) -> None:
        self._ledger = ledger
        self._asking: asyncio.Task[bool] | None = None

    async def answer(self) -> JSONResponse:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        answered, _ = await asyncio.wait({self._asking}, timeout=HEALTH_SECONDS)
        healthy = bool(answered) and self._asking.result()
        return JSONResponse({"status": "ok" if healthy else "unavailable"}, 200 if healthy else 503)

    async def _ask(self) -> bool:
        try:
            await _reach(self._ledger)
        except Exception:
            return False
        return True


async def _reach(ledger: CaptureLedger) -> None:
    # LookupError: a rollout of that name was retired, as the store was able to tell.
    with contextlib.suppress(LookupError):
        await ledger.has_rows(_PROBED_ROLLOUT)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound and does not listen yet. Raises OSError that names the address."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except BaseException:
            sock.close()
            raise
    except OSError as exc:
        raise OSError(f"cannot listen on {host}, port {port}: {exc.strerror or exc}") from exc
    return sock


def control_config(app: ASGIApp) -> uvicorn.Config:
    """Return how uvicorn serves the control routes: with bounds on connections, and without a word about itself."""
    return uvicorn.Config(
        app,
        http=BoundedConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_STOP_SECONDS,
    )


async def serve_control(
    ledger: SqlLineageStore, *, auth_token: str, sock: socket.socket, on_ready: Callable[[str], None]
) -> None:
    """Serve the control routes on a bound socket until SIGTERM or SIGINT, then finish running requests.

    Calls `on_ready` with the server's URL once it accepts connections. Raises what the ledger raises when its database
    cannot be used, before listening. The caller closes the ledger.
    """
    with sock:
        app = make_control_app(ledger, auth_token=auth_token, stats=ledger.stats)
        await _reach(ledger)
        config = control_config(app)
        server = _Server(config, lambda: on_ready(_url_of(sock)))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.handle_exit, number, None)
        try:
            await server.serve(sockets=[sock])
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    def capture_signals(self) -> Any:
        # Besides ours, uvicorn's handlers would take one SIGINT for two, and drop the running requests.
        return contextlib.nullcontext()


def _url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
