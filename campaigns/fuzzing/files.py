"""SQLite files with flipped bytes, cut short or beside the wrong log: named errors, and no call that was changed."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from campaigns.fuzzing.cases import NAMED, Case, Target, attempt
from campaigns.fuzzing.mutations import flipped
from campaigns.fuzzing.rows import Written
from tokencustody.schema import migrate
from tokencustody.store import open_store

_DEADLINE = 2.0
_NAMES = ("", "-wal", "-shm")
_WAL_HEADER, _FRAME_HEADER = 32, 24
# The first byte of a page tells its kind; any other begins a page of an overflow chain or a free one.
_KINDS = {0x02: "interior index", 0x05: "interior table", 0x0A: "leaf index", 0x0D: "leaf table"}

Files = dict[str, bytes]
Place = tuple[str, int, int]


class _Database:
    """A database as a crash leaves it: two rollouts, one of them in the log only; and the log of another database."""

    def __init__(self, seed: str, folder: Path) -> None:
        rng = random.Random(seed)
        self.written = [Written(rng, "fuzz-0"), Written(rng, "fuzz-1")]
        self.files = asyncio.run(self._made(folder / "one.db"))
        self.others = asyncio.run(self._made(folder / "other.db", reverse=True))
        self.closed = {"": (folder / "one.db").read_bytes()}

    async def _made(self, path: Path, *, reverse: bool = False) -> Files:
        first, second = reversed(self.written) if reverse else self.written
        async with open_store(path) as store:
            await first.write(store)
        async with open_store(path) as store:
            await second.write(store)
            return _read(path)


def _read(path: Path) -> Files:
    return {name: Path(f"{path}{name}").read_bytes() for name in _NAMES}


@contextmanager
def _damaged(seed: str) -> Iterator[Case]:
    with tempfile.TemporaryDirectory() as made:
        database = _Database(seed, Path(made))
        folder = Path(made) / "case"

        def case(rng: random.Random) -> str:
            files = dict(rng.choice((database.files, database.closed)))
            damage = rng.choice(_DAMAGES)(rng, files, database.others)
            attachments = tuple(written.attachment for written in database.written)
            for written in database.written:
                # Its pages are whole, but those of an index and of its table may be of two databases.
                written.mistakable = attachments if damage == "log of another" else ()
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for name, data in files.items():
                (folder / f"case.db{name}").write_bytes(data)
            return f"{damage}: {asyncio.run(_use(rng, database, folder / 'case.db'))}"

        yield case


async def _use(rng: random.Random, database: _Database, path: Path) -> str:
    ends: set[str] = set()
    async with open_store(path, deadline=_DEADLINE, spill=path.parent / "spill") as store:
        for written in database.written:
            ends.update(await written.attempt_all(written.reads(store, str(path))))
        ends.update(await database.written[0].attempt_all(database.written[0].writes(store)))
    looks: tuple[Callable[[Path], object], ...] = (migrate.current, migrate.check)
    for look in looks:
        # Alembic and SQLAlchemy read the schema, which may be damaged too.
        _, exc = await asyncio.to_thread(attempt, partial(look, path), NAMED)
        if exc is not None:
            ends.add(type(exc).__name__)
    for worst in ("CorruptEntryError", "StoreUnavailableError", "SchemaMismatchError", "calls missing"):
        if worst in ends:
            return worst
    return "same values"


def _flip(rng: random.Random, files: Files, _others: Mapping[str, bytes]) -> str:
    """Flip one to four bits in one kind of place."""
    places = _places(files)
    kind = rng.choice(sorted(places))
    for _ in range(rng.choice((1, 1, 2, 4))):
        name, start, end = rng.choice(places[kind])
        files[name] = flipped(rng, files[name], start, end)
    return kind


def _places(files: Files) -> dict[str, list[Place]]:
    found: defaultdict[str, list[Place]] = defaultdict(list)
    main = files[""]
    size = int.from_bytes(main[16:18], "big") or 4096
    size = 65536 if size == 1 else size
    found["header"].append(("", 0, 100))
    found["schema"].append(("", 100, size))
    for start in range(size, len(main), size):
        found[_KINDS.get(main[start], "overflow")].append(("", start, start + size))
        if main[start] in _KINDS:
            found["page header"].append(("", start, start + 12))
    log = files.get("-wal", b"")
    if log:
        found["log header"].append(("-wal", 0, _WAL_HEADER))
        for start in range(_WAL_HEADER, len(log), _FRAME_HEADER + size):
            found["frame header"].append(("-wal", start, start + _FRAME_HEADER))
            found["frame"].append(("-wal", start + _FRAME_HEADER, start + _FRAME_HEADER + size))
    if files.get("-shm"):
        found["shared memory"].append(("-shm", 0, 136))
    return found


def _overwrite(rng: random.Random, files: Files, others: Mapping[str, bytes]) -> str:
    """Put zeros, noise or the same page of another database in the place of a page."""
    start = rng.randrange(len(files[""]) // 4096) * 4096
    page = rng.choice((bytes(4096), rng.randbytes(4096), others[""][start : start + 4096]))
    files[""] = files[""][:start] + page + files[""][start + len(page) :]
    return "page overwritten"


def _truncate(rng: random.Random, files: Files, _others: Mapping[str, bytes]) -> str:
    name = rng.choice([name for name, data in files.items() if data])
    size = rng.choice((0, 50, 100, 4096, rng.randrange(len(files[name]))))
    files[name] = files[name][:size]
    return f"{name or 'file'} cut short"


def _lose(rng: random.Random, files: Files, others: Mapping[str, bytes]) -> str:
    """Take a file away, empty it, or put that of another database in its place."""
    kind = rng.choice(("log of another", "file is empty", "no file", "no shared memory", "file is text"))
    match kind:
        case "log of another":
            files["-wal"] = others["-wal"]
            files.pop("-shm", None)
        case "file is empty":
            files[""] = b""
        case "no file":
            del files[""]
        case "no shared memory":
            files.pop("-shm", None)
        case "file is text":
            files[""] = rng.choice((b"hello\n" * 2000, b"\0" * 8192, b"SQLite format 3\0", b"x"))
    return kind


_DAMAGES: tuple[Callable[[random.Random, Files, Mapping[str, bytes]], str], ...] = (
    _flip,
    _flip,
    _flip,
    _flip,
    _overwrite,
    _truncate,
    _lose,
)

TARGETS = (Target("sqlite-files", _damaged),)
