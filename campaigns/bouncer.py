"""PgBouncer in transaction mode, where a server connection is a client's for one transaction only."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self
from urllib.parse import quote

from campaigns.guard import cleaned_up
from campaigns.servers import (
    USER,
    PostgresCluster,
    ServerError,
    free_port,
    give_to,
    run_as,
    unprivileged_account,
)

_PATIENCE = 30.0

_CONFIGURATION = """
[databases]
{database} = host=127.0.0.1 port={server_port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = scram-sha-256
auth_file = {home}/users
pidfile = {home}/pid
logfile = {home}/log
pool_mode = transaction
default_pool_size = {pool_size}
# Seconds until a server that was down is tried again.
server_login_retry = 1
"""


class PgBouncer:
    """A pooler before one database of a cluster. A context manager.

    `url` is for a store; `plain_url` leaves the driver its prepared statements, which transaction mode breaks.
    """

    def __init__(self, cluster: PostgresCluster, database: str, *, pool_size: int = 3) -> None:
        self._cluster = cluster
        self._database = database
        self.pool_size = pool_size
        self._account = unprivileged_account()
        self._stack = contextlib.ExitStack()
        self.port = free_port()
        self.plain_url = f"postgresql://{USER}:{cluster.password}@127.0.0.1:{self.port}/{quote(database)}"
        self.url = f"{self.plain_url}?statement_cache_size=0"

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._home = Path(tempfile.mkdtemp(prefix="tokencustody-pgbouncer-"))
            stack.enter_context(cleaned_up('kill -KILL $(cat "$1/pid"); rm -rf "$1"', str(self._home)))
            give_to(self._account, self._home)
            (self._home / "users").write_text(f'"{USER}" "{self._cluster.password}"\n')
            (self._home / "pgbouncer.ini").write_text(
                _CONFIGURATION.format(
                    database=self._database,
                    server_port=self._cluster.port,
                    port=self.port,
                    home=self._home,
                    pool_size=self.pool_size,
                )
            )
            for file in self._home.iterdir():
                file.chmod(0o600)
                give_to(self._account, file)
            self.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
        self._stack.close()

    def start(self) -> None:
        """Start a pooler that is down, and return once it listens. Raises ServerError."""
        program = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
        try:
            self._process = subprocess.Popen(
                [program, "--quiet", str(self._home / "pgbouncer.ini")],
                cwd=self._home,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                **run_as(self._account),
            )
        except FileNotFoundError:
            raise ServerError("the pooler's program is not there: apt-get install pgbouncer") from None
        give_up = time.monotonic() + _PATIENCE
        log = self._home / "log"
        while "process up" not in (log.read_text() if log.exists() else ""):
            if self._process.poll() is not None or time.monotonic() > give_up:
                raise ServerError(f"{program} did not start:\n{log.read_text() if log.exists() else ''}")
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill the pooler: every connection is gone. It is down until `start`."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for name in ("log", "pid"):
            (self._home / name).unlink(missing_ok=True)

    def restart(self) -> None:
        """Kill the pooler and start it again."""
        self.kill()
        self.start()
