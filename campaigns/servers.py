"""PostgreSQL servers of a campaign's own, which it may kill, restart and starve."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import asyncpg

from campaigns.guard import cleaned_up
from tokencustody.schema import migrate

USER = "tokencustody"
_PATIENCE = 60.0

# The server writes its process id into the folder of its own, which stays readable whatever becomes of its data.
_STOP = """
pid=$(cat "$1/pid") && kill -QUIT "$pid"
while grep -q '^State:.[^Z]' "/proc/$pid/status"; do sleep 0.05; done
rm -rf "$1" "$2"
"""


class ServerError(RuntimeError):
    """A server did not do as it was told. The message ends with the last lines of its log."""


class PostgresCluster:
    """A server on loopback with a random password, as safe as PostgreSQL is by default: fsync and
    synchronous_commit are on.

    A context manager that makes the cluster, starts it and removes it. `data_in` is the folder for its data, by default
    one in the temporary folder; `settings` go into postgresql.conf. Methods block; they may be called in any thread.
    """

    def __init__(self, data_in: Path | None = None, *, settings: Mapping[str, str] | None = None) -> None:
        self._data_in = data_in
        self._settings = dict(settings or {})
        self._programs = _programs()
        self._account = unprivileged_account()
        self._stack = contextlib.ExitStack()
        self.port = free_port()
        self.password = secrets.token_hex(8)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.home = Path(tempfile.mkdtemp(prefix="tokencustody-pg-"))
            self._data = (self._data_in or self.home) / "data"
            stack.enter_context(cleaned_up(_STOP, str(self.home), str(self._data)))
            give_to(self._account, self.home)
            self._data.mkdir(mode=0o700)
            give_to(self._account, self._data)
            self._initdb()
            self.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the server at once and remove what is left of it. Idempotent."""
        self._stack.close()

    def url_of(self, database: str) -> str:
        """Return the URL of a database."""
        return f"postgresql://{USER}:{self.password}@127.0.0.1:{self.port}/{quote(database)}"

    def create_database(self, name: str) -> str:
        """Create a database, ready for a store, and return its URL."""
        self.fetch(f'CREATE DATABASE "{name}"')
        migrate.upgrade(self.url_of(name))
        return self.url_of(name)

    def fetch(self, statement: str, *parameters: Any, database: str = "postgres") -> list[asyncpg.Record]:
        """Run one statement outside a transaction and return its rows. Works inside a running event loop too."""

        async def run() -> list[asyncpg.Record]:
            connection = await asyncpg.connect(self.url_of(database))
            try:
                return await connection.fetch(statement, *parameters)
            finally:
                await connection.close()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, run()).result()

    def change(self, name: str, value: str | None) -> None:
        """Change a setting of the running server, None for its default, and return once new sessions have it."""
        self.fetch(f"ALTER SYSTEM RESET {name}" if value is None else f"ALTER SYSTEM SET {name} = '{value}'")
        loaded = self.fetch("SELECT pg_conf_load_time()")
        self.fetch("SELECT pg_reload_conf()")
        give_up = time.monotonic() + _PATIENCE
        while self.fetch("SELECT pg_conf_load_time()") == loaded:
            if time.monotonic() > give_up:
                raise ServerError(f"the server does not load {name}")
            time.sleep(0.01)

    def start(self) -> None:
        """Start a server that is down, and return once it answers. Raises ServerError."""
        self._pg_ctl("start", "-l", str(self.home / "log"))

    def restart_immediate(self) -> None:
        """Crash the server and start it again: every session is lost, and recovery replays the log."""
        self._pg_ctl("restart", "-m", "immediate", "-l", str(self.home / "log"))

    def kill_postmaster(self) -> None:
        """Kill every process of the server with SIGKILL, and return once they are gone. It is down until `start`."""
        postmaster = int((self.home / "pid").read_text())
        processes = [postmaster, *_children(postmaster)]
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        (self.home / "pid").unlink()
        give_up = time.monotonic() + _PATIENCE
        # Until they are reaped: a new server counts one that was not as running.
        while any(Path(f"/proc/{pid}").exists() for pid in processes):
            if time.monotonic() > give_up:
                raise ServerError(f"processes of the server outlive SIGKILL: {processes}")
            time.sleep(0.01)

    def terminate_sessions(self, rng: random.Random) -> int:
        """End about half of the sessions of clients, one at least if there is any; return how many."""
        others = "backend_type = 'client backend' AND pid <> pg_backend_pid()"
        found = self.fetch(f"SELECT pid FROM pg_stat_activity WHERE {others} ORDER BY pid")
        pids = [row["pid"] for row in found]
        chosen = rng.sample(pids, (len(pids) + 1) // 2)
        ended = self.fetch("SELECT pg_terminate_backend(pid) AS ended FROM unnest($1::int[]) AS pid", chosen)
        return sum(row["ended"] for row in ended)

    def _initdb(self) -> None:
        password_file = self.home / "password"
        password_file.touch(mode=0o600)
        password_file.write_text(self.password)
        give_to(self._account, password_file)
        options = ["-U", USER, "-A", "scram-sha-256", "--pwfile", str(password_file), "-E", "UTF8"]
        self._run("initdb", "-D", str(self._data), *options, "--locale", "C")
        self._configure()

    def _configure(self) -> None:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self.home),
            "external_pid_file": str(self.home / "pid"),
        } | self._settings
        with (self._data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in settings.items())
            file.flush()
            # initdb has synced the rest.
            os.fsync(file.fileno())

    def _pg_ctl(self, *arguments: str) -> None:
        self._run("pg_ctl", "-D", str(self._data), "-w", "-t", str(int(_PATIENCE)), *arguments)

    def _run(self, program: str, *arguments: str) -> None:
        output = self.home / "output"
        with output.open("w") as file:
            # Into a file: a server would keep a pipe open for as long as it runs.
            done = subprocess.run(
                [str(self._programs / program), *arguments],
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                check=False,
                **run_as(self._account),
            )
        if done.returncode:
            raise ServerError(
                f"{program} {arguments[-1]} failed: {_tail(output)}\n{_tail(self.home / 'log')}"
            )


