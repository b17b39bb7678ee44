"""How a verification runs: in several processes, after an interruption, beside writers, and without a write."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from tests.support.archive import archived, python
from tests.support.entries import make_entry
from tests.support.machine import needs_linux
from tests.support.rollouts import linear_rollout
from tests.verify.verifying import OTHER_RUN, RUN, behind, change, fill
from tokencustody import open_store
from tokencustody.errors import AccessDeniedError, InvalidRecordError, RolloutNotFoundError
from tokencustody.states import FenceState
from tokencustody.txn.selection import RolloutFilter
from tokencustody.verify import Rule, running, verify
from tokencustody.watching import Watch

_MANY = 90


def _fill_many(url: str) -> None:
    """Fill a database with more rollouts than are verified without other processes; two calls are wrong."""

    async def put() -> None:
        async with open_store(url, run=RUN, spill=None) as store:
            for number in range(_MANY):
                await store.sink.put(make_entry(f"rollout-{number:03}"))

    asyncio.run(put())
    for number in (11, 70):
        change(url, "entries", "model", lambda _: "another", rollout_id=f"rollout-{number:03}")


def test_several_processes_find_the_same_as_one_in_the_same_order(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill_many(store_url)
    monkeypatch.setattr(running, "_SOON", 0.0)
    # Wait for them, else this process would have done it all by then.
    monkeypatch.setattr(running, "_is_up", lambda first: first.result() != os.getpid())

    alone, together = verify(store_url), verify(store_url, jobs=2)

    assert [each.rollout_id for each in alone.findings] == ["rollout-011", "rollout-070"]
    assert together.findings == alone.findings
    assert together.counts == alone.counts
    assert alone.counts.rollouts == _MANY


def test_only_the_rollouts_that_are_meant_are_looked_at(store_url: str) -> None:
    fill(store_url)

    def looked_at(**wanted: Any) -> int:
        return verify(store_url, RolloutFilter(**wanted)).counts.rollouts

    assert looked_at(run=OTHER_RUN) == 1
    assert looked_at(rollout_ids=("linear",)) == 2
    assert looked_at(run=RUN, rollout_ids=("linear",)) == 1
    assert looked_at(state=FenceState.RETIRED) == 4
    # Staged calls without a fence are rollouts too.
    assert looked_at(prefix="orph") == 1
    for nothing, problem in (
        ({"run": "no-such-run"}, "there is no run no-such-run in .*, which has the runs run-a, run-b"),
        ({"prefix": "no-such"}, "no rollout of .* begins with no-such"),
        ({"run": OTHER_RUN, "state": FenceState.RETIRED}, "0 rollouts were looked at"),
    ):
        with pytest.raises(RolloutNotFoundError, match=problem):
            looked_at(**nothing)
    with pytest.raises(RolloutNotFoundError, match="nobody is not in run run-a of "):
        verify(store_url, RolloutFilter(run=RUN, rollout_ids=("nobody",)))


class _StoppedError(Exception):
    pass


def _seen_by(see: Callable[[int, int], None]) -> Watch:
    """Return what shows to `see` how many rollouts are done, and how many there are."""

    def watch(_what: str, total: int) -> nullcontext[Callable[[int], None]]:
        so_far = 0

        def advance(done: int) -> None:
            nonlocal so_far
            so_far += done
            see(so_far, total)

        return nullcontext(advance)

    return watch


def _stop_at(done: int) -> Watch:
    def see(so_far: int, _total: int) -> None:
        if so_far >= done:
            raise _StoppedError

    return _seen_by(see)


def test_an_interrupted_verification_goes_on_where_it_was(store_url: str, tmp_path: Path) -> None:
    _fill_many(store_url)
    checkpoint, done = tmp_path / "checkpoint.json", []
    with pytest.raises(_StoppedError):
        verify(store_url, checkpoint=checkpoint, watch=_stop_at(40))
    assert "password" not in checkpoint.read_text()

    report = verify(store_url, checkpoint=checkpoint, watch=_seen_by(lambda *seen: done.append(seen)))

    assert done[0] == (40, _MANY)
    assert done[-1] == (_MANY, _MANY)
    assert [each.rollout_id for each in report.findings] == ["rollout-011", "rollout-070"]
    assert report.counts == verify(store_url).counts
    assert not list(tmp_path.glob("checkpoint*"))


def test_a_checkpoint_of_something_else_is_refused(store_url: str, tmp_path: Path) -> None:
    _fill_many(store_url)
    checkpoint, other = tmp_path / "checkpoint.json", tmp_path / "other.db"
    fill(str(other))
    with pytest.raises(_StoppedError):
        verify(store_url, checkpoint=checkpoint, watch=_stop_at(8))
    before = checkpoint.read_bytes()

    with pytest.raises(InvalidRecordError, match="its database is another; name another file, or remove it"):
        verify(other, checkpoint=checkpoint)
    with pytest.raises(InvalidRecordError, match="its filter is another"):
        verify(store_url, RolloutFilter(run=RUN), checkpoint=checkpoint)
    assert checkpoint.read_bytes() == before
    for damaged in ("", "[]", before.decode().replace("counts", "count")):
        checkpoint.write_text(damaged)
        with pytest.raises(InvalidRecordError, match="remove it"):
            verify(store_url, checkpoint=checkpoint)


def test_calls_are_put_and_frozen_while_they_are_verified(store_url: str) -> None:
    async def both() -> None:
        async with open_store(store_url, run=RUN, spill=None) as store:
            await store.sink.put(make_entry("first"))
            verifying = asyncio.create_task(asyncio.to_thread(_verify_often, store_url))
            for number in range(20):
                for turn in linear_rollout(6, rollout_id=f"rollout-{number}"):
                    await store.sink.put(turn.entry)
                await store.sink.mark_incomplete(f"rollout-{number}")
                await store.source.freeze(f"rollout-{number}")
                await store.source.retire([f"rollout-{number}"] if number % 2 else [])
            assert await verifying == []

    asyncio.run(both())


def _verify_often(url: str) -> list[Any]:
    return [finding for _ in range(5) for finding in verify(url).findings]


def test_nothing_is_written_to_a_sqlite_file_whose_log_holds_calls(sqlite_url: str, tmp_path: Path) -> None:
    """The calls of a process that was killed stand in the log; to close a connection would move them to the file."""
    path = tmp_path / "captures.db"
    killed = (
        "import asyncio, os\n"
        "from tests.support.entries import make_entry\n"
        "from tokencustody import open_store\n"
        "async def put():\n"
        f"    store = open_store({sqlite_url!r}, run='r', spill=None)\n"
        "    await store.sink.put(make_entry())\n"
        "    os._exit(0)\n"
        "asyncio.run(put())\n"
    )
    subprocess.run(
        [sys.executable, "-c", killed], check=True, cwd=Path.cwd(), env=os.environ | {"PYTHONPATH": "."}
    )
    files = [path, path.with_name("captures.db-wal")]
    before = [(hashlib.sha256(file.read_bytes()).digest(), file.stat().st_mtime_ns) for file in files]
    assert files[1].stat().st_size

    assert verify(sqlite_url).counts.calls == 1

    assert [(hashlib.sha256(file.read_bytes()).digest(), file.stat().st_mtime_ns) for file in files] == before


def test_an_archived_file_is_verified_in_a_folder_where_nothing_can_be_written(tmp_path: Path) -> None:
    needs_linux("a way to bind root by file modes")
    folder = tmp_path / "archive"
    folder.mkdir()
    path = folder / "captures.db"
    fill(str(path))
    assert [each.name for each in folder.iterdir()] == ["captures.db"]
    verifying = (
        "import sys; from tokencustody.verify import verify; print(verify(sys.argv[1]).counts.rollouts)"
    )
    with archived(path):
        done = python("-c", verifying, str(path))

    assert (done.stdout, done.stderr) == ("18\n", "")
    assert [each.name for each in folder.iterdir()] == ["captures.db"]


def test_a_damaged_page_is_a_finding_and_hides_no_other_rollout(sqlite_url: str, tmp_path: Path) -> None:
    _fill_many(sqlite_url)
    path = tmp_path / "captures.db"
    with closing(sqlite3.connect(path)) as connection:
        page_size = connection.execute("PRAGMA page_size").fetchone()[0]
    data = bytearray(path.read_bytes())
    # The page that holds the payload's own text of one rollout.
    at = data.index(b'"rollout_id":"rollout-040"') // page_size * page_size
    data[at : at + 12] = b"\xff" * 12
    path.write_bytes(data)

    report = verify(sqlite_url)

    assert report.counts.rollouts == _MANY
    unreadable = {each.rollout_id for each in report.findings if each.rule is Rule.UNREADABLE}
    assert "rollout-040" in unreadable
    assert {each.rollout_id for each in report.findings} == unreadable | {"rollout-011", "rollout-070"}
    assert len(unreadable) < 20


def test_a_role_that_may_only_select_can_verify(postgres_url: str) -> None:
    fill(postgres_url)
    role, password = f"reader_{os.getpid()}", secrets.token_hex(8)
    as_reader = f"postgresql://{role}:{password}@{postgres_url.rpartition('@')[2]}"

    def run(statement: str) -> None:
        behind(postgres_url, lambda connection: connection.execute(text(statement)))

    run(f"CREATE ROLE {role} LOGIN PASSWORD '{password}'")
    try:
        run(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")
        assert verify(as_reader).ok
        run(f"REVOKE SELECT ON entries FROM {role}")
        with pytest.raises(AccessDeniedError) as denied:
            verify(as_reader)
        assert password not in str(denied.value)
    finally:
        run(f"DROP OWNED BY {role}")
        run(f"DROP ROLE {role}")
