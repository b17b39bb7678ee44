"""What a campaign runs on: a database, what stands before it, and the faults that can befall both."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
import subprocess
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import ClassVar, Self

from campaigns.bouncer import PgBouncer
from campaigns.disks import SmallDisk
from campaigns.relay import ChaosRelay, Cut, Request
from campaigns.servers import PostgresCluster
from tokencustody.store.opening import open_store

_DATABASE = "campaign"
# What a campaign fills of its disk with each operation, generously, and from the start.
_DISK_PER_OPERATION = 4 << 10
_SMALLEST_DISK = 64 << 20


@dataclass(frozen=True)
class Fault:
    """Something that happens to the database. `strike` may return how often it did at once.

    One that lasts ends by `end`, after a number of seconds between the two of `seconds`.
    """

    strike: Callable[[Random], int | None]
    seconds: tuple[float, float] | None = None
    end: Callable[[], object] = lambda: None


class Setup(ABC):
    """A context manager that brings a database up, for so many operations, and takes it down. `folder` is for files.

    `url` is that of the workers and of the final reads: a spilled mark belongs to the URL it was made for.
    """

    name: ClassVar[str]
    url: str
    faults: Mapping[str, Fault]

    def __init__(self, folder: Path, operations: int) -> None:
        self._folder = folder
        self._operations = operations
        self._stack = contextlib.ExitStack()

    @classmethod
    @abstractmethod
    def fault_names(cls) -> list[str]:
        """Return the faults that this setup knows, those that the driver brings about by itself left out."""

    @abstractmethod
    def _bring_up(self, stack: contextlib.ExitStack) -> None:
        """Start everything and set `url` and `faults`."""

    @abstractmethod
    def keep_database(self) -> None:
        """Copy the database into the folder, if the machine can, for whoever looks into a violation."""

    def counts(self) -> Counter[str]:
        """Return what was counted of the faults, beside how often they struck."""
        return Counter()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._bring_up(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()


class Sqlite(Setup):
    """A file, on a disk of its own where this process may mount one."""

    name = "sqlite"

    @classmethod
    def fault_names(cls) -> list[str]:
        # Only root mounts a disk that can be filled.
        return ["lock", "disk"] if os.getuid() == 0 else ["lock"]

    def _bring_up(self, stack: contextlib.ExitStack) -> None:
        faults = {"lock": Fault(self._lock, (0.1, 6.0), self._unlock)}
        folder = self._folder
        if "disk" in self.fault_names():
            disk = stack.enter_context(SmallDisk(_SMALLEST_DISK + self._operations * _DISK_PER_OPERATION))
            folder = disk.folder
            faults["disk"] = Fault(lambda _: _fill(disk), (0.1, 1.0), disk.free)
        self.faults = faults
        self._path = folder / "captures.db"
        self.url = f"sqlite:///{self._path}"
        asyncio.run(_use(self.url))
        self._holder = sqlite3.connect(self._path, timeout=10.0, isolation_level=None)
        stack.callback(self._holder.close)

    def keep_database(self) -> None:
        self._holder.execute("VACUUM INTO ?", [str(self._folder / "kept.db")])

    def _lock(self, _rng: Random) -> None:
        self._holder.execute("BEGIN IMMEDIATE")

    def _unlock(self) -> None:
        self._holder.execute("ROLLBACK")


class _Server(Setup):
    """A PostgreSQL server of the campaign's own."""

    _cluster: PostgresCluster

    def _start_server(self, stack: contextlib.ExitStack) -> str:
        self._cluster = stack.enter_context(PostgresCluster())
        return self._cluster.create_database(_DATABASE)

    def _server_faults(self) -> dict[str, Fault]:
        cluster = self._cluster
        return {
            "restart": Fault(lambda _: cluster.restart_immediate()),
            "crash": Fault(lambda _: cluster.kill_postmaster(), (0.0, 1.5), cluster.start),
            "terminate": Fault(cluster.terminate_sessions),
        }

    def keep_database(self) -> None:
        if program := shutil.which("pg_dump"):
            url = self._cluster.url_of(_DATABASE)
            subprocess.run([program, "--file", str(self._folder / "kept.sql"), url], check=True)


class Postgresql(_Server):
    """A server, behind a relay that loses connections."""

    name = "postgresql"

    @classmethod
    def fault_names(cls) -> list[str]:
        return ["restart", "crash", "terminate", "reset", "cut", "black-hole"]

    def _bring_up(self, stack: contextlib.ExitStack) -> None:
        url = self._start_server(stack)
        relay = stack.enter_context(ChaosRelay("127.0.0.1", self._cluster.port))
        self._relay = relay
        self.url = relay.url(url)
        self.faults = self._server_faults() | {
            "reset": Fault(lambda _: relay.reset_all()),
            "cut": Fault(lambda rng: relay.cut_next(rng.choice(list(Cut)), rng.choice(list(Request)))),
            "black-hole": Fault(lambda _: relay.black_hole(), (0.2, 6.0), relay.heal),
        }

    def counts(self) -> Counter[str]:
        return self._relay.counts


class Pooled(_Server):
    """A server, behind PgBouncer in transaction mode with three connections."""

    name = "pgbouncer"

    @classmethod
    def fault_names(cls) -> list[str]:
        return ["restart", "crash", "terminate", "bouncer"]

    def _bring_up(self, stack: contextlib.ExitStack) -> None:
        self._start_server(stack)
        bouncer = stack.enter_context(PgBouncer(self._cluster, _DATABASE, pool_size=3))
        self.url = bouncer.url
        self.faults = self._server_faults() | {
            "bouncer": Fault(lambda _: bouncer.kill(), (0.0, 1.0), bouncer.start)
        }


SETUPS: dict[str, type[Setup]] = {setup.name: setup for setup in (Sqlite, Postgresql, Pooled)}


def _fill(disk: SmallDisk) -> None:
    disk.fill()


async def _use(url: str) -> None:
    """Let a store create the file."""
    async with open_store(url) as store:
        await store.lineage.manifest("none")
