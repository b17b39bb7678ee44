"""`tokencustody serve`: a process that trainers talk to."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.control.serving import AUTH, RETIRE, TOKEN, RememberingLedger, manifest_path, serving
from tests.support.ledger import make_commit
from tokencustody.cli import main
from tokencustody.control import RolloutControlClient, make_control_app, server
from tokencustody.database.url import parse_url
from tokencustody.store import SqlLineageStore

# The package has the command of the same name.
serve = importlib.import_module("tokencustody.control.command")

VARIABLE = "TRAINER_TOKEN"
Failing = Callable[..., str]


@contextlib.contextmanager
def served(store_url: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start the command on a free port and yield the process and its URL, once it says that it is ready."""
    command = [sys.executable, "-m", "tokencustody", "serve", "--url", store_url, "--port", "0", *arguments]
    process = subprocess.Popen(
        [*command, "--auth-token-env", VARIABLE],
        env=os.environ | {VARIABLE: TOKEN},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        matched = re.fullmatch(r"serving run (\S+) of (\S+) on (http://\S+)\n", line)
        assert matched, (line, process.communicate(timeout=20))
        yield process, matched[3]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=20)


def stopped(process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str, str]:
    """Send a signal and return the exit code and what was printed besides the line of readiness."""
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Failing:
    """Run the command, which must fail with exit code 1 and one line on stderr; returns that line."""

    def run(*arguments: str, **environment: str) -> str:
        monkeypatch.delenv("TOKENCUSTODY_AUTH_TOKEN", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["tokencustody", "serve", "--port", "0", *arguments])
        with pytest.raises(SystemExit) as exited:
            main()
        out, err = capsys.readouterr()
        assert (exited.value.code, out) == (1, "")
        (line,) = err.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")

    return run


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_trainer_reads_and_retires_until_a_signal_ends_the_process_cleanly(
    store_url: str, number: signal.Signals
) -> None:
    async with SqlLineageStore(store_url, run="run-7") as ledger:
        await ledger.record(make_commit("rollout-1", "call-2"))
        await ledger.record(make_commit("rollout-1", "call-1"))
    with served(store_url, "--run", "run-7") as (process, url):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
        async with RolloutControlClient(url, TOKEN) as client:
            manifest = await client.manifest("rollout-1")
            done = await client.retire(["rollout-1", "rollout-2"])
        code, out, err = stopped(process, number)
    assert [record.model_call_id for record in manifest.records] == ["call-2", "call-1"]
    assert (done.removed, done.absent) == (["rollout-1"], ["rollout-2"])
    assert (code, out, err) == (0, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_request_that_has_begun_is_answered_before_the_process_ends(
    sqlite_url: str, number: signal.Signals
) -> None:
    body = b'{"rollout_ids": ["rollout-1"]}'
    head = f"POST {RETIRE} HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
    with served(sqlite_url) as (process, url):
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode())
        # The interim answer says that the request is being handled.
        assert b" 100 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, 1)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        writer.write(body)
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        await writer.wait_closed()
        _, err = process.communicate(timeout=30)
    assert b"HTTP/1.1 200 OK" in answer
    assert b'{"removed":[],"absent":["rollout-1"]}' in answer
    assert (process.returncode, err) == (0, "")


def test_one_client_serves_several_event_loops(sqlite_url: str) -> None:
    with served(sqlite_url) as (_, url):
        client = RolloutControlClient(url, TOKEN)
        for _ in range(3):
            assert asyncio.run(client.manifest("rollout-1")).records == []
        asyncio.run(client.close())


def test_another_address_can_be_named(sqlite_url: str) -> None:
    with served(sqlite_url, "--host", "127.0.0.2") as (_, url):
        assert url.startswith("http://127.0.0.2:")
        answer = httpx.get(url + manifest_path("r"), headers=AUTH, trust_env=False)
    assert answer.status_code == 200


def test_nothing_is_served_besides_the_control_routes_health_and_metrics(sqlite_url: str) -> None:
    with served(sqlite_url) as (_, url), httpx.Client(base_url=url, trust_env=False) as client:
        assert client.get(manifest_path("r")).status_code == 401
        assert client.get("/metrics").status_code == 401
        metrics = client.get("/metrics", headers=AUTH)
        healthy = client.get("/healthz")
        elsewhere = [client.get(path).status_code for path in ("/", "/docs", "/redoc", "/openapi.json")]
    assert (healthy.status_code, healthy.json()) == (200, {"status": "ok"})
    assert "tokencustody_transactions_total" in metrics.text
    assert elsewhere == [404] * 4


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_token_it_does_not_start_and_names_the_variable(
    failing: Failing, sqlite_url: str, value: str | None
) -> None:
    environment = {} if value is None else {VARIABLE: value}
    line = failing("--url", sqlite_url, "--auth-token-env", VARIABLE, **environment)
    assert line.startswith(f"the environment variable {VARIABLE} is not set or empty")
    assert "variable TOKENCUSTODY_AUTH_TOKEN is not set" in failing("--url", sqlite_url)


def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(failing: Failing, sqlite_url: str) -> None:
    line = failing("--url", sqlite_url, "--auth-token-env", VARIABLE, **{VARIABLE: "s3cret\n"})
    assert line.startswith(f"the environment variable {VARIABLE}: auth_token must consist of visible ASCII")
    assert "s3cret" not in line


