"""What the figures depend on: the machine, its disk, the programs and their settings."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sqlite3
import subprocess
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from tests.support.postgres import Server, fetch

_SETTINGS = ("fsync", "synchronous_commit", "full_page_writes", "wal_sync_method", "shared_buffers")
_PACKAGES = ("nemo-gym", "sqlalchemy", "asyncpg", "pydantic", "orjson")
# No disk is done this fast; a file system in memory, or a library that swallows fsync, is.
_SWALLOWED_FSYNC = 0.03


def describe(folder: Path, server: Server) -> dict[str, Any]:
    """Return what a reader must know to judge the figures."""
    if server.socket_directory is None:
        disk = "unknown: the server was given"
    else:
        disk = "the same" if server.socket_directory.stat().st_dev == folder.stat().st_dev else "another one"
    return {
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "file_system": _file_system(folder),
        "fsync_ms": round(fsync_milliseconds(folder), 3),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "sqlite": sqlite3.sqlite_version,
        "postgresql": str(server),
        "postgresql_settings": {name: fetch(server.url, f"SHOW {name}")[0][0] for name in _SETTINGS},
        "postgresql_file_system": disk,
    }


def problems(machine: dict[str, Any]) -> list[str]:
    """Return why the figures would mean nothing, empty when they do."""
    found = []
    if machine["fsync_ms"] < _SWALLOWED_FSYNC:
        found.append(
            f"an fsync takes {machine['fsync_ms']} ms, which no disk can do: it is swallowed, or this is memory"
        )
    found += [
        f"PostgreSQL has {name} = off: its figures are not those of a durable store"
        for name in ("fsync", "synchronous_commit", "full_page_writes")
        if machine["postgresql_settings"][name] == "off"
    ]
    return found


def fsync_milliseconds(folder: Path) -> float:
    """Return how long it takes to append 8 KiB to a file and sync it, as the median of fifty."""
    times = []
    with tempfile.NamedTemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(50):
            began = perf_counter()
            file.write(bytes(8192))
            os.fsync(file.fileno())
            times.append(1000 * (perf_counter() - began))
    return median(times)


class ServerCpu:
    """The CPU seconds of a PostgreSQL server with all its processes, where they can be read: on this Linux."""

    def __init__(self, server: Server) -> None:
        self._postmaster: int | None = None
        if server.socket_directory is not None and Path("/proc/self/stat").exists():
            self._postmaster = int((server.socket_directory / "data/postmaster.pid").read_text().split()[0])

    def seconds(self) -> float | None:
        """Return the seconds since the server started."""
        if self._postmaster is None:
            return None
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile, and its parent has its ticks
            own, of_ended_children = map(int, fields[11:13]), map(int, fields[13:15])
            if int(stat.parent.name) == self._postmaster:
                ticks += sum(own) + sum(of_ended_children)
            elif int(fields[1]) == self._postmaster:
                ticks += sum(own)
        return ticks / os.sysconf("SC_CLK_TCK")


class ServerWatch:
    """Takes the CPU seconds that a PostgreSQL server spends during its `with` block, or None."""

    seconds: float | None = None

    def __init__(self, cpu: ServerCpu) -> None:
        self._cpu = cpu

    def __enter__(self) -> ServerWatch:
        self._before = self._cpu.seconds()
        return self

    def __exit__(self, *exc_info: object) -> None:
        after = self._cpu.seconds()
        if self._before is not None and after is not None:
            self.seconds = after - self._before


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _file_system(folder: Path) -> str:
    listing = subprocess.run(
        ["df", "--output=fstype", str(folder)], capture_output=True, text=True, check=False
    ).stdout.split()
    return listing[-1] if listing else "unknown"
