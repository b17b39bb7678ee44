"""Passwords and the control token stay out of everything that is shown, logged, listed or raised."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, quote_plus

import httpx
import pytest

from tests.control.serving import AUTH, RETIRE, TOKEN, RememberingLedger, manifest_path, serving
from tests.security.leaks import said_by
from tests.support.postgres import Server, fetch
from tokencustody.cli import app as command_line
from tokencustody.control import RolloutControlClient, make_control_app
from tokencustody.control.openapi import control_openapi
from tokencustody.control.token import BearerToken
from tokencustody.database.stats import none_counted
from tokencustody.database.url import parse_url
from tokencustody.errors import InvalidRecordError, SchemaMismatchError, StoreUnavailableError
from tokencustody.schema import migrate
from tokencustody.store import SqlLineageStore, SqlStagingStore, SqlTokenSink, SqlTokenSource, open_store

PASSWORDS = {
    "plain": "s3cretive",
    "delimiters": "s3cr:et/i?v#e@x",
    "percent": "s3cr%41et%",
    "spaces and quotes": "s3cr et'\"\\ive",
    "brackets": "s3cr[et]{i}",
    "other scripts": "s3crétïvé密",
    "plus and ampersand": "s3cr+et&ive=1",
}


def forms_of(password: str) -> list[str]:
    """Return the texts in which a password may show, the longest piece between delimiters included."""
    return [password, quote(password, safe=""), quote_plus(password), "s3cr"]


def assert_hidden(password: str, text: str) -> None:
    assert not [form for form in forms_of(password) if form in text], text


@pytest.fixture(autouse=True)
def talkative(caplog: pytest.LogCaptureFixture) -> None:
    """Every logger of every library at its most talkative, uvicorn's TRACE included."""
    caplog.set_level(1)
    for name in (
        "sqlalchemy", "sqlalchemy.engine", "sqlalchemy.pool", "asyncpg", "asyncio", "httpx", "httpcore", "uvicorn",
        "uvicorn.error", "uvicorn.asgi", "uvicorn.access", "fastapi", "tokencustody", "alembic",
    ):  # fmt: skip
        caplog.set_level(1, logger=name)


@pytest.fixture
def role(postgres: Server, request: pytest.FixtureRequest) -> Iterator[str]:
    """A role of the server with the password under test."""
    name = f"role_{secrets.token_hex(6)}"
    quoted = request.getfixturevalue("password").replace("'", "''")
    fetch(postgres.url, f"CREATE ROLE {name} LOGIN SUPERUSER PASSWORD '{quoted}'")
    yield name
    fetch(postgres.url, f"DROP ROLE {name}")


def place(url: str, user: str, password: str, where: str) -> str:
    """Return the URL with the password in one of the places that a URL has for it."""
    host = url.partition("@")[2]
    if where == "userinfo":
        return f"postgresql://{user}:{quote(password, safe='')}@{host}"
    if where == "query":
        return f"postgresql://{user}@{host}?password={quote(password, safe='')}"
    return f"postgresql://{user}@{host}"


