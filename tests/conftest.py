"""Databases for the tests, and the PostgreSQL server under them.

`store_url` runs a test twice, on a new SQLite file and on a new PostgreSQL database, both ready for use. A test that is
marked `filled(by=fill)` begins with a copy of what `fill(url)` put into such a database once. A test that is marked
`serializable` runs a third time, on PostgreSQL with `isolation="serializable"`. With `--coalesce MODE` every store of
the run gathers its calls in that mode, unless a test names another.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support import compiled, databases
from tests.support.filled import Originals
from tests.support.postgres import NoPostgresError, Server, postgres_server
from tokencustody.database import postgresql, registry
from tokencustody.database.coalescing import Coalesce
from tokencustody.database.faults import FAULT_POINTS
from tokencustody.database.transactions import Database
from tokencustody.states import Isolation
from tokencustody.store import CaptureStore, open_store
from tokencustody.store.base import DatabaseClient
from tokencustody.store.staging import SqlStagingStore
from tokencustody.terminal import waiting

settings.register_profile("tokencustody", deadline=None, derandomize=True, max_examples=100, print_blob=True)
settings.load_profile("tokencustody")

compiled.share()

_SERVER = pytest.StashKey[Server]()
# Those of the workers of this run.
_servers: set[str | None] = set()

# Runs in every mode, unless the run is limited to one.
_IN_EVERY_MODE = "test_behaviour"
_DATABASES = ("sqlite", "postgresql")
_SERIALIZABLE = "serializable"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--coalesce",
        choices=list(Coalesce),
        help="which concurrent calls share a transaction in this run: process (the default), rollout or off",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.module.__name__.rpartition(".")[2]
    also = [_SERIALIZABLE] if metafunc.definition.get_closest_marker("serializable") else []
    # By a mark, which takes the place of the fixture's own parameters.
    if name == _IN_EVERY_MODE and metafunc.config.getoption("coalesce") is None:
        # Where each is serializable none are gathered, whatever the mode.
        modes = [*product(Coalesce, _DATABASES), *product([Coalesce.PROCESS], also)]
        mark = pytest.mark.parametrize(("default_coalesce", "store_url"), modes, indirect=True)
        metafunc.definition.add_marker(mark)
    elif also:
        mark = pytest.mark.parametrize("store_url", [*_DATABASES, *also], indirect=True)
        metafunc.definition.add_marker(mark)


@pytest.fixture(autouse=True)
def default_coalesce(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Coalesce:
    """The mode of the stores of this process that are not given another."""
    mode: Coalesce = getattr(
        request, "param", Coalesce(request.config.getoption("coalesce") or Coalesce.PROCESS)
    )
    _let_default(monkeypatch, "coalesce", mode)
    return mode


def _let_default(monkeypatch: pytest.MonkeyPatch, option: str, value: str) -> None:
    made = (Database, DatabaseClient, SqlStagingStore, CaptureStore)
    for function in (open_store, *(each.__init__ for each in made)):
        monkeypatch.setitem(function.__kwdefaults__ or {}, option, value)


def pytest_configure() -> None:
    """Let Ctrl-C end what the tests start. In the background of a shell it is ignored, and all below inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Bring up PostgreSQL before the first test, if one asks for it, so that the header can name it."""
    # What was collected stays to the end. Else each full collection of garbage looks through all of it.
    gc.freeze()
    wanted = {"postgres", "store_url"}
    if not session.config.option.collectonly and any(
        wanted.intersection(getattr(item, "fixturenames", ())) for item in session.items
    ):
        _running_server(session.config)


def _running_server(config: pytest.Config) -> Server:
    if _SERVER not in config.stash:
        stack = ExitStack()
        # Runs when pytest ends, for whatever reason, after the last fixture.
        config.add_cleanup(stack.close)
        try:
            config.stash[_SERVER] = stack.enter_context(postgres_server())
        except NoPostgresError as exc:
            getattr(config, "workeroutput", {})["no server"] = str(exc)
            pytest.exit(str(exc), returncode=pytest.ExitCode.USAGE_ERROR)
    return config.stash[_SERVER]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let a worker tell which server it had to the process that reports."""
    if server := session.config.stash.get(_SERVER, None):
        getattr(session.config, "workeroutput", {})["server"] = str(server)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Hear of a worker that has ended which server it had, or why none."""
    said = getattr(node, "workeroutput", {})
    _servers.add(said.get("server"))
    if "no server" in said:
        pytest.exit(said["no server"], returncode=pytest.ExitCode.USAGE_ERROR)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which PostgreSQL was used."""
    servers = {str(terminalreporter.config.stash.get(_SERVER, None)), *map(str, _servers)} - {"None"}
    terminalreporter.write_line(f"database: {', '.join(sorted(servers)) or 'PostgreSQL was not started'}")