def test_a_port_in_use_is_named(failing: Failing, sqlite_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = failing("--url", sqlite_url, "--port", port, TOKENCUSTODY_AUTH_TOKEN=TOKEN)
    assert line == f"cannot listen on 127.0.0.1, port {port}: Address already in use"


def test_a_host_that_is_none_is_named(failing: Failing, sqlite_url: str) -> None:
    line = failing("--url", sqlite_url, "--host", "999.0.0.1", TOKENCUSTODY_AUTH_TOKEN=TOKEN)
    assert line.startswith("cannot listen on 999.0.0.1, port 0: ")


def test_a_database_without_tables_is_an_error_with_the_command_to_run(
    failing: Failing, empty_postgres_url: str
) -> None:
    line = failing("--url", empty_postgres_url, TOKENCUSTODY_AUTH_TOKEN=TOKEN)
    assert f"run `tokencustody db upgrade --url {parse_url(empty_postgres_url).display}`" in line


def test_a_missing_file_is_an_error_with_what_to_do_and_not_created(failing: Failing, tmp_path: Path) -> None:
    missing = tmp_path / "missing.db"
    # No host, so that the command ends in any case.
    line = failing("--url", str(missing), "--host", "999.0.0.1", TOKENCUSTODY_AUTH_TOKEN=TOKEN)
    assert line.startswith(
        f"sqlite:///{missing} does not exist: look at the path, or begin a new database with "
    )
    assert not missing.exists()


def test_an_unreachable_database_is_an_error_without_its_password(
    failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "DEADLINE", 0.2)
    # Port 1 is reserved and nothing listens there.
    line = failing("--url", "postgresql://me:s3cret@127.0.0.1:1/captures", TOKENCUSTODY_AUTH_TOKEN=TOKEN)
    assert line.startswith("postgresql://me@127.0.0.1:1/captures is not available")
    assert "s3cret" not in line


def test_a_request_waits_for_the_database_for_ten_seconds_at_most() -> None:
    assert serve.DEADLINE <= 10.0


async def test_health_tells_an_unavailable_store_and_nothing_about_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = "postgresql://me:s3cret@127.0.0.1:1/captures"
    async with (
        SqlLineageStore(url, deadline=0.2) as ledger,
        serving(make_control_app(ledger, auth_token=TOKEN)) as address,
        httpx.AsyncClient(base_url=address, trust_env=False) as client,
    ):
        answer = await client.get("/healthz")
    assert (answer.status_code, answer.json()) == (503, {"status": "unavailable"})


async def test_health_is_ok_when_a_rollout_of_the_probed_name_is_retired(store_url: str) -> None:
    async with (
        SqlLineageStore(store_url) as ledger,
        serving(make_control_app(ledger, auth_token=TOKEN)) as address,
        httpx.AsyncClient(base_url=address, trust_env=False) as client,
    ):
        await ledger.retire(["health"])
        answer = await client.get("/healthz")
    assert answer.status_code == 200


async def test_however_many_ask_for_health_the_store_is_asked_by_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(RememberingLedger):
        answers = asyncio.Event()

        async def has_rows(self, rollout_id: str) -> bool:
            self.asked.append(rollout_id)
            return await self.answers.wait()

    monkeypatch.setattr(server, "HEALTH_SECONDS", 0.1)
    ledger: Any = Slow()
    async with (
        serving(make_control_app(ledger, auth_token=TOKEN)) as address,
        httpx.AsyncClient(base_url=address, trust_env=False) as client,
    ):
        waiting = [client.get("/healthz") for _ in range(20)]
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [503] * 20
        assert len(ledger.asked) == 1
        ledger.answers.set()
        assert (await client.get("/healthz")).status_code == 200


@pytest.mark.parametrize(
    ("missing", "name"),
    [("fastapi", "make_control_app"), ("uvicorn", "make_control_app"), ("httpx", "RolloutControlClient")],
)
def test_without_the_extra_the_import_and_the_command_name_what_to_install(
    missing: str, name: str, sqlite_url: str
) -> None:
    program = f"""
import sys
sys.modules[{missing!r}] = None
from tokencustody.cli import main
try:
    from tokencustody.control import {name}
except ImportError as exc:
    print(exc)
sys.argv = ["tokencustody", "serve", "--url", {sqlite_url!r}]
if {missing!r} != "httpx":  # which only the client needs
    main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TOKENCUSTODY_AUTH_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    said = f"tokencustody.control needs {missing}: run pip install 'tokencustody[http]'"
    ended = (0, said + "\n", "") if missing == "httpx" else (1, said + "\n", f"error: {said}\n")
    assert (done.returncode, done.stdout, done.stderr) == ended


async def record(url: str, *runs: str) -> None:
    for run in runs:
        async with SqlLineageStore(url, run=run) as ledger:
            await ledger.record(make_commit("rollout-1", "call-1"))


def test_a_run_must_be_named_where_there_are_others_than_default(store_url: str, failing: Failing) -> None:
    asyncio.run(record(store_url, "default", "run-7"))
    line = failing("--url", store_url, TOKENCUSTODY_AUTH_TOKEN=TOKEN)
    assert "has the runs default, run-7: name the one to serve with --run" in line


def test_default_is_served_where_there_is_no_other_run(store_url: str) -> None:
    for _ in range(2):
        with served(store_url) as (process, _url):
            assert stopped(process, signal.SIGTERM) == (0, "", "")
        asyncio.run(record(store_url, "default"))


def test_a_run_that_is_not_there_is_told_with_those_that_are_and_served(store_url: str) -> None:
    asyncio.run(record(store_url, "run-7"))
    with served(store_url, "--run", "run-8") as (process, _url):
        code, _, err = stopped(process, signal.SIGTERM)
    assert code == 0
    assert err.startswith("note: there is no run run-8 in ")
    assert "which has the runs run-7; it is served once something is written to it" in err
