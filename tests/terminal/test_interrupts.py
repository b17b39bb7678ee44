"""Ctrl-C: what each command leaves behind, how fast it ends, and what it says."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from select import select as ready_of

import pytest
from sqlalchemy import Connection, func, select, text

from tokencustody.database.url import parse_url
from tokencustody.schema.migrate import in_transaction
from tokencustody.schema.tables import metadata

WAIT = 60.0
# Nothing ends in time because a patience ran out.
PATIENT = """
import sys
import tokencustody.demo.model, tokencustody.demo.staging.processes
from tokencustody.__main__ import main
tokencustody.demo.model._STOP_SECONDS = tokencustody.demo.staging.processes._STOP_SECONDS = 600.0
main()
"""


@contextlib.contextmanager
def started(
    program: str, *arguments: str, stderr: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program in a process group of its own, and kill it if it outlives the block."""
    # In the background of a shell it is ignored, and every process below inherits that.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    command = [sys.executable, "-c", heard + program, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


class Terminal:
    """The terminal of a command. `until` reads what it shows, so that it never blocks on a full buffer."""

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        self.shown = b""

    def until(self, words: bytes) -> None:
        while words not in self.shown:
            ready, _, _ = ready_of([self._ours], [], [], WAIT)
            assert ready, self.shown
            self.shown += os.read(self._ours, 65_536)

    def close(self) -> None:
        """Let go of our copy of the command's end and read the rest."""
        os.close(self.theirs)
        # A terminal that nobody writes to any more ends in an error on Linux, and in nothing elsewhere.
        with contextlib.suppress(OSError):
            while more := os.read(self._ours, 65_536):
                self.shown += more
        os.close(self._ours)


def children(pid: int) -> list[int]:
    """Return the ids of a process's children, and of theirs."""
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    parents = [tuple(map(int, line.split())) for line in listed.splitlines()]
    below = [child for child, parent in parents if parent == pid]
    return below + [each for child in below for each in children(child)]


def ended(process: int) -> bool:
    """Return whether the process of a descriptor ends in time."""
    ready, _, _ = ready_of([process], [], [], WAIT)
    os.close(process)
    return bool(ready)


@pytest.mark.parametrize("options", [[], ["--staging"]], ids=["demo", "staging"])
def test_ctrl_c_ends_the_demo_and_its_processes_in_order(tmp_path: Path, options: list[str]) -> None:
    terminal = Terminal()
    arguments = ["demo", *options, "--rollouts", "8", "--url", str(tmp_path / "captures.db")]
    with started(PATIENT, *arguments, stderr=terminal.theirs) as command:
        terminal.until(b"Playing")
        processes = [os.pidfd_open(pid) for pid in children(command.pid)]
        command.send_signal(signal.SIGINT)
        terminal.until(b"interrupted: ending the demo's processes")
        terminal.close()
        assert command.wait(WAIT) == 130
    assert len(processes) == (3 if options else 1)
    assert all(map(ended, processes))
    assert b"Traceback" not in terminal.shown


@pytest.mark.parametrize("options", [[], ["--staging"]], ids=["demo", "staging"])
def test_a_second_ctrl_c_ends_the_demo_at_once_with_processes_that_do_not_answer(
    tmp_path: Path, options: list[str]
) -> None:
    terminal = Terminal()
    arguments = ["demo", *options, "--rollouts", "8", "--url", str(tmp_path / "captures.db")]
    with started(PATIENT, *arguments, stderr=terminal.theirs) as command:
        terminal.until(b"Playing")
        # Stopped, so that the first Ctrl-C waits for them.
        below = children(command.pid)
        processes = [os.pidfd_open(pid) for pid in below]
        direct = below[: 2 if options else 1]
        for pid in direct:
            os.kill(pid, signal.SIGSTOP)
        command.send_signal(signal.SIGINT)
        terminal.until(b"interrupted: ending the demo's processes")
        command.send_signal(signal.SIGINT)
        terminal.close()
        assert command.wait(WAIT) == 130
    assert len(processes) == (3 if options else 1)
    assert all(map(ended, processes))
    assert b"Traceback" not in terminal.shown
    assert terminal.shown.rstrip().endswith(b"\x1b[?25h"), "the cursor is hidden"


def rows(url: str) -> int:
    """Return how many rows of runs a database holds."""

    def count(connection: Connection) -> int:
        tables = [table for table in metadata.sorted_tables if "run" in table.c]
        return sum(connection.execute(select(func.count()).select_from(t)).scalar_one() for t in tables)

    return in_transaction(parse_url(url), count)