class PostgresStandby(PostgresCluster):
    """A standby that streams from a cluster which is up, with the same user and password. A context manager."""

    def __init__(self, primary: PostgresCluster) -> None:
        super().__init__()
        self._primary = primary
        self.password = primary.password

    def disconnect(self) -> None:
        """Stop to receive from the primary, as behind a cut network, and return once the primary knows."""
        self.change("primary_conninfo", "")
        give_up = time.monotonic() + _PATIENCE
        while self._primary.fetch("SELECT FROM pg_stat_replication"):
            if time.monotonic() > give_up:
                raise ServerError("the standby goes on receiving")
            time.sleep(0.01)

    def promote(self) -> None:
        """Take the primary's place, and return once it is taken."""
        self._pg_ctl("promote")

    def _initdb(self) -> None:
        primary = f"host=127.0.0.1 port={self._primary.port} user={USER} password={self.password}"
        # The last argument stands in the error of a program that fails.
        self._run("pg_basebackup", "-d", primary, "-R", "-c", "fast", "-D", str(self._data))
        self._configure()


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def unprivileged_account() -> pwd.struct_passwd | None:
    """Return the account for servers that refuse to run as root, or None where this process is not root."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise ServerError("PostgreSQL refuses to run as root, and neither postgres nor nobody is an account here")


def run_as(account: pwd.struct_passwd | None) -> dict[str, Any]:
    """Return the options of subprocess that run a program as an account; none for None."""
    if account is None:
        return {}
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


def give_to(account: pwd.struct_passwd | None, path: Path) -> None:
    """Make an account the owner of a file or folder; None leaves it as it is."""
    if account is not None:
        os.chown(path, account.pw_uid, account.pw_gid)


def _programs() -> Path:
    installed = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    newest = sorted(installed, key=lambda path: int(re.sub(r"\D", "", path.parts[-3]) or 0))
    found = [str(newest[-1])] if newest else [path for path in [shutil.which("initdb")] if path]
    if not found:
        raise ServerError("a campaign on PostgreSQL needs its programs: apt-get install postgresql")
    return Path(found[0]).resolve().parent


def _children(parent: int) -> Sequence[int]:
    # Threads of the parent are one: PostgreSQL has no others.
    try:
        return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join(lines[-5:])
