"""Files of the local spill that are not what was written: kept aside or reported, and never a mark that nobody made."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from campaigns.fuzzing.cases import Case, Target, Violation, attempt
from campaigns.fuzzing.mutations import mutated
from tokencustody.database.url import parse_url
from tokencustody.errors import StoreUnavailableError
from tokencustody.spill.marks import Mark, Spill, spilled_files
from tokencustody.spill.replaying import replay
from tokencustody.store import open_store
from tokencustody.txn.fence import RolloutKey, Stamp


def _marks(number: int) -> list[Mark]:
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    return [
        Mark(
            RolloutKey("default", f"fuzz-{number}"),
            f"call-{index}" if index else "",
            Stamp(at.replace(microsecond=index), "host:1", f"{number:016x}{index:016x}"),
        )
        for index in range(3)
    ]


@contextmanager
def _spilled(seed: str) -> Iterator[Case]:
    with tempfile.TemporaryDirectory() as made:
        database, root = Path(made) / "one.db", Path(made) / "spill"

        def case(rng: random.Random) -> str:
            marks = _marks(rng.getrandbits(48))
            spill = Spill(root, parse_url(database))
            paths = [spill.keep(mark) for mark in marks]
            damage = _damage(rng, paths, marks)
            for file in spilled_files(root):
                if file.mark is not None and file.mark not in marks:
                    raise Violation(f"{damage}: a mark that nobody made: {file.mark}")
            attempt(lambda: _claim_one(spill, rng.choice(paths), marks), (OSError,))
            stored = asyncio.run(_replayed(database, root, marks[0].key))
            if unknown := stored - {mark.model_call_id for mark in marks} - {"own"}:
                raise Violation(f"{damage}: marks that nobody made were stored: {unknown}")
            _clear(root)
            return f"{damage}: {len(stored - {'own'})} of {len(marks)} stored"

        yield case


def _claim_one(spill: Spill, path: Path, marks: list[Mark]) -> None:
    claim = spill.claim(path)
    if claim is not None:
        claim.close()
        if claim.mark is not None and claim.mark not in marks:
            raise Violation(f"a mark that nobody made was claimed: {claim.mark}")


async def _replayed(database: Path, root: Path, key: RolloutKey) -> set[str]:
    """Let a store replay what waits; return the calls that are marked, one of them by this store itself.

    A rollout one of whose marks did not come in is not frozen.
    """
    async with open_store(database, run=key.run, spill=root, deadline=5) as store:
        await replay(store.sink._database, Spill(root, parse_url(database)))
        await store.sink.mark_incomplete(key.rollout_id, "own")
        stored = _stored(database, key)
        if len(stored) < 4:
            try:
                await store.source.freeze(key.rollout_id)
            except StoreUnavailableError:
                return stored
            raise Violation(f"frozen with the marks {stored} alone")
    return stored


def _stored(database: Path, key: RolloutKey) -> set[str]:
    if not database.exists():
        raise Violation("what waited kept a mark out of a database that works")
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute(
            "SELECT model_call_id FROM failures WHERE rollout_id = ?", (key.rollout_id,)
        )
        return {row[0] for row in rows}


def _damage(rng: random.Random, paths: list[Path], marks: list[Mark]) -> str:
    path = rng.choice(paths)
    data = path.read_bytes()
    kind = rng.choice(
        ("bytes", "bytes", "bytes", "huge", "symlink", "folder", "exchanged", "renamed", "extra")
    )
    match kind:
        case "bytes":
            path.write_bytes(mutated(rng, data, [each.read_bytes() for each in paths]))
        case "huge":
            with path.open("wb") as file:
                file.truncate(2**40)
        case "symlink":
            path.unlink()
            path.symlink_to(rng.choice(("/dev/zero", "/dev/null", "nowhere", "/", path)))
        case "folder":
            path.unlink()
            path.mkdir()
        case "exchanged":
            other = rng.choice(paths)
            path.write_bytes(other.read_bytes())
        case "renamed":
            path.rename(path.with_name("20000101T000000" + path.name[15:]))
        case "extra":
            (path.parent / rng.choice(("x.mark1", "\udcff.mark1", ".mark1", "a.mark2", "b.tmp"))).write_bytes(
                data
            )
    return kind


def _clear(root: Path) -> None:
    for folder in root.iterdir():
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink()


TARGETS = (Target("spill-files", _spilled),)