@pytest.mark.parametrize(
    ("where", "password"),
    [
        *(("userinfo", password) for password in PASSWORDS.values()),
        ("query", PASSWORDS["delimiters"]),
        ("query", PASSWORDS["plus and ampersand"]),
        ("environment", PASSWORDS["spaces and quotes"]),
    ],
)
async def test_a_password_opens_the_database_and_shows_nowhere(
    postgres_url: str,
    password: str,
    role: str,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if where == "environment":
        monkeypatch.setenv("PGPASSWORD", password)
    url = place(postgres_url, role, password, where)
    shown: list[str] = []
    async with open_store(url, deadline=10) as store:
        await store.sink.begin_call("rollout-1", "call-1")
        watched = await asyncio.to_thread(fetch, postgres_url, "SELECT * FROM pg_stat_activity")
        shown += [repr(tuple(row)) for row in watched]
        shown += [repr(each) for each in (store, store.sink, store.source, store.lineage, store.staging)]
        shown += [str(store.stats()), repr(vars(store.sink)), repr(parse_url(url)), str(parse_url(url))]
    await asyncio.to_thread(migrate.check, url)
    if where != "environment":
        # The wrong one, which is the right one and more.
        wrong = url.replace(quote(password, safe=""), quote(password, safe="") + "x")
        with pytest.raises(StoreUnavailableError) as refused:
            async with SqlTokenSink(wrong, deadline=10) as sink:
                await sink.begin_call("rollout-1", "call-1")
        assert f'authentication failed for user "{role}"' in str(refused.value)
        shown.append(said_by(refused.value))
    assert_hidden(password, "\n".join([*shown, caplog.text]))


@pytest.mark.parametrize("password", [PASSWORDS["delimiters"], PASSWORDS["percent"]])
async def test_no_error_about_a_database_shows_the_password(
    empty_postgres_url: str, password: str, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = place(empty_postgres_url, role, password, "userinfo")
    elsewhere = f"postgresql://{role}:{quote(password, safe='')}@127.0.0.1:1/x"
    for make in (SqlTokenSink, SqlTokenSource, SqlLineageStore):
        async with make(url) as store, make(elsewhere, deadline=0.05) as unreachable:
            assert_hidden(password, repr(store) + str(store) + repr(vars(store)))
            for each, kind in ((store, SchemaMismatchError), (unreachable, StoreUnavailableError)):
                with pytest.raises(kind) as raised:
                    await (each.freeze("r") if isinstance(each, SqlTokenSource) else _write(each))
                assert_hidden(password, said_by(raised.value))
    with SqlStagingStore(url) as staging, pytest.raises(SchemaMismatchError) as unmigrated:
        await asyncio.to_thread(staging.orphans)
    assert_hidden(password, said_by(unmigrated.value) + caplog.text + repr(staging))


async def _write(store: SqlTokenSink | SqlLineageStore) -> None:
    if isinstance(store, SqlTokenSink):
        await store.begin_call("r", "c")
    else:
        await store.has_rows("r")


MALFORMED = [
    "postgresql://me:s3cr/et@host/x",
    "postgresql://me:s3cr?et@host/x",
    "postgresql://me:s3cr#et@host/x",
    "postgresql://me:s3cr@et@host/x",
    "postgresql://me:s3cr[et@host/x",
    "postgresql://me:s3cret@host:port/x",
    "postgresql://me:s3cret@host:99999/x",
    "postgresql://me:s3cret@host/x?sslmode=s3cret",
    "postgresql://me:s3cret@host/x?connect_timeout=s3cret",
    "postgresql://me:s3cret@host/x?statement_cache_size=s3cret",
    "postgresql:me:s3cret@host/x",
    "postgresql:/me:s3cret@host/x",
    "postgres//me:s3cret@host/x",
    "me:s3cret@host/x",
    "mysql://me:s3cret@host/x",
    "me:s3cret@host://x",
    "sqlite://me:s3cret@host/x",
    "sqlite:///x?password=s3cret",
]


@pytest.mark.parametrize("url", MALFORMED)
def test_a_malformed_url_is_refused_and_not_quoted(url: str) -> None:
    for make in (parse_url, SqlTokenSink, SqlStagingStore):
        with pytest.raises(InvalidRecordError) as refused:
            make(url)
        assert "s3cr" not in said_by(refused.value)


def test_a_raw_at_sign_is_refused_because_the_driver_would_ask_for_a_host_of_the_rest() -> None:
    with pytest.raises(InvalidRecordError, match="%40"):
        parse_url("postgresql://me:s3cr@et@host/x")
    assert parse_url("postgresql://me:s3cr%40et@host/x").display == "postgresql://me@host:5432/x"


@contextlib.contextmanager
def running(*command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tokencustody", *command],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_a_process_that_has_its_secrets_from_the_environment_shows_none_to_other_users(
    postgres_url: str, postgres: Server
) -> None:
    password = postgres.url.partition("@")[0].rpartition(":")[2]
    environment = {"TOKENCUSTODY_URL": postgres_url, "TOKENCUSTODY_AUTH_TOKEN": TOKEN}
    with running("serve", "--port", "0", **environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving run")
        shown = [line]
        for name in ("cmdline", "comm", "status", "stat"):
            shown.append(Path(f"/proc/{process.pid}/{name}").read_text(errors="replace"))
        mode = Path(f"/proc/{process.pid}/environ").stat().st_mode & 0o777
        process.terminate()
        out, err = process.communicate(timeout=30)
    text = "\n".join([*shown, out, err])
    assert "serve" in text
    assert password not in text
    assert TOKEN not in text
    # Where they are, only the owner of the process may read.
    assert mode == 0o400


@pytest.mark.parametrize(
    "command",
    [
        "rollouts",
        "show rollout-1",
        "db upgrade",
        "db current",
        "db check",
        "db downgrade --yes --revision base",
    ],
)
def test_no_command_shows_the_password_when_it_fails_or_when_it_crashes(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokencustody.cli import main

    monkeypatch.setenv("TOKENCUSTODY_URL", "postgresql://me:s3cret@127.0.0.1:1/x?connect_timeout=1")
    monkeypatch.setattr(sys, "argv", ["tokencustody", *command.split()])
    # The package has the command of the same name.
    monkeypatch.setattr(importlib.import_module("tokencustody.overview.command"), "DEADLINE", 0.05)
    with pytest.raises(SystemExit) as exited:
        main()
    out, err = capsys.readouterr()
    assert exited.value.code == 1
    assert "postgresql://me@127.0.0.1:1/x" in out + err
    assert "s3cret" not in out + err
    # A traceback of Rich would print the locals, and with them the URL.
    assert command_line.pretty_exceptions_enable is False


def test_help_and_defaults_do_not_print_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tokencustody", "serve", "--help"],
        env=os.environ | {"TOKENCUSTODY_URL": "postgresql://me:s3cret@h/x", "TOKENCUSTODY_AUTH_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "TOKENCUSTODY_URL" in done.stdout
    assert "s3cret" not in done.stdout
    assert TOKEN not in done.stdout


async def test_the_token_shows_in_no_log_answer_repr_document_or_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger = RememberingLedger("held")
    shown = [json.dumps(control_openapi()), repr(BearerToken(TOKEN)), str(vars(BearerToken(TOKEN)).keys())]
    app = make_control_app(ledger, auth_token=TOKEN, stats=none_counted)  # type: ignore[arg-type]
    shown += [
        repr(app),
        repr(vars(app)),
        repr([vars(route) for route in app.routes]),
        json.dumps(app.openapi()),
    ]
    async with serving(app) as url, httpx.AsyncClient(base_url=url, headers=AUTH, trust_env=False) as client:
        requests = [("GET", manifest_path("r")), ("POST", RETIRE), ("GET", "/metrics"), ("GET", "/healthz")]
        for failure in (None, ZeroDivisionError(), ConnectionError()):
            ledger.failure = failure
            for method, path in requests:
                answer = await client.request(method, path)
                shown.append(f"{answer.headers} {answer.text}")
        async with RolloutControlClient(url, TOKEN + "x") as stranger:
            shown.append(repr(stranger))
            with pytest.raises(RuntimeError) as refused:
                await stranger.manifest("r")
            shown.append(said_by(refused.value))
        async with RolloutControlClient("http://127.0.0.1:1", TOKEN) as lonely:
            with pytest.raises(ConnectionError) as unreachable:
                await lonely.manifest("r")
            shown.append(said_by(unreachable.value))
    assert "a control request failed" in caplog.text
    assert TOKEN not in "\n".join([*shown, caplog.text])


@pytest.mark.parametrize("token", ["s3cret token", "s3crét", "s3cret\n", "s3cret\0"])
def test_a_token_that_cannot_be_used_is_refused_and_not_shown(token: str) -> None:
    for make in (BearerToken, lambda token: RolloutControlClient("http://here", token)):
        with pytest.raises(InvalidRecordError) as refused:
            make(token)
        assert "s3cr" not in str(refused.value) + repr(refused.value)