CONFORMANCE = """
import asyncio, sys
from tokencustody.__main__ import main
{patch}
main()
"""
TELLS_OF_WRITERS = CONFORMANCE.format(
    patch="""
from tokencustody.conformance.writers import Writers
original = Writers.{moment}
def told(self, *arguments):
    if {moment!r} == "prepare":  # its processes are still importing
        print("now", flush=True)
    result = original(self, *arguments)
    print("now", flush=True)
    return result
Writers.{moment} = told
"""
)
HANGS_IN_A_CHECK = """
import tokencustody.conformance.runner as runner
async def hang(check, transport, timeout):
    result = await original(check, transport, timeout)
    if check.name == "concurrent_stages":
        print("now", flush=True)
        await asyncio.Event().wait()
    return result
original, runner._run = runner._run, hang
"""
DELETES_NOTHING = """
from importlib import import_module
from tokencustody.errors import StoreUnavailableError
command = import_module("tokencustody.conformance.command")
delete, called = command._delete_runs, []
async def lost(url, run):
    called.append(run)
    if len(called) == 1:  # before the first check
        return await delete(url, run)
    {lost}
command._delete_runs = lost
"""
FAILS = DELETES_NOTHING.format(lost="raise StoreUnavailableError('the database is gone')")
HANGS = DELETES_NOTHING.format(lost="await asyncio.Event().wait()")
# None of these deletes anything itself.
COMMAND = ["conformance", "--check", "put_then_freeze", "--check", "concurrent_stages"]


def read_line(command: subprocess.Popen[bytes]) -> bytes:
    assert command.stdout is not None
    return command.stdout.readline()


@pytest.mark.race
@pytest.mark.parametrize("moment", ["prepare", "start"])
def test_ctrl_c_to_the_whole_group_during_the_race_leaves_no_row_and_no_traceback(
    store_url: str, moment: str
) -> None:
    arguments = ["conformance", "--url", store_url, "--check", "strict_fence"]
    with started(TELLS_OF_WRITERS.format(moment=moment), *arguments) as command:
        assert read_line(command) == b"now\n"
        os.killpg(command.pid, signal.SIGINT)
        _, said = command.communicate(timeout=WAIT)
    assert command.returncode == 130
    assert re.fullmatch(rb"interrupted: deleting what the checks wrote;[^\n]*\n", said), said
    assert rows(store_url) == 0


def test_an_interrupted_check_leaves_no_rollout_and_no_staged_call(store_url: str) -> None:
    with started(CONFORMANCE.format(patch=HANGS_IN_A_CHECK), *COMMAND, "--url", store_url) as command:
        assert read_line(command) == b"now\n"
        assert rows(store_url) > 0
        command.send_signal(signal.SIGINT)
        _, said = command.communicate(timeout=WAIT)
    assert command.returncode == 130
    assert b"left in the runs" not in said
    assert rows(store_url) == 0


@pytest.mark.parametrize(
    ("obstacle", "interrupts"), [(FAILS, 1), (HANGS, 2)], ids=["it fails", "it is interrupted too"]
)
def test_what_an_interrupted_check_cannot_delete_it_names_with_statements_that_do(
    store_url: str, obstacle: str, interrupts: int
) -> None:
    program = CONFORMANCE.format(patch=HANGS_IN_A_CHECK + obstacle)
    with started(program, *COMMAND, "--url", store_url) as command:
        assert read_line(command) == b"now\n"
        command.send_signal(signal.SIGINT)
        assert command.stderr is not None
        first = command.stderr.readline()
        assert first.startswith(b"interrupted: deleting what the checks wrote; Ctrl-C again")
        if interrupts == 2:
            command.send_signal(signal.SIGINT)
        said = command.stderr.read()
    assert command.returncode == 130
    assert b"Traceback" not in said
    left = rf"left in the runs (conformance-[0-9a-f]{{8}}) and \1-other of {re.escape(parse_url(store_url).display)}\."
    assert re.search(left, said.decode())
    assert (b"error: the database is gone" in said) is (interrupts == 1)
    assert rows(store_url) > 0
    statements = re.findall(r"DELETE FROM [^;]+;", said.decode())

    def follow(connection: Connection) -> None:
        for statement in statements:
            connection.execute(text(statement))

    in_transaction(parse_url(store_url), follow)
    assert rows(store_url) == 0


@pytest.mark.parametrize("loaded", ["tokencustody.cli", "tokencustody.states", "pydantic_core"])
def test_ctrl_c_while_something_is_loaded_is_quiet(sqlite_url: str, loaded: str) -> None:
    # Whoever loads a module may catch what it raises, as pydantic does.
    program = f"""
import builtins, os, signal, sys
from tokencustody.__main__ import main
original = builtins.__import__
def interrupted(name, *arguments, **options):
    if name.startswith({loaded!r}):
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException as exc:
            raise RuntimeError("an extension says something else") from exc
    return original(name, *arguments, **options)
builtins.__import__ = interrupted
main()
"""
    with started(program, "rollouts", "--url", sqlite_url) as command:
        out, said = command.communicate(timeout=WAIT)
    assert (command.returncode, out, said) == (130, b"", b"")
