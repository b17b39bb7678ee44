"""`tokencustody serve`: the control routes of one run, for trainers."""

from __future__ import annotations

import logging
import os
from typing import Annotated, NoReturn

import typer

from tokencustody.control import without_extra
from tokencustody.schema.command import Url
from tokencustody.terminal.printing import printable

# How long a request waits for the database before it is answered 503.
DEADLINE = 10.0
DEFAULT_TOKEN_VARIABLE = "TOKENCUSTODY_AUTH_TOKEN"  # noqa: S105 - a variable's name


def serve(
    url: Url,
    run: Annotated[
        str | None,
        typer.Option(
            help="The run whose rollouts are served, for the routes name rollouts alone. Not needed for default, "
            "if there is no other."
        ),
    ] = None,
    auth_token_env: Annotated[
        str, typer.Option(metavar="NAME", help="The environment variable that holds the bearer token.")
    ] = DEFAULT_TOKEN_VARIABLE,
    host: Annotated[
        str,
        typer.Option(
            help="The address to listen on. Anything but loopback belongs behind a proxy that speaks TLS."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="The port; 0 takes a free one.")] = 8765,
) -> None:
    """Serve manifests, and retiring and deleting rollouts, over HTTP to whoever has the token.

    Prints one line when ready, and stops on SIGTERM or SIGINT once running requests are answered. GET /healthz tells
    without a token whether the database answers; GET /metrics, with it, what this process counted, for Prometheus.
    """
    auth_token = os.environ.get(auth_token_env, "")
    if not auth_token:
        _fail(f"the environment variable {auth_token_env} is not set or empty; put the bearer token there")
    try:
        from tokencustody.control.server import bind, serve_control
        from tokencustody.control.wire import check_auth_token
    except ModuleNotFoundError as exc:
        _fail(without_extra(exc))
    import asyncio

    from tokencustody.database.url import parse_url
    from tokencustody.errors import InvalidRecordError
    from tokencustody.store import SqlLineageStore
    from tokencustody.txn.asked import run_to_serve

    try:
        check_auth_token(auth_token)
    except InvalidRecordError as exc:
        _fail(f"the environment variable {auth_token_env}: {exc}")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")

    served, notice = asyncio.run(run_to_serve(url, run, deadline=DEADLINE))
    if notice:
        typer.echo(f"note: {printable(notice)}", err=True)
    ledger = SqlLineageStore(url, run=served, deadline=DEADLINE)
    try:
        sock = bind(host, port)
    except OSError as exc:
        _fail(str(exc))

    async def run_server() -> None:
        async with ledger:
            await serve_control(ledger, auth_token=auth_token, sock=sock, on_ready=say_ready)

    def say_ready(address: str) -> None:
        typer.echo(f"serving run {served} of {parse_url(url).display} on {address}")

    asyncio.run(run_server())


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {printable(message)}", err=True)
    raise typer.Exit(1)