@pytest.fixture(scope="session")
def postgres(pytestconfig: pytest.Config) -> Server:
    """The server itself; most tests want a database of their own."""
    return _running_server(pytestconfig)


@pytest.fixture(scope="session")
def _migrated_template(postgres: Server) -> Iterator[str]:
    from tokencustody.schema import migrate

    name = databases.create(postgres, "template")
    try:
        migrate.upgrade(postgres.url_of(name))
        yield name
    finally:
        databases.drop(postgres, name)


@pytest.fixture
def empty_postgres_url(postgres: Server) -> Iterator[str]:
    """A new PostgreSQL database without any table."""
    with databases.fresh(postgres) as url:
        yield url


@pytest.fixture(scope="session")
def _originals() -> Iterator[Originals]:
    with closing(Originals()) as originals:
        yield originals


@pytest.fixture
def _fill(request: pytest.FixtureRequest) -> Callable[[str], object] | None:
    """What the mark `filled` of the test gives."""
    mark = request.node.get_closest_marker("filled")
    return mark.kwargs["by"] if mark else None


@pytest.fixture
def postgres_url(
    postgres: Server, _migrated_template: str, _originals: Originals, _fill: Callable[[str], object] | None
) -> Iterator[str]:
    """A new PostgreSQL database on the newest revision."""
    template = _originals.template(postgres, _migrated_template, _fill) if _fill else _migrated_template
    with databases.fresh(postgres, template) as url:
        yield url


@pytest.fixture
def tmp_path(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder of the test's own, for what is durable on the disk that `TOKENCUSTODY_TEST_DISK` names."""
    disk = os.environ.get("TOKENCUSTODY_TEST_DISK")
    if disk is None or request.node.get_closest_marker("disk") is None:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="tokencustody-", dir=disk) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def _migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokencustody.schema import migrate

    file = tmp_path_factory.mktemp("template") / "captures.db"
    migrate.upgrade(file)
    return file


@pytest.fixture
def new_sqlite_url(tmp_path: Path) -> str:
    """A SQLite file that does not exist yet; the first store to open it creates it."""
    return f"sqlite:///{tmp_path / 'captures.db'}"


@pytest.fixture
def sqlite_url(
    new_sqlite_url: str, _migrated_file: Path, _originals: Originals, _fill: Callable[[str], object] | None
) -> str:
    """A new SQLite file on the newest revision."""
    file = _originals.file(_migrated_file.parent, _migrated_file, _fill) if _fill else _migrated_file
    shutil.copy(file, new_sqlite_url.removeprefix("sqlite:///"))
    return new_sqlite_url


@pytest.fixture(autouse=True)
def spill_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where marks of this test and of the processes it starts are spilled, instead of the person's home."""
    folder = tmp_path / "spill"
    monkeypatch.setenv("TOKENCUSTODY_SPILL", str(folder))
    return folder


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no command of this process tell of a wait that comes of a loaded machine."""
    monkeypatch.setattr(waiting, "SILENCE", 600.0)


@pytest.fixture(autouse=True)
def _fsync_is_asked_when_connecting_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a slow machine would have another statement here and there, where tests count or cut them."""
    monkeypatch.setattr(postgresql, "_ASK_AGAIN", 1e9)


@pytest.fixture(autouse=True)
def _nothing_left_open() -> Iterator[None]:
    """Fail a test that leaves a store open, a connection checked out, a thread of a store or a fault behind."""
    yield
    left = registry.open_engines()
    assert not [engines for engines in left if engines.checked_out()]
    assert not left
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("tokencustody")]
    assert not FAULT_POINTS


@pytest.fixture(params=_DATABASES)
def store_url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database that is ready for a store, once of each kind."""
    if request.param == _SERIALIZABLE:
        _let_default(monkeypatch, "isolation", Isolation.SERIALIZABLE)
    url: str = request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url")
    return url


@pytest.fixture
def default_isolation(store_url: str) -> Isolation:
    """The level of the stores of this process that are not given another."""
    return Isolation((open_store.__kwdefaults__ or {})["isolation"])


@pytest.fixture(params=_DATABASES)
def unused_store_url(request: pytest.FixtureRequest) -> str:
    """A database that no store has opened, once of each kind; on SQLite the first one creates the file."""
    url: str = request.getfixturevalue("new_sqlite_url" if request.param == "sqlite" else "postgres_url")
    return url


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[CaptureStore]:
    """An open store on a new database, once on SQLite and once on PostgreSQL."""
    async with open_store(store_url, run="run-1", writer="test-writer") as opened:
        yield opened


@pytest.fixture
def faults() -> Iterator[dict[str, object]]:
    """The table of fault points, empty again afterwards."""
    yield FAULT_POINTS  # type: ignore[misc]
    FAULT_POINTS.clear()
