"""Many processes that use a store at the same moment.

    python -m tests.faults.many_processes URL PROCESSES

Each puts one call and closes its store. Prints what each reports: nothing, or its error; and the retries of all.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter

# Loaded once, before the processes are forked.
import alembic.config  # noqa: F401

import tokencustody.database.postgresql  # noqa: F401
from tests.support.entries import make_entry
from tokencustody import open_store


async def put_one(url: str, number: int) -> dict[str, int]:
    """Open, put and close; return what the store counted."""
    async with open_store(url, pool_size=1, deadline=120) as store:
        await store.sink.put(make_entry(model_call_id=f"call-{number}"))
    return store.stats()


def child(url: str, number: int, start: int, report: int) -> None:
    """Wait until every process is there, put, and report a line."""
    os.read(start, 1)
    try:
        counted = asyncio.run(put_one(url, number))
        line = "ok " + " ".join(f"{name}={value}" for name, value in counted.items() if "retries_" in name)
    except BaseException as exc:
        line = f"{type(exc).__name__}: {exc}"
    os.write(report, f"{line}\n".encode()[:4096])  # whole lines: no more than a pipe takes at once


def main(url: str, processes: int) -> None:
    """Fork the processes, let them go on together, and print their errors and retries."""
    start, go = os.pipe()
    reports, report = os.pipe()
    children = []
    for number in range(processes):
        pid = os.fork()
        if not pid:
            os.close(go)
            os.close(reports)
            child(url, number, start, report)
            os._exit(0)
        children.append(pid)
    os.close(report)
    os.close(go)  # every reader sees the end at once
    with os.fdopen(reports) as lines:
        said = lines.read().splitlines()
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    retries: Counter[str] = Counter()
    for line in said:
        if line.startswith("ok"):
            for word in line.split()[1:]:
                name, _, value = word.partition("=")
                retries[name] += int(value)
        else:
            print(line)
    print(
        f"{sum(line.startswith('ok') for line in said)} ok, {codes.count(0)} ended, retries {dict(+retries)}"
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
